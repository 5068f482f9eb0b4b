//! sticky-ipam: pods keep their addresses on unpatched Cilium.
//!
//! The rooms of the house, each knowing only those to its left:
//! `alloc` and `policy` decide and know no clock, disk or network; `cni` speaks the protocol, `store` remembers
//! on the node, `cluster` remembers in the API server; `process` is what long-running parts have in common; `plugin` carries
//! out, `agent` keeps a node and `controller` the cluster in step, and `cli` is what people call.

#[cfg(feature = "agent")]
pub mod agent;
pub mod alloc;
pub mod cli;
pub mod cluster;
pub mod cni;
#[cfg(feature = "controller")]
pub mod controller;
pub(crate) mod names;
pub mod plugin;
pub mod policy;
#[cfg(any(feature = "agent", feature = "controller"))]
pub mod runtime;
pub mod store;
