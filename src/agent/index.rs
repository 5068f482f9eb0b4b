//! What the watches show of this node: its pods, the StickyIPs attached to it, the claims on its addresses,
//! its own CiliumNode. Synchronous, and without a clock, disk or network. Must never count as live: every
//! write has a live read or a resourceVersion as its precondition.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, Pod};

use crate::agent::install::bypass;
use crate::cluster::cilium::pool::home_blocks;
use crate::cluster::objects::cilium::CiliumNode;
use crate::cluster::objects::{Attachment, StickyIP};
use crate::cluster::pod;
use crate::cluster::view::ClaimView;
use crate::names::StickyKey;
use crate::policy::selection::facts::PodFacts;
pub use crate::runtime::cache::{Cache, CacheEvent};

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodePod {
    /// What decides whether it is sticky.
    pub facts: PodFacts,
    /// The uid that the runtime knows it by: a static pod's own, else the API server's.
    pub runtime_uid: String,
    /// Nothing of it runs yet: it waits for its first sandbox.
    pub is_waiting: bool,
    /// It is being deleted, or its containers have ended for good.
    pub is_ending: bool,
    /// What its sandbox has, as the kubelet reported last; nothing once its containers have ended for good.
    pub addresses: Vec<IpAddr>,
}

impl From<&Pod> for NodePod {
    fn from(object: &Pod) -> Self {
        let facts = pod::facts(object, BTreeMap::new());
        let status = object.status.as_ref();
        let phase = status.and_then(|status| status.phase.as_deref());
        let address = status.and_then(|status| status.pod_ip.as_deref()).unwrap_or_default();
        let has_ended = matches!(phase, Some("Succeeded" | "Failed"));
        let reported = status.iter().flat_map(|status| status.pod_ips.iter().flatten()).map(|ip| &*ip.ip);
        let addresses = reported.chain([address]).filter(|_| !has_ended);
        Self {
            runtime_uid: pod::runtime_uid(object).to_owned(),
            is_waiting: matches!(phase, None | Some("Pending")) && address.is_empty(),
            is_ending: object.metadata.deletion_timestamp.is_some() || has_ended,
            addresses: addresses.filter_map(|address| address.parse().ok()).collect(),
            facts,
        }
    }
}

/// What the Node's own object asks of its agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeMark {
    /// Ordinary pods are to be passed without a lookup.
    pub bypass: bool,
}

impl From<&Node> for NodeMark {
    fn from(object: &Node) -> Self {
        let annotations = object.metadata.annotations.as_ref();
        let value = annotations.and_then(|annotations| annotations.get(bypass::ANNOTATION));
        // A pod that needs it is in a hurry: only what clearly says no is a no.
        Self { bypass: value.is_some_and(|value| value != "false") }
    }
}

#[derive(Debug, Clone, Default)]
pub struct NodeIndex {
    /// This node's pods, by namespace/name.
    pub pods: Cache<NodePod>,
    /// StickyIPs that are attached to this node, by namespace/name.
    pub stickies: Cache<StickyIP>,
    /// Claims whose home is this node, by name.
    pub claims: Cache<ClaimView>,
    /// This node's CiliumNode, by its name.
    pub node: Cache<CiliumNode>,
    /// This Node, by its name. Nothing waits for it.
    pub marks: Cache<NodeMark>,
}

impl NodeIndex {
    /// Whether every watch has listed once.
    pub fn is_synced(&self) -> bool {
        self.pods.is_synced() && self.stickies.is_synced() && self.claims.is_synced() && self.node.is_synced()
    }

    /// The pod that the runtime knows by this uid.
    pub(crate) fn pod_of(&self, uid: &str) -> Option<&NodePod> {
        self.pods.values().find(|pod| pod.runtime_uid == uid || pod.facts.uid == uid)
    }

    /// The addresses that pods of this node have.
    pub(crate) fn addresses_in_use(&self) -> BTreeSet<IpAddr> {
        self.pods.values().flat_map(|pod| pod.addresses.iter().copied()).collect()
    }

    pub fn cilium_node(&self) -> Option<&CiliumNode> {
        self.node.values().next()
    }

    /// Whether the Node asks for the bypass; none if it is not known.
    pub fn bypass(&self) -> Option<bool> {
        let mark = self.marks.values().next();
        mark.filter(|_| self.marks.is_synced()).map(|mark| mark.bypass)
    }

    /// The claim on an address, if its home is here.
    pub(crate) fn claim_on(&self, address: IpAddr) -> Option<&ClaimView> {
        self.claims.values().find(|claim| claim.address == address)
    }

    /// What other nodes route here: blocks and single addresses.
    pub(crate) fn routed(&self) -> Vec<IpNet> {
        let texts = self.cilium_node().map(|node| node.spec.ipam.pod_cidrs.as_slice()).unwrap_or_default();
        texts.iter().filter_map(|text| text.parse().ok()).collect()
    }

    /// This node's blocks, as its CiliumNode has them.
    pub fn blocks(&self) -> Vec<IpNet> {
        self.cilium_node().map(home_blocks).unwrap_or_default()
    }
}

pub(crate) fn attachment_of(object: &StickyIP) -> Option<&Attachment> {
    object.status.as_ref()?.attachment.as_ref()
}

pub(crate) fn key_of(object: &StickyIP) -> StickyKey {
    StickyKey {
        namespace: object.metadata.namespace.clone().unwrap_or_default(),
        name: object.metadata.name.clone().unwrap_or_default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_new_list_replaces_the_old_one_only_when_it_is_complete() {
        let mut cache = Cache::default();
        cache.apply(CacheEvent::ListStarted);
        cache.apply(CacheEvent::Listed(("a".to_owned(), 1)));
        assert!(!cache.is_synced() && cache.get("a").is_none());
        cache.apply(CacheEvent::ListComplete);
        assert!(cache.is_synced() && cache.get("a") == Some(&1));
        cache.apply(CacheEvent::Applied(("b".to_owned(), 2)));
        cache.apply(CacheEvent::ListStarted);
        cache.apply(CacheEvent::Listed(("b".to_owned(), 3)));
        cache.apply(CacheEvent::Unreadable("c".to_owned()));
        assert_eq!((cache.get("a"), cache.get("b")), (Some(&1), Some(&2)), "as long as it is not complete");
        cache.apply(CacheEvent::ListComplete);
        assert_eq!((cache.get("a"), cache.get("b"), cache.contains("c")), (None, Some(&3), true));
        cache.apply(CacheEvent::Deleted("b".to_owned()));
        cache.apply(CacheEvent::Deleted("c".to_owned()));
        assert!(!cache.contains("b") && !cache.contains("c"));
    }

    #[test]
    fn a_node_asks_for_the_bypass_unless_it_says_false() {
        let asked = |annotations: serde_json::Value| {
            let node = json!({"metadata": {"name": "n1", "annotations": annotations}});
            NodeMark::from(&serde_json::from_value::<Node>(node).unwrap()).bypass
        };
        assert!(!asked(json!({})) && !asked(json!({"sticky-ipam.io/bypass": "false"})));
        for value in ["true", "on", ""] {
            assert!(asked(json!({"sticky-ipam.io/bypass": value})), "{value:?}");
        }
        let mut index = NodeIndex::default();
        assert_eq!(index.bypass(), None);
        index.marks.apply(CacheEvent::ListComplete);
        assert_eq!(index.bypass(), None, "there is no such Node");
        index.marks.apply(CacheEvent::Applied(("n1".into(), NodeMark { bypass: true })));
        assert_eq!(index.bypass(), Some(true));
    }

    #[test]
    fn a_pod_waits_as_long_as_nothing_of_it_runs() {
        let seen = |status: serde_json::Value| {
            let pod = json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "status": status});
            NodePod::from(&serde_json::from_value::<Pod>(pod).unwrap())
        };
        assert!(seen(json!({})).is_waiting && seen(json!({"phase": "Pending"})).is_waiting);
        assert!(!seen(json!({"phase": "Pending", "podIP": "10.0.0.1"})).is_waiting);
        assert!(!seen(json!({"phase": "Running"})).is_waiting);
        assert!(seen(json!({"phase": "Failed"})).is_ending);
    }

    #[test]
    fn a_pod_has_its_addresses_until_it_has_ended_for_good() {
        let seen = |phase: &str| {
            let status = json!({"phase": phase, "podIP": "10.0.0.1",
                "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}]});
            let meta = json!({"name": "p", "namespace": "n", "uid": "u"});
            let pod = json!({"metadata": meta, "status": status});
            let mut index = NodeIndex::default();
            let pod = NodePod::from(&serde_json::from_value::<Pod>(pod).unwrap());
            index.pods.apply(CacheEvent::Applied(("n/p".to_owned(), pod)));
            index.addresses_in_use().len()
        };
        assert_eq!((seen("Running"), seen("Succeeded"), seen("Failed")), (2, 0, 0));
    }
}
