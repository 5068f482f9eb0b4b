//! The steps of a plan for blocks, and the problems that it reports. Pure data.

use ipnet::IpNet;
use thiserror::Error;

use crate::alloc::Family;
use crate::policy::node_blocks::facts::{BlockLock, UnreadableLock};

/// Why a block is assigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BlockReason {
    #[error("the node had none of this family")]
    First,
    #[error("few addresses were left in its blocks")]
    Low,
    /// A writer stopped between two writes, or the node came back.
    #[error("it was locked for this node")]
    Locked,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BlockStep {
    /// Create the lock of a block that the node already has.
    Lock { block: IpNet, node: String },
    /// Read the node's object, take the lock (again, if there is one), then write the block on the object if
    /// it has not changed since. With its pool, if it is still in one.
    Assign { block: IpNet, node: String, lock: Option<BlockLock>, pool: Option<String>, why: BlockReason },
    /// Remove the lock, after another live read that the node is gone and no address of the block is claimed.
    Release { lock: BlockLock },
}

/// Problems to report.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Error)]
pub(crate) enum BlockProblem {
    /// Every pool that serves the node is full; they are in the order in which they were tried.
    #[error(
        "no {family} block is left for node {node} in {}; add a range to one of them, or another IPPool",
        .pools.join(", ")
    )]
    NoRoom { node: String, family: Family, pools: Vec<String> },
    #[error(
        "no IPPool with use NodeBlocks serves node {node}; label the node, or widen a pool's nodeSelector"
    )]
    NoPool { node: String },
    /// Of a block, the lock is for `node`, and `other` has it.
    #[error(
        "block {block} is locked for node {node}, but node {other} has addresses of it; correct one of \
         them, or delete the Lease of the block"
    )]
    Contested { block: IpNet, node: String, other: String },
    #[error(
        "{} cannot be read: {}; block {} is neither assigned nor released until the Lease is corrected or \
         deleted (a node that has the block gets a new Lease)",
        .0.object, .0.why, .0.block
    )]
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
