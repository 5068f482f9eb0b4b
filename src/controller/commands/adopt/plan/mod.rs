//! What must be in the nodes' pools before Cilium may use them, and what must be gone before it may use its
//! blocks again. Pure. Must never offer an address that is in use or claimed, and never give one pod's
//! address to another.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::alloc::Family;
use crate::cluster::cilium::objects::PoolEntry;
use crate::cluster::cilium::pool::resource;
use crate::cluster::protocol::write::Precondition;
use crate::controller::flags::BackTo;
use crate::controller::index::ClusterIndex;
use crate::controller::index::objects::{IndexedCiliumNode, IndexedNode, IndexedPod};

/// What must be written on one node's objects.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct NodePlan {
    pub node: String,
    /// Its CiliumNode as the plan was made from: written only if it has not changed since.
    pub at: Precondition,
    /// Its home blocks.
    pub blocks: Vec<IpNet>,
    /// How many addresses of live pods there are, how many of them sticky, and how many of Cilium's own.
    pub pods: usize,
    /// Of those, the sticky ones.
    pub sticky: usize,
    /// Addresses of Cilium itself: router, health, ingress.
    pub own: usize,
    /// Addresses that any pod may have, after the write.
    pub free: usize,
    /// Keys to put into the pool.
    pub put: BTreeMap<IpAddr, PoolEntry>,
    /// The CiliumNode's ranges, if it names no block.
    pub pod_cidrs: Option<Vec<IpNet>>,
    /// The Node's ranges, if it names none: in `crd` mode Cilium would invent some.
    pub node_cidrs: Option<Vec<IpNet>>,
}

impl NodePlan {
    /// Whether there is nothing to write.
    pub(crate) fn is_done(&self) -> bool {
        self.put.is_empty() && self.pod_cidrs.is_none() && self.node_cidrs.is_none()
    }
}

/// What is in the way.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Obstacle {
    /// There is nothing to write a pool on.
    NoCiliumNode {
        node: String,
        /// A pod that lives there.
        pod: String,
    },
    /// No object names a range of the node.
    NoBlock { node: String },
    /// A live pod's address is not in its node's pool.
    Missing {
        node: String,
        /// The pod, or what of Cilium's it is.
        who: String,
        address: IpAddr,
    },
    /// A live pod's address is kept for another in its node's pool.
    Contested {
        node: String,
        pod: String,
        address: IpAddr,
        /// The owner that the pool names.
        owner: String,
    },
    /// A live pod has an address that is not of its node's blocks.
    Away { node: String, pod: String, address: IpAddr },
    /// A live pod has an address that the Node itself does not name, for a mode that goes by the Node.
    NotOfNode { node: String, pod: String, address: IpAddr },
    /// The Node names no range, for a mode that goes by the Node.
    NoRange { node: String },
    /// A single address is still routed to the node.
    Route { node: String, address: IpAddr },
    /// It is not known which address the object keeps, or what it offers already.
    Unreadable { kind: String, name: String },
    /// Cilium gets its addresses in a way from which there is none to `crd`.
    Mode {
        /// How.
        mode: String,
    },
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoCiliumNode { node, pod } => write!(
                f,
                "node {node} has no CiliumNode, and pod {pod} lives there; start cilium-agent on it, or \
                 drain it"
            ),
            Self::NoBlock { node } => write!(
                f,
                "node {node}: neither its CiliumNode nor its Node names a range; wait until it has one, or \
                 write \
                 spec.podCIDRs of the Node"
            ),
            Self::Missing { node, who, address } => write!(
                f,
                "node {node}: {address} of {who} is not in the pool of its CiliumNode; it would lose its \
                 network when \
                 cilium-agent restarts. Run this command again with --apply"
            ),
            Self::Contested { node, pod, address, owner } => write!(
                f,
                "node {node}: {address} of pod {pod} is kept for {owner} in the pool of its CiliumNode; \
                 delete one of the two pods"
            ),
            Self::Away { node, pod, address } => write!(
                f,
                "node {node}: pod {pod} has {address}, which is of no block of this node; let it run on its \
                 home node, or \
                 delete its StickyIP and the pod"
            ),
            Self::NotOfNode { node, pod, address } => write!(
                f,
                "node {node}: pod {pod} has {address}, which is of no range that the Node itself names, and \
                 kubernetes mode \
                 knows no other; delete its StickyIP, if there is one, and the pod"
            ),
            Self::NoRange { node } => write!(
                f,
                "node {node}: its Node names no range, and in kubernetes mode Cilium's agent would wait for \
                 one; write \
                 spec.podCIDRs of the Node"
            ),
            Self::Route { node, address } => write!(
                f,
                "node {node}: its CiliumNode still routes {address} to it; the pod that had it must go home, \
                 then the agent \
                 takes it out"
            ),
            Self::Unreadable { kind, name } => write!(
                f,
                "{kind} {name} cannot be read (the note above says why), so an address that it keeps might \
                 be offered; correct \
                 or delete it"
            ),
            Self::Mode { mode } => write!(
                f,
                "Cilium gets its addresses by ipam: {mode}; the way leads from cluster-pool or kubernetes \
                 only"
            ),
        }
    }
}

/// The objects that would say which addresses are kept or shown, and cannot be read.
fn unreadable(index: &ClusterIndex) -> Vec<Obstacle> {
    let of = |kind: &str, names: Vec<&String>| {
        let kind = kind.to_owned();
        names
            .into_iter()
            .map(move |name| Obstacle::Unreadable { kind: kind.clone(), name: name.clone() })
            .collect()
    };
    let all: [Vec<Obstacle>; 3] = [
        of("AddressClaim", index.claims.unreadable().collect()),
        of("StickyIP", index.stickies.unreadable().collect()),
        of("CiliumNode", index.cilium_nodes.unreadable().collect()),
    ];
    all.concat()
}

/// Plans the way into `crd` mode. `free` addresses a node are offered to any pod; none are while agents may
/// go by the pools already, because an address that is offered late may be another's by then.
pub(crate) fn into_crd(index: &ClusterIndex, free: Option<usize>) -> (Vec<NodePlan>, Vec<Obstacle>) {
    let kept: BTreeSet<IpAddr> = index.claims.values().map(|claim| claim.spec.address).collect();
    let live = live(index);
    let shown: BTreeSet<IpAddr> = live.values().flatten().map(|(_, _, address)| *address).collect();
    let mut obstacles = unreadable(index);
    let free = free.filter(|_| obstacles.is_empty());
    for (node, pods) in &live {
        if index.cilium_nodes.get(node).is_none()
            && let Some((pod, ..)) = pods.first()
        {
            obstacles.push(Obstacle::NoCiliumNode { node: (*node).to_owned(), pod: (*pod).to_owned() });
        }
    }
    let mut plans = Vec::new();
    for (name, cilium) in index.cilium_nodes.iter() {
        let blocks = home(index, name, cilium);
        let pods = live.get(name.as_str()).map(Vec::as_slice).unwrap_or_default();
        if blocks.is_empty() {
            if !pods.is_empty() || index.nodes.get(name).is_some() {
                obstacles.push(Obstacle::NoBlock { node: name.clone() });
            }
            continue;
        }
        let own = own(cilium, &blocks);
        let at = Precondition { uid: cilium.uid.clone(), resource_version: cilium.resource_version.clone() };
        let mut plan = NodePlan {
            node: name.clone(),
            at,
            blocks: blocks.clone(),
            own: own.len(),
            ..NodePlan::default()
        };
        for (pod, seen, address) in pods {
            plan.pods += 1;
            let wanted = entry(index, pod, seen, *address);
            plan.sticky += usize::from(!wanted.owner.is_empty());
            match cilium.owned.get(address) {
                Some(current) if current.owner != **pod => obstacles.push(Obstacle::Contested {
                    node: name.clone(),
                    pod: (*pod).to_owned(),
                    address: *address,
                    owner: current.owner.clone(),
                }),
                Some(_) => {}
                // Marking the pod that has it: the one case in which an unowned key gets an owner.
                None if !cilium.unowned.contains(address) || !wanted.owner.is_empty() => {
                    plan.put.insert(*address, wanted);
                }
                None => {}
            }
        }
        for address in own.iter().filter(|address| !cilium.unowned.contains(*address)) {
            plan.put.insert(*address, PoolEntry::default());
        }
        let taken = |address: &IpAddr| {
            kept.contains(address)
                || shown.contains(address)
                || own.contains(address)
                || cilium.owned.contains_key(address)
        };
        let offered: BTreeSet<IpAddr> =
            cilium.unowned.iter().filter(|address| !taken(address)).copied().collect();
        plan.free = offered.len();
        for family in [Family::V4, Family::V6].into_iter().filter(|_| free.is_some()) {
            let there = offered.iter().filter(|address| Family::of(**address) == family).count();
            let more = free.unwrap_or(0).saturating_sub(there);
            let of_family = blocks.iter().filter(|block| Family::of(block.addr()) == family);
            let next =
                of_family.flat_map(hosts).filter(|address| !taken(address) && !offered.contains(address));
            for address in next.take(more) {
                plan.put.insert(address, PoolEntry::default());
                plan.free += 1;
            }
        }
        // Single addresses that are routed there stay.
        let with_routes = || blocks.iter().chain(&cilium.pod_cidrs).copied().collect();
        plan.pod_cidrs = cilium.blocks().next().is_none().then(with_routes);
        plan.node_cidrs =
            index.nodes.get(name).filter(|node| node.pod_cidrs.is_empty()).map(|_| first(&blocks));
        plans.push(plan);
    }
    obstacles.sort();
    (plans, obstacles)
}

/// Every address of a live pod, or of Cilium, that is not in its node's pool. While there is one, do not go
/// on.
pub fn missing(index: &ClusterIndex) -> Vec<Obstacle> {
    let mut found = Vec::new();
    for (node, pods) in live(index) {
        for (pod, _, address) in pods {
            let pool = index.cilium_nodes.get(node);
            let there = pool.is_some_and(|pool| {
                pool.unowned.contains(&address)
                    || pool.owned.get(&address).is_some_and(|entry| entry.owner == *pod)
            });
            if !there {
                let (node, who) = (node.to_owned(), format!("pod {pod}"));
                found.push(Obstacle::Missing { node, who, address });
            }
        }
    }
    for (node, cilium) in index.cilium_nodes.iter() {
        let own = own(cilium, &home(index, node, cilium));
        for address in own.iter().filter(|address| !cilium.unowned.contains(*address)) {
            let who = "Cilium itself".to_owned();
            found.push(Obstacle::Missing { node: node.clone(), who, address: *address });
        }
    }
    found.sort();
    found
}

/// What is in the way back to a mode in which a node's pods have addresses of its blocks alone.
pub fn back(index: &ClusterIndex, to: BackTo) -> Vec<Obstacle> {
    let mut found = Vec::new();
    for (node, pods) in live(index) {
        let blocks: Vec<IpNet> =
            index.cilium_nodes.get(node).map(|cilium| cilium.blocks().collect()).unwrap_or_default();
        let named = index.nodes.get(node).map(named_by).unwrap_or_default();
        for (pod, _, address) in pods {
            let (node, pod) = (node.to_owned(), pod.clone());
            if !blocks.iter().any(|block| block.contains(&address)) {
                found.push(Obstacle::Away { node, pod, address });
            } else if to == BackTo::Kubernetes && !named.iter().any(|range| range.contains(&address)) {
                found.push(Obstacle::NotOfNode { node, pod, address });
            }
        }
    }
    if to == BackTo::Kubernetes {
        let bare = index.nodes.iter().filter(|(_, seen)| named_by(seen).is_empty());
        found.extend(bare.map(|(node, _)| Obstacle::NoRange { node: node.clone() }));
    }
    for (node, cilium) in index.cilium_nodes.iter() {
        let single = cilium.pod_cidrs.iter().filter(|net| net.prefix_len() == net.max_prefix_len());
        found.extend(single.map(|net| Obstacle::Route { node: node.clone(), address: net.addr() }));
    }
    found.sort();
    found
}

/// Pods that are bound to a node and show no address yet: they may get one that no plan knows.
pub fn starting(index: &ClusterIndex) -> usize {
    let bound =
        index.pods.values().filter(|pod| !pod.node.is_empty() && !pod.ended && !pod.facts.host_network);
    bound.filter(|pod| pod.addresses.is_empty()).count()
}

type LivePod<'a> = (&'a String, &'a IndexedPod, IpAddr);

/// The addresses of live pods, by node.
fn live(index: &ClusterIndex) -> BTreeMap<&str, Vec<LivePod<'_>>> {
    let mut live: BTreeMap<&str, Vec<LivePod<'_>>> = BTreeMap::new();
    for (name, pod) in index.pods.iter() {
        if pod.node.is_empty() || pod.ended || pod.facts.host_network {
            continue;
        }
        let pods = live.entry(&pod.node).or_default();
        pods.extend(pod.addresses.iter().map(|address| (name, pod, *address)));
    }
    live.retain(|_, pods| !pods.is_empty());
    live
}

/// The pool entry of a pod's address: with its owner if a StickyIP keeps it for the pod.
fn entry(index: &ClusterIndex, name: &str, pod: &IndexedPod, address: IpAddr) -> PoolEntry {
    match index.sticky_of(pod).filter(|sticky| sticky.spec.addresses.contains(&address)) {
        Some(sticky) => PoolEntry {
            owner: name.to_owned(),
            resource: resource(&pod.facts.namespace, &sticky.spec.workload),
        },
        None => PoolEntry::default(),
    }
}

/// The addresses that Cilium itself has of the node's blocks; one from elsewhere is not given out of a pool.
fn own(cilium: &IndexedCiliumNode, blocks: &[IpNet]) -> BTreeSet<IpAddr> {
    let of_blocks = |address: &&IpAddr| blocks.iter().any(|block| block.contains(*address));
    cilium.own.iter().filter(of_blocks).copied().collect()
}

fn home(index: &ClusterIndex, name: &str, cilium: &IndexedCiliumNode) -> Vec<IpNet> {
    let listed: Vec<IpNet> = cilium.blocks().collect();
    let node = index.nodes.get(name);
    let own = node.map(|node| node.pod_cidrs.clone()).unwrap_or_default();
    let annotated: BTreeSet<IpNet> =
        node.map(|node| node.annotated.values().flatten().copied().collect()).unwrap_or_default();
    [listed, own, annotated.into_iter().collect()]
        .into_iter()
        .find(|ranges| !ranges.is_empty())
        .unwrap_or_default()
}

/// What Cilium goes by in `kubernetes` mode: the first range of a family in the Node's spec, or else in its
/// annotations.
fn named_by(node: &IndexedNode) -> Vec<IpNet> {
    let annotated = node.annotated.values().flatten();
    first(&node.pod_cidrs.iter().chain(annotated).copied().collect::<Vec<_>>())
}

/// One range a family, as a Node has them.
fn first(blocks: &[IpNet]) -> Vec<IpNet> {
    let of = |family| blocks.iter().copied().find(|block| Family::of(block.addr()) == family);
    [of(Family::V4), of(Family::V6)].into_iter().flatten().collect()
}

/// The addresses of a block that a pod may have: neither the network's nor the last one.
fn hosts(block: &IpNet) -> impl Iterator<Item = IpAddr> + use<> {
    let (network, broadcast) = (block.network(), block.broadcast());
    block.hosts().filter(move |address| *address != network && *address != broadcast)
}

#[cfg(test)]
mod tests;
