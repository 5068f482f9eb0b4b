//! The part of the cluster in the verbs: what ADD and the other verbs ask of the API server and of the agent's files.
//! Must never answer the runtime by itself.

pub(crate) mod add;
pub(crate) mod addresses;
pub(crate) mod api;
pub(crate) mod del;
pub(crate) mod optimistic;
pub(crate) mod reads;
