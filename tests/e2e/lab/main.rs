//! Proofs on a real cluster: Kubernetes and unpatched Cilium on two nodes of this machine (docs/lab.md).
//!
//! They need root, so `cargo test` alone does not run them; `make e2e` does. They run one after the other,
//! because a machine has one lab; a test says which lab it needs, and neighbours that need the same one share
//! it. They run in the order of their names, so modules are named such that those of one lab are neighbours.
//! They never touch a lab of someone else.

// All of it is test code: a helper fails the test that called it.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic)]

mod adoption;
mod chained;
mod cleaning;
mod controller;
mod delegated;
mod dual_stack;
mod field;
mod sticky;
mod stock;
mod support;
