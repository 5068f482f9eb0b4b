//! Publishing an attachment in the CiliumNode: its pool entry (`crd` mode) and, away from home, its route.
//!
//! Must never publish what is not attached to this node by a live read under the claimant's pool lock.

use crate::cluster::cilium::pool::{self, Publication, PublishConfig, PublishError};
use crate::cluster::objects::{Attachment as AttachmentStatus, StickyIP};
use crate::cluster::protocol::bind::read_sticky;
use crate::cluster::writer::apply::ApiWriter;
use crate::names::StickyKey;

pub(crate) enum Published {
    Written(Publication),
    /// The CiliumNode showed it before.
    AlreadyThere,
    /// By the live read the StickyIP is not attached, or to another sandbox or node.
    NotAttached,
    /// In this mode the CiliumNode shows nothing of these addresses.
    NothingToShow,
}

/// Publishes a StickyIP whose live attachment is the expected one.
///
/// The caller holds the claimant's pool lock: every unpublish of this node is done under it, so what is read
/// here as attached is not unpublished until this has returned. The patch of the pool needs no other
/// precondition; that of the routes has the resourceVersion of the CiliumNode, which has several writers.
/// Errors: see [`PublishError`]; if the server left doubt, the write may have happened.
pub(crate) async fn publish(
    api_writer: &mut ApiWriter<'_>,
    node: &str,
    config: &PublishConfig,
    key: &StickyKey,
    is_expected: impl Fn(&AttachmentStatus) -> bool,
) -> Result<Published, PublishError> {
    // A CiliumNode that was read before the lock is stale: an old sandbox may have been unpublished since.
    let (sticky, cilium_node) =
        tokio::join!(read_sticky(api_writer, key), pool::read_node(api_writer.api(), node));
    let attached = |sticky: &StickyIP| {
        let attachment = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
        attachment.is_some_and(&is_expected)
    };
    let Some(publication) = sticky?.filter(attached).and_then(|sticky| Publication::of(&sticky)) else {
        return Ok(Published::NotAttached);
    };
    if config.is_silent_about(&publication.addresses) {
        return Ok(Published::NothingToShow);
    }
    let before = api_writer.count();
    pool::publish(api_writer, node, config, &publication, cilium_node?).await?;
    Ok(if api_writer.count() == before { Published::AlreadyThere } else { Published::Written(publication) })
}
