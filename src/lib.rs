//! sticky-ipam: pods keep their addresses on unpatched Cilium.
//!
//! The rooms of the house, each knowing only those to its left:
//! `alloc` and `policy` decide and know no clock, disk or network; `cni` speaks the protocol, `store` remembers
//! on the node, `cluster` remembers in the API server; `plugin` carries out, `agent` keeps a node in step, and `cli` is
//! what people call.

#[cfg(feature = "agent")]
pub mod agent;
pub mod alloc;
pub mod cli;
#[cfg(feature = "cluster")]
pub mod cluster;
pub mod cni;
pub mod plugin;
pub mod policy;
pub mod store;
