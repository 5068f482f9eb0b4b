//! The suites of the reference plugins ptp and bridge, run with host-local and again with our plugin in its
//! place. Clients of libcni know host-local's sentences, and these suites compare them.
//!
//! Must never judge a suite by itself: what this kernel cannot do fails with both plugins, and is no
//! difference.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

/// Both runs have the same order of specs: some share a name, and are told apart by their place in it.
const SEED: &str = "--ginkgo.seed=1";
/// The longest suite takes 40 s. One that hangs must end, and say in which spec.
const TIMEOUT: &str = "--ginkgo.timeout=20m";
/// On a busy machine one of the pings of ptp's suite may be lost, and each is sent only once. A spec that
/// differs by what the plugin answers differs every time.
const ATTEMPTS: &str = "--ginkgo.flake-attempts=3";
/// The suites keep their namespaces in /run/netns: nothing of that may stay, also if a suite is killed.
const PREPARE: &str = r#"mkdir -p /run/netns && mount -t tmpfs none /run/netns && exec "$@""#;

#[test]
fn every_spec_of_ptp_ends_as_with_host_local() {
    compare("ptp");
}

#[test]
fn every_spec_of_bridge_ends_as_with_host_local() {
    compare("bridge");
}

/// How a spec ended. The text of a failure has pointers in it, so its place in the suite's source is
/// compared.
#[derive(Debug)]
struct Outcome {
    /// Not a step before or after all specs.
    is_spec: bool,
    state: String,
    place: String,
    message: String,
}

impl PartialEq for Outcome {
    fn eq(&self, other: &Self) -> bool {
        (&self.state, &self.place) == (&other.state, &other.place)
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.state)?;
        match self.place.as_str() {
            "" => Ok(()),
            place => write!(f, " at {place}: {}", self.message.replace('\n', "\n        ")),
        }
    }
}

type Outcomes = BTreeMap<String, Outcome>;

fn compare(suite: &str) {
    let tools = named("STICKY_IPAM_CNI_BIN", "the folder with host-local");
    let ours = named("STICKY_IPAM_BIN", "the release build of the plugin");
    // Most of a suite is waiting.
    let (theirs, ours) = std::thread::scope(|both| {
        let theirs = both.spawn(|| run(suite, &tools.join("host-local")));
        let ours = both.spawn(|| run(suite, &ours));
        (theirs.join().expect("the suite with host-local"), ours.join().expect("the suite with our plugin"))
    });
    let counts = format!("{suite} with host-local: {}; with sticky-ipam: {}", count(&theirs), count(&ours));
    // Past the test harness, which keeps what a passing test prints.
    std::io::stderr().write_all(format!("{counts}\n").as_bytes()).unwrap();
    assert!(passed(&theirs) > 0, "{counts}: a suite that passes nothing compares nothing");
    let differences = differences(&theirs, &ours);
    assert!(
        differences.is_empty(),
        "{counts}; specs that differ: {}\n{}",
        differences.len(),
        differences.join("\n")
    );
}

fn named(variable: &str, what: &str) -> PathBuf {
    let path = std::env::var_os(variable).unwrap_or_else(|| {
        panic!("{variable} must name {what}; make e2e builds and names it");
    });
    PathBuf::from(path)
}

/// Runs the suite in namespaces of its own, with the plugin as the only host-local on PATH.
fn run(suite: &str, plugin: &Path) -> Outcomes {
    let program = named("STICKY_IPAM_CNI_SUITES", "the folder with the suites").join(format!("{suite}.test"));
    for file in [plugin, &program] {
        assert!(file.is_file(), "{} is missing; make e2e builds it", file.display());
    }
    let dir = tempfile::tempdir().unwrap();
    let (bin, scratch, report) =
        (dir.path().join("bin"), dir.path().join("tmp"), dir.path().join("report.json"));
    fs::create_dir(&bin).unwrap();
    fs::create_dir(&scratch).unwrap();
    std::os::unix::fs::symlink(plugin, bin.join("host-local")).unwrap();
    let mut command = Command::new("unshare");
    command.args(["--mount", "--net", "--propagation", "private", "sh", "-c", PREPARE, "sh"]);
    command.arg(program).args([SEED, TIMEOUT, ATTEMPTS, "--ginkgo.no-color"]);
    command.arg(concatenated("--ginkgo.json-report=", &report));
    // The suites set CNI_PATH from PATH.
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::join_paths([bin].into_iter().chain(std::env::split_paths(&path))).unwrap();
    command.current_dir(dir.path()).env("PATH", path).env("TMPDIR", scratch);
    // Its status says whether a spec failed, and so does the report.
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let said = || {
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        format!("{command:?}: {}: {text}", output.status)
    };
    let report = fs::read(&report).unwrap_or_else(|error| panic!("no report: {error}: {}", said()));
    let report: Value = serde_json::from_slice(&report).unwrap_or_else(|error| panic!("{error}: {}", said()));
    let outcomes = outcomes(&report);
    assert!(!outcomes.is_empty(), "not one spec was run: {}", said());
    outcomes
}

fn concatenated(option: &str, path: &Path) -> OsString {
    let mut argument = OsString::from(option);
    argument.push(path);
    argument
}

/// Every spec of ginkgo's report, and the steps before and after all of them.
fn outcomes(report: &Value) -> Outcomes {
    let mut outcomes = Outcomes::new();
    let suites = report.as_array().expect("ginkgo's report is a list of suites");
    for spec in suites.iter().flat_map(|suite| suite["SpecReports"].as_array().into_iter().flatten()) {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let outer = spec["ContainerHierarchyTexts"].as_array().into_iter().flatten().map(text);
        let words: Vec<_> = outer.chain([text(&spec["LeafNodeType"]), text(&spec["LeafNodeText"])]).collect();
        let name = words.join(" ");
        let same = outcomes.keys().filter(|known| known.starts_with(&format!("{name} #"))).count();
        let failure = &spec["Failure"];
        let file = text(&failure["Location"]["FileName"]);
        let outcome = Outcome {
            is_spec: spec["LeafNodeType"] == "It",
            state: text(&spec["State"]),
            place: match file.rsplit('/').next() {
                None | Some("") => String::new(),
                Some(file) => format!("{file}:{}", failure["Location"]["LineNumber"]),
            },
            message: text(&failure["Message"]),
        };
        outcomes.insert(format!("{name} #{}", same + 1), outcome);
    }
    outcomes
}

fn passed(outcomes: &Outcomes) -> usize {
    outcomes.values().filter(|outcome| outcome.is_spec && outcome.state == "passed").count()
}

fn count(outcomes: &Outcomes) -> String {
    let specs = outcomes.values().filter(|outcome| outcome.is_spec).count();
    format!("{} of {specs} specs pass", passed(outcomes))
}

fn differences(theirs: &Outcomes, ours: &Outcomes) -> Vec<String> {
    let names: std::collections::BTreeSet<_> = theirs.keys().chain(ours.keys()).collect();
    let differs = names.into_iter().filter(|name| theirs.get(*name) != ours.get(*name));
    let shown = |outcome: Option<&Outcome>| outcome.map_or_else(|| "not run".to_owned(), ToString::to_string);
    let line = |name: &String| {
        let (theirs, ours) = (shown(theirs.get(name)), shown(ours.get(name)));
        format!("  {name}\n    host-local:  {theirs}\n    sticky-ipam: {ours}")
    };
    differs.map(line).collect()
}
