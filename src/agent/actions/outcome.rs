//! What an action can come to.

use thiserror::Error;

use crate::cluster::api::client::ApiError;
use crate::cluster::cilium::pool::PublishError;
use crate::cluster::protocol::bind::BindError;
use crate::cluster::protocol::detach::DetachError;
use crate::cluster::protocol::sticky_identity::StickyIdentityError;
use crate::store::StoreError;

/// Why an action did not complete. It is planned again as long as its cause exists.
#[derive(Debug, Error)]
pub enum ActionError {
    /// The node's store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A request to the API server failed.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// A pod could not be bound.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// It cannot be decided whether a pod is sticky.
    #[error(transparent)]
    StickyIdentity(#[from] StickyIdentityError),
    /// The node's CiliumNode could not be changed.
    #[error(transparent)]
    Publish(#[from] PublishError),
    /// A sandbox could not be detached.
    #[error(transparent)]
    Detach(#[from] DetachError),
    /// cilium-agent did not answer.
    #[error("cannot ask cilium-agent about {subject}: {reason}; is cilium-agent running on this node?")]
    Cilium {
        /// The address, or the pod.
        subject: String,
        /// What happened.
        reason: String,
    },
    /// A name from an object or a file is not valid.
    #[error("{0}")]
    Name(String),
    /// Other writers changed the pod between every read and write.
    #[error("others changed pod {namespace}/{pod} during each of {tries} attempts")]
    PodChanged {
        namespace: String,
        /// Its name.
        pod: String,
        /// How often it was tried.
        tries: usize,
    },
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
