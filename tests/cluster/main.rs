//! Tests against a real API server (`docs/testing.md`, "The API tier").

// Whatever the bench cannot do is a failed test, said by a panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, clippy::print_stdout)]

mod admission;
mod agent;
mod agent_crashes;
mod agent_crd;
mod agent_duties;
mod agent_giving_back;
mod agent_install;
mod agent_leaks;
mod agent_mac;
mod agent_marking;
mod agent_notes;
mod agent_weather;
mod ahead;
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
mod deleted;
mod desk;
mod disk_crashes;
mod doubles;
mod drift;
mod dual_stack;
mod endpoints;
mod ends;
mod node;
mod objects;
mod outages;
mod plugin;
mod repair;
mod selection;
mod stale_memory;
mod takeover;
