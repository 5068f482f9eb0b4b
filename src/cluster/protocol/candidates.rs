//! Which addresses a claimant without a StickyIP could have: those of its earlier attempts, those of its pin,
//! then a Sticky pool's, then the node's own. Must never propose an address of the node's block before the
//! node's store has reserved it, and never one of any node's block as a Sticky pool's.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams};
use sha2::{Digest, Sha256};

use crate::alloc::range::Family;
use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::cilium::pool::{home_blocks, list_nodes};
use crate::cluster::objects::ip_pool::overlaps;
use crate::cluster::objects::{AddressClaim, ClaimName, ClaimPhase, IPPool, PoolUse, Validate, labels};
use crate::cluster::protocol::local_node::{BindError, LocalNode};
use crate::cluster::protocol::read::list_claims;
use crate::cluster::protocol::step::Candidate;
use crate::cluster::view::Origin;
use crate::names::StickyKey;
use crate::policy::selection::selector::Selector;

/// How many addresses of a range are tried: more than any cluster claims, and the end of a search in a /64.
const MAX_TRIED: u128 = 1 << 17;

/// Where candidates come from: read once per ADD, and only for a claimant that has no address yet.
#[derive(Debug, Default)]
pub(crate) struct CandidateSources {
    pools: Vec<IPPool>,
    /// The labels of this node, read only if a pool asks for them.
    labels: BTreeMap<String, String>,
    own: Vec<AddressClaim>,
    /// The blocks of all nodes, read only for an address of a Sticky pool and for one of unknown origin.
    blocks: Option<Vec<(String, IpNet)>>,
}

impl CandidateSources {
    /// Reads the Sticky pools and the claims of the claimant's earlier attempts.
    pub(crate) async fn read(api: &Connection, key: &StickyKey, node: &str) -> Result<Self, BindError> {
        let pools: Api<IPPool> = Api::all(api.client());
        let of_key = format!("spec.stickyRef.namespace={},spec.stickyRef.name={}", key.namespace, key.name);
        let every = ListParams::default();
        let (pools, own) =
            tokio::try_join!(api.read("list IPPools", || pools.list(&every)), list_claims(api, &of_key),)?;
        let pools = usable(pools.items);
        let mut labels = BTreeMap::new();
        if pools.iter().any(|pool| pool.spec.node_selector.is_some()) {
            let nodes: Api<Node> = Api::all(api.client());
            let found = api.read(&format!("get Node {node}"), || nodes.get_metadata_opt(node)).await?;
            labels = found.and_then(|found| found.metadata.labels).unwrap_or_default();
        }
        Ok(Self { pools, labels, own, blocks: None })
    }

    /// The sources for a claimant of which nothing exists, from these pools alone. For a pin alone, of which
    /// `blocks` are those nodes' blocks in which it lies: the node's labels, by which pools are chosen, and
    /// other blocks are not in it.
    pub(crate) fn of_pools_alone(pools: Vec<IPPool>, blocks: Vec<(String, IpNet)>) -> Self {
        Self { pools: usable(pools), blocks: Some(blocks), ..Self::default() }
    }

    /// Where an address comes from.
    /// Errors: the request to the API server or the node's store failed, or the address is used on this node.
    pub(crate) async fn origin(
        &mut self,
        api: &Connection,
        address: IpAddr,
        local_node: &mut dyn LocalNode,
    ) -> Result<Origin, BindError> {
        if let Some(origin) = of_sticky_pool(&self.pools, address)
            && !local_node.is_own(address)
            && !blocks(&mut self.blocks, api).await?.iter().any(|(_, block)| block.contains(&address))
        {
            return Ok(origin);
        }
        let reserved = local_node.reserve_this(address)?;
        if reserved != Origin::Nowhere {
            return Ok(reserved);
        }
        // If another node's block has the address, that node must grant it.
        let (own, mut blocks) = (local_node.node(), blocks(&mut self.blocks, api).await?.iter().cloned());
        let found = blocks.find(|(home, block)| home != own && block.contains(&address));
        Ok(found.map_or(Origin::Nowhere, |(home, block)| Origin::ForeignBlock { home, block }))
    }

    pub(crate) async fn pinned(
        &mut self,
        api: &Connection,
        addresses: &[IpAddr],
        local_node: &mut dyn LocalNode,
    ) -> Result<Vec<Candidate>, BindError> {
        let mut candidates = Vec::new();
        for address in addresses {
            let left = self.own.iter().find(|claim| claim.spec.address == *address);
            candidates.push(match left {
                Some(claim) => again(claim, local_node)?,
                None => {
                    Candidate { address: *address, origin: self.origin(api, *address, local_node).await? }
                }
            });
        }
        Ok(candidates)
    }

    /// One candidate per family of the node's pods. `kept` are those of an earlier choice, which are used
    /// again unless they must be avoided.
    pub(crate) async fn candidates(
        &mut self,
        api: &Connection,
        key: &StickyKey,
        kept: &[Candidate],
        avoid: &BTreeSet<IpAddr>,
        local_node: &mut dyn LocalNode,
    ) -> Result<Vec<Candidate>, BindError> {
        let mut candidates = Vec::new();
        for family in local_node.families()? {
            let is_good = |address| Family::of(address) == family && !avoid.contains(&address);
            if let Some(kept) = kept.iter().find(|one| is_good(one.address)) {
                candidates.push(kept.clone());
                continue;
            }
            let left = self.own.iter().map(|claim| (claim, &claim.spec)).find(|(_, spec)| {
                is_good(spec.address) && spec.phase != ClaimPhase::Refused && spec.released != Some(true)
            });
            let candidate = match left {
                Some((claim, _)) => Some(again(claim, local_node)?),
                None => match self.of_pools(api, key, family, avoid, local_node).await? {
                    Some(candidate) => Some(candidate),
                    None => local_node.reserve_any(family, avoid)?,
                },
            };
            candidates.push(candidate.ok_or(BindError::Exhausted { family })?);
        }
        Ok(candidates)
    }

    /// Whether a pool is for the pods of this node. An invalid selector selects no node.
    fn serves(&self, pool: &IPPool) -> bool {
        pool.spec.node_selector.as_ref().is_none_or(|written| {
            Selector::check(written).is_ok_and(|selector| selector.matches(&self.labels))
        })
    }

    /// A free address of a Sticky pool. Where the search starts depends on the claimant, so that claimants
    /// that come at once do not all try the same.
    async fn of_pools(
        &mut self,
        api: &Connection,
        key: &StickyKey,
        family: Family,
        avoid: &BTreeSet<IpAddr>,
        local_node: &dyn LocalNode,
    ) -> Result<Option<Candidate>, BindError> {
        let serving = self.pools.iter().filter(|pool| self.serves(pool));
        let ranges = serving.flat_map(|pool| pool.spec.cidrs.iter().map(move |range| (pool, *range)));
        let ranges: Vec<_> = ranges.filter(|(_, range)| Family::of(range.addr()) == family).collect();
        if ranges.is_empty() {
            return Ok(None);
        }
        let claims: Api<AddressClaim> = Api::all(api.client());
        let blocks = blocks(&mut self.blocks, api).await?.iter().map(|(_, block)| block);
        for (pool, range) in ranges {
            if blocks.clone().any(|block| block.contains(&range)) {
                continue;
            }
            let inside: Vec<&IpNet> = blocks.clone().filter(|block| range.contains(*block)).collect();
            let of_range = format!("{}={}", labels::BLOCK, labels::block_value(range));
            let of_range = ListParams::default().labels(&of_range);
            let listed = api.read("list AddressClaims", || claims.list_metadata(&of_range)).await?;
            let taken: BTreeSet<String> =
                listed.items.into_iter().filter_map(|claim| claim.metadata.name).collect();
            let free = |address: &IpAddr| {
                !avoid.contains(address)
                    && !pool.excludes(*address)
                    && !local_node.is_own(*address)
                    && !inside.iter().any(|block| block.contains(address))
                    && !taken.contains(&ClaimName::of(*address).to_string())
            };
            if let Some(address) = search(range, start(key), free) {
                return Ok(Some(Candidate { address, origin: Origin::StickyPool { range } }));
            }
        }
        Ok(None)
    }
}

/// Where an address comes from by the pools that may be used alone; none if it is of no pool. The caller has
/// checked that it is in no node's block.
pub(crate) fn of_sticky_pool(pools: &[IPPool], address: IpAddr) -> Option<Origin> {
    pools.iter().find_map(|pool| {
        let range = *pool.spec.cidrs.iter().find(|range| range.contains(&address))?;
        Some(if pool.excludes(address) { Origin::Nowhere } else { Origin::StickyPool { range } })
    })
}

/// The Sticky pools that may be used, in the order of the manual: the highest priority first, then by name.
pub fn usable(mut pools: Vec<IPPool>) -> Vec<IPPool> {
    let refused: BTreeSet<String> = overlaps(&pools).into_iter().map(|overlap| overlap.refused).collect();
    pools.retain(|pool| {
        pool.metadata.name.as_ref().is_none_or(|name| !refused.contains(name))
            && pool.spec.purpose == PoolUse::Sticky
            && pool.validation_error().is_none()
            && !pool.is_refused()
    });
    pools.sort_by_key(|pool| (std::cmp::Reverse(pool.spec.priority), pool.metadata.name.clone()));
    pools
}

/// The home blocks of all nodes, by one live read.
async fn blocks<'a>(
    read: &'a mut Option<Vec<(String, IpNet)>>,
    api: &Connection,
) -> Result<&'a [(String, IpNet)], ApiError> {
    if read.is_none() {
        let nodes = list_nodes(api).await?;
        let blocks = nodes.iter().flat_map(|node| {
            let name = node.metadata.name.clone().unwrap_or_default();
            home_blocks(node).into_iter().map(move |block| (name.clone(), block))
        });
        *read = Some(blocks.collect());
    }
    Ok(read.as_deref().unwrap_or_default())
}

/// What an earlier attempt claimed. Of the node's own block it is reserved again: the store may have been
/// lost since.
fn again(claim: &AddressClaim, local_node: &mut dyn LocalNode) -> Result<Candidate, BindError> {
    let mut origin = origin_of(claim, local_node.node());
    if matches!(origin, Origin::OwnBlock { .. }) {
        let reserved = local_node.reserve_this(claim.spec.address)?;
        if reserved != Origin::Nowhere {
            // If the claim is gone by now, another node asks the home node again.
            origin = reserved;
        }
    }
    Ok(Candidate { address: claim.spec.address, origin })
}

fn origin_of(claim: &AddressClaim, node: &str) -> Origin {
    let block = claim.spec.block.as_deref().and_then(|block| block.parse().ok());
    let block = block.unwrap_or_else(|| IpNet::from(claim.spec.address));
    match &claim.spec.home_node {
        None => Origin::StickyPool { range: block },
        Some(home) if home == node => Origin::OwnBlock { node: home.clone(), block },
        Some(home) => Origin::ForeignBlock { home: home.clone(), block },
    }
}

fn start(key: &StickyKey) -> u128 {
    let digest = Sha256::digest(key.to_string().as_bytes());
    digest.iter().take(8).fold(0, |sum, byte| (sum << 8) | u128::from(*byte))
}

/// The first free address from `start` on, going round; never the network or broadcast address.
fn search(range: IpNet, start: u128, free: impl Fn(&IpAddr) -> bool) -> Option<IpAddr> {
    let bits = u32::from(range.max_prefix_len() - range.prefix_len());
    let (first, last) = match (range, bits) {
        // A range of one or two is all addresses.
        (_, 0) => (0, 0),
        (_, 1) => (0, 1),
        (IpNet::V4(_), bits) => (1, (1u128 << bits) - 2),
        (IpNet::V6(_), bits) => (1, 1u128.checked_shl(bits).unwrap_or(0).wrapping_sub(1)),
    };
    let size = (last - first).saturating_add(1);
    let at = |offset: u128| match range {
        IpNet::V4(v4) => {
            let offset = u32::try_from(offset).unwrap_or(u32::MAX);
            IpAddr::from(std::net::Ipv4Addr::from_bits(v4.network().to_bits().saturating_add(offset)))
        }
        IpNet::V6(v6) => IpAddr::from(std::net::Ipv6Addr::from_bits(v6.network().to_bits() | offset)),
    };
    let start = start % size;
    (0..size.min(MAX_TRIED)).map(|step| at(first + (start + step) % size)).find(|address| free(address))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn all(range: &str, start: u128) -> Vec<IpAddr> {
        let found = std::cell::RefCell::new(Vec::new());
        let none = search(range.parse().unwrap(), start, |address| {
            found.borrow_mut().push(*address);
            false
        });
        assert_eq!(none, None);
        found.into_inner()
    }

    #[test]
    fn every_usable_address_is_tried_once_from_any_start() {
        for start in [0, 1, 5, u128::from(u64::MAX)] {
            let mut tried = all("10.0.0.0/29", start);
            tried.sort();
            let texts: Vec<String> = tried.iter().map(ToString::to_string).collect();
            assert_eq!(texts, ["10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.4", "10.0.0.5", "10.0.0.6"]);
        }
        assert_eq!(all("10.0.0.9/32", 7).len(), 1);
        assert_eq!(all("10.0.0.8/31", 7).len(), 2);
    }

    #[test]
    fn a_pool_that_was_refused_for_what_it_overlaps_is_not_used() {
        let pool = |status: &str, reason: &str| -> IPPool {
            let condition = serde_json::json!({"type": "Ready", "status": status, "reason": reason, "message": "",
                "lastTransitionTime": "2026-01-01T00:00:00Z"});
            serde_json::from_value(
                serde_json::json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "IPPool",
                "metadata": {"name": "p"}, "spec": {"cidrs": ["10.0.8.0/22"], "use": "Sticky"},
                "status": {"conditions": [condition]}}),
            )
            .unwrap()
        };
        for (status, reason, is_used) in [
            ("False", "OverlapsBlock", false),
            ("False", "Overlaps", false),
            ("False", "Full", true),
            ("True", "InUse", true),
        ] {
            assert_eq!(usable(vec![pool(status, reason)]).len(), usize::from(is_used), "{reason}");
        }
    }

    proptest! {
        #[test]
        fn a_found_address_is_of_the_range(address: IpAddr, bits in 0u8..=128, start: u64) {
            let bits = if address.is_ipv4() { bits.min(32) } else { bits };
            let range = IpNet::new(address, bits).unwrap().trunc();
            let found = search(range, u128::from(start), |_| true).unwrap();
            prop_assert!(range.contains(&found), "{found} is not of {range}");
        }
    }
}
