//! The drift audit: on the index as a duty, and once by `sticky-ipam-controller audit`. Must never repair: a
//! program cannot know which of two contradicting objects is right.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch};
use serde_json::{Value, json};

use crate::cluster::api::client::ApiError;
use crate::cluster::events;
use crate::cluster::writer::apply::patch_params;
use crate::controller::duties::record_warning;
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::{ClusterIndex, Kind, objects::IndexedNode};
use crate::controller::metrics::ControllerMetrics;
use crate::controller::queue::Key;
use crate::controller::{cilium_config::CiliumConfig, context::Context, drift_condition};
use crate::policy::drift::{ClusterRanges, DriftFinding, NodeRanges, audit};
use crate::runtime::metrics::{Gauge, Labelled};

/// How often Cilium's own settings are read again.
const CONFIG_AGE: Duration = Duration::from_secs(600);
const RETRY: Duration = Duration::from_secs(30);

pub(crate) fn cluster_ranges(index: &ClusterIndex, config: &CiliumConfig) -> ClusterRanges {
    let of_node = |name: &String| {
        let node = index.nodes.get(name);
        NodeRanges {
            name: name.clone(),
            node: node.map(|node| node.pod_cidrs.clone()),
            cilium: index.cilium_nodes.get(name).map(|cilium| cilium.pod_cidrs.clone()),
            annotated: node.map(|node| node.annotated.clone()).unwrap_or_default(),
            pods: Vec::new(),
        }
    };
    let nodes = index.node_names().into_iter();
    let mut ranges: BTreeMap<&str, NodeRanges> = nodes.map(|name| (name.as_str(), of_node(name))).collect();
    for (name, pod) in index.pods.iter().filter(|(_, pod)| pod.is_live()) {
        if let Some(node) = ranges.get_mut(pod.node.as_str()) {
            node.pods.extend(pod.addresses.iter().map(|address| (name.clone(), *address)));
        }
    }
    ClusterRanges { mode: config.mode, announces: config.announces, nodes: ranges.into_values().collect() }
}

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

pub(crate) fn as_json(found: &[DriftFinding], config: &CiliumConfig) -> String {
    let of_finding = |finding: &DriftFinding| {
        json!({"node": finding.node, "reason": finding.reason(), "breaks": finding.breaks().to_string(),
               "what": finding.to_string(), "advice": finding.advice()})
    };
    let findings: Vec<Value> = found.iter().map(of_finding).collect();
    let page = json!({"mode": config.mode.as_str(), "remarks": config.remarks, "findings": findings});
    format!("{page:#}\n")
}

pub struct DriftAudit {
    config: Option<(CiliumConfig, Duration)>,
    found: Labelled<Gauge, 2>,
}

impl DriftAudit {
    pub fn new(metrics: &ControllerMetrics) -> Self {
        Self { config: None, found: metrics.drift.clone() }
    }

    async fn config(&mut self, context: &Context) -> CiliumConfig {
        let now = context.elapsed();
        let is_fresh = |(_, read): &&(_, Duration)| now.saturating_sub(*read) < CONFIG_AGE;
        if let Some((config, _)) = self.config.as_ref().filter(is_fresh) {
            return config.clone();
        }
        let config = CiliumConfig::read(&context.writer, &context.settings).await;
        for remark in &config.remarks {
            tracing::warn!("{remark}");
        }
        self.config = Some((config.clone(), now));
        config
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
        let nodes: Vec<_> =
            context.index().nodes.iter().map(|(name, node)| (name.clone(), node.clone())).collect();
        let mut done = RoundResult::default();
        for (name, node) in nodes {
            let findings = of_node.get(name.as_str()).map(Vec::as_slice).unwrap_or_default();
            for finding in findings {
                let message = format!("{finding}; breaks {}; {}", finding.breaks(), finding.advice());
                record_warning(context, events::node(&name, &node.uid), finding.reason(), message).await;
            }
            if let Err(error) = write_condition(context, &name, &node, findings).await {
                tracing::warn!(
                    node = name, %error,
                    "cannot write the Node condition AddressDrift; trying again"
                );
                done.failures += 1;
            }
        }
        if done.failures > 0 {
            done.again.push((Key::new(Kind::Node, ""), RETRY));
        }
        done
    }
}

async fn write_condition(
    context: &Context,
    name: &str,
    node: &IndexedNode,
    findings: &[&DriftFinding],
) -> Result<(), ApiError> {
    let Some(condition) = drift_condition::changed(findings, node.drift.as_deref()) else { return Ok(()) };
    let body =
        Patch::Strategic(json!({"metadata": {"uid": node.uid}, "status": {"conditions": [condition]}}));
    let nodes: Api<Node> = Api::all(context.writer.client());
    let params = patch_params();
    let what = format!("patch status of Node {name}");
    context.writer.write(&what, nodes.patch_status(name, &params, &body)).await.map(|_| ())
}
