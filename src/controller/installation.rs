//! How Cilium and kube-proxy are installed: what the preflight asks beside the watched objects. Read live,
//! as far as that is allowed. Must never take what it may not read for absent: it says so.

use std::collections::BTreeMap;

use ipnet::IpNet;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{Api, ListParams};

use crate::cluster::api::client::ApiError;
use crate::cluster::objects::cilium_node_config::{CiliumNodeConfig, settings_for};
use crate::controller::cilium_config::{CiliumConfig, NAMESPACE};
use crate::controller::index::{ClusterIndex, objects::IndexedPod};
use crate::controller::writer::Writer;
use crate::policy::mode::CiliumMode;
use crate::policy::preflight::{
    CiliumAgent, CiliumOptions, CiliumRelease, IPAM_KEY, KubeProxy, PreflightFacts, PreflightNode,
    PreflightPool,
};

/// The label of cilium-agent's pods, and their container.
const CILIUM_PODS: &str = "k8s-app=cilium";
const CILIUM_CONTAINER: &str = "cilium-agent";
/// The ConfigMap of kube-proxy as kubeadm writes it, its key, and the label of its pods.
const KUBE_PROXY: &str = "kube-proxy";
const KUBE_PROXY_KEY: &str = "config.conf";
const APP: &str = "k8s-app";
/// In the names of Multus' DaemonSets, and the value of their labels `app` and `name`.
const MULTUS: &str = "multus";

/// What was read, and what could not be read.
#[derive(Debug, Clone, Default)]
pub(crate) struct Installation {
    /// The keys of Cilium's ConfigMap; none if it cannot be read.
    pub settings: Option<BTreeMap<String, String>>,
    pub node_configs: Vec<CiliumNodeConfig>,
    /// By node.
    pub agents: BTreeMap<String, CiliumAgent>,
    pub kube_proxy: Option<String>,
    pub remarks: Vec<String>,
}

impl Installation {
    /// Reads everything but the ConfigMap, which was read before.
    pub(crate) async fn read(writer: &Writer, config: &CiliumConfig) -> Self {
        let mut read = Self { settings: config.data.clone(), ..Self::default() };
        let configs: Api<CiliumNodeConfig> = Api::namespaced(writer.client(), NAMESPACE);
        let what = format!("list CiliumNodeConfigs of {NAMESPACE}");
        let all = ListParams::default();
        match writer.connection().read(&what, || configs.list(&all)).await {
            Ok(found) => read.node_configs = found.items,
            Err(ApiError::Refused { code: 404, .. }) => {}
            Err(error) => read.remarks.push(format!("{error}; going by the ConfigMap alone")),
        }
        let pods: Api<Pod> = Api::namespaced(writer.client(), NAMESPACE);
        let params = ListParams::default().labels(CILIUM_PODS);
        match writer.connection().read("list the pods of cilium-agent", || pods.list(&params)).await {
            Ok(found) => read.agents = found.items.iter().filter_map(agent).collect(),
            Err(error) => read.remarks.push(error.to_string()),
        }
        let maps: Api<ConfigMap> = Api::namespaced(writer.client(), NAMESPACE);
        let what = format!("get ConfigMap {NAMESPACE}/{KUBE_PROXY}");
        match writer.connection().read(&what, || maps.get_opt(KUBE_PROXY)).await {
            Ok(found) => {
                let mut data = found.and_then(|found| found.data).unwrap_or_default();
                read.kube_proxy = data.remove(KUBE_PROXY_KEY);
            }
            Err(error) => read.remarks.push(error.to_string()),
        }
        read
    }

    /// Cilium's settings on a node with these labels, as cilium-agent reads them at its next start.
    pub(crate) fn settings_on(
        &self,
        labels: &BTreeMap<String, String>,
        configs: &[CiliumNodeConfig],
    ) -> BTreeMap<String, String> {
        let mut settings = self.settings.clone().unwrap_or_default();
        settings.extend(settings_for(configs, labels));
        settings
    }

    /// The ranges that the settings name for a node with these labels.
    pub(crate) fn ranges_on(&self, labels: &BTreeMap<String, String>) -> Vec<IpNet> {
        CiliumOptions::read(&self.settings_on(labels, &self.node_configs)).ranges
    }

    /// The IPAM mode of a node; the cluster's if no CiliumNodeConfig says otherwise.
    pub(crate) fn mode_on(&self, labels: &BTreeMap<String, String>, of_cluster: CiliumMode) -> CiliumMode {
        let settings = settings_for(&self.node_configs, labels);
        settings.get(IPAM_KEY).map_or(of_cluster, |mode| CiliumMode::from_cilium_config(mode))
    }

    /// Whether cilium-agent may use the pool on any node.
    pub(crate) fn uses_pools(&self, index: &ClusterIndex, of_cluster: CiliumMode) -> bool {
        of_cluster.publishes_pool_entries()
            || index
                .nodes
                .values()
                .any(|node| self.mode_on(&node.labels, of_cluster).publishes_pool_entries())
    }

    /// The facts that say whether the settings fit, without those of a switch.
    pub(crate) fn facts(&self, index: &ClusterIndex) -> PreflightFacts {
        let nodes = index.nodes.iter().map(|(name, node)| {
            let cilium = index.cilium_nodes.get(name);
            PreflightNode {
                name: name.clone(),
                node: node.pod_cidrs.clone(),
                blocks: cilium.map(|cilium| cilium.blocks().collect()).unwrap_or_default(),
                configured: self.ranges_on(&node.labels),
                free: None,
            }
        });
        let pools = index
            .pools
            .iter()
            .map(|(name, pool)| PreflightPool { name: name.clone(), ranges: pool.spec.cidrs.clone() });
        let live = || index.pods.iter().filter(|(_, pod)| !pod.ended);
        let runs_kube_proxy = live().any(|(_, pod)| has_label(pod, APP, KUBE_PROXY));
        PreflightFacts {
            settings: self.settings.as_ref().map(CiliumOptions::read),
            kube_proxy: KubeProxy::of(runs_kube_proxy, self.kube_proxy.as_deref()),
            pools: pools.collect(),
            nodes: nodes.collect(),
            agents: self.agents.clone(),
            in_front: live().find(|(_, pod)| is_multus(pod)).map(|(name, _)| name.clone()),
            least_free: 0,
        }
    }
}

fn agent(pod: &Pod) -> Option<(String, CiliumAgent)> {
    let spec = pod.spec.as_ref()?;
    let image = spec.containers.iter().find(|container| container.name == CILIUM_CONTAINER);
    let conditions = pod.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let agent = CiliumAgent {
        ready: conditions.into_iter().any(|one| one.type_ == "Ready" && one.status == "True"),
        version: image.and_then(|container| CiliumRelease::of_image(container.image.as_deref()?)),
    };
    Some((spec.node_name.clone()?, agent))
}

fn has_label(pod: &IndexedPod, key: &str, value: &str) -> bool {
    pod.facts.labels.get(key).is_some_and(|found| found == value)
}

fn is_multus(pod: &IndexedPod) -> bool {
    let of_daemon_set =
        pod.facts.owners.iter().any(|owner| owner.kind == "DaemonSet" && owner.name.contains(MULTUS));
    of_daemon_set || ["app", "name"].iter().any(|key| has_label(pod, key, MULTUS))
}
