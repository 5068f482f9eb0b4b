//! The structure, checked: imports point one way only, and the folders that decide know no clock, disk or
//! network; and names of tests and the words that people read.

// Whatever a fixture cannot do is a failed test, said by a panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs)]

mod actions;
mod cycles;
mod lines;
mod names;
mod words;

use std::fs;
use std::path::{Path, PathBuf};

/// Every room, with the rooms that it may use. `bin` is where everything is put together.
const ROOMS: &[(&str, &[&str])] = &[
    ("names", &[]),
    ("alloc", &[]),
    ("policy", &["names", "alloc"]),
    ("cni", &["names", "alloc", "policy"]),
    ("store", &["names", "alloc", "policy"]),
    ("cluster", &["names", "alloc", "policy"]),
    ("node", &["names", "alloc", "policy", "store", "cluster"]),
    ("plugin", &["names", "alloc", "policy", "cni", "store", "cluster", "node"]),
    ("agent", &["names", "alloc", "policy", "cni", "store", "cluster", "node", "runtime"]),
    ("runtime", &["names", "alloc", "policy", "cluster"]),
    ("controller", &["names", "alloc", "policy", "cluster", "runtime"]),
    ("cli", &["names", "alloc", "policy", "cni", "store", "cluster"]),
];

/// The rooms that only decide.
const PURE: &[&str] = &["names", "alloc", "policy"];

/// Files of other folders that only decide. They know the cluster's objects, and nothing that changes by
/// itself.
const DECIDING: &[&str] = &[
    "agent/index.rs",
    "agent/plan/action.rs",
    "agent/plan/attachments.rs",
    "agent/plan/claims.rs",
    "agent/plan/debounce.rs",
    "agent/plan/decisions.rs",
    "agent/plan/demand.rs",
    "agent/plan/input.rs",
    "agent/plan/mac.rs",
    "agent/plan/mod.rs",
    "agent/plan/pending_updates.rs",
    "agent/plan/pool.rs",
    "agent/plan/records.rs",
    "controller/commands/adopt/plan/mod.rs",
    "controller/duties/node_blocks/view.rs",
];

/// What a pure room must not name.
const IMPURE: &[&str] = &[
    "std::fs",
    "std::io",
    "std::env",
    "std::process",
    "std::thread",
    "std::os",
    "SystemTime",
    "Instant",
    "TcpStream",
    "TcpListener",
    "UdpSocket",
    "UnixStream",
    "tokio",
    "kube::",
    "k8s_openapi",
    "nix::",
    "rand",
    "tracing",
];

/// The lines of a file that are code of the product: no comments, and nothing from the tests at its end.
fn code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line));
    lines
        .take_while(|(_, line)| line.trim() != "#[cfg(test)]")
        .filter(|(_, line)| !line.trim_start().starts_with("//"))
}

/// The rooms of ours that a line of the room's code names.
fn named(line: &str) -> Vec<String> {
    let mut rooms = Vec::new();
    for start in ["crate::", "sticky_ipam::"] {
        for (at, _) in line.match_indices(start) {
            let rest = &line[at + start.len()..];
            let many = rest.strip_prefix('{').map(|rest| rest.split('}').next().unwrap_or(rest));
            let names = many.map_or_else(|| vec![rest], |many| many.split(',').map(str::trim).collect());
            for name in names {
                let end = name.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(name.len());
                rooms.push(name[..end].to_owned());
            }
        }
    }
    rooms
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.extension().is_some_and(|ending| ending == "rs") {
            found.push(path);
        }
    }
    found
}

/// The product's files of a room: what is only compiled for tests is not part of the house.
fn of_room(room: &str) -> Vec<(PathBuf, String)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(room);
    let is_test = |path: &PathBuf| {
        let name = path.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
        name.ends_with("tests") || path.parent().is_some_and(|folder| folder.ends_with("tests"))
    };
    let product = files(&folder).into_iter().filter(|path| !is_test(path));
    product.map(|path| (path.clone(), fs::read_to_string(&path).unwrap())).collect()
}

#[test]
fn every_folder_is_in_the_table() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    for entry in fs::read_dir(source).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let planned = ROOMS.iter().any(|(room, _)| *room == name);
        let known = planned || ["bin", "lib.rs"].contains(&name.as_str());
        assert!(known, "src/{name} has no place in the plan: add it to ROOMS with what it may use");
    }
}

#[test]
fn imports_point_one_way_only() {
    for (room, may_use) in ROOMS {
        for (path, text) in of_room(room) {
            for (at, line) in code(&text) {
                for name in named(line) {
                    let is_room = ROOMS.iter().any(|(other, _)| *other == name);
                    let allowed = !is_room || name == *room || may_use.contains(&name.as_str());
                    assert!(allowed, "{}:{at}: {room} must not use {name}: {line}", path.display());
                }
            }
        }
    }
}

#[test]
fn what_decides_knows_no_clock_no_disk_and_no_network() {
    for room in PURE {
        let files = of_room(room);
        assert!(!files.is_empty(), "{room} is empty");
        for (path, text) in files {
            for (at, line) in code(&text) {
                let found = IMPURE.iter().find(|word| line.contains(*word));
                assert!(found.is_none(), "{}:{at}: {room} names {found:?}: {line}", path.display());
            }
        }
    }
}

#[test]
fn deciding_files_of_other_folders_get_time_and_facts_as_arguments() {
    for file in DECIDING {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(file);
        let text = fs::read_to_string(&path).unwrap();
        for (at, line) in code(&text) {
            let impure = IMPURE.iter().filter(|word| !["kube::", "k8s_openapi"].contains(word));
            let found = impure.into_iter().find(|word| line.contains(**word));
            assert!(found.is_none(), "{}:{at}: names {found:?}: {line}", path.display());
        }
    }
}

#[test]
fn only_binaries_print_or_exit() {
    for (room, _) in ROOMS.iter().filter(|(room, _)| *room != "cli") {
        for (path, text) in of_room(room) {
            for (at, line) in code(&text) {
                let found =
                    ["println!", "print!(", "process::exit", "io::stdout"].iter().find(|w| line.contains(*w));
                assert!(found.is_none(), "{}:{at}: {found:?} belongs into src/bin: {line}", path.display());
            }
        }
    }
}

#[test]
fn the_check_itself_sees_what_it_searches_for() {
    assert_eq!(named("use crate::{alloc::x, store};"), ["alloc", "store"]);
    assert_eq!(named("    let x = crate::plugin::run(sticky_ipam::cni::y);"), ["plugin", "cni"]);
    let text = "//! crate::plugin\nuse crate::store::X;\n#[cfg(test)]\nuse crate::plugin::Y;\n";
    assert_eq!(code(text).collect::<Vec<_>>(), [(2, "use crate::store::X;")]);
}

#[test]
fn every_folder_is_described_in_contributing() {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("CONTRIBUTING.md")).unwrap();
    for (room, _) in ROOMS {
        assert!(page.contains(&format!("`src/{room}`")), "CONTRIBUTING.md lacks the room {room}");
    }
}
