//! `DecideRunning`: the decision that a running pod is not sticky, which started without one: its next
//! sandbox needs no API server then.
//!
//! Must never decide for a sandbox that has a StickyIP, nor by what a watch or cache shows of a namespace.

use super::{ActionContext, Performed, done, interface, not_needed, own_claimant, postponed};
use super::{prepare, waiting_pod};
use crate::agent::snapshot::uid_of;
use crate::cluster::protocol::sticky_identity::{Stickiness, StickyIdentityError};
use crate::store::Disk;

pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    pod: &str,
    uid: &str,
) -> Performed {
    let Some(seen) = context.waiting_pod(pod, uid) else { return waiting_pod::replaced() };
    let identity = waiting_pod::identity(seen)?;
    let store = context.store()?;
    // A claim that adopts the pod is granted by this process, so not meanwhile; an ADD has the lock.
    let _claimant_lock = context.claimant_lock(&store, &own_claimant(&identity)?)?;
    if store.lock()?.find_decision(uid, &interface()?)?.is_some() {
        return not_needed("it is decided");
    }
    let mut records = store.address_files()?.into_iter().filter_map(|found| found.record);
    if records.any(|record| record.binding.is_some() && uid_of(&record) == Some(uid)) {
        return not_needed("the node has a record of its StickyIP");
    }
    match context.judge(seen, context.namespace(&seen.facts.namespace)).await {
        Ok(Stickiness::NotSticky { reason }) => {
            prepare::decide(&store, &identity, None, &reason.to_string())?;
            context.metrics.prepared.inc(["plain"]);
            done(format!("the running pod is not sticky: {reason}"))
        }
        Ok(Stickiness::Sticky { reason, .. }) => {
            postponed(format!("the running pod is sticky, and the controller adopts it: {reason}"))
        }
        Err(StickyIdentityError::Policy(error)) => postponed(error.to_string()),
        Err(error) => Err(error.into()),
    }
}
