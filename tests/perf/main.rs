//! `make bench`: our plugin against its peers, turn by turn on the same machine in the same run; and what the
//! controller costs.
//!
//! Prints tables of ratios and writes them to docs/benchmarks.md. Asserts on nothing: a figure is for people,
//! and each row says what the bar is and whether it was met. The parts that are not named keep their tables.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::print_stdout, missing_docs)]

mod burst;
mod controller;
mod lab;
mod local;
mod measure;
mod report;
mod server;
mod support;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use sticky_ipam::agent::install;
use tempfile::TempDir;

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
                let bin = Installed::default();
                let plugins = local::Plugins {
                    ours: bin.by_the_agent(&path_from("STICKY_IPAM")),
                    host_local: bin.by_cp(&path_from("HOST_LOCAL")),
                };
                (report::LOCAL, local::ABOUT, local::rows(&plugins))
            }
            "cluster" => {
                let bin = Installed::default();
                let plugins = server::Plugins {
                    ours: bin.by_the_agent(&path_from("STICKY_IPAM")),
                    whereabouts: bin.by_cp(&support::api_server::Whereabouts::built()),
                };
                (report::CLUSTER, server::ABOUT, server::rows(&plugins))
            }
            "controller" => (
                report::CONTROLLER,
                controller::ABOUT,
                controller::rows(&path_from("STICKY_IPAM_CONTROLLER")),
            ),
            "lab" => (report::LAB, lab::ABOUT, lab::rows()),
            "burst" => (report::BURST, burst::ABOUT, burst::rows()),
            other => panic!("there is no part {other}; there are: local, cluster, controller, lab, burst"),
        };
        report::print_and_write(&heading, about, &rows);
    }
}

/// A folder of plugins as nodes have it. Each is there as its own installer leaves it: how a file was written
/// changes how soon a process starts from it.
struct Installed(TempDir);

impl Default for Installed {
    fn default() -> Self {
        Self(tempfile::tempdir().expect("a temporary folder"))
    }
}

impl Installed {
    fn place(&self, program: &Path) -> PathBuf {
        self.0.path().join(program.file_name().expect("a program has a name"))
    }

    fn by_the_agent(&self, program: &Path) -> PathBuf {
        let to = self.place(program);
        let (mut read, mut written) =
            (File::open(program).expect("it was built"), File::create(&to).unwrap());
        install::copy(&mut read, &mut written).expect("there is room");
        written.set_permissions(read.metadata().unwrap().permissions()).unwrap();
        to
    }

    fn by_cp(&self, program: &Path) -> PathBuf {
        let to = self.place(program);
        fs::copy(program, &to).expect("it was built, and there is room");
        to
    }
}

fn path_from(variable: &str) -> PathBuf {
    match std::env::var_os(variable) {
        Some(path) => PathBuf::from(path),
        None => panic!("{variable} is not set; run this by `make bench`, which builds what it needs"),
    }
}
