//! The parts of `tests/support` that the proofs on the lab use.

#[path = "../../support/lab/mod.rs"]
pub mod lab;
