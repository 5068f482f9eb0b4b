//! What is remembered in the API server: our objects, the little we touch of Cilium's, and the claim protocol.
//!
//! Decisions here are functions from what was read to the next write; carrying a write out belongs to a thin shell.
//! Must never hold a truth of its own: whatever is not in the API server is lost with the process.

pub mod api;
pub mod cilium;
pub mod objects;
pub mod pod;
pub mod protocol;
