//! `make bench`: our plugin against its peers, turn by turn on the same machine in the same run; and what the controller costs.
//!
//! Prints tables of ratios and writes them to docs/benchmarks.md. Asserts on nothing: a figure is for people, and
//! each row says what the bar is and whether it was met. The parts that are not named keep their tables.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, missing_docs)]

// The harnesses of the tests; each bench uses its own part of them.
#[allow(dead_code)]
#[path = "../lab/api.rs"]
mod api;
#[path = "../cluster/bench/mod.rs"]
mod bench;
#[allow(dead_code)]
#[path = "../lab/cluster.rs"]
mod cluster;
mod controller;
mod lab;
mod local;
mod measure;
mod report;
mod server;
#[allow(dead_code, unused_imports, unused_macros)]
#[path = "../lab/sticky/mod.rs"]
mod sticky;
#[allow(dead_code)]
#[path = "../lab/witness.rs"]
mod witness;

use std::path::PathBuf;

/// What is measured unless parts are named.
const WITHOUT_ROOT: [&str; 3] = ["local", "cluster", "controller"];

fn main() {
    let mut arguments: Vec<String> =
        std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    // A process of its own, because only its children's memory is asked for.
    if arguments.first().is_some_and(|first| first == "--memory-of") {
        measure::print_memory_of(&arguments[1..]);
        return;
    }
    if arguments.is_empty() {
        arguments = WITHOUT_ROOT.map(str::to_owned).into();
    }
    for part in arguments {
        let (heading, about, rows) = match &*part {
            "local" => {
                let plugins =
                    local::Plugins { ours: path_from("STICKY_IPAM"), host_local: path_from("HOST_LOCAL") };
                (report::LOCAL, local::ABOUT, local::rows(&plugins))
            }
            "cluster" => (report::CLUSTER, server::ABOUT, server::rows(&path_from("STICKY_IPAM"))),
            "controller" => (
                report::CONTROLLER,
                controller::ABOUT,
                controller::rows(&path_from("STICKY_IPAM_CONTROLLER")),
            ),
            "lab" => (report::LAB, lab::ABOUT, lab::rows()),
            other => panic!("there is no part {other}; there are: local, cluster, controller, lab"),
        };
        report::print_and_write(&heading, about, &rows);
    }
}

fn path_from(variable: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => panic!("{variable} is not set; run this by `make bench`, which builds what it needs"),
    }
}
