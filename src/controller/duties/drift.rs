//! The drift audit: on the index as a duty, and once by `sticky-ipam-controller audit`. Must never repair: a
//! program cannot know which of two contradicting objects is right.

use std::collections::{BTreeMap, BTreeSet};
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
use crate::controller::{
    cilium_config::CiliumConfig, context::Context, drift_condition, installation::Installation,
};
use crate::policy::drift::{ClusterRanges, DriftFinding, NodeRanges, audit};
use crate::policy::mode::CiliumMode;
use crate::policy::preflight::{PreflightFinding, Severity, check_settings};
use crate::runtime::metrics::{Gauge, Labelled};

/// The label `breaks` of a setting that does not fit.
const SETTINGS: &str = "settings";
/// How often Cilium's own settings are read again.
const CONFIG_AGE: Duration = Duration::from_secs(600);
const RETRY: Duration = Duration::from_secs(30);

pub(crate) fn cluster_ranges(
    index: &ClusterIndex,
    config: &CiliumConfig,
    installation: &Installation,
) -> ClusterRanges {
    let of_node = |name: &String| {
        let node = index.nodes.get(name);
        NodeRanges {
            name: name.clone(),
            node: node.map(|node| node.pod_cidrs.clone()),
            cilium: index.cilium_nodes.get(name).map(|cilium| cilium.pod_cidrs.clone()),
            configured: node.map(|node| installation.ranges_on(&node.labels)).unwrap_or_default(),
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

/// The settings that do not fit, where sticky-ipam fills the pools of the cluster.
pub(crate) fn settings_findings(
    index: &ClusterIndex,
    config: &CiliumConfig,
    installation: &Installation,
) -> Vec<PreflightFinding> {
    if !config.mode.publishes_pool_entries() || installation.settings.is_none() {
        // A remark says that they cannot be read.
        return Vec::new();
    }
    check_settings(&installation.facts(index))
}

/// What the audit found, and what a person should know of how it looked.
#[derive(Debug, Default)]
pub(crate) struct AuditReport {
    pub mode: CiliumMode,
    pub remarks: Vec<String>,
    pub drift: Vec<DriftFinding>,
    pub settings: Vec<PreflightFinding>,
}

impl AuditReport {
    /// Compares everything once.
    pub(crate) fn of(index: &ClusterIndex, config: &CiliumConfig, installation: &Installation) -> Self {
        Self {
            mode: config.mode,
            remarks: config.all_remarks().chain(&installation.remarks).cloned().collect(),
            drift: audit(&cluster_ranges(index, config, installation)),
            settings: settings_findings(index, config, installation),
        }
    }

    /// Whether there is anything to do. A note is not.
    pub(crate) fn is_clear(&self) -> bool {
        self.drift.is_empty() && !self.settings.iter().any(|finding| finding.severity() < Severity::Note)
    }
}

pub(crate) fn as_text(report: &AuditReport) -> String {
    let (found, mut text) = (&report.drift, String::new());
    for remark in &report.remarks {
        text.push_str(&format!("note: {remark}\n"));
    }
    for finding in &report.settings {
        let (severity, name, cure) = (finding.severity().as_str(), finding.name(), finding.cure());
        text.push_str(&format!("{finding}\n  {severity}: {name}\n  what to do: {cure}\n"));
    }
    for finding in found {
        let (breaks, advice) = (finding.breaks(), finding.advice());
        text.push_str(&format!("{finding}\n  breaks: {breaks}\n  what to do: {advice}\n"));
    }
    text.push_str(&match found.len() {
        0 if !report.settings.is_empty() => "no drift, but settings of Cilium that do not fit\n".to_owned(),
        0 => "no drift: Nodes, CiliumNodes, annotations and pods agree\n".to_owned(),
        1 => "1 finding\n".to_owned(),
        many => format!("{many} findings\n"),
    });
    text
}

pub(crate) fn as_json(report: &AuditReport) -> String {
    let of_finding = |finding: &DriftFinding| {
        json!({"node": finding.node, "reason": finding.reason(), "breaks": finding.breaks().to_string(),
               "what": finding.to_string(), "advice": finding.advice()})
    };
    let findings: Vec<Value> = report.drift.iter().map(of_finding).collect();
    let of_setting = |finding: &PreflightFinding| {
        json!({"node": finding.node, "reason": finding.name(), "severity": finding.severity().as_str(),
               "object": finding.object(), "what": finding.fault.to_string(), "advice": finding.cure()})
    };
    let settings: Vec<Value> = report.settings.iter().map(of_setting).collect();
    let page = json!({"mode": report.mode.as_str(), "remarks": report.remarks, "findings": findings,
                      "settings": settings});
    format!("{page:#}\n")
}

pub struct DriftAudit {
    /// What was read of Cilium's own settings, and when.
    config: Option<(CiliumConfig, Installation, Duration)>,
    /// The findings of settings that were logged last.
    logged: BTreeSet<String>,
    found: Labelled<Gauge, 2>,
}

impl DriftAudit {
    pub fn new(metrics: &ControllerMetrics) -> Self {
        Self { config: None, logged: BTreeSet::new(), found: metrics.drift.clone() }
    }

    async fn config(&mut self, context: &Context) -> (CiliumConfig, Installation) {
        let now = context.elapsed();
        let is_fresh = |(_, _, read): &&(_, _, Duration)| now.saturating_sub(*read) < CONFIG_AGE;
        if let Some((config, installation, _)) = self.config.as_ref().filter(is_fresh) {
            return (config.clone(), installation.clone());
        }
        let config = CiliumConfig::read(&context.writer, &context.settings).await;
        let installation = Installation::read(&context.writer, &config).await;
        for remark in config.all_remarks().chain(&installation.remarks) {
            tracing::warn!("{remark}");
        }
        self.config = Some((config.clone(), installation.clone(), now));
        (config, installation)
    }

    /// Counts the settings that do not fit, and logs each once.
    fn report_settings(&mut self, found: &[PreflightFinding]) {
        for finding in found {
            self.found.with([finding.name(), SETTINGS]).inc();
        }
        let texts: BTreeSet<String> =
            found.iter().map(|finding| format!("{finding}; {}", finding.cure())).collect();
        for text in texts.difference(&self.logged) {
            tracing::warn!("{text}");
        }
        self.logged = texts;
    }
}

impl Duty for DriftAudit {
    const NAME: &'static str = "drift";
    const TRIGGERS: &'static [Kind] = &[Kind::Node, Kind::CiliumNode, Kind::Pod];
    const BATCH_DELAY: Duration = Duration::from_secs(5);
    const TICK: Option<Duration> = Some(CONFIG_AGE);

    async fn round(&mut self, context: &Context, _: Vec<Key>) -> RoundResult {
        let (config, installation) = self.config(context).await;
        let AuditReport { drift: found, settings, .. } =
            AuditReport::of(&context.index(), &config, &installation);
        self.found.clear();
        self.report_settings(&settings);
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
