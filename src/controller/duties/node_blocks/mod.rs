//! Blocks for nodes: assigned under a lock, written with a precondition, released with a proof.
//!
//! The order of the writes is the safety: the node's object is read, then its block's lock is taken by a
//! write, then the object is written if it is as it was read. A block is released only after its node was
//! looked for live and is gone, and only if its lock was not taken meanwhile. So two controllers never give
//! one block twice, wherever either of them ends.

mod locks;
pub(crate) mod pools;
mod status;
mod steps;
pub(crate) mod view;

use std::time::Duration;

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::ObjectReference;
use kube::Resource;
use kube::api::ObjectMeta;

pub use locks::name as lock_name;
pub(crate) use locks::{LockList, Locks};
use steps::{StepCounts, StepWriter, node_reference};
pub(crate) use view::{BlockView, block_view};

use crate::cluster::api::client::ApiError;
use crate::cluster::events;
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::{context::Context, duties::record_warning, index::Kind, queue::Key};
use crate::policy::mode::BlockLocation;
use crate::policy::node_blocks::{
    BlockLimits, BlockProblem, BlockStep, GoneNodes, Plan, UnreadableLock, decide,
};

/// Before a step that came to nothing is tried again.
const RETRY: Duration = Duration::from_secs(2);
/// While a lock cannot be read, all are read again after this long: no event shows that a person corrected
/// it. Less than a tick, so that every tick does.
const LOOK_AGAIN: Duration = Duration::from_secs(30);

pub struct NodeBlocks {
    location: BlockLocation,
    limits: BlockLimits,
    memory: GoneNodes,
    /// The locks as they were read last, and when; none if steps were applied since.
    locks: Option<(LockList, Duration)>,
    namespace: String,
}

impl NodeBlocks {
    /// Its locks are in this namespace.
    pub fn new(location: BlockLocation, namespace: &str, limits: BlockLimits) -> Self {
        // Cilium's `kubernetes` mode takes one range a family from a Node.
        let most = if location == BlockLocation::Annotations { 1 } else { limits.most };
        let limits = BlockLimits { most, ..limits };
        Self { location, limits, memory: GoneNodes::default(), locks: None, namespace: namespace.to_owned() }
    }

    /// None if Cilium's operator hands out the blocks.
    pub fn from_context(context: &Context) -> Option<Self> {
        let settings = &context.settings;
        let location = settings.cilium_ipam.blocks_go_to()?;
        let limits = BlockLimits {
            low: u128::from(settings.block_min_free),
            most: settings.blocks_per_node,
            quarantine: settings.block_quarantine.seconds(),
        };
        Some(Self::new(location, settings.block_namespace(), limits))
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
        let seen = block_view(&context.index(), self.location, pool.as_ref(), locks);
        let mut plan = decide(&seen.view, self.limits, &mut self.memory, context.now());
        if !seen.in_doubt.is_empty() {
            // What cannot be read may have any block.
            plan.steps.retain(|step| {
                !matches!(step, BlockStep::Assign { lock: None, .. } | BlockStep::Release { .. })
            });
        }
        (seen, plan)
    }

    async fn report(&self, context: &Context, seen: &BlockView, plan: &Plan) -> Result<(), ApiError> {
        // A pool that is gone has none.
        let metrics = &context.metrics;
        metrics.blocks_allocated.clear();
        metrics.blocks.clear();
        for (pool, fill) in &plan.fill {
            metrics.blocks_allocated.with([pool]).set(i64::try_from(fill.allocated).unwrap_or(i64::MAX));
            metrics.blocks.with([pool]).set(i64::try_from(fill.total).unwrap_or(i64::MAX));
        }
        metrics.block_problems.clear();
        for problem in &plan.problems {
            metrics.block_problems.with([problem.reason()]).inc();
            let about = match problem {
                BlockProblem::Broken(broken) => self.lease(broken),
                BlockProblem::NoRoom { node, .. }
                | BlockProblem::NoPool { node }
                | BlockProblem::Contested { node, .. } => node_reference(context, node),
            };
            record_warning(context, about, problem.reason(), problem.to_string()).await;
        }
        for refused in &seen.refused {
            let object = context.index().pools.get(&refused.name).cloned();
            if let Some(pool) = object {
                record_warning(context, events::pool(&pool), refused.reason, refused.why.clone()).await;
            }
        }
        for name in &seen.in_doubt {
            tracing::warn!(
                object = name,
                "cannot read an object, so no block is assigned or released; correct or delete it"
            );
        }
        status::write(context, seen, plan).await
    }

    fn lease(&self, broken: &UnreadableLock) -> ObjectReference {
        let (namespace, name) = (Some(self.namespace.clone()), Some(lock_name(broken.block)));
        let metadata = ObjectMeta { namespace, name, uid: Some(broken.uid.clone()), ..ObjectMeta::default() };
        Lease { metadata, ..Lease::default() }.object_ref(&())
    }
}

impl Duty for NodeBlocks {
    const NAME: &'static str = "node_blocks";
    const TRIGGERS: &'static [Kind] = &[Kind::Node, Kind::CiliumNode, Kind::IPPool, Kind::AddressClaim];
    const BATCH_DELAY: Duration = Duration::from_millis(250);
    /// Pods come and go without a change of their node's objects. A round with nothing to do sends no
    /// request.
    const TICK: Option<Duration> = Some(Duration::from_secs(60));

    async fn round(&mut self, context: &Context, _: Vec<Key>) -> RoundResult {
        let again = |after: Duration| vec![(Key::new(Kind::Node, ""), after)];
        if !context.index().missing().is_empty() {
            return RoundResult { again: again(RETRY), failures: 0 };
        }
        // Most rounds change nothing, and the locks as they were read last are enough to see that.
        let remembered = self.remembered(context.elapsed()).map(|locks| self.decide(context, locks));
        let mut tried = StepCounts::default();
        let (seen, plan) = match remembered {
            Some((seen, plan)) if plan.steps.is_empty() => (seen, plan),
            _ => {
                let read_at = context.elapsed();
                let locks = Locks::new(&context.writer, &self.namespace);
                let locks = match locks.list().await {
                    Ok(locks) => locks,
                    Err(error) => {
                        tracing::warn!(%error, "cannot read the Leases of blocks; trying again");
                        return RoundResult { again: again(RETRY), failures: 1 };
                    }
                };
                let (seen, plan) = self.decide(context, locks.clone());
                let is_broken = |problem: &&BlockProblem| matches!(problem, BlockProblem::Broken(_));
                for problem in plan.problems.iter().filter(is_broken) {
                    tracing::warn!(namespace = self.namespace, "{problem}");
                }
                tried = StepWriter::new(context, self.location, &self.namespace).apply(&plan.steps).await;
                self.locks = plan.steps.is_empty().then_some((locks, read_at));
                (seen, plan)
            }
        };
        let reported = self.report(context, &seen, &plan).await;
        if let Err(error) = &reported {
            tracing::warn!(%error, "cannot write the status of IPPools; trying again");
        }
        let (conflicts, failed) = (tried.conflicts, tried.failed + usize::from(reported.is_err()));
        let soon = conflicts + failed > 0 || !plan.steps.is_empty();
        let next = if soon { Some(RETRY) } else { plan.again.map(Duration::from_secs) };
        RoundResult { again: next.map(again).unwrap_or_default(), failures: failed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locks_are_read_once_when_idle_and_again_after_a_while_if_one_is_unreadable() {
        let mut duty = NodeBlocks::new(BlockLocation::CiliumNode, "x", BlockLimits::default());
        assert_eq!(duty.remembered(Duration::ZERO), None, "nothing was read");
        duty.locks = Some((LockList::default(), Duration::ZERO));
        assert_eq!(duty.remembered(Duration::MAX), Some(LockList::default()));
        let block = "10.1.2.0/24".parse().unwrap();
        let torn = UnreadableLock { block, object: "Lease".into(), uid: "u".into(), why: "torn".into() };
        let listed = LockList { broken: vec![torn], ..LockList::default() };
        duty.locks = Some((listed.clone(), Duration::ZERO));
        assert_eq!(duty.remembered(Duration::from_secs(1)), Some(listed));
        assert_eq!(duty.remembered(NodeBlocks::TICK.unwrap()), None, "a tick looks whether it was corrected");
    }
}
