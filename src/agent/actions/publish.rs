//! `Publish`: this node's CiliumNode shows a StickyIP that is attached here by a live read.

use super::context::try_pool_lock;
use super::outcome::pool_is_locked;
use super::{ActionContext, Performed, bound, done, not_needed};
use crate::cluster::cilium::pool::Publication;
use crate::cluster::objects::Attachment as AttachmentStatus;
use crate::names::StickyKey;
use crate::node::list;
use crate::node::publish::{self, Published};
use crate::store::Disk;

pub(super) async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, key: &StickyKey) -> Performed {
    let store = context.store()?;
    let Some(_lock) = try_pool_lock(&store, &bound(key)?)? else { return pool_is_locked() };
    let (node, mut api_writer) = (&context.settings.node, context.api_writer());
    let is_here = |attachment: &AttachmentStatus| attachment.node == *node;
    let published = publish::publish(&mut api_writer, node, &context.options.shape, key, is_here).await?;
    match published {
        Published::Written(Publication { addresses, owner, .. }) => {
            context.metrics.pool_writes.inc(["publish"]);
            done(format!("{} is published for {owner}", list(&addresses)))
        }
        Published::AlreadyThere => not_needed("it is published already"),
        Published::NotAttached => not_needed("it is not attached here any more"),
        Published::NothingToShow => not_needed("the CiliumNode shows nothing of it in this mode"),
    }
}
