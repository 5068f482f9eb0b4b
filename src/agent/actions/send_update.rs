//! `SendUpdate`: the API server learns what a verb could not send it, and the pending update is removed.

use super::context::{ActionContext, sandbox};
use super::outcome::{ActionError, ActionOutcome};
use super::{attach, detach_sandbox};
use crate::cluster::protocol::detach;
use crate::names::{AttachmentId, StickyKey};
use crate::store::{Disk, PendingUpdate, PendingUpdateKind};

/// Sends a pending update, and removes it if it needs no other attempt.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    name: &str,
    update: &PendingUpdate,
) -> Result<ActionOutcome, ActionError> {
    let outcome = match update.kind {
        PendingUpdateKind::Attached => send_attached(context, update).await?,
        PendingUpdateKind::Ended => send_detached(context, update).await?,
    };
    if let ActionOutcome::Done(_) | ActionOutcome::NotNeeded(_) = outcome {
        context.store()?.lock()?.remove_pending_update(name, update)?;
        context.metrics.pending_updates.inc();
    }
    Ok(outcome)
}

async fn send_attached<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    update: &PendingUpdate,
) -> Result<ActionOutcome, ActionError> {
    let Some(key) = key_of(update) else {
        return Ok(ActionOutcome::NotNeeded("the pending update names no StickyIP".into()));
    };
    attach::perform(context, &key, &sandbox(&AttachmentId::from(update.container.as_str()))?).await
}

async fn send_detached<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    update: &PendingUpdate,
) -> Result<ActionOutcome, ActionError> {
    let store = context.store()?;
    let mut ids = vec![AttachmentId::from(update.container.as_str())];
    ids.extend(update.attachment_id.clone());
    let key = match key_of(update) {
        Some(key) => Some(key),
        None => find(context, &ids).await?,
    };
    let Some(key) = key else {
        return Ok(ActionOutcome::NotNeeded("no StickyIP is attached to this sandbox".into()));
    };
    detach_sandbox::detach_ids(context, &store, &key, &ids).await
}

/// The StickyIP that is attached to this node by one of these ids, by a live read.
async fn find<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    ids: &[AttachmentId],
) -> Result<Option<StickyKey>, ActionError> {
    let api_writer = context.api_writer();
    for id in ids {
        if let Some(found) = detach::find(&api_writer, &context.settings.node, id).await? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

fn key_of(update: &PendingUpdate) -> Option<StickyKey> {
    Some(StickyKey { namespace: update.namespace.clone()?, name: update.name.clone()? })
}
