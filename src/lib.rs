//! sticky-ipam: pods keep their addresses on unpatched Cilium.
//!
//! Each module uses only modules above it in this list; `tests/architecture` checks it:
//! - `names`: identities; `alloc` and `policy` decide, and know no clock, disk or network;
//! - `cni` speaks the CNI protocol; `store` remembers on the node, `cluster` in the API server;
//! - `runtime`: what agent and controller share as long-running programs;
//! - `plugin` carries out CNI verbs, `agent` keeps one node in sync, `controller` the cluster; `cli` is for
//!   people.

// The documentation is for those who work on this crate: it has the private items too (`make lint`).
#![allow(rustdoc::private_intra_doc_links)]
#![cfg_attr(not(test), warn(clippy::disallowed_methods, unreachable_pub))]
// The plugin alone uses a part of what is below it. The build of everything finds what nothing uses.
#![cfg_attr(not(all(feature = "agent", feature = "controller")), allow(dead_code, unused_imports))]

#[cfg(feature = "agent")]
pub mod agent;
pub mod alloc;
pub mod cli;
pub mod cluster;
pub mod cni;
#[cfg(feature = "controller")]
pub mod controller;
pub mod names;
pub(crate) mod node;
pub mod plugin;
pub mod policy;
#[cfg(any(feature = "agent", feature = "controller"))]
pub mod runtime;
pub mod store;
