//! Unpublishing and detaching a sandbox of this node that has ended.
//!
//! Must never detach what a newer sandbox of this node has, and never remove a pool entry before its endpoint
//! is gone.

use std::net::IpAddr;
use std::path::Path;

use super::cilium;
use super::context::{ActionContext, interface};
use super::outcome::{ActionError, ActionOutcome};
use crate::cluster::protocol::detach::DetachError;
use crate::names::{AttachmentId, StickyKey};
use crate::node::addresses::ThisNode;
use crate::node::detach::{DetachOutcome, EndedSandbox};
use crate::node::list;
use crate::store::{Disk, Store, StoreError};

/// Unpublishes and detaches a StickyIP that is attached to this node by one of these ids.
pub(super) async fn detach_ids<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    store: &Store<D>,
    key: &StickyKey,
    ids: &[AttachmentId],
) -> Result<ActionOutcome, ActionError> {
    let Some(_lock) = context.pool_lock(store, key)? else {
        return Ok(ActionOutcome::Postponed("another process changes its pool entries".into()));
    };
    let (node, may_exist) = (&context.settings.node, |path: &Path| context.may_exist(path));
    let this_node = ThisNode { name: node, store, netns_may_exist: &may_exist, on_attaching: &|_, _| {} };
    let sandbox = EndedSandbox { key, interface: &interface()?, ids, snapshot_for: None };
    let endpoint_gone =
        async |addresses: &[IpAddr]| match cilium::postponed_by_cilium(context, addresses).await? {
            Some(postponed) => Err(DetachStop::Postponed(postponed)),
            None => Ok(()),
        };
    let detached =
        this_node.detach(&mut context.api_writer(), &context.options.shape, &sandbox, endpoint_gone).await;
    Ok(match detached {
        Ok(DetachOutcome::Detached(detached)) => {
            ActionOutcome::Done(format!("{} is detached", list(&detached.object.spec.addresses)))
        }
        Ok(DetachOutcome::NotAttached) => {
            ActionOutcome::NotNeeded("another sandbox is attached, or none".into())
        }
        Ok(DetachOutcome::NoStickyIP) => ActionOutcome::NotNeeded("the StickyIP does not exist".into()),
        Ok(DetachOutcome::InUseBy(container)) => {
            ActionOutcome::NotNeeded(format!("the sandbox {container} has it"))
        }
        Err(DetachStop::Postponed(postponed)) => postponed,
        Err(DetachStop::Failed(error)) => return Err(error),
    })
}

/// Why a detach stopped before its first write, or failed.
enum DetachStop {
    Postponed(ActionOutcome),
    Failed(ActionError),
}

impl From<ActionError> for DetachStop {
    fn from(error: ActionError) -> Self {
        Self::Failed(error)
    }
}

impl From<StoreError> for DetachStop {
    fn from(error: StoreError) -> Self {
        Self::Failed(error.into())
    }
}

impl From<DetachError> for DetachStop {
    fn from(error: DetachError) -> Self {
        Self::Failed(error.into())
    }
}
