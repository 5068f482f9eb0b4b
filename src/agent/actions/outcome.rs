//! What an action can come to.

use thiserror::Error;

use crate::cluster::api::client::ApiError;
use crate::cluster::cilium::pool::PublishError;
use crate::cluster::protocol::{bind::BindError, detach::DetachError, sticky_identity::StickyIdentityError};
use crate::store::StoreError;

/// Why an action did not complete. It is planned again as long as its cause exists.
#[derive(Debug, Error)]
pub enum ActionError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Bind(#[from] BindError),
    #[error(transparent)]
    StickyIdentity(#[from] StickyIdentityError),
    #[error(transparent)]
    Publish(#[from] PublishError),
    #[error(transparent)]
    Detach(#[from] DetachError),
    /// The subject is the address, or the pod.
    #[error("cannot ask cilium-agent about {subject}: {reason}; is cilium-agent running on this node?")]
    Cilium { subject: String, reason: String },
    /// A name from an object or a file is not valid.
    #[error("{0}")]
    Name(String),
    /// Other writers changed the pod between every read and write.
    #[error("others changed pod {namespace}/{pod} during each of {tries} attempts")]
    PodChanged { namespace: String, pod: String, tries: usize },
    /// Something else has to happen first. [`perform`](super::perform) returns it as an outcome.
    #[error("{0}")]
    Postponed(String),
}

impl ActionError {
    /// The error of the API server in it.
    pub(crate) fn api(&self) -> Option<&ApiError> {
        match self {
            Self::Api(error)
            | Self::Bind(BindError::Api(error))
            | Self::StickyIdentity(StickyIdentityError::Api(error))
            | Self::Publish(PublishError::Api(error))
            | Self::Detach(DetachError::Api(error) | DetachError::Projection(PublishError::Api(error))) => {
                Some(error)
            }
            _ => None,
        }
    }
}

/// What came of an action; each with the reason, for the log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ActionOutcome {
    Done(String),
    /// Nothing was to be done: the state has changed since it was planned.
    NotNeeded(String),
    /// Something else has to happen first.
    Postponed(String),
    /// An operator has to act.
    NeedsAttention(String),
}

pub(crate) type Performed<T = ActionOutcome> = Result<T, ActionError>;

pub(super) fn done(reason: impl Into<String>) -> Performed {
    Ok(ActionOutcome::Done(reason.into()))
}

pub(super) fn not_needed(reason: impl Into<String>) -> Performed {
    Ok(ActionOutcome::NotNeeded(reason.into()))
}

pub(super) fn needs_attention(reason: impl Into<String>) -> Performed {
    Ok(ActionOutcome::NeedsAttention(reason.into()))
}

/// Ends the action, from any part of it.
pub(super) fn postponed<T>(reason: impl Into<String>) -> Performed<T> {
    Err(ActionError::Postponed(reason.into()))
}

/// An outcome that ends nothing: an action that publishes at its end is done without it.
pub(super) fn pool_is_locked() -> Performed {
    Ok(ActionOutcome::Postponed("another process changes its pool entries".into()))
}
