//! The duties of the controller, one file or folder per duty.
//! Must never rely on being leader for safety: every write has a precondition.

pub mod adoption;
pub mod dead_nodes;
pub mod drift;
pub mod duplicates;
pub mod endpoints;
pub mod gauges;
pub mod node_blocks;
pub mod recycling;
pub mod repair;
pub mod retention;
