//! What is read from and written to Cilium: the pool of a CiliumNode, the sync barrier, its socket, and how
//! it is set. Must never decide who is sticky.

pub mod barrier;
pub mod pool;
pub mod settings;
pub mod socket;
