//! Applies the steps of the node block plan: takes and removes locks, writes blocks on nodes. Must never
//! write a block whose lock was not taken after the node's object was read.

use futures_util::{StreamExt, TryStreamExt};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use kube::Resource;
use kube::api::{Api, ListParams};
use serde_json::json;

use crate::alloc::block::overlap;
use crate::cluster::api::client::ApiError;
use crate::cluster::api::events;
use crate::cluster::api::events::NewEvent;
use crate::cluster::cilium::objects::CiliumNode;
use crate::cluster::objects::{AddressClaim, labels};
use crate::cluster::protocol::write::Precondition;
use crate::controller::context::Context;
use crate::controller::duties::node_blocks::locks::{LockList, Locks};
use crate::controller::writer::Writer;
use crate::policy::mode::BlockLocation;
use crate::policy::node_blocks::{BlockLock, BlockReason, BlockStep};
use crate::runtime::metrics::{Counter, Labelled};

/// The annotations in which Cilium's `kubernetes` mode finds a node's range, the newer spelling first.
const IPV4: [&str; 2] = ["network.cilium.io/ipv4-pod-cidr", "io.cilium.network.ipv4-pod-cidr"];
/// The same for IPv6.
const IPV6: [&str; 2] = ["network.cilium.io/ipv6-pod-cidr", "io.cilium.network.ipv6-pod-cidr"];
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

/// What came of a step.
enum StepResult {
    Done,
    /// The lock is held; the node is yet to be written.
    Held(Box<LockedBlock>, BlockReason),
    /// An object has changed since it was read.
    Conflict,
}

/// Applies steps for one location of blocks.
pub(crate) struct StepWriter<'a> {
    context: &'a Context,
    location: BlockLocation,
    locks: Locks,
}

impl<'a> StepWriter<'a> {
    /// A writer with its locks in this namespace.
    pub(crate) fn new(context: &'a Context, location: BlockLocation, namespace: &str) -> Self {
        Self { context, location, locks: Locks::new(context.writer.client(), namespace) }
    }

    /// Applies the steps and counts them. How many must be tried again.
    pub(crate) async fn apply(&self, steps: &[BlockStep], applied: &Labelled<Counter, 1>) -> StepCounts {
        let (context, writer, locks) = (self.context, &self.context.writer, &self.locks);
        let mut counts = StepCounts::default();
        let mut held = Vec::new();
        let results = steps.iter().map(|step| async move {
            let result = match step {
                BlockStep::Lock { block, node } => {
                    let made = locks.create(writer, *block, node, "found").await;
                    made.map(|made| made.map_or(StepResult::Conflict, |_| StepResult::Done))
                }
                BlockStep::Assign { block, node, lock, why, .. } => {
                    self.lock(writer, locks, *block, node, lock.as_ref()).await.map(|hold| {
                        hold.map_or(StepResult::Conflict, |hold| StepResult::Held(Box::new(hold), *why))
                    })
                }
                BlockStep::Release { lock } => release(writer, locks, lock).await,
            };
            (step, result)
        });
        // In their order: the blocks of one node follow each other.
        let mut results = std::pin::pin!(futures_util::stream::iter(results).buffered(CONCURRENCY));
        while let Some((step, result)) = results.next().await {
            match result {
                Ok(StepResult::Conflict) => {
                    let (block, node) = subject(step);
                    tracing::info!(%block, node, "write conflict on a block; looking again");
                    counts.conflicts += 1;
                }
                Ok(done) => {
                    applied.inc([label(step)]);
                    if let BlockStep::Release { lock } = step {
                        context.record_event(released(context, lock)).await;
                    }
                    if let StepResult::Held(hold, why) = done {
                        held.push((*hold, why));
                    }
                }
                Err(error) => {
                    let (block, node) = subject(step);
                    tracing::warn!(%error, %block, node, "cannot apply a step on a block; trying again");
                    counts.failed += 1;
                }
            }
        }
        match self.write_held(context, locks, held).await {
            Ok(more) => counts.conflicts += more,
            Err(error) => {
                tracing::warn!(%error, "cannot write blocks on nodes; trying again");
                counts.failed += 1;
            }
        }
        counts
    }

    /// Reads the node's object and then takes the lock. None if the lock is taken, or there is no object to
    /// write on.
    async fn lock(
        &self,
        writer: &Writer,
        locks: &Locks,
        block: IpNet,
        node: &str,
        lock: Option<&BlockLock>,
    ) -> Result<Option<LockedBlock>, ApiError> {
        let Some(object) = self.read(writer, node).await? else { return Ok(None) };
        let read_at = format!("{}@{}", object.at.uid, object.at.resource_version);
        let taken = match lock {
            None => locks.create(writer, block, node, &read_at).await?,
            Some(lock) => locks.retake(writer, lock, &read_at).await?,
        };
        Ok(taken.map(|lock| LockedBlock { object, lock }))
    }

    async fn read(&self, writer: &Writer, node: &str) -> Result<Option<NodeObject>, ApiError> {
        Ok(match self.location {
            BlockLocation::CiliumNode => {
                let api: Api<CiliumNode> = Api::all(writer.client());
                let what = format!("get CiliumNode {node}");
                let read = writer.connection().read(&what, || api.get_opt(node)).await?;
                read.map(|object| NodeObject {
                    at: Precondition::of(&object),
                    ranges: object.spec.ipam.pod_cidrs,
                })
            }
            BlockLocation::Annotations => {
                let api: Api<Node> = Api::all(writer.client());
                let what = format!("get Node {node}");
                let read = writer.connection().read(&what, || api.get_metadata_opt(node)).await?;
                read.map(|object| NodeObject { at: Precondition::of(&object), ranges: Vec::new() })
            }
        })
    }

    /// Writes what is held, unless a lock of another size overlaps it: sizes may differ between two replicas
    /// for a while.
    async fn write_held(
        &self,
        context: &Context,
        locks: &Locks,
        held: Vec<(LockedBlock, BlockReason)>,
    ) -> Result<usize, ApiError> {
        if held.is_empty() {
            return Ok(0);
        }
        let all = &locks.list(&context.writer).await?;
        let mut of_nodes: Vec<Vec<(LockedBlock, BlockReason)>> = Vec::new();
        for (hold, why) in held {
            match of_nodes
                .last_mut()
                .filter(|of_node| of_node.iter().any(|(one, _)| one.lock.node == hold.lock.node))
            {
                Some(of_node) => of_node.push((hold, why)),
                None => of_nodes.push(vec![(hold, why)]),
            }
        }
        let written = of_nodes.into_iter().map(|of_node| self.write_on_node(context, locks, all, of_node));
        let written = futures_util::stream::iter(written).buffer_unordered(CONCURRENCY);
        written.try_fold(0, async |sum, conflicts| Ok(sum + conflicts)).await
    }

    /// Writes what is held for one node, one after the other. How many came to nothing.
    async fn write_on_node(
        &self,
        context: &Context,
        locks: &Locks,
        all: &LockList,
        held: Vec<(LockedBlock, BlockReason)>,
    ) -> Result<usize, ApiError> {
        let writer = &context.writer;
        let mut conflicts = 0;
        let mut held = held.into_iter().peekable();
        while let Some((hold, why)) = held.next() {
            let block = hold.lock.block;
            let rival = all.blocks().find(|(other, uid)| *uid != hold.lock.uid && overlap(*other, block));
            if let Some((rival, _)) = rival {
                tracing::warn!(
                    %block, node = hold.lock.node, %rival,
                    "another block overlaps; the lock is removed"
                );
                if why != BlockReason::Locked {
                    locks.remove(writer, &hold.lock).await?;
                }
                conflicts += 1;
                continue;
            }
            let written = self.write(writer, &hold).await?;
            // The next block is written on what this write left.
            if let Some(now) = &written
                && let Some((next, _)) = held.peek_mut()
            {
                next.object = now.clone();
            }
            match written {
                None => conflicts += 1,
                Some(_) => {
                    let node = &hold.lock.node;
                    tracing::info!(%block, node, %why, "assigned a block");
                    let uid =
                        context.index().nodes.get(node).map(|node| node.uid.clone()).unwrap_or_default();
                    let message = format!("block {block} was assigned to this node: {why}");
                    let about = events::node(node, &uid);
                    context
                        .record_event(NewEvent { about, reason: "BlockAssigned", message, warning: false })
                        .await;
                }
            }
        }
        Ok(conflicts)
    }

    /// Writes the block on the node; the object as it is then.
    async fn write(&self, writer: &Writer, hold: &LockedBlock) -> Result<Option<NodeObject>, ApiError> {
        let (node, block) = (&hold.lock.node, hold.lock.block);
        Ok(match self.location {
            BlockLocation::CiliumNode => {
                let mut ranges = hold.object.ranges.clone();
                if !ranges.contains(&block.to_string()) {
                    ranges.push(block.to_string());
                }
                let api: Api<CiliumNode> = Api::all(writer.client());
                let patch = json!({"spec": {"ipam": {"podCIDRs": ranges}}});
                let what = format!("patch CiliumNode {node}");
                let written = writer.patch(&what, &api, node, &hold.object.at, patch).await?;
                written.map(|object| NodeObject {
                    at: Precondition::of(&object),
                    ranges: object.spec.ipam.pod_cidrs,
                })
            }
            BlockLocation::Annotations => {
                let keys = if block.addr().is_ipv4() { IPV4 } else { IPV6 };
                let annotations: serde_json::Map<String, serde_json::Value> =
                    keys.iter().map(|key| ((*key).to_owned(), json!(block.to_string()))).collect();
                let api: Api<Node> = Api::all(writer.client());
                let patch = json!({"metadata": {"annotations": annotations}});
                let what = format!("patch Node {node}");
                let written = writer.patch(&what, &api, node, &hold.object.at, patch).await?;
                written.map(|object| NodeObject { at: Precondition::of(&object), ranges: Vec::new() })
            }
        })
    }
}

/// The event of a block that is free again. It is on the block's pool, because the node is gone; without a
/// pool it is under the node's name.
fn released(context: &Context, lock: &BlockLock) -> NewEvent {
    let (block, node) = (lock.block, &lock.node);
    let index = context.index();
    let pool = index.pools.values().find(|pool| pool.spec.cidrs.iter().any(|range| range.contains(&block)));
    let about = pool.map_or_else(|| events::node(node, ""), events::pool);
    let message = format!(
        "block {block} of node {node} was released: the node is gone, and no address of the block is claimed"
    );
    NewEvent { about, reason: "BlockReleased", message, warning: false }
}

/// Removes a lock after a live look: no Node, no CiliumNode, no claim.
async fn release(writer: &Writer, locks: &Locks, lock: &BlockLock) -> Result<StepResult, ApiError> {
    let api = writer.connection();
    let (nodes, cilium): (Api<Node>, Api<CiliumNode>) =
        (Api::all(writer.client()), Api::all(writer.client()));
    let node = lock.node.as_str();
    let there = !is_gone(writer, "Node", &nodes, node).await?
        || !is_gone(writer, "CiliumNode", &cilium, node).await?;
    let claims: Api<AddressClaim> = Api::all(writer.client());
    let of_block = format!("{}={}", labels::BLOCK, labels::block_value(lock.block));
    let params = ListParams::default().labels(&of_block).limit(1);
    let kept = api.read("list AddressClaims of a block", || claims.list_metadata(&params)).await?;
    if there || !kept.items.is_empty() {
        return Ok(StepResult::Conflict);
    }
    let removed = locks.remove(writer, lock).await?;
    if removed {
        tracing::info!(
            block = %lock.block, node,
            "released a block: its node is gone, and no address of it is claimed"
        );
    }
    Ok(if removed { StepResult::Done } else { StepResult::Conflict })
}

/// A live look that an object is not there. A kind that the server does not serve right now proves nothing.
async fn is_gone<K>(writer: &Writer, kind: &str, api: &Api<K>, name: &str) -> Result<bool, ApiError>
where
    K: Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    match writer.connection().read(&format!("get {kind} {name}"), || api.get_metadata(name)).await {
        Ok(_) => Ok(false),
        Err(error) if error.says_gone(name) => Ok(true),
        Err(error) => Err(error),
    }
}

/// A node's object as it was read.
#[derive(Clone)]
struct NodeObject {
    at: Precondition,
    ranges: Vec<String>,
}

/// A lock that was taken after the object was read.
struct LockedBlock {
    object: NodeObject,
    lock: BlockLock,
}

fn label(step: &BlockStep) -> &'static str {
    match step {
        BlockStep::Lock { .. } => "locked",
        BlockStep::Assign { .. } => "assigned",
        BlockStep::Release { .. } => "released",
    }
}

fn subject(step: &BlockStep) -> (IpNet, &str) {
    match step {
        BlockStep::Lock { block, node } | BlockStep::Assign { block, node, .. } => (*block, node),
        BlockStep::Release { lock } => (lock.block, &lock.node),
    }
}
