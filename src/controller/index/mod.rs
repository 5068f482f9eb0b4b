//! What the watches have shown of the cluster. Synchronous, and without a clock, disk or network. Must never
//! be taken for live: every write rests on a live read or a resourceVersion.

pub mod freshness;
pub mod indexed;
pub mod objects;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use kube::ResourceExt;

use crate::cluster::objects::{AddressClaim, IPPool, StickyIP, WorkloadRef};
use crate::policy::handover::NodeState;
use crate::policy::selection::{claimant::Claimant, facts::PodFacts};
use crate::runtime::cache::{Cache, CacheEvent};
use freshness::Freshness;
use indexed::IndexedCache;
use objects::{IndexedCiliumNode, IndexedEndpoint, IndexedNode, IndexedPod, attached_pod_uid};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Pod,
    Namespace,
    Node,
    StickyIP,
    AddressClaim,
    IPPool,
    CiliumNode,
    CiliumEndpoint,
}

/// Everything that is known. Names are `namespace/name`, or the name of what has no namespace.
#[derive(Debug, Default)]
pub struct ClusterIndex {
    pub pods: IndexedCache<IndexedPod>,
    /// The annotations of namespaces.
    pub namespaces: Cache<BTreeMap<String, String>>,
    pub nodes: Cache<IndexedNode>,
    pub stickies: Cache<StickyIP>,
    pub claims: IndexedCache<AddressClaim>,
    pub pools: Cache<IPPool>,
    pub cilium_nodes: IndexedCache<IndexedCiliumNode>,
    pub endpoints: IndexedCache<IndexedEndpoint>,
    /// The addresses that more than one live pod shows.
    duplicates: BTreeSet<IpAddr>,
    /// How many pods that have not ended a workload has, by namespace, kind and name.
    pods_of: BTreeMap<(String, String, String), u32>,
    pub(crate) freshness: Freshness,
}

impl ClusterIndex {
    /// The kinds that have not been listed yet.
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

    pub fn names(&self, kind: Kind) -> Box<dyn Iterator<Item = &String> + '_> {
        match kind {
            Kind::Pod => Box::new(self.pods.names()),
            Kind::Namespace => Box::new(self.namespaces.names()),
            Kind::Node => Box::new(self.nodes.names()),
            Kind::StickyIP => Box::new(self.stickies.names()),
            Kind::AddressClaim => Box::new(self.claims.names()),
            Kind::IPPool => Box::new(self.pools.names()),
            Kind::CiliumNode => Box::new(self.cilium_nodes.names()),
            Kind::CiliumEndpoint => Box::new(self.endpoints.names()),
        }
    }

    /// Applies an event of the pods; the names of those that differ now.
    pub fn apply_pod(&mut self, event: CacheEvent<(String, IndexedPod)>) -> Vec<String> {
        let is_complete = matches!(event, CacheEvent::ListComplete);
        let touched = match &event {
            CacheEvent::Applied((name, _)) | CacheEvent::Deleted(name) => Some(name.clone()),
            _ => None,
        };
        let mut addresses = Vec::new();
        if let Some(before) = touched.as_ref().and_then(|name| self.pods.get(name)) {
            addresses.extend_from_slice(&before.addresses);
            workload_of(before).iter().for_each(|workload| decrement(&mut self.pods_of, workload));
        }
        let changed = self.pods.apply(event);
        if is_complete {
            self.duplicates.clear();
            self.pods_of.clear();
        }
        let all = is_complete.then(|| self.pods.values()).into_iter().flatten();
        let one = touched.as_ref().and_then(|name| self.pods.get(name));
        for pod in all.chain(one) {
            addresses.extend_from_slice(&pod.addresses);
            if let Some(workload) = workload_of(pod) {
                *self.pods_of.entry(workload).or_default() += 1;
            }
        }
        for address in addresses {
            if self.live_pods_with(&address).nth(1).is_some() {
                self.duplicates.insert(address);
            } else {
                self.duplicates.remove(&address);
            }
        }
        changed
    }

    pub fn is_shown_by_pod(&self, address: IpAddr) -> bool {
        self.pods.with(&address).next().is_some()
    }

    pub fn duplicates(&self) -> &BTreeSet<IpAddr> {
        &self.duplicates
    }

    /// The live pods that show an address, by name.
    pub(crate) fn live_pods_with<'a>(
        &'a self,
        address: &'a IpAddr,
    ) -> impl Iterator<Item = (&'a String, &'a IndexedPod)> {
        let shown = self.pods.with(address).filter_map(|name| Some((name, self.pods.get(name)?)));
        shown.filter(|(_, pod)| pod.is_live())
    }

    /// Everything that decides about a pod, its namespace's annotations included.
    pub fn facts(&self, pod: &IndexedPod) -> PodFacts {
        let of_namespace = self.namespaces.get(&pod.facts.namespace).cloned().unwrap_or_default();
        PodFacts { namespace_annotations: of_namespace, ..pod.facts.clone() }
    }

    /// The StickyIP with the fixed name of the pod's claimant; without one, the slot attached to the pod.
    pub(crate) fn sticky_of(&self, pod: &IndexedPod) -> Option<&StickyIP> {
        let (claimant, namespace) = (Claimant::of(&pod.facts), &pod.facts.namespace);
        if let Some(name) = claimant.fixed_name() {
            return self.stickies.get(&format!("{namespace}/{name}"));
        }
        // A slot's name is the workload's name and a number.
        let prefix = format!("{namespace}/{}-", claimant.workload().name);
        let mut slots = self.stickies.with_prefix(&prefix).map(|(_, sticky)| sticky);
        slots.find(|sticky| attached_pod_uid(sticky) == Some(pod.facts.uid.as_str()))
    }

    pub(crate) fn pod_of(&self, sticky: &StickyIP) -> Option<&IndexedPod> {
        let attachment = sticky.status.as_ref()?.attachment.as_ref()?;
        let pod = self.pods.get(&format!("{}/{}", sticky.namespace()?, attachment.pod_name))?;
        (attached_pod_uid(sticky) == Some(pod.facts.uid.as_str())).then_some(pod)
    }

    /// Whether pods of this workload are there that have not ended.
    pub(crate) fn has_pods_of(&self, namespace: &str, workload: &WorkloadRef) -> bool {
        self.pods_of.contains_key(&(namespace.to_owned(), workload.kind.clone(), workload.name.clone()))
    }

    /// The names of all nodes that have a Node or a CiliumNode.
    pub fn node_names(&self) -> BTreeSet<&String> {
        self.nodes.names().chain(self.cilium_nodes.names()).collect()
    }

    /// The blocks of any CiliumNode or Node in which one of these addresses lies.
    pub fn blocks_with(&self, addresses: &[IpAddr]) -> Vec<(String, IpNet)> {
        let listed =
            self.cilium_nodes.iter().flat_map(|(name, node)| node.blocks().map(move |block| (name, block)));
        let said = self.nodes.iter().flat_map(|(name, node)| {
            let annotated = node.annotated.values().flatten();
            node.pod_cidrs.iter().chain(annotated).map(move |block| (name, *block))
        });
        let holds = |block: &IpNet| addresses.iter().any(|address| block.contains(address));
        let with = listed.chain(said).filter(|(_, block)| holds(block));
        with.map(|(name, block)| (name.clone(), block)).collect()
    }

    /// Whether a node is proved to have lost its pods: its Node is gone, or tainted out-of-service.
    pub fn is_dead_node(&self, name: &str) -> bool {
        self.nodes.get(name).is_none_or(|node| node.state == NodeState::OutOfService)
    }

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
        (
            format!("db/{name}"),
            IndexedPod::from(serde_json::from_value::<k8s_openapi::api::core::v1::Pod>(pod).unwrap()),
        )
    }

    /// A StickyIP of the namespace `db`, attached to the pod of its name on this node if one is given.
    pub fn sticky(name: &str, address: &str, node: Option<&str>) -> (String, StickyIP) {
        let attachment = node.map(|node| {
            json!({"node": node, "podName": name, "podUid": format!("uid-{name}"), "attachmentId": "c", "since": "2026-01-01T00:00:00Z"})
        });
        let object: Value = json!({"metadata": {"name": name, "namespace": "db", "uid": "s", "resourceVersion": "1"},
            "spec": {"addresses": [address], "claimant": {"kind": "Pod"},
                     "workload": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "mysql"}},
            "status": {"attachment": attachment}});
        (format!("db/{name}"), serde_json::from_value(object).unwrap())
    }
}
