//! The drift audit: on the index as a duty, and once by `sticky-ipam-controller audit`. Must never repair: a
//! program cannot know which of two contradicting objects is right.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch};
use serde_json::{Value, json};

use crate::cluster::api::client::ApiError;
use crate::cluster::api::events;
use crate::cluster::api::events::NewEvent;
use crate::cluster::protocol::apply::patch_params;
use crate::controller::cilium_config::CiliumConfig;
use crate::controller::context::Context;
use crate::controller::drift_condition;
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::metrics::ControllerMetrics;
use crate::controller::queue::Key;
use crate::policy::drift::{ClusterRanges, DriftFinding, NodeRanges, audit};
use crate::runtime::metrics::{Gauge, Labelled};

/// How often Cilium's own settings are read again.
const CONFIG_AGE: Duration = Duration::from_secs(600);
/// Before what failed is tried again.
const RETRY: Duration = Duration::from_secs(30);

/// What the index shows, as the audit needs it.
pub(crate) fn cluster_ranges(index: &ClusterIndex, config: &CiliumConfig) -> ClusterRanges {
    let nodes = index.node_names().into_iter();
    let mut ranges: BTreeMap<&str, NodeRanges> = nodes
        .map(|name| {
            let node = index.nodes.get(name);
            let ranges = NodeRanges {
                name: name.clone(),
                node: node.map(|node| node.pod_cidrs.clone()),
                cilium: index.cilium_nodes.get(name).map(|cilium| cilium.pod_cidrs.clone()),
                annotated: node.map(|node| node.annotated.clone()).unwrap_or_default(),
                pods: Vec::new(),
            };
            (name.as_str(), ranges)
        })
        .collect();
    for (name, pod) in index.pods.iter().filter(|(_, pod)| pod.is_live()) {
        if let Some(node) = ranges.get_mut(pod.node.as_str()) {
            node.pods.extend(pod.addresses.iter().map(|address| (name.clone(), *address)));
        }
    }
    ClusterRanges { mode: config.mode, announces: config.announces, nodes: ranges.into_values().collect() }
}

/// Every finding for a person: what, what breaks, what to do.
pub(crate) fn as_text(found: &[DriftFinding], config: &CiliumConfig) -> String {
    let mut text = String::new();
    for remark in &config.remarks {
        text.push_str(&format!("note: {remark}\n"));
    }
    for finding in found {
        let (breaks, advice) = (finding.breaks(), finding.advice());
        text.push_str(&format!("{finding}\n  breaks: {breaks}\n  what to do: {advice}\n"));
    }
    text.push_str(&match found.len() {
        0 => "no drift: Nodes, CiliumNodes, annotations and pods agree\n".to_owned(),
        1 => "1 finding\n".to_owned(),
        many => format!("{many} findings\n"),
    });
    text
}

/// The same for machines.
pub(crate) fn as_json(found: &[DriftFinding], config: &CiliumConfig) -> String {
    let findings: Vec<Value> = found
        .iter()
        .map(|finding| {
            json!({"node": finding.node, "reason": finding.reason(), "breaks": finding.breaks().to_string(),
                   "what": finding.to_string(), "advice": finding.advice()})
        })
        .collect();
    let page = json!({"mode": config.mode.as_str(), "remarks": config.remarks, "findings": findings});
    format!("{page:#}\n")
}

/// The duty.
pub struct DriftAudit {
    config: Option<(CiliumConfig, Duration)>,
    found: Labelled<Gauge, 2>,
}

impl DriftAudit {
    /// The duty.
    pub fn new(metrics: &ControllerMetrics) -> Self {
        Self { config: None, found: metrics.drift.clone() }
    }

    async fn config(&mut self, context: &Context) -> CiliumConfig {
        let now = context.elapsed();
        match &self.config {
            Some((config, read)) if now.saturating_sub(*read) < CONFIG_AGE => config.clone(),
            _ => {
                let config = CiliumConfig::read(&context.writer, &context.settings).await;
                for remark in &config.remarks {
                    tracing::warn!("{remark}");
                }
                self.config = Some((config.clone(), now));
                config
            }
        }
    }
}

impl Duty for DriftAudit {
    const NAME: &'static str = "drift";
    const TRIGGERS: &'static [Kind] = &[Kind::Node, Kind::CiliumNode, Kind::Pod];
    const BATCH_DELAY: Duration = Duration::from_secs(5);
    const TICK: Option<Duration> = Some(CONFIG_AGE);

    async fn round(&mut self, context: &Context, _: Vec<Key>) -> RoundResult {
        let config = self.config(context).await;
        let found = audit(&cluster_ranges(&context.index(), &config));
        self.found.clear();
        let mut of_node: BTreeMap<&str, Vec<&DriftFinding>> = BTreeMap::new();
        for finding in &found {
            self.found.with([finding.reason(), &finding.breaks().to_string()]).inc();
            of_node.entry(&finding.node).or_default().push(finding);
        }
        for finding in of_node.get("").into_iter().flatten() {
            tracing::warn!(breaks = %finding.breaks(), "{finding}; {}", finding.advice());
        }
        let nodes: Vec<(String, String, Option<String>)> = {
            let index = context.index();
            let seen = index.nodes.iter();
            seen.map(|(name, node)| (name.clone(), node.uid.clone(), node.drift.clone())).collect()
        };
        let mut failures = 0;
        for (name, uid, current) in nodes {
            let findings = of_node.get(name.as_str()).map(Vec::as_slice).unwrap_or_default();
            for finding in findings {
                let message = format!("{finding}; breaks {}; {}", finding.breaks(), finding.advice());
                let about = events::node(&name, &uid);
                context
                    .record_event(NewEvent { about, reason: finding.reason(), message, warning: true })
                    .await;
            }
            if let Err(error) = write_condition(context, &name, &uid, findings, current.as_deref()).await {
                tracing::warn!(
                    node = name, %error,
                    "cannot write the Node condition AddressDrift; trying again"
                );
                failures += 1;
            }
        }
        let again = if failures > 0 { vec![(Key::new(Kind::Node, ""), RETRY)] } else { Vec::new() };
        RoundResult { again, failures }
    }
}

/// Writes the node's condition if it has changed.
async fn write_condition(
    context: &Context,
    name: &str,
    uid: &str,
    findings: &[&DriftFinding],
    current: Option<&str>,
) -> Result<(), ApiError> {
    let Some(condition) = drift_condition::changed(findings, current) else { return Ok(()) };
    let body = Patch::Strategic(json!({"metadata": {"uid": uid}, "status": {"conditions": [condition]}}));
    let nodes: Api<Node> = Api::all(context.writer.client());
    let params = patch_params();
    let what = format!("patch status of Node {name}");
    let sent = nodes.patch_status(name, &params, &body);
    context.writer.write(&what, sent).await.map(|_| ())
}
