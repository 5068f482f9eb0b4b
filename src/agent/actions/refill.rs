//! Addresses for pods that are not sticky (mode `crd`): offered to Cilium as unowned keys of the pool, between two
//! watermarks. And the answers to those who ask this node for one of its addresses.
//!
//! An address is marked in the store before it is offered, so that nobody on this node can claim it. Must never offer
//! one that is claimed, and never take an offered one back: Cilium may have given it to a pod.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use kube::api::{Api, ListParams};

use crate::agent::actions::adopt::Bound;
use crate::agent::actions::{ActionContext, ActionError, ActionOutcome, bound, list, sandbox};
use crate::agent::metrics::AgentMetrics;
use crate::agent::plan::{contains, count_pool, families_of};
use crate::alloc::{Family, RangeSet};
use crate::cluster::cilium::objects::{CiliumNode, PoolEntry};
use crate::cluster::cilium::pool;
use crate::cluster::cilium::pool::{NodePatch, home_blocks};
use crate::cluster::objects::{
    AddressClaim, ClaimName, ClaimPhase, IPPool, PoolUse, StickyKey, Validate, labels,
};
use crate::cluster::protocol::apply::Applied;
use crate::cluster::protocol::step;
use crate::cluster::protocol::view::ClaimView;
use crate::store::{Disk, Record};

/// How many addresses that others hold are passed over before the node counts as full.
const MOST_PASSED: usize = 4096;

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Marks addresses that stand unowned in the pool and of which the store does not know.
    pub(crate) fn record_unowned(&self, addresses: &[IpAddr]) -> Result<ActionOutcome, ActionError> {
        let store = self.store()?;
        let mut locked = store.lock()?;
        let mut marked = Vec::new();
        for address in addresses {
            if locked.at(*address)?.is_none() {
                locked.put(&Record::offered(*address, store.now()).map_err(ActionError::Name)?, None)?;
                marked.push(*address);
            }
        }
        locked.commit()?;
        Ok(ActionOutcome::Done(format!("{} may be given to anybody", list(&marked))))
    }

    /// Fills the pool up to the lower watermark, and puts back what was offered and is missing.
    pub(crate) async fn refill(&self) -> Result<ActionOutcome, ActionError> {
        let mut api_writer = self.api_writer();
        let Some(node) = pool::read_node(api_writer.api(), &self.settings.node).await? else {
            return Ok(ActionOutcome::Postponed(format!("there is no CiliumNode {}", self.settings.node)));
        };
        let blocks = home_blocks(&node);
        let claimed = self.claimed(&blocks).await?;
        let pool = &node.spec.ipam.pool;
        let in_pool = |address: &IpAddr| pool.contains_key(&address.to_string());
        let store = self.store()?;
        let unowned_records: BTreeSet<IpAddr> = store
            .walk()?
            .into_iter()
            .filter(|look| look.record.as_ref().is_some_and(Record::is_unowned))
            .map(|look| look.address)
            .collect();
        // What was offered once may be with a pod.
        let mut offered: Vec<IpAddr> = unowned_records
            .iter()
            .copied()
            .filter(|address| contains(&blocks, *address) && !in_pool(address) && !claimed.contains(address))
            .collect();
        let counts = count_pool(&node);
        for family in families_of(&blocks) {
            let (total, free) = counts.get(&family).copied().unwrap_or_default();
            let back = offered.iter().filter(|address| Family::of(**address) == family).count();
            let (total, free) = (total + back, free + back);
            let missing = self.options.min_free.saturating_sub(free);
            let room = self.options.max_entries.saturating_sub(total);
            let fresh = self.mark_fresh(&blocks, family, missing.min(room), |address| {
                claimed.contains(&address) || in_pool(&address) || node.uses(&address.to_string())
            })?;
            offered.extend(fresh);
        }
        if offered.is_empty() {
            return Ok(ActionOutcome::Postponed("no address of the blocks is free to be offered".into()));
        }
        let keys: BTreeMap<String, Option<PoolEntry>> =
            offered.iter().map(|address| (address.to_string(), Some(PoolEntry::default()))).collect();
        pool::change(&mut api_writer, &self.settings.node, Some(node), |object| {
            let mut missing = keys.clone();
            missing.retain(|key, _| !object.spec.ipam.pool.contains_key(key));
            (!missing.is_empty()).then(|| NodePatch::of_keys(object, missing))
        })
        .await?;
        AgentMetrics::count(&self.metrics.pool_writes, "offered");
        Ok(ActionOutcome::Done(format!("offered {}", list(&offered))))
    }

    /// Marks fresh addresses of the blocks, durably, before they are offered.
    fn mark_fresh(
        &self,
        blocks: &[IpNet],
        family: Family,
        count: usize,
        taken: impl Fn(IpAddr) -> bool,
    ) -> Result<Vec<IpAddr>, ActionError> {
        let store = self.store()?;
        let mut fresh = Vec::new();
        if count == 0 {
            return Ok(fresh);
        }
        let mut locked = store.lock()?;
        let sets = RangeSet::over(blocks);
        for (index, set) in sets.iter().enumerate().filter(|(_, set)| set.family() == family) {
            for _ in 0..MOST_PASSED {
                if fresh.len() >= count {
                    break;
                }
                let Some(address) = locked.next_free(index, set)? else { break };
                locked.set_cursor(index, address);
                if !taken(address) && set.contains(address).is_some_and(|range| range.usable(address)) {
                    locked.put(&Record::offered(address, store.now()).map_err(ActionError::Name)?, None)?;
                    fresh.push(address);
                }
            }
        }
        locked.commit()?;
        Ok(fresh)
    }

    /// The addresses that somebody claims of these blocks or of this node, by a live look.
    async fn claimed(&self, blocks: &[IpNet]) -> Result<BTreeSet<IpAddr>, ActionError> {
        let api = self.connection();
        let claims: Api<AddressClaim> = Api::all(api.client());
        let mut asked = vec![ListParams::default().fields(&format!("spec.homeNode={}", self.settings.node))];
        let of_block = |block: &IpNet| {
            ListParams::default().labels(&format!("{}={}", labels::BLOCK, labels::block_value(*block)))
        };
        asked.extend(blocks.iter().map(of_block));
        // A claim of a Sticky pool bears the pool's range. One that covers a block is refused, but may have given addresses before.
        let pools: Api<IPPool> = Api::all(api.client());
        let every = ListParams::default();
        let pools = api.read("list IPPools", || pools.list(&every)).await?.items;
        let sticky = pools.iter().filter(|pool| pool.spec.purpose == PoolUse::Sticky);
        let shares =
            |range: &&IpNet| blocks.iter().any(|block| block.contains(*range) || range.contains(block));
        asked.extend(sticky.flat_map(|pool| &pool.spec.cidrs).filter(shares).map(of_block));
        let mut claimed = BTreeSet::new();
        for params in &asked {
            let listed = api.read("list AddressClaims", || claims.list_metadata(params)).await?;
            let names = listed.items.into_iter().filter_map(|claim| claim.metadata.name);
            claimed.extend(names.filter_map(|name| name.parse::<ClaimName>().ok()).map(ClaimName::address));
        }
        Ok(claimed)
    }

    /// Answers a claim on an address of this node: reserves it for the holder first, or says who has it.
    pub(crate) async fn answer(&self, address: IpAddr) -> Result<ActionOutcome, ActionError> {
        let mut api_writer = self.api_writer();
        let Some(claim) = self.claim_on(address).await? else {
            return Ok(ActionOutcome::NotNeeded("nobody asks any more".into()));
        };
        if let Some(why) = claim.validation_error() {
            return Ok(ActionOutcome::NeedsAttention(format!(
                "the claim on {address} breaks its own rules: {why}"
            )));
        }
        let view = ClaimView::from(&claim);
        if view.phase != ClaimPhase::Requested {
            return self.reserve_again(&view);
        }
        let reserved = match &view.pod {
            Some(pod) => match self.bind_to_its_pod(&mut api_writer, &view, pod).await? {
                Bound::Yes => Ok(()),
                Bound::No(why) => Err(why),
                Bound::NotYet(why) => return Ok(ActionOutcome::Postponed(why)),
            },
            None => {
                let node = pool::read_node(api_writer.api(), &self.settings.node).await?;
                self.reserve_for(address, &view.sticky_ref, node.as_ref())?
            }
        };
        let Some(write) = step::answer(&self.settings.node, &view, reserved.clone()) else {
            return Ok(ActionOutcome::NotNeeded("it is another node's to answer".into()));
        };
        if let Applied::Conflict = api_writer.apply(&write, None, "").await? {
            // What was reserved is found as kept for nobody if the claim is gone.
            return Ok(ActionOutcome::Postponed("the claim changed meanwhile".into()));
        }
        Ok(match reserved {
            Ok(()) => {
                AgentMetrics::count(&self.metrics.claims, "granted");
                ActionOutcome::Done(format!("{address} is granted to StickyIP {}", view.sticky_ref))
            }
            Err(why) => {
                AgentMetrics::count(&self.metrics.claims, "refused");
                ActionOutcome::Done(format!("{address} is refused to StickyIP {}: {why}", view.sticky_ref))
            }
        })
    }

    /// Reserves what is claimed and of which the store does not know any more. Where Cilium picks the addresses, claims are
    /// looked up before anything is offered, and nothing rests on this.
    fn reserve_again(&self, view: &ClaimView) -> Result<ActionOutcome, ActionError> {
        let (address, key) = (view.address, &view.sticky_ref);
        let ours = view.home_node.as_deref() == Some(&self.settings.node);
        if view.phase == ClaimPhase::Refused || !ours || !contains(&self.options.shape.ranges, address) {
            return Ok(ActionOutcome::NotNeeded("it is answered".into()));
        }
        if self.keep_beside_a_living_one(address, key)? {
            return Ok(ActionOutcome::Done(format!(
                "{address} is kept for StickyIP {key}, which lives here with another"
            )));
        }
        Ok(match self.reserve_for(address, key, None)? {
            Ok(()) => ActionOutcome::Done(format!("{address} is kept for StickyIP {key} again")),
            Err(why) => {
                ActionOutcome::NeedsAttention(format!("{address} is claimed for StickyIP {key}, and {why}"))
            }
        })
    }

    /// Reserves an address that is claimed for a StickyIP which a sandbox here has with other ones: as if it had been left here.
    fn keep_beside_a_living_one(&self, address: IpAddr, key: &StickyKey) -> Result<bool, ActionError> {
        let store = self.store()?;
        let mut locked = store.lock()?;
        let claimant = bound(key)?;
        let living = locked.find_by_claimant(&claimant)?.filter(|kept| kept.record.is_attached(store.now()));
        let Some(living) = living.filter(|kept| !kept.record.addresses.contains(&address)) else {
            return Ok(false);
        };
        if locked.at(address)?.is_some() {
            return Ok(false);
        }
        locked.put(&Record::left(address, &claimant, &living.record.attachment, store.now()), None)?;
        locked.commit()?;
        Ok(true)
    }

    /// Reserves an address for a StickyIP in the store; the reason if it cannot be had.
    fn reserve_for(
        &self,
        address: IpAddr,
        holder: &StickyKey,
        node: Option<&CiliumNode>,
    ) -> Result<Result<(), String>, ActionError> {
        let sets = self.node_ranges(node);
        let usable =
            sets.iter().find_map(|set| set.contains(address)).is_some_and(|range| range.usable(address));
        if !usable {
            return Ok(Err(format!("node {} has no such address for pods", self.settings.node)));
        }
        if self.settings.mode.publishes_pool_entries()
            && node.is_none_or(|node| node.barred_to(&holder.to_string()).contains(&address))
        {
            return Ok(Err("Cilium may give it to any pod of this node".to_owned()));
        }
        let store = self.store()?;
        let mut locked = store.lock()?;
        let claimant = bound(holder)?;
        let kept = locked.find_by_claimant(&claimant)?;
        let granted = sandbox("granted")?;
        match locked.at(address)? {
            // In the name of this grant from now on: a refused walk of this node that reserved it, and saw no claim, must not free it.
            Some(there) if there.record.is_for(&claimant) => {
                let its_own = kept.filter(|kept| kept.record.addresses.contains(&address));
                locked.renew(&its_own.unwrap_or(there), &granted)?;
                locked.commit()?;
                return Ok(Ok(()));
            }
            Some(there) if there.record.is_unowned() => {
                return Ok(Err("Cilium may give it to any pod of this node".to_owned()));
            }
            Some(there) => return Ok(Err(format!("{} has it", there.record.holder()))),
            None => {}
        }
        if let Some(kept) = kept.as_ref().filter(|kept| kept.record.is_attached(store.now())) {
            return Ok(Err(format!(
                "{} lives here with {}",
                kept.record.holder(),
                list(&kept.record.addresses)
            )));
        }
        let mut addresses: Vec<IpAddr> =
            kept.iter().flat_map(|kept| kept.record.addresses.iter().copied()).collect();
        // Beside what is kept already, also of the same family: that may be claimed for it too.
        addresses.push(address);
        let record = Record::reserved(addresses, &claimant, None, &granted, store.now());
        locked.put(&record, kept.as_ref())?;
        locked.commit()?;
        Ok(Ok(()))
    }
}
