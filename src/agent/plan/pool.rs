//! What the CiliumNode of this node must show: refill its pool, publish what is attached here, unpublish what
//! is not. Must never read anything itself.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::action::Action;
use super::debounce::{Debounce, LONG, SHORT};
use super::demand::PodDemand;
use super::input::{PlanInput, contains};
use crate::agent::index::key_of;
use crate::alloc::Family;
use crate::cluster::cilium::barrier;
use crate::cluster::cilium::pool::{self, Publication, single_routes};
use crate::cluster::objects::ClaimPhase;
use crate::cluster::objects::cilium::{CiliumNode, PoolEntry};
use crate::cluster::view::ClaimView;
use crate::policy::pool_size::{PoolCount, RefillUrgency};

/// How many entries a node's pool has, by family.
pub(crate) fn count_pool(node: &CiliumNode, in_use: &BTreeSet<IpAddr>) -> BTreeMap<Family, PoolCount> {
    let mut counts: BTreeMap<Family, PoolCount> = BTreeMap::new();
    for (address, entry) in node.spec.ipam.pool.iter().filter(|(_, entry)| !barrier::is_barrier(entry)) {
        let Ok(ip) = address.parse::<IpAddr>() else { continue };
        let count = counts.entry(Family::of(ip)).or_default();
        count.total += 1;
        count.free += usize::from(entry.owner.is_empty() && !node.uses(address) && !in_use.contains(&ip));
    }
    counts
}

pub(crate) fn families_of(blocks: &[IpNet]) -> BTreeSet<Family> {
    blocks.iter().map(|block| Family::of(block.addr())).collect()
}

/// How soon the pool must be refilled, for the family that needs it most.
fn urgency(input: &PlanInput<'_>, node: &CiliumNode, demand: &PodDemand) -> Option<RefillUrgency> {
    let counts = count_pool(node, &demand.in_use);
    let urgency = families_of(&input.index.blocks()).into_iter().filter_map(|family| {
        let count = counts.get(&family).copied().unwrap_or_default();
        input.options.pool_limits.urgency(count, demand.waiting)
    });
    urgency.max()
}

fn filled_node<'a>(input: &PlanInput<'a>) -> Option<&'a CiliumNode> {
    input.index.cilium_node().filter(|_| input.options.shape.mode.publishes_pool_entries())
}

/// The entries that are needed at once: planned before the decisions about pods, which take longer the more
/// pods wait.
pub(super) fn refill_now(input: &PlanInput<'_>, actions: &mut Vec<Action>) {
    let Some(node) = filled_node(input) else { return };
    let demand = PodDemand::of(input, node);
    if urgency(input, node, &demand) == Some(RefillUrgency::Now) {
        actions.push(Action::Refill { demand });
    }
}

/// What can wait does so for [`LONG`]: single pods cost one write in this time.
pub(super) fn refill_later(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { index, store, now, .. } = input;
    let Some(node) = filled_node(input) else { return };
    let blocks = index.blocks();
    if !blocks.is_empty() && blocks != store.blocks {
        actions.push(Action::RecordBlocks { blocks: blocks.clone() });
    }
    let known = |address: &IpAddr| store.records.iter().any(|found| found.record.addresses.contains(address));
    let unowned = node.spec.ipam.pool.iter().filter(|(_, entry)| entry.owner.is_empty());
    let addresses: Vec<IpAddr> = unowned
        .filter_map(|(address, _)| address.parse().ok())
        .filter(|address| contains(&blocks, *address) && !known(address))
        .collect();
    if !addresses.is_empty() {
        actions.push(Action::RecordUnowned { addresses });
    }
    let records = store.records.iter().map(|found| &found.record).filter(|record| record.is_unowned());
    let mut lost: Vec<IpAddr> = records.flat_map(|record| record.addresses.iter().copied()).collect();
    lost.retain(|address| !node.spec.ipam.pool.contains_key(&address.to_string()));
    // What is recorded as unowned was in the pool, and a pod may live with it, whatever the blocks are now: a
    // CiliumNode that was created again has none.
    let (lost, elsewhere): (Vec<IpAddr>, Vec<IpAddr>) =
        lost.into_iter().partition(|address| contains(&blocks, *address));
    let state = crate::node::list(&elsewhere);
    if !elsewhere.is_empty() && debounce.stable_for("unowned entries".to_owned(), state, SHORT, *now) {
        actions.push(Action::RestoreUnowned { addresses: elsewhere });
    }
    let demand = PodDemand::of(input, node);
    let due = match urgency(input, node, &demand) {
        // Planned already.
        Some(RefillUrgency::Now) => return,
        Some(RefillUrgency::Later) => debounce.stable_for("pool".to_owned(), String::new(), LONG, *now),
        None => false,
    };
    if due || !lost.is_empty() {
        actions.push(Action::Refill { demand });
    }
}

pub(super) fn publish(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { options, index, store, now } = input;
    let Some(node) = index.cilium_node() else { return };
    for (name, sticky) in index.stickies.iter() {
        let key = key_of(sticky);
        // Without a sandbox or a decision an ADD or DEL is running, or it is a leak.
        let missing = Publication::of(sticky)
            .filter(|_| store.is_used(&key))
            .is_some_and(|wanted| pool::publish_patch(node, &options.shape, &wanted).is_some());
        let state = sticky.metadata.resource_version.clone().unwrap_or_default();
        if missing && debounce.stable_for(format!("published {name}"), state, SHORT, *now) {
            actions.push(Action::Publish { key });
        }
    }
    let is_owned = |entry: &PoolEntry| !entry.owner.is_empty() && !barrier::is_barrier(entry);
    let pool = node.spec.ipam.pool.iter().filter(|_| options.shape.mode.publishes_pool_entries());
    let owned = pool.filter(|(_, entry)| is_owned(entry)).filter_map(|(address, _)| address.parse().ok());
    let published: BTreeSet<IpAddr> = owned.chain(single_routes(node)).collect();
    for address in published {
        let attached = index.stickies.values().any(|sticky| sticky.spec.addresses.contains(&address));
        if !attached
            && !store.uses(address)
            && debounce.stable_for(format!("unpublished {address}"), String::new(), LONG, *now)
        {
            actions.push(Action::Unpublish { address });
        }
    }
    let awaits_grant = |claim: &ClaimView| claim.phase == ClaimPhase::Requested && claim.pod.is_some();
    let barriers: Vec<&str> = barrier::keys(node).map(String::as_str).collect();
    if !barriers.is_empty()
        && !index.claims.values().any(awaits_grant)
        && debounce.stable_for("barriers".to_owned(), barriers.join(" "), LONG, *now)
    {
        actions.push(Action::RemoveBarriers);
    }
}
