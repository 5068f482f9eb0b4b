//! `sticky-ipam-controller adopt`: from Cilium's `cluster-pool` or `kubernetes` mode into `crd`, and back,
//! under running pods.
//!
//! It writes pools; a person sets Cilium's mode and restarts its agents. Must never restart a pod, never take
//! a key out of a pool, and never say "go on" while a live pod's address is missing.

pub mod plan;

use std::fmt::Write;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch};
use kube::core::PartialObjectMeta;
use serde_json::json;

use crate::alloc::join;
use crate::cluster::api::client::ApiError;
use crate::cluster::objects::cilium::{CiliumNode, PoolEntry, pool_patch};
use crate::cluster::writer::{apply::patch_params, write::Precondition};
use crate::controller::flags::{AdoptOptions, BackTo, ControllerSettings};
use crate::controller::{cilium_config::CiliumConfig, commands::list_once::list_cluster, writer::Writer};
use plan::{NodePlan, Obstacle, back, into_crd, missing, starting};

/// Between two looks of `--follow`.
const FOLLOW_INTERVAL: Duration = Duration::from_secs(2);
/// Keys a patch: a request has an end.
const ENTRIES_PER_PATCH: usize = 500;
/// How often everything is read and planned again because a CiliumNode changed meanwhile. Cilium writes one a
/// few times per minute at most, so after this many conflicts another program writes too.
const MAX_PLANS: usize = 10;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdoptReport {
    pub text: String,
    /// Whether one may go on.
    pub clear: bool,
}

/// Reads, writes if asked to, reads again, and reports. Does not follow.
/// Errors: the API server did not answer, or refused. What was written stays, and does no harm.
pub async fn adopt(
    writer: &Writer,
    settings: &ControllerSettings,
    options: AdoptOptions,
) -> Result<AdoptReport, ApiError> {
    let config = CiliumConfig::read(writer, settings).await;
    let (index, skipped) = list_cluster(writer).await?;
    let mut text = String::new();
    for remark in config.remarks.iter().cloned().chain(skipped.iter().map(ToString::to_string)) {
        let _ = writeln!(text, "note: {remark}");
    }
    if let Some(to) = options.back {
        let obstacles = back(&index, to);
        text += &back_report(&obstacles);
        if to == BackTo::ClusterPool && back(&index, BackTo::Kubernetes) != obstacles {
            text += NOT_KUBERNETES;
        }
        return Ok(AdoptReport { text, clear: obstacles.is_empty() });
    }
    let offers = offers(&config, options);
    let (mut plans, mut obstacles) = into_crd(&index, offers);
    let now = config.mode.as_str();
    if !config.mode.can_be_adopted() {
        obstacles.push(Obstacle::Mode { mode: now.to_owned() });
    }
    let _ = writeln!(text, "Adoption into Cilium's crd mode (ipam is {now} now)");
    text += &table(&plans);
    if !options.apply || !obstacles.is_empty() {
        text += &obstacle_list(&obstacles, "In the way:");
        text += match (options.apply, obstacles.is_empty()) {
            (true, _) => "Nothing was written.\n",
            (false, true) if plans.iter().all(NodePlan::is_done) => "Dry run: there is nothing to write.\n",
            (false, true) => "Dry run: nothing was written. Run it again with --apply.\n",
            (false, false) => "Dry run: nothing was written.\n",
        };
        return Ok(AdoptReport { text, clear: obstacles.is_empty() });
    }
    let mut after;
    let mut looks = 1;
    loop {
        let mut conflicts = Vec::new();
        for plan in &plans {
            if !write(writer, plan).await? {
                conflicts.push(plan.node.clone());
            }
        }
        (after, _) = list_cluster(writer).await?;
        if conflicts.is_empty() {
            break;
        }
        let nodes = conflicts.join(", ");
        tracing::info!(nodes, "CiliumNodes changed meanwhile; planning again");
        (plans, obstacles) = into_crd(&after, offers);
        if looks == MAX_PLANS || !obstacles.is_empty() {
            let _ = writeln!(
                text,
                "Do not go on. Others wrote the CiliumNodes of {nodes} meanwhile; run it again."
            );
            text += &obstacle_list(&obstacles, "In the way:");
            return Ok(AdoptReport { text, clear: false });
        }
        looks += 1;
    }
    let left = missing(&after);
    text += &obstacle_list(&left, "Do not go on. Still missing:");
    if left.is_empty() {
        text += "Every live pod's address is in the pool of its node.\n";
        let starting = starting(&after);
        if starting > 0 {
            let _ = writeln!(
                text,
                "{starting} pods are starting: their addresses are not known yet. Use --follow until all \
                 agents are restarted."
            );
        }
        text += NEXT;
    }
    Ok(AdoptReport { text, clear: left.is_empty() })
}

const NOT_KUBERNETES: &str = "This is for cluster-pool mode. In kubernetes mode more is in the way: \
    sticky-ipam-controller adopt --back=kubernetes\n";

const NEXT: &str = "Next: set ipam: crd and cni-exclusive: \"false\" in Cilium's ConfigMap, restart its \
    operator, then its agents node by node (pods keep running), with this command under --follow meanwhile, \
    so that pods which start in between are not left out. Then start sticky-ipam's agents. The way back: \
    sticky-ipam-controller adopt --back\n";

const MAY_GO_BACK: &str = "Every pod has an address of its own node's blocks, and no single address is \
    routed elsewhere.\nNext: stop sticky-ipam's controller and agents, remove their conflist, and run this \
    again. Then set Cilium's ipam back in its ConfigMap, and restart its operator, then its agents node by \
    node (pods keep running). The pools may stay: other modes do not read them.\n";

/// Goes on putting in what is missing until dropped, for the time in which agents are restarted.
pub async fn follow(writer: &Writer, settings: &ControllerSettings, options: AdoptOptions) {
    loop {
        tokio::time::sleep(FOLLOW_INTERVAL).await;
        let config = CiliumConfig::read(writer, settings).await;
        let index = match list_cluster(writer).await {
            Ok((index, _)) => index,
            Err(error) => {
                tracing::warn!(%error, "cannot list the objects; trying again");
                continue;
            }
        };
        let (plans, _) = into_crd(&index, offers(&config, options));
        for plan in plans.iter().filter(|plan| !plan.is_done()) {
            let node = &plan.node;
            match write(writer, plan).await {
                Ok(true) => tracing::info!(node, entries = plan.put.len(), "added addresses to the pool"),
                Ok(false) => tracing::info!(node, "write conflict on the CiliumNode; trying again"),
                Err(error) => tracing::warn!(node, %error, "cannot write the pool; trying again"),
            }
        }
    }
}

/// In crd mode agents may go by the pools already: what is offered now may be another's by then.
fn offers(config: &CiliumConfig, options: AdoptOptions) -> Option<usize> {
    (!config.mode.publishes_pool_entries()).then_some(options.free)
}

/// One node's writes, on the CiliumNode as it was planned from. Ranges first: a pool is of no use without
/// them. False if that CiliumNode changed since, so that the plan is out of date.
async fn write(writer: &Writer, plan: &NodePlan) -> Result<bool, ApiError> {
    let node = plan.node.as_str();
    if let Some(ranges) = &plan.node_cidrs {
        let nodes: Api<Node> = Api::all(writer.client());
        // The server takes them only while the Node has none.
        let body = Patch::Merge(json!({"spec": {"podCIDR": ranges.first(), "podCIDRs": ranges}}));
        writer.write(&format!("patch Node {node}"), nodes.patch(node, &patch_params(), &body)).await?;
    }
    let keys: Vec<(String, &PoolEntry)> =
        plan.put.iter().map(|(address, entry)| (address.to_string(), entry)).collect();
    let ranges = plan.pod_cidrs.iter().map(|ranges| json!({"spec": {"ipam": {"podCIDRs": ranges}}}));
    let pools = keys
        .chunks(ENTRIES_PER_PATCH)
        .map(|part| pool_patch(part.iter().map(|(key, entry)| (key.as_str(), *entry)), []));
    let cilium: Api<PartialObjectMeta<CiliumNode>> = Api::all(writer.client());
    let mut at = plan.at.clone();
    for patch in ranges.chain(pools) {
        let what = format!("patch CiliumNode {node}");
        let Some(written) = writer.patch(&what, &cilium, node, &at, patch).await? else { return Ok(false) };
        at = Precondition::of(&written);
    }
    Ok(true)
}

fn table(plans: &[NodePlan]) -> String {
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
                "node {node}: spec.podCIDRs of the Node becomes {}: without it Cilium invents a range in crd \
                 mode, and it cannot be changed afterwards",
                join(ranges)
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

fn obstacle_list(obstacles: &[Obstacle], heading: &str) -> String {
    if obstacles.is_empty() {
        return String::new();
    }
    let lines = obstacles.iter().map(|obstacle| format!("  {obstacle}\n"));
    format!("{heading}\n{}", lines.collect::<String>())
}

fn back_report(obstacles: &[Obstacle]) -> String {
    if obstacles.is_empty() {
        return MAY_GO_BACK.to_owned();
    }
    obstacle_list(obstacles, "Do not go back yet. Away from home:")
}
