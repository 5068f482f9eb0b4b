//! The fault levers do what they say, so that later tests may rely on them.

use std::path::Path;
use std::process::Command;

use crate::support::lab::{Flavour, Lab, eventually, text};

/// The state that `lab status` shows for a component.
fn state(lab: &Lab, component: &str) -> String {
    // Its exit status tells that something does not run, which is expected here.
    let output = lab.attempt(&["status"]).unwrap_or_else(|output| output);
    output
        .lines()
        .find_map(|line| line.strip_prefix(component)?.strip_prefix(' '))
        .map(|rest| rest.trim_start().split("  ").next().unwrap_or_default().trim().to_owned())
        .unwrap_or_else(|| panic!("no {component} in\n{output}"))
}

fn ping_node_2(lab: &Lab) -> Result<(), String> {
    lab.attempt(&["on", "node-1", "busybox", "ping", "-c", "1", "-W", "1", "172.30.0.12"]).map(drop)
}

#[test]
fn a_node_that_is_cut_off_does_not_answer_until_it_is_healed() {
    let lab = Lab::of(Flavour::Stock);
    eventually("node-2 to answer", || ping_node_2(&lab));
    lab.must(&["cut", "node-2"]);
    assert!(ping_node_2(&lab).is_err(), "node-2 answers though it is cut off");
    lab.must(&["heal", "node-2"]);
    eventually("node-2 to answer again", || ping_node_2(&lab));
}

#[test]
fn a_link_that_drops_everything_lets_nothing_through_until_it_ends() {
    let lab = Lab::of(Flavour::Stock);
    lab.must(&["drop", "node-2", "100"]);
    assert!(ping_node_2(&lab).is_err(), "node-2 answers though its link drops all packets");
    lab.must(&["drop", "node-2", "0"]);
    eventually("node-2 to answer again", || ping_node_2(&lab));
}

/// The shortest of three round trips from the fabric to node-2, in milliseconds.
fn round_trip(lab: &Lab) -> Result<f64, String> {
    let output = lab.attempt(&["on", "fabric", "busybox", "ping", "-c", "3", "-W", "5", "172.30.0.12"])?;
    let times = output.rsplit_once("round-trip min/avg/max = ").map(|(_, times)| times);
    let shortest = times.and_then(|times| times.split('/').next()?.parse().ok());
    shortest.ok_or(output)
}

/// Neither process nor link of a delay is left, and node-2 answers at its own pace.
fn delay_is_gone(lab: &Lab, delayed: f64) {
    eventually("the round trip to be as before", || match round_trip(lab)? {
        time if time < delayed => Ok(()),
        time => Err(format!("{time} ms")),
    });
    let status = lab.must(&["status"]);
    assert!(!status.lines().any(|line| line.starts_with("delay-")), "the process is left:\n{status}");
    let links = lab.must(&["on", "fabric", "ip", "-oneline", "link"]);
    assert!(!links.contains("via-") && !links.contains("slow-"), "links are left:\n{links}");
}

#[test]
fn a_delayed_link_is_late_both_ways_and_carries_everything_until_it_is_healed() {
    let lab = Lab::of(Flavour::Stock);
    lab.namespace("late");
    lab.pod("late", "one", "node-1");
    lab.pod("late", "two", "node-2");
    let (one, two) = (lab.address("late", "one"), lab.address("late", "two"));
    lab.must(&["delay", "node-2", "100"]);
    assert!(state(&lab, "delay-node-2").starts_with("running"));
    let time = eventually("node-2 to answer", || round_trip(&lab));
    assert!(time >= 200.0, "a round trip over a link that is 100 ms late each way takes {time} ms");
    lab.answers("node-1", &two);
    lab.answers("node-2", &one);
    // More than one segment each, so that offloads would be seen: out of the node, then through the tunnel
    // between pods.
    let lines = lab.must(&["pod-exec", "late/two", "busybox", "seq", "1", "100000"]);
    assert_eq!((lines.lines().count(), lines.lines().last()), (100_000, Some("100000")));
    for (from, to) in [("one", &two), ("two", &one)] {
        let echo = format!("busybox seq 1 20000 | nc -w 20 {to} 7007 | busybox tail -n 1");
        assert_eq!(
            lab.must(&["pod-exec", &format!("late/{from}"), "sh", "-c", &echo]),
            "20000",
            "from {from}"
        );
    }
    lab.must(&["delay", "node-2", "300"]);
    let time = eventually("node-2 to answer", || round_trip(&lab));
    assert!(time >= 600.0, "a round trip over a link that is 300 ms late each way takes {time} ms");
    lab.must(&["cut", "node-2"]);
    assert!(round_trip(&lab).is_err(), "node-2 answers though it is cut off");
    lab.must(&["heal", "node-2"]);
    delay_is_gone(&lab, 600.0);
    lab.must(&["delay", "node-2", "300"]);
    lab.must(&["delay", "node-2", "0"]);
    delay_is_gone(&lab, 600.0);
    lab.delete_namespace("late");
}

#[test]
fn a_reboot_ends_a_delay() {
    let lab = Lab::of(Flavour::Stock);
    lab.must(&["delay", "node-2", "300"]);
    lab.must(&["reboot", "node-2"]);
    delay_is_gone(&lab, 600.0);
    let refused = lab.attempt(&["delay", "node-2", "soon"]).expect_err("a delay that is no number");
    assert!(refused.contains("0 to 60000"), "{refused}");
}

#[test]
fn a_component_is_paused_resumed_killed_stopped_and_started_on_a_node() {
    let lab = Lab::of(Flavour::Stock);
    let kubelet = "kubelet@node-2";
    lab.must(&["pause", kubelet]);
    eventually("the pause", || match state(&lab, kubelet) {
        state if state.starts_with("paused") => Ok(()),
        state => Err(state),
    });
    lab.must(&["resume", kubelet]);
    eventually("the end of the pause", || match state(&lab, kubelet) {
        state if state.starts_with("running") => Ok(()),
        state => Err(state),
    });
    lab.must(&["kill", kubelet]);
    assert_eq!(state(&lab, kubelet), "not running");
    lab.must(&["start", kubelet]);
    assert!(state(&lab, kubelet).starts_with("running"));
    lab.must(&["pause", kubelet]);
    lab.must(&["kill", kubelet]);
    assert_eq!(state(&lab, kubelet), "not running", "also a paused one");
    lab.must(&["start", kubelet]);
    lab.must(&["stop", kubelet]);
    assert_eq!(state(&lab, kubelet), "not running");
    lab.must(&["start", kubelet]);
}

#[test]
fn the_api_server_is_stopped_and_comes_back_with_its_objects() {
    let lab = Lab::of(Flavour::Stock);
    lab.must(&["stop", "apiserver"]);
    assert!(
        lab.attempt(&["kubectl", "get", "nodes", "--request-timeout=3s"]).is_err(),
        "kubectl works without an API server"
    );
    lab.must(&["start", "apiserver"]);
    eventually("the API server", || {
        lab.attempt(&["kubectl", "get", "node", "node-1", "--request-timeout=5s"])
    });
}

#[test]
fn a_rebooted_node_has_its_disk_another_boot_id_and_its_pods_again() {
    let lab = Lab::of(Flavour::Stock);
    let boot_id = || lab.must(&["on", "node-1", "cat", "/proc/sys/kernel/random/boot_id"]);
    lab.namespace("reboot");
    lab.pod("reboot", "one", "node-1");
    lab.address("reboot", "one");
    lab.must(&["on", "node-1", "sh", "-c", "echo kept >/var/lib/cni/a-file; echo lost >/run/a-file"]);
    let (before, other) = (boot_id(), lab.must(&["on", "node-2", "cat", "/proc/sys/kernel/random/boot_id"]));
    assert_ne!(before, other, "each node has a boot id of its own");
    lab.must(&["reboot", "node-1"]);
    let after = boot_id();
    assert_ne!(after, before, "the boot id");
    assert_eq!(lab.must(&["on", "node-1", "cat", "/var/lib/cni/a-file"]), "kept");
    assert!(lab.attempt(&["on", "node-1", "cat", "/run/a-file"]).is_err(), "/run outlived the reboot");
    eventually("kubelet to report the new boot id", || {
        let reported =
            lab.attempt(&["kubectl", "get", "node", "node-1", "-o", "jsonpath={.status.nodeInfo.bootID}"])?;
        if reported == after { Ok(()) } else { Err(reported) }
    });
    eventually("the pod to be started again", || {
        let restarts = lab.attempt(&[
            "kubectl",
            "get",
            "pod",
            "-n",
            "reboot",
            "one",
            "-o",
            "jsonpath={.status.containerStatuses[0].restartCount}",
        ])?;
        if restarts == "0" { Err("no restart yet".to_owned()) } else { Ok(()) }
    });
    let address = lab.address("reboot", "one");
    lab.answers("node-1", &address);
    lab.delete_namespace("reboot");
}

#[test]
fn a_crashed_node_runs_nothing_until_it_is_rebooted() {
    let lab = Lab::of(Flavour::Stock);
    lab.must(&["crash", "node-2"]);
    for component in ["cilium@node-2", "containerd@node-2", "kubelet@node-2"] {
        assert_eq!(state(&lab, component), "not running", "{component}");
    }
    let refused = lab.attempt(&["on", "node-2", "true"]).expect_err("a command ran on a crashed node");
    assert!(refused.contains("reboot node-2"), "{refused}");
    lab.must(&["reboot", "node-2"]);
    assert!(state(&lab, "kubelet@node-2").starts_with("running"));
    eventually("node-2 to answer again", || ping_node_2(&lab));
}

#[test]
fn a_filled_disk_takes_no_more_and_loses_nothing() {
    let lab = Lab::of(Flavour::Stock);
    let write = |name: &str| {
        lab.attempt(&[
            "on",
            "node-1",
            "bash",
            "-c",
            &format!("mkdir -p /var/lib/cni/networks && echo text >/var/lib/cni/networks/{name}"),
        ])
    };
    write("before").expect("a write to a disk with space");
    lab.must(&["fill-disk", "node-1"]);
    assert!(write("during").is_err(), "a write to a full disk succeeded");
    assert_eq!(lab.must(&["on", "node-1", "cat", "/var/lib/cni/networks/before"]), "text");
    lab.must(&["fill-disk", "node-1", "--undo"]);
    write("after").expect("a write after the end of it");
    assert_eq!(lab.must(&["on", "node-1", "cat", "/var/lib/cni/networks/before"]), "text");
}

/// A shell that takes the place of itself by another program leaves that program its own children, also those
/// that are dead.
#[test]
fn the_first_process_of_a_node_is_distinguished_from_a_dead_child_of_its_starter() {
    let script = r#"
        set -euo pipefail
        source "$1/lib/process.sh"
        (
            true &
            exec unshare --pid --fork --kill-child=KILL sleep 60
        ) >/dev/null &
        starter=$!
        trap 'kill -KILL "$starter"' EXIT
        for ((tries = 0; tries < 600; tries++)); do
            if found=$(inner_pid "$starter"); then
                cat "/proc/$found/comm"
                exit 0
            fi
            sleep 0.1
        done
        echo "no process was found"
    "#;
    let lib = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/lab");
    let output = Command::new("bash").args(["-c", script, "bash"]).arg(lib).output().expect("bash runs");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "sleep", "{}", text(&output));
}

#[test]
fn what_is_no_node_or_component_is_refused_with_those_that_are() {
    let lab = Lab::of(Flavour::Stock);
    let node = lab.attempt(&["crash", "node-9"]).expect_err("node-9 crashed");
    assert!(node.contains("node-1 node-2"), "{node}");
    let component = lab.attempt(&["stop", "kubelet"]).expect_err("a kubelet of no node was stopped");
    assert!(component.contains("kubelet@node-1"), "{component}");
}
