//! What the index shows of nodes and pools, as the decision on blocks needs it. Must never leave out a range
//! that any object names: while an object cannot be read, nothing new is given.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::alloc::Family;
use crate::alloc::block::overlap;
use crate::cluster::objects::ip_pool::{OVERLAPS, OVERLAPS_BLOCK, overlaps};
use crate::cluster::objects::{IPPool, PoolUse};
use crate::controller::duties::node_blocks::locks::{self, LockList};
use crate::controller::duties::node_blocks::pools::{flags_pool, read};
use crate::controller::index::ClusterIndex;
use crate::policy::mode::BlockLocation;
use crate::policy::node_blocks::{BlockFacts, NodeFacts, Pool};

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RefusedPool {
    pub name: String,
    pub reason: &'static str,
    pub why: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct BlockView {
    pub view: BlockFacts,
    pub refused: Vec<RefusedPool>,
    /// Objects that cannot be read: the ranges that they name are not known.
    pub in_doubt: Vec<String>,
}

pub(crate) fn block_view(
    index: &ClusterIndex,
    place: BlockLocation,
    cluster_pool: Option<&IPPool>,
    listed: LockList,
) -> BlockView {
    let objects: Vec<IPPool> = index.pools.values().cloned().collect();
    let (mut pools, mut refused) = usable(&objects);
    let named: Vec<IpNet> = objects.iter().flat_map(|pool| pool.spec.cidrs.iter().copied()).collect();
    pools.extend(cluster_pool.and_then(|pool| flags_pool(pool, &named)));
    let nodes = nodes(index, place);
    let of = |purpose: PoolUse| objects.iter().filter(move |pool| pool.spec.purpose == purpose);
    let sticky = of(PoolUse::Sticky).flat_map(|pool| pool.spec.cidrs.iter().copied());
    let own = index.nodes.values().flat_map(|node| node.addresses.iter().copied().map(IpNet::from));
    let view = BlockFacts {
        pools,
        nodes,
        locks: listed.locks,
        broken: listed.broken,
        kept: index.claims.values().map(|claim| claim.spec.address).collect(),
        closed: sticky.chain(own).collect(),
    };
    let is_refused =
        |pool: &&IPPool| refused.iter().any(|refused| pool.metadata.name.as_ref() == Some(&refused.name));
    let others = of(PoolUse::Sticky).filter(|pool| !is_refused(pool));
    let over_blocks: Vec<RefusedPool> = others.filter_map(|pool| over_a_block(pool, &view)).collect();
    refused.extend(over_blocks);
    let nodes = index.nodes.unreadable().map(|name| format!("Node {name}"));
    let cilium_nodes = index.cilium_nodes.unreadable().map(|name| format!("CiliumNode {name}"));
    let pools = index.pools.unreadable().map(|name| format!("IPPool {name}"));
    let claims = index.claims.unreadable().map(|name| format!("AddressClaim {name}"));
    BlockView { view, refused, in_doubt: nodes.chain(cilium_nodes).chain(pools).chain(claims).collect() }
}

fn usable(objects: &[IPPool]) -> (Vec<Pool>, Vec<RefusedPool>) {
    let mut refused: BTreeMap<String, RefusedPool> = BTreeMap::new();
    for overlap in overlaps(objects) {
        let (stands, ranges) = (&overlap.stands, overlap.ranges);
        let why = format!(
            "its range {} overlaps {} of IPPool {stands}, which is older; correct or delete one of the two",
            ranges.1, ranges.0
        );
        let name = overlap.refused;
        refused.insert(name.clone(), RefusedPool { name, reason: OVERLAPS, why });
    }
    let mut pools = Vec::new();
    for object in objects.iter().filter(|object| object.spec.purpose == PoolUse::NodeBlocks) {
        let name = object.metadata.name.clone().unwrap_or_default();
        if refused.contains_key(&name) {
            continue;
        }
        match read(object) {
            Ok(pool) => pools.push(pool),
            Err(why) => drop(refused.insert(name.clone(), RefusedPool { name, reason: "Unreadable", why })),
        }
    }
    (pools, refused.into_values().collect())
}

/// Refuses a Sticky pool if any object names a block with addresses of it: the node's ordinary pods use them
/// unasked.
fn over_a_block(pool: &IPPool, view: &BlockFacts) -> Option<RefusedPool> {
    let shared = |block: IpNet| {
        let mut ranges = pool.spec.cidrs.iter().copied();
        ranges.find(|range| overlap(*range, block) && !pool.excludes_shared(*range, block))
    };
    let of_nodes = view.nodes.iter().flat_map(|node| {
        node.blocks.iter().chain(&node.other_ranges).map(|block| (*block, format!("of node {}", node.name)))
    });
    let locked = view.locks.iter().map(|lock| {
        let kept = format!("that Lease {} keeps for node {}", locks::name(lock.block), lock.node);
        (lock.block, kept)
    });
    let broken = view.broken.iter().map(|broken| (broken.block, format!("of {}", broken.object)));
    let mut all = of_nodes.chain(locked).chain(broken);
    let (block, whose, range) = all.find_map(|(block, whose)| Some((block, whose, shared(block)?)))?;
    let name = pool.metadata.name.clone().unwrap_or_default();
    let why = format!(
        "IPPool {name} is not used: its range {range} overlaps block {block} {whose}; name other ranges, or \
         put {block} into spec.excluded, or drain the node and delete it"
    );
    Some(RefusedPool { name, reason: OVERLAPS_BLOCK, why })
}

fn nodes(index: &ClusterIndex, place: BlockLocation) -> Vec<NodeFacts> {
    let mut used = used(index);
    let facts = |name: &String| {
        let (node, cilium) = (index.nodes.get(name), index.cilium_nodes.get(name));
        let annotated = node.into_iter().flat_map(|node| node.annotated.values().flatten()).copied();
        let own = node.into_iter().flat_map(|node| &node.pod_cidrs).copied();
        let listed: Vec<IpNet> = cilium.map(|cilium| cilium.blocks().collect()).unwrap_or_default();
        let (blocks, other_ranges): (Vec<IpNet>, Vec<IpNet>) = match place {
            BlockLocation::CiliumNode => (listed, own.chain(annotated).collect()),
            // Cilium reads the Node first: it uses what is there.
            BlockLocation::Annotations => (own.chain(annotated).collect(), listed),
        };
        let blocks: BTreeSet<IpNet> = blocks.into_iter().map(|block| block.trunc()).collect();
        NodeFacts {
            name: name.clone(),
            uid: node.map(|node| node.uid.clone()),
            labels: node.map(|node| node.labels.clone()).unwrap_or_default(),
            writable: match place {
                BlockLocation::CiliumNode => cilium.is_some(),
                BlockLocation::Annotations => node.is_some(),
            },
            blocks: blocks.into_iter().collect(),
            other_ranges: other_ranges.into_iter().map(|range| range.trunc()).collect(),
            used: used.remove(name).unwrap_or_default(),
        }
    };
    index.node_names().into_iter().map(facts).collect()
}

/// How many addresses each node's pods show, and how many are kept in its blocks beside them.
fn used(index: &ClusterIndex) -> BTreeMap<String, BTreeMap<Family, u128>> {
    let mut addresses: BTreeSet<(&str, IpAddr)> = BTreeSet::new();
    for pod in index.pods.values().filter(|pod| pod.is_live()) {
        let blocks = index.cilium_nodes.get(&pod.node).map(|node| node.blocks().collect::<Vec<_>>());
        // One that is away from home takes nothing from the blocks of the node on which it lives.
        let at_home = |address: &&IpAddr| {
            blocks.as_ref().is_none_or(|blocks| blocks.iter().any(|block| block.contains(*address)))
        };
        addresses.extend(pod.addresses.iter().filter(at_home).map(|address| (pod.node.as_str(), *address)));
    }
    for claim in index.claims.values() {
        if let Some(home) = &claim.spec.home_node {
            addresses.insert((home, claim.spec.address));
        }
    }
    let mut used: BTreeMap<String, BTreeMap<Family, u128>> = BTreeMap::new();
    for (node, address) in addresses {
        *used.entry(node.to_owned()).or_default().entry(Family::of(address)).or_default() += 1;
    }
    used
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::node_blocks::{BlockLimits, BlockLock, BlockStep, GoneNodes, UnreadableLock, decide};
    use crate::policy::selection::facts::TimePoint;
    use crate::runtime::cache::CacheEvent;
    use k8s_openapi::api::core::v1::Node;
    use serde_json::{Value, json};

    fn with_pool(spec: Value) -> ClusterIndex {
        let mut index = ClusterIndex::default();
        let pool = IPPool::new("sticky", serde_json::from_value(spec).unwrap());
        index.pools.apply(CacheEvent::Applied(("sticky".into(), pool)));
        index
    }

    fn over() -> ClusterIndex {
        with_pool(json!({"cidrs": ["10.0.8.0/22"], "use": "Sticky"}))
    }

    fn take_node(index: &mut ClusterIndex, node: Value) {
        let node: Node = serde_json::from_value(node).unwrap();
        index.nodes.apply(CacheEvent::Applied(("n9".into(), node.into())));
    }

    fn take_blocks(index: &mut ClusterIndex, blocks: &[&str]) {
        let node = json!({"metadata": {"name": "n9"}, "spec": {"ipam": {"podCIDRs": blocks}}});
        let node: crate::cluster::objects::cilium::CiliumNode = serde_json::from_value(node).unwrap();
        index.cilium_nodes.apply(CacheEvent::Applied(("n9".into(), node.into())));
    }

    fn refused(index: &ClusterIndex, locks: &[BlockLock]) -> Vec<RefusedPool> {
        let listed = LockList { locks: locks.to_vec(), ..LockList::default() };
        let both = [BlockLocation::CiliumNode, BlockLocation::Annotations]
            .map(|place| block_view(index, place, None, listed.clone()).refused);
        assert_eq!(both[0], both[1]);
        both[0].clone()
    }

    #[test]
    fn no_block_is_given_that_covers_a_nodes_own_address() {
        let mut index = with_pool(json!({"cidrs": ["10.0.0.0/16"], "use": "NodeBlocks"}));
        let addresses = json!([{"type": "Hostname", "address": "10.0.2.1"}, {"type": "InternalIP", "address": "10.0.0.10"},
            {"type": "ExternalIP", "address": "10.0.1.10"}, {"type": "InternalIP", "address": "fd00::1"}]);
        take_node(
            &mut index,
            json!({"metadata": {"name": "n9", "uid": "u"}, "status": {"addresses": addresses}}),
        );
        take_blocks(&mut index, &[]);
        let seen = block_view(&index, BlockLocation::CiliumNode, None, LockList::default());
        let plan = decide(&seen.view, BlockLimits::default(), &mut GoneNodes::default(), TimePoint(0));
        let given: Vec<String> = plan
            .steps
            .iter()
            .filter_map(|step| match step {
                BlockStep::Assign { block, .. } => Some(block.to_string()),
                _ => None,
            })
            .collect();
        assert_eq!(given, ["10.0.2.0/24"]);
        assert!(seen.view.kept.is_empty(), "and a block that has one comes back all the same");
    }

    #[test]
    fn a_sticky_pool_over_a_block_is_refused_wherever_the_block_is_said() {
        let mut listed = over();
        take_blocks(&mut listed, &["10.0.9.0/24"]);
        let mut said = over();
        take_node(&mut said, json!({"metadata": {"name": "n9"}, "spec": {"podCIDR": "10.0.9.0/24"}}));
        let mut annotated = over();
        let annotations = json!({"network.cilium.io/ipv4-pod-cidr": "10.0.9.0/24"});
        take_node(&mut annotated, json!({"metadata": {"name": "n9", "annotations": annotations}}));
        let locked = BlockLock {
            block: "10.0.9.0/24".parse().unwrap(),
            node: "n9".into(),
            uid: "l".into(),
            version: "1".into(),
        };
        for (index, locks) in [(listed, vec![]), (said, vec![]), (annotated, vec![]), (over(), vec![locked])]
        {
            let refused = refused(&index, &locks);
            assert_eq!(refused.len(), 1);
            assert_eq!((refused[0].name.as_str(), refused[0].reason), ("sticky", "OverlapsBlock"));
            for part in ["IPPool sticky", "10.0.8.0/22", "10.0.9.0/24", "node n9"] {
                assert!(refused[0].why.contains(part), "{part}: {}", refused[0].why);
            }
        }
        let torn = UnreadableLock {
            block: "10.0.9.0/24".parse().unwrap(),
            object: "Lease torn".into(),
            uid: "t".into(),
            why: "it is torn".into(),
        };
        let torn = LockList { broken: vec![torn], ..LockList::default() };
        let refused = block_view(&over(), BlockLocation::CiliumNode, None, torn).refused;
        assert!(refused[0].why.contains("10.0.9.0/24 of Lease torn"), "{}", refused[0].why);
    }

    #[test]
    fn a_sticky_pool_beside_blocks_or_with_the_block_excluded_is_used() {
        let mut beside = over();
        // The second is the route of one that lives there.
        take_blocks(&mut beside, &["10.0.12.0/24", "10.0.9.5/32"]);
        assert_eq!(refused(&beside, &[]), []);
        for (excluded, is_used) in [("10.0.9.0/24", true), ("10.0.8.0/23", true), ("10.0.9.0/25", false)] {
            let mut index =
                with_pool(json!({"cidrs": ["10.0.8.0/22"], "use": "Sticky", "excluded": [excluded]}));
            take_blocks(&mut index, &["10.0.9.0/24"]);
            assert_eq!(refused(&index, &[]).is_empty(), is_used, "{excluded}");
        }
        let mut blocks = with_pool(json!({"cidrs": ["10.0.8.0/22"], "use": "NodeBlocks"}));
        take_blocks(&mut blocks, &["10.0.9.0/24"]);
        assert_eq!(refused(&blocks, &[]), []);
    }
}
