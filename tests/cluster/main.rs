//! Tests against a real API server (`docs/testing.md`, "The API tier").

// Whatever the bench cannot do is a failed test, said by a panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, clippy::print_stdout)]

mod bench;
mod bench_cleanup;
mod bench_identities;
mod bench_levers;
mod bench_peer;
mod blocks;
mod controller;
mod crashes;
mod desk;
mod drift;
mod endpoints;
mod node;
mod objects;
mod plugin;
mod repair;
mod takeover;
