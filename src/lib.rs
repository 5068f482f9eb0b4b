//! sticky-ipam: pods keep their addresses on unpatched Cilium.
//!
//! The rooms of the house, each knowing only those to its left:
//! `alloc` and `policy` decide and know no clock, disk or network; `cni` speaks the protocol, `store` remembers
//! on the node, `cluster` remembers in the API server; `process` is what long-running parts have in common; `plugin` and
//! `controller` carry out, and `cli` is what people call.

pub mod alloc;
pub mod cli;
#[cfg(feature = "cluster")]
pub mod cluster;
pub mod cni;
#[cfg(feature = "controller")]
pub mod controller;
pub mod plugin;
pub mod policy;
#[cfg(feature = "controller")]
pub mod process;
pub mod store;
