//! The steps of a plan for blocks, and the problems that it reports. Pure data.

use std::fmt;

use ipnet::IpNet;

use crate::alloc::Family;
use crate::policy::node_blocks::facts::{BlockLock, UnreadableLock};

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
    Lock { block: IpNet, node: String },
    /// Read the node's object, take the lock, then write the block on the object if it has not changed since.
    Assign {
        block: IpNet,
        node: String,
        /// The lock to take again, if there is one.
        lock: Option<BlockLock>,
        /// Its pool, if it is still in one.
        pool: Option<String>,
        why: BlockReason,
    },
    /// Remove the lock, after another live read that the node is gone and no address of the block is claimed.
    Release { lock: BlockLock },
}

/// Problems to report.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum BlockProblem {
    /// Every pool that serves the node is full.
    NoRoom {
        node: String,
        family: Family,
        /// The pools, in the order in which they were tried.
        pools: Vec<String>,
    },
    /// No pool serves the node.
    NoPool { node: String },
    /// Another node has a block that is locked for this one.
    Contested {
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
    pub(crate) fn reason(&self) -> &'static str {
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
                "no {family} block is left for node {node} in {}; add a range to one of them, or another \
                 IPPool",
                pools.join(", ")
            ),
            Self::NoPool { node } => write!(
                f,
                "no IPPool with use NodeBlocks serves node {node}; label the node, or widen a pool's \
                 nodeSelector"
            ),
            Self::Contested { block, node, other } => write!(
                f,
                "block {block} is locked for node {node}, but node {other} has addresses of it; correct \
                 one of them, or delete the Lease of the block"
            ),
            Self::Broken(UnreadableLock { block, object, why, .. }) => write!(
                f,
                "{object} cannot be read: {why}; block {block} is neither assigned nor released until the \
                 Lease is corrected \
                 or deleted (a node that has the block gets a new Lease)"
            ),
        }
    }
}
