//! Binding a pod to its StickyIP: which one it is, the protocol's steps, and what is reserved on this node.
//!
//! Must never leave an unclaimed address reserved for a refused binding, and never try slots without end.

use std::time::Duration;

use thiserror::Error;

use super::addresses::{AddressSource, NodeAddresses, ThisNode};
use crate::cluster::api::client::ApiError;
use crate::cluster::objects::{ClaimantRef, StickyIP};
use crate::cluster::protocol::bind::{BindError, Binder, StickyRead};
use crate::cluster::protocol::step::Refusal;
use crate::cluster::protocol::sticky_identity;
use crate::cluster::writer::apply::ApiWriter;
use crate::names::{Attachment, PodIdentity, StickyKey};
use crate::policy::PolicyError;
use crate::policy::handover::Attached;
use crate::policy::lifetime::retention::asked_by;
use crate::policy::selection::claimant::Claimant;
use crate::policy::selection::facts::PodFacts;
use crate::policy::selection::pin::pin_of;
use crate::policy::selection::slot::{MAX_SLOT_TRIES, slot_name};
use crate::store::{Disk, StoreError};

/// The pod that is bound.
#[derive(Clone, Copy)]
pub(crate) struct PodToBind<'a> {
    pub(crate) facts: &'a PodFacts,
    /// With the uid that the runtime knows, which later DELs and other nodes can compare.
    pub(crate) identity: &'a PodIdentity,
    /// Its sandbox, or the one that is prepared for it.
    pub(crate) attachment: &'a Attachment,
    /// How long to wait for an old sandbox or another node.
    pub(crate) patience: Duration,
}

pub(crate) struct BoundPod<'a, D: Disk, L> {
    pub(crate) sticky: StickyIP,
    pub(crate) key: StickyKey,
    pub(crate) addresses: NodeAddresses<'a, D>,
    /// What the caller holds since before the first write.
    pub(crate) lock: L,
}

/// Why a pod is not bound.
#[derive(Debug, Error)]
pub(crate) enum BindPodError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The pod's pin cannot be followed.
    #[error(transparent)]
    Pin(#[from] PolicyError),
    #[error(transparent)]
    Bind(BindError),
    #[error("another process changes the pool entries of StickyIP {0}")]
    PoolLocked(StickyKey),
    #[error("other pods of the workload took all {MAX_SLOT_TRIES} slots that pod {0} chose")]
    SlotsTaken(PodIdentity),
}

impl<'a> PodToBind<'a> {
    /// Binds the pod. `own` is the StickyIP of the pod's own name, if it was read. A pod of a Deployment that
    /// loses its slot to another chooses again.
    ///
    /// `pool_lock` is taken per StickyIP before the first write for it, where the caller has to hold it until
    /// what it writes afterwards is in place; none if another process has it.
    ///
    /// Each write has its own precondition (the protocol's); what is reserved on this node is released only
    /// if a live read finds no claim on it.
    /// Errors: what was written then is continued or undone by the next attempt, or by repair.
    pub(crate) async fn bind<D: Disk, L>(
        &self,
        api_writer: &mut ApiWriter<'_>,
        node: ThisNode<'a, D>,
        source: &'a AddressSource,
        own: StickyRead,
        mut pool_lock: impl FnMut(&StickyKey) -> Result<Option<L>, StoreError>,
    ) -> Result<BoundPod<'a, D, L>, BindPodError> {
        let claimant = Claimant::of(self.facts);
        let is_own_name = claimant.fixed_name() == Some(self.facts.name.as_str());
        let mut own = if is_own_name { own } else { StickyRead::NotRead };
        for _ in 0..MAX_SLOT_TRIES {
            let slot = match claimant.fixed_name() {
                Some(_) => None,
                None => Some(sticky_identity::choose(api_writer.api(), &claimant, self.facts).await?),
            };
            let binder = self.binder(node.name, &claimant, slot)?;
            let Some(lock) = pool_lock(&binder.key)? else {
                return Err(BindPodError::PoolLocked(binder.key));
            };
            let key = binder.key.clone();
            let mut addresses = NodeAddresses::new(node, source, key.clone(), self.identity, self.attachment);
            let read = std::mem::replace(&mut own, StickyRead::NotRead);
            let error = match binder.bind(api_writer, &mut addresses, read).await {
                Ok(sticky) => return Ok(BoundPod { sticky, key, addresses, lock }),
                Err(BindError::Api(error)) => return Err(error.into()),
                Err(error) => error,
            };
            // In other cases a write may be in doubt, and what it claims must stay reserved.
            if matches!(error, BindError::Refused(_) | BindError::Waited { .. }) {
                api_writer.api_mut().restart_time();
                addresses.unreserve_unclaimed(api_writer).await?;
            }
            // Only a slot that another has taken is chosen again.
            if slot.is_none() || !matches!(error, BindError::Refused(Refusal::Handover { .. })) {
                return Err(BindPodError::Bind(error));
            }
        }
        Err(BindPodError::SlotsTaken(self.identity.clone()))
    }

    /// The protocol's input for this pod: the StickyIP of its fixed name, or of this slot.
    pub(crate) fn binder(
        &self,
        node: &str,
        claimant: &Claimant,
        slot: Option<u32>,
    ) -> Result<Binder, PolicyError> {
        let (facts, attachment_id) = (self.facts, self.attachment.id());
        let name = match claimant.fixed_name() {
            Some(name) => name.to_owned(),
            None => slot_name(&claimant.workload().name, slot.unwrap_or_default()),
        };
        let reference: ClaimantRef = sticky_identity::reference(claimant, slot);
        let pin = pin_of(facts, reference.ordinal)?;
        Ok(Binder {
            asker: Attached { node: node.to_owned(), pod_uid: facts.uid.clone(), attachment_id },
            pod: facts.name.clone(),
            key: StickyKey { namespace: facts.namespace.clone(), name },
            claimant: reference,
            workload: sticky_identity::workload(claimant),
            retention: asked_by(facts),
            pinned: pin.map(|pin| pin.addresses).unwrap_or_default(),
            patience: self.patience,
        })
    }
}
