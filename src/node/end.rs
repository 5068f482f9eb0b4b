//! Ending an attachment in the store, by DEL, GC or the agent: its addresses are released or kept, and a
//! pending update names it where no one else could find it.
//!
//! Must never end an attachment of which a repeated DEL or the agent could not learn.

use crate::names::Attachment;
use crate::store::{
    Disk, LockedStore, NodeTime, PendingUpdate, PendingUpdateKind, Record, RecordState, StickyBinding,
    StoreError, StoredRecord,
};

/// When a pending update is written before the record changes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum UpdateFirst {
    /// If the API server may know the attachment: no one repeats a GC or an action that ended in between.
    IfBound,
    /// If the API server knows the attachment by another id: a repeated DEL could not find it by its own.
    IfOtherId,
}

/// Ends an attachment, and says what became of its addresses. Durable with the commit.
///
/// The pending update comes first: if the process ends in between, the record is found again.
pub(crate) fn end_attachment<D: Disk>(
    locked: &mut LockedStore<'_, D>,
    stored: &StoredRecord,
    now: &NodeTime,
    update: UpdateFirst,
) -> Result<&'static str, StoreError> {
    let record = &stored.record;
    let binding = record.binding.as_ref();
    let own_id = record.attachment.id();
    let is_written = match update {
        UpdateFirst::IfBound => binding.is_some(),
        UpdateFirst::IfOtherId => {
            binding.is_some_and(|binding| binding.attachment_id.as_ref() != Some(&own_id))
        }
    };
    if is_written {
        locked.put_pending_update(
            &record.attachment,
            &detached_update(&record.attachment, Some(record), now),
        )?;
    }
    if let Some(uid) = record.used_decision() {
        // A crash may have left it.
        locked.remove_decision(uid)?;
    }
    if record.retention.is_none() {
        locked.release(stored)?;
        return Ok("released");
    }
    let kept = Record { state: RecordState::Kept, since: now.clone(), netns: None, ..record.clone() };
    locked.put(&kept, Some(stored))?;
    Ok("kept for its pod")
}

/// The pending update that this sandbox has ended.
pub(crate) fn detached_update(
    attachment: &Attachment,
    record: Option<&Record>,
    now: &NodeTime,
) -> PendingUpdate {
    let binding = record.and_then(|record| record.binding.as_ref());
    let uid = record.and_then(|record| record.pod.as_ref()?.uid().map(str::to_owned));
    update(PendingUpdateKind::Ended, attachment, binding, uid, now)
}

/// The pending update that this sandbox has taken the place of its pod's older one.
pub(crate) fn attached_update(attachment: &Attachment, record: &Record, now: &NodeTime) -> PendingUpdate {
    let uid = record.pod.as_ref().and_then(|pod| pod.uid().map(str::to_owned));
    update(PendingUpdateKind::Attached, attachment, record.binding.as_ref(), uid, now)
}

fn update(
    kind: PendingUpdateKind,
    attachment: &Attachment,
    binding: Option<&StickyBinding>,
    uid: Option<String>,
    at: &NodeTime,
) -> PendingUpdate {
    let known_by = binding.and_then(|binding| binding.attachment_id.clone());
    PendingUpdate {
        kind,
        container: attachment.container.to_string(),
        interface: attachment.interface.as_str().to_owned(),
        namespace: binding.map(|binding| binding.key.namespace.clone()),
        name: binding.map(|binding| binding.key.name.clone()),
        attachment_id: known_by.filter(|id| *id != attachment.id()),
        uid,
        at: at.clone(),
    }
}
