//! `sticky-ipam-controller adopt`: from Cilium's `cluster-pool` or `kubernetes` mode into `crd`, and back,
//! under running pods.
//!
//! It writes pools, and settings for single nodes where those need them; a person sets Cilium's mode and
//! restarts its agents. Must never restart a pod, never take a key out of a pool, and never say "go on" while
//! a live pod's address is missing.

pub(crate) mod follow;
pub mod plan;
mod report;

use std::fmt::Write;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PostParams};
use kube::core::PartialObjectMeta;
use serde_json::json;

use crate::alloc::join;
use crate::cluster::api::client::ApiError;
use crate::cluster::objects::cilium::{CiliumNode, PoolEntry, pool_patch};
use crate::cluster::objects::cilium_node_config::CiliumNodeConfig;
use crate::cluster::writer::apply::{FIELD_MANAGER, patch_params};
use crate::cluster::writer::write::Precondition;
use crate::controller::cilium_config::{CiliumConfig, NAMESPACE};
use crate::controller::commands::list_once::list_cluster;
use crate::controller::flags::{AdoptOptions, BackTo, ControllerSettings};
use crate::controller::installation::Installation;
use crate::controller::writer::Writer;
use crate::policy::preflight::{check_settings, check_switch};
pub use follow::follow;
use plan::{
    ConfigWrite, NodePlan, Obstacle, Wish, back, facts_after, into_crd, missing, starting, written_by_us,
};

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

impl AdoptReport {
    /// The last line is the answer.
    fn end(mut text: String, stops: usize, next: &str) -> Self {
        let clear = stops == 0;
        let _ = match stops {
            0 => writeln!(text, "GO. {next}"),
            1 => writeln!(text, "NO-GO: 1 thing stands in the way. {next}"),
            many => writeln!(text, "NO-GO: {many} things stand in the way. {next}"),
        };
        Self { text, clear }
    }
}

/// Reads, writes if asked to, reads again, and reports. Does not follow.
/// Errors: the API server did not answer, or refused. What was written stays, and does no harm.
pub async fn adopt(
    writer: &Writer,
    settings: &ControllerSettings,
    options: AdoptOptions,
) -> Result<AdoptReport, ApiError> {
    let config = CiliumConfig::read(writer, settings).await;
    let mut installation = Installation::read(writer, &config).await;
    let (mut index, skipped) = list_cluster(writer).await?;
    let mut text = String::new();
    let skipped: Vec<String> = skipped.iter().map(ToString::to_string).collect();
    for remark in config.remarks.iter().chain(&installation.remarks).chain(&skipped) {
        let _ = writeln!(text, "note: {remark}");
    }
    if let Some(to) = options.back {
        let obstacles = back(&index, to);
        text += &report::obstacles(&obstacles, "Do not go back yet. Away from home:");
        if to == BackTo::ClusterPool && back(&index, BackTo::Kubernetes) != obstacles {
            text += report::NOT_KUBERNETES;
        }
        let may_remove = options.apply && obstacles.is_empty();
        text += &remove_configs(writer, &config, &installation, may_remove).await?;
        let next = if obstacles.is_empty() { report::MAY_GO_BACK } else { report::NOT_YET };
        return Ok(AdoptReport::end(text, obstacles.len(), next));
    }
    let canary = options.canary.as_deref();
    let wish = Wish { installation: &installation, mode: config.mode, free: options.free, canary };
    let (mut plans, mut obstacles) = into_crd(&index, &wish);
    let facts = facts_after(&index, &wish, &plans);
    let findings = [check_settings(&facts), check_switch(&facts)].concat();
    let now = config.mode.as_str();
    if !config.mode.can_be_adopted() {
        obstacles.push(Obstacle::Mode { mode: now.to_owned() });
    }
    let _ = writeln!(text, "Adoption into Cilium's crd mode (ipam is {now} now)");
    text += &report::findings(&findings, &options.accept);
    text += &report::table(&plans);
    text += &report::obstacles(&obstacles, "In the way:");
    let stopping = findings.iter().filter(|finding| finding.stops(&options.accept)).count();
    let stops = stopping + obstacles.len();
    // Where Cilium uses the pools already, an address that is missing does more harm than any finding.
    let too_late = installation.uses_pools(&index, config.mode);
    if !options.apply || !obstacles.is_empty() || (stopping > 0 && !too_late) {
        let next = match (options.apply, stops) {
            (false, 0) if plans.iter().all(NodePlan::is_done) => "Dry run: there is nothing to write.",
            (false, 0) => "Dry run: nothing was written. Run it again with --apply.",
            (true, _) => "Nothing was written.",
            (false, _) => "Dry run: nothing was written.",
        };
        return Ok(AdoptReport::end(text, stops, next));
    }
    let mut looks = 1;
    loop {
        let mut conflicts = Vec::new();
        for plan in &plans {
            if !write(writer, plan).await? {
                conflicts.push(plan.node.clone());
            }
        }
        (index, _) = list_cluster(writer).await?;
        if conflicts.is_empty() {
            break;
        }
        let nodes = conflicts.join(", ");
        tracing::info!(nodes, "CiliumNodes changed meanwhile; planning again");
        installation = Installation::read(writer, &config).await;
        let wish = Wish { installation: &installation, mode: config.mode, free: options.free, canary };
        (plans, obstacles) = into_crd(&index, &wish);
        if looks == MAX_PLANS || !obstacles.is_empty() {
            text += &report::obstacles(&obstacles, "In the way:");
            let next = format!("Do not go on. Others wrote the objects of {nodes} meanwhile; run it again.");
            return Ok(AdoptReport::end(text, obstacles.len().max(1), &next));
        }
        looks += 1;
    }
    let left = missing(&index);
    text += &report::obstacles(&left, "Do not go on. Still missing:");
    if left.is_empty() {
        text += "Every live pod's address is in the pool of its node.\n";
        let starting = starting(&index);
        if starting > 0 {
            let _ = writeln!(
                text,
                "{starting} pods are starting: their addresses are not known yet. Use --follow until all \
                 agents are restarted."
            );
        }
    }
    let stops = left.len() + stopping;
    let next = match (stops, canary) {
        (0, Some(node)) => report::next_of_canary(node),
        (0, None) => report::NEXT.to_owned(),
        _ => "Do not restart any cilium-agent now.".to_owned(),
    };
    Ok(AdoptReport::end(text, stops, &next))
}

/// Removes the settings per node on the way back, once the ConfigMap names the old mode: until then an agent
/// that restarts needs them.
async fn remove_configs(
    writer: &Writer,
    config: &CiliumConfig,
    installation: &Installation,
    may_remove: bool,
) -> Result<String, ApiError> {
    let ours = written_by_us(&installation.node_configs);
    let names: Vec<&str> = ours.iter().map(|(name, _)| name.as_str()).collect();
    let names = names.join(", ");
    if ours.is_empty() {
        return Ok(String::new());
    }
    if config.mode.publishes_pool_entries() || !may_remove {
        return Ok(format!("Settings per node: {names}. {}\n", report::REMOVE_LATER));
    }
    let api: Api<CiliumNodeConfig> = Api::namespaced(writer.client(), NAMESPACE);
    for (name, at) in &ours {
        writer.delete(&format!("delete CiliumNodeConfig {name}"), &api, name, at).await?;
    }
    Ok(format!("Removed the settings per node: {names}.\n"))
}

/// One node's writes, on the CiliumNode as it was planned from. Ranges first: a pool is of no use without
/// them. False if that CiliumNode changed since, so that the plan is out of date.
async fn write(writer: &Writer, plan: &NodePlan) -> Result<bool, ApiError> {
    let node = plan.node.as_str();
    if let Some(ranges) = &plan.node_cidrs {
        let nodes: Api<Node> = Api::all(writer.client());
        tracing::warn!(
            node,
            ranges = join(ranges),
            "writing spec.podCIDRs of the Node; this cannot be undone"
        );
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
    // Last: it may be what lets cilium-agent use the pool.
    match &plan.config {
        Some(config) => write_config(writer, config).await,
        None => Ok(true),
    }
}

/// False if the CiliumNodeConfig changed since, or is there by now.
async fn write_config(writer: &Writer, config: &ConfigWrite) -> Result<bool, ApiError> {
    let api: Api<CiliumNodeConfig> = Api::namespaced(writer.client(), NAMESPACE);
    let name = config.name.as_str();
    match &config.at {
        Some(at) if config.defaults.is_empty() => {
            writer.delete(&format!("delete CiliumNodeConfig {name}"), &api, name, at).await
        }
        Some(at) => {
            let what = format!("patch CiliumNodeConfig {name}");
            Ok(writer.patch(&what, &api, name, at, config.patch()).await?.is_some())
        }
        None => {
            let what = format!("create CiliumNodeConfig {name}");
            let params =
                PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
            Ok(writer.write(&what, api.create(&params, &config.written())).await?.is_some())
        }
    }
}
