//! `SendUpdate`: the API server learns what a verb could not send it, and the pending update is removed.

use super::{ActionContext, ActionOutcome, Performed, attach, not_needed, sandbox};
use crate::cluster::protocol::detach;
use crate::names::{Attachment, AttachmentId, StickyKey};
use crate::node::end::{UpdateFirst, end_attachment};
use crate::store::{Disk, PendingUpdate, PendingUpdateKind, Store};

pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    name: &str,
    update: &PendingUpdate,
) -> Performed {
    let outcome = match update.kind {
        PendingUpdateKind::Attached => context.send_attached(update).await?,
        PendingUpdateKind::Ended => context.send_detached(update).await?,
    };
    if let ActionOutcome::Done(_) | ActionOutcome::NotNeeded(_) = outcome {
        context.store()?.lock()?.remove_pending_update(name, update)?;
        context.metrics.pending_updates.inc();
    }
    Ok(outcome)
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    async fn send_attached(&self, update: &PendingUpdate) -> Performed {
        let Some(key) = key_of(update) else { return not_needed("the pending update names no StickyIP") };
        attach::perform(self, &key, &sandbox(&update.container.as_str().into())?).await
    }

    async fn send_detached(&self, update: &PendingUpdate) -> Performed {
        let store = self.store()?;
        let mut ids = vec![AttachmentId::from(update.container.as_str())];
        ids.extend(update.attachment_id.clone());
        let key = match key_of(update) {
            None => self.find_attached(&ids).await?,
            key => key,
        };
        let Some(key) = key else { return not_needed("no StickyIP is attached to this sandbox") };
        end_record(&store, &sandbox(&update.container.as_str().into())?, update)?;
        self.detach_ids(&store, &key, &ids).await
    }

    /// The StickyIP that is attached to this node by one of these ids, by a live read.
    async fn find_attached(&self, ids: &[AttachmentId]) -> Performed<Option<StickyKey>> {
        let api_writer = self.api_writer();
        for id in ids {
            if let Some(found) = detach::find(&api_writer, &self.settings.node, id).await? {
                return Ok(Some(found));
            }
        }
        Ok(None)
    }
}

/// A DEL that ended between its pending update and the record has left the record as it was. A sandbox whose
/// pending update is gone since may have come again.
fn end_record<D: Disk>(store: &Store<D>, ended: &Attachment, update: &PendingUpdate) -> Performed<()> {
    let mut locked = store.lock()?;
    if locked.pending_update_of(ended)?.as_ref() == Some(update)
        && let Some(stored) = locked.find_by_attachment(ended)?
    {
        end_attachment(&mut locked, &stored, store.now(), UpdateFirst::IfOtherId)?;
        locked.commit()?;
    }
    Ok(())
}

fn key_of(update: &PendingUpdate) -> Option<StickyKey> {
    Some(StickyKey { namespace: update.namespace.clone()?, name: update.name.clone()? })
}
