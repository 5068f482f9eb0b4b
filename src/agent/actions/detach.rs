//! `Detach`: a StickyIP is detached whose pod is gone and with which no sandbox of this node runs.
//!
//! Must never detach on what the watches show alone: every condition is read again, live or under the lock.

use super::{ActionContext, ActionOutcome, Performed, bound, interface, not_needed, postponed};
use crate::cluster::protocol::bind;
use crate::names::{AttachmentId, StickyKey};
use crate::store::{ClaimantKey, Disk};

pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    key: &StickyKey,
    id: &AttachmentId,
) -> Performed {
    let store = context.store()?;
    let found = bind::read_sticky(&context.api_writer(), key).await?;
    let attachment = found.and_then(|found| found.status?.attachment);
    let Some(old) = attachment.filter(|old| old.node == context.settings.node && old.attachment_id == *id)
    else {
        return not_needed("another sandbox is attached, or none");
    };
    if context.pod_exists(&key.namespace, &old.pod_name, &old.pod_uid).await? {
        return postponed("its pod still exists");
    }
    let own_claimant = ClaimantKey::new(&key.namespace, &old.pod_name, &interface()?);
    let _lock = context.claimant_lock(&store, &own_claimant)?;
    let current = store.lock()?.find_by_claimant(&bound(key)?)?;
    if current.is_some_and(|current| current.record.is_attached(store.now())) {
        return not_needed("a sandbox runs with it");
    }
    let mut prepared = store.decisions()?.into_iter().filter_map(|decision| decision.sticky);
    if prepared.any(|sticky| sticky.attachment_id == *id) {
        return not_needed("it is prepared for a pod");
    }
    let outcome = context.detach_ids(&store, key, std::slice::from_ref(id)).await?;
    if let ActionOutcome::Done(_) = outcome {
        context.metrics.leaks.inc(["attachment"]);
    }
    Ok(outcome)
}
