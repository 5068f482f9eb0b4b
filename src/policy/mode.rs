//! How Cilium gets the addresses of pods, and how sticky-ipam stands before it.
//!
//! There are two types, because there are two facts. [`CiliumMode`] is the IPAM mode of Cilium itself, one
//! for the cluster; the controller goes by it. [`PluginMode`] is how the plugin is called on a node; plugin
//! and agent go by it. Cilium may run in any mode behind a chained plugin, so neither follows from the other.
//!
//! Both are parsed once, where they come from: a flag, Cilium's ConfigMap, the conflist. All other code asks
//! a question (what follows from the mode) and must never compare a mode itself: then a new mode is a new
//! variant here, and the compiler shows every question that it has to answer. CONTRIBUTING.md, "a Cilium
//! mode", has the steps.

use std::fmt;
use std::str::FromStr;

use serde_json::Value;

/// How the plugin stands before Cilium on a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum PluginMode {
    /// cilium-agent picks the address from the pool of the CiliumNode; the plugin runs cilium-cni.
    #[default]
    Crd,
    /// cilium-cni asks the plugin for an address.
    Delegated,
    /// Another plugin (`ptp`) asks the plugin for an address, and cilium-cni comes after it.
    Chained,
}

impl PluginMode {
    /// The compiler does not name this list: what is left out cannot be written as `--mode`.
    pub const ALL: [Self; 3] = [Self::Crd, Self::Delegated, Self::Chained];

    /// The mode of a call to the plugin, by its configuration. A plugin that is asked for an address cannot
    /// see who asks, so `chained` counts as `delegated` there; no question that the plugin asks tells the two
    /// apart.
    pub fn of_call(has_delegate: bool) -> Self {
        if has_delegate { Self::Crd } else { Self::Delegated }
    }

    /// The value of the agent's flag `--mode`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Crd => "crd",
            Self::Delegated => "delegated",
            Self::Chained => "chained",
        }
    }

    /// Does cilium-agent pick the address? Then it knows which sandbox has which address, and it is asked
    /// before one is released. Otherwise the node's store knows.
    pub fn cilium_picks_the_address(self) -> bool {
        match self {
            Self::Crd => true,
            Self::Delegated | Self::Chained => false,
        }
    }

    /// Do attached addresses stand in `CiliumNode.spec.ipam.pool`? Then the agent refills it, too.
    pub fn publishes_pool_entries(self) -> bool {
        match self {
            Self::Crd => true,
            Self::Delegated | Self::Chained => false,
        }
    }

    /// Does the conflist name the ranges that addresses are taken from? Otherwise they are the blocks of the
    /// CiliumNode.
    pub fn needs_ranges(self) -> bool {
        match self {
            Self::Crd => false,
            Self::Delegated | Self::Chained => true,
        }
    }

    /// Does cilium-agent route one range per family on its own node, so that the host needs further routes?
    pub fn needs_host_routes(self) -> bool {
        match self {
            Self::Crd => true,
            Self::Delegated | Self::Chained => false,
        }
    }

    /// Can it work while Cilium itself has this IPAM mode, as Cilium spells it? A chained plugin picks the
    /// addresses whatever Cilium does.
    /// Errors: the mode that it needs, and how to get there.
    pub fn check_cilium(self, ipam: &str) -> Result<(), String> {
        let (needed, cure) = match self {
            Self::Crd => (CiliumMode::Crd, "move the cluster as docs/adoption.md says"),
            Self::Delegated => (CiliumMode::Delegated, "set it and restart cilium-agent"),
            Self::Chained => return Ok(()),
        };
        if CiliumMode::from_cilium_config(ipam) == needed {
            return Ok(());
        }
        let needed = needed.as_str();
        Err(format!(
            "Cilium on this node runs with ipam: {ipam}, and --mode {self} needs ipam: {needed}; {cure}, or \
             choose another --mode"
        ))
    }

    /// Can a pod keep its MAC address? Only Cilium's own interfaces follow the annotation that asks for one.
    pub fn can_keep_mac(self) -> bool {
        match self {
            Self::Crd | Self::Delegated => true,
            Self::Chained => false,
        }
    }

    /// What to do if the node has no addresses for pods.
    pub fn how_to_get_ranges(self) -> &'static str {
        match self {
            Self::Crd => "spec.ipam.podCIDRs of its CiliumNode is empty; fill it",
            Self::Delegated | Self::Chained => "the installed conflist has no ranges; add them",
        }
    }

    /// The conflist that the agent installs if the operator gives none. Its addresses are examples.
    pub fn example_conflist(self) -> &'static str {
        match self {
            Self::Crd => include_str!("../../conflist/crd.conflist"),
            Self::Delegated => include_str!("../../conflist/delegated.conflist"),
            Self::Chained => include_str!("../../conflist/chained.conflist"),
        }
    }

    /// Are our settings at the top of a conflist's entry, beside its delegate? Otherwise they are in its
    /// `ipam`.
    pub(crate) fn has_settings_at_the_top(self) -> bool {
        match self {
            Self::Crd => true,
            Self::Delegated | Self::Chained => false,
        }
    }

    /// Checks the entry of a conflist that uses sticky-ipam; `next` is the entry after it.
    /// Errors: what this mode needs instead.
    pub fn check_entry(self, entry: &Value, next: &Value) -> Result<(), String> {
        let given = &entry["type"];
        match self {
            Self::Crd if given == "sticky-ipam" && entry["delegate"].is_object() => Ok(()),
            Self::Crd => Err(format!(
                "{given} is not what --mode crd needs: \"sticky-ipam\" with a \"delegate\" of type \
                 \"cilium-cni\""
            )),
            Self::Delegated if given == "cilium-cni" && entry.get("chaining-mode").is_none() => Ok(()),
            Self::Delegated => Err(format!(
                "{given} is not what --mode delegated needs: \"cilium-cni\" with \"ipam\": {{\"type\": \
                 \"sticky-ipam\"}}"
            )),
            Self::Chained if next["type"] == "cilium-cni" && next.get("chaining-mode").is_some() => Ok(()),
            Self::Chained => Err(format!(
                "{given} is not followed by what --mode chained needs: \"cilium-cni\" with a \
                 \"chaining-mode\""
            )),
        }
    }
}

impl fmt::Display for PluginMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for PluginMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Self::ALL.into_iter().find(|mode| mode.as_str() == text).ok_or_else(|| {
            let words = Self::ALL.map(Self::as_str).join(", ");
            format!("{text:?} is not a mode; write one of {words}")
        })
    }
}

/// The IPAM mode of Cilium itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(any(feature = "agent", feature = "controller"), derive(clap::ValueEnum))]
pub enum CiliumMode {
    /// From the pools of CiliumNodes
    Crd,
    /// From Nodes and their annotations
    Kubernetes,
    /// From its own operator, which hands out the blocks itself
    ClusterPool,
    /// From sticky-ipam as a delegated or chained plugin
    Delegated,
    /// Cilium's settings name a mode that is none of these.
    #[default]
    #[cfg_attr(any(feature = "agent", feature = "controller"), value(skip))]
    Unknown,
}

impl CiliumMode {
    /// The mode that Cilium's ConfigMap names (`ipam`).
    pub fn from_cilium_config(text: &str) -> Self {
        match text {
            "cluster-pool" | "cluster-pool-v2beta" => Self::ClusterPool,
            "kubernetes" => Self::Kubernetes,
            "crd" => Self::Crd,
            "delegated-plugin" => Self::Delegated,
            _ => Self::Unknown,
        }
    }

    /// As Cilium's ConfigMap spells it.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ClusterPool => "cluster-pool",
            Self::Kubernetes => "kubernetes",
            Self::Crd => "crd",
            Self::Delegated => "delegated-plugin",
            Self::Unknown => "unknown",
        }
    }

    /// Is it one of the modes that sticky-ipam knows?
    pub fn is_known(self) -> bool {
        match self {
            Self::Crd | Self::Kubernetes | Self::ClusterPool | Self::Delegated => true,
            Self::Unknown => false,
        }
    }

    /// Where does the controller write the blocks of nodes? Nowhere if Cilium's operator hands them out.
    pub fn blocks_go_to(self) -> Option<BlockLocation> {
        match self {
            Self::Crd | Self::Delegated => Some(BlockLocation::CiliumNode),
            Self::Kubernetes => Some(BlockLocation::Annotations),
            Self::ClusterPool | Self::Unknown => None,
        }
    }

    /// Do pod addresses stand in `CiliumNode.spec.ipam.pool`?
    pub fn publishes_pool_entries(self) -> bool {
        match self {
            Self::Crd => true,
            Self::Kubernetes | Self::ClusterPool | Self::Delegated | Self::Unknown => false,
        }
    }

    /// Does Cilium copy the ranges of the Node, or its annotations, to the CiliumNode?
    pub fn copies_ranges_from_the_node(self) -> bool {
        match self {
            Self::Kubernetes => true,
            Self::Crd | Self::ClusterPool | Self::Delegated | Self::Unknown => false,
        }
    }

    /// Does Cilium invent a range for a Node that has none?
    pub fn invents_a_missing_range(self) -> bool {
        match self {
            Self::Crd => true,
            Self::Kubernetes | Self::ClusterPool | Self::Delegated | Self::Unknown => false,
        }
    }

    /// Does Cilium's BGP speaker announce nothing, although it is asked to announce the ranges of pods?
    pub fn announces_no_ranges(self) -> bool {
        match self {
            Self::Crd | Self::Delegated => true,
            Self::Kubernetes | Self::ClusterPool | Self::Unknown => false,
        }
    }

    /// Can a cluster in this mode be adopted into `crd` mode?
    pub fn can_be_adopted(self) -> bool {
        match self {
            Self::Crd | Self::Kubernetes | Self::ClusterPool => true,
            Self::Delegated | Self::Unknown => false,
        }
    }
}

/// Where the controller writes the blocks of nodes: in `spec.ipam.podCIDRs` of CiliumNodes, or in the
/// annotations of Nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockLocation {
    CiliumNode,
    Annotations,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_of_cilium_are_read_as_cilium_spells_them() {
        for (word, mode) in [
            ("crd", CiliumMode::Crd),
            ("delegated-plugin", CiliumMode::Delegated),
            ("eni", CiliumMode::Unknown),
        ] {
            assert_eq!(CiliumMode::from_cilium_config(word), mode);
        }
        for mode in [CiliumMode::ClusterPool, CiliumMode::Kubernetes, CiliumMode::Crd, CiliumMode::Delegated]
        {
            assert_eq!(CiliumMode::from_cilium_config(mode.as_str()), mode);
        }
    }

    #[test]
    fn a_mode_of_the_plugin_is_read_as_it_is_written_and_others_are_refused() {
        for mode in PluginMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        let error = "overlay".parse::<PluginMode>().unwrap_err();
        assert!(error.contains("overlay") && error.contains("crd, delegated, chained"), "{error}");
    }

    #[test]
    fn a_mode_of_ciliums_fits_the_plugins_mode_or_is_refused_with_the_one_that_fits() {
        for (mode, fitting) in [(PluginMode::Crd, "crd"), (PluginMode::Delegated, "delegated-plugin")] {
            mode.check_cilium(fitting).unwrap();
            for other in ["kubernetes", "cluster-pool", "multi-pool", "eni", "crd", "delegated-plugin"] {
                let checked = mode.check_cilium(other);
                assert_eq!(checked.is_ok(), other == fitting, "{mode} with {other}");
                let said = checked.err().unwrap_or_default();
                assert!(other == fitting || (said.contains(other) && said.contains(fitting)), "{said}");
            }
        }
        PluginMode::Chained.check_cilium("cluster-pool").unwrap();
    }

    #[test]
    fn every_example_conflist_passes_the_check_of_its_own_mode_only() {
        for made_for in PluginMode::ALL {
            let list: Value = serde_json::from_str(made_for.example_conflist()).unwrap();
            let at =
                list["plugins"].as_array().unwrap().iter().position(|entry| {
                    entry["type"] == "sticky-ipam" || entry["ipam"]["type"] == "sticky-ipam"
                });
            let at = at.unwrap();
            for mode in PluginMode::ALL {
                let found = mode.check_entry(&list["plugins"][at], &list["plugins"][at + 1]);
                assert_eq!(found.is_ok(), mode == made_for, "{made_for} as {mode}: {found:?}");
            }
        }
    }
}
