//! GC: attachments that the runtime no longer knows end, and addresses whose retention has run out are
//! released.
//!
//! In small batches, so that no process waits long for the lock. What was attached after the list was made is
//! not in it, and stays.

use std::time::{Duration, Instant};

use crate::cni::CniError;
use crate::node::end::{UpdateFirst, end_attachment};
use crate::node::list;
use crate::plugin::{VerbContext, VerbLog};
use crate::store::{Disk, IndexEntry, LockedStore, Store, StoreError};

/// How many records one hold of the lock takes on at most: some milliseconds of work.
const MAX_RECORDS_PER_LOCK: usize = 32;
/// After this long the lock is released whatever is left: a sticky record is synced under it, and disks
/// differ.
const MAX_LOCK_TIME: Duration = Duration::from_millis(20);

pub(crate) fn run<D: Disk>(verb: &VerbContext<'_, D>, log: &mut VerbLog<'_>) -> Result<(), CniError> {
    let Some(valid) = &verb.request.config.valid_attachments else {
        log.report(&[], "no list of valid attachments: nothing is released");
        return Ok(());
    };
    // Opening puts the store in order, so that the indexes list everything.
    if verb.store.lock_existing()?.is_none() {
        log.report(&[], "there is no store");
        return Ok(());
    }
    let stale = verb.store.attachments_except(valid)?;
    let ended = end_stale(&verb.store, &stale);
    let expired = release_expired(&verb.store)?;
    let ended = ended?;
    log.report(&[], format!("{ended} stale attachments ended, {expired} kept addresses expired"));
    Ok(())
}

fn end_stale<D: Disk>(store: &Store<D>, stale: &[IndexEntry]) -> Result<usize, CniError> {
    in_batches(store, stale, |locked, entry| {
        let Some(stored) = locked.find_by_entry(entry)? else { return Ok(false) };
        // No runtime knows it: only its DEL ends it.
        if stored.record.attachment.container.is_cilium_ingress() {
            return Ok(false);
        }
        let reason = end_attachment(locked, &stored, store.now(), UpdateFirst::IfBound)?;
        let addresses = list(&stored.record.addresses);
        tracing::info!(holder = stored.record.holder(), addresses, reason, "GC ended a stale attachment");
        Ok(true)
    })
}

fn release_expired<D: Disk>(store: &Store<D>) -> Result<usize, CniError> {
    in_batches(store, &store.claimants()?, |locked, entry| {
        let Some(stored) = locked.find_by_entry(entry)? else { return Ok(false) };
        if !stored.record.has_expired(store.now(), locked.first_opened_at()) {
            return Ok(false);
        }
        locked.release(&stored)?;
        let addresses = list(&stored.record.addresses);
        let kept_for = stored.record.holder();
        tracing::info!(kept_for, addresses, reason = "its retention ran out", "GC released a kept address");
        Ok(true)
    })
}

/// Does something to every entry, in short holds of the lock, each durable before the next; counts where it
/// did.
/// Errors: the first one; but as much as possible is done first, as the specification asks.
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
                    tracing::error!(%error, "GC skips an entry that it cannot end");
                    failed.get_or_insert(error);
                    // A change may be half done; the next process that opens the store completes it.
                    break;
                }
            }
            if started.elapsed() >= MAX_LOCK_TIME {
                break;
            }
        }
        // The changes are made; what is left must not stay because a disk did not sync them.
        if let Err(error) = locked.commit() {
            tracing::error!(%error, "GC cannot sync what it has ended");
            failed.get_or_insert(error);
        }
    }
    failed.map_or(Ok(count), |error| Err(error.into()))
}
