//! Blocks for nodes: given under a lock, written with a precondition, given back with a proof.
//!
//! The order of the writes is the safety: the node's object is read, then its block's lock is taken by a write, then the
//! object is written if it is as it was read. A block is given back only after its node was looked for live and is gone, and
//! only if its lock was not taken meanwhile. So two controllers never give one block twice, wherever either of them ends.

mod locks;
mod status;
pub(crate) mod view;

use std::time::Duration;

use futures_util::{StreamExt, TryStreamExt};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::{Node, ObjectReference};
use kube::Resource;
use kube::api::{Api, ListParams};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family as MetricFamily;
use prometheus_client::metrics::gauge::Gauge;
use serde_json::json;

pub use locks::{LockList, Locks, name as lock_name};
pub use view::{BlockView, RefusedPool, seen};

use crate::cluster::api::client::ApiError;
use crate::cluster::api::events;
use crate::cluster::api::events::Told;
use crate::cluster::cilium::objects::CiliumNode;
use crate::cluster::objects::{AddressClaim, labels};
use crate::cluster::protocol::write::Precondition;
use crate::controller::context::Context;
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::Kind;
use crate::controller::metrics::{ControllerMetrics, What};
use crate::controller::queue::Key;
use crate::controller::writer::Writer;
use crate::policy::mode::BlockLocation;
use crate::policy::node_blocks::{
    BlockLimits, BlockLock, BlockProblem, BlockReason, BlockStep, GoneNodes, Plan, UnreadableLock, decide,
};

/// The annotations in which Cilium's `kubernetes` mode finds a node's range, the newer spelling first.
const IPV4: [&str; 2] = ["network.cilium.io/ipv4-pod-cidr", "io.cilium.network.ipv4-pod-cidr"];
/// The same for IPv6.
const IPV6: [&str; 2] = ["network.cilium.io/ipv6-pod-cidr", "io.cilium.network.ipv6-pod-cidr"];
/// Before a step that came to nothing is tried again.
const RETRY: Duration = Duration::from_secs(2);
/// While a lock cannot be read, all are read again after so long: a person corrects or deletes it, and nobody tells. Less than a
/// tick, so that every tick does.
const LOOK_AGAIN: Duration = Duration::from_secs(30);
/// Steps and nodes side by side: the API server answers in milliseconds, and a thousand nodes may come at once.
const CONCURRENCY: usize = 16;

/// The duty.
pub struct NodeBlocks {
    place: BlockLocation,
    limits: BlockLimits,
    memory: GoneNodes,
    /// The locks as they were read last, and when; none if steps were carried out since.
    locks: Option<(LockList, Duration)>,
    namespace: String,
    given: MetricFamily<What, Gauge>,
    total: MetricFamily<What, Gauge>,
    steps: MetricFamily<What, Counter>,
    problems: MetricFamily<What, Gauge>,
}

/// What a step came to.
enum StepResult {
    /// It was done.
    RoundResult,
    /// The lock is held; the node is yet to be written.
    Held(Box<LockedBlock>, BlockReason),
    /// Somebody was faster, or the world is not as it was seen.
    Overtaken,
}

impl NodeBlocks {
    /// The duty for this place, with its locks in this namespace.
    #[must_use]
    pub fn new(
        place: BlockLocation,
        namespace: &str,
        limits: BlockLimits,
        metrics: &ControllerMetrics,
    ) -> Self {
        // Cilium's `kubernetes` mode takes one range a family from a Node.
        let most = if place == BlockLocation::Annotations { 1 } else { limits.most };
        let duty = Self {
            place,
            limits: BlockLimits { most, ..limits },
            memory: GoneNodes::default(),
            locks: None,
            namespace: namespace.to_owned(),
            given: MetricFamily::default(),
            total: MetricFamily::default(),
            steps: MetricFamily::default(),
            problems: MetricFamily::default(),
        };
        metrics.register("blocks_given", "Blocks that nodes have, by pool", duty.given.clone());
        metrics.register("blocks", "Blocks in all, by pool", duty.total.clone());
        metrics.register("block_steps", "Blocks given, locked and returned", duty.steps.clone());
        metrics.register(
            "block_troubles",
            "Nodes without the block that they need, by reason",
            duty.problems.clone(),
        );
        duty
    }

    /// The duty as it is set; none if Cilium's operator hands out the blocks.
    #[must_use]
    pub fn from_context(context: &Context) -> Option<Self> {
        let settings = &context.settings;
        let place = settings.cilium_ipam.blocks_go_to()?;
        let limits = BlockLimits {
            low: u128::from(settings.block_min_free),
            most: settings.blocks_per_node,
            quarantine: settings.block_quarantine.seconds(),
        };
        Some(Self::new(place, settings.block_namespace(), limits, &context.metrics))
    }

    /// The locks as they were read last, if that is enough to see whether anything is to be done.
    fn remembered(&self, now: Duration) -> Option<LockList> {
        let (listed, at) = self.locks.as_ref()?;
        let is_enough = listed.broken.is_empty() || now.saturating_sub(*at) < LOOK_AGAIN;
        is_enough.then(|| listed.clone())
    }

    /// Decides on locks that were read: without them, every node that is gone would be forgotten.
    fn decide(&mut self, context: &Context, locks: LockList) -> (BlockView, Plan) {
        let pool = context.settings.cluster_pool();
        let seen = seen(&context.index(), self.place, pool.as_ref(), locks);
        let mut plan = decide(&seen.view, self.limits, &mut self.memory, context.now());
        if !seen.in_doubt.is_empty() {
            // What cannot be read may have any block.
            plan.steps.retain(|step| {
                !matches!(step, BlockStep::Give { lock: None, .. } | BlockStep::Return { .. })
            });
        }
        (seen, plan)
    }

    /// Carries the steps out. How many must be tried again.
    async fn carry(&self, context: &Context, steps: &[BlockStep]) -> (usize, usize) {
        let writer = &context.writer;
        let (mut overtaken, mut failed) = (0, 0);
        let locks = Locks::new(writer.client(), &self.namespace);
        let mut held = Vec::new();
        let locks = &locks;
        let came = steps.iter().map(|step| async move {
            let came = match step {
                BlockStep::BlockLock { block, node } => locks
                    .make(writer, *block, node, "found")
                    .await
                    .map(|made| made.map_or(StepResult::Overtaken, |_| StepResult::RoundResult)),
                BlockStep::Give { block, node, lock, why, .. } => {
                    self.hold(writer, locks, *block, node, lock.as_ref()).await.map(|hold| {
                        hold.map_or(StepResult::Overtaken, |hold| StepResult::Held(Box::new(hold), *why))
                    })
                }
                BlockStep::Return { lock } => give_back(writer, locks, lock).await,
            };
            (step, came)
        });
        // In their order: the blocks of one node follow each other.
        let mut came = std::pin::pin!(futures_util::stream::iter(came).buffered(CONCURRENCY));
        while let Some((step, came)) = came.next().await {
            match came {
                Ok(StepResult::Overtaken) => {
                    tracing::info!(step = ?step, "somebody was faster, or the world is not as it was seen; looking again");
                    overtaken += 1;
                }
                Ok(done) => {
                    ControllerMetrics::count(&self.steps, word(step));
                    if let BlockStep::Return { lock } = step {
                        context.record_event(returned(context, lock)).await;
                    }
                    if let StepResult::Held(hold, why) = done {
                        held.push((*hold, why));
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, step = ?step, "cannot carry out a step on a block; trying again");
                    failed += 1;
                }
            }
        }
        match self.write_held(context, locks, held).await {
            Ok(more) => overtaken += more,
            Err(error) => {
                tracing::warn!(%error, "cannot write blocks on nodes; trying again");
                failed += 1;
            }
        }
        (overtaken, failed)
    }

    /// Reads the node's object and then takes the lock. None if somebody has it, or there is nothing to write on.
    async fn hold(
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
            None => locks.make(writer, block, node, &read_at).await?,
            Some(lock) => locks.take_again(writer, lock, &read_at).await?,
        };
        Ok(taken.map(|lock| LockedBlock { object, lock }))
    }

    async fn read(&self, writer: &Writer, node: &str) -> Result<Option<NodeObject>, ApiError> {
        Ok(match self.place {
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

    /// Writes what is held, unless a lock of another size overlaps it: sizes may differ between two replicas for a while.
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
        written.try_fold(0, async |sum, overtaken| Ok(sum + overtaken)).await
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
        let mut overtaken = 0;
        let mut held = held.into_iter().peekable();
        while let Some((hold, why)) = held.next() {
            let block = hold.lock.block;
            let rival = all.blocks().find(|(other, uid)| *uid != hold.lock.uid && clash(*other, block));
            if let Some((rival, _)) = rival {
                tracing::warn!(%block, node = hold.lock.node, %rival, "another block overlaps; letting go");
                if why != BlockReason::Locked {
                    locks.remove(writer, &hold.lock).await?;
                }
                overtaken += 1;
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
                None => overtaken += 1,
                Some(_) => {
                    let node = &hold.lock.node;
                    tracing::info!(%block, node, %why, "gave a block");
                    let uid =
                        context.index().nodes.get(node).map(|node| node.uid.clone()).unwrap_or_default();
                    let message = format!("block {block} is this node's: {why}");
                    let about = events::node(node, &uid);
                    context
                        .record_event(Told { about, reason: "BlockAssigned", message, warning: false })
                        .await;
                }
            }
        }
        Ok(overtaken)
    }

    /// The write on the node; how the object stands then.
    async fn write(&self, writer: &Writer, hold: &LockedBlock) -> Result<Option<NodeObject>, ApiError> {
        let (node, block) = (&hold.lock.node, hold.lock.block);
        Ok(match self.place {
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

    async fn report(&mut self, context: &Context, seen: &BlockView, plan: &Plan) -> Result<(), ApiError> {
        // A pool that is gone has none.
        self.given.clear();
        self.total.clear();
        for (pool, fill) in &plan.fill {
            let label = What { what: pool.clone() };
            self.given.get_or_create(&label).set(i64::try_from(fill.allocated).unwrap_or(i64::MAX));
            self.total.get_or_create(&label).set(i64::try_from(fill.total).unwrap_or(i64::MAX));
        }
        self.problems.clear();
        for problem in &plan.problems {
            self.problems.get_or_create(&What { what: problem.reason().to_owned() }).inc();
            let message = problem.to_string();
            let about = match problem {
                BlockProblem::Broken(broken) => self.lease(broken),
                BlockProblem::NoRoom { node, .. }
                | BlockProblem::NoPool { node }
                | BlockProblem::Contested { node, .. } => {
                    let uid =
                        context.index().nodes.get(node).map(|node| node.uid.clone()).unwrap_or_default();
                    events::node(node, &uid)
                }
            };
            context.record_event(Told { about, reason: problem.reason(), message, warning: true }).await;
        }
        for refused in &seen.refused {
            let object = context.index().pools.get(&refused.name).cloned();
            if let Some(pool) = object {
                let (about, message) = (events::pool(&pool), refused.why.clone());
                context.record_event(Told { about, reason: refused.reason, message, warning: true }).await;
            }
        }
        for name in &seen.in_doubt {
            tracing::warn!(
                object = name,
                "it cannot be read, so no block is given or returned; correct or delete it"
            );
        }
        status::write(context, seen, plan).await
    }

    /// A lock that cannot be read, as an event names it.
    fn lease(&self, broken: &UnreadableLock) -> ObjectReference {
        ObjectReference {
            api_version: Some("coordination.k8s.io/v1".into()),
            kind: Some("Lease".into()),
            namespace: Some(self.namespace.clone()),
            name: Some(lock_name(broken.block)),
            uid: Some(broken.uid.clone()),
            ..ObjectReference::default()
        }
    }
}

impl Duty for NodeBlocks {
    const NAME: &'static str = "blocks";
    const TRIGGERS: &'static [Kind] = &[Kind::Node, Kind::CiliumNode, Kind::IPPool, Kind::AddressClaim];
    const BATCH_DELAY: Duration = Duration::from_millis(250);
    /// Pods come and go on a node without a word of its objects. A round asks nothing of the API server if nothing is to be done.
    const TICK: Option<Duration> = Some(Duration::from_secs(60));

    async fn round(&mut self, context: &Context, _: Vec<Key>) -> RoundResult {
        let again = |after: Duration| vec![(Key::new(Kind::Node, ""), after)];
        if !context.index().missing().is_empty() {
            return RoundResult { again: again(RETRY), failures: 0 };
        }
        // Most rounds change nothing, and the locks as they were read last are enough to see that.
        let remembered = self.remembered(context.elapsed()).map(|locks| self.decide(context, locks));
        let mut tried = (0, 0);
        let (seen, plan) = match remembered {
            Some((seen, plan)) if plan.steps.is_empty() => (seen, plan),
            _ => {
                let read_at = context.elapsed();
                let locks =
                    match Locks::new(context.writer.client(), &self.namespace).list(&context.writer).await {
                        Ok(locks) => locks,
                        Err(error) => {
                            tracing::warn!(%error, "cannot read the locks of blocks; trying again");
                            return RoundResult { again: again(RETRY), failures: 1 };
                        }
                    };
                let (seen, plan) = self.decide(context, locks.clone());
                for problem in
                    plan.problems.iter().filter(|problem| matches!(problem, BlockProblem::Broken(_)))
                {
                    tracing::warn!(namespace = self.namespace, "{problem}");
                }
                tried = self.carry(context, &plan.steps).await;
                self.locks = plan.steps.is_empty().then_some((locks, read_at));
                (seen, plan)
            }
        };
        let told = self.report(context, &seen, &plan).await;
        if let Err(error) = &told {
            tracing::warn!(%error, "cannot write how full the pools are; trying again");
        }
        let (overtaken, failed) = (tried.0, tried.1 + usize::from(told.is_err()));
        let soon = overtaken + failed > 0 || !plan.steps.is_empty();
        let next = if soon { Some(RETRY) } else { plan.again.map(Duration::from_secs) };
        RoundResult { again: next.map(again).unwrap_or_default(), failures: failed }
    }
}

/// What is told of a block that is free again: to whoever looks at its pool, for its node is gone. A block of no pool that is there is its
/// node's name's.
fn returned(context: &Context, lock: &BlockLock) -> Told {
    let (block, node) = (lock.block, &lock.node);
    let index = context.index();
    let pool = index.pools.values().find(|pool| pool.spec.cidrs.iter().any(|range| range.contains(&block)));
    let about = pool.map_or_else(|| events::node(node, ""), events::pool);
    let message = format!("block {block} of node {node} is free: the node is gone and nothing is kept in it");
    Told { about, reason: "BlockReleased", message, warning: false }
}

/// Removes a lock after a live look: no Node, no CiliumNode, no claim.
async fn give_back(writer: &Writer, locks: &Locks, lock: &BlockLock) -> Result<StepResult, ApiError> {
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
        return Ok(StepResult::Overtaken);
    }
    let removed = locks.remove(writer, lock).await?;
    if removed {
        tracing::info!(block = %lock.block, node, "the node is gone and nothing is kept in its block: it is free");
    }
    Ok(if removed { StepResult::RoundResult } else { StepResult::Overtaken })
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

fn clash(a: IpNet, b: IpNet) -> bool {
    a.contains(&b) || b.contains(&a)
}

fn word(step: &BlockStep) -> &'static str {
    match step {
        BlockStep::BlockLock { .. } => "locked",
        BlockStep::Give { .. } => "given",
        BlockStep::Return { .. } => "returned",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_read_once_when_idle_and_again_after_a_while_if_one_is_unreadable() {
        let mut duty = NodeBlocks::new(
            BlockLocation::CiliumNode,
            "x",
            BlockLimits::default(),
            &ControllerMetrics::default(),
        );
        assert_eq!(duty.remembered(Duration::ZERO), None, "nothing was read");
        duty.locks = Some((LockList::default(), Duration::ZERO));
        assert_eq!(duty.remembered(Duration::MAX), Some(LockList::default()));
        let block = "10.1.2.0/24".parse().unwrap();
        let torn = UnreadableLock { block, object: "Lease".into(), uid: "u".into(), why: "torn".into() };
        let listed = LockList { broken: vec![torn], ..LockList::default() };
        duty.locks = Some((listed.clone(), Duration::ZERO));
        assert_eq!(duty.remembered(Duration::from_secs(1)), Some(listed));
        assert_eq!(
            duty.remembered(NodeBlocks::TICK.unwrap()),
            None,
            "a tick looks whether somebody mended it"
        );
    }
}
