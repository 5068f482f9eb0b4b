//! What is read from and written to Cilium: its objects, the pool of a CiliumNode, the sync barrier, its
//! socket. Must never decide who is sticky.

pub mod barrier;
pub mod objects;
pub mod patch;
pub mod pool;
pub mod socket;
