//! `Refill`: unowned pool entries for pods that are not sticky (mode `crd`), as many as
//! [`PoolLimits`](crate::policy::pool_size::PoolLimits) asks for, in one write.
//!
//! An address is recorded in the store before its entry is written, so that nothing on this node can claim
//! it. Must never write an entry for an address that is claimed, and never remove an unowned one: Cilium may
//! have given it to a pod.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;
use kube::api::{Api, ListParams};

use super::{ActionContext, Performed, done, not_needed, postponed};
use crate::agent::plan::{PodDemand, contains, count_pool, families_of};
use crate::alloc::{Family, RangeSet};
use crate::cluster::cilium::pool::home_blocks;
use crate::cluster::objects::{AddressClaim, ClaimName, IPPool, PoolUse, labels};
use crate::node::list;
use crate::policy::pool_size::PoolCount;
use crate::store::{Disk, Record};

/// How many addresses that others hold are skipped before the node counts as full.
const MAX_SKIPPED: usize = 4096;

/// Fills the pool for the pods that wait, and writes again the unowned entries that are missing.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    demand: &PodDemand,
) -> Performed {
    let mut api_writer = context.api_writer();
    let node = context.cilium_node(api_writer.api()).await?;
    let blocks = home_blocks(&node);
    let claimed = context.claimed(&blocks).await?;
    let pool = &node.spec.ipam.pool;
    let in_pool = |address: &IpAddr| pool.contains_key(&address.to_string());
    let store = context.store()?;
    let files = store.address_files()?.into_iter();
    let unowned: BTreeSet<IpAddr> = files
        .filter(|found| found.record.as_ref().is_some_and(Record::is_unowned))
        .map(|found| found.address)
        .collect();
    // Cilium may have given an address to a pod once its entry was written.
    let mut added: Vec<IpAddr> = unowned
        .into_iter()
        .filter(|address| contains(&blocks, *address) && !in_pool(address) && !claimed.contains(address))
        .collect();
    let (counts, limits) = (count_pool(&node, &demand.in_use), context.options.pool_limits);
    let mut is_full = false;
    for family in families_of(&blocks) {
        let PoolCount { total, free } = counts.get(&family).copied().unwrap_or_default();
        let missing = added.iter().filter(|address| Family::of(**address) == family).count();
        let count = PoolCount { total: total + missing, free: free + missing };
        if limits.urgency(count, demand.waiting).is_none() {
            continue;
        }
        let fresh =
            context.record_fresh(&blocks, family, limits.to_add(count, demand.waiting), |address| {
                claimed.contains(&address)
                    || in_pool(&address)
                    || node.uses(&address.to_string())
                    || demand.in_use.contains(&address)
            })?;
        is_full |= fresh.is_empty();
        added.extend(fresh);
    }
    if added.is_empty() && is_full {
        return postponed("no address of the blocks is free");
    } else if added.is_empty() {
        return not_needed("the pool was refilled before the watch showed it");
    }
    context.add_unowned(&mut api_writer, node, &added).await?;
    context.metrics.pool_writes.inc(["refill"]);
    done(format!("added unowned entries: {}", list(&added)))
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Records free addresses of the blocks as unowned, durably, before their entries are written.
    fn record_fresh(
        &self,
        blocks: &[IpNet],
        family: Family,
        count: usize,
        taken: impl Fn(IpAddr) -> bool,
    ) -> Performed<Vec<IpAddr>> {
        let store = self.store()?;
        let mut fresh = Vec::new();
        if count == 0 {
            return Ok(fresh);
        }
        let mut locked = store.lock()?;
        let sets = RangeSet::over(blocks);
        for (index, set) in sets.iter().enumerate().filter(|(_, set)| set.family() == family) {
            for _ in 0..MAX_SKIPPED {
                if fresh.len() >= count {
                    break;
                }
                let Some(address) = locked.next_free(index, set)? else { break };
                locked.set_cursor(index, address);
                if !taken(address) && set.contains(address).is_some_and(|range| range.usable(address)) {
                    locked.put(&Record::unowned(address, store.now()), None)?;
                    fresh.push(address);
                }
            }
        }
        locked.commit()?;
        Ok(fresh)
    }

    /// The addresses of these blocks or of this node that are claimed, by a live read.
    async fn claimed(&self, blocks: &[IpNet]) -> Performed<BTreeSet<IpAddr>> {
        let api = self.connection();
        let claims: Api<AddressClaim> = Api::all(api.client());
        let mut lists = vec![ListParams::default().fields(&format!("spec.homeNode={}", self.settings.node))];
        let of_block = |block: &IpNet| {
            ListParams::default().labels(&format!("{}={}", labels::BLOCK, labels::block_value(*block)))
        };
        lists.extend(blocks.iter().map(of_block));
        // A claim of a Sticky pool has the pool's range as its block. A pool that covers a block is refused,
        // but may have given addresses before.
        let pools: Api<IPPool> = Api::all(api.client());
        let every = ListParams::default();
        let pools = api.read("list IPPools", || pools.list(&every)).await?.items;
        let sticky = pools.iter().filter(|pool| pool.spec.purpose == PoolUse::Sticky);
        let shares =
            |range: &&IpNet| blocks.iter().any(|block| block.contains(*range) || range.contains(block));
        lists.extend(sticky.flat_map(|pool| &pool.spec.cidrs).filter(shares).map(of_block));
        let mut claimed = BTreeSet::new();
        for params in &lists {
            let listed = api.read("list AddressClaims", || claims.list_metadata(params)).await?;
            let names = listed.items.into_iter().filter_map(|claim| claim.metadata.name);
            claimed.extend(names.filter_map(|name| name.parse::<ClaimName>().ok()).map(ClaimName::address));
        }
        Ok(claimed)
    }
}
