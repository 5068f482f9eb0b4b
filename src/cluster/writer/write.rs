//! The writes of the protocol, each with the precondition that makes it safe. Must never be sent without it.

use std::net::IpAddr;

use kube::ResourceExt;
use kube::api::{DeleteParams, Preconditions};
use serde_json::{Value, json};

use crate::cluster::objects::{ClaimPhase, ClaimantRef, ClaimedPod, WorkloadRef};
use crate::cluster::view::Origin;
use crate::names::StickyKey;
use crate::policy::handover::{Attached, Takeover};
use crate::policy::lifetime::retention::Retention;

#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Precondition {
    pub uid: String,
    pub resource_version: String,
}

impl Precondition {
    /// The state in which this object was read.
    pub(crate) fn of(object: &impl ResourceExt) -> Self {
        Self {
            uid: object.uid().unwrap_or_default(),
            resource_version: object.resource_version().unwrap_or_default(),
        }
    }

    /// In a merge patch these two make the server refuse it on any other state of the object.
    pub(crate) fn metadata(&self) -> Value {
        json!({"uid": self.uid, "resourceVersion": self.resource_version})
    }

    /// A deletion of exactly this state.
    pub(crate) fn delete_params(&self) -> DeleteParams {
        let (uid, resource_version) = (Some(self.uid.clone()), Some(self.resource_version.clone()));
        DeleteParams::default().preconditions(Preconditions { uid, resource_version })
    }
}

/// One write. Creations fail if the name exists; all others if the object is not exactly as it was read.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Write {
    /// Create a claim: take the lock on an address, or ask its home node for it.
    CreateClaim {
        address: IpAddr,
        sticky_ref: StickyKey,
        /// Granted or Requested; Bound exactly if it is sealed at once.
        phase: ClaimPhase,
        /// The uid of the StickyIP that it is sealed to, if that exists already.
        sticky_uid: Option<String>,
        origin: Origin,
        /// The pod that has the address already, if its home node is asked for that.
        pod: Option<ClaimedPod>,
    },
    /// The home node's answer to a Requested claim.
    AnswerClaim {
        address: IpAddr,
        at: Precondition,
        /// Why it is refused; none if it is granted. Before that the node reserves in its own store.
        refused: Option<String>,
    },
    /// Seal a Granted or Quarantined claim to a StickyIP of this address and this uid; never a Bound one.
    SealClaim { address: IpAddr, at: Precondition, sticky_uid: String },
    /// Quarantine a claim whose StickyIP is gone.
    QuarantineClaim {
        address: IpAddr,
        at: Precondition,
        sticky_ref: StickyKey,
        /// The uid that must be gone, by a live read right before this write.
        gone_uid: String,
        released: bool,
    },
    /// The pod that had the address before it was claimed is gone: written by the home node, which has proof.
    ClearPod { address: IpAddr, at: Precondition },
    /// Say on a claim who has the address on its home node although it is claimed for another, or that this
    /// is over: written by the home node, or with the proof that it is dead.
    ReportUse { address: IpAddr, at: Precondition, in_use_by: Option<String> },
    /// Delete a claim that is unsealed, or whose quarantine is over.
    DeleteClaim { address: IpAddr, at: Precondition },
    /// Create a StickyIP: bind a claimant's name to addresses whose claims it has, or will have before a
    /// sandbox is attached.
    CreateSticky {
        key: StickyKey,
        addresses: Vec<IpAddr>,
        claimant: ClaimantRef,
        workload: WorkloadRef,
        retention: Retention,
    },
    /// Delete a StickyIP to which nothing is attached.
    DeleteSticky { key: StickyKey, at: Precondition },
    Attach {
        key: StickyKey,
        at: Precondition,
        attached: Attached,
        /// Why it replaces another; none if nothing was attached.
        takeover: Option<Takeover>,
    },
    /// Detach the sandbox that is attached.
    Detach {
        key: StickyKey,
        at: Precondition,
        /// The proof that its node is dead; none if the sandbox came to its end.
        proof: Option<Takeover>,
    },
    /// Write down the MAC that the attached pod has.
    RecordMac { key: StickyKey, at: Precondition, mac: String },
    /// Say on a StickyIP that another holds one of its addresses.
    MarkConflict { key: StickyKey, at: Precondition, address: IpAddr, held_by: StickyKey },
}

impl Write {
    /// Creates the claim of a StickyIP on an address of this origin; none if it must not be claimed. For an
    /// existing StickyIP it is sealed at once, unless a home node must grant it first.
    pub(crate) fn create_claim(
        address: IpAddr,
        sticky_ref: &StickyKey,
        origin: &Origin,
        sticky_uid: Option<&str>,
        pod: Option<&ClaimedPod>,
    ) -> Option<Self> {
        let first = origin.first_phase()?;
        let is_asked = first == ClaimPhase::Requested;
        let sticky_uid = sticky_uid.filter(|_| !is_asked).map(str::to_owned);
        Some(Self::CreateClaim {
            address,
            sticky_ref: sticky_ref.clone(),
            phase: if sticky_uid.is_some() { ClaimPhase::Bound } else { first },
            sticky_uid,
            origin: origin.clone(),
            pod: pod.filter(|_| is_asked).cloned(),
        })
    }

    /// The name of the write, for logs and metrics.
    pub fn word(&self) -> &'static str {
        match self {
            Self::CreateClaim { .. } => "create claim",
            Self::AnswerClaim { .. } => "answer claim",
            Self::SealClaim { .. } => "seal claim",
            Self::QuarantineClaim { .. } => "quarantine claim",
            Self::ClearPod { .. } => "clear pod",
            Self::ReportUse { .. } => "report use",
            Self::DeleteClaim { .. } => "delete claim",
            Self::CreateSticky { .. } => "create StickyIP",
            Self::DeleteSticky { .. } => "delete StickyIP",
            Self::Attach { .. } => "attach",
            Self::Detach { .. } => "detach",
            Self::RecordMac { .. } => "record MAC",
            Self::MarkConflict { .. } => "mark conflict",
        }
    }

    /// The StickyIP and uid that a live read must show to be gone right before this write. A uid is never
    /// used again, so what the read shows stays true.
    pub fn must_be_gone(&self) -> Option<(&StickyKey, &str)> {
        match self {
            Self::QuarantineClaim { sticky_ref, gone_uid, .. } => Some((sticky_ref, gone_uid)),
            _ => None,
        }
    }
}
