//! Unpublishing and detaching a sandbox of this node that has ended.
//!
//! Must never detach what a newer sandbox of this node has, and never remove a pool entry before its endpoint
//! is gone.

use std::net::IpAddr;
use std::path::Path;

use super::context::try_pool_lock;
use super::outcome::pool_is_locked;
use super::{ActionContext, ActionError, ActionOutcome, Performed, bound, done, interface, not_needed};
use crate::names::{AttachmentId, StickyKey};
use crate::node::detach::{DetachOutcome, EndedSandbox};
use crate::node::{addresses::ThisNode, list};
use crate::store::{Disk, Store};

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Unpublishes and detaches a StickyIP that is attached to this node by one of these ids. That it has to
    /// wait is an outcome here: the callers count and log what they have done before.
    pub(super) async fn detach_ids(
        &self,
        store: &Store<D>,
        key: &StickyKey,
        ids: &[AttachmentId],
    ) -> Performed {
        let Some(_lock) = try_pool_lock(store, &bound(key)?)? else { return pool_is_locked() };
        let (name, may_exist) = (&self.settings.node, |path: &Path| self.may_exist(path));
        let this_node = ThisNode { name, store, netns_may_exist: &may_exist, on_attaching: &|_, _| {} };
        let sandbox = EndedSandbox { key, interface: &interface()?, ids, snapshot_for: None };
        let endpoint_gone = async |addresses: &[IpAddr]| self.require_no_endpoint(addresses).await;
        let (mut api_writer, shape) = (self.api_writer(), &self.options.shape);
        match this_node.detach(&mut api_writer, shape, &sandbox, endpoint_gone).await {
            Ok(DetachOutcome::Detached(detached)) => {
                done(format!("{} is detached", list(&detached.object.spec.addresses)))
            }
            Ok(DetachOutcome::NotAttached) => not_needed("another sandbox is attached, or none"),
            Ok(DetachOutcome::NoStickyIP) => not_needed("the StickyIP does not exist"),
            Ok(DetachOutcome::InUseBy(container)) => not_needed(format!("the sandbox {container} has it")),
            Err(ActionError::Postponed(reason)) => Ok(ActionOutcome::Postponed(reason)),
            Err(error) => Err(error),
        }
    }
}
