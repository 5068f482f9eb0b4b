//! `Detach`: a StickyIP is detached whose pod is gone and with which no sandbox of this node runs.
//!
//! Must never detach on what the watches show alone: every condition is read again, live or under the lock.

use super::context::{ActionContext, bound, interface};
use super::outcome::{ActionError, ActionOutcome};
use super::{detach_sandbox, live};
use crate::cluster::protocol::bind;
use crate::names::{AttachmentId, StickyKey};
use crate::store::{ClaimantKey, Disk};

/// Detaches a StickyIP whose pod is gone and with which no sandbox of this node runs.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    key: &StickyKey,
    id: &AttachmentId,
) -> Result<ActionOutcome, ActionError> {
    let store = context.store()?;
    let api_writer = context.api_writer();
    let found = bind::read_sticky(&api_writer, key).await?;
    let attachment = found.as_ref().and_then(|found| found.status.as_ref()?.attachment.clone());
    let Some(old) = attachment.filter(|old| old.node == context.settings.node && old.attachment_id == *id)
    else {
        return Ok(ActionOutcome::NotNeeded("another sandbox is attached, or none".into()));
    };
    if live::pod_exists(context, &key.namespace, &old.pod_name, &old.pod_uid).await? {
        return Ok(ActionOutcome::Postponed("its pod still exists".into()));
    }
    let own_claimant = ClaimantKey::new(&key.namespace, &old.pod_name, &interface()?);
    let Some(_lock) = context.try_claimant_lock(&store, &own_claimant)? else {
        return Ok(ActionOutcome::Postponed("an ADD of this pod is running".into()));
    };
    let current = store.lock()?.find_by_claimant(&bound(key)?)?;
    if current.is_some_and(|current| current.record.is_attached(store.now())) {
        return Ok(ActionOutcome::NotNeeded("a sandbox runs with it".into()));
    }
    let prepared = store.decisions()?.into_iter().filter_map(|decision| decision.sticky);
    if prepared.into_iter().any(|sticky| sticky.attachment_id == *id) {
        return Ok(ActionOutcome::NotNeeded("it is prepared for a pod".into()));
    }
    let outcome = detach_sandbox::detach_ids(context, &store, key, std::slice::from_ref(id)).await?;
    if let ActionOutcome::Done(_) = outcome {
        context.metrics.leaks.inc(["attachment"]);
    }
    Ok(outcome)
}
