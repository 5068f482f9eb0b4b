//! What the watches have told of the cluster, trimmed at the door. Synchronous, and without a clock, disk or network. Must
//! never be taken for live: whatever is written rests on a live read or a resourceVersion.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::ResourceExt;

use crate::cluster::cilium::barrier;
use crate::cluster::cilium::objects::{CiliumEndpoint, CiliumNode, PoolEntry};
use crate::cluster::objects::{AddressClaim, IPPool, StickyIP, StickyKey, WorkloadRef};
use crate::cluster::pod;
use crate::policy::handover::NodeState;
use crate::policy::lifetime::retention::RETENTION;
use crate::policy::selection::claimant::Claimant;
use crate::policy::selection::facts::PodFacts;
use crate::policy::selection::pin::{CALICO_ADDRESSES, PIN};
use crate::policy::selection::rules::{FIXED_IP, STICKY};
use crate::runtime::cache::{Cache, CacheEvent};
use crate::runtime::client::WATCH_START;
use indexed::{IndexKeys, IndexedCache};

/// The annotations of a pod or namespace that anything here depends on.
const ANNOTATIONS: &[&str] = &[STICKY, PIN, CALICO_ADDRESSES, FIXED_IP, RETENTION];
/// The annotations of a Node in which Cilium's `kubernetes` mode finds ranges, the newer ones first.
pub const RANGE_ANNOTATIONS: &[&str] = &[
    "network.cilium.io/ipv4-pod-cidr",
    "network.cilium.io/ipv6-pod-cidr",
    "io.cilium.network.ipv4-pod-cidr",
    "io.cilium.network.ipv6-pod-cidr",
];

/// The condition of a Node of whose addresses two objects say different things.
pub const DRIFT: &str = "AddressDrift";

/// The kinds of object that are watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Pods.
    Pod,
    /// Namespaces.
    Namespace,
    /// Nodes.
    Node,
    /// StickyIPs.
    StickyIP,
    /// AddressClaims.
    AddressClaim,
    /// IPPools.
    IPPool,
    /// CiliumNodes.
    CiliumNode,
    /// CiliumEndpoints.
    CiliumEndpoint,
}

/// A pod, as far as it matters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexedPod {
    /// What decides whether it is sticky. The namespace's annotations are not in it: [`ClusterIndex::facts`] puts them there.
    pub facts: PodFacts,
    /// The node it is bound to; empty if none.
    pub node: String,
    /// The addresses it shows.
    pub addresses: Vec<IpAddr>,
    /// It runs.
    pub running: bool,
    /// Its containers have ended for good.
    pub ended: bool,
    /// It is being deleted.
    pub deleting: bool,
}

impl IndexedPod {
    /// It may speak through its addresses, and they are its own: not the node's.
    fn is_live(&self) -> bool {
        !self.ended && !self.facts.host_network
    }
}

/// Pods are looked for by the addresses that they show.
impl IndexKeys for IndexedPod {
    type IndexKey = IpAddr;

    fn index_keys(&self) -> Vec<IpAddr> {
        self.addresses.clone()
    }
}

impl From<Pod> for IndexedPod {
    fn from(object: Pod) -> Self {
        let mut facts = pod::facts(&object, BTreeMap::new());
        facts.annotations.retain(|key, _| ANNOTATIONS.contains(&key.as_str()));
        let status = object.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref());
        let shown = status.and_then(|status| status.pod_ips.as_ref()).into_iter().flatten();
        Self {
            facts,
            node: object.spec.as_ref().and_then(|spec| spec.node_name.clone()).unwrap_or_default(),
            addresses: shown.filter_map(|ip| ip.ip.parse().ok()).collect(),
            running: phase == Some("Running"),
            ended: matches!(phase, Some("Succeeded" | "Failed")),
            deleting: object.metadata.deletion_timestamp.is_some(),
        }
    }
}

/// A node, as far as it matters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexedNode {
    /// Its uid.
    pub uid: String,
    /// Its resourceVersion is not kept: it changes with every heartbeat. Its labels.
    pub labels: BTreeMap<String, String>,
    /// `spec.podCIDRs`.
    pub pod_cidrs: Vec<IpNet>,
    /// The ranges of its annotations, by key ([`RANGE_ANNOTATIONS`]).
    pub annotated: BTreeMap<String, Vec<IpNet>>,
    /// The addresses under which the node itself is reached, inside and outside.
    pub addresses: BTreeSet<IpAddr>,
    /// Whether it is ready, gone off, and so on.
    pub state: NodeState,
    /// The words of its condition [`DRIFT`], if that is True.
    pub drift: Option<String>,
}

impl From<Node> for IndexedNode {
    fn from(object: Node) -> Self {
        let spec = object.spec.as_ref();
        let ranges = spec.and_then(|spec| spec.pod_cidrs.as_ref()).into_iter().flatten();
        let one = spec.and_then(|spec| spec.pod_cidr.as_ref());
        let mut pod_cidrs: Vec<IpNet> = ranges.chain(one).filter_map(|text| text.parse().ok()).collect();
        pod_cidrs.sort();
        pod_cidrs.dedup();
        let annotated = RANGE_ANNOTATIONS.iter().filter_map(|key| {
            let text = object.annotations().get(*key)?;
            let ranges = text.split(',').filter_map(|part| part.trim().parse().ok()).collect();
            Some(((*key).to_owned(), ranges))
        });
        Self {
            uid: object.uid().unwrap_or_default(),
            labels: object.labels().clone(),
            pod_cidrs,
            annotated: annotated.collect(),
            addresses: addresses(&object),
            state: pod::node_state(Some(&object)),
            drift: drift(&object),
        }
    }
}

fn addresses(node: &Node) -> BTreeSet<IpAddr> {
    let told = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let own = told.filter(|told| ["InternalIP", "ExternalIP"].contains(&told.type_.as_str()));
    own.filter_map(|told| told.address.parse().ok()).collect()
}

fn drift(node: &Node) -> Option<String> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ours = conditions.iter().find(|condition| condition.type_ == DRIFT && condition.status == "True")?;
    Some(ours.message.clone().unwrap_or_default())
}

/// A CiliumNode, as far as it matters.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IndexedCiliumNode {
    /// Its uid.
    pub uid: String,
    /// Its resourceVersion.
    pub resource_version: String,
    /// `spec.ipam.podCIDRs`, blocks and single addresses alike.
    pub pod_cidrs: Vec<IpNet>,
    /// The pool's entries that belong to a pod.
    pub owned: BTreeMap<IpAddr, PoolEntry>,
    /// The pool's entries that anyone may have.
    pub unowned: BTreeSet<IpAddr>,
    /// The addresses that Cilium says it has given out.
    pub used: BTreeSet<IpAddr>,
    /// The addresses that Cilium itself has: router, health, ingress.
    pub own: BTreeSet<IpAddr>,
}

/// CiliumNodes are looked for by the addresses that they show for somebody: keys with an owner, and routes of single addresses.
impl IndexKeys for IndexedCiliumNode {
    type IndexKey = IpAddr;

    fn index_keys(&self) -> Vec<IpAddr> {
        let routes = self.pod_cidrs.iter().filter(|net| net.prefix_len() == net.max_prefix_len());
        self.owned.keys().copied().chain(routes.map(IpNet::addr)).collect()
    }
}

/// Claims are looked for by the StickyIP that they are for.
impl IndexKeys for AddressClaim {
    type IndexKey = StickyKey;

    fn index_keys(&self) -> Vec<StickyKey> {
        vec![self.spec.holder.clone()]
    }
}

impl IndexedCiliumNode {
    /// The home blocks: what is more than one address.
    pub fn blocks(&self) -> impl Iterator<Item = IpNet> + '_ {
        self.pod_cidrs.iter().copied().filter(|net| net.prefix_len() < net.max_prefix_len())
    }

    /// Addresses that Cilium could give to anyone now.
    #[must_use]
    pub fn available(&self) -> usize {
        self.unowned.iter().filter(|address| !self.used.contains(*address)).count()
    }
}

impl From<CiliumNode> for IndexedCiliumNode {
    fn from(object: CiliumNode) -> Self {
        let mut seen = Self {
            uid: object.uid().unwrap_or_default(),
            resource_version: object.resource_version().unwrap_or_default(),
            pod_cidrs: object.spec.ipam.pod_cidrs.iter().filter_map(|text| text.parse().ok()).collect(),
            own: object.spec.own().collect(),
            ..Self::default()
        };
        for (text, entry) in
            object.spec.ipam.pool.into_iter().filter(|(_, entry)| !barrier::is_barrier(entry))
        {
            let Ok(address) = text.parse::<IpAddr>() else { continue };
            if entry.owner.is_empty() {
                seen.unowned.insert(address);
            } else {
                seen.owned.insert(address, entry);
            }
        }
        let used = object.status.map(|status| status.ipam.used).unwrap_or_default();
        seen.used = used.keys().filter_map(|text| text.parse().ok()).collect();
        seen
    }
}

/// A CiliumEndpoint, as far as it matters.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IndexedEndpoint {
    /// Its uid.
    pub uid: String,
    /// It is being deleted.
    pub deleting: bool,
    /// Finalizers hold the deletion up.
    pub held: bool,
    /// The uid of the pod that it was made for, if it says so.
    pub made_for: Option<String>,
    /// Its addresses.
    pub addresses: BTreeSet<IpAddr>,
}

/// CiliumEndpoints are looked for by their addresses.
impl IndexKeys for IndexedEndpoint {
    type IndexKey = IpAddr;

    fn index_keys(&self) -> Vec<IpAddr> {
        self.addresses.iter().copied().collect()
    }
}

impl From<CiliumEndpoint> for IndexedEndpoint {
    fn from(object: CiliumEndpoint) -> Self {
        let status = object.status.as_ref();
        let pairs = status.map(|status| status.networking.addressing.as_slice()).unwrap_or_default();
        Self {
            uid: object.uid().unwrap_or_default(),
            deleting: object.metadata.deletion_timestamp.is_some(),
            held: !object.finalizers().is_empty(),
            made_for: made_for(&object.metadata),
            addresses: pairs
                .iter()
                .flat_map(|pair| [&pair.ipv4, &pair.ipv6])
                .filter_map(|text| text.parse().ok())
                .collect(),
        }
    }
}

/// The uid of the pod that an endpoint was made for.
#[must_use]
pub fn made_for(meta: &kube::core::ObjectMeta) -> Option<String> {
    let owner = meta.owner_references.iter().flatten().find(|owner| owner.kind == "Pod");
    owner.map(|owner| owner.uid.clone())
}

/// The annotations of a namespace that matter.
#[must_use]
pub fn namespace_annotations_of(meta: kube::core::ObjectMeta) -> BTreeMap<String, String> {
    let mut kept = meta.annotations.unwrap_or_default();
    kept.retain(|key, _| ANNOTATIONS.contains(&key.as_str()));
    kept
}

/// Everything that is known. Names are `namespace/name`, or the name of what has no namespace.
#[derive(Debug, Default)]
pub struct ClusterIndex {
    /// Pods.
    pub pods: IndexedCache<IndexedPod>,
    /// The annotations of namespaces.
    pub namespaces: Cache<BTreeMap<String, String>>,
    /// Nodes.
    pub nodes: Cache<IndexedNode>,
    /// StickyIPs, without the record of who wrote which field.
    pub stickies: Cache<StickyIP>,
    /// Claims, the same.
    pub claims: IndexedCache<AddressClaim>,
    /// Pools, the same.
    pub pools: Cache<IPPool>,
    /// CiliumNodes.
    pub cilium_nodes: IndexedCache<IndexedCiliumNode>,
    /// CiliumEndpoints.
    pub endpoints: IndexedCache<IndexedEndpoint>,
    /// The addresses that more than one live pod shows.
    doubled: BTreeSet<IpAddr>,
    /// How many pods that have not ended a workload has, by namespace, kind and name.
    pods_of: BTreeMap<(String, String, String), u32>,
    /// The kinds whose watch has broken off.
    silent: BTreeMap<Kind, WatchFailure>,
    /// The kinds of which a list is under way.
    being_listed: BTreeSet<Kind>,
}

/// A watch that fails.
#[derive(Debug, Clone, Copy)]
struct WatchFailure {
    /// How often, one time after the other.
    times: u32,
    /// The last time.
    last: Duration,
}

/// After so long without a failure the first pause is the shortest again, as in kube's own watches.
const BACKOFF_RESET: Duration = Duration::from_secs(120);

impl WatchFailure {
    /// How long after the last failure the next one is told at the latest, if there is another: a watch that stands says nothing. By the
    /// pauses of kube's own watches (0.8 s doubled up to 30 s, and by chance up to twice that), and the start of a watch.
    fn longest(self) -> Duration {
        let pause = Duration::from_millis(800) * 2u32.saturating_pow(self.times.saturating_sub(1).min(10));
        pause.min(Duration::from_secs(30)) * 2 + WATCH_START
    }
}

impl ClusterIndex {
    /// The kinds that have not been listed yet.
    #[must_use]
    pub fn missing(&self) -> Vec<Kind> {
        let listed = [
            (Kind::Pod, self.pods.is_synced()),
            (Kind::Namespace, self.namespaces.is_synced()),
            (Kind::Node, self.nodes.is_synced()),
            (Kind::StickyIP, self.stickies.is_synced()),
            (Kind::AddressClaim, self.claims.is_synced()),
            (Kind::IPPool, self.pools.is_synced()),
            (Kind::CiliumNode, self.cilium_nodes.is_synced()),
            (Kind::CiliumEndpoint, self.endpoints.is_synced()),
        ];
        listed.into_iter().filter(|(_, listed)| !listed).map(|(kind, _)| kind).collect()
    }

    /// The watch of a kind has broken off, at this time since the start: what is known of it may be old.
    pub fn mark_stale(&mut self, kind: Kind, now: Duration) {
        let before = self.silent.get(&kind).filter(|before| now.saturating_sub(before.last) < BACKOFF_RESET);
        let times = before.map_or(1, |before| before.times.saturating_add(1));
        self.silent.insert(kind, WatchFailure { times, last: now });
    }

    /// A watch tells something.
    pub fn observe_event<T>(&mut self, kind: Kind, told: &CacheEvent<T>) {
        match told {
            // No news yet: the rest of the list may never come.
            CacheEvent::ListStarted => drop(self.being_listed.insert(kind)),
            CacheEvent::Listed(_) => {}
            CacheEvent::ListComplete => {
                self.being_listed.remove(&kind);
                self.silent.remove(&kind);
            }
            CacheEvent::Applied(_) | CacheEvent::Deleted(_) | CacheEvent::Unreadable(_) => {
                drop(self.silent.remove(&kind))
            }
        }
    }

    /// Whether what is known of a kind may be old: its watch has broken off, and it is neither heard nor so long ago that another failure
    /// would have been told, or it is listed right now.
    #[must_use]
    pub fn is_stale(&self, kind: Kind, now: Duration) -> bool {
        self.being_listed.contains(&kind)
            || self.silent.get(&kind).is_some_and(|silence| now < silence.last + silence.longest())
    }

    /// The names of all objects of a kind.
    #[must_use]
    pub fn names(&self, kind: Kind) -> Vec<String> {
        fn all<T>(known: &Cache<T>) -> Vec<String> {
            known.iter().map(|(name, _)| name.clone()).collect()
        }
        match kind {
            Kind::Pod => all(&self.pods),
            Kind::Namespace => all(&self.namespaces),
            Kind::Node => all(&self.nodes),
            Kind::StickyIP => all(&self.stickies),
            Kind::AddressClaim => all(&self.claims),
            Kind::IPPool => all(&self.pools),
            Kind::CiliumNode => all(&self.cilium_nodes),
            Kind::CiliumEndpoint => all(&self.endpoints),
        }
    }

    /// Takes a change of the pods in; the names of those that are other than before.
    pub fn apply_pod(&mut self, told: CacheEvent<(String, IndexedPod)>) -> Vec<String> {
        let is_whole = matches!(told, CacheEvent::ListComplete);
        let touched = match &told {
            CacheEvent::Applied((name, _)) | CacheEvent::Deleted(name) => Some(name.clone()),
            _ => None,
        };
        let mut addresses = Vec::new();
        if let Some(before) = touched.as_ref().and_then(|name| self.pods.get(name)) {
            addresses.extend_from_slice(&before.addresses);
            workload_of(before).iter().for_each(|workload| decrement(&mut self.pods_of, workload));
        }
        let changed = self.pods.apply(told);
        if is_whole {
            self.doubled.clear();
            self.pods_of.clear();
        }
        let all = is_whole.then(|| self.pods.values()).into_iter().flatten();
        let one = touched.as_ref().and_then(|name| self.pods.get(name));
        for pod in all.chain(one) {
            addresses.extend_from_slice(&pod.addresses);
            if let Some(workload) = workload_of(pod) {
                *self.pods_of.entry(workload).or_default() += 1;
            }
        }
        for address in addresses {
            if self.live_pods_with(&address).nth(1).is_some() {
                self.doubled.insert(address);
            } else {
                self.doubled.remove(&address);
            }
        }
        changed
    }

    /// Whether a pod shows this address.
    #[must_use]
    pub fn is_shown_by_pod(&self, address: IpAddr) -> bool {
        self.pods.with(&address).next().is_some()
    }

    /// The addresses that more than one live pod shows.
    #[must_use]
    pub fn doubled(&self) -> &BTreeSet<IpAddr> {
        &self.doubled
    }

    /// The live pods that show an address, by name. Those that have ended speak no more; those of the host network have their node's.
    pub fn live_pods_with<'a>(
        &'a self,
        address: &'a IpAddr,
    ) -> impl Iterator<Item = (&'a String, &'a IndexedPod)> {
        let shown = self.pods.with(address).filter_map(|name| Some((name, self.pods.get(name)?)));
        shown.filter(|(_, pod)| pod.is_live())
    }

    /// Everything that decides about a pod, its namespace's word included.
    #[must_use]
    pub fn facts(&self, pod: &IndexedPod) -> PodFacts {
        let of_namespace = self.namespaces.get(&pod.facts.namespace).cloned().unwrap_or_default();
        PodFacts { namespace_annotations: of_namespace, ..pod.facts.clone() }
    }

    /// The StickyIP that bears the fixed name of the pod's claimant; the slot that is attached to it if there is none.
    #[must_use]
    pub fn sticky_of(&self, pod: &IndexedPod) -> Option<&StickyIP> {
        let (claimant, namespace) = (Claimant::of(&pod.facts), &pod.facts.namespace);
        if let Some(name) = claimant.fixed_name() {
            return self.stickies.get(&format!("{namespace}/{name}"));
        }
        // Slots bear the workload's name with a number behind it.
        let first = format!("{namespace}/{}-", claimant.workload().name);
        let slots = self.stickies.starting_at(&first).take_while(|(name, _)| name.starts_with(&first));
        slots
            .map(|(_, sticky)| sticky)
            .find(|sticky| attached_pod_uid(sticky) == Some(pod.facts.uid.as_str()))
    }

    /// The pod that a StickyIP is attached to.
    #[must_use]
    pub fn pod_of(&self, sticky: &StickyIP) -> Option<&IndexedPod> {
        let attachment = sticky.status.as_ref()?.attachment.as_ref()?;
        let pod = self.pods.get(&format!("{}/{}", sticky.namespace()?, attachment.pod_name))?;
        (attached_pod_uid(sticky) == Some(pod.facts.uid.as_str())).then_some(pod)
    }

    /// Whether pods of this workload are there that have not ended.
    #[must_use]
    pub fn has_pods_of(&self, namespace: &str, workload: &WorkloadRef) -> bool {
        self.pods_of.contains_key(&(namespace.to_owned(), workload.kind.clone(), workload.name.clone()))
    }

    /// The blocks, of all that any node has or its Node says, in which one of these addresses lies.
    #[must_use]
    pub fn blocks_with(&self, addresses: &[IpAddr]) -> Vec<(String, IpNet)> {
        let listed =
            self.cilium_nodes.iter().flat_map(|(name, node)| node.blocks().map(move |block| (name, block)));
        let said = self.nodes.iter().flat_map(|(name, node)| {
            let annotated = node.annotated.values().flatten();
            node.pod_cidrs.iter().chain(annotated).map(move |block| (name, *block))
        });
        let with =
            listed.chain(said).filter(|(_, block)| addresses.iter().any(|address| block.contains(address)));
        with.map(|(name, block)| (name.clone(), block)).collect()
    }

    /// Whether a node is proved to have lost its pods: its Node is gone, or tainted out-of-service.
    #[must_use]
    pub fn is_dead_node(&self, name: &str) -> bool {
        self.nodes.get(name).is_none_or(|node| node.state == NodeState::OutOfService)
    }

    /// The node whose home block an address is of, and the block.
    #[must_use]
    pub fn home_of(&self, address: IpAddr) -> Option<(&str, IpNet)> {
        self.cilium_nodes.iter().find_map(|(name, node)| {
            node.blocks().find(|block| block.contains(&address)).map(|block| (name.as_str(), block))
        })
    }
}

/// The workload of a pod that has not ended: namespace, kind and name.
fn workload_of(pod: &IndexedPod) -> Option<(String, String, String)> {
    let claimant = Claimant::of(&pod.facts);
    let workload = claimant.workload();
    (!pod.ended).then(|| (pod.facts.namespace.clone(), workload.kind.clone(), workload.name.clone()))
}

fn decrement<K: Ord>(counts: &mut BTreeMap<K, u32>, key: &K) {
    if let Some(count) = counts.get_mut(key) {
        *count -= 1;
        if *count == 0 {
            counts.remove(key);
        }
    }
}

/// The uid of the pod that a StickyIP is attached to.
#[must_use]
pub fn attached_pod_uid(sticky: &StickyIP) -> Option<&str> {
    Some(sticky.status.as_ref()?.attachment.as_ref()?.pod_uid.as_str())
}

/// A StickyIP's namespace and name.
#[must_use]
pub fn sticky_key_of(sticky: &StickyIP) -> StickyKey {
    StickyKey { namespace: sticky.namespace().unwrap_or_default(), name: sticky.name_any() }
}

/// An object without the record of who wrote which field: half its size, and nobody here reads it.
#[must_use]
pub fn without_managed_fields<K: ResourceExt>(mut object: K) -> K {
    // Not cleared: the room for it would stay.
    object.meta_mut().managed_fields = None;
    object
}

#[cfg(test)]
pub(super) mod fixture {
    use super::*;
    use serde_json::{Value, json};

    /// A pod of the namespace `db`, running on `n1` with this address.
    pub fn pod(name: &str, address: &str, owner: Option<(&str, &str)>) -> (String, IndexedPod) {
        let owners = owner.map(|(kind, name)| {
            json!([{"apiVersion": "apps/v1", "kind": kind, "name": name, "uid": "o", "controller": true}])
        });
        let pod = json!({"metadata": {"name": name, "namespace": "db", "uid": format!("uid-{name}"), "ownerReferences": owners,
                                      "labels": {"app": "db"}, "annotations": {"noise": "x"}},
                         "spec": {"nodeName": "n1", "containers": []},
                         "status": {"phase": "Running", "podIPs": [{"ip": address}]}});
        (format!("db/{name}"), IndexedPod::from(serde_json::from_value::<Pod>(pod).unwrap()))
    }

    /// A StickyIP of the namespace `db`, attached to the pod of its name on this node if one is given.
    pub fn sticky(name: &str, address: &str, node: Option<&str>) -> (String, StickyIP) {
        let attachment = node.map(|node| {
            json!({"node": node, "podName": name, "podUid": format!("uid-{name}"), "containerId": "c", "since": "2026-01-01T00:00:00Z"})
        });
        let object: Value = json!({"metadata": {"name": name, "namespace": "db", "uid": "s", "resourceVersion": "1"},
            "spec": {"addresses": [address], "claimant": {"kind": "Pod"},
                     "workload": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "mysql"}},
            "status": {"attachment": attachment}});
        (format!("db/{name}"), serde_json::from_value(object).unwrap())
    }
}

pub mod indexed;
#[cfg(test)]
mod tests;
