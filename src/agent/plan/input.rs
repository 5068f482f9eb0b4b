//! What a plan is made from. Must never read anything itself.

use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::agent::{index::NodeIndex, snapshot::Snapshot};
use crate::alloc::RangeSet;
use crate::cluster::cilium::pool::PublishConfig;
use crate::policy::pool_size::PoolLimits;
use crate::policy::selection::rules::Rules;

/// What the operator has set, as far as decisions need it.
#[derive(Debug, Clone)]
pub struct PlanOptions {
    pub node: String,
    /// What its CiliumNode shows.
    pub shape: PublishConfig,
    /// The ranges of the node's own configuration.
    pub ranges: Vec<RangeSet>,
    /// How many entries the pool has, per IP family.
    pub pool_limits: PoolLimits,
    /// Who is sticky.
    pub rules: Rules,
}

/// Everything that a plan is made from.
#[derive(Debug, Clone, Copy)]
pub struct PlanInput<'a> {
    pub options: &'a PlanOptions,
    pub index: &'a NodeIndex,
    pub store: &'a Snapshot,
    /// The time, of a clock that only goes forward.
    pub now: Duration,
}

/// Whether a range holds the address.
pub fn contains(ranges: &[IpNet], address: IpAddr) -> bool {
    ranges.iter().any(|range| range.contains(&address))
}
