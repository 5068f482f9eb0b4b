//! What plugin and agent do alike on a node, written once, on the store and the cluster: the node's addresses
//! for a binding, binding a pod, publishing and detaching an attachment, ending it in the store, and
//! reserving in a new store what is claimed.
//!
//! Every step reads again before it writes, and says which precondition protects the write. A process that
//! ends between any two steps leaves what the next ADD, DEL or action of the agent continues or undoes. Must
//! never write the objects of another node, and never answer a runtime.

pub(crate) mod addresses;
pub(crate) mod bind;
pub(crate) mod detach;
pub(crate) mod end;
pub(crate) mod publish;
pub(crate) mod seed;

use std::net::IpAddr;

/// Addresses for a log or a message.
pub(crate) fn list(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}
