//! The cluster's part of the verbs: what ADD and the other verbs ask of the API server and of the agent's
//! files. Must never answer the runtime by itself.

pub(crate) mod add;
pub(crate) mod api;
pub(crate) mod bypass;
pub(crate) mod context;
pub(crate) mod del;
pub(crate) mod draft;
pub(crate) mod optimistic;
pub(crate) mod reads;
pub(crate) mod record;
pub(crate) mod seed;
