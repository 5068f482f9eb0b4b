//! What `adopt` prints. Must never say "go on" by itself: the caller decides.

use std::fmt::Write;

use super::plan::{NodePlan, Obstacle};
use crate::alloc::join;
use crate::controller::cilium_config::NAMESPACE;
use crate::policy::preflight::PreflightFinding;

pub(super) const NOT_KUBERNETES: &str = "This is for cluster-pool mode. In kubernetes mode more is in the \
    way: sticky-ipam-controller adopt --back=kubernetes\n";

pub(super) const NEXT: &str = "Next: set ipam: crd in Cilium's ConfigMap, restart its operator, then its \
    agents node by node (pods keep running), with this command under --follow meanwhile, so that pods which \
    start in between are not left out. Then start sticky-ipam's agents. The way back: sticky-ipam-controller \
    adopt --back";

pub(super) const MAY_GO_BACK: &str = "Every pod has an address of its own node's blocks, and no single \
    address is routed elsewhere. Next: stop sticky-ipam's controller and agents, remove their conflist, and \
    run this again. Then set Cilium's ipam back in its ConfigMap, and restart its operator, then its agents \
    node by node (pods keep running). Then run this with --apply: it removes the settings per node. The pools \
    may stay: other modes do not read them.";

pub(super) const NOT_YET: &str = "Let these pods go home, or delete their StickyIPs and the pods.";

pub(super) const REMOVE_LATER: &str = "They must stay until Cilium's ConfigMap names the old mode again; then \
    add --apply, which removes them.";

/// What comes after the first node was prepared.
pub(super) fn next_of_canary(node: &str) -> String {
    format!(
        "Next: restart cilium-agent on {node} alone (kubectl -n kube-system delete pod -l k8s-app=cilium \
         --field-selector spec.nodeName={node}), with this command under --follow meanwhile. See that its \
         pods are reached, also by their own host. Abort: adopt --back --apply, then restart cilium-agent on \
         {node} again. Go on: run adopt --apply without --canary."
    )
}

pub(super) fn table(plans: &[NodePlan]) -> String {
    let mut text = String::new();
    let width = plans.iter().map(|plan| plan.node.len()).max().unwrap_or(4).max(4);
    let _ = writeln!(text, "{:width$}   pods  sticky  cilium   free  to write  blocks", "node");
    for plan in plans {
        let NodePlan { node, pods, sticky, own, free, .. } = plan;
        let (put, blocks) = (plan.put.len(), join(&plan.blocks));
        let _ =
            writeln!(text, "{node:width$}  {pods:>5}  {sticky:>6}  {own:>6}  {free:>5}  {put:>8}  {blocks}");
    }
    for plan in plans {
        let node = &plan.node;
        if let Some(ranges) = &plan.node_cidrs {
            let _ = writeln!(
                text,
                "WARNING: node {node}: spec.podCIDRs of the Node becomes {}. This write cannot be undone: \
                 Kubernetes never lets it be changed. Without it Cilium invents a range in crd mode",
                join(ranges)
            );
        }
        if let Some(config) = &plan.config {
            let settings: Vec<String> =
                config.defaults.iter().map(|(key, value)| format!("{key}: {value}")).collect();
            let settings = if settings.is_empty() { "nothing".to_owned() } else { settings.join(", ") };
            let name = &config.name;
            let _ = writeln!(
                text,
                "node {node}: CiliumNodeConfig {NAMESPACE}/{name} becomes {settings} (adopt --back --apply \
                 removes it)"
            );
        }
        if let Some(ranges) = &plan.pod_cidrs {
            let ranges = join(ranges);
            let _ = writeln!(text, "node {node}: spec.ipam.podCIDRs of the CiliumNode becomes {ranges}");
        }
        if plan.own == 0 {
            let _ = writeln!(
                text,
                "node {node}: its CiliumNode names no address of Cilium's own (spec.addresses, \
                 CiliumInternalIP); the router may get another one"
            );
        }
    }
    text
}

/// Each finding with its cure.
pub(super) fn findings(findings: &[PreflightFinding], accepted: &[String]) -> String {
    if findings.is_empty() {
        return "Preflight: no findings.\n".to_owned();
    }
    let mut text = "Preflight:\n".to_owned();
    for finding in findings {
        let stands = if finding.stops(accepted) { "" } else { " (does not stop)" };
        let (severity, name, cure) = (finding.severity().as_str(), finding.name(), finding.cure());
        let _ = writeln!(text, "  {severity}{stands} {name}: {finding}\n    cure: {cure}");
    }
    text
}

pub(super) fn obstacles(obstacles: &[Obstacle], heading: &str) -> String {
    if obstacles.is_empty() {
        return String::new();
    }
    let lines = obstacles.iter().map(|obstacle| format!("  {obstacle}\n"));
    format!("{heading}\n{}", lines.collect::<String>())
}
