//! The part of the cluster in the verbs: what ADD and the other verbs ask of the API server and of the agent's files.
//! Must never answer the runtime by itself.

#[cfg(feature = "cluster")]
pub(crate) mod add;
#[cfg(feature = "cluster")]
pub(crate) mod addresses;
#[cfg(feature = "cluster")]
pub(crate) mod api;
#[cfg(feature = "cluster")]
pub(crate) mod del;
#[cfg(feature = "cluster")]
pub(crate) mod optimistic;
#[cfg(feature = "cluster")]
pub(crate) mod reads;
