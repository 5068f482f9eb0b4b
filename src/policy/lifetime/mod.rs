//! How long an address is kept: retention, the proof that recycling needs, the owners of a workload.
//! Must never read a clock, a disk or a network.

pub mod duration;
pub mod owners;
pub mod recycle;
pub mod retention;
