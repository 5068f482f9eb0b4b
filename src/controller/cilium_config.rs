//! What Cilium's own settings say: its mode, whether it announces ranges, and everything that the preflight
//! asks. Read where that is allowed; must never be needed: without it the controller's own setting counts.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, DynamicObject, ListParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::Value;

use crate::cluster::api::client::ApiError;
use crate::controller::{flags::ControllerSettings, writer::Writer};
use crate::policy::mode::CiliumMode;

/// The ConfigMap that Cilium is installed with.
pub(crate) const NAME: &str = "cilium-config";
pub(crate) const NAMESPACE: &str = "kube-system";

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct CiliumConfig {
    pub mode: CiliumMode,
    /// Whether its BGP speaker is asked to announce pod ranges.
    pub announces: bool,
    /// Every key of its ConfigMap; none if that cannot be read.
    pub data: Option<BTreeMap<String, String>>,
    /// That the controller's own setting is another mode than Cilium's.
    pub contradiction: Option<String>,
    /// What a person should know of how this was found out.
    pub remarks: Vec<String>,
}

impl CiliumConfig {
    /// Reads it, as far as that is allowed.
    pub(crate) async fn read(writer: &Writer, settings: &ControllerSettings) -> Self {
        let set = settings.cilium_ipam;
        let mut config = Self { mode: set, ..Self::default() };
        let api: Api<ConfigMap> = Api::namespaced(writer.client(), NAMESPACE);
        let what = format!("get ConfigMap {NAMESPACE}/{NAME}");
        match writer.connection().read(&what, || api.get_opt(NAME)).await {
            Ok(found) => config.data = found.map(|found| found.data.unwrap_or_default()),
            Err(error) => config.remarks.push(format!("{error}; going by --cilium-ipam")),
        }
        let data = config.data.clone().unwrap_or_default();
        let said = |key: &str| data.get(key).map(String::as_str);
        if let Some(ipam) = said("ipam") {
            config.mode = CiliumMode::from_cilium_config(ipam);
            if config.mode.is_known() && config.mode != set {
                config.contradiction = Some(format!(
                    "ConfigMap {NAMESPACE}/{NAME} says ipam: {ipam}, and --cilium-ipam says otherwise; set \
                     them alike"
                ));
            }
        }
        config.announces = said("bgp-announce-pod-cidr") == Some("true")
            || (said("enable-bgp-control-plane") == Some("true") && advertises(writer).await);
        config
    }
}

impl CiliumConfig {
    /// Everything that a person should know who goes by the controller's own setting, too.
    pub(crate) fn all_remarks(&self) -> impl Iterator<Item = &String> {
        self.remarks.iter().chain(&self.contradiction)
    }
}

/// Whether any object of the BGP control plane asks for pod ranges.
async fn advertises(writer: &Writer) -> bool {
    let every = ListParams::default();
    for (version, kind, plural) in [
        ("v2", "CiliumBGPAdvertisement", "ciliumbgpadvertisements"),
        ("v2alpha1", "CiliumBGPAdvertisement", "ciliumbgpadvertisements"),
        ("v2alpha1", "CiliumBGPPeeringPolicy", "ciliumbgppeeringpolicies"),
    ] {
        let resource =
            ApiResource::from_gvk_with_plural(&GroupVersionKind::gvk("cilium.io", version, kind), plural);
        let api: Api<DynamicObject> = Api::all_with(writer.client(), &resource);
        let what = format!("list {kind}s");
        match writer.connection().read(&what, || api.list(&every)).await {
            Ok(found) if found.items.iter().any(|object| asks_for_ranges(&object.data)) => return true,
            Ok(_) | Err(ApiError::Refused { code: 404, .. }) => {}
            Err(error) => tracing::debug!(%error, "cannot see what is announced"),
        }
    }
    false
}

fn asks_for_ranges(object: &Value) -> bool {
    let any = |list: &str, asks: fn(&Value) -> bool| {
        object["spec"][list].as_array().is_some_and(|list| list.iter().any(asks))
    };
    any("advertisements", |one| one["advertisementType"] == "PodCIDR")
        || any("virtualRouters", |one| one["exportPodCIDR"] == true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn pod_ranges_are_asked_for_by_an_advertisement_or_an_older_policy() {
        assert!(asks_for_ranges(&json!({"spec": {"advertisements": [{"advertisementType": "PodCIDR"}]}})));
        assert!(!asks_for_ranges(&json!({"spec": {"advertisements": [{"advertisementType": "Service"}]}})));
        assert!(asks_for_ranges(&json!({"spec": {"virtualRouters": [{"exportPodCIDR": true}]}})));
        assert!(!asks_for_ranges(&json!({"spec": null})));
    }
}
