//! Applies the steps of the node block plan: takes and removes locks, writes blocks on nodes. Must never
//! write a block whose lock was not taken after the node's object was read.

use std::fmt::Debug;

use futures_util::{StreamExt, TryStreamExt};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, ObjectReference};
use kube::api::{Api, ListParams};
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use crate::alloc::block::overlap;
use crate::cluster::api::client::ApiError;
use crate::cluster::cilium::pool::read_node;
use crate::cluster::events;
use crate::cluster::objects::cilium::CiliumNode;
use crate::cluster::objects::{AddressClaim, labels};
use crate::cluster::writer::write::Precondition;
use crate::controller::duties::node_blocks::locks::{LockList, Locks};
use crate::controller::index::objects::RANGE_ANNOTATIONS;
use crate::controller::{context::Context, duties::record_event, writer::Writer};
use crate::policy::mode::BlockLocation;
use crate::policy::node_blocks::{BlockLock, BlockReason, BlockStep};

/// Steps and nodes at the same time: the API server answers in milliseconds, and a thousand nodes may come at
/// once.
const CONCURRENCY: usize = 16;

/// How many steps must be tried again.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct StepCounts {
    /// An object had changed.
    pub(crate) conflicts: usize,
    /// The API server did not answer, or refused.
    pub(crate) failed: usize,
}

enum StepResult {
    Done,
    /// The lock is held; the node is yet to be written.
    Held(Box<LockedBlock>),
    /// An object has changed since it was read.
    Conflict,
}

/// A node's object as it was read.
struct NodeObject {
    at: Precondition,
    ranges: Vec<String>,
}

impl NodeObject {
    fn of_cilium(object: CiliumNode) -> Self {
        Self { at: Precondition::of(&object), ranges: object.spec.ipam.pod_cidrs }
    }

    fn of_node(object: &impl ResourceExt) -> Self {
        Self { at: Precondition::of(object), ranges: Vec::new() }
    }
}

/// A lock that was taken after the object was read.
struct LockedBlock {
    object: NodeObject,
    lock: BlockLock,
    why: BlockReason,
}

pub(crate) struct StepWriter<'a> {
    context: &'a Context,
    location: BlockLocation,
    locks: Locks<'a>,
}

impl<'a> StepWriter<'a> {
    pub(crate) fn new(context: &'a Context, location: BlockLocation, namespace: &'a str) -> Self {
        Self { context, location, locks: Locks::new(&context.writer, namespace) }
    }

    pub(crate) async fn apply(&self, steps: &[BlockStep]) -> StepCounts {
        let context = self.context;
        let (mut counts, mut held) = (StepCounts::default(), Vec::new());
        let results = steps.iter().map(|step| async move { (step, self.apply_one(step).await) });
        // In their order: the blocks of one node follow each other.
        let mut results = std::pin::pin!(futures_util::stream::iter(results).buffered(CONCURRENCY));
        while let Some((step, result)) = results.next().await {
            let (label, block, node) = match step {
                BlockStep::Lock { block, node } => ("locked", *block, node),
                BlockStep::Assign { block, node, .. } => ("assigned", *block, node),
                BlockStep::Release { lock } => ("released", lock.block, &lock.node),
            };
            match result {
                Ok(StepResult::Conflict) => {
                    tracing::info!(%block, node, "write conflict on a block; looking again");
                    counts.conflicts += 1;
                }
                Ok(done) => {
                    context.metrics.block_actions.inc([label]);
                    if matches!(step, BlockStep::Release { .. }) {
                        let message = format!(
                            "block {block} of node {node} was released: the node is gone, and no address of \
                             the block is claimed"
                        );
                        record_event(context, pool_of(context, block, node), "BlockReleased", message).await;
                    }
                    if let StepResult::Held(hold) = done {
                        held.push(*hold);
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, %block, node, "cannot apply a step on a block; trying again");
                    counts.failed += 1;
                }
            }
        }
        match self.write_held(&held).await {
            Ok(more) => counts.conflicts += more,
            Err(error) => {
                tracing::warn!(%error, "cannot write blocks on nodes; trying again");
                counts.failed += 1;
            }
        }
        counts
    }

    async fn apply_one(&self, step: &BlockStep) -> Result<StepResult, ApiError> {
        let done = match step {
            BlockStep::Lock { block, node } => {
                self.locks.create(*block, node, "found").await?.map(|_| StepResult::Done)
            }
            // Reads the node's object and then takes the lock.
            BlockStep::Assign { block, node, lock, why, .. } => {
                let Some(object) = self.read(node).await? else { return Ok(StepResult::Conflict) };
                let read_at = format!("{}@{}", object.at.uid, object.at.resource_version);
                let taken = match lock {
                    None => self.locks.create(*block, node, &read_at).await?,
                    Some(lock) => self.locks.retake(lock, &read_at).await?,
                };
                taken.map(|lock| StepResult::Held(Box::new(LockedBlock { object, lock, why: *why })))
            }
            BlockStep::Release { lock } => self.release(lock).await?.then_some(StepResult::Done),
        };
        Ok(done.unwrap_or(StepResult::Conflict))
    }

    /// Removes a lock after a live look: no Node, no CiliumNode, no claim. Whether it did.
    async fn release(&self, lock: &BlockLock) -> Result<bool, ApiError> {
        let (writer, node) = (&self.context.writer, lock.node.as_str());
        let api = writer.connection();
        let there = !is_gone::<Node>(writer, node).await? || !is_gone::<CiliumNode>(writer, node).await?;
        let claims: Api<AddressClaim> = Api::all(writer.client());
        let of_block = format!("{}={}", labels::BLOCK, labels::block_value(lock.block));
        let params = ListParams::default().labels(&of_block).limit(1);
        let kept = api.read("list AddressClaims of a block", || claims.list_metadata(&params)).await?;
        let removed = !there && kept.items.is_empty() && self.locks.remove(lock).await?;
        if removed {
            tracing::info!(
                block = %lock.block, node,
                "released a block: its node is gone, and no address of it is claimed"
            );
        }
        Ok(removed)
    }

    async fn read(&self, node: &str) -> Result<Option<NodeObject>, ApiError> {
        let connection = self.context.writer.connection();
        Ok(match self.location {
            BlockLocation::CiliumNode => read_node(&connection, node).await?.map(NodeObject::of_cilium),
            BlockLocation::Annotations => {
                let api: Api<Node> = Api::all(connection.client());
                let what = format!("get Node {node}");
                let read = connection.read(&what, || api.get_metadata_opt(node)).await?;
                read.as_ref().map(NodeObject::of_node)
            }
        })
    }

    /// Writes what is held, unless a lock of another size overlaps it: sizes may differ between two replicas
    /// for a while.
    async fn write_held(&self, held: &[LockedBlock]) -> Result<usize, ApiError> {
        if held.is_empty() {
            return Ok(0);
        }
        let all = &self.locks.list().await?;
        let of_nodes = held.chunk_by(|one, next| one.lock.node == next.lock.node);
        let written = of_nodes.map(|of_node| self.write_on_node(all, of_node));
        let written = futures_util::stream::iter(written).buffer_unordered(CONCURRENCY);
        written.try_fold(0, async |sum, conflicts| Ok(sum + conflicts)).await
    }

    /// Writes what is held for one node, one after the other. How many came to nothing.
    async fn write_on_node(&self, all: &LockList, held: &[LockedBlock]) -> Result<usize, ApiError> {
        let mut conflicts = 0;
        // The next block is written on what the last write left.
        let mut left: Option<NodeObject> = None;
        for LockedBlock { object, lock, why } in held {
            let (read, block, node) = (left.take(), lock.block, &lock.node);
            let rival = all.blocks().find(|(other, uid)| *uid != lock.uid && overlap(*other, block));
            if let Some((rival, _)) = rival {
                tracing::warn!(%block, node, %rival, "another block overlaps; the lock is removed");
                if *why != BlockReason::Locked {
                    self.locks.remove(lock).await?;
                }
                conflicts += 1;
                continue;
            }
            left = self.write(lock, read.as_ref().unwrap_or(object)).await?;
            if left.is_none() {
                conflicts += 1;
                continue;
            }
            tracing::info!(%block, node, %why, "assigned a block");
            let message = format!("block {block} was assigned to this node: {why}");
            record_event(self.context, node_reference(self.context, node), "BlockAssigned", message).await;
        }
        Ok(conflicts)
    }

    /// Writes the block on the node; the object as it is then.
    async fn write(&self, lock: &BlockLock, read: &NodeObject) -> Result<Option<NodeObject>, ApiError> {
        let (writer, node, block) = (&self.context.writer, &lock.node, lock.block.to_string());
        Ok(match self.location {
            BlockLocation::CiliumNode => {
                let mut ranges = read.ranges.clone();
                if !ranges.contains(&block) {
                    ranges.push(block);
                }
                let api: Api<CiliumNode> = Api::all(writer.client());
                let patch = json!({"spec": {"ipam": {"podCIDRs": ranges}}});
                let what = format!("patch CiliumNode {node}");
                writer.patch(&what, &api, node, &read.at, patch).await?.map(NodeObject::of_cilium)
            }
            BlockLocation::Annotations => {
                let family = if lock.block.addr().is_ipv4() { "ipv4" } else { "ipv6" };
                let keys = RANGE_ANNOTATIONS.iter().filter(|key| key.contains(family));
                let annotations: Map<String, Value> =
                    keys.map(|key| ((*key).to_owned(), json!(block))).collect();
                let api: Api<Node> = Api::all(writer.client());
                let patch = json!({"metadata": {"annotations": annotations}});
                let what = format!("patch Node {node}");
                writer.patch(&what, &api, node, &read.at, patch).await?.as_ref().map(NodeObject::of_node)
            }
        })
    }
}

pub(crate) fn node_reference(context: &Context, node: &str) -> ObjectReference {
    let uid = context.index().nodes.get(node).map(|node| node.uid.clone()).unwrap_or_default();
    events::node(node, &uid)
}

/// The pool of a block that is free again, as its event names it, because the node is gone; without a pool
/// the event is under the node's name.
fn pool_of(context: &Context, block: IpNet, node: &str) -> ObjectReference {
    let index = context.index();
    let pool = index.pools.values().find(|pool| pool.spec.cidrs.iter().any(|range| range.contains(&block)));
    pool.map_or_else(|| events::node(node, ""), events::pool)
}

/// A live look that an object is not there. A kind that the server does not serve right now proves nothing.
async fn is_gone<K>(writer: &Writer, name: &str) -> Result<bool, ApiError>
where
    K: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let api: Api<K> = Api::all(writer.client());
    let what = format!("get {} {name}", K::kind(&()));
    match writer.connection().read(&what, || api.get_metadata(name)).await {
        Ok(_) => Ok(false),
        Err(error) if error.says_gone(name) => Ok(true),
        Err(error) => Err(error),
    }
}
