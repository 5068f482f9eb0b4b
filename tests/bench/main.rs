//! `make bench`: our plugin against its peers, turn by turn on the same machine in the same run.
//!
//! Prints a table of ratios and writes it to docs/benchmarks.md. Asserts on nothing: a figure is for people, and
//! each row says what the bar is and whether it was met.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, missing_docs)]

mod local;
mod measure;
mod report;

use std::path::PathBuf;

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    // A process of its own, because only its children's memory is asked for.
    if arguments.next().as_deref() == Some("--memory-of") {
        measure::print_memory_of(&arguments.collect::<Vec<_>>());
        return;
    }
    let plugins = local::Plugins { ours: path_from("STICKY_IPAM"), host_local: path_from("HOST_LOCAL") };
    let rows = local::rows(&plugins);
    report::print_and_write(&rows);
}

fn path_from(variable: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => panic!("{variable} is not set; run this by `make bench`, which builds what it needs"),
    }
}
