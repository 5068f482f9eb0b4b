//! Decides which node gets which block of which pool, when it gets another one, and when a block is released.
//!
//! A block is assigned under a lock in the API server: [`BlockLock`]. The lock is taken (created, or written
//! again with its version) after the node's object was read, and the node is written only if it has not
//! changed since. So a block that another replica releases, because the node was gone, is never written to a
//! node that came back in the meantime. Must never assign a block of which any source says that one address
//! is taken, and never release one while an address of it is claimed.

mod facts;
mod step;

use std::collections::{BTreeMap, BTreeSet};

use ipnet::IpNet;

use crate::alloc::Family;
use crate::alloc::block::{TakenRanges, next_block, overlap};
use crate::alloc::block_map::BlockMap;
use crate::policy::selection::facts::TimePoint;

pub use facts::Pool;
pub(crate) use facts::{BlockFacts, BlockLock, Fill, NodeFacts, UnreadableLock};
pub(crate) use step::{BlockProblem, BlockReason, BlockStep};

/// The limits that the operator sets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockLimits {
    /// A node with fewer free addresses gets another block. Zero: never.
    pub low: u128,
    /// The maximum number of blocks per family and node.
    pub most: usize,
    /// How many seconds a node must be gone before its blocks are released.
    pub quarantine: u64,
}

impl Default for BlockLimits {
    fn default() -> Self {
        Self { low: 16, most: 8, quarantine: 600 }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// In this order.
    pub steps: Vec<BlockStep>,
    pub(crate) problems: Vec<BlockProblem>,
    /// How full each pool was before the steps, by name.
    pub fill: BTreeMap<String, Fill>,
    /// In how many seconds to decide again, even if nothing changes.
    pub again: Option<u64>,
}

/// Since when nodes are gone, by the uid of the lock. If a restart loses it, blocks are released later.
#[derive(Debug, Clone, Default)]
pub struct GoneNodes {
    gone: BTreeMap<String, TimePoint>,
}

/// Decides for all nodes at once.
pub fn decide(view: &BlockFacts, limits: BlockLimits, memory: &mut GoneNodes, now: TimePoint) -> Plan {
    let mut allocator = BlockAllocator::new(view);
    let mut plan = Plan { fill: allocator.fill(), ..Plan::default() };
    for node in &view.nodes {
        allocator.lock_existing(node, &mut plan);
        allocator.assign(node, limits, &mut plan);
    }
    release(view, limits, memory, now, &mut plan);
    plan.problems.extend(view.broken.iter().cloned().map(BlockProblem::Broken));
    plan
}

struct BlockAllocator<'a> {
    pools: Vec<&'a Pool>,
    /// The blocks of the nodes, for the count.
    given: TakenRanges,
    /// These, and everything else that must not be assigned.
    taken: TakenRanges,
    owned: BlockMap,
    locks: BTreeMap<IpNet, &'a BlockLock>,
    /// The blocks whose locks cannot be read: creating or taking one would fail every time.
    broken: TakenRanges,
    locked_for: BTreeMap<&'a str, Vec<&'a BlockLock>>,
}

impl<'a> BlockAllocator<'a> {
    fn new(view: &'a BlockFacts) -> Self {
        let mut pools: Vec<&Pool> = view.pools.iter().collect();
        pools.sort_by(|a, b| b.priority.cmp(&a.priority).then_with(|| a.name.cmp(&b.name)));
        let on_nodes = || {
            let ranges = |node: &'a NodeFacts| node.blocks.iter().chain(&node.other_ranges);
            view.nodes.iter().flat_map(move |node| ranges(node).map(|range| (*range, node.name.as_str())))
        };
        let locked = view.locks.iter().map(|lock| lock.block);
        let kept = view.kept.iter().map(|address| IpNet::from(*address));
        let mut locked_for: BTreeMap<&str, Vec<&BlockLock>> = BTreeMap::new();
        for lock in &view.locks {
            locked_for.entry(&lock.node).or_default().push(lock);
        }
        let broken: Vec<IpNet> = view.broken.iter().map(|broken| broken.block).collect();
        let ranges = on_nodes().map(|(range, _)| range);
        let given: Vec<IpNet> = ranges.chain(locked).chain(broken.iter().copied()).collect();
        Self {
            given: given.iter().copied().collect(),
            taken: given.into_iter().chain(kept).chain(view.closed.iter().copied()).collect(),
            locks: view.locks.iter().map(|lock| (lock.block, lock)).collect(),
            broken: broken.into_iter().collect(),
            pools,
            owned: on_nodes().collect(),
            locked_for,
        }
    }

    fn fill(&self) -> BTreeMap<String, Fill> {
        self.pools.iter().map(|pool| (pool.name.clone(), pool.fill(&self.given))).collect()
    }

    fn pool_of(&self, block: IpNet) -> Option<&'a Pool> {
        self.pools.iter().copied().find(|pool| pool.contains(block))
    }

    /// Whether nothing but this node has something of the block, and no lock is on it.
    fn is_free_for(&self, node: &NodeFacts, block: IpNet) -> bool {
        self.owned.other_owner(&node.name, block).is_none()
            && !self.broken.overlaps(block)
            && !self.locks.values().any(|lock| overlap(lock.block, block))
    }

    /// Blocks that were assigned before there were locks get one, so that they are released one day.
    fn lock_existing(&self, node: &NodeFacts, plan: &mut Plan) {
        if node.uid.is_none() {
            return;
        }
        for block in &node.blocks {
            match self.locks.get(block) {
                Some(lock) if lock.node == node.name => {}
                Some(lock) => plan.problems.push(BlockProblem::Contested {
                    block: *block,
                    node: lock.node.clone(),
                    other: node.name.clone(),
                }),
                None if self.pool_of(*block).is_some() && self.is_free_for(node, *block) => {
                    plan.steps.push(BlockStep::Lock { block: *block, node: node.name.clone() });
                }
                None => {}
            }
        }
    }

    fn assign(&mut self, node: &NodeFacts, limits: BlockLimits, plan: &mut Plan) {
        if node.uid.is_none() || !node.writable {
            return;
        }
        let serving: Vec<&Pool> =
            self.pools.iter().copied().filter(|pool| pool.serves(&node.labels)).collect();
        if serving.is_empty() && node.blocks.is_empty() && !self.pools.is_empty() {
            plan.problems.push(BlockProblem::NoPool { node: node.name.clone() });
        }
        for family in [Family::V4, Family::V6] {
            let of_family = |range: &&IpNet| Family::of(range.addr()) == family;
            let mut has: Vec<IpNet> = node.blocks.iter().filter(of_family).copied().collect();
            let kept = self.locked_for.get(node.name.as_str()).into_iter().flatten();
            let mut assigned = Vec::new();
            for lock in kept.filter(|lock| of_family(&&lock.block)) {
                if has.iter().any(|block| overlap(*block, lock.block)) || self.broken.overlaps(lock.block) {
                    continue;
                }
                match self.owned.other_owner(&node.name, lock.block) {
                    Some((other, _)) => plan.problems.push(BlockProblem::Contested {
                        block: lock.block,
                        node: node.name.clone(),
                        other: other.to_owned(),
                    }),
                    None => assigned.push((lock.block, Some((*lock).clone()), BlockReason::Locked)),
                }
            }
            has.extend(assigned.iter().map(|(block, ..)| *block));
            let why = match has.is_empty() {
                true => Some(BlockReason::First),
                false => runs_low(node, family, &has, limits).then_some(BlockReason::Low),
            };
            if let Some(why) = why
                && serving.iter().any(|pool| pool.of(family).next().is_some())
            {
                match self.choose(node, family, &serving, why) {
                    Some(block) => assigned.push((block, None, why)),
                    None => plan.problems.push(BlockProblem::NoRoom {
                        node: node.name.clone(),
                        family,
                        pools: serving.iter().map(|pool| pool.name.clone()).collect(),
                    }),
                }
            }
            for (block, lock, why) in assigned {
                self.taken.add(block);
                self.owned.add(block, &node.name);
                plan.steps.push(BlockStep::Assign {
                    block,
                    node: node.name.clone(),
                    lock,
                    pool: self.pool_of(block).map(|pool| pool.name.clone()),
                    why,
                });
            }
        }
    }

    /// The block that the Node already has, so that the two never disagree; else the first free block of the
    /// first pool that has one.
    fn choose(&self, node: &NodeFacts, family: Family, serving: &[&Pool], why: BlockReason) -> Option<IpNet> {
        let listed = node.other_ranges.iter().copied().find(|range| {
            why == BlockReason::First
                && Family::of(range.addr()) == family
                && range.prefix_len() < range.max_prefix_len()
                && serving.iter().any(|pool| pool.contains(*range))
                && self.is_free_for(node, *range)
        });
        let next = || {
            serving.iter().find_map(|pool| {
                let excluded: TakenRanges = pool.excluded.iter().copied().collect();
                let taken = [&self.taken, &excluded];
                pool.of(family).find_map(|range| next_block(range, pool.size(family), &taken))
            })
        };
        listed.or_else(next)
    }
}

fn release(view: &BlockFacts, limits: BlockLimits, memory: &mut GoneNodes, now: TimePoint, plan: &mut Plan) {
    let there: BTreeSet<&str> = view.nodes.iter().map(|node| node.name.as_str()).collect();
    let mut gone = BTreeMap::new();
    for lock in view.locks.iter().filter(|lock| !there.contains(lock.node.as_str())) {
        let since = memory.gone.get(&lock.uid).copied().unwrap_or(now);
        gone.insert(lock.uid.clone(), since);
        let kept = view.kept.range(lock.block.network()..=lock.block.broadcast()).next();
        let waited = now.seconds_since(since);
        if kept.is_some() {
            // A watch reports when the last claim is deleted.
        } else if waited >= limits.quarantine {
            plan.steps.push(BlockStep::Release { lock: lock.clone() });
        } else {
            let left = limits.quarantine - waited;
            plan.again = Some(plan.again.map_or(left, |again| again.min(left)));
        }
    }
    memory.gone = gone;
}

fn runs_low(node: &NodeFacts, family: Family, has: &[IpNet], limits: BlockLimits) -> bool {
    let room = has.iter().fold(0, |sum: u128, block| sum.saturating_add(usable(*block)));
    let used = node.used.get(&family).copied().unwrap_or(0);
    room.saturating_sub(used) < limits.low && has.len() < limits.most
}

/// How many addresses of a block pods may have: not the first, not the last, and not the router's.
fn usable(block: IpNet) -> u128 {
    let bits = u32::from(block.max_prefix_len() - block.prefix_len());
    1u128.checked_shl(bits).unwrap_or(u128::MAX).saturating_sub(3)
}

#[cfg(test)]
mod tests;
