//! `ReleaseRecord`: a record is released that is kept for no StickyIP, or those of its addresses that its
//! StickyIP neither has nor claims: they were for range sets that the StickyIP has no address of.
//!
//! Must never release on what the watches show alone: claims and StickyIP are read live, the record under the
//! lock. And never what a pod of another node may have: StickyIPs and claims may have been lost while it
//! lives.

use std::net::IpAddr;

use super::{ActionContext, Performed, bound, done, not_needed, own_claimant, postponed};
use crate::agent::plan::contains;
use crate::agent::snapshot::uid_of;
use crate::cluster::cilium::pool;
use crate::cluster::objects::cilium::{CiliumNode, PoolEntry};
use crate::cluster::protocol::bind;
use crate::node::list;
use crate::store::{Disk, Record, StoredRecord};

pub(super) async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, seen: &Record) -> Performed {
    let Some(binding) = &seen.binding else { return not_needed("no StickyIP binds it") };
    let key = &binding.key;
    let home = [context.index.blocks(), context.options.shape.ranges.clone()].concat();
    let of_home = seen.addresses.iter().any(|address| contains(&home, *address));
    let (mut unclaimed, mut wanted) = (Vec::new(), Vec::new());
    if of_home {
        let found = bind::read_sticky(&context.api_writer(), key).await?;
        let bound = found.map(|found| found.spec.addresses).unwrap_or_default();
        for address in &seen.addresses {
            if bound.contains(address) {
                wanted.push(*address);
                continue;
            }
            match context.claim_on(*address).await?.map(|claim| claim.spec.sticky_ref) {
                Some(other) if other == *key => wanted.push(*address),
                // Its pool entry is the other StickyIP's.
                Some(_) => {}
                None => unclaimed.push(*address),
            }
        }
    }
    // The next sandbox of its own pod gets all of the record, or nothing.
    let pod_is_there = uid_of(seen).is_some_and(|uid| context.index.pod_of(uid).is_some());
    if wanted.len() == seen.addresses.len() || (pod_is_there && !wanted.is_empty()) {
        return postponed(format!("StickyIP {key} has or claims {}", list(&wanted)));
    }
    for address in &unclaimed {
        if let Some(user) = context.user_elsewhere(*address).await? {
            return postponed(format!("{address} is claimed no more, and {user}"));
        }
    }
    let store = context.store()?;
    let of_sticky = bound(key)?;
    // A pod with the name of its StickyIP has one lock.
    let own = seen.pod.as_ref().map(own_claimant).transpose()?.filter(|own| *own != of_sticky);
    let locks = own.iter().chain([&of_sticky]).map(|claimant| context.claimant_lock(&store, claimant));
    let _locks = locks.collect::<Performed<Vec<_>>>()?;
    let changed = || not_needed("the record has changed");
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
        context.require_no_endpoint(&unclaimed).await?;
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
    let records = unowned_again.iter().map(|address| Record::unowned(*address, store.now()));
    locked.keep_addresses(&stored, remaining, &records.collect::<Vec<_>>())?;
    locked.commit()?;
    if !unowned_again.is_empty() {
        let is_own = |entry: &PoolEntry| is_of_its_namespace(seen, entry);
        context.disown(&mut api_writer, &unowned_again, is_own).await?;
    }
    context.metrics.leaks.inc(["record"]);
    let mut released = seen.addresses.clone();
    released.retain(|address| !wanted.contains(address));
    done(format!("{} was kept for StickyIP {key}, which does not need it", list(&released)))
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
