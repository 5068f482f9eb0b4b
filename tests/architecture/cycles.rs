//! No two modules of a folder use each other, neither directly nor by way of others: who reads one of them
//! can stop there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Modules that still use each other, by folder. This list must only shrink: a cycle that is gone fails the
/// test until its line is, too.
const KNOWN_CYCLES: &[(&str, &[&str])] = &[];

#[test]
fn no_modules_of_a_folder_use_each_other_in_a_cycle() {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut folders = vec![source.clone()];
    let mut found = Vec::new();
    while let Some(folder) = folders.pop() {
        let modules = modules(&folder);
        folders.extend(modules.values().filter(|path| path.is_dir()).cloned());
        let name = folder.strip_prefix(&source).unwrap().display().to_string();
        found
            .extend(cycles(&uses(&source, &folder, &modules)).into_iter().map(|cycle| (name.clone(), cycle)));
    }
    let known: Vec<(String, Vec<String>)> = KNOWN_CYCLES
        .iter()
        .map(|(folder, cycle)| ((*folder).to_owned(), cycle.iter().map(|name| (*name).to_owned()).collect()))
        .collect();
    let new: Vec<_> = found.iter().filter(|cycle| !known.contains(cycle)).collect();
    assert!(new.is_empty(), "modules that use each other; move what both need into a third one: {new:#?}");
    let gone: Vec<_> = known.iter().filter(|cycle| !found.contains(cycle)).collect();
    assert!(gone.is_empty(), "these cycles are gone; take them out of KNOWN_CYCLES: {gone:#?}");
}

/// The modules of a folder: files and folders, without what is only compiled for tests.
fn modules(folder: &Path) -> BTreeMap<String, PathBuf> {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let named = entries.filter_map(|path| {
        let name = path.file_stem()?.to_str()?.to_owned();
        let is_module = path.is_dir() || path.extension().is_some_and(|ending| ending == "rs");
        let is_product =
            !["mod", "lib", "tests", "bin"].contains(&name.as_str()) && !name.ends_with("_tests");
        (is_module && is_product).then_some((name, path))
    });
    named.collect()
}

/// Which module of a folder uses which other one.
fn uses(
    source: &Path,
    folder: &Path,
    modules: &BTreeMap<String, PathBuf>,
) -> BTreeMap<String, BTreeSet<String>> {
    let here = module_path(source, &folder.join("mod.rs"));
    let reexported = reexports(&folder.join("mod.rs"), modules);
    let mut edges = BTreeMap::new();
    for (name, path) in modules {
        let mut used = BTreeSet::new();
        let files = if path.is_dir() { super::files(path) } else { vec![path.clone()] };
        for file in files.iter().filter(|file| !is_test(file)) {
            let own = module_path(source, file);
            for path in paths(&fs::read_to_string(file).unwrap()) {
                let Some(target) = absolute(&own, &path) else { continue };
                let Some(next) = target.strip_prefix(here.as_slice()).and_then(<[String]>::first) else {
                    continue;
                };
                let next = if modules.contains_key(next) { Some(next) } else { reexported.get(next) };
                used.extend(next.filter(|next| *next != name).cloned());
            }
        }
        edges.insert(name.clone(), used);
    }
    edges
}

fn is_test(file: &Path) -> bool {
    let name = file.file_stem().and_then(|name| name.to_str()).unwrap_or_default();
    name.ends_with("tests") || file.components().any(|part| part.as_os_str() == "tests")
}

/// The module that a file of `src` is.
fn module_path(source: &Path, file: &Path) -> Vec<String> {
    let inside = file.strip_prefix(source).unwrap().with_extension("");
    let mut path: Vec<String> =
        inside.components().map(|part| part.as_os_str().to_str().unwrap().to_owned()).collect();
    path.pop_if(|last| last == "mod" || last == "lib");
    path
}

/// What the folder's own file hands on from its modules, by name: `use super::Name` is a use of that module.
fn reexports(file: &Path, modules: &BTreeMap<String, PathBuf>) -> BTreeMap<String, String> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let mut found = BTreeMap::new();
    for tree in trees(&product(&text), &["use "]) {
        for path in expanded(&tree) {
            let path: Vec<&str> = path.iter().map(String::as_str).filter(|part| *part != "self").collect();
            if let [module, .., name] = path[..]
                && modules.contains_key(module)
            {
                found.insert(name.to_owned(), module.to_owned());
            }
        }
    }
    found
}

/// The paths of ours that a file names, from `crate` or `super` on.
fn paths(text: &str) -> Vec<Vec<String>> {
    let trees = trees(&product(text), &["crate::", "super::"]);
    trees.iter().flat_map(|tree| expanded(tree)).collect()
}

/// Code without comments and without the tests at its end.
fn product(text: &str) -> String {
    super::code(text).map(|(_, line)| format!("{line}\n")).collect()
}

/// The pieces of code that begin with one of these words, as far as their braces reach.
fn trees(code: &str, starts: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let mut rest = code;
    while let Some(at) = starts.iter().filter_map(|start| rest.find(start)).min() {
        let begins_here = !rest[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == ':');
        let start = starts.iter().find(|start| rest[at..].starts_with(**start)).unwrap();
        let tree = &rest[at..];
        let tree = tree.strip_prefix("use ").unwrap_or(tree);
        let (mut depth, mut end) = (0_usize, tree.len());
        for (index, c) in tree.char_indices() {
            let opens = c == '{' && tree[..index].ends_with(|c| c == ':' || (depth > 0 && c != ')'));
            match c {
                '{' if opens => depth += 1,
                '}' if depth > 0 => depth -= 1,
                ' ' | '\n' | ',' | '*' if depth > 0 => {}
                c if c.is_alphanumeric() || c == '_' || c == ':' => {}
                _ => {
                    end = index;
                    break;
                }
            }
        }
        if begins_here {
            found.push(tree[..end].to_owned());
        }
        let passed = at
            + if begins_here { (rest[at..].len() - tree.len() + end).max(start.len()) } else { start.len() };
        rest = &rest[passed..];
    }
    found
}

/// A tree of imports, path by path.
fn expanded(tree: &str) -> Vec<Vec<String>> {
    let parts = |text: &str| -> Vec<String> {
        let parts = text.split("::").map(str::trim).filter(|part| !part.is_empty());
        parts.map(|part| part.split_whitespace().next().unwrap_or_default().to_owned()).collect()
    };
    let Some((before, inside)) = tree.split_once('{') else { return vec![parts(tree)] };
    let inside = inside.rsplit_once('}').map_or(inside, |(inside, _)| inside);
    let (mut depth, mut pieces) = (0_usize, vec![String::new()]);
    for c in inside.chars() {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            ',' if depth == 0 => {
                pieces.push(String::new());
                continue;
            }
            _ => {}
        }
        pieces.last_mut().unwrap().push(c);
    }
    let pieces = pieces.iter().filter(|piece| !piece.trim().is_empty());
    pieces.flat_map(|piece| expanded(piece)).map(|rest| [parts(before), rest].concat()).collect()
}

/// A path from the crate's root, seen from this module; none if it is of another crate.
fn absolute(own: &[String], path: &[String]) -> Option<Vec<String>> {
    let up = path.iter().take_while(|part| *part == "super").count();
    match path.first()?.as_str() {
        "crate" => Some(path[1..].to_vec()),
        "super" => Some([&own[..own.len().checked_sub(up)?], &path[up..]].concat()),
        _ => None,
    }
}

/// The groups of modules that reach each other.
fn cycles(edges: &BTreeMap<String, BTreeSet<String>>) -> Vec<Vec<String>> {
    let reached = |from: &String| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![from.clone()]);
        while let Some(next) = open.pop() {
            for to in edges.get(&next).into_iter().flatten() {
                if seen.insert(to.clone()) {
                    open.push(to.clone());
                }
            }
        }
        seen
    };
    let reach: BTreeMap<&String, BTreeSet<String>> = edges.keys().map(|name| (name, reached(name))).collect();
    let mut groups: BTreeSet<Vec<String>> = BTreeSet::new();
    for name in edges.keys().filter(|name| reach[name].contains(*name)) {
        let group = edges.keys().filter(|other| reach[name].contains(*other) && reach[*other].contains(name));
        groups.insert(group.cloned().collect());
    }
    groups.into_iter().collect()
}

#[test]
fn the_check_of_cycles_sees_what_it_looks_for() {
    let words = |path: &[&str]| path.iter().map(|part| (*part).to_owned()).collect::<Vec<_>>();
    let text =
        "use super::a::{self, b::{C, D}};\nfn f() -> crate::x::Y { super::super::z() }\n// super::no\n";
    let expected = [
        words(&["super", "a", "self"]),
        words(&["super", "a", "b", "C"]),
        words(&["super", "a", "b", "D"]),
        words(&["crate", "x", "Y"]),
        words(&["super", "super", "z"]),
    ];
    assert_eq!(paths(text), expected);
    assert_eq!(absolute(&words(&["m", "n"]), &words(&["super", "a", "C"])), Some(words(&["m", "a", "C"])));
    let edges = |all: &[(&str, &[&str])]| -> BTreeMap<String, BTreeSet<String>> {
        all.iter()
            .map(|(from, to)| ((*from).to_owned(), to.iter().map(|to| (*to).to_owned()).collect()))
            .collect()
    };
    assert_eq!(cycles(&edges(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])), Vec::<Vec<String>>::new());
    let found = cycles(&edges(&[("a", &["b"]), ("b", &["c"]), ("c", &["a"]), ("d", &["a"])]));
    assert_eq!(found, [words(&["a", "b", "c"])]);
}
