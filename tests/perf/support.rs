//! The parts of `tests/support` that the benchmarks use. The tiers that own them use all of each, so only
//! here is a part dead.

#[allow(dead_code, unused_imports)]
#[path = "../support/api_server/mod.rs"]
pub mod api_server;
#[allow(dead_code)]
#[path = "../support/lab/mod.rs"]
pub mod lab;
