//! GC: attachments that the runtime no longer knows come to an end, and addresses kept for too long go back.
//!
//! In small portions, so that nobody waits long for the lock. What was attached after the list was made is not in
//! it, and is left alone.

use super::del::{ended_note, let_go};
use super::{Scene, Story};
use crate::cni::{CniError, Request};
use crate::store::{Disk, Entry, Store};

/// How many records one hold of the lock takes on: some milliseconds of work.
const PORTION: usize = 32;

pub(super) fn run<D: Disk>(
    scene: &Scene<'_, D>,
    request: &Request,
    story: &mut Story<'_>,
) -> Result<(), CniError> {
    let Some(valid) = &request.config.valid_attachments else {
        story.tell(&[], "no list of valid attachments: nothing is freed");
        return Ok(());
    };
    // Opening puts the store in order, so that the indexes list everything.
    if scene.store.lock_existing()?.is_none() {
        story.tell(&[], "there is no store");
        return Ok(());
    }
    let stale = scene.store.attachments_except(valid)?;
    let ended = end_stale(&scene.store, &stale)?;
    let expired = free_expired(&scene.store)?;
    story.tell(&[], format!("{ended} stale attachments ended, {expired} kept addresses expired"));
    Ok(())
}

fn end_stale<D: Disk>(store: &Store<D>, stale: &[Entry]) -> Result<usize, CniError> {
    let mut ended = 0;
    for portion in stale.chunks(PORTION) {
        let Some(mut locked) = store.lock_existing()? else { break };
        for entry in portion {
            if let Some(stored) = locked.of_entry(entry)? {
                let what = let_go(&mut locked, &stored, store.now())?;
                if stored.record.binding.is_some() {
                    let attachment = &stored.record.attachment;
                    locked
                        .leave_note(attachment, &ended_note(attachment, Some(&stored.record), store.now()))?;
                }
                ended += 1;
                let addresses = super::list(&stored.record.addresses);
                tracing::info!(
                    holder = stored.record.holder(),
                    addresses,
                    reason = what,
                    "GC ended a stale attachment"
                );
            }
        }
        locked.commit()?;
    }
    Ok(ended)
}

fn free_expired<D: Disk>(store: &Store<D>) -> Result<usize, CniError> {
    let mut freed = 0;
    for portion in store.claimants()?.chunks(PORTION) {
        let Some(mut locked) = store.lock_existing()? else { break };
        for entry in portion {
            let Some(stored) = locked.of_entry(entry)? else { continue };
            if stored.record.has_expired(store.now(), locked.first_look()) {
                locked.free(&stored)?;
                freed += 1;
                let addresses = super::list(&stored.record.addresses);
                tracing::info!(holder = stored.record.holder(), addresses, "freed: its retention ran out");
            }
        }
        locked.commit()?;
    }
    Ok(freed)
}
