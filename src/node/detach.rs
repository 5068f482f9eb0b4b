//! Detaching a sandbox of this node that has ended: unpublish, detach in the API server, clear in the store.
//!
//! Must never detach what a newer sandbox of this node has, or what was promised to an ADD still to come.

use std::net::IpAddr;

use super::addresses::ThisNode;
use crate::cluster::cilium::pool::PublishConfig;
use crate::cluster::protocol::bind::read_sticky;
use crate::cluster::protocol::detach::{self, DetachError, Detached};
use crate::cluster::view::StickyView;
use crate::cluster::writer::apply::ApiWriter;
use crate::names::{AttachmentId, ContainerId, IfName, PodIdentity, StickyKey};
use crate::store::{ClaimantKey, Disk, LockedStore, StoreError};

pub(crate) struct EndedSandbox<'a> {
    pub(crate) key: &'a StickyKey,
    pub(crate) interface: &'a IfName,
    /// The ids by which the API server may know it; the first is its own.
    pub(crate) ids: &'a [AttachmentId],
    /// Its pod, if the StickyIP's state after this is to be kept for the pod's next ADD.
    pub(crate) snapshot_for: Option<&'a PodIdentity>,
}

pub(crate) enum DetachOutcome {
    Detached(Box<Detached>),
    /// Another sandbox is attached, or none.
    NotAttached,
    /// The StickyIP does not exist.
    NoStickyIP,
    /// This sandbox of the node has it now.
    InUseBy(ContainerId),
}

impl<D: Disk> ThisNode<'_, D> {
    /// Unpublishes and detaches a sandbox, then clears it in the store. `endpoint_gone` is asked after a live
    /// read has found the sandbox attached, and before the first write.
    ///
    /// The caller holds the claimant's pool lock: every process that prepares or publishes for the claimant
    /// on this node does so under it. The detach has the resourceVersion of the read as its precondition. The
    /// store is cleared before it, because others may have the address from then on: a record that still
    /// counted without the API server would give it to this pod again. If the process ends in between, the
    /// next attempt finds the attachment in the API server, or by its pending update.
    /// Errors: of `endpoint_gone`, of the store, or a [`DetachError`]. It can be tried again at any time.
    pub(crate) async fn detach<E: From<StoreError> + From<DetachError>>(
        &self,
        api_writer: &mut ApiWriter<'_>,
        config: &PublishConfig,
        sandbox: &EndedSandbox<'_>,
        endpoint_gone: impl AsyncFnOnce(&[IpAddr]) -> Result<(), E>,
    ) -> Result<DetachOutcome, E> {
        let EndedSandbox { key, interface, ids, snapshot_for } = *sandbox;
        let claimant = ClaimantKey::of_sticky(key, interface);
        let mut ended = Vec::new();
        {
            let mut locked = self.store.lock()?;
            // A newer sandbox that came while the API server was away may have the older one's id there.
            let current = locked.find_by_claimant(&claimant)?;
            if let Some(current) = current.filter(|current| current.record.is_attached(self.store.now())) {
                let attachment = &current.record.attachment;
                if ids.first() != Some(&attachment.id()) {
                    return Ok(DetachOutcome::InUseBy(attachment.container.clone()));
                }
            }
            // What is prepared for the pod's next sandbox has the same id as what was prepared for this one.
            for id in ids {
                if !locked.awaits_add(id, interface)? {
                    ended.push(id.clone());
                }
            }
        }
        // Waiting for the locks of this node was not the server's fault.
        api_writer.api_mut().restart_time();
        let read = read_sticky(api_writer, key).await.map_err(DetachError::from)?;
        let exists = read.is_some();
        let attached = read.filter(|read| {
            let attached = StickyView::from(read).attached;
            attached.is_some_and(|it| it.node == self.name && ended.contains(&it.attachment_id))
        });
        if let Some(sticky) = &attached {
            endpoint_gone(&sticky.spec.addresses).await?;
        }
        let mut locked = self.store.lock()?;
        locked.clear_attachment(&claimant, &ended)?;
        locked.commit()?;
        let detached = match attached {
            Some(sticky) => {
                detach::unpublish_and_detach(api_writer, self.name, config, sticky, &ended).await?
            }
            None => None,
        };
        // The runtime knows a static pod by another uid than the API server; only a read knows both.
        if let (Some(detached), Some(pod)) = (&detached, snapshot_for)
            && pod.uid() == Some(&detached.pod_uid)
        {
            keep_snapshot(&mut self.store.lock()?, &claimant, detached);
        }
        Ok(match detached {
            Some(detached) => DetachOutcome::Detached(Box::new(detached)),
            None if exists => DetachOutcome::NotAttached,
            None => DetachOutcome::NoStickyIP,
        })
    }
}

/// Keeps the StickyIP as this detach left it: the claimant's next ADD here can attach before it reads.
fn keep_snapshot<D: Disk>(locked: &mut LockedStore<'_, D>, claimant: &ClaimantKey, detached: &Detached) {
    let mut object = detached.object.clone();
    object.metadata.managed_fields = None;
    let kept = match locked.find_by_claimant(claimant) {
        Ok(Some(_)) => locked.save_detached_snapshot(claimant, &object),
        other => other.map(drop),
    };
    if let Err(error) = kept {
        tracing::debug!(%error, "no snapshot of the StickyIP; the claimant's next ADD reads first");
    }
}
