//! DEL: the container's addresses go back, or are kept for their pod.
//!
//! By container, never by pod: a late or repeated DEL finds nothing of what a newer container has.

use crate::cni::{Attachment, CniError, Request};
use crate::plugin::{VerbContext, VerbLog, attachment};
use crate::store::StickyBinding;
use crate::store::{
    Decision, Disk, Keep, LockedStore, NodeTime, PendingUpdate, Phase, Record, StoreError, StoredRecord, Told,
};

pub(crate) fn run<D: Disk>(
    scene: &VerbContext<'_, D>,
    request: &Request,
    story: &mut VerbLog<'_>,
) -> Result<(), CniError> {
    let attachment = attachment(request)?;
    let stored = match scene.store.lock_existing()? {
        None => {
            story.tell(&[], "there is no store");
            None
        }
        Some(mut locked) => match locked.find_by_attachment(attachment)? {
            None => {
                locked.remove_draft(attachment)?;
                story.tell(&[], "this container has nothing");
                None
            }
            Some(stored) => {
                // A repeated DEL could not find it by its container id: somebody else must know how to.
                let attachment_id = stored.record.binding.as_ref().map(|binding| binding.container.as_str());
                if attachment_id.is_some_and(|attachment_id| attachment_id != attachment.container.as_str()) {
                    let note = detached_update(attachment, Some(&stored.record), scene.store.now());
                    locked.put_pending_update(attachment, &note)?;
                }
                let why = end_attachment(&mut locked, &stored, scene.store.now())?;
                story.tell(&stored.record.addresses, why);
                locked.commit()?;
                Some(stored)
            }
        },
    };
    detach_in_cluster(scene, request, stored.as_ref(), story)
}

/// Has the API server know that the sandbox has ended: at once, or by a note for the agent. An attachment of which this
/// node knows nothing may still stand there, if its ADD ended half way.
fn detach_in_cluster<D: Disk>(
    scene: &VerbContext<'_, D>,
    request: &Request,
    stored: Option<&StoredRecord>,
    story: &mut VerbLog<'_>,
) -> Result<(), CniError> {
    let attachment = attachment(request)?;
    let record = stored.map(|stored| &stored.record);
    if record.is_none() && is_not_sticky(scene, request, attachment)? {
        return Ok(());
    }
    let told = if record.is_none() { earlier_update(scene, attachment)? } else { None };
    let outcome = match (&scene.sticky.cluster, record.map(|record| &record.binding)) {
        (_, Some(None)) | (None, None) => return Ok(()),
        (None, Some(Some(_))) => Err("sticky.cluster is missing or cannot be read".to_owned()),
        (Some(conf), binding) => {
            let binding = binding.map_or(told.as_ref(), Option::as_ref);
            crate::plugin::cluster::del::detach(
                scene,
                conf,
                (request.pod.as_ref(), attachment),
                binding,
                story,
            )
        }
    };
    let Err(why) = outcome else {
        return match scene.store.lock_existing()? {
            Some(mut locked) => Ok(locked.clear_pending_update(attachment)?),
            None => Ok(()),
        };
    };
    tracing::warn!(container = attachment.container.as_str(), why, "left a note for the agent");
    let mut locked = scene.store.lock()?;
    if told.is_some() {
        // The earlier DEL's note knows more than this one does.
        return Ok(());
    }
    Ok(locked.put_pending_update(attachment, &detached_update(attachment, record, scene.store.now()))?)
}

/// What an earlier DEL of this sandbox knew of its attachment and could not tell: it has freed the record since.
fn earlier_update<D: Disk>(
    scene: &VerbContext<'_, D>,
    attachment: &Attachment,
) -> Result<Option<StickyBinding>, CniError> {
    let Some(mut locked) = scene.store.lock_existing()? else { return Ok(None) };
    let note = locked.pending_update_of(attachment)?.filter(|note| note.what == Told::Ended);
    Ok(note.and_then(|note| {
        Some(StickyBinding {
            namespace: note.namespace?,
            name: note.name?,
            container: note.attachment_id.unwrap_or(note.container),
        })
    }))
}

/// Whether this node knows, without asking anybody, that the pod has nothing in the cluster. Where Cilium picks the
/// addresses, pods that are not sticky leave no record, and there are many of them.
fn is_not_sticky<D: Disk>(
    scene: &VerbContext<'_, D>,
    request: &Request,
    attachment: &Attachment,
) -> Result<bool, CniError> {
    let Some(pod) = &request.pod else { return Ok(false) };
    if !scene.sticky.selects(pod) {
        return Ok(true);
    }
    let (Some(uid), Some(mut locked)) = (pod.uid(), scene.store.lock_existing()?) else { return Ok(false) };
    let decision = locked.prepared(uid, &attachment.interface)?;
    let is_decided =
        decision.is_some_and(|decision| decision.sticky.is_none() && decision.is_for(pod, scene.store.now()));
    // What was sticky once may have been attached by an ADD that ended before it read that the pod is not.
    let claimant = crate::store::Claimant::new(pod, &attachment.interface);
    Ok(is_decided && locked.find_by_claimant(&claimant)?.is_none())
}

/// The note that this sandbox has ended.
pub(crate) fn detached_update(
    attachment: &Attachment,
    record: Option<&Record>,
    now: &NodeTime,
) -> PendingUpdate {
    let binding = record.and_then(|record| record.binding.as_ref());
    let container = attachment.container.as_str();
    PendingUpdate {
        what: Told::Ended,
        container: container.to_owned(),
        interface: attachment.interface.as_str().to_owned(),
        namespace: binding.map(|binding| binding.namespace.clone()),
        name: binding.map(|binding| binding.name.clone()),
        attachment_id: binding.map(|binding| binding.container.clone()).filter(|known| known != container),
        uid: record.and_then(|record| record.pod.as_ref()?.uid().map(str::to_owned)),
        at: now.clone(),
    }
}

/// Ends an attachment, and says what became of its addresses.
pub(crate) fn end_attachment<D: Disk>(
    locked: &mut LockedStore<'_, D>,
    stored: &StoredRecord,
    now: &NodeTime,
) -> Result<&'static str, StoreError> {
    if let Some(uid) = stored.record.pod.as_ref().and_then(|pod| pod.uid())
        && stored.record.binding.as_ref().is_some_and(|known| known.container == Decision::attachment_id(uid))
    {
        // Used up; a crash may have left it.
        locked.remove_decision(uid)?;
    }
    if stored.record.keep == Keep::No {
        locked.free(stored)?;
        return Ok("freed");
    }
    let kept = Record { phase: Phase::Kept, since: now.clone(), netns: None, ..stored.record.clone() };
    locked.put(&kept, Some(stored))?;
    Ok("kept for its pod")
}
