//! Tests against a real API server (`docs/testing.md`, "The API tier").

// Whatever the bench cannot do is a failed test, said by a panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, clippy::print_stdout)]

mod agent;
mod agent_crashes;
mod agent_crd;
mod agent_duties;
mod agent_install;
mod agent_leaks;
mod agent_mac;
mod agent_marking;
mod agent_weather;
mod bench;
mod bench_cleanup;
mod bench_identities;
mod bench_levers;
mod bench_peer;
mod blocks;
mod cilium;
mod clocks;
mod controller;
mod crashes;
mod crd;
mod desk;
mod drift;
mod dual_stack;
mod endpoints;
mod node;
mod objects;
mod plugin;
mod repair;
mod stale_memory;
mod takeover;
