//! How documents are written: one glossary for all of them.

use std::fs;
use std::path::{Path, PathBuf};

use crate::node::project;

/// More words than this and nobody learns them.
const MOST_WORDS: usize = 30;

fn text(name: &str) -> String {
    fs::read_to_string(project().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// All files below a folder of the project whose names end so.
fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    fn collect(folder: &Path, extension: &str, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                collect(&path, extension, found);
            } else if path.extension().is_some_and(|e| e == extension) {
                found.push(path);
            }
        }
    }
    let mut found = Vec::new();
    collect(&project().join(folder), extension, &mut found);
    found.sort();
    found
}

/// A file's path in the project.
fn shown(path: &Path) -> String {
    path.strip_prefix(project()).unwrap().display().to_string()
}

#[test]
fn every_page_links_the_glossary() {
    let top = ["README.md", "CONTRIBUTING.md", "conflist/README.md"].map(|name| project().join(name));
    for page in files("docs", "md").into_iter().chain(top) {
        let name = shown(&page);
        let text = fs::read_to_string(&page).unwrap();
        assert!(
            name == "docs/glossary.md" || text.contains("glossary.md)"),
            "{name} has no link to the glossary"
        );
    }
}

#[test]
fn the_glossary_stays_short() {
    let words = text("docs/glossary.md").lines().filter(|line| line.starts_with("| ")).count() - 1;
    assert!(words <= MOST_WORDS, "{words} words in docs/glossary.md");
}
