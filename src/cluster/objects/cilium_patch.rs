//! A write to a CiliumNode, as data. Must never touch more than single pool entries and the list of ranges.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::cluster::objects::cilium::{CiliumNode, PoolEntry, pool_patch};

/// Pool entries to add, and those to remove.
pub(crate) type PoolChanges = BTreeMap<String, Option<PoolEntry>>;

/// A write to a CiliumNode: single pool entries, and the whole list of ranges if it changes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodePatch {
    pub node: String,
    /// The required resourceVersion: always set when the list changes, which has several writers.
    pub resource_version: Option<String>,
    pub pool: PoolChanges,
    pub pod_cidrs: Option<Vec<String>>,
}

impl NodePatch {
    pub(crate) fn body(&self) -> Value {
        let put = self.pool.iter().filter_map(|(key, entry)| Some((key.as_str(), entry.as_ref()?)));
        let gone = self.pool.iter().filter(|(_, entry)| entry.is_none()).map(|(key, _)| key.as_str());
        let mut body = if self.pool.is_empty() { json!({}) } else { pool_patch(put, gone) };
        if let Some(pod_cidrs) = &self.pod_cidrs {
            body["spec"]["ipam"]["podCIDRs"] = json!(pod_cidrs);
        }
        if let Some(version) = &self.resource_version {
            body["metadata"] = json!({"resourceVersion": version});
        }
        body
    }

    /// Pool entries only, and only if the object was not written since it was read: another writer may have
    /// added an owner.
    pub(crate) fn of_keys(node: &CiliumNode, pool: PoolChanges) -> Self {
        Self { resource_version: node.metadata.resource_version.clone(), ..Self::of(node, pool, None) }
    }

    pub(crate) fn of(node: &CiliumNode, pool: PoolChanges, pod_cidrs: Option<Vec<String>>) -> Self {
        let version = node.metadata.resource_version.clone();
        Self {
            node: node.metadata.name.clone().unwrap_or_default(),
            resource_version: version.filter(|_| pod_cidrs.is_some()),
            pool,
            pod_cidrs,
        }
    }
}
