//! `up` and `down` leave nothing behind, whenever they are interrupted or killed, and never mix two labs.

use crate::support::lab::{FreeMachine, command, eventually, folder, name, run, text};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

/// A start is interrupted when this file of the lab exists: from before the first process to the last ones.
const POINTS: [&str; 6] = [
    "run",
    "run/fabric.pid",
    "run/apiserver.pid",
    "run/node-1.pid",
    "node-2/booted",
    "run/kubelet@node-2.pid",
];

/// What the machine has, as far as a lab could change it.
#[derive(Debug, PartialEq, Eq)]
struct Traces {
    links: BTreeSet<String>,
    namespaces: BTreeSet<String>,
    mounts: Vec<String>,
    cgroups: Vec<PathBuf>,
    processes: Vec<String>,
    files: Vec<PathBuf>,
}

fn names(folder: &str) -> BTreeSet<String> {
    let entries = fs::read_dir(folder)
        .map(|entries| entries.flatten().map(|entry| entry.file_name()).collect::<Vec<_>>());
    entries.unwrap_or_default().into_iter().map(|name| name.to_string_lossy().into_owned()).collect()
}

impl Traces {
    fn now() -> Self {
        let lab = folder();
        let mark = format!("STICKY_IPAM_LAB_PROCESS={}", lab.display());
        let mounts = fs::read_to_string("/proc/mounts").expect("/proc/mounts");
        let marked = |pid: &String| {
            let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|byte| *byte == 0).any(|variable| variable == mark.as_bytes())
        };
        let hierarchies =
            names("/sys/fs/cgroup").into_iter().map(|name| Path::new("/sys/fs/cgroup").join(name));
        Self {
            links: names("/sys/class/net"),
            namespaces: names("/run/netns"),
            mounts: mounts
                .lines()
                .filter(|line| line.contains(&*lab.to_string_lossy()))
                .map(str::to_owned)
                .collect(),
            cgroups: hierarchies
                .chain([PathBuf::from("/sys/fs/cgroup")])
                .map(|hierarchy| hierarchy.join(name()))
                .filter(|group| group.exists())
                .collect(),
            processes: names("/proc").into_iter().filter(marked).collect(),
            files: [lab, Path::new("/run").join(name())].into_iter().filter(|file| file.exists()).collect(),
        }
    }
}

/// A start in a process group of its own, as a shell gives it to a job.
fn start(command: &mut Command) -> Child {
    command
        .process_group(0)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("tests/lab/lab can be started")
}

fn up() -> Command {
    command(&["up", "--stock"])
}

fn reach(child: &mut Child, point: &str) {
    let file = folder().join(point);
    eventually(point, || match child.try_wait() {
        Ok(Some(status)) => panic!("the start ended before {point}: {status}"),
        _ if file.exists() => Ok(()),
        _ => Err("not there".to_owned()),
    });
}

fn signal_group(child: &Child, signal: Signal) {
    let group = i32::try_from(child.id()).expect("a pid");
    kill(Pid::from_raw(-group), signal).expect("the start still runs");
}

fn end(child: Child) -> Output {
    child.wait_with_output().expect("the start ends")
}

#[test]
fn an_interrupted_start_says_so_and_leaves_nothing() {
    let _machine = FreeMachine::take();
    let before = Traces::now();
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        for point in POINTS {
            let mut child = start(&mut up());
            reach(&mut child, point);
            signal_group(&child, signal);
            let output = end(child);
            assert_eq!(output.status.code(), Some(code), "{signal} at {point}:\n{}", text(&output));
            assert_eq!(Traces::now(), before, "{signal} at {point}");
        }
    }
}

#[test]
fn an_impatient_second_interruption_changes_nothing() {
    let _machine = FreeMachine::take();
    let before = Traces::now();
    let mut child = start(&mut up());
    reach(&mut child, "run/node-1.pid");
    signal_group(&child, Signal::SIGINT);
    signal_group(&child, Signal::SIGINT);
    signal_group(&child, Signal::SIGTERM);
    let output = end(child);
    assert!(matches!(output.status.code(), Some(130 | 143)), "{:?}\n{}", output.status, text(&output));
    assert_eq!(Traces::now(), before);
}

#[test]
fn a_start_in_the_background_of_a_script_can_be_interrupted_too() {
    let _machine = FreeMachine::take();
    let before = Traces::now();
    // Where a script's background job starts with SIGINT ignored, a shell could not trap it.
    let lab = up();
    let mut child = start(
        Command::new("env")
            .arg("--ignore-signal=INT")
            .arg(lab.get_program())
            .args(lab.get_args())
            .envs(lab.get_envs().filter_map(|(key, value)| Some((key, value?))))
            .stdin(Stdio::null()),
    );
    reach(&mut child, "run/fabric.pid");
    signal_group(&child, Signal::SIGINT);
    let output = end(child);
    assert_eq!(output.status.code(), Some(130), "{}", text(&output));
    assert_eq!(Traces::now(), before);
}

#[test]
fn down_after_a_killed_start_leaves_nothing() {
    let _machine = FreeMachine::take();
    let before = Traces::now();
    for point in POINTS {
        let mut child = start(&mut up());
        reach(&mut child, point);
        child.kill().expect("the start still runs");
        assert_eq!(end(child).status.signal(), Some(9), "killed at {point}");
        let output = run(&["down"]);
        assert!(output.status.success(), "down after a kill at {point}:\n{}", text(&output));
        assert_eq!(Traces::now(), before, "killed at {point}");
    }
}

#[test]
fn a_start_whose_component_dies_says_which_and_keeps_the_logs_only() {
    let _machine = FreeMachine::take();
    let before = Traces::now();
    let mut child = start(&mut up());
    reach(&mut child, "run/etcd.pid");
    let record = eventually("etcd's record", || {
        let record = fs::read_to_string(folder().join("run/etcd.pid")).map_err(|error| error.to_string())?;
        if record.ends_with('\n') { Ok(record) } else { Err(record) }
    });
    let pid = record.split(' ').next().and_then(|pid| pid.parse().ok()).expect("a pid");
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("etcd runs");
    let output = end(child);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let failed = format!("{}-failed", folder().display());
    assert!(text(&output).contains(&failed), "where the logs are:\n{}", text(&output));
    assert!(Path::new(&failed).join("etcd.log").exists(), "the logs are kept");
    assert_eq!(Traces::now(), before);
    fs::remove_dir_all(failed).expect("the kept logs can be removed");
}

#[test]
fn a_second_lab_is_refused_while_one_starts_and_while_one_is_up() {
    let _machine = FreeMachine::take();
    let other = tempfile::tempdir().expect("a temporary folder");
    let second = || {
        command(&["up", "--stock"]).env("LAB_DIR", other.path()).output().expect("tests/lab/lab can be run")
    };
    let mut child = start(&mut up());
    reach(&mut child, "run/fabric.pid");
    let output = second();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("under way"), "{}", text(&output));
    let first = end(child);
    assert!(first.status.success(), "the first lab was disturbed:\n{}", text(&first));
    let output = second();
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    let cure = format!("LAB_DIR={} tests/lab/lab down", folder().display());
    assert!(text(&output).contains(&cure), "{}", text(&output));
    // Nor under another name in its own folder.
    let output = command(&["up", "--stock"]).env("LAB_LABEL", format!("{}-other", name())).output();
    let output = output.expect("tests/lab/lab can be run");
    assert_eq!(output.status.code(), Some(1), "{}", text(&output));
    assert!(text(&output).contains("another LAB_LABEL"), "{}", text(&output));
    let status = run(&["status"]);
    assert!(status.status.success(), "the first lab was disturbed:\n{}", text(&status));
    assert_eq!(names(&other.path().to_string_lossy()), BTreeSet::new());
}

#[test]
fn what_is_missing_is_named_with_its_cure() {
    let _machine = FreeMachine::take();
    let before = Traces::now();
    let plugin = command(&["up", "--mode", "delegated"])
        .env("STICKY_IPAM_BIN", "/nonexistent/plugin")
        .output()
        .expect("lab runs");
    assert_eq!(plugin.status.code(), Some(1));
    assert!(text(&plugin).contains("make plugin"), "{}", text(&plugin));
    let agent = command(&["up", "--mode", "delegated"])
        .env("STICKY_IPAM_AGENT_BIN", "/nonexistent/agent")
        .output()
        .expect("lab runs");
    assert_eq!(agent.status.code(), Some(1));
    assert!(text(&agent).contains("make agent"), "{}", text(&agent));

    let lab = command(&["up"]);
    let unprivileged = Command::new("unshare")
        .args(["--user", "--"])
        .arg(lab.get_program())
        .args(lab.get_args())
        .envs(lab.get_envs().filter_map(|(key, value)| Some((key, value?))))
        .output()
        .expect("unshare runs");
    assert_eq!(unprivileged.status.code(), Some(1));
    assert!(text(&unprivileged).contains("needs root"), "{}", text(&unprivileged));

    for (arguments, named) in [
        (["up", "--mode", "host"], "crd delegated chained cluster-pool kubernetes"),
        (["up", "--cilium", "v0.1"], "v1.19.5 v1.18.3"),
        (["up", "--fast", "1"], "--fast"),
        (["kubectl", "get", "pods"], "no lab is up"),
    ] {
        let output = run(&arguments);
        assert!(matches!(output.status.code(), Some(1 | 2)), "{arguments:?}: {:?}", output.status);
        assert!(text(&output).contains(named), "{arguments:?}:\n{}", text(&output));
    }
    assert_eq!(Traces::now(), before);
    assert!(
        !Path::new(&format!("{}-failed", folder().display())).exists(),
        "logs of a start that started nothing"
    );
}
