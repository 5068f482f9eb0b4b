//! GC: attachments that the runtime no longer knows come to an end, and addresses kept for too long go back.
//!
//! In small portions, so that nobody waits long for the lock. What was attached after the list was made is not in
//! it, and is left alone.

use std::time::{Duration, Instant};

use crate::cni::{CniError, Request};
use crate::plugin::verbs::del::{detached_update, end_attachment};
use crate::plugin::{VerbContext, VerbLog};
use crate::store::{Disk, IndexEntry, LockedStore, Store, StoreError};

/// How many records one hold of the lock takes on at most: some milliseconds of work.
const MAX_RECORDS_PER_LOCK: usize = 32;
/// After this long the lock is given back whatever is left: a sticky record is synced under it, and disks differ.
const MAX_LOCK_TIME: Duration = Duration::from_millis(20);

pub(crate) fn run<D: Disk>(
    scene: &VerbContext<'_, D>,
    request: &Request,
    story: &mut VerbLog<'_>,
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
    let ended = end_stale(&scene.store, &stale);
    let expired = free_expired(&scene.store)?;
    let ended = ended?;
    story.tell(&[], format!("{ended} stale attachments ended, {expired} kept addresses expired"));
    Ok(())
}

fn end_stale<D: Disk>(store: &Store<D>, stale: &[IndexEntry]) -> Result<usize, CniError> {
    in_batches(store, stale, |locked, entry| {
        let Some(stored) = locked.find_by_entry(entry)? else { return Ok(false) };
        // The note first: nobody repeats a GC that ended in between, and the binding would stay attached for ever.
        if stored.record.binding.is_some() {
            let attachment = &stored.record.attachment;
            locked.put_pending_update(
                attachment,
                &detached_update(attachment, Some(&stored.record), store.now()),
            )?;
        }
        let reason = end_attachment(locked, &stored, store.now())?;
        let addresses = crate::plugin::list(&stored.record.addresses);
        tracing::info!(holder = stored.record.holder(), addresses, reason, "GC ended a stale attachment");
        Ok(true)
    })
}

fn free_expired<D: Disk>(store: &Store<D>) -> Result<usize, CniError> {
    in_batches(store, &store.claimants()?, |locked, entry| {
        let Some(stored) = locked.find_by_entry(entry)? else { return Ok(false) };
        if !stored.record.has_expired(store.now(), locked.first_opened_at()) {
            return Ok(false);
        }
        locked.free(&stored)?;
        let addresses = crate::plugin::list(&stored.record.addresses);
        tracing::info!(holder = stored.record.holder(), addresses, "freed: its retention ran out");
        Ok(true)
    })
}

/// Does something to every entry, in short holds of the lock, each durable before the next; counts where it did.
///
/// # Errors
/// The first one; but as much as possible is done first, as the specification asks.
fn in_batches<D: Disk>(
    store: &Store<D>,
    entries: &[IndexEntry],
    mut act: impl FnMut(&mut LockedStore<'_, D>, &IndexEntry) -> Result<bool, StoreError>,
) -> Result<usize, CniError> {
    let mut count = 0;
    let mut failed = None;
    let mut left = entries.iter().peekable();
    while left.peek().is_some() {
        let Some(mut locked) = store.lock_existing()? else { break };
        let started = Instant::now();
        for entry in left.by_ref().take(MAX_RECORDS_PER_LOCK) {
            match act(&mut locked, entry) {
                Ok(acted) => count += usize::from(acted),
                Err(error) => {
                    tracing::error!(%error, "GC goes on without this one");
                    failed.get_or_insert(error);
                    // A change may be half done, which whoever opens the store next finishes.
                    break;
                }
            }
            if started.elapsed() >= MAX_LOCK_TIME {
                break;
            }
        }
        locked.commit()?;
    }
    failed.map_or(Ok(count), |error| Err(error.into()))
}
