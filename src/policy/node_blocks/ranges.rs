//! The range that a Node itself names (`spec.podCIDRs`). In `crd` mode cilium-agent reads it at its start and
//! invents one where there is none; so a new Node gets it as soon as it is there, before its CiliumNode. It
//! can be written once and never be changed: must never be written before every family that the node gets is
//! known, and never where another program writes it.

use std::collections::BTreeMap;

use ipnet::IpNet;

use super::{BlockAllocator, BlockFacts, BlockReason, BlockStep, NodeFacts, Plan};
use crate::alloc::Family;

impl BlockAllocator<'_> {
    /// Reserves blocks for a node that has no CiliumNode yet, and names the blocks on its Node. Comes after
    /// everything else that is planned for the node.
    pub(super) fn name_range(&mut self, view: &BlockFacts, node: &NodeFacts, plan: &mut Plan) {
        if node.uid.is_none() || !node.bare || view.ranges_come_from_elsewhere {
            return;
        }
        let mut ranges: BTreeMap<Family, IpNet> = BTreeMap::new();
        for block in &node.blocks {
            ranges.entry(Family::of(block.addr())).or_insert(*block);
        }
        let is_of_node = |step: &BlockStep| matches!(step, BlockStep::Assign { node: of, .. } | BlockStep::Reserve { node: of, .. } if *of == node.name);
        if !node.writable {
            self.reserve(node, &mut ranges, plan);
        }
        // The next round sees what this one adds.
        if ranges.is_empty() || plan.steps.iter().any(is_of_node) {
            return;
        }
        let locks = ranges.values().filter_map(|range| self.locks.get(range));
        let locks: Vec<_> = locks.filter(|lock| lock.node == node.name).map(|lock| (*lock).clone()).collect();
        let ranges = ranges.into_values().collect();
        plan.steps.push(BlockStep::NameRange { node: node.name.clone(), ranges, locks });
    }

    /// A lock is all that a node without a CiliumNode can have of a block.
    fn reserve(&mut self, node: &NodeFacts, ranges: &mut BTreeMap<Family, IpNet>, plan: &mut Plan) {
        let serving: Vec<_> = self.pools.iter().copied().filter(|pool| pool.serves(&node.labels)).collect();
        for family in [Family::V4, Family::V6] {
            if !serving.iter().any(|pool| pool.of(family).next().is_some()) {
                continue;
            }
            let held = self.locked_for.get(node.name.as_str()).into_iter().flatten();
            let held = held.map(|lock| lock.block).find(|block| {
                Family::of(block.addr()) == family && self.owned.other_owner(&node.name, *block).is_none()
            });
            if let Some(block) = held {
                ranges.insert(family, block);
            } else if let Some(block) = self.choose(node, family, &serving, BlockReason::First) {
                self.taken.add(block);
                self.owned.add(block, &node.name);
                plan.steps.push(BlockStep::Reserve { block, node: node.name.clone() });
            } else {
                // Not yet: a range that lacks a family could never be completed.
                ranges.clear();
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BlockLimits, GoneNodes, Pool, decide};
    use super::*;
    use crate::policy::node_blocks::BlockLock;
    use crate::policy::selection::facts::TimePoint;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn pool(ranges: &[&str]) -> Pool {
        let ranges = ranges.iter().map(|text| net(text)).collect();
        Pool { name: "p".into(), ranges, ipv4: 24, ipv6: 112, selector: None, priority: 0, excluded: vec![] }
    }

    fn lock(block: &str, node: &str) -> BlockLock {
        BlockLock { block: net(block), node: node.into(), uid: format!("u-{block}"), version: "1".into() }
    }

    /// A Node that has just joined.
    fn bare(name: &str) -> NodeFacts {
        NodeFacts { name: name.into(), uid: Some(name.into()), bare: true, ..NodeFacts::default() }
    }

    fn with_cilium_node(blocks: &[&str]) -> NodeFacts {
        let blocks = blocks.iter().map(|text| net(text)).collect();
        NodeFacts { writable: true, blocks, ..bare("a") }
    }

    fn steps(view: &BlockFacts) -> Vec<String> {
        let plan = decide(view, BlockLimits::default(), &mut GoneNodes::default(), TimePoint(0));
        let text = |step: &BlockStep| match step {
            BlockStep::Reserve { block, node } => format!("reserve {block} {node}"),
            BlockStep::NameRange { node, ranges, locks } => {
                format!("name {node} {} by {} locks", crate::alloc::join(ranges), locks.len())
            }
            BlockStep::Assign { block, node, .. } => format!("assign {block} {node}"),
            BlockStep::Lock { block, .. } => format!("lock {block}"),
            BlockStep::Release { .. } => "release".to_owned(),
        };
        plan.steps.iter().map(text).collect()
    }

    fn view(nodes: Vec<NodeFacts>, locks: Vec<BlockLock>) -> BlockFacts {
        BlockFacts { pools: vec![pool(&["10.1.0.0/16", "fd00::/64"])], nodes, locks, ..BlockFacts::default() }
    }

    #[test]
    fn a_node_without_a_ciliumnode_has_its_blocks_locked_and_then_named() {
        let first = view(vec![bare("a"), bare("b")], vec![]);
        let expected = [
            "reserve 10.1.0.0/24 a",
            "reserve fd00::/112 a",
            "reserve 10.1.1.0/24 b",
            "reserve fd00::1:0/112 b",
        ];
        assert_eq!(steps(&first), expected);
        // One lock is there, the other is not yet: both families are written at once or never.
        let half = view(vec![bare("a")], vec![lock("10.1.0.0/24", "a")]);
        assert_eq!(steps(&half), ["reserve fd00::/112 a"]);
        let both = view(vec![bare("a")], vec![lock("10.1.0.0/24", "a"), lock("fd00::/112", "a")]);
        assert_eq!(steps(&both), ["name a 10.1.0.0/24, fd00::/112 by 2 locks"]);
        let named = NodeFacts { bare: false, other_ranges: vec![net("10.1.0.0/24")], ..bare("a") };
        let done = view(vec![named], vec![lock("10.1.0.0/24", "a"), lock("fd00::/112", "a")]);
        assert_eq!(steps(&done), [""; 0]);
    }

    #[test]
    fn the_blocks_of_a_ciliumnode_are_named_once_none_is_on_its_way() {
        let mut pools = view(vec![with_cilium_node(&["10.1.7.0/24"])], vec![lock("10.1.7.0/24", "a")]);
        assert_eq!(steps(&pools), ["assign fd00::/112 a"]);
        pools.pools = vec![pool(&["10.1.0.0/16"])];
        assert_eq!(steps(&pools), ["name a 10.1.7.0/24 by 1 locks"]);
        // An adopted node: its blocks are of no pool, and have no lock.
        pools.nodes = vec![with_cilium_node(&["10.200.1.0/24", "10.1.7.0/24"])];
        pools.pools.clear();
        assert_eq!(steps(&pools), ["name a 10.200.1.0/24 by 0 locks"]);
    }

    #[test]
    fn no_range_is_named_where_another_program_writes_them_or_a_family_has_no_room() {
        let mut elsewhere = view(vec![bare("a")], vec![]);
        elsewhere.ranges_come_from_elsewhere = true;
        assert_eq!(steps(&elsewhere), [""; 0]);
        let mut full = view(vec![bare("a")], vec![lock("10.1.0.0/24", "a")]);
        full.pools = vec![pool(&["10.1.0.0/16", "fd00::/112"])];
        full.closed = vec![net("fd00::/112")];
        assert_eq!(steps(&full), [""; 0]);
        let gone = NodeFacts { uid: None, ..bare("a") };
        assert_eq!(steps(&view(vec![gone], vec![])), [""; 0]);
    }
}
