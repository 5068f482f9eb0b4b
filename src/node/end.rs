//! Ending an attachment in the store, by DEL, GC or the agent: its addresses are released or kept, and a
//! pending update names it where no one else could find it.
//!
//! Must never end an attachment of which a repeated DEL or the agent could not learn.

use crate::names::Attachment;
use crate::store::{Disk, LockedStore, NodeTime, PendingUpdate, PendingUpdateKind, Record, RecordState};
use crate::store::{StoreError, StoredRecord};

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
    let has_own_id = record.attachment_id() == Some(&record.attachment.id());
    if record.binding.is_some() && (update == UpdateFirst::IfBound || !has_own_id) {
        let update = detached_update(&record.attachment, Some(record), now);
        locked.put_pending_update(&record.attachment, &update)?;
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
pub(crate) fn detached_update(ended: &Attachment, record: Option<&Record>, at: &NodeTime) -> PendingUpdate {
    let binding = record.and_then(|record| record.binding.as_ref());
    let known_by = record.and_then(Record::attachment_id).filter(|id| **id != ended.id());
    PendingUpdate {
        kind: PendingUpdateKind::Ended,
        container: ended.container.to_string(),
        interface: ended.interface.to_string(),
        namespace: binding.map(|binding| binding.key.namespace.clone()),
        name: binding.map(|binding| binding.key.name.clone()),
        attachment_id: known_by.cloned(),
        uid: record.and_then(|record| record.pod.as_ref()?.uid()).map(str::to_owned),
        at: at.clone(),
    }
}

/// The pending update that this sandbox has taken the place of its pod's older one.
pub(crate) fn attached_update(attachment: &Attachment, record: &Record, now: &NodeTime) -> PendingUpdate {
    let kind = PendingUpdateKind::Attached;
    PendingUpdate { kind, ..detached_update(attachment, Some(record), now) }
}
