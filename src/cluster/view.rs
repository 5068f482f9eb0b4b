//! What the protocol reads of an object. Must never hold more: what is not here cannot influence a decision.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::cluster::objects::{
    AddressClaim, ClaimPhase, ClaimantKind, ClaimedPod, StickyIP, StickyPhase, WorkloadRef,
};
use crate::names::StickyKey;
use crate::policy::handover::Attached;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StickyView {
    pub key: StickyKey,
    pub uid: String,
    pub resource_version: String,
    pub addresses: Vec<IpAddr>,
    pub claimant: ClaimantKind,
    pub workload: WorkloadRef,
    pub attached: Option<Attached>,
    pub was_attached: bool,
    pub in_conflict: bool,
    pub deleting: bool,
}

impl StickyView {
    /// Nothing is attached, and nothing ever was: its creator may be between two writes.
    pub fn never_attached(&self) -> bool {
        self.attached.is_none() && !self.was_attached
    }
}

impl From<&StickyIP> for StickyView {
    fn from(object: &StickyIP) -> Self {
        let status = object.status.as_ref();
        Self {
            key: StickyKey {
                namespace: object.metadata.namespace.clone().unwrap_or_default(),
                name: object.metadata.name.clone().unwrap_or_default(),
            },
            uid: object.metadata.uid.clone().unwrap_or_default(),
            resource_version: object.metadata.resource_version.clone().unwrap_or_default(),
            addresses: object.spec.addresses.clone(),
            claimant: object.spec.claimant.kind,
            workload: object.spec.workload.clone(),
            attached: status.and_then(|status| status.attachment.as_ref()).map(|attachment| Attached {
                node: attachment.node.clone(),
                pod_uid: attachment.pod_uid.clone(),
                attachment_id: attachment.attachment_id.clone(),
            }),
            was_attached: status.is_some_and(|status| status.last_seen.is_some()),
            in_conflict: status.is_some_and(|status| status.phase == Some(StickyPhase::Conflict)),
            deleting: object.metadata.deletion_timestamp.is_some(),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ClaimView {
    pub address: IpAddr,
    pub uid: String,
    pub resource_version: String,
    pub phase: ClaimPhase,
    pub sticky_ref: StickyKey,
    /// The uid it is sealed to.
    pub sticky_uid: Option<String>,
    /// The node whose block it is of.
    pub home_node: Option<String>,
    pub reason: Option<String>,
    /// The pod on the home node that had the address before it was claimed.
    pub pod: Option<ClaimedPod>,
    /// It is quarantined, and its former claimant does not get it back.
    pub released: bool,
    /// Who has the address on its home node although it is claimed for another.
    pub in_use_by: Option<String>,
}

impl ClaimView {
    /// Sealed to no StickyIP: the address cannot be used through it yet.
    pub(crate) fn unsealed(&self) -> bool {
        matches!(self.phase, ClaimPhase::Requested | ClaimPhase::Refused | ClaimPhase::Granted)
    }

    /// Its home node, if it has one, has reserved the address.
    pub(crate) fn is_granted(&self) -> bool {
        !matches!(self.phase, ClaimPhase::Requested | ClaimPhase::Refused)
    }

    /// Another pod than this had the address before it was claimed, and may have it still.
    pub(crate) fn is_with_another(&self, pod_uid: &str) -> bool {
        self.pod.as_ref().is_some_and(|pod| pod.uid != pod_uid)
    }

    pub(crate) fn sealed_to(&self, sticky_uid: &str) -> bool {
        self.phase == ClaimPhase::Bound && self.sticky_uid.as_deref() == Some(sticky_uid)
    }
}

impl From<&AddressClaim> for ClaimView {
    fn from(object: &AddressClaim) -> Self {
        Self {
            address: object.spec.address,
            uid: object.metadata.uid.clone().unwrap_or_default(),
            resource_version: object.metadata.resource_version.clone().unwrap_or_default(),
            phase: object.spec.phase,
            sticky_ref: object.spec.sticky_ref.clone(),
            sticky_uid: object.spec.sticky_uid.clone(),
            home_node: object.spec.home_node.clone(),
            reason: object.spec.reason.clone(),
            pod: object.spec.pod.clone(),
            released: object.spec.phase == ClaimPhase::Quarantined && object.spec.released == Some(true),
            in_use_by: object.spec.in_use_by.clone(),
        }
    }
}

pub(crate) type ClaimsByAddress = BTreeMap<IpAddr, ClaimView>;

/// Where an address comes from, and so who may claim it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Origin {
    /// A Sticky pool: the first to create the claim has it.
    StickyPool { range: IpNet },
    /// The block of the node that asks, which has reserved the address in its own store for this claimant.
    OwnBlock { node: String, block: IpNet },
    /// Another node's block: that node must grant it.
    ForeignBlock { home: String, block: IpNet },
    /// Outside every pool and every block.
    Nowhere,
}

impl Origin {
    /// Whether any node may claim it at any time, without a grant. Then its StickyIP may be created before
    /// its claim: the next ADD or repair that finds one without the other can continue.
    pub fn needs_no_grant(&self) -> bool {
        matches!(self, Self::StickyPool { .. })
    }

    /// The phase in which a claim on such an address is created before its StickyIP; none if it must not be.
    pub fn first_phase(&self) -> Option<ClaimPhase> {
        match self {
            Self::StickyPool { .. } | Self::OwnBlock { .. } => Some(ClaimPhase::Granted),
            Self::ForeignBlock { .. } => Some(ClaimPhase::Requested),
            Self::Nowhere => None,
        }
    }

    /// The home node and the range, as in a claim.
    pub fn home_and_block(&self) -> (Option<&str>, Option<IpNet>) {
        match self {
            Self::StickyPool { range } => (None, Some(*range)),
            Self::OwnBlock { node, block } => (Some(node), Some(*block)),
            Self::ForeignBlock { home, block } => (Some(home), Some(*block)),
            Self::Nowhere => (None, None),
        }
    }
}
