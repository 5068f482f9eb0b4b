//! The claim protocol: how an address is bound to a claimant, moves, and is released (docs/protocol.md).
//!
//! [`step::next`] and [`faults::find_faults`] are functions from what was read to the next write with its
//! precondition. The callers send one write at a time and read again. So a crash between any two writes
//! leaves a state from which the next caller of the same functions continues or undoes. What makes it safe is
//! the **seal**: an address may be used only through the StickyIP whose uid its claim names, and a sealed
//! claim is quarantined only after that uid is gone. Must never rely on time, leadership or cached state for
//! safety.

pub mod bind;
pub mod candidates;
pub mod detach;
pub mod faults;
pub mod local_node;
#[cfg(test)]
mod model;
pub mod read;
pub mod repair;
pub mod stale_nodes;
pub mod step;
pub mod sticky_identity;
#[cfg(test)]
mod tests;
