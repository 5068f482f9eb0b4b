//! The built plugin as a runtime sees it: environment and standard input in, one document and an exit status
//! out. Every case has a data directory of its own.

// Whatever a fixture cannot do is a failed test, said by a panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs)]

mod check_gc_status;
mod configuration;
mod delegate;
mod disk_trouble;
mod environment;
mod logs;
mod net;
mod parallel;
mod requested;
mod results;
mod sticky;
mod takeover;
mod tampered;
