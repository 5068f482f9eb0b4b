//! The claim protocol: how an address becomes a claimant's, moves, and is let go (docs/protocol.md).
//!
//! [`step::next`] and [`faults::find_faults`] are functions from what was read to the next write with its precondition.
//! A shell carries out one write at a time and reads again, so a crash between any two writes leaves a state from
//! which the same functions, run by whoever comes next, go on or undo. What makes it safe is the **seal**: an
//! address may be used only through the StickyIP whose uid its claim names, and a sealed claim is let go only after
//! that uid is gone for good. Must never rely on time, leadership or memory for safety.

pub mod apply;
pub mod bind;
pub mod candidates;
pub mod detach;
pub mod faults;
#[cfg(test)]
mod model;
pub mod repair;
pub mod stale_nodes;
pub mod step;
pub mod sticky_identity;
#[cfg(test)]
mod tests;
pub mod view;
pub mod write;

/// What the container id of an attachment begins with that was made for a running pod.
pub const ADOPTED: &str = "adopted-";

/// The container id under which a StickyIP is attached to a pod that ran before it was bound.
#[must_use]
pub fn adopted(pod_uid: &str) -> String {
    format!("{ADOPTED}{pod_uid}")
}
