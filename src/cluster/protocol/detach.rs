//! Detaches a sandbox that has ended: its addresses are unpublished from the node's CiliumNode, then its
//! StickyIP is detached.
//!
//! The caller has the pool lock of the claimant on the node. Must never unpublish an address whose
//! attachment, read live under that lock, is another sandbox's.

use kube::api::{Api, ListParams};
use thiserror::Error;

use crate::cluster::api::client::ApiError;
use crate::cluster::cilium::pool::{self, PublishConfig, PublishError};
use crate::cluster::objects::StickyIP;
use crate::cluster::protocol::{read::read_sticky, step};
use crate::cluster::view::StickyView;
use crate::cluster::writer::apply::{ApiWriter, Applied};
use crate::names::{AttachmentId, StickyKey};

/// How often others may change the StickyIP between our read and our write.
const MAX_TRIES: usize = 64;

#[derive(Debug, Error)]
pub enum DetachError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Projection(#[from] PublishError),
    #[error("StickyIP {key} was changed by others {MAX_TRIES} times in a row; try again")]
    TooManyConflicts { key: StickyKey },
}

/// A sandbox that was attached, and is no more.
#[derive(Debug)]
pub struct Detached {
    pub pod_uid: String,
    /// Its StickyIP as it is now.
    pub object: StickyIP,
}

/// Unpublishes and detaches the sandbox that the API server knows by one of these ids. `known` is the
/// StickyIP as it was just read. None: the StickyIP does not exist any more, or another sandbox is attached.
/// Errors: see [`DetachError`]; it can be tried again at any time.
pub(crate) async fn unpublish_and_detach(
    writer: &mut ApiWriter<'_>,
    node: &str,
    config: &PublishConfig,
    known: StickyIP,
    ids: &[AttachmentId],
) -> Result<Option<Detached>, DetachError> {
    let key = &StickyView::from(&known).key;
    let mut known = Some(known);
    for _ in 0..MAX_TRIES {
        if known.is_none() {
            known = read_sticky(writer, key).await?;
        }
        let Some(object) = known.take() else { return Ok(None) };
        let view = StickyView::from(&object);
        let ours = view.attached.as_ref().filter(|attached| attached.node == node);
        let ended = ours.and_then(|attached| ids.iter().find(|id| **id == attached.attachment_id));
        let write = ended.and_then(|ended| step::detach(&view, ended));
        let (Some(write), Some(attached)) = (write, ours) else { return Ok(None) };
        if !config.is_silent_about(&view.addresses) {
            pool::unpublish(writer, node, config, &view.addresses).await?;
        }
        match writer.apply(&write, Some(&object), "").await {
            Ok(Applied::Sticky(object)) => {
                return Ok(Some(Detached { pod_uid: attached.pod_uid.clone(), object: *object }));
            }
            Ok(_) => {}
            Err(error) if error.leaves_doubt() => {
                tracing::warn!(sticky_ip = %key, %error, "write in doubt; reading again")
            }
            Err(error) => return Err(error.into()),
        }
    }
    Err(DetachError::TooManyConflicts { key: key.clone() })
}

/// The StickyIP that is attached to this node under this id.
pub async fn find(
    writer: &ApiWriter<'_>,
    node: &str,
    id: &AttachmentId,
) -> Result<Option<StickyKey>, ApiError> {
    let api: Api<StickyIP> = Api::all(writer.api().client());
    let of_node = ListParams::default().fields(&format!("status.attachment.node={node}"));
    let listed = writer.api().read("list StickyIPs", || api.list(&of_node)).await?;
    let mut views = listed.items.iter().map(StickyView::from);
    let found = views.find(|view| view.attached.as_ref().is_some_and(|of| of.attachment_id == *id));
    Ok(found.map(|view| view.key))
}

/// Detaches a sandbox by its id, if it is attached, and publishes nothing. Returns the StickyIP as
/// it is then, if it exists.
pub(crate) async fn detach_id(
    writer: &mut ApiWriter<'_>,
    key: &StickyKey,
    id: &AttachmentId,
) -> Result<Option<StickyIP>, ApiError> {
    for _ in 0..MAX_TRIES {
        let Some(object) = read_sticky(writer, key).await? else { return Ok(None) };
        let Some(write) = step::detach(&StickyView::from(&object), id) else { return Ok(Some(object)) };
        match writer.apply(&write, Some(&object), "").await {
            Ok(Applied::Sticky(object)) => return Ok(Some(*object)),
            Ok(_) => {}
            Err(error) if error.leaves_doubt() => {}
            Err(error) => return Err(error),
        }
    }
    Err(ApiError::Away { what: format!("detach {id}"), why: "every write was a conflict".to_owned() })
}
