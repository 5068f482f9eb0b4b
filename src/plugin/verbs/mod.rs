//! The verbs of the CNI specification, one file per verb.
//! Must never ask the API server: that is the part of [`cluster`](super::cluster).

pub(crate) mod add;
pub(crate) mod check;
pub(crate) mod del;
pub(crate) mod gc;
pub(crate) mod status;
pub(crate) mod wait;
