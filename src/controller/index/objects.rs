//! The watched objects, each trimmed to what the controller needs. Must never keep what changes without
//! meaning: every change wakes duties.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::core::{DeserializeGuard, ObjectMeta};
use kube::{Resource, ResourceExt};

use crate::cluster::objects::cilium::{CiliumEndpoint, CiliumNode, PoolEntry};
use crate::cluster::objects::lenient::{Skipped, Validate, readable};
use crate::cluster::objects::{AddressClaim, StickyIP};
use crate::cluster::{cilium::barrier, pod};
use crate::controller::{drift_condition, index::indexed::IndexKeys};
use crate::names::StickyKey;
use crate::policy::selection::pin::{CALICO_ADDRESSES, PIN};
use crate::policy::selection::rules::{FIXED_IP, STICKY};
use crate::policy::{handover::NodeState, lifetime::retention::RETENTION, selection::facts::PodFacts};

/// The annotations of a pod or namespace that anything here depends on.
const ANNOTATIONS: &[&str] = &[STICKY, PIN, CALICO_ADDRESSES, FIXED_IP, RETENTION];
/// The annotations of a Node in which Cilium's `kubernetes` mode finds ranges, the newer ones first.
pub(crate) const RANGE_ANNOTATIONS: &[&str] = &[
    "network.cilium.io/ipv4-pod-cidr",
    "network.cilium.io/ipv6-pod-cidr",
    "io.cilium.network.ipv4-pod-cidr",
    "io.cilium.network.ipv6-pod-cidr",
];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexedPod {
    /// What decides whether it is sticky. The namespace's annotations are not in it:
    /// [`facts`](super::ClusterIndex::facts) adds them.
    pub facts: PodFacts,
    /// The node it is bound to; empty if none.
    pub node: String,
    pub addresses: Vec<IpAddr>,
    pub running: bool,
    /// Its containers have ended for good.
    pub ended: bool,
    pub deleting: bool,
}

impl IndexedPod {
    /// It may use its addresses, and they are its own, not the node's.
    pub(crate) fn is_live(&self) -> bool {
        !self.ended && !self.facts.host_network
    }
}

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

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IndexedNode {
    pub uid: String,
    // The resourceVersion is not kept: it changes with every heartbeat.
    pub labels: BTreeMap<String, String>,
    pub pod_cidrs: Vec<IpNet>,
    /// The ranges of its annotations, by key ([`RANGE_ANNOTATIONS`]).
    pub annotated: BTreeMap<String, Vec<IpNet>>,
    /// The addresses under which the node itself is reached, inside and outside.
    pub addresses: BTreeSet<IpAddr>,
    pub state: NodeState,
    /// The message of its condition [`drift_condition::TYPE`], if that is True.
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
            drift: drift_condition::message(&object),
        }
    }
}

fn addresses(node: &Node) -> BTreeSet<IpAddr> {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let own = addresses.filter(|one| ["InternalIP", "ExternalIP"].contains(&one.type_.as_str()));
    own.filter_map(|one| one.address.parse().ok()).collect()
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IndexedCiliumNode {
    pub uid: String,
    pub resource_version: String,
    /// `spec.ipam.podCIDRs`, blocks and single addresses alike.
    pub pod_cidrs: Vec<IpNet>,
    pub owned: BTreeMap<IpAddr, PoolEntry>,
    pub unowned: BTreeSet<IpAddr>,
    /// The addresses that Cilium says it has given out.
    pub used: BTreeSet<IpAddr>,
    /// The addresses that Cilium itself has: router, health, ingress.
    pub own: BTreeSet<IpAddr>,
}

/// Found by the addresses that they publish: owned pool entries, and routes of single addresses.
impl IndexKeys for IndexedCiliumNode {
    type IndexKey = IpAddr;

    fn index_keys(&self) -> Vec<IpAddr> {
        let routes = self.pod_cidrs.iter().filter(|net| net.prefix_len() == net.max_prefix_len());
        self.owned.keys().copied().chain(routes.map(IpNet::addr)).collect()
    }
}

impl IndexKeys for AddressClaim {
    type IndexKey = StickyKey;

    fn index_keys(&self) -> Vec<StickyKey> {
        vec![self.spec.sticky_ref.clone()]
    }
}

impl IndexedCiliumNode {
    /// The home blocks: what is more than one address.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = IpNet> + '_ {
        self.pod_cidrs.iter().copied().filter(|net| net.prefix_len() < net.max_prefix_len())
    }

    /// Addresses that Cilium could give to any pod now.
    pub(crate) fn available(&self) -> usize {
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
        let entries = object.spec.ipam.pool.into_iter().filter(|(_, entry)| !barrier::is_barrier(entry));
        for (text, entry) in entries {
            let Ok(address) = text.parse() else { continue };
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

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct IndexedEndpoint {
    pub uid: String,
    pub deleting: bool,
    /// Finalizers hold the deletion up.
    pub held: bool,
    /// The uid of the pod that it was made for, if it says so.
    pub made_for: Option<String>,
    pub addresses: BTreeSet<IpAddr>,
}

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
        let texts = pairs.iter().flat_map(|pair| [&pair.ipv4, &pair.ipv6]);
        Self {
            uid: object.uid().unwrap_or_default(),
            deleting: object.metadata.deletion_timestamp.is_some(),
            held: !object.finalizers().is_empty(),
            made_for: made_for(&object.metadata),
            addresses: texts.filter_map(|text| text.parse().ok()).collect(),
        }
    }
}

pub fn made_for(meta: &ObjectMeta) -> Option<String> {
    let owner = meta.owner_references.iter().flatten().find(|owner| owner.kind == "Pod");
    owner.map(|owner| owner.uid.clone())
}

pub(crate) fn namespace_annotations_of(meta: ObjectMeta) -> BTreeMap<String, String> {
    let mut kept = meta.annotations.unwrap_or_default();
    kept.retain(|key, _| ANNOTATIONS.contains(&key.as_str()));
    kept
}

pub(crate) fn attached_pod_uid(sticky: &StickyIP) -> Option<&str> {
    Some(sticky.status.as_ref()?.attachment.as_ref()?.pod_uid.as_str())
}

pub(crate) fn sticky_key_of(sticky: &StickyIP) -> StickyKey {
    StickyKey { namespace: sticky.namespace().unwrap_or_default(), name: sticky.name_any() }
}

/// Reads one of our objects, without its managed fields: they are half its size, and nothing here reads them.
pub(crate) fn read_ours<K>(object: DeserializeGuard<K>) -> Result<K, Skipped>
where
    K: Resource<DynamicType = ()> + Validate,
{
    let mut object = readable(object)?;
    // Not cleared: its memory would stay allocated.
    object.meta_mut().managed_fields = None;
    Ok(object)
}
