//! How documents are written: one glossary for all of them, one layout for decisions, no file or target that
//! is not there.

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

/// The headings of a decision, in this order; the third is optional.
const DECISION: [&str; 4] = ["## Context", "## Choice", "## Considered instead", "## What was given up"];

#[test]
fn every_decision_has_the_same_layout() {
    let index = text("docs/README.md");
    for page in files("docs/decisions", "md") {
        let name = shown(&page);
        let text = fs::read_to_string(&page).unwrap();
        let file = page.file_name().unwrap().to_str().unwrap();
        let lines: Vec<&str> = text.lines().collect();
        let title = lines[0].strip_prefix("# ").unwrap_or_else(|| panic!("{name} has no title"));
        assert!(title.starts_with(&format!("{}: ", &file[..4])), "{name}: the title has another number");
        let (number, choice) = title.split_once(": ").unwrap();
        let row = format!("| [{number}](decisions/{file}) | {choice} |");
        assert!(index.contains(&row), "docs/README.md lacks {row}");
        let status = lines[2].strip_prefix("- Status: ").unwrap_or_else(|| panic!("{name} has no status"));
        let known = ["accepted", "replaced by ["].iter().any(|start| status.starts_with(start));
        assert!(known, "{name}: status {status:?}");
        let date = lines[3].strip_prefix("- Date: ").unwrap_or_else(|| panic!("{name} has no date"));
        assert!(date.len() == 10 && date.starts_with("20"), "{name}: date {date:?}");
        let headings: Vec<&str> = lines.iter().copied().filter(|line| line.starts_with("## ")).collect();
        let expected: Vec<&str> = DECISION
            .into_iter()
            .filter(|heading| *heading != DECISION[2] || headings.contains(heading))
            .collect();
        assert_eq!(headings, expected, "{name}");
    }
}

#[test]
fn every_make_target_of_a_workflow_exists() {
    let included: String =
        files("tests", "mk").iter().map(|path| fs::read_to_string(path).unwrap()).collect();
    let targets = text("Makefile") + &included;
    for workflow in files(".github/workflows", "yml") {
        let steps = fs::read_to_string(&workflow).unwrap();
        for call in steps.lines().filter_map(|line| line.split_once(" make ").map(|(_, call)| call)) {
            for target in call.split_whitespace().filter(|word| !word.contains('=')) {
                let there = targets.lines().any(|line| line.starts_with(&format!("{target}:")));
                assert!(there, "{}: there is no make target {target}", shown(&workflow));
            }
        }
    }
}

/// The paths below these folders that a text names.
fn paths<'t>(text: &'t str, folders: &[&str]) -> Vec<&'t str> {
    let part = |c: char| c.is_alphanumeric() || "_-./".contains(c);
    let words = text.split(|c| !part(c)).map(|word| word.trim_end_matches(['.', '/']));
    words.filter(|word| folders.iter().any(|folder| word.starts_with(folder))).collect()
}

#[test]
fn every_file_that_the_architecture_names_exists() {
    for page in ["docs/architecture.md", "CONTRIBUTING.md"] {
        let text = text(page);
        let named = paths(&text, &["src/", "tests/", "docs/", "packaging/"]);
        let named: Vec<&str> = named.into_iter().filter(|path| path.contains('.')).collect();
        assert!(named.len() > 10, "{page} names {} files", named.len());
        for path in named {
            assert!(project().join(path).exists(), "{page} names {path}, which is not there");
        }
    }
}

#[test]
fn contributing_names_every_folder() {
    let guide = text("CONTRIBUTING.md");
    for top in ["src", "tests"] {
        for entry in fs::read_dir(project().join(top)).unwrap() {
            let path = entry.unwrap().path();
            let folder = format!("`{}`", shown(&path));
            assert!(!path.is_dir() || guide.contains(&folder), "CONTRIBUTING.md lacks {folder}");
        }
    }
}
