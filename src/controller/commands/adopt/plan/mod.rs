//! What must be in the nodes' pools before Cilium may use them, and what must be gone before it may use its
//! blocks again. Pure. Must never offer an address that is in use or claimed, and never give one pod's
//! address to another.

mod ranges;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use thiserror::Error;

use crate::alloc::Family;
use crate::cluster::cilium::pool::resource;
use crate::cluster::objects::cilium::PoolEntry;
use crate::cluster::writer::write::Precondition;
use crate::controller::index::objects::{IndexedCiliumNode, IndexedNode, IndexedPod};
use crate::controller::{flags::BackTo, index::ClusterIndex, installation::Installation};
use crate::policy::mode::CiliumMode;
use crate::policy::preflight::{CiliumOptions, PreflightFacts};
pub(crate) use ranges::{ConfigWrite, written_by_us};

/// No node needs more free addresses than this until the agent fills its pool.
const LEAST_FREE: usize = 16;

/// What the operator asks for, and how Cilium is installed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wish<'a> {
    pub installation: &'a Installation,
    /// Of the whole cluster, by its ConfigMap.
    pub mode: CiliumMode,
    /// How many addresses of a node and family any pod may have.
    pub free: usize,
    /// The node that switches first.
    pub canary: Option<&'a str>,
}

impl Wish<'_> {
    /// None is offered while the agent may use the pool already: what is offered late may be another's by
    /// then.
    fn free_on(&self, node: Option<&IndexedNode>) -> Option<usize> {
        let labels = node.map(|node| node.labels.clone()).unwrap_or_default();
        let mode = self.installation.mode_on(&labels, self.mode);
        (!mode.publishes_pool_entries()).then_some(self.free)
    }
}

/// What must be written on one node's objects.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct NodePlan {
    pub node: String,
    /// Its CiliumNode as the plan was made from: written only if it has not changed since.
    pub at: Precondition,
    pub blocks: Vec<IpNet>,
    /// How many addresses of live pods there are.
    pub pods: usize,
    /// Of those, the sticky ones.
    pub sticky: usize,
    /// Addresses of Cilium itself: router, health, ingress.
    pub own: usize,
    /// Addresses that any pod may have, after the write.
    pub free: usize,
    /// The same of the family that has the fewest; none if no more are offered.
    pub least_free: Option<usize>,
    pub put: BTreeMap<IpAddr, PoolEntry>,
    /// The CiliumNode's ranges, if it names no block.
    pub pod_cidrs: Option<Vec<IpNet>>,
    /// The Node's ranges, if it names none: in `crd` mode Cilium would invent some.
    pub node_cidrs: Option<Vec<IpNet>>,
    /// Settings of Cilium for this node alone.
    pub config: Option<ConfigWrite>,
}

impl NodePlan {
    /// There is nothing to write.
    pub(crate) fn is_done(&self) -> bool {
        self.put.is_empty() && self.pod_cidrs.is_none() && self.node_cidrs.is_none() && self.config.is_none()
    }
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Error)]
pub enum Obstacle {
    #[error(
        "node {node} has no CiliumNode, and pod {pod} lives there; start cilium-agent on it, or drain it"
    )]
    NoCiliumNode { node: String, pod: String },
    #[error(
        "node {node}: neither its CiliumNode nor its Node names a range; wait until it has one, or write \
         spec.podCIDRs of the Node"
    )]
    NoBlock { node: String },
    /// A live pod's address, or one of Cilium's own, is not in its node's pool.
    #[error(
        "node {node}: {address} of {who} is not in the pool of its CiliumNode; it would lose its network \
         when cilium-agent restarts. Run this command again with --apply"
    )]
    Missing { node: String, who: String, address: IpAddr },
    /// A live pod's address is kept for another in its node's pool.
    #[error(
        "node {node}: {address} of pod {pod} is kept for {owner} in the pool of its CiliumNode; delete one \
         of the two pods"
    )]
    Contested { node: String, pod: String, address: IpAddr, owner: String },
    #[error(
        "node {node}: pod {pod} has {address}, which is of no block of this node; let it run on its home \
         node, or delete its StickyIP and the pod"
    )]
    Away { node: String, pod: String, address: IpAddr },
    #[error(
        "node {node}: pod {pod} has {address}, which is of no range that the Node itself names, and \
         kubernetes mode knows no other; delete its StickyIP, if there is one, and the pod"
    )]
    NotOfNode { node: String, pod: String, address: IpAddr },
    #[error(
        "node {node}: its Node names no range, and in kubernetes mode Cilium's agent would wait for one; \
         write spec.podCIDRs of the Node"
    )]
    NoRange { node: String },
    #[error(
        "node {node}: its CiliumNode still routes {address} to it; the pod that had it must go home, then \
         the agent takes it out"
    )]
    Route { node: String, address: IpAddr },
    /// It is not known which address the object keeps, or what it offers already.
    #[error(
        "{kind} {name} cannot be read (the note above says why), so an address that it keeps might be \
         offered; correct or delete it"
    )]
    Unreadable { kind: String, name: String },
    /// There is no way to `crd` from how Cilium gets its addresses.
    #[error("Cilium gets its addresses by ipam: {mode}; the way leads from cluster-pool or kubernetes only")]
    Mode { mode: String },
    #[error("node {node}, which is to switch first, has no Node or no CiliumNode; name another by --canary")]
    NoCanary { node: String },
    #[error(
        "node {node}: no other Node may have its label kubernetes.io/hostname, by which a CiliumNodeConfig \
         selects it; correct the label"
    )]
    NoHostname { node: String },
    #[error(
        "CiliumNodeConfig kube-system/{name} was not written by sticky-ipam, which needs this name; rename it"
    )]
    ForeignConfig { name: String },
}

/// The objects that would say which addresses are kept or shown, and cannot be read.
fn unreadable(index: &ClusterIndex) -> Vec<Obstacle> {
    let claims = index.claims.unreadable().map(|name| ("AddressClaim", name));
    let stickies = index.stickies.unreadable().map(|name| ("StickyIP", name));
    let nodes = index.cilium_nodes.unreadable().map(|name| ("CiliumNode", name));
    let all = claims.chain(stickies).chain(nodes);
    all.map(|(kind, name)| Obstacle::Unreadable { kind: kind.to_owned(), name: name.clone() }).collect()
}

/// Plans the way into `crd` mode.
pub(crate) fn into_crd(index: &ClusterIndex, wish: &Wish<'_>) -> (Vec<NodePlan>, Vec<Obstacle>) {
    let kept: BTreeSet<IpAddr> = index.claims.values().map(|claim| claim.spec.address).collect();
    let live = live(index);
    let shown: BTreeSet<IpAddr> = live.values().flatten().map(|(_, _, address)| *address).collect();
    let mut obstacles = unreadable(index);
    let all_known = obstacles.is_empty();
    if let Some(canary) = wish.canary
        && (index.nodes.get(canary).is_none() || index.cilium_nodes.get(canary).is_none())
    {
        obstacles.push(Obstacle::NoCanary { node: canary.to_owned() });
    }
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
        let mut plan =
            NodePlan { node: name.clone(), at, pods: pods.len(), own: own.len(), ..NodePlan::default() };
        for (pod, seen, address) in pods {
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
        let free = wish.free_on(index.nodes.get(name)).filter(|_| all_known);
        for (family, free) in free.iter().flat_map(|free| [(Family::V4, free), (Family::V6, free)]) {
            let mut there = offered.iter().filter(|address| Family::of(**address) == family).count();
            let mut of_family = blocks.iter().filter(|block| Family::of(block.addr()) == family).peekable();
            if of_family.peek().is_none() {
                continue;
            }
            let next =
                of_family.flat_map(hosts).filter(|address| !taken(address) && !offered.contains(address));
            for address in next.take(free.saturating_sub(there)) {
                plan.put.insert(address, PoolEntry::default());
                plan.free += 1;
                there += 1;
            }
            plan.least_free = Some(plan.least_free.map_or(there, |least| least.min(there)));
        }
        // Single addresses that are routed there stay.
        let with_routes = || blocks.iter().chain(&cilium.pod_cidrs).copied().collect();
        plan.pod_cidrs = cilium.blocks().next().is_none().then(with_routes);
        plan.node_cidrs =
            index.nodes.get(name).filter(|node| node.pod_cidrs.is_empty()).map(|_| first(&blocks));
        let named = index.nodes.get(name).map(|node| node.pod_cidrs.as_slice()).unwrap_or_default();
        let ranges = plan.node_cidrs.as_deref().unwrap_or(named);
        match ranges::config_write(wish, index, name, ranges, &blocks) {
            Ok(config) => plan.config = config,
            Err(obstacle) => obstacles.push(obstacle),
        }
        plan.blocks = blocks;
        plans.push(plan);
    }
    obstacles.sort();
    (plans, obstacles)
}

/// The facts of the preflight as they will be after these writes.
pub(crate) fn facts_after(index: &ClusterIndex, wish: &Wish<'_>, plans: &[NodePlan]) -> PreflightFacts {
    let mut facts = wish.installation.facts(index);
    let writes = plans.iter().filter_map(|plan| plan.config.as_ref());
    let configs = ranges::after(&wish.installation.node_configs, writes);
    for node in &mut facts.nodes {
        let Some(plan) = plans.iter().find(|plan| plan.node == node.name) else { continue };
        if let Some(ranges) = &plan.node_cidrs {
            node.node = ranges.clone();
        }
        if let Some(seen) = index.nodes.get(&node.name) {
            let settings = wish.installation.settings_on(&seen.labels, &configs);
            node.configured = CiliumOptions::read(&settings).ranges;
        }
        node.blocks = plan.blocks.clone();
        node.free = plan.least_free;
    }
    facts.least_free = wish.free.min(LEAST_FREE);
    facts
}

/// Every address of a live pod, or of Cilium, that is not in its node's pool.
pub fn missing(index: &ClusterIndex) -> Vec<Obstacle> {
    let mut found = Vec::new();
    for (node, pods) in live(index) {
        let pool = index.cilium_nodes.get(node);
        for (pod, _, address) in pods {
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
    bound(index).filter(|(_, pod)| pod.addresses.is_empty()).count()
}

fn bound(index: &ClusterIndex) -> impl Iterator<Item = (&String, &IndexedPod)> {
    index.pods.iter().filter(|(_, pod)| !pod.node.is_empty() && pod.is_live())
}

type LivePod<'a> = (&'a String, &'a IndexedPod, IpAddr);

/// The addresses of live pods, by node.
fn live(index: &ClusterIndex) -> BTreeMap<&str, Vec<LivePod<'_>>> {
    let mut live: BTreeMap<&str, Vec<LivePod<'_>>> = BTreeMap::new();
    for (name, pod) in bound(index) {
        for address in &pod.addresses {
            live.entry(&pod.node).or_default().push((name, pod, *address));
        }
    }
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
    match index.nodes.get(name) {
        Some(node) if listed.is_empty() && node.pod_cidrs.is_empty() => {
            node.annotated.values().flatten().copied().collect::<BTreeSet<_>>().into_iter().collect()
        }
        Some(node) if listed.is_empty() => node.pod_cidrs.clone(),
        _ => listed,
    }
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
