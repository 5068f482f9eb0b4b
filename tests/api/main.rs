//! Tests against a real API server (`docs/testing.md`, "The API tier").

// Whatever the harness cannot do is a failed test, said by a panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, clippy::print_stdout)]

mod agent;
mod controller;
mod harness;
mod plugin;
mod protocol;
mod support;
