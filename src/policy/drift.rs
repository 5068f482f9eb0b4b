//! The drift audit: compares what the parts of a cluster say about the same addresses, and names what breaks
//! if they disagree.
//!
//! A node's ranges are in up to four places (Node, CiliumNode, two annotations), and each reader uses another
//! one: Cilium's IPAM, its routes, its BGP speaker, a cloud's route table. Must never report what is
//! intended: the single routes of addresses outside their home block.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;
use thiserror::Error;

use crate::alloc::block::overlap;
use crate::alloc::block_map::BlockMap;
use crate::alloc::{Family, join};
use crate::policy::mode::CiliumMode;

/// The ranges and pods of one node, from all sources.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeRanges {
    pub name: String,
    /// `Node.spec.podCIDRs`; none if there is no Node.
    pub node: Option<Vec<IpNet>>,
    /// `CiliumNode.spec.ipam.podCIDRs`; none if there is no CiliumNode.
    pub cilium: Option<Vec<IpNet>>,
    /// The ranges that Cilium's settings name for this node (`ipv4-range`), instead of those of the Node.
    pub configured: Vec<IpNet>,
    /// The ranges of the Node's annotations, by key.
    pub annotated: BTreeMap<String, Vec<IpNet>>,
    /// Its pods with their addresses, those on the host's network left out.
    pub pods: Vec<(String, IpAddr)>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClusterRanges {
    pub mode: CiliumMode,
    /// Whether Cilium's BGP speaker is configured to announce pod ranges.
    pub announces: bool,
    pub nodes: Vec<NodeRanges>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Error)]
pub(crate) enum Breaks {
    /// What the routers of the network learn.
    #[error("BGP")]
    Bgp,
    /// Which pod is reachable from where.
    #[error("routes")]
    Routes,
    /// Which part allocates which address.
    #[error("IPAM")]
    Ipam,
}

/// What was found; the text says it of one node.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Drift {
    #[error("Node has {}, CiliumNode has {}", list(.node), list(.cilium))]
    Disagree { node: Vec<IpNet>, cilium: Vec<IpNet>, announced: bool },
    /// If this node is removed, the route of the other is removed too.
    #[error("its Node range {range} contains the pods of node {other}")]
    RangeOfAnotherNode { range: IpNet, other: String },
    #[error("its range {range} overlaps {theirs} of node {other}")]
    Overlap { range: IpNet, other: String, theirs: IpNet },
    /// No route of its own leads to it, either.
    #[error("pod {pod} has {address}, which is in none of the node's ranges")]
    Stray { pod: String, address: IpAddr },
    /// In `crd` mode.
    #[error("the Node has no range, so Cilium chooses one itself")]
    Invented,
    /// In `kubernetes` mode the ranges of Node and annotation differ, or those of two annotations.
    #[error("annotation {key} has {}, Cilium uses {}", list(.says), list(.stands))]
    Annotation { key: String, says: Vec<IpNet>, stands: Vec<IpNet> },
    #[error("there is a CiliumNode but no Node")]
    NoNode,
    #[error("BGP is configured to announce pod ranges, but Cilium announces none in this mode")]
    NothingAnnounced,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriftFinding {
    /// The node; empty if it concerns the cluster.
    pub node: String,
    pub drift: Drift,
}

impl DriftFinding {
    pub(crate) fn breaks(&self) -> Breaks {
        match self.drift {
            Drift::Disagree { announced: true, .. }
            | Drift::RangeOfAnotherNode { .. }
            | Drift::NothingAnnounced => Breaks::Bgp,
            Drift::Disagree { .. } | Drift::Stray { .. } | Drift::NoNode => Breaks::Routes,
            Drift::Overlap { .. } | Drift::Invented | Drift::Annotation { .. } => Breaks::Ipam,
        }
    }

    /// The reason of the event and the value of the metric's label.
    pub(crate) fn reason(&self) -> &'static str {
        match &self.drift {
            Drift::Disagree { .. } => "RangesDisagree",
            Drift::RangeOfAnotherNode { .. } => "RangeOfAnotherNode",
            Drift::Overlap { .. } => "RangesOverlap",
            Drift::Stray { .. } => "StrayAddress",
            Drift::Invented => "NoNodeRange",
            Drift::Annotation { .. } => "AnnotationDisagrees",
            Drift::NoNode => "NodeMissing",
            Drift::NothingAnnounced => "NothingAnnounced",
        }
    }

    pub(crate) fn advice(&self) -> &'static str {
        match &self.drift {
            Drift::Disagree { .. } => {
                "announce from CiliumNode (Cilium 1.14 and later in cluster-pool mode does), or let one part \
                 assign both: kube-controller-manager with --allocate-node-cidrs=false"
            }
            Drift::RangeOfAnotherNode { .. } => {
                "do not remove this node before its Node range is corrected; the other node's pods become \
                 unreachable with it"
            }
            Drift::Overlap { .. } => {
                "drain the younger node, delete its CiliumNode and let it register again; look for two \
                 controllers that assign ranges"
            }
            Drift::Stray { .. } => {
                "delete the pod if it may restart with another address; for a sticky pod see the events of \
                 its StickyIP"
            }
            Drift::Invented => "write spec.podCIDR of the Node: probes of its pods fail otherwise",
            Drift::Annotation { .. } => "remove the annotation, or set it to Node.spec.podCIDRs",
            Drift::NoNode => "delete the CiliumNode if the machine is gone for good",
            Drift::NothingAnnounced => {
                "Cilium announces pod ranges only in kubernetes and cluster-pool mode: route the pools' \
                 ranges to the nodes in the network, or turn the announcement off"
            }
        }
    }
}

impl fmt::Display for DriftFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, drift } = self;
        if node.is_empty() { drift.fmt(f) } else { write!(f, "node {node}: {drift}") }
    }
}

fn list(ranges: &[IpNet]) -> String {
    if ranges.is_empty() { "nothing".to_owned() } else { join(ranges) }
}

/// Compares all sources. The findings are in the order of the nodes, those of the cluster last.
pub fn audit(cluster: &ClusterRanges) -> Vec<DriftFinding> {
    let mut found = Vec::new();
    let owners: BlockMap = cluster
        .nodes
        .iter()
        .flat_map(|node| blocks(node.cilium.as_deref()).into_iter().map(|range| (range, node.name.as_str())))
        .collect();
    for node in &cluster.nodes {
        let mut tell = |drift| found.push(DriftFinding { node: node.name.clone(), drift });
        let (own, cilium) = (blocks(node.node.as_deref()), blocks(node.cilium.as_deref()));
        let used = used(cluster.mode, node, &own);
        match (&node.node, &node.cilium) {
            (None, Some(_)) => tell(Drift::NoNode),
            (Some(_), Some(_)) if disagree(cluster.mode, &used, &cilium) => {
                let announced = cluster.announces;
                tell(Drift::Disagree { node: used.clone(), cilium: cilium.clone(), announced });
            }
            (Some(_), _) if used.is_empty() && cluster.mode.invents_a_missing_range() => {
                tell(Drift::Invented);
            }
            _ => {}
        }
        for range in own.iter().filter(|range| !cilium.iter().any(|block| overlap(*block, **range))) {
            if let Some((other, _)) = owners.other_owner(&node.name, *range) {
                tell(Drift::RangeOfAnotherNode { range: *range, other: other.to_owned() });
            }
        }
        for range in &cilium {
            // Each pair once, by the first of the two names.
            let mut others: Vec<_> =
                owners.overlapping(*range).filter(|(other, _)| **other > *node.name).collect();
            others.sort_unstable();
            for (other, theirs) in others {
                tell(Drift::Overlap { range: *range, other: other.to_owned(), theirs });
            }
        }
        if cluster.mode.copies_ranges_from_the_node() {
            for (key, says) in &node.annotated {
                let stands = stands(node, key, &own, &cilium, says);
                if !stands.is_empty() && !same(says, &stands) {
                    tell(Drift::Annotation { key: key.clone(), says: says.clone(), stands });
                }
            }
        }
        // Without a range no pod can be outside of it.
        let annotated: Vec<IpNet> = node.annotated.values().flatten().copied().collect();
        let all = [node.cilium.as_deref(), node.node.as_deref(), Some(&*annotated)];
        if let Some(known) = all.into_iter().flatten().find(|known| !known.is_empty()) {
            for (pod, address) in &node.pods {
                if !known.iter().any(|range| range.contains(address)) {
                    tell(Drift::Stray { pod: pod.clone(), address: *address });
                }
            }
        }
    }
    if cluster.announces && cluster.mode.announces_no_ranges() {
        found.push(DriftFinding { node: String::new(), drift: Drift::NothingAnnounced });
    }
    found
}

/// What cilium-agent takes as the node's ranges: where it goes by the Node, its own settings come first, by
/// family.
fn used(mode: CiliumMode, node: &NodeRanges, own: &[IpNet]) -> Vec<IpNet> {
    if !mode.invents_a_missing_range() {
        return own.to_vec();
    }
    let is_configured = |range: &&IpNet| {
        node.configured.iter().any(|other| Family::of(other.addr()) == Family::of(range.addr()))
    };
    let rest = own.iter().filter(|range| !is_configured(range));
    node.configured.iter().chain(rest).copied().collect()
}

/// The ranges that are more than one address.
fn blocks(ranges: Option<&[IpNet]>) -> Vec<IpNet> {
    let ranges = ranges.unwrap_or_default().iter();
    ranges.filter(|range| range.prefix_len() < range.max_prefix_len()).copied().collect()
}

/// Whether Node and CiliumNode contradict each other. If Cilium does not copy one from the other, a
/// CiliumNode may have more: further blocks of a node that ran low.
fn disagree(mode: CiliumMode, node: &[IpNet], cilium: &[IpNet]) -> bool {
    if node.is_empty() || cilium.is_empty() {
        return false;
    }
    let missing = node.iter().any(|range| !cilium.contains(range));
    missing || (mode.copies_ranges_from_the_node() && !same(node, cilium))
}

/// What Cilium uses instead of an annotation: the Node's ranges of that family, else those of the CiliumNode,
/// else the annotation with the newer key.
fn stands(node: &NodeRanges, key: &str, own: &[IpNet], cilium: &[IpNet], says: &[IpNet]) -> Vec<IpNet> {
    let families: Vec<Family> = says.iter().map(|range| Family::of(range.addr())).collect();
    let of_family = |ranges: &[IpNet]| -> Vec<IpNet> {
        ranges.iter().filter(|range| families.contains(&Family::of(range.addr()))).copied().collect()
    };
    let newer = node.annotated.iter().filter(|(other, _)| other.as_str() > key).map(|(_, says)| &**says);
    let mut all = [own, cilium].into_iter().chain(newer).map(of_family);
    all.find(|ranges| !ranges.is_empty()).unwrap_or_default()
}

fn same(a: &[IpNet], b: &[IpNet]) -> bool {
    a.len() == b.len() && a.iter().all(|range| b.contains(range))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn node(name: &str, node: &[&str], cilium: &[&str]) -> NodeRanges {
        NodeRanges {
            name: name.into(),
            node: Some(nets(node)),
            cilium: Some(nets(cilium)),
            ..NodeRanges::default()
        }
    }

    fn findings_of(mode: CiliumMode, nodes: Vec<NodeRanges>) -> Vec<(String, &'static str)> {
        let found = audit(&ClusterRanges { mode, announces: false, nodes });
        found.iter().map(|finding| (finding.node.clone(), finding.reason())).collect()
    }

    #[test]
    fn a_cluster_that_agrees_has_no_findings() {
        let mut moved = node("b", &["10.0.1.0/24"], &["10.0.1.0/24", "10.0.0.7/32"]);
        moved.pods = vec![("db/mysql-0".into(), "10.0.0.7".parse().unwrap())];
        let home = node("a", &["10.0.0.0/24", "fd00::/112"], &["fd00::/112", "10.0.0.0/24"]);
        assert_eq!(findings_of(CiliumMode::ClusterPool, vec![home, moved]), []);
    }

    /// The table of the report behind this audit: four nodes, each announced with the range of another.
    #[test]
    fn nodes_that_speak_for_each_other_are_named_with_whom_they_would_take_along() {
        let nodes = vec![
            node("master1", &["10.5.112.0/24"], &["10.5.113.0/24"]),
            node("master2", &["10.5.114.0/24"], &["10.5.115.0/24"]),
            node("master3", &["10.5.113.0/24"], &["10.5.114.0/24"]),
            node("node01", &["10.5.115.0/24"], &["10.5.112.0/24"]),
        ];
        let found = audit(&ClusterRanges { mode: CiliumMode::ClusterPool, announces: true, nodes });
        let of = |name: &str| -> Vec<String> {
            found.iter().filter(|finding| finding.node == name).map(ToString::to_string).collect()
        };
        assert_eq!(found.len(), 8);
        assert!(of("node01")[0].contains("Node has 10.5.115.0/24, CiliumNode has 10.5.112.0/24"));
        assert!(of("node01")[1].contains("10.5.115.0/24 contains the pods of node master2"));
        assert!(found.iter().all(|finding| finding.breaks() == Breaks::Bgp && !finding.advice().is_empty()));
    }

    #[test]
    fn overlapping_nodes_are_found_whichever_is_larger_and_reported_once() {
        for (a, b) in
            [("10.0.0.0/16", "10.0.7.0/24"), ("10.0.7.0/24", "10.0.0.0/16"), ("10.0.7.0/24", "10.0.7.0/24")]
        {
            let nodes = vec![
                node("a", &[a], &[a]),
                node("b", &[b], &[b]),
                node("c", &["10.1.0.0/24"], &["10.1.0.0/24"]),
            ];
            assert_eq!(
                findings_of(CiliumMode::ClusterPool, nodes),
                [("a".to_owned(), "RangesOverlap")],
                "{a} {b}"
            );
        }
    }

    #[test]
    fn three_nodes_with_one_range_are_three_pairs() {
        let nodes = ["a", "b", "c"].map(|name| node(name, &["10.0.0.0/24"], &["10.0.0.0/24"])).to_vec();
        let found = findings_of(CiliumMode::ClusterPool, nodes);
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["a", "a", "b"]);
    }

    #[test]
    fn further_blocks_of_a_node_are_no_drift_where_cilium_does_not_copy_the_node() {
        let grown = node("a", &["10.0.0.0/24"], &["10.0.0.0/24", "10.0.7.0/24"]);
        assert_eq!(findings_of(CiliumMode::Crd, vec![grown.clone()]), []);
        assert_eq!(findings_of(CiliumMode::Kubernetes, vec![grown]), [("a".to_owned(), "RangesDisagree")]);
        let other = node("a", &["10.0.0.0/24"], &["10.0.7.0/24"]);
        let found = audit(&ClusterRanges { mode: CiliumMode::Crd, announces: false, nodes: vec![other] });
        assert_eq!(found[0].breaks(), Breaks::Routes, "no part announces anything");
    }

    #[test]
    fn a_pod_outside_its_nodes_ranges_is_a_stray() {
        let mut a = node("a", &["10.0.0.0/24"], &["10.0.0.0/24"]);
        a.pods =
            vec![("db/x".into(), "10.0.9.1".parse().unwrap()), ("db/y".into(), "10.0.0.1".parse().unwrap())];
        let found = audit(&ClusterRanges { nodes: vec![a.clone()], ..ClusterRanges::default() });
        assert_eq!(found.len(), 1);
        assert!(found[0].to_string().contains("db/x has 10.0.9.1"));
        // Without a range no pod is outside of it.
        a.cilium = None;
        a.node = Some(Vec::new());
        assert_eq!(findings_of(CiliumMode::Delegated, vec![a]), []);
    }

    #[test]
    fn an_empty_node_range_is_drift_in_crd_mode_alone() {
        let bare = node("a", &[], &["10.0.0.0/24"]);
        assert_eq!(findings_of(CiliumMode::Crd, vec![bare.clone()]), [("a".to_owned(), "NoNodeRange")]);
        assert_eq!(findings_of(CiliumMode::ClusterPool, vec![bare]), []);
    }

    #[test]
    fn the_range_that_ciliums_settings_name_counts_instead_of_the_nodes() {
        let adopted = NodeRanges {
            configured: nets(&["10.200.1.0/24"]),
            ..node("a", &["10.241.0.0/24"], &["10.200.1.0/24"])
        };
        assert_eq!(findings_of(CiliumMode::Crd, vec![adopted.clone()]), []);
        let other = NodeRanges { configured: nets(&["10.200.9.0/24"]), ..adopted.clone() };
        assert_eq!(findings_of(CiliumMode::Crd, vec![other]), [("a".to_owned(), "RangesDisagree")]);
        // In the other modes the Node's own range is announced and copied.
        assert_eq!(
            findings_of(CiliumMode::ClusterPool, vec![adopted.clone()]),
            [("a".to_owned(), "RangesDisagree")]
        );
        let bare = NodeRanges { node: Some(Vec::new()), ..adopted };
        assert_eq!(findings_of(CiliumMode::Crd, vec![bare]), []);
    }

    #[test]
    fn annotations_count_in_kubernetes_mode_by_family() {
        let mut a = node("a", &["10.0.0.0/24", "fd00::/112"], &["10.0.0.0/24", "fd00::/112"]);
        a.annotated = [("network.cilium.io/ipv4-pod-cidr".to_owned(), nets(&["10.0.0.0/24"]))].into();
        assert_eq!(findings_of(CiliumMode::Kubernetes, vec![a.clone()]), []);
        a.annotated.insert("io.cilium.network.ipv4-pod-cidr".to_owned(), nets(&["10.9.0.0/24"]));
        assert_eq!(
            findings_of(CiliumMode::Kubernetes, vec![a.clone()]),
            [("a".to_owned(), "AnnotationDisagrees")]
        );
        assert_eq!(findings_of(CiliumMode::ClusterPool, vec![a.clone()]), []);
        // Only the annotations have ranges: they can still contradict each other, and a pod may be in none.
        (a.node, a.cilium) = (Some(Vec::new()), None);
        a.pods = vec![("db/x".into(), "10.5.0.1".parse().unwrap())];
        let expected = [("a".to_owned(), "AnnotationDisagrees"), ("a".to_owned(), "StrayAddress")];
        assert_eq!(findings_of(CiliumMode::Kubernetes, vec![a]), expected);
    }

    #[test]
    fn a_ciliumnode_without_a_node_and_bgp_without_announcements_are_reported() {
        let mut gone = node("a", &[], &["10.0.0.0/24"]);
        gone.node = None;
        let found = audit(&ClusterRanges { mode: CiliumMode::Crd, announces: true, nodes: vec![gone] });
        let reasons: Vec<_> = found.iter().map(DriftFinding::reason).collect();
        assert_eq!(reasons, ["NodeMissing", "NothingAnnounced"]);
    }
}
