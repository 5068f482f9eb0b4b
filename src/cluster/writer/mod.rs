//! The writes to our objects and CiliumNodes, one at a time, each with its precondition. Must never decide
//! which write comes next.

pub mod apply;
mod status;
pub mod write;
