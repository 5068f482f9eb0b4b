//! What the documents say can be done, and what they point to is there.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use crate::node::{Ended, Node, PLUGIN, project};

fn text(name: &str) -> String {
    fs::read_to_string(project().join(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// Every document of the project.
fn documents() -> Vec<PathBuf> {
    let folders =
        ["", "docs", "docs/decisions", "docs/operate", "conflist"].map(|folder| project().join(folder));
    let files = folders.iter().flat_map(|folder| fs::read_dir(folder).unwrap());
    files
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "md"))
        .collect()
}

/// The shell blocks of the README, in order.
fn blocks() -> Vec<String> {
    let readme = text("README.md");
    readme.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap().to_owned()).collect()
}

/// Runs a script as root of its own mounts and network, over empty folders where the README installs.
fn in_an_empty_machine(script: &str) -> Ended {
    let prepare = "set -euo pipefail
        for folder in /opt /etc/cni /var/lib /run; do
            [[ ! -d $folder ]] || mount -t tmpfs none $folder
        done
        mkdir -p /opt/cni/bin /etc/cni/net.d /var/lib/cni /run/netns
        ip link set lo up";
    let mut unshare = Command::new("unshare");
    unshare.args(["--mount", "--net", "--propagation", "private"]);
    if !nix::unistd::geteuid().is_root() {
        unshare.args(["--user", "--map-root-user"]);
    }
    let output = unshare
        .args(["bash", "-c", &format!("{prepare}\n{script}")])
        .current_dir(project())
        .env_remove("CNI_COMMAND")
        .output()
        .unwrap();
    Ended::of(&output)
}

#[test]
fn the_two_commands_come_first() {
    assert_eq!(blocks()[0], "make demo\nmake test\n");
    let makefile = text("Makefile");
    assert!(makefile.contains("\ndemo: ## ") && makefile.contains("tests/demo/demo"), "{makefile}");
}

#[test]
fn the_quick_start_of_the_readme_works_as_it_stands() {
    let tools = Command::new(project().join("tests/tools/build")).arg("cni").output().unwrap();
    Ended::of(&tools).well();
    let [_, start, look_after] = blocks().try_into().unwrap();
    // The release is built by `make plugin`, which takes its time; here the plugin under test stands in for
    // it.
    assert!(start.starts_with("make plugin\n"), "{start}");
    let script = format!("{start}\necho ---\n{look_after}")
        .replace("make plugin\n", "")
        .replace("install.sh install\n", &format!("install.sh install --plugin {PLUGIN}\n"))
        .replace("install.sh upgrade\n", &format!("install.sh upgrade --plugin {PLUGIN}\n"));
    let ended = in_an_empty_machine(&script).well();
    let addresses: Vec<&str> = ended.stdout.lines().filter(|line| line.contains("\"address\": ")).collect();
    assert_eq!(addresses.len(), 2, "{ended:?}");
    assert_eq!(addresses[0], addresses[1], "the pod's address changed");
    let ended = ended.has("sticky   10.88.0.2  attached  default/db-0").has("sticky: in order, 1 addresses");
    ended.has("upgraded /opt/cni/bin/sticky-ipam").has("removed /opt/cni/bin/sticky-ipam");
}

#[test]
fn every_target_of_the_makefile_is_in_the_readme() {
    let readme = text("README.md");
    // Run by `make test` this is a make within a make, which would say so on standard output.
    let listed = Command::new("make")
        .args(["--no-print-directory", "help"])
        .current_dir(project())
        .env_remove("MAKEFLAGS")
        .output()
        .unwrap();
    let listed = Ended::of(&listed).well().stdout;
    let targets: Vec<&str> = listed.lines().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert!(targets.contains(&"demo"), "{listed}");
    for target in targets {
        assert!(readme.contains(&format!("`make {target}`")), "README.md lacks make {target}");
    }
}

#[test]
fn every_link_leads_somewhere() {
    let mut seen = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).unwrap();
        for rest in text.split("](").skip(1) {
            let target = rest.split([')', '#']).next().unwrap();
            if target.is_empty() || target.contains("://") || target.contains('…') {
                continue;
            }
            seen += 1;
            let path = document.parent().unwrap_or(Path::new("/")).join(target);
            assert!(path.exists(), "{} points to {target}, which is not there", document.display());
        }
    }
    assert!(seen > 20, "{seen}");
}

#[test]
fn the_index_names_every_document_and_every_decision() {
    let index = text("docs/README.md");
    for document in documents() {
        let name = document.strip_prefix(project()).unwrap().to_str().unwrap();
        let link = match name.strip_prefix("docs/") {
            Some("README.md") => continue,
            Some(here) => format!("({here})"),
            None if name == "README.md" => continue,
            None => format!("(../{name})"),
        };
        assert!(index.contains(&link), "docs/README.md lacks {link}");
    }
}

/// The text of every file below a folder, one after the other.
fn all_text_below(folder: &Path) -> String {
    let entries = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let text = |path: PathBuf| match path.is_dir() {
        true => all_text_below(&path),
        false => fs::read_to_string(&path).unwrap_or_default(),
    };
    entries.map(text).collect()
}

#[test]
fn every_test_that_the_failure_modes_rest_on_is_there_and_every_letter_is_one() {
    let page = text("docs/operate/failure-modes.md");
    let (tables, list) = page.split_once("\n## Tests\n").unwrap();
    let tests = all_text_below(&project().join("tests/api")) + &all_text_below(&project().join("tests/e2e"));
    let rows = list.lines().filter_map(|line| line.strip_prefix("| ")?.split_once(" | `"));
    let rows: Vec<(&str, &str)> =
        rows.filter_map(|(letter, rest)| Some((letter, rest.split_once('`')?.0))).collect();
    assert!(rows.len() > 10, "{rows:?}");
    for (_, name) in &rows {
        assert!(tests.contains(&format!("fn {name}(")), "no test is called {name}");
    }
    let cells = tables.split('(').skip(1).filter_map(|rest| Some(rest.split_once(')')?.0));
    let of_letters = cells.filter(|cell| cell.split(", ").all(|part| part.len() == 1));
    let used: BTreeSet<&str> = of_letters.flat_map(|cell| cell.split(", ")).collect();
    assert_eq!(used, rows.iter().map(|(letter, _)| *letter).collect());
}

#[test]
fn the_description_of_the_store_names_every_file_and_field_that_there_is() {
    let description = text("docs/store.md");
    let node = Node::new();
    node.add("c1", "db-0");
    let has = |name: &str| assert!(description.contains(name), "docs/store.md lacks {name}");
    for folder in ["", ".sticky"] {
        for entry in fs::read_dir(node.path(folder)).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            if name.parse::<std::net::IpAddr>().is_err() {
                has(&name);
            }
        }
    }
    for file in ["10.7.0.2", ".sticky/state"] {
        let page: Value = serde_json::from_slice(&fs::read(node.path(file)).unwrap()).unwrap();
        for field in page.as_object().unwrap().keys() {
            has(&format!("`{field}`"));
        }
    }
    has(&format!("| `version` | of the layout; {} today |", sticky_ipam::store::VERSION));
}
