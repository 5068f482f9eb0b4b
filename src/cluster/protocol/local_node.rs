//! What binding needs from the node on which the pod runs, and why binding fails. Must never decide anything:
//! the node's store does.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use thiserror::Error;

use crate::alloc::Family;
use crate::cluster::api::client::ApiError;
use crate::cluster::protocol::step::{Candidate, Refusal};
use crate::cluster::view::Origin;
use crate::names::{AttachmentId, StickyKey};
use crate::policy::handover::{OldPod, OldSandbox};

/// The maximum number of writes of one bind. Each is either progress or a conflict; after this many the
/// others get time to finish.
pub(crate) const MAX_STEPS: usize = 64;

pub(crate) trait LocalNode {
    fn node(&self) -> &str;
    /// The IP families of the node's pods.
    /// Errors: the node has no block yet, so they are not known.
    fn families(&self) -> Result<Vec<Family>, BindError>;
    fn is_own(&self, address: IpAddr) -> bool;
    /// What is known of an old sandbox on this node, whose pod is in this state.
    fn old_sandbox(&mut self, id: &AttachmentId, pod: OldPod) -> Result<OldSandbox, BindError>;
    /// Called while the write that attaches these addresses is under way. The node may use the time for slow
    /// work that reserves nothing. Most likely the write succeeds.
    fn attaching(&mut self, _addresses: &[IpAddr]) {}
    /// Reserves any address of the node's own ranges for the claimant, durably; none if nothing is free.
    fn reserve_any(
        &mut self,
        family: Family,
        avoid: &BTreeSet<IpAddr>,
    ) -> Result<Option<Candidate>, BindError>;
    /// Reserves this address if it is in the node's own ranges, and returns its origin.
    /// Errors: the store fails, or the address is used on this node.
    fn reserve_this(&mut self, address: IpAddr) -> Result<Origin, BindError>;
}

#[derive(Debug, Error)]
pub enum BindError {
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("waited {timeout:?} for {what}")]
    Waited {
        what: String,
        timeout: Duration,
        /// The node whose agent alone can end the wait: it has prepared the address for a pod that is gone.
        agent_of: Option<String>,
    },
    #[error("StickyIP {key} or its claims were changed by others {MAX_STEPS} times in a row; try again")]
    TooManyConflicts { key: StickyKey },
    #[error("no {family} address is free, neither in a Sticky pool nor on this node; add a range to a pool")]
    Exhausted { family: Family },
    #[error(
        "CiliumNode {node} has no block for pods yet (spec.ipam.podCIDRs is empty), so the IP families of a \
         new address are not known; the controller fills it, or fill it by hand (docs/agent.md)"
    )]
    NoBlocks { node: String },
    #[error("{what} {name} is invalid: {why}; correct or delete it")]
    InvalidObject { what: &'static str, name: String, why: String },
    #[error("{0}")]
    LocalNode(String),
    #[error("{address} is used or kept on this node for {held_by}")]
    HeldOnNode { address: IpAddr, held_by: String },
}
