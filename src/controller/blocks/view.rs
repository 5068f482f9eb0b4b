//! What the index says of nodes and pools, as the decision on blocks wants it. Must never leave out a range that anybody says:
//! an object that cannot be read is said to be in doubt, and then nothing new is given.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::alloc::Family;
use crate::cluster::objects::ip_pool::overlaps;
use crate::cluster::objects::{IPPool, PoolUse};
use crate::controller::index::Index;
use crate::controller::settings::CiliumIpam;
use crate::policy::blocks::{Lock, NodeFacts, Pool, View};
use crate::policy::selector::Selector;

/// Where blocks are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// On CiliumNodes.
    CiliumNode,
    /// In the annotations of Nodes.
    Annotations,
}

impl Place {
    /// The place for this mode; none if another hands out the blocks.
    #[must_use]
    pub fn of(mode: CiliumIpam) -> Option<Self> {
        match mode {
            CiliumIpam::Crd | CiliumIpam::Delegated => Some(Self::CiliumNode),
            CiliumIpam::Kubernetes => Some(Self::Annotations),
            CiliumIpam::ClusterPool => None,
        }
    }
}

/// A pool that is not used, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedPool {
    /// Its name.
    pub name: String,
    /// A word for a condition's reason.
    pub reason: &'static str,
    /// A sentence for people.
    pub why: String,
}

/// The view, and what could not be used.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Seen {
    /// What the decision rests on.
    pub view: View,
    /// Pools that are not used.
    pub refused: Vec<RefusedPool>,
    /// Objects that cannot be read: nobody knows which ranges they name.
    pub in_doubt: Vec<String>,
}

/// What the index says, with the locks as they were read.
#[must_use]
pub fn seen(index: &Index, place: Place, cluster_pool: Option<&IPPool>, locks: Vec<Lock>) -> Seen {
    let objects: Vec<IPPool> = index.pools.values().cloned().collect();
    let (mut pools, refused) = usable(&objects);
    let named: Vec<IpNet> = objects.iter().flat_map(|pool| pool.spec.cidrs.iter().copied()).collect();
    if let Some(mut behind) = cluster_pool.and_then(|pool| read(pool).ok()) {
        // Whatever a pool names is that pool's, also while it is not used.
        behind.excluded.extend(&named);
        pools.push(behind);
    }
    let of = |purpose: PoolUse| objects.iter().filter(move |pool| pool.spec.purpose == purpose);
    let view = View {
        pools,
        nodes: nodes(index, place),
        locks,
        kept: index.claims.values().map(|claim| claim.spec.address).collect(),
        closed: of(PoolUse::Sticky).flat_map(|pool| pool.spec.cidrs.iter().copied()).collect(),
    };
    let broken = |kind: &str, names: Vec<String>| -> Vec<String> {
        names.into_iter().map(|name| format!("{kind} {name}")).collect()
    };
    let in_doubt = [
        broken("Node", index.nodes.broken().cloned().collect()),
        broken("CiliumNode", index.cilium_nodes.broken().cloned().collect()),
        broken("IPPool", index.pools.broken().cloned().collect()),
        broken("AddressClaim", index.claims.broken().cloned().collect()),
    ]
    .concat();
    Seen { view, refused, in_doubt }
}

/// The pools that may be used, and those that may not.
fn usable(objects: &[IPPool]) -> (Vec<Pool>, Vec<RefusedPool>) {
    let mut refused: BTreeMap<String, RefusedPool> = BTreeMap::new();
    for overlap in overlaps(objects) {
        let (stands, ranges) = (&overlap.stands, overlap.ranges);
        let why = format!(
            "its range {} overlaps {} of IPPool {stands}, which is older; correct or delete one of the two",
            ranges.1, ranges.0
        );
        let name = overlap.refused;
        refused.insert(name.clone(), RefusedPool { name, reason: "Overlaps", why });
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

fn read(object: &IPPool) -> Result<Pool, String> {
    let spec = &object.spec;
    let selector = spec.node_selector.as_ref().map(Selector::check).transpose();
    let net = |text: &String| -> Result<IpNet, String> {
        let address = text.parse::<IpAddr>().map(IpNet::from);
        address
            .or_else(|_| text.parse::<IpNet>())
            .map_err(|_| format!("excluded {text:?} is no address and no range"))
    };
    Ok(Pool {
        name: object.metadata.name.clone().unwrap_or_default(),
        ranges: spec.cidrs.clone(),
        ipv4: spec.block_size.ipv4,
        ipv6: spec.block_size.ipv6,
        selector: selector.map_err(|error| error.to_string())?,
        priority: spec.priority,
        excluded: spec.excluded.iter().map(net).collect::<Result<_, _>>()?,
    })
}

fn nodes(index: &Index, place: Place) -> Vec<NodeFacts> {
    let mut used = used(index);
    let names: BTreeSet<&String> = index
        .nodes
        .iter()
        .map(|(name, _)| name)
        .chain(index.cilium_nodes.iter().map(|(name, _)| name))
        .collect();
    let facts = names.into_iter().map(|name| {
        let (node, cilium) = (index.nodes.get(name), index.cilium_nodes.get(name));
        let annotated = node.into_iter().flat_map(|node| node.annotated.values().flatten()).copied();
        let own = node.into_iter().flat_map(|node| &node.pod_cidrs).copied();
        let listed: Vec<IpNet> = cilium.map(|cilium| cilium.blocks().collect()).unwrap_or_default();
        let (blocks, said): (Vec<IpNet>, Vec<IpNet>) = match place {
            Place::CiliumNode => (listed, own.chain(annotated).collect()),
            // Cilium looks at the Node first: what stands there it has.
            Place::Annotations => (own.chain(annotated).collect(), listed),
        };
        let blocks: BTreeSet<IpNet> = blocks.into_iter().map(|block| block.trunc()).collect();
        NodeFacts {
            name: name.clone(),
            uid: node.map(|node| node.uid.clone()),
            labels: node.map(|node| node.labels.clone()).unwrap_or_default(),
            writable: match place {
                Place::CiliumNode => cilium.is_some(),
                Place::Annotations => node.is_some(),
            },
            blocks: blocks.into_iter().collect(),
            said: said.into_iter().map(|range| range.trunc()).collect(),
            used: used.remove(name).unwrap_or_default(),
        }
    });
    facts.collect()
}

/// How many addresses each node's pods show, and how many are kept in its blocks beside them.
fn used(index: &Index) -> BTreeMap<String, BTreeMap<Family, u128>> {
    let mut addresses: BTreeSet<(&str, IpAddr)> = BTreeSet::new();
    for pod in index.pods.values().filter(|pod| !pod.ended && !pod.facts.host_network) {
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
