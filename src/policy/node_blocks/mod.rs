//! Decides which node gets which block of which pool, when it gets another one, and when a block is released.
//!
//! A block is assigned under a lock in the API server: [`BlockLock`]. The lock is taken (created, or written
//! again with its version) after the node's object was read, and the node is written only if it has not
//! changed since. So a block that another replica releases, because the node was gone, is never written to a
//! node that came back in the meantime. Must never assign a block of which any source says that one address
//! is taken, and never release one while an address of it is claimed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::alloc::Family;
use crate::alloc::block::{TakenRanges, count_blocks, count_taken, count_taken_besides, next_block};
use crate::alloc::block_map::BlockMap;
use crate::policy::selection::facts::TimePoint;
use crate::policy::selection::selector::Selector;

/// Ranges from which nodes get blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// Its name.
    pub name: String,
    /// Its ranges, in the order in which they are used up.
    pub ranges: Vec<IpNet>,
    /// The prefix length of an IPv4 block.
    pub ipv4: u8,
    /// The prefix length of an IPv6 block.
    pub ipv6: u8,
    /// The nodes that it serves; all nodes if it is not set.
    pub selector: Option<Selector>,
    /// The highest is used first, then by name.
    pub priority: i32,
    /// Never assigned.
    pub excluded: Vec<IpNet>,
}

impl Pool {
    fn size(&self, family: Family) -> u8 {
        match family {
            Family::V4 => self.ipv4,
            Family::V6 => self.ipv6,
        }
    }

    fn of(&self, family: Family) -> impl Iterator<Item = IpNet> {
        self.ranges.iter().copied().filter(move |range| Family::of(range.addr()) == family)
    }

    fn serves(&self, labels: &BTreeMap<String, String>) -> bool {
        self.selector.as_ref().is_none_or(|selector| selector.matches(labels))
    }

    fn contains(&self, block: IpNet) -> bool {
        self.ranges.iter().any(|range| range.contains(&block))
    }

    /// How many blocks are allocated, of how many. Excluded ranges count neither as allocated nor in the
    /// total.
    #[must_use]
    pub fn fill(&self, given: &TakenRanges) -> Fill {
        let excluded: TakenRanges = self.excluded.iter().copied().collect();
        let mut fill = Fill::default();
        for range in &self.ranges {
            let size = self.size(Family::of(range.addr()));
            let there = count_blocks(*range, size) - count_taken(*range, size, &excluded);
            fill.total = fill.total.saturating_add(there);
            fill.allocated =
                fill.allocated.saturating_add(count_taken_besides(*range, size, given, &excluded));
        }
        fill
    }
}

/// How full a pool is, in blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Fill {
    /// Allocated.
    pub allocated: u128,
    /// In all.
    pub total: u128,
}

/// What is known of one node.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NodeFacts {
    /// Its name.
    pub name: String,
    /// The uid of its Node; a node without a Node object gets no block.
    pub uid: Option<String>,
    /// The labels of its Node.
    pub labels: BTreeMap<String, String>,
    /// The object to which blocks are written exists.
    pub writable: bool,
    /// The blocks in that object.
    pub blocks: Vec<IpNet>,
    /// Ranges of the node from other sources: the Node's own ranges, annotations.
    pub said: Vec<IpNet>,
    /// How many addresses of its blocks are in use, by family.
    pub used: BTreeMap<Family, u128>,
}

/// The lock on a block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockLock {
    /// The block.
    pub block: IpNet,
    /// The node of the lock.
    pub node: String,
    /// The uid of the lock's object.
    pub uid: String,
    /// Its resourceVersion.
    pub version: String,
}

/// A lock whose object cannot be read: its node is unknown, but no other lock of this name can be created. So
/// its block counts as taken.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct UnreadableLock {
    /// The block, by the object's name.
    pub block: IpNet,
    /// The object's kind and name.
    pub object: String,
    /// The object's uid.
    pub uid: String,
    /// What is wrong with it.
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
    /// The locks that cannot be read.
    pub broken: Vec<UnreadableLock>,
    /// Addresses that are claimed.
    pub kept: BTreeSet<IpAddr>,
    /// Ranges from which no block is assigned: those of Sticky pools, and the addresses of the nodes.
    pub closed: Vec<IpNet>,
}

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

/// Why a block is assigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BlockReason {
    /// The node has none of this family.
    First,
    /// It has few addresses left.
    Low,
    /// It is already locked for this node: a writer stopped between two writes, or the node came back.
    Locked,
}

impl fmt::Display for BlockReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::First => "the node had none of this family",
            Self::Low => "few addresses were left in its blocks",
            Self::Locked => "it was locked for this node",
        })
    }
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockStep {
    /// Create the lock of a block that the node already has.
    BlockLock {
        /// The block.
        block: IpNet,
        /// The node.
        node: String,
    },
    /// Read the node's object, take the lock, then write the block on the object if it has not changed since.
    Give {
        /// The block.
        block: IpNet,
        /// The node.
        node: String,
        /// The lock to take again, if there is one.
        lock: Option<BlockLock>,
        /// Its pool, if it is still in one.
        pool: Option<String>,
        /// Why.
        why: BlockReason,
    },
    /// Remove the lock, after another live read that the node is gone and no address of the block is claimed.
    Return {
        /// The lock.
        lock: BlockLock,
    },
}

/// Problems to report.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockProblem {
    /// Every pool that serves the node is full.
    NoRoom {
        /// The node.
        node: String,
        /// The family.
        family: Family,
        /// The pools, in the order in which they were tried.
        pools: Vec<String>,
    },
    /// No pool serves the node.
    NoPool {
        /// The node.
        node: String,
    },
    /// Another node has a block that is locked for this one.
    Contested {
        /// The block.
        block: IpNet,
        /// The node of the lock.
        node: String,
        /// The other node.
        other: String,
    },
    /// A lock cannot be read.
    Broken(UnreadableLock),
}

impl BlockProblem {
    /// The reason of the event and the value of the metric's label.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NoRoom { .. } => "PoolsFull",
            Self::NoPool { .. } => "NoPoolForNode",
            Self::Contested { .. } => "BlockContested",
            Self::Broken(_) => "Unreadable",
        }
    }
}

impl fmt::Display for BlockProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoRoom { node, family, pools } => write!(
                f,
                "no {family} block is left for node {node} in {}; add a range to one of them, or another IPPool",
                pools.join(", ")
            ),
            Self::NoPool { node } => write!(
                f,
                "no IPPool with use NodeBlocks serves node {node}; label the node, or widen a pool's nodeSelector"
            ),
            Self::Contested { block, node, other } => write!(
                f,
                "block {block} is locked for node {node}, but node {other} has addresses of it; correct \
                 one of them, or delete the Lease of the block"
            ),
            Self::Broken(UnreadableLock { block, object, why, .. }) => write!(
                f,
                "{object} cannot be read: {why}; block {block} is neither assigned nor released until the Lease is corrected \
                 or deleted (a node that has the block gets a new Lease)"
            ),
        }
    }
}

/// What was decided.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// What to do, in this order.
    pub steps: Vec<BlockStep>,
    /// Problems to report.
    pub problems: Vec<BlockProblem>,
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
#[must_use]
pub fn decide(view: &BlockFacts, limits: BlockLimits, memory: &mut GoneNodes, now: TimePoint) -> Plan {
    let mut giver = BlockAllocator::new(view);
    let mut plan = Plan { fill: giver.fill(), ..Plan::default() };
    for node in &view.nodes {
        giver.lock_what_stands(node, &mut plan);
        giver.give(node, limits, &mut plan);
    }
    returns(view, limits, memory, now, &mut plan);
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
        let mut owned = BlockMap::default();
        for node in &view.nodes {
            for range in node.blocks.iter().chain(&node.said) {
                owned.add(*range, &node.name);
            }
        }
        let stands = view.nodes.iter().flat_map(|node| node.blocks.iter().chain(&node.said)).copied();
        let locked = view.locks.iter().map(|lock| lock.block);
        let kept = view.kept.iter().map(|address| IpNet::from(*address));
        let mut locked_for: BTreeMap<&str, Vec<&BlockLock>> = BTreeMap::new();
        for lock in &view.locks {
            locked_for.entry(&lock.node).or_default().push(lock);
        }
        let broken: Vec<IpNet> = view.broken.iter().map(|broken| broken.block).collect();
        let given: Vec<IpNet> = stands.chain(locked).chain(broken.iter().copied()).collect();
        Self {
            given: given.iter().copied().collect(),
            taken: given.into_iter().chain(kept).chain(view.closed.iter().copied()).collect(),
            locks: view.locks.iter().map(|lock| (lock.block, lock)).collect(),
            broken: broken.into_iter().collect(),
            pools,
            owned,
            locked_for,
        }
    }

    fn fill(&self) -> BTreeMap<String, Fill> {
        self.pools.iter().map(|pool| (pool.name.clone(), pool.fill(&self.given))).collect()
    }

    fn pool_of(&self, block: IpNet) -> Option<&'a Pool> {
        self.pools.iter().copied().find(|pool| pool.contains(block))
    }

    /// Blocks that were assigned before there were locks get one, so that they are released one day.
    fn lock_what_stands(&self, node: &NodeFacts, plan: &mut Plan) {
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
                None if self.pool_of(*block).is_some()
                    && self.owned.other_owner(&node.name, *block).is_none()
                    && !self.broken.overlaps(*block)
                    && !self.locks.values().any(|lock| clash(lock.block, *block)) =>
                {
                    plan.steps.push(BlockStep::BlockLock { block: *block, node: node.name.clone() });
                }
                None => {}
            }
        }
    }

    fn give(&mut self, node: &NodeFacts, limits: BlockLimits, plan: &mut Plan) {
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
            let kept: Vec<&BlockLock> = self.locked_for.get(node.name.as_str()).cloned().unwrap_or_default();
            let mut gives = Vec::new();
            for lock in kept.into_iter().filter(|lock| of_family(&&lock.block)) {
                if has.iter().any(|block| clash(*block, lock.block)) || self.broken.overlaps(lock.block) {
                    continue;
                }
                match self.owned.other_owner(&node.name, lock.block) {
                    Some((other, _)) => plan.problems.push(BlockProblem::Contested {
                        block: lock.block,
                        node: node.name.clone(),
                        other: other.to_owned(),
                    }),
                    None => gives.push((lock.block, Some(lock.clone()), BlockReason::Locked)),
                }
            }
            has.extend(gives.iter().map(|(block, ..)| *block));
            let why = if has.is_empty() {
                Some(BlockReason::First)
            } else {
                self.runs_low(node, family, &has, limits)
            };
            if let Some(why) = why
                && serving.iter().any(|pool| pool.of(family).next().is_some())
            {
                match self.choose(node, family, &serving, why) {
                    Some(block) => gives.push((block, None, why)),
                    None => plan.problems.push(BlockProblem::NoRoom {
                        node: node.name.clone(),
                        family,
                        pools: serving.iter().map(|pool| pool.name.clone()).collect(),
                    }),
                }
            }
            for (block, lock, why) in gives {
                self.taken.add(block);
                self.owned.add(block, &node.name);
                plan.steps.push(BlockStep::Give {
                    block,
                    node: node.name.clone(),
                    lock,
                    pool: self.pool_of(block).map(|pool| pool.name.clone()),
                    why,
                });
            }
        }
    }

    fn runs_low(
        &self,
        node: &NodeFacts,
        family: Family,
        has: &[IpNet],
        limits: BlockLimits,
    ) -> Option<BlockReason> {
        let room = has.iter().fold(0, |sum: u128, block| sum.saturating_add(usable(*block)));
        let used = node.used.get(&family).copied().unwrap_or(0);
        let low = room.saturating_sub(used) < limits.low && has.len() < limits.most;
        low.then_some(BlockReason::Low)
    }

    /// The block that the Node already has, so that the two never disagree; else the first free block of the
    /// first pool that has one.
    fn choose(&self, node: &NodeFacts, family: Family, serving: &[&Pool], why: BlockReason) -> Option<IpNet> {
        let said = node.said.iter().copied().find(|range| {
            why == BlockReason::First
                && Family::of(range.addr()) == family
                && range.prefix_len() < range.max_prefix_len()
                && serving.iter().any(|pool| pool.contains(*range))
                && self.owned.other_owner(&node.name, *range).is_none()
                && !self.broken.overlaps(*range)
                && !self.locks.values().any(|lock| clash(lock.block, *range))
        });
        let next = || {
            serving.iter().find_map(|pool| {
                let excluded: TakenRanges = pool.excluded.iter().copied().collect();
                let taken = [&self.taken, &excluded];
                pool.of(family).find_map(|range| next_block(range, pool.size(family), &taken))
            })
        };
        said.or_else(next)
    }
}

fn returns(view: &BlockFacts, limits: BlockLimits, memory: &mut GoneNodes, now: TimePoint, plan: &mut Plan) {
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
            plan.steps.push(BlockStep::Return { lock: lock.clone() });
        } else {
            let left = limits.quarantine - waited;
            plan.again = Some(plan.again.map_or(left, |again| again.min(left)));
        }
    }
    memory.gone = gone;
}

/// How many addresses of a block pods may have: not the first, not the last, and not the router's.
fn usable(block: IpNet) -> u128 {
    let bits = u32::from(block.max_prefix_len() - block.prefix_len());
    1u128.checked_shl(bits).unwrap_or(u128::MAX).saturating_sub(3)
}

fn clash(a: IpNet, b: IpNet) -> bool {
    a.contains(&b) || b.contains(&a)
}

#[cfg(test)]
mod tests;
