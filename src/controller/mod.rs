//! The cluster's controller: who is sticky, what is let go, what is repaired. One of several replicas works, elected on a Lease.
//!
//! Watches feed a synchronous [`index`]; each duty is a file of its own that decides by a pure function from the index and
//! carries out by [`act`]. Must never rely on being the only one: every write has a precondition, and what proves
//! something is read live.

pub mod act;
pub mod blocks;
pub mod endpoints;
pub mod index;
pub mod metrics;
pub mod queue;
pub mod settings;
pub mod survey;
pub mod tell;
pub mod world;
