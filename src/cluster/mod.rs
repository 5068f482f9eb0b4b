//! Everything that is kept in the API server: our objects, the few fields that we use of Cilium's, and the
//! claim protocol.
//!
//! Decisions are pure functions from what was read to the next write; thin callers send the writes. Must
//! never keep state of its own: what is not in the API server is lost with the process.

pub mod api;
pub mod cilium;
pub mod events;
pub mod objects;
pub mod pod;
pub mod protocol;
pub mod view;
pub mod writer;
