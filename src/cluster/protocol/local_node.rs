//! What binding needs from the node on which the pod runs, and why binding fails. Must never decide anything:
//! the node's store does.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use thiserror::Error;

use crate::alloc::Family;
use crate::cluster::api::client::ApiError;
use crate::cluster::protocol::step::{Candidate, Refusal};
use crate::cluster::protocol::view::Origin;
use crate::names::{AttachmentId, StickyKey};
use crate::policy::handover::{OldPod, OldSandbox};

/// The maximum number of writes of one bind. Each is either progress or a conflict; after this many the
/// others get time to finish.
pub(crate) const MAX_STEPS: usize = 64;

/// The node of the pod: its name, its ranges and its store.
pub(crate) trait LocalNode {
    /// The node's name.
    fn node(&self) -> &str;
    /// The IP families of the node's pods.
    fn families(&self) -> Vec<Family>;
    /// Whether an address is in the node's own ranges.
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

/// Why a pod was not bound.
#[derive(Debug, Error)]
pub enum BindError {
    /// A request to the API server failed.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The protocol refuses it.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The old pod, a home node or a deletion took too long.
    #[error("waited {timeout:?} for {what}")]
    Waited {
        /// What was waited for.
        what: String,
        /// For how long.
        timeout: Duration,
    },
    /// Every write was a conflict.
    #[error("StickyIP {key} or its claims were changed by others {MAX_STEPS} times in a row; try again")]
    TooManyConflicts {
        /// The StickyIP.
        key: StickyKey,
    },
    /// Nothing is free.
    #[error("no {family} address is free, neither in a Sticky pool nor on this node; add a range to a pool")]
    Exhausted { family: Family },
    /// An object breaks its own rules.
    #[error("{what} {name} is invalid: {why}; correct or delete it")]
    InvalidObject {
        /// Its kind.
        what: &'static str,
        name: String,
        /// What is wrong.
        why: String,
    },
    /// The node's store failed.
    #[error("{0}")]
    LocalNode(String),
    /// The address is used on this node.
    #[error("{address} is used or kept on this node for {held_by}")]
    HeldOnNode {
        address: IpAddr,
        /// The sandbox or claimant that has it.
        held_by: String,
    },
}
