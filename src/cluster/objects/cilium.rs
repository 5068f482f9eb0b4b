//! The little that we touch of Cilium's objects.
//!
//! Only what is read is named; everything else is passed over on reading. Must never be sent back whole:
//! writes are merge patches of single keys, so fields that we do not know are never lost.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use kube::CustomResource;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Value, json};

use crate::cluster::objects::lenient::Validate;

#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "cilium.io",
    version = "v2",
    kind = "CiliumNode",
    plural = "ciliumnodes",
    schema = "disabled",
    status = "CiliumNodeStatus",
    derive = "PartialEq"
)]
pub struct CiliumNodeSpec {
    /// The node's own addresses, those of Cilium's router among them.
    #[serde(default, deserialize_with = "or_default")]
    pub addresses: Vec<NodeAddress>,
    #[serde(default, deserialize_with = "or_default")]
    pub health: AddressPair,
    #[serde(default, deserialize_with = "or_default")]
    pub ingress: AddressPair,
    #[serde(default, deserialize_with = "or_default")]
    pub ipam: CiliumIpam,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeAddress {
    /// What it is for: `InternalIP`, `CiliumInternalIP` and others.
    #[serde(rename = "type", default, deserialize_with = "or_default")]
    pub purpose: String,
    #[serde(default, deserialize_with = "or_default")]
    pub ip: String,
}

impl CiliumNodeSpec {
    /// The addresses that Cilium itself has of the node's range: router, health, ingress.
    pub fn own(&self) -> impl Iterator<Item = IpAddr> + '_ {
        let router = self.addresses.iter().filter(|address| address.purpose == "CiliumInternalIP");
        let pairs = [&self.health, &self.ingress];
        let texts = router
            .map(|address| &address.ip)
            .chain(pairs.into_iter().flat_map(|pair| [&pair.ipv4, &pair.ipv6]));
        texts.filter_map(|text| text.parse().ok())
    }
}

/// The part of a CiliumNode that says which addresses the node has.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CiliumIpam {
    /// In `crd` mode: the addresses that the agent may give out, by address as text.
    #[serde(default, deserialize_with = "or_default")]
    pub pool: BTreeMap<String, PoolEntry>,
    /// The ranges that other nodes route here.
    #[serde(rename = "podCIDRs", default, deserialize_with = "or_default")]
    pub pod_cidrs: Vec<String>,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CiliumNodeStatus {
    #[serde(default, deserialize_with = "or_default")]
    pub ipam: CiliumIpamStatus,
}

/// Which addresses are in use, as Cilium says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct CiliumIpamStatus {
    /// By address as text.
    #[serde(default, deserialize_with = "or_default")]
    pub used: BTreeMap<String, Value>,
}

impl CiliumNode {
    /// Whether Cilium says that this address is in use.
    pub fn uses(&self, address: &str) -> bool {
        self.status.as_ref().is_some_and(|status| status.ipam.used.contains_key(address))
    }

    /// The owners, `namespace/pod`, of the addresses that Cilium says are in use.
    pub fn users(&self) -> BTreeSet<&str> {
        let used = self.status.iter().flat_map(|status| status.ipam.used.values());
        used.filter_map(|used| used.get("owner")?.as_str()).collect()
    }

    /// The addresses that Cilium may have given to others than `owner`: pool entries of other owners, and
    /// used addresses. The status lags behind: the owner's own old sandbox may still be in it.
    pub fn barred_to(&self, owner: &str) -> BTreeSet<IpAddr> {
        let pool = &self.spec.ipam.pool;
        let others = pool.iter().filter(|(_, entry)| entry.owner != owner).map(|(key, _)| key);
        let own = |key: &String| pool.get(key).is_some_and(|entry| entry.owner == owner);
        let used = self.status.iter().flat_map(|status| status.ipam.used.keys()).filter(|key| !own(key));
        others.chain(used).filter_map(|key| key.parse().ok()).collect()
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolEntry {
    /// `namespace/pod` that alone may have it; anyone may, if it is empty.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub owner: String,
    /// `namespace/Kind/name` of the workload, for people.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "String::is_empty")]
    pub resource: String,
}

/// A pod's endpoint as Cilium sees it. What is of interest lies in its status; it has no spec.
#[derive(CustomResource, Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "cilium.io",
    version = "v2",
    kind = "CiliumEndpoint",
    plural = "ciliumendpoints",
    namespaced,
    no_spec,
    schema = "disabled",
    status = "CiliumEndpointStatus",
    derive = "PartialEq"
)]
pub struct CiliumEndpointSpec {}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CiliumEndpointStatus {
    #[serde(default, deserialize_with = "or_default")]
    pub networking: EndpointNetworking,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndpointNetworking {
    /// Its addresses, a pair of families at most.
    #[serde(default, deserialize_with = "or_default")]
    pub addressing: Vec<AddressPair>,
    /// The internal address of its node.
    #[serde(default, deserialize_with = "or_default")]
    pub node: String,
}

/// The addresses of an endpoint; empty where it has none of that family.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AddressPair {
    #[serde(default, deserialize_with = "or_default")]
    pub ipv4: String,
    #[serde(default, deserialize_with = "or_default")]
    pub ipv6: String,
}

/// Cilium is written in Go, where an empty list is often `null`.
fn or_default<'de, D, T>(reader: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::<T>::deserialize(reader)?.unwrap_or_default())
}

impl Validate for CiliumNode {}
impl Validate for CiliumEndpoint {}

/// The merge patch that adds these entries to a node's pool and removes those, and touches nothing else.
pub(crate) fn pool_patch<'a>(
    put: impl IntoIterator<Item = (&'a str, &'a PoolEntry)>,
    take_out: impl IntoIterator<Item = &'a str>,
) -> Value {
    let text = |value: &str| (!value.is_empty()).then(|| value.to_owned());
    let mut pool = serde_json::Map::new();
    for (address, entry) in put {
        // Both keys always: a merge patch that leaves one out would keep what a former owner wrote there.
        pool.insert(address.into(), json!({"owner": text(&entry.owner), "resource": text(&entry.resource)}));
    }
    for address in take_out {
        pool.insert(address.into(), Value::Null);
    }
    json!({"spec": {"ipam": {"pool": pool}}})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_fields_and_nulls_are_passed_over() {
        let node: CiliumNode = serde_json::from_value(json!({
            "metadata": {"name": "n"}, "status": {"ipam": {"used": {}}},
            "spec": {"health": {"x": 1}, "ipam": {"podCIDRs": null, "min-allocate": 3,
                     "pool": {"10.0.0.1": {"owner": "db/mysql-0", "new": true}, "10.0.0.2": {"owner": null}}}}}))
        .unwrap();
        assert_eq!(node.spec.ipam.pool["10.0.0.1"].owner, "db/mysql-0");
        assert_eq!(node.spec.ipam.pool["10.0.0.2"], PoolEntry::default());
        assert!(node.spec.ipam.pod_cidrs.is_empty());
        let bare: CiliumNode =
            serde_json::from_value(json!({"metadata": {"name": "n"}, "spec": {}})).unwrap();
        assert_eq!(bare.spec, CiliumNodeSpec::default());
        let endpoint: CiliumEndpoint = serde_json::from_value(json!({
            "metadata": {"name": "p", "namespace": "d"},
            "status": {"id": 7, "networking": {"addressing": [{"ipv4": "10.0.0.1"}], "node": "172.30.0.11"}}}))
        .unwrap();
        assert_eq!(endpoint.status.unwrap().networking.addressing[0].ipv4, "10.0.0.1");
        let starting: CiliumEndpoint = serde_json::from_value(json!({"metadata": {"name": "p"}})).unwrap();
        assert_eq!(starting.status, None);
    }

    #[test]
    fn patches_name_single_keys_only() {
        let entry = PoolEntry { owner: "db/mysql-0".into(), resource: String::new() };
        assert_eq!(
            pool_patch([("10.0.0.1", &entry)], ["10.0.0.2"]),
            json!({"spec": {"ipam": {"pool": {
                "10.0.0.1": {"owner": "db/mysql-0", "resource": null}, "10.0.0.2": null}}}})
        );
    }
}
