//! Names of tests: short enough to read in a list of failures, so one claim each.

use std::fs;
use std::path::Path;

use super::files;

/// The longest name of a test.
const LONGEST: usize = 80;

/// The names of a file's tests, with their lines.
fn tests(text: &str) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    let mut is_test = false;
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_test = true;
        } else if let Some((_, rest)) = line.split_once("fn ").filter(|_| is_test && !line.starts_with("//"))
        {
            found.push((at + 1, rest.split(['(', '<']).next().unwrap_or(rest)));
            is_test = false;
        }
    }
    found
}

#[test]
fn no_name_of_a_test_is_longer_than_eighty_characters() {
    let project = Path::new(env!("CARGO_MANIFEST_DIR"));
    let (mut count, mut long) = (0, Vec::new());
    for path in ["src", "tests"].iter().flat_map(|folder| files(&project.join(folder))) {
        let text = fs::read_to_string(&path).unwrap();
        let names = tests(&text);
        count += names.len();
        let over = names.into_iter().filter(|(_, name)| name.len() > LONGEST);
        long.extend(over.map(|(line, name)| format!("{}:{line}: {name} ({})", path.display(), name.len())));
    }
    assert!(count > 500, "only {count} tests were found: the check does not see them");
    assert!(
        long.is_empty(),
        "more than {LONGEST} characters; shorten it or make two tests:\n{}",
        long.join("\n")
    );
}

#[test]
fn the_names_check_sees_tests_of_both_kinds() {
    let text = "#[test]\n#[ignore]\nfn one() {}\nfn helper() {}\n#[tokio::test(x)]\nasync fn two() {}\n";
    assert_eq!(tests(text), [(3, "one"), (6, "two")]);
}
