//! Plain words in everything that a person reads: messages of the product, help texts, documents, scripts
//! (docs/glossary.md).

use std::fs;
use std::path::{Path, PathBuf};

/// Words that the glossary replaces. Lower case; a match is a whole word, in any case.
const OLD: &[&str] = &[
    "told",
    "whoever",
    "whosoever",
    "anew",
    "nought",
    "shall",
    "somebody",
    "nobody",
    "anybody",
    "everybody",
    "let go",
    "lets go",
    "letting go",
    "gives back",
    "given back",
    "in step",
    "one a family",
    "a line each",
    "one a line",
    "heir",
    "heirs",
    "deaf",
];

fn project() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A file's path in the project.
fn within(path: &Path) -> String {
    path.strip_prefix(project()).unwrap_or(path).to_string_lossy().into_owned()
}

/// All files of a folder that git would keep.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(files(&path));
        } else if path.is_file() && !path.is_symlink() {
            found.push(path);
        }
    }
    found
}

/// The product's part of a source file: what only tests compile stands at its end.
fn product(text: &str) -> &str {
    let tests = text.match_indices("#[cfg(test)]\n").find(|(at, mark)| {
        let next = text[at + mark.len()..].lines().find(|line| !line.trim_start().starts_with("#["));
        next.is_some_and(|line| line.trim_start().starts_with("mod ") && line.trim_end().ends_with('{'))
    });
    tests.map_or(text, |(at, _)| &text[..at])
}

/// The string literals of Rust code, each with its line, and the doc comments if they are shown to people.
fn shown(text: &str, with_docs: bool) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let bytes = text.as_bytes();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let rest = &text[at..];
        let step = if rest.starts_with("//") {
            let comment = rest.lines().next().unwrap_or_default();
            if with_docs && comment.starts_with("///") {
                found.push((line, comment[3..].to_owned()));
            }
            comment.len()
        } else if let Some(hashes) = raw_string(rest) {
            let open = hashes + 2;
            let close = format!("\"{}", "#".repeat(hashes));
            let length = rest[open..].find(&close).unwrap_or(rest.len() - open);
            found.push((line, rest[open..open + length].to_owned()));
            (open + length + close.len()).min(rest.len())
        } else if rest.starts_with('"') {
            let mut end = 1;
            while end < rest.len() && bytes[at + end] != b'"' {
                end += if bytes[at + end] == b'\\' { 2 } else { 1 };
            }
            found.push((line, text.get(at + 1..at + end).unwrap_or_default().to_owned()));
            end + 1
        } else if rest.starts_with("'\"'") {
            3
        } else if rest.starts_with("'\\\"'") {
            4
        } else {
            rest.chars().next().map_or(1, char::len_utf8)
        };
        let step = step.min(bytes.len() - at);
        line += bytes[at..at + step].iter().filter(|byte| **byte == b'\n').count();
        at += step;
    }
    found
}

/// How many `#` a raw string that begins here has.
fn raw_string(rest: &str) -> Option<usize> {
    let inner = rest.strip_prefix('r')?;
    let hashes = inner.bytes().take_while(|byte| *byte == b'#').count();
    inner[hashes..].starts_with('"').then_some(hashes)
}

/// The old words of a text.
fn old_words(text: &str) -> Vec<&'static str> {
    // One space between words, wherever lines end.
    let words: Vec<String> = text
        .split(|c: char| !c.is_alphanumeric() && c != '\'' && c != '_')
        .filter(|word| !word.is_empty())
        .map(|word| word.trim_end_matches("'s").trim_matches('\'').to_lowercase())
        .collect();
    let text = format!(" {} ", words.join(" "));
    OLD.iter().filter(|old| text.contains(&format!(" {old} "))).copied().collect()
}

/// Flags and fields of objects show their doc comments, as help and as descriptions.
fn shows_docs(path: &Path) -> bool {
    let text = within(path);
    text.contains("/flags") || text.contains("/objects/")
}

/// Everything that a person reads, as (file, line, text).
fn texts() -> Vec<(String, usize, String)> {
    let mut texts = Vec::new();
    let mut add = |path: &Path, line: usize, text: String| {
        texts.push((within(path), line, text));
    };
    for path in files(&project().join("src")) {
        let is_test = path.ends_with("tests.rs") || within(&path).contains("/tests/");
        if path.extension().is_some_and(|ending| ending == "rs") && !is_test {
            let text = fs::read_to_string(&path).unwrap();
            for (line, text) in shown(product(&text), shows_docs(&path)) {
                add(&path, line, text);
            }
        }
    }
    let scripts = |path: &PathBuf| {
        let name = within(path);
        let text = name.starts_with("tests/") && fs::read(path).is_ok_and(|bytes| bytes.starts_with(b"#!"));
        text || name.ends_with(".sh") || name.ends_with(".mk")
    };
    let mut plain: Vec<PathBuf> =
        ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "Makefile", ".ci/run"]
            .iter()
            .map(|name| project().join(name))
            .filter(|path| path.exists())
            .collect();
    plain.extend(
        files(&project().join("docs")).into_iter().filter(|path| path.extension().is_some_and(|e| e == "md")),
    );
    plain.extend(files(&project().join("install")));
    plain.extend(files(&project().join("packaging")));
    plain.extend(files(&project().join("tests")).into_iter().filter(scripts));
    for path in plain {
        // The glossary names what it replaces.
        if path.ends_with("docs/glossary.md") {
            continue;
        }
        let Ok(text) = fs::read_to_string(&path) else { continue };
        // A phrase may go over the end of a line, so a paragraph is one text.
        let mut line = 1;
        for paragraph in text.split("\n\n") {
            // What stands in `code` of a document is a name.
            let is_document = path.extension().is_some_and(|ending| ending == "md");
            let prose: String = paragraph.split('`').step_by(if is_document { 2 } else { 1 }).collect();
            add(&path, line, prose);
            line += paragraph.matches('\n').count() + 2;
        }
    }
    texts
}

#[test]
fn what_people_read_has_none_of_the_old_words() {
    let mut wrong = Vec::new();
    for (file, line, text) in texts() {
        let words = old_words(&text);
        if !words.is_empty() {
            wrong.push(format!("{file}:{line}: {}", words.join(", ")));
        }
    }
    assert!(wrong.is_empty(), "say it with the words of docs/glossary.md:\n{}", wrong.join("\n"));
}

#[test]
fn the_words_check_sees_strings_docs_and_phrases() {
    let text = "//! told\n/// told you\nconst A: &str = \"x \\\" anew\"; // nobody\nlet c = '\"'; let b = \
        r#\"in\n \"step\" \"#;\n";
    let seen: Vec<(usize, Vec<&str>)> =
        shown(text, true).into_iter().map(|(line, text)| (line, old_words(&text))).collect();
    assert_eq!(seen, [(2, vec!["told"]), (3, vec!["anew"]), (4, vec!["in step"])]);
    assert_eq!(old_words("Nobody's fault; they told_us so, a retold tale"), ["nobody"]);
    assert_eq!(
        product("a\n#[cfg(test)]\nmod tests;\nb\n#[cfg(test)]\nmod tests {\nc"),
        "a\n#[cfg(test)]\nmod tests;\nb\n"
    );
}

/// Words in `code` of the documents that look like a reason, a kind or a phase: `TwoWords`.
fn code_names(text: &str) -> Vec<&str> {
    let code = text.split('`').skip(1).step_by(2);
    code.filter(|word| {
        let capitals = word.chars().filter(char::is_ascii_uppercase).count();
        capitals > 1
            && word.starts_with(|c: char| c.is_ascii_uppercase())
            && word.chars().all(|c| c.is_ascii_alphabetic())
            && word.contains(|c: char| c.is_ascii_lowercase())
    })
    .collect()
}

#[test]
fn every_reason_kind_and_phase_that_a_document_names_exists() {
    let code: Vec<String> = ["src", "packaging", "tests"]
        .iter()
        .flat_map(|folder| files(&project().join(folder)))
        .filter_map(|path| fs::read_to_string(path).ok())
        .collect();
    let mut wrong = Vec::new();
    for path in
        files(&project().join("docs")).into_iter().filter(|path| path.extension().is_some_and(|e| e == "md"))
    {
        let text = fs::read_to_string(&path).unwrap();
        for name in code_names(&text) {
            if !code.iter().any(|file| file.contains(name)) {
                wrong.push(format!("{}: {name}", within(&path)));
            }
        }
    }
    assert!(wrong.is_empty(), "documents name what is not in the code:\n{}", wrong.join("\n"));
}

#[test]
fn the_check_of_names_sees_two_words_in_code_only() {
    let text = "`RangeOfAnother` and NotInCode, `StickyIP`, `TTL`, `--flag`, `spec.A`, `a`";
    assert_eq!(code_names(text), ["RangeOfAnother", "StickyIP"]);
}
