//! Which settings a node needs of its own: in `crd` mode cilium-agent takes the Node's range for the one of
//! its pods, so where the node's block is another one, a CiliumNodeConfig names the block. And the first node
//! that switches. Pure. Must never touch a CiliumNodeConfig that sticky-ipam did not write.

use std::collections::BTreeMap;

use ipnet::IpNet;
use serde_json::{Map, Value, json};

use super::{Obstacle, Wish};
use crate::alloc::Family;
use crate::cluster::objects::cilium_node_config::{
    CiliumNodeConfig, CiliumNodeConfigSpec, HOSTNAME, is_ours, name_of, our_labels, selector_of, settings_for,
};
use crate::cluster::writer::write::Precondition;
use crate::controller::index::{ClusterIndex, objects::IndexedNode};
use crate::policy::mode::CiliumMode;
use crate::policy::preflight::{IPAM_KEY, range_key};

/// A CiliumNodeConfig to write, or to delete if nothing is left to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ConfigWrite {
    pub name: String,
    /// As it was planned from; none if there is none yet.
    pub at: Option<Precondition>,
    hostname: String,
    before: BTreeMap<String, String>,
    pub defaults: BTreeMap<String, String>,
}

impl ConfigWrite {
    /// The merge patch of what it was planned from.
    pub(crate) fn patch(&self) -> Value {
        let gone = self.before.keys().filter(|key| !self.defaults.contains_key(*key));
        let mut defaults: Map<String, Value> = gone.map(|key| (key.clone(), Value::Null)).collect();
        defaults.extend(self.defaults.iter().map(|(key, value)| (key.clone(), json!(value))));
        json!({"metadata": {"labels": our_labels()},
               "spec": {"defaults": defaults, "nodeSelector": selector_of(&self.hostname)}})
    }

    /// The object after the write.
    pub(crate) fn written(&self) -> CiliumNodeConfig {
        let (defaults, node_selector) = (self.defaults.clone(), selector_of(&self.hostname));
        let mut object = CiliumNodeConfig::new(&self.name, CiliumNodeConfigSpec { defaults, node_selector });
        object.metadata.labels = Some(our_labels());
        object
    }
}

/// What must be written for a node with these blocks, whose Node will name these ranges.
pub(super) fn config_write(
    wish: &Wish<'_>,
    index: &ClusterIndex,
    name: &str,
    ranges: &[IpNet],
    blocks: &[IpNet],
) -> Result<Option<ConfigWrite>, Obstacle> {
    let Some(node) = index.nodes.get(name) else { return Ok(None) };
    let own = name_of(name);
    let is_own = |config: &&CiliumNodeConfig| config.metadata.name.as_ref() == Some(&own);
    let current = wish.installation.node_configs.iter().find(is_own);
    let before = current.map(|config| config.spec.defaults.clone()).unwrap_or_default();
    let others = wish.installation.node_configs.iter().filter(|config| !is_own(config));
    let others = settings_for(others, &node.labels);
    let mut defaults = BTreeMap::new();
    for family in [Family::V4, Family::V6] {
        let of_family = |net: &&IpNet| Family::of(net.addr()) == family;
        let Some(block) = blocks.iter().find(of_family) else { continue };
        let said = others.get(range_key(family)).and_then(|text| text.parse::<IpNet>().ok());
        let range = said.or_else(|| ranges.iter().find(of_family).copied());
        if !range.is_some_and(|range| range.contains(block)) {
            defaults.insert(range_key(family).to_owned(), block.to_string());
        }
    }
    // It stays until the whole cluster is in crd mode: without it, the node would go back by itself.
    let switched = wish.canary == Some(name) || before.contains_key(IPAM_KEY);
    if switched && !wish.mode.publishes_pool_entries() {
        defaults.insert(IPAM_KEY.to_owned(), CiliumMode::Crd.as_str().to_owned());
    }
    if defaults == before {
        return Ok(None);
    }
    if let Some(current) = current.filter(|current| !is_ours(current)) {
        let name = current.metadata.name.clone().unwrap_or_default();
        return Err(Obstacle::ForeignConfig { name });
    }
    let hostname = hostname(index, name, node)?;
    Ok(Some(ConfigWrite { name: own, at: current.map(Precondition::of), hostname, before, defaults }))
}

/// The label that this node alone has.
fn hostname(index: &ClusterIndex, name: &str, node: &IndexedNode) -> Result<String, Obstacle> {
    let label = node.labels.get(HOSTNAME).filter(|label| !label.is_empty());
    let mut others = index.nodes.iter().filter(|(other, _)| *other != name);
    match label {
        Some(label) if !others.any(|(_, other)| other.labels.get(HOSTNAME) == Some(label)) => {
            Ok(label.clone())
        }
        _ => Err(Obstacle::NoHostname { node: name.to_owned() }),
    }
}

/// The CiliumNodeConfigs as they will be after these writes.
pub(super) fn after<'a>(
    configs: &[CiliumNodeConfig],
    writes: impl Iterator<Item = &'a ConfigWrite> + Clone,
) -> Vec<CiliumNodeConfig> {
    let is_written = |config: &&CiliumNodeConfig| {
        writes.clone().any(|write| config.metadata.name.as_deref() == Some(&write.name))
    };
    let stay = configs.iter().filter(|config| !is_written(config)).cloned();
    stay.chain(writes.clone().map(ConfigWrite::written)).collect()
}

/// Those that sticky-ipam wrote, with the state in which they were read.
pub(crate) fn written_by_us(configs: &[CiliumNodeConfig]) -> Vec<(String, Precondition)> {
    let ours = configs.iter().filter(|config| is_ours(config));
    ours.map(|config| (config.metadata.name.clone().unwrap_or_default(), Precondition::of(config))).collect()
}
