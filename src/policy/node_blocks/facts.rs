//! What the decision on blocks depends on: pools, nodes, locks and claimed addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use crate::alloc::Family;
use crate::alloc::block::{TakenRanges, count_blocks, count_taken, count_taken_besides};
use crate::policy::selection::selector::Selector;

/// Ranges from which nodes get blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    pub name: String,
    /// Its ranges, in the order in which they are used up.
    pub ranges: Vec<IpNet>,
    pub ipv4: u8,
    /// The prefix length of an IPv6 block.
    pub ipv6: u8,
    /// The nodes that it serves; all nodes if it is not set.
    pub selector: Option<Selector>,
    /// The highest is used first, then by name.
    pub priority: i32,
    pub excluded: Vec<IpNet>,
}

impl Pool {
    pub(super) fn size(&self, family: Family) -> u8 {
        match family {
            Family::V4 => self.ipv4,
            Family::V6 => self.ipv6,
        }
    }

    pub(super) fn of(&self, family: Family) -> impl Iterator<Item = IpNet> {
        self.ranges.iter().copied().filter(move |range| Family::of(range.addr()) == family)
    }

    pub(super) fn serves(&self, labels: &BTreeMap<String, String>) -> bool {
        self.selector.as_ref().is_none_or(|selector| selector.matches(labels))
    }

    pub(super) fn contains(&self, block: IpNet) -> bool {
        self.ranges.iter().any(|range| range.contains(&block))
    }

    /// How many blocks are allocated, of how many. Excluded ranges count neither as allocated nor in the
    /// total.
    pub fn fill(&self, given: &TakenRanges) -> Fill {
        let size = |range: &IpNet| self.size(Family::of(range.addr()));
        Fill::of(&self.ranges, size, given, &self.excluded.iter().copied().collect())
    }
}

/// How full a pool is, in blocks or addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fill {
    pub allocated: u128,
    pub total: u128,
}

impl Fill {
    /// Counts the pieces of these ranges, of this prefix length each. Excluded ones count neither as
    /// allocated nor in the total.
    pub(crate) fn of(
        ranges: &[IpNet],
        size: impl Fn(&IpNet) -> u8,
        taken: &TakenRanges,
        excluded: &TakenRanges,
    ) -> Self {
        let mut fill = Self::default();
        for range in ranges {
            let size = size(range);
            let pieces = count_blocks(*range, size) - count_taken(*range, size, excluded);
            fill.total = fill.total.saturating_add(pieces);
            fill.allocated =
                fill.allocated.saturating_add(count_taken_besides(*range, size, taken, excluded));
        }
        fill
    }
}

/// What is known of one node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFacts {
    pub name: String,
    /// The uid of its Node; a node without a Node object gets no block.
    pub uid: Option<String>,
    pub labels: BTreeMap<String, String>,
    /// The object to which blocks are written exists.
    pub writable: bool,
    pub blocks: Vec<IpNet>,
    /// Ranges of the node from other sources: the Node's own ranges, annotations.
    pub other_ranges: Vec<IpNet>,
    /// How many addresses of its blocks are in use, by family.
    pub used: BTreeMap<Family, u128>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLock {
    pub block: IpNet,
    pub node: String,
    pub uid: String,
    pub version: String,
}

/// A lock whose object cannot be read: its node is unknown, but no other lock of this name can be created. So
/// its block counts as taken.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnreadableLock {
    /// The block, by the object's name.
    pub block: IpNet,
    pub object: String,
    pub uid: String,
    pub why: String,
}

/// Everything that a decision depends on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct BlockFacts {
    /// The pools that may be used: valid ones that do not overlap.
    pub pools: Vec<Pool>,
    /// Every node that has a Node or a CiliumNode.
    pub nodes: Vec<NodeFacts>,
    /// Every lock of the API server. It must be complete: a lock that is missing here counts as not existing.
    pub locks: Vec<BlockLock>,
    pub broken: Vec<UnreadableLock>,
    pub kept: BTreeSet<IpAddr>,
    /// Ranges from which no block is assigned: those of Sticky pools, and the addresses of the nodes.
    pub closed: Vec<IpNet>,
}
