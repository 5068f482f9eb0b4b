//! What people call, as a black box: `sticky-ipam store`, install/install.sh, the demo without privileges,
//! and the conflists and documents that tell of them. Needs no privileges and no network.

#![allow(missing_docs)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test states what must hold by failing"
)]

#[cfg(feature = "agent")]
mod agent;
mod conflists;
mod demo;
mod documents;
mod install;
mod node;
#[cfg(all(feature = "agent", feature = "controller"))]
mod reference;
mod store_check;
mod store_import;
mod store_list;
mod style;
mod tools;
