//! IPPool: ranges from which nodes get blocks or sticky pods get addresses. Must never overlap another pool:
//! one object cannot see another in its validation, so [`overlaps`] is asked before a pool is used.

use std::net::IpAddr;

use ipnet::IpNet;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cluster::objects::{condition::Condition, lenient::Validate};
use crate::policy::selection::selector::LabelSelector;

/// Ranges and what they are for.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "sticky-ipam.io",
    version = "v1alpha1",
    kind = "IPPool",
    plural = "ippools",
    singular = "ippool",
    shortname = "sipool",
    status = "IPPoolStatus",
    derive = "PartialEq",
    doc = "Ranges of addresses: blocks for nodes, or addresses that only sticky pods get.",
    printcolumn(name = "Use", type_ = "string", json_path = ".spec.use"),
    printcolumn(name = "CIDRs", type_ = "string", json_path = ".spec.cidrs"),
    printcolumn(name = "Priority", type_ = "integer", json_path = ".spec.priority"),
    printcolumn(name = "Allocated", type_ = "integer", json_path = ".status.allocated"),
    printcolumn(name = "Total", type_ = "integer", json_path = ".status.total"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new(
        "self.use != 'NodeBlocks' || !has(self.blockSize) || !has(self.blockSize.ipv4) || self.cidrs.all(c, \
         !isCIDR(c) || cidr(c).ip().family() == 6 || cidr(c).prefixLength() <= self.blockSize.ipv4)"
    ).message("blockSize.ipv4 must not be larger than a block: its prefix length is at least that of every \
        IPv4 range"),
    validation = Rule::new(
        "self.use != 'NodeBlocks' || !has(self.blockSize) || !has(self.blockSize.ipv6) || self.cidrs.all(c, \
         !isCIDR(c) || cidr(c).ip().family() == 4 || cidr(c).prefixLength() <= self.blockSize.ipv6)"
    ).message("blockSize.ipv6 must not be larger than a block: its prefix length is at least that of every \
        IPv6 range"),
    validation = Rule::new(
        "!has(self.excluded) || self.excluded.all(e, !isIP(e) && !isCIDR(e) || self.cidrs.exists(c, \
         isCIDR(c) && (isIP(e) ? cidr(c).containsIP(e) : cidr(c).containsCIDR(e))))"
    ).message("every excluded range must lie inside one of the pool's ranges")
)]
#[serde(rename_all = "camelCase")]
pub struct IPPoolSpec {
    /// The ranges, in canonical form, none inside another.
    #[schemars(with = "Vec<String>", length(min = 1, max = 16), inner(length(max = 43)))]
    #[x_kube(
        merge_strategy = ListMerge::Atomic,
        validation = Rule::new("self.all(c, isCIDR(c) && cidr(c) == cidr(c).masked() && string(cidr(c)) == \
            c)")
            .message("every range must be a CIDR in canonical form without host bits, such as 10.8.0.0/16"),
        validation = Rule::new("!self.all(c, isCIDR(c)) || self.all(a, self.filter(b, \
            cidr(a).containsCIDR(b)).size() == 1)")
            .message("the pool's ranges must not overlap")
    )]
    pub cidrs: Vec<IpNet>,
    /// What the ranges are for.
    #[serde(rename = "use")]
    #[x_kube(validation = Rule::new("self == oldSelf").message("what a pool is for cannot change: make \
        another pool"))]
    pub purpose: PoolUse,
    /// The size of a node's block, by family.
    #[serde(default)]
    pub(crate) block_size: BlockSize,
    /// The nodes that it serves; all, if there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) node_selector: Option<LabelSelector>,
    /// Of the pools that serve a node, the one with the highest priority is used first; then by name.
    #[serde(default)]
    #[schemars(range(min = -1000, max = 1000))]
    pub priority: i32,
    /// Addresses or CIDRs that are never allocated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = 43)))]
    #[x_kube(
        merge_strategy = ListMerge::Atomic,
        validation = Rule::new(
            "self.all(e, isIP(e) ? ip.isCanonical(e) : isCIDR(e) && cidr(e) == cidr(e).masked() && \
             string(cidr(e)) == e)"
        ).message("every excluded range must be an address or a CIDR, in canonical form")
    )]
    pub excluded: Vec<String>,
}

/// What a pool is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum PoolUse {
    /// Blocks for nodes.
    NodeBlocks,
    /// Addresses that only sticky pods and pins get.
    Sticky,
}

/// The prefix length of a node's block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub(crate) struct BlockSize {
    /// For IPv4: from a /16, more than any node runs, to a /30, two pods.
    #[schemars(range(min = 16, max = 30))]
    pub ipv4: u8,
    /// For IPv6.
    #[schemars(range(min = 64, max = 124))]
    pub ipv6: u8,
}

impl Default for BlockSize {
    fn default() -> Self {
        Self { ipv4: 24, ipv6: 112 }
    }
}

/// How full a pool is.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct IPPoolStatus {
    /// Blocks, or addresses of a Sticky pool, that are allocated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub allocated: Option<i64>,
    /// Blocks, or addresses, in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub total: Option<i64>,
    /// Conditions that an operator should know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub conditions: Vec<Condition>,
}

/// The one condition of a pool.
pub(crate) const READY: &str = "Ready";
/// Why it is not Ready: it shares addresses with an older pool.
pub(crate) const OVERLAPS: &str = "Overlaps";
/// Why it is not Ready: a Sticky pool that shares addresses with a node's block.
pub(crate) const OVERLAPS_BLOCK: &str = "OverlapsBlock";

impl IPPool {
    /// Whether the controller has found that its addresses are, in part, another's.
    pub fn is_refused(&self) -> bool {
        self.status.iter().flat_map(|status| &status.conditions).any(|condition| {
            condition.kind == READY
                && condition.status == "False"
                && [OVERLAPS, OVERLAPS_BLOCK].contains(&condition.reason.as_str())
        })
    }

    /// Whether an address is never allocated, though it is of a range.
    pub fn excludes(&self, address: IpAddr) -> bool {
        self.excluded().any(|range| range.contains(&address))
    }

    /// Whether all that two ranges share is never allocated. Two ranges share nothing, or one lies in the
    /// other.
    pub fn excludes_shared(&self, a: IpNet, b: IpNet) -> bool {
        let shared = if a.prefix_len() > b.prefix_len() { a } else { b };
        self.excluded().any(|range| range.contains(&shared))
    }

    /// What is never allocated; what cannot be read is left out.
    pub(crate) fn excluded(&self) -> impl Iterator<Item = IpNet> + '_ {
        let read = |text: &String| text.parse().ok().or_else(|| Some(text.parse::<IpAddr>().ok()?.into()));
        self.spec.excluded.iter().filter_map(read)
    }
}

/// Two pools that share addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overlap {
    /// The pool that is used: the older one, by name among the equally old.
    pub stands: String,
    /// The pool that must not be used.
    pub refused: String,
    /// The ranges that overlap, in the same order.
    pub ranges: (IpNet, IpNet),
}

/// Finds every pool that overlaps an older one.
pub fn overlaps(pools: &[IPPool]) -> Vec<Overlap> {
    let mut by_age: Vec<&IPPool> = pools.iter().collect();
    by_age.sort_by_key(|pool| {
        (pool.metadata.creation_timestamp.as_ref().map(|time| time.0), pool.metadata.name.clone())
    });
    let name = |pool: &IPPool| pool.metadata.name.clone().unwrap_or_default();
    let clash = |(index, younger): (usize, &&IPPool)| {
        by_age[..index].iter().find_map(|older| {
            let ranges = older.spec.cidrs.iter().find_map(|a| {
                let b = younger.spec.cidrs.iter().find(|b| a.contains(*b) || b.contains(a))?;
                Some((*a, *b))
            })?;
            Some(Overlap { stands: name(older), refused: name(younger), ranges })
        })
    };
    by_age.iter().enumerate().filter_map(clash).collect()
}

impl Validate for IPPool {
    fn validation_error(&self) -> Option<String> {
        let cidrs = &self.spec.cidrs;
        if let Some(ragged) = cidrs.iter().find(|cidr| **cidr != cidr.trunc()) {
            return Some(format!("range {ragged} has host bits; write {}", ragged.trunc()));
        }
        let overlap = cidrs.iter().enumerate().find_map(|(index, a)| {
            cidrs[index + 1..].iter().find(|b| a.contains(*b) || b.contains(a)).map(|b| (a, b))
        });
        overlap.map(|(a, b)| format!("its ranges {a} and {b} overlap"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;

    fn pool(name: &str, born: i64, cidrs: &[&str]) -> IPPool {
        let spec = serde_json::json!({"cidrs": cidrs, "use": "Sticky"});
        let mut pool = IPPool::new(name, serde_json::from_value(spec).unwrap());
        pool.metadata.creation_timestamp = Some(Time(Timestamp::from_second(born).unwrap()));
        pool
    }

    #[test]
    fn the_younger_of_two_overlapping_pools_is_refused() {
        let pools = [
            pool("new", 9, &["10.0.0.0/8"]),
            pool("old", 1, &["fd00::/64", "10.8.0.0/16"]),
            pool("apart", 5, &["11.0.0.0/8"]),
        ];
        let found = overlaps(&pools);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].stands.as_str(), found[0].refused.as_str()), ("old", "new"));
    }

    #[test]
    fn a_pool_that_overlaps_itself_is_unsound() {
        assert!(
            pool("p", 0, &["10.0.0.0/8", "10.1.0.0/16"]).validation_error().unwrap().contains("10.1.0.0/16")
        );
        assert!(pool("p", 0, &["10.0.0.1/8"]).validation_error().unwrap().contains("host bits"));
        assert_eq!(pool("p", 0, &["10.0.0.0/16", "10.1.0.0/16"]).validation_error(), None);
    }

    #[test]
    fn blocks_have_a_size_when_none_is_written() {
        assert_eq!(pool("p", 0, &["10.0.0.0/16"]).spec.block_size, BlockSize { ipv4: 24, ipv6: 112 });
    }
}
