//! `ReleaseRecord`: a record is released that no StickyIP needs, or those of its addresses that it does not
//! need.
//!
//! Must never release on what the watches show alone: claims and StickyIP are read live, the record under the
//! lock.

use std::net::IpAddr;

use super::context::{ActionContext, bound, interface};
use super::outcome::{ActionError, ActionOutcome};
use super::{cilium, live, unowned};
use crate::agent::plan::contains;
use crate::agent::snapshot::uid_of;
use crate::cluster::cilium::objects::{CiliumNode, PoolEntry};
use crate::cluster::cilium::pool;
use crate::cluster::protocol::bind;
use crate::names::StickyKey;
use crate::node::list;
use crate::store::{ClaimantKey, Disk, Record, StoredRecord};

/// Releases a record that is kept for no StickyIP, or those of its addresses that its StickyIP neither has
/// nor claims: they were for range sets that the StickyIP has no address of.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    seen: &Record,
) -> Result<ActionOutcome, ActionError> {
    let Some(binding) = &seen.binding else {
        return Ok(ActionOutcome::NotNeeded("no StickyIP binds it".into()));
    };
    let key = binding.key.clone();
    let home = [context.index.blocks(), context.options.shape.ranges.clone()].concat();
    let of_home = seen.addresses.iter().any(|address| contains(&home, *address));
    let (mut unclaimed, mut wanted) = (Vec::new(), Vec::new());
    if of_home {
        let found = bind::read_sticky(&context.api_writer(), &key).await?;
        let bound = found.map(|found| found.spec.addresses).unwrap_or_default();
        for address in &seen.addresses {
            if bound.contains(address) {
                wanted.push(*address);
                continue;
            }
            match claimed_for(context, *address).await? {
                Some(other) if other == key => wanted.push(*address),
                // Its pool entry is the other StickyIP's.
                Some(_) => {}
                None => unclaimed.push(*address),
            }
        }
    }
    // The next sandbox of its own pod gets all of the record, or nothing.
    let pod_is_there = uid_of(seen).is_some_and(|uid| context.index.pod_of(uid).is_some());
    if wanted.len() == seen.addresses.len() || (pod_is_there && !wanted.is_empty()) {
        return Ok(ActionOutcome::Postponed(format!("StickyIP {key} has or claims {}", list(&wanted))));
    }
    let store = context.store()?;
    let mut locks = Vec::new();
    let own =
        seen.pod.as_ref().map(|pod| interface().map(|name| ClaimantKey::of_pod(pod, &name))).transpose()?;
    for claimant in [own, Some(bound(&key)?)].into_iter().flatten() {
        // A pod with the name of its StickyIP has one lock.
        if locks.iter().any(|(taken, _)| *taken == claimant) {
            continue;
        }
        match context.try_claimant_lock(&store, &claimant)? {
            Some(lock) => locks.push((claimant, lock)),
            None => return Ok(ActionOutcome::Postponed("an ADD of this pod is running".into())),
        }
    }
    let changed = || Ok(ActionOutcome::NotNeeded("the record has changed".into()));
    let mut locked = store.lock()?;
    let mut found = None;
    // If a process ended while it replaced the record, the record has only some of its addresses.
    for address in &seen.addresses {
        found = found.or(locked.find_by_address(*address)?.filter(|stored| stored.record == *seen));
    }
    drop(locked);
    let Some(stored) = found else { return changed() };
    let mut api_writer = context.api_writer();
    let mut unowned_again = Vec::new();
    if context.settings.mode.publishes_pool_entries() && of_home {
        // An address of a Sticky pool is never unowned.
        let blocks = context.index.blocks();
        let of_blocks: Vec<IpAddr> =
            unclaimed.iter().copied().filter(|address| contains(&blocks, *address)).collect();
        let node = pool::read_node(api_writer.api(), &context.settings.node).await?;
        unowned_again = node.map(|node| unowned_afterwards(&node, &stored, &of_blocks)).unwrap_or_default();
        unclaimed.retain(|address| !unowned_again.contains(address));
        // Before the first change: the pool entries of a record that is still kept stay as they were.
        if let Some(postponed) = cilium::postponed_by_cilium(context, &unclaimed).await? {
            return Ok(postponed);
        }
    }
    let mut locked = store.lock()?;
    let mut remaining = Vec::new();
    for address in &seen.addresses {
        if locked.find_by_address(*address)?.as_ref() == Some(&stored) {
            remaining.push(*address);
        }
    }
    if remaining.is_empty() {
        return changed();
    }
    unowned_again.retain(|address| remaining.contains(address));
    remaining.retain(|address| wanted.contains(address));
    locked.keep_addresses(&stored, remaining, &unowned::records(&store, &unowned_again))?;
    locked.commit()?;
    if !unowned_again.is_empty() {
        unowned::disown(context, &mut api_writer, &unowned_again, |entry| is_of_its_namespace(seen, entry))
            .await?;
    }
    context.metrics.leaks.inc(["record"]);
    let mut released = seen.addresses.clone();
    released.retain(|address| !wanted.contains(address));
    Ok(ActionOutcome::Done(format!(
        "{} was kept for StickyIP {key}, which does not need it",
        list(&released)
    )))
}

/// The StickyIP that an address is claimed for, by a live read.
async fn claimed_for<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    address: IpAddr,
) -> Result<Option<StickyKey>, ActionError> {
    Ok(live::claim_on(context, address).await?.map(|claim| claim.spec.sticky_ref))
}

/// Those of these addresses of a record that are unowned once the record is gone, because the pool has them:
/// unowned, or for a pod of the record's StickyIP. Its pods are of its namespace, and no other StickyIP keeps
/// the address here.
fn unowned_afterwards(node: &CiliumNode, stored: &StoredRecord, addresses: &[IpAddr]) -> Vec<IpAddr> {
    let is_in_pool = |address: &&IpAddr| {
        let entry = node.spec.ipam.pool.get(&address.to_string());
        entry.is_some_and(|entry| entry.owner.is_empty() || is_of_its_namespace(&stored.record, entry))
    };
    addresses.iter().filter(is_in_pool).copied().collect()
}

/// Whether a pool entry is for a pod of the namespace of a record's StickyIP.
fn is_of_its_namespace(record: &Record, entry: &PoolEntry) -> bool {
    let namespace = entry.owner.split_once('/').map(|(namespace, _)| namespace);
    record.binding.as_ref().is_some_and(|binding| namespace == Some(&binding.key.namespace))
}
