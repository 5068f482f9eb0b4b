//! CiliumNodeConfig: settings of Cilium for some nodes, which replace those of its ConfigMap when
//! cilium-agent starts. Must never be guessed at: a selector that cannot be read selects no node here, as for
//! Cilium.

use std::collections::BTreeMap;

use kube::{CustomResource, ResourceExt};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::cluster::objects::lenient::Validate;
use crate::policy::selection::selector::{LabelSelector, Selector};

/// The label by which a CiliumNodeConfig selects one node.
pub(crate) const HOSTNAME: &str = "kubernetes.io/hostname";
const PREFIX: &str = "sticky-ipam-";

#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "cilium.io",
    version = "v2",
    kind = "CiliumNodeConfig",
    plural = "ciliumnodeconfigs",
    namespaced,
    schema = "disabled",
    derive = "PartialEq"
)]
#[serde(rename_all = "camelCase")]
pub struct CiliumNodeConfigSpec {
    /// By the keys of Cilium's ConfigMap.
    #[serde(default)]
    pub defaults: BTreeMap<String, String>,
    /// None selects no node.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub node_selector: Value,
}

impl Validate for CiliumNodeConfig {}

impl CiliumNodeConfig {
    fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        if self.spec.node_selector.is_null() {
            return false;
        }
        let written = LabelSelector::deserialize(&self.spec.node_selector).ok();
        written.and_then(|written| Selector::check(&written).ok()).is_some_and(|read| read.matches(labels))
    }
}

/// The name of the one that sticky-ipam writes for a node.
pub(crate) fn name_of(node: &str) -> String {
    format!("{PREFIX}{node}")
}

/// Whether sticky-ipam wrote it: it has the label and the name for it.
pub(crate) fn is_ours(config: &CiliumNodeConfig) -> bool {
    config.labels().get(MANAGED_BY).is_some_and(|value| value == MANAGER)
        && config.name_any().starts_with(PREFIX)
}

const MANAGED_BY: &str = "app.kubernetes.io/managed-by";
const MANAGER: &str = "sticky-ipam";

/// The labels by which it is found again.
pub(crate) fn our_labels() -> BTreeMap<String, String> {
    [(MANAGED_BY.to_owned(), MANAGER.to_owned())].into()
}

/// Selects the node with this host name.
pub(crate) fn selector_of(hostname: &str) -> Value {
    json!({"matchLabels": {HOSTNAME: hostname}})
}

/// The settings that replace Cilium's own on a node with these labels: by name, the last one counts.
pub(crate) fn settings_for<'a>(
    configs: impl IntoIterator<Item = &'a CiliumNodeConfig>,
    labels: &BTreeMap<String, String>,
) -> BTreeMap<String, String> {
    let mut selecting: Vec<&CiliumNodeConfig> =
        configs.into_iter().filter(|config| config.selects(labels)).collect();
    selecting.sort_by_key(|config| config.name_any());
    selecting.iter().flat_map(|config| config.spec.defaults.clone()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(name: &str, spec: Value) -> CiliumNodeConfig {
        serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap()
    }

    #[test]
    fn the_last_config_by_name_that_selects_the_node_counts() {
        let labels = BTreeMap::from([(HOSTNAME.to_owned(), "n1".to_owned())]);
        let here = json!({"matchLabels": {HOSTNAME: "n1"}});
        let all = [
            config("b", json!({"defaults": {"ipam": "crd", "debug": "true"}, "nodeSelector": here})),
            config("a", json!({"defaults": {"ipam": "kubernetes"}, "nodeSelector": {}})),
            config(
                "c",
                json!({"defaults": {"ipam": "eni"}, "nodeSelector": {"matchLabels": {HOSTNAME: "n2"}}}),
            ),
            config("d", json!({"defaults": {"ipam": "azure"}})),
            config(
                "e",
                json!({"defaults": {"ipam": "azure"}, "nodeSelector": {"matchExpressions": [{"key": "a", "operator": "Is"}]}}),
            ),
        ];
        let settings = settings_for(&all, &labels);
        assert_eq!(
            settings,
            [("debug", "true"), ("ipam", "crd")].map(|(k, v)| (k.to_owned(), v.to_owned())).into()
        );
    }

    #[test]
    fn what_sticky_ipam_writes_is_recognized_by_name_and_label() {
        let mut ours = config(&name_of("n1"), json!({"defaults": {}}));
        assert!(!is_ours(&ours), "a person may use the name");
        ours.metadata.labels = Some(our_labels());
        assert!(is_ours(&ours));
    }
}
