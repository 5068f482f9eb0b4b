//! The preflight: which of Cilium's settings, and which facts of the cluster, make `crd` mode fail or do
//! harm. Pure, so that `adopt`, the audit and the agent give the same answer.
//!
//! Each rule is a [`Fault`] with a stable name, an object, a cause and a cure. Must never cure anything, and
//! never leave out what it could not see: that is a finding of its own.

mod settings;

use std::collections::BTreeMap;
use std::fmt;

use ipnet::IpNet;
use thiserror::Error;

use crate::alloc::{Family, join};

pub use settings::{CiliumOptions, CiliumRelease, IPAM_KEY, KubeProxy, range_key};

/// The releases of Cilium with which sticky-ipam was run.
const PROVED: &[(u32, u32)] = &[(1, 18), (1, 19)];

/// The names of the harmful findings: an operator may go on in spite of them.
pub const HARMFUL: [&str; 12] = [
    "CiliumAgentMissing",
    "CiliumAgentsNotSeen",
    "CiliumReleaseNotProved",
    "EndpointRoutesCutTcp",
    "ExclusiveCni",
    "MultusInFront",
    "NativeNeedsEndpointRoutes",
    "NoNodeRange",
    "PoolOutsideNativeRouting",
    "RangesDisagree",
    "SettingsUnknown",
    "TooFewFreeAddresses",
];

/// What a finding means for pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Severity {
    /// cilium-agent does not start, or pods lose their network at once.
    Fatal,
    /// It works until something happens: a reboot, another node, a busy minute.
    Harmful,
    /// To know, not to cure.
    Note,
}

impl Severity {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Fatal => "fatal",
            Self::Harmful => "harmful",
            Self::Note => "note",
        }
    }
}

/// One node, as the preflight looks at it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PreflightNode {
    pub name: String,
    /// `Node.spec.podCIDRs`.
    pub node: Vec<IpNet>,
    /// The blocks of its CiliumNode, in their order.
    pub blocks: Vec<IpNet>,
    /// The ranges that Cilium's settings name for this node (`ipv4-range`, `ipv6-range`).
    pub configured: Vec<IpNet>,
    /// Addresses per family that any pod may get from the pool; none if no more are needed.
    pub free: Option<usize>,
}

impl PreflightNode {
    /// The range of a family that cilium-agent takes as its own in `crd` mode.
    fn range(&self, family: Family) -> Option<IpNet> {
        let of = |ranges: &[IpNet]| of_family(ranges, family).next();
        of(&self.configured).or_else(|| of(&self.node))
    }
}

fn of_family(ranges: &[IpNet], family: Family) -> impl Iterator<Item = IpNet> {
    ranges.iter().copied().filter(move |range| Family::of(range.addr()) == family)
}

/// cilium-agent on one node, as its pod shows it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CiliumAgent {
    pub ready: bool,
    pub version: Option<CiliumRelease>,
}

/// An IPPool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreflightPool {
    pub name: String,
    pub ranges: Vec<IpNet>,
}

/// What Cilium's settings and the objects of the cluster say.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PreflightFacts {
    /// None if they cannot be read.
    pub settings: Option<CiliumOptions>,
    pub kube_proxy: KubeProxy,
    pub pools: Vec<PreflightPool>,
    pub nodes: Vec<PreflightNode>,
    /// By node. Empty if cilium-agent runs in no pod that can be seen.
    pub agents: BTreeMap<String, CiliumAgent>,
    /// A pod of a plugin that puts its own configuration before all others.
    pub in_front: Option<String>,
    /// How many free addresses a node must have.
    pub least_free: usize,
}

/// What is wrong. The text says the cause.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    #[error(
        "masquerading by iptables is on and egress-masquerade-interfaces is empty; in crd mode cilium-agent \
         panics at its start"
    )]
    MasqueradeNeedsInterfaces,
    #[error("it cannot be read, so nothing is known about masquerading, routing and exclusive mode")]
    SettingsUnknown,
    #[error(
        "endpoint routes on a tunnel beside kube-proxy in iptables mode: kube-proxy drops the answers, so \
         TCP between nodes is cut"
    )]
    EndpointRoutesCutTcp,
    #[error(
        "endpoint routes on a tunnel, and kube-proxy's mode cannot be seen; in iptables mode it cuts TCP \
         between nodes"
    )]
    KubeProxyNotSeen,
    #[error("with native routing a moved address is reached on its new node by endpoint routes only")]
    NativeNeedsEndpointRoutes,
    #[error(
        "its range {range} is not in {} (ipv4-native-routing-cidr, ipv6-native-routing-cidr): traffic to it \
         is masqueraded, and network policies see the node instead of the pod", list(.native)
    )]
    PoolOutsideNativeRouting { pool: String, range: IpNet, native: Vec<IpNet> },
    #[error("cni-exclusive is on: cilium-agent renames the conflist of sticky-ipam")]
    ExclusiveCni,
    #[error("Multus puts its configuration before all others, so the conflist of sticky-ipam is not used")]
    MultusInFront { pod: String },
    #[error(
        "cilium-agent uses {} as the node's range, and its CiliumNode names {block}: after a reboot the host \
         does not reach its own pods", range.map_or_else(|| "a range of its own making".to_owned(), |range| range.to_string())
    )]
    RangesDisagree { range: Option<IpNet>, block: IpNet },
    #[error("the Node has no spec.podCIDRs, so cilium-agent invents a range")]
    NoNodeRange,
    #[error("{free} addresses would be free for pods that start; {least} are needed until the agent runs")]
    TooFewFreeAddresses { free: usize, least: usize },
    #[error("no ready pod of cilium-agent runs on it")]
    CiliumAgentMissing,
    #[error(
        "no pod of cilium-agent was found (label k8s-app=cilium), so neither its version nor whether it runs \
         on every node is known"
    )]
    CiliumAgentsNotSeen,
    #[error("Cilium {} on it is not a release with which sticky-ipam was run ({})",
        .version.map_or_else(|| "of an unknown version".to_owned(), |version| version.to_string()), proved())]
    CiliumReleaseNotProved { version: Option<CiliumRelease> },
}

/// A fault, and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PreflightFinding {
    /// The node; empty if it concerns the cluster.
    pub node: String,
    pub fault: Fault,
}

impl PreflightFinding {
    pub fn severity(&self) -> Severity {
        match self.fault {
            Fault::MasqueradeNeedsInterfaces => Severity::Fatal,
            Fault::SettingsUnknown
            | Fault::EndpointRoutesCutTcp
            | Fault::NativeNeedsEndpointRoutes
            | Fault::PoolOutsideNativeRouting { .. }
            | Fault::ExclusiveCni
            | Fault::MultusInFront { .. }
            | Fault::RangesDisagree { .. }
            | Fault::NoNodeRange
            | Fault::TooFewFreeAddresses { .. }
            | Fault::CiliumAgentMissing
            | Fault::CiliumAgentsNotSeen
            | Fault::CiliumReleaseNotProved { .. } => Severity::Harmful,
            Fault::KubeProxyNotSeen => Severity::Note,
        }
    }

    /// Its name for `--accept`, metrics and events.
    pub fn name(&self) -> &'static str {
        match self.fault {
            Fault::MasqueradeNeedsInterfaces => "MasqueradeNeedsInterfaces",
            Fault::SettingsUnknown => "SettingsUnknown",
            Fault::EndpointRoutesCutTcp => "EndpointRoutesCutTcp",
            Fault::KubeProxyNotSeen => "KubeProxyNotSeen",
            Fault::NativeNeedsEndpointRoutes => "NativeNeedsEndpointRoutes",
            Fault::PoolOutsideNativeRouting { .. } => "PoolOutsideNativeRouting",
            Fault::ExclusiveCni => "ExclusiveCni",
            Fault::MultusInFront { .. } => "MultusInFront",
            Fault::RangesDisagree { .. } => "RangesDisagree",
            Fault::NoNodeRange => "NoNodeRange",
            Fault::TooFewFreeAddresses { .. } => "TooFewFreeAddresses",
            Fault::CiliumAgentMissing => "CiliumAgentMissing",
            Fault::CiliumAgentsNotSeen => "CiliumAgentsNotSeen",
            Fault::CiliumReleaseNotProved { .. } => "CiliumReleaseNotProved",
        }
    }

    /// What a person must look at.
    pub fn object(&self) -> String {
        match &self.fault {
            Fault::PoolOutsideNativeRouting { pool, .. } => format!("IPPool {pool}"),
            Fault::MultusInFront { pod } => format!("pod {pod}"),
            Fault::CiliumAgentsNotSeen => "namespace kube-system".to_owned(),
            _ if self.node.is_empty() => "ConfigMap kube-system/cilium-config".to_owned(),
            _ => format!("node {}", self.node),
        }
    }

    pub fn cure(&self) -> &'static str {
        match self.fault {
            Fault::MasqueradeNeedsInterfaces => {
                "set egress-masquerade-interfaces to the nodes' interfaces (Helm: egressMasqueradeInterfaces), \
                 or masquerade by eBPF (Helm: bpf.masquerade)"
            }
            Fault::SettingsUnknown => {
                "use an account that may read it; if Cilium is installed without it, add --accept \
                 SettingsUnknown after a look at each row of docs/adoption.md"
            }
            Fault::EndpointRoutesCutTcp | Fault::KubeProxyNotSeen => {
                "use kube-proxy in nftables mode, or its conntrack.tcpBeLiberal, or Cilium's kube-proxy \
                 replacement, or turn endpoint routes off"
            }
            Fault::NativeNeedsEndpointRoutes => {
                "turn endpoint routes on (enable-endpoint-routes, Helm: endpointRoutes.enabled)"
            }
            Fault::PoolOutsideNativeRouting { .. } => {
                "widen ipv4-native-routing-cidr (Helm: ipv4NativeRoutingCIDR) until it covers the pool"
            }
            Fault::ExclusiveCni => "set cni-exclusive: \"false\" (Helm: cni.exclusive)",
            Fault::MultusInFront { .. } => {
                "let Multus use the conflist of sticky-ipam as its default network under a name that sorts \
                 behind it, and then accept this finding; or remove Multus"
            }
            Fault::RangesDisagree { .. } => {
                "set ipv4-range of the node to the block of its CiliumNode, by a CiliumNodeConfig; adopt \
                 --apply writes it"
            }
            Fault::NoNodeRange => "write spec.podCIDRs of the Node; adopt --apply writes it",
            Fault::TooFewFreeAddresses { .. } => {
                "move pods off the node, or ask for fewer by --free if fewer pods start there"
            }
            Fault::CiliumAgentMissing => "start cilium-agent on it, or remove the node",
            Fault::CiliumAgentsNotSeen => {
                "see that it runs on every node in a proved release, then add --accept CiliumAgentsNotSeen"
            }
            Fault::CiliumReleaseNotProved { .. } => {
                "upgrade Cilium to a proved release first, or try this one on a cluster for tests and add \
                 --accept CiliumReleaseNotProved"
            }
        }
    }

    /// Whether it stands in the way of a switch to `crd` mode. A fatal one cannot be accepted.
    pub fn stops(&self, accepted: &[String]) -> bool {
        match self.severity() {
            Severity::Fatal => true,
            Severity::Harmful => !accepted.iter().any(|name| name == self.name()),
            Severity::Note => false,
        }
    }
}

impl fmt::Display for PreflightFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.object(), self.fault)
    }
}

fn list(ranges: &[IpNet]) -> String {
    if ranges.is_empty() { "any range".to_owned() } else { join(ranges) }
}

fn proved() -> String {
    let names: Vec<String> = PROVED.iter().map(|(major, minor)| format!("{major}.{minor}")).collect();
    names.join(", ")
}

/// The settings that do not fit `crd` mode, now or after a switch: those of the cluster first, then by node.
pub fn check_settings(facts: &PreflightFacts) -> Vec<PreflightFinding> {
    let mut found = Vec::new();
    let mut add = |fault| found.push(PreflightFinding { node: String::new(), fault });
    if let Some(pod) = &facts.in_front {
        add(Fault::MultusInFront { pod: pod.clone() });
    }
    let Some(settings) = &facts.settings else {
        add(Fault::SettingsUnknown);
        return found;
    };
    if settings.masquerading && !settings.bpf_masquerading && settings.masquerading_interfaces.is_empty() {
        add(Fault::MasqueradeNeedsInterfaces);
    }
    if settings.exclusive {
        add(Fault::ExclusiveCni);
    }
    if settings.endpoint_routes && settings.tunnel && !settings.kube_proxy_replacement {
        match facts.kube_proxy {
            KubeProxy::DropsInvalid => add(Fault::EndpointRoutesCutTcp),
            KubeProxy::NotSeen => add(Fault::KubeProxyNotSeen),
            KubeProxy::Harmless => {}
        }
    }
    if !settings.tunnel && !settings.endpoint_routes {
        add(Fault::NativeNeedsEndpointRoutes);
    }
    if settings.tunnel || !settings.masquerading {
        return found;
    }
    for pool in &facts.pools {
        for range in pool.ranges.iter().filter(|range| !is_covered(range, &settings.native_routing)) {
            let (native, pool) = (settings.native_routing.clone(), pool.name.clone());
            let fault = Fault::PoolOutsideNativeRouting { pool, range: *range, native };
            found.push(PreflightFinding { node: String::new(), fault });
        }
    }
    found
}

/// What else stands in the way of a switch to `crd` mode: ranges, free addresses, cilium-agent itself.
pub fn check_switch(facts: &PreflightFacts) -> Vec<PreflightFinding> {
    let mut found = Vec::new();
    if facts.agents.is_empty() {
        found.push(PreflightFinding { node: String::new(), fault: Fault::CiliumAgentsNotSeen });
    }
    let has_routes = facts.settings.as_ref().is_some_and(|settings| settings.endpoint_routes);
    for node in &facts.nodes {
        let mut add = |fault| found.push(PreflightFinding { node: node.name.clone(), fault });
        match facts.agents.get(&node.name) {
            Some(agent) if agent.ready => {
                let version =
                    agent.version.filter(|version| PROVED.contains(&(version.major, version.minor)));
                if version.is_none() {
                    add(Fault::CiliumReleaseNotProved { version: agent.version });
                }
            }
            _ if facts.agents.is_empty() => {}
            _ => add(Fault::CiliumAgentMissing),
        }
        if node.node.is_empty() && node.configured.is_empty() {
            add(Fault::NoNodeRange);
        } else if !has_routes {
            for block in [Family::V4, Family::V6].iter().filter_map(|family| disagreement(node, *family)) {
                add(block);
            }
        }
        if let Some(free) = node.free.filter(|free| *free < facts.least_free) {
            add(Fault::TooFewFreeAddresses { free, least: facts.least_free });
        }
    }
    found
}

/// The first block of a family is not the range that cilium-agent routes on its node.
fn disagreement(node: &PreflightNode, family: Family) -> Option<Fault> {
    let block = of_family(&node.blocks, family).next()?;
    let range = node.range(family);
    (!range.is_some_and(|range| range.contains(&block))).then_some(Fault::RangesDisagree { range, block })
}

fn is_covered(range: &IpNet, by: &[IpNet]) -> bool {
    by.iter().any(|net| net.contains(range))
}

#[cfg(test)]
mod tests;
