//! Any bytes: as a request, and as files of the store. The corpus is replayed, and mutated from a fixed seed,
//! so that a failure comes back with the same command.

// Whatever a fixture cannot do is a failed test, said by a panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs)]

mod entry;
mod mutate;

use std::fs;
use std::path::Path;

use mutate::Mutator;

/// How many mutants each corpus gets. Enough to meet every branch of the parsers, few enough for every build.
const MUTANTS: usize = 2_000;

fn corpus(kind: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(kind);
    let mut paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(paths.len() > 5, "the corpus {} is not there", folder.display());
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

fn replay(kind: &str, entry: fn(&[u8])) {
    let corpus = corpus(kind);
    for bytes in &corpus {
        entry(bytes);
    }
    let mut mutator = Mutator::new(0x5717_c4a9);
    for _ in 0..MUTANTS {
        entry(&mutator.mutant(&corpus));
    }
}

#[test]
fn any_request_is_answered_in_the_shape_of_the_specification() {
    replay("request", entry::request);
}

#[test]
fn any_files_in_the_store_neither_stop_an_add_nor_are_trusted() {
    replay("store", entry::store);
}
