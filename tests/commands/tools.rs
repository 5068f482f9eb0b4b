//! `tests/tools/build`: once into the cache, also when two start at once or one is interrupted or killed.

use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::node::{Ended, project};

/// The smallest group: the CNI plugins.
const GROUP: &str = "cni";
/// A build takes seconds where Go has compiled these packages before, and a minute or two where it has not.
const PATIENCE: Duration = Duration::from_secs(600);

/// A build of the group into a cache of the test's own; what Go itself has compiled is shared.
fn build(cache: &Path) -> Command {
    let go = Command::new("go").args(["env", "GOCACHE"]).output().expect("Go is installed");
    // A shell cannot trap what was ignored when it started, as SIGINT is in a background job: the build
    // starts as from a terminal.
    let mut command = Command::new("env");
    command
        .arg("--default-signal")
        .arg(project().join("tests/tools/build"))
        .arg(GROUP)
        .env("XDG_CACHE_HOME", cache)
        .env("GOCACHE", String::from_utf8(go.stdout).unwrap().trim())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    command
}

fn half_built(cache: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(cache.join("sticky-ipam/tools")).into_iter().flatten().flatten();
    entries.map(|entry| entry.path()).filter(|path| path.to_string_lossy().contains(".tmp.")).collect()
}

fn started_building(cache: &Path) -> Child {
    let child = build(cache).spawn().unwrap();
    let deadline = Instant::now() + PATIENCE;
    while half_built(cache).is_empty() {
        assert!(Instant::now() < deadline, "the build never began");
        std::thread::yield_now();
    }
    child
}

fn ended_by(child: Child, signal: Signal) -> Ended {
    kill(Pid::from_raw(i32::try_from(child.id()).unwrap()), signal).unwrap();
    Ended::of(&child.wait_with_output().unwrap())
}

#[test]
fn tools_are_built_once_despite_parallel_interrupted_and_killed_builds() {
    let cache = tempfile::tempdir().unwrap();
    let cache = cache.path();

    let interrupted = ended_by(started_building(cache), Signal::SIGINT);
    assert_eq!(interrupted.status, 130, "{interrupted:?}");
    assert_eq!(half_built(cache), Vec::<PathBuf>::new(), "an interrupted build cleans up");

    ended_by(started_building(cache), Signal::SIGKILL);
    assert_eq!(half_built(cache).len(), 1, "a killed build cannot clean up");

    let both = [build(cache).spawn().unwrap(), build(cache).spawn().unwrap()];
    let both = both.map(|child| Ended::of(&child.wait_with_output().unwrap()).well());
    assert_eq!(both[0].stdout, both[1].stdout);
    assert_eq!(half_built(cache), Vec::<PathBuf>::new(), "what the killed build left is gone");
    let builds: usize = both.iter().map(|ended| ended.stderr.matches("building into").count()).sum();
    assert_eq!(builds, 1, "{both:?}");
    let folder = PathBuf::from(both[0].stdout.trim());
    for tool in ["host-local", "ptp", "bridge", "loopback", "cnitool"] {
        assert!(folder.join(tool).is_file(), "{tool} is missing in {}", folder.display());
    }

    let again = Ended::of(&build(cache).output().unwrap()).well();
    assert_eq!((again.stdout.as_str(), again.stderr.as_str()), (both[0].stdout.as_str(), ""));
}

#[test]
fn an_argument_that_is_no_group_builds_nothing() {
    let cache = tempfile::tempdir().unwrap();
    let output = build(cache.path()).arg("cin").output().unwrap();
    let ended = Ended::of(&output);
    assert_eq!(ended.status, 2, "{ended:?}");
    assert!(ended.stderr.contains("cin"), "{ended:?}");
    assert!(!cache.path().join("sticky-ipam").exists(), "{ended:?}");
}
