//! `Reevaluate`: the decision that a pod is not sticky is removed if the pod is sticky by now.
//!
//! Must never remove a decision whose ADD has come.

use super::context::{ActionContext, interface};
use super::outcome::{ActionError, ActionOutcome};
use super::{cilium, waiting_pod};
use crate::agent::index::NodePod;
use crate::cluster::cilium::socket::{self, EndpointAnswer};
use crate::cluster::protocol::sticky_identity::{self, Stickiness, StickyIdentityError};
use crate::store::{ClaimantKey, Disk, Store};

/// Removes the decision that a pod is not sticky if it is by now, or if what it asks for cannot be followed:
/// pod, namespace or rules may have changed before its ADD came. Then it is prepared as any other.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    pod: &str,
    uid: &str,
) -> Result<ActionOutcome, ActionError> {
    let Some(seen) = waiting_pod::find(context, pod, uid) else { return Ok(waiting_pod::replaced()) };
    let (identity, store) = (waiting_pod::identity(seen)?, context.store()?);
    let Some(_claimant_lock) =
        context.try_claimant_lock(&store, &ClaimantKey::of_pod(&identity, &interface()?))?
    else {
        return Ok(ActionOutcome::Postponed("an ADD of this pod is running".into()));
    };
    if !store.decisions()?.iter().any(|decision| decision.uid == uid && decision.sticky.is_none()) {
        return Ok(ActionOutcome::NotNeeded("the decision is gone".into()));
    }
    if has_sandbox(context, &store, seen).await? {
        return Ok(ActionOutcome::Postponed("its ADD came first".into()));
    }
    let api = context.connection();
    let namespace = sticky_identity::of_namespace(&api, &seen.facts.namespace);
    let reason = match waiting_pod::judge(context, seen, namespace).await {
        Ok(Stickiness::NotSticky { reason }) => {
            return Ok(ActionOutcome::Postponed(format!("the pod is still not sticky: {reason}")));
        }
        Ok(Stickiness::Sticky { reason, .. }) => reason.to_string(),
        Err(StickyIdentityError::Policy(error)) => error.to_string(),
        Err(error) => return Err(error.into()),
    };
    store.lock()?.remove_decision_durably(uid)?;
    context.metrics.withdrawn.inc();
    Ok(ActionOutcome::Done(format!("the pod has changed since the decision: {reason}")))
}

/// Whether a pod that is not sticky has a sandbox. Where Cilium picks the addresses the pod has no record,
/// and cilium-agent knows.
async fn has_sandbox<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    store: &Store<D>,
    seen: &NodePod,
) -> Result<bool, ActionError> {
    if context.settings.mode.cilium_picks_the_address() {
        let (namespace, name) = (seen.facts.namespace.clone(), seen.facts.name.clone());
        let subject = format!("pod {namespace}/{name}");
        let asked = move |socket: &std::path::Path| socket::endpoint_of_pod(socket, &namespace, &name);
        return Ok(matches!(cilium::ask_cilium(context, &subject, asked).await?, EndpointAnswer::There(_)));
    }
    waiting_pod::has_record(store, seen)
}
