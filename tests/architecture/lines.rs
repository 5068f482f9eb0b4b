//! Lines that fit beside each other on a screen: 110 columns, in code, comments and documents alike.

use std::fs;
use std::path::{Path, PathBuf};

/// The longest line.
const COLUMNS: usize = 110;

/// Folders and files that people write, below the project.
const WRITTEN: &[&str] =
    &["src", "tests", "docs", "conflist", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"];

/// What is recorded or fetched, not written.
const RECORDED: &[&str] = &["tests/fuzz/corpus", "docs/reference"];

fn collect(path: PathBuf, found: &mut Vec<PathBuf>) {
    if path.is_symlink() {
        return;
    }
    if path.is_dir() {
        for entry in fs::read_dir(&path).unwrap() {
            collect(entry.unwrap().path(), found);
        }
    } else if path.extension().is_some_and(|ending| ending == "rs" || ending == "md") {
        found.push(path);
    }
}

/// Whether a line may be longer: a table's row and an address cannot be broken, and rustfmt breaks code, all
/// but what stands in a macro.
fn is_unbreakable(path: &Path, line: &str) -> bool {
    let line = line.trim_start();
    let is_document = path.extension().is_some_and(|ending| ending == "md");
    let is_prose = if is_document { !line.starts_with(['|', '[']) } else { line.starts_with("//") };
    !is_prose || line.contains("://")
}

#[test]
fn lines_have_at_most_110_columns() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut paths = Vec::new();
    for written in WRITTEN {
        collect(project.join(written), &mut paths);
    }
    let mut long = Vec::new();
    for path in &paths {
        let name = path.strip_prefix(project).unwrap();
        if RECORDED.iter().any(|recorded| name.starts_with(recorded)) {
            continue;
        }
        for (at, line) in fs::read_to_string(path).unwrap().lines().enumerate() {
            let columns = line.chars().count();
            if columns > COLUMNS && !is_unbreakable(path, line) {
                long.push(format!("{}:{}: {columns} columns", name.display(), at + 1));
            }
        }
    }
    assert!(paths.len() > 300, "only {} files were found: the check does not see them", paths.len());
    assert!(long.is_empty(), "{} lines have more than {COLUMNS} columns:\n{}", long.len(), long.join("\n"));
}
