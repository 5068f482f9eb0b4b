//! What the pool of the CiliumNode must show: refill it, publish what is attached here, unpublish what is
//! not. Must never look at anything itself.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use super::action::Action;
use super::debounce::{Debounce, LONG, SHORT};
use super::input::{PlanInput, contains};
use crate::agent::index::key_of;
use crate::alloc::Family;
use crate::cluster::cilium::objects::{CiliumNode, PoolEntry};
use crate::cluster::cilium::pool::{Publication, single_routes};
use crate::cluster::cilium::{barrier, pool};
use crate::cluster::objects::{ClaimPhase, StickyIP};
use crate::cluster::protocol::view::ClaimView;

/// What stands in a node's pool, by family.
#[must_use]
pub fn count_pool(node: &CiliumNode) -> BTreeMap<Family, (usize, usize)> {
    let mut counts: BTreeMap<Family, (usize, usize)> = BTreeMap::new();
    for (address, entry) in node.spec.ipam.pool.iter().filter(|(_, entry)| !barrier::is_barrier(entry)) {
        let Ok(ip) = address.parse::<IpAddr>() else { continue };
        let (total, free) = counts.entry(Family::of(ip)).or_default();
        *total += 1;
        *free += usize::from(entry.owner.is_empty() && !node.uses(address));
    }
    counts
}

/// The families of a node's blocks.
#[must_use]
pub fn families_of(blocks: &[IpNet]) -> Vec<Family> {
    let mut families: Vec<Family> = blocks.iter().map(|block| Family::of(block.addr())).collect();
    families.sort();
    families.dedup();
    families
}

pub(super) fn refill(input: &PlanInput<'_>, actions: &mut Vec<Action>) {
    let PlanInput { options, index, store, .. } = input;
    let Some(node) = index.cilium_node().filter(|_| options.shape.mode.publishes_pool_entries()) else {
        return;
    };
    let blocks = index.blocks();
    let known = |address: &IpAddr| store.held.iter().any(|held| held.record.addresses.contains(address));
    let unknown: Vec<IpAddr> = node
        .spec
        .ipam
        .pool
        .iter()
        .filter(|(_, entry)| entry.owner.is_empty())
        .filter_map(|(address, _)| address.parse().ok())
        .filter(|address| contains(&blocks, *address) && !known(address))
        .collect();
    if !unknown.is_empty() {
        actions.push(Action::RecordUnowned { addresses: unknown });
    }
    let lost = store.held.iter().filter(|held| held.record.is_unowned()).any(|held| {
        held.record.addresses.iter().any(|address| {
            contains(&blocks, *address) && !node.spec.ipam.pool.contains_key(&address.to_string())
        })
    });
    let counts = count_pool(node);
    let few = families_of(&blocks).into_iter().any(|family| {
        let (total, free) = counts.get(&family).copied().unwrap_or_default();
        free < options.min_free && total < options.max_entries
    });
    if lost || few {
        actions.push(Action::Refill);
    }
}

/// How an attached StickyIP is shown.
#[must_use]
pub fn shown(sticky: &StickyIP) -> Option<Publication> {
    let attachment = sticky.status.as_ref()?.attachment.as_ref()?;
    let namespace = sticky.metadata.namespace.as_deref()?;
    Some(Publication {
        addresses: sticky.spec.addresses.clone(),
        owner: format!("{namespace}/{}", attachment.pod_name),
        resource: pool::resource(namespace, &sticky.spec.workload),
    })
}

pub(super) fn publish(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { options, index, store, now } = input;
    let Some(node) = index.cilium_node() else { return };
    for (name, sticky) in index.stickies.iter() {
        let key = key_of(sticky);
        // Without a sandbox or a decision an ADD or DEL is on its way, or it is a leak.
        let lives = store.living(&key).is_some() || store.prepared(&key).is_some();
        let missing = lives
            && shown(sticky).is_some_and(|shown| pool::publish_patch(node, &options.shape, &shown).is_some());
        let state = sticky.metadata.resource_version.clone().unwrap_or_default();
        if missing && debounce.stable_for(format!("shown {name}"), state, SHORT, *now) {
            actions.push(Action::Publish { key });
        }
    }
    let is_owned = |entry: &PoolEntry| !entry.owner.is_empty() && !barrier::is_barrier(entry);
    let owned = node
        .spec
        .ipam
        .pool
        .iter()
        .filter(|(_, entry)| options.shape.mode.publishes_pool_entries() && is_owned(entry));
    let mut shown: Vec<IpAddr> = owned.filter_map(|(address, _)| address.parse().ok()).collect();
    shown.extend(single_routes(node));
    shown.sort();
    shown.dedup();
    for address in shown {
        let attached = index.stickies.iter().any(|(_, sticky)| sticky.spec.addresses.contains(&address));
        if !attached
            && !store.uses(address)
            && debounce.stable_for(format!("hidden {address}"), String::new(), LONG, *now)
        {
            actions.push(Action::Unpublish { address });
        }
    }
    let asked = |claim: &ClaimView| claim.phase == ClaimPhase::Requested && claim.pod.is_some();
    let signs: Vec<&str> = barrier::keys(node).map(String::as_str).collect();
    if !signs.is_empty()
        && !index.claims.values().any(asked)
        && debounce.stable_for("signs".to_owned(), signs.join(" "), LONG, *now)
    {
        actions.push(Action::RemoveBarriers);
    }
}
