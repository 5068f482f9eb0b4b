//! `Publish`: this node's CiliumNode shows a StickyIP that is attached here.

use super::context::ActionContext;
use super::outcome::{ActionError, ActionOutcome};
use crate::cluster::cilium::pool::Publication;
use crate::cluster::objects::Attachment as AttachmentStatus;
use crate::names::StickyKey;
use crate::node::list;
use crate::node::publish::{self, Published};
use crate::store::Disk;

/// Publishes a StickyIP that is attached to this node by a live read.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    key: &StickyKey,
) -> Result<ActionOutcome, ActionError> {
    let store = context.store()?;
    let Some(_lock) = context.pool_lock(&store, key)? else {
        return Ok(ActionOutcome::Postponed("another process changes its pool entries".into()));
    };
    let (node, mut api_writer) = (&context.settings.node, context.api_writer());
    let is_here = |attachment: &AttachmentStatus| attachment.node == *node;
    let published = publish::publish(&mut api_writer, node, &context.options.shape, key, is_here).await?;
    Ok(match published {
        Published::Written(publication) => {
            context.metrics.pool_writes.inc(["publish"]);
            let Publication { addresses, owner, .. } = publication;
            ActionOutcome::Done(format!("{} is published for {owner}", list(&addresses)))
        }
        Published::AlreadyThere => ActionOutcome::NotNeeded("it is published already".into()),
        Published::NotAttached => ActionOutcome::NotNeeded("it is not attached here any more".into()),
        Published::NothingToShow => {
            ActionOutcome::NotNeeded("the CiliumNode shows nothing of it in this mode".into())
        }
    })
}
