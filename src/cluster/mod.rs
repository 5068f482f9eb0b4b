//! What is remembered in the API server: our objects, the little we touch of Cilium's, and the claim protocol.
//!
//! Decisions here are functions from what was read to the next write; carrying a write out belongs to a thin shell.
//! Must never hold a truth of its own: whatever is not in the API server is lost with the process.

pub mod agent_socket;
#[cfg(test)]
pub(crate) mod canned;
pub mod cilium;
pub mod claims;
pub mod client;
pub mod events;
pub mod lease;
pub mod leave;
pub mod memory;
pub mod objects;
pub mod pod;
pub mod projection;
pub mod sign;
mod wire;
