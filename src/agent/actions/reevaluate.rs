//! `Reevaluate`: the decision that a pod is not sticky is removed if it is by now, or if what it asks for
//! cannot be followed: pod, namespace or rules may have changed before its ADD came. Then it is prepared as
//! any other.
//!
//! Must never remove a decision whose ADD has come.

use super::{ActionContext, Performed, done, not_needed, own_claimant, postponed, waiting_pod};
use crate::agent::index::NodePod;
use crate::cluster::protocol::sticky_identity::{Stickiness, StickyIdentityError};
use crate::store::{Disk, Store};

pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    pod: &str,
    uid: &str,
) -> Performed {
    let Some(seen) = context.waiting_pod(pod, uid) else { return waiting_pod::replaced() };
    let store = context.store()?;
    let _claimant_lock = context.claimant_lock(&store, &own_claimant(&waiting_pod::identity(seen)?)?)?;
    if !store.decisions()?.iter().any(|decision| decision.uid == uid && decision.sticky.is_none()) {
        return not_needed("the decision is gone");
    }
    if context.has_sandbox(&store, seen).await? {
        return postponed("its ADD came first");
    }
    let reason = match context.judge(seen, context.namespace(&seen.facts.namespace)).await {
        Ok(Stickiness::NotSticky { reason }) => {
            return postponed(format!("the pod is still not sticky: {reason}"));
        }
        Ok(Stickiness::Sticky { reason, .. }) => reason.to_string(),
        Err(StickyIdentityError::Policy(error)) => error.to_string(),
        Err(error) => return Err(error.into()),
    };
    store.lock()?.remove_decision_durably(uid)?;
    context.metrics.withdrawn.inc();
    done(format!("the pod has changed since the decision: {reason}"))
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Whether a pod that is not sticky has a sandbox. Where Cilium picks the addresses the pod has no
    /// record, and cilium-agent knows.
    async fn has_sandbox(&self, store: &Store<D>, seen: &NodePod) -> Performed<bool> {
        if !self.settings.mode.cilium_picks_the_address() {
            return waiting_pod::has_record(store, seen);
        }
        Ok(self.endpoint_of_pod(&seen.facts.namespace, &seen.facts.name).await?.is_some())
    }
}
