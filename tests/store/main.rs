//! The store under a disk that fails: processes that end, disks that fill up, power that goes; and a model of
//! it against the real one. The verbs are driven through the library, with a disk and a clock of the test's
//! own.

// Whatever a fixture cannot do is a failed test, said by a panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs)]

mod crash;
mod faulty;
mod model;
mod power;
mod prepared;
mod recorder;
mod sight;
mod stage;
