//! The demo without privileges. It needs host-local, which `tests/tools/build cni` builds with Go where it is
//! not there.

use std::process::Command;

use crate::node::{Ended, PLUGIN, project};

fn demo(plugin: &str) -> Ended {
    let output =
        Command::new(project().join("tests/demo/demo")).args(["--verbs", "--plugin", plugin]).output();
    Ended::of(&output.unwrap())
}

/// The words behind a step of the table.
fn verdicts(ended: &Ended, step: &str) -> Vec<String> {
    let line =
        ended.stdout.lines().find(|line| line.starts_with(step)).unwrap_or_else(|| panic!("{ended:?}"));
    line.split_whitespace().filter(|word| ["same", "CHANGED"].contains(word)).map(str::to_owned).collect()
}

#[test]
fn the_demo_shows_that_host_local_changes_what_sticky_ipam_keeps() {
    let ended = demo(PLUGIN).well().has("It held");
    assert_eq!(verdicts(&ended, "pod deleted and made again"), ["CHANGED", "same"]);
    assert_eq!(verdicts(&ended, "container restarted"), ["CHANGED", "same"]);
    assert_eq!(verdicts(&ended, "late DEL of the old container"), ["same", "same"]);
    assert_eq!(verdicts(&ended, "node rebooted"), ["CHANGED", "same"]);
}

#[test]
fn the_demo_fails_with_a_plugin_that_keeps_nothing() {
    let built = Command::new(project().join("tests/tools/build")).arg("cni").output().unwrap();
    let folder = Ended::of(&built).well().stdout;
    let ended = demo(&format!("{}/host-local", folder.trim()));
    assert_eq!(ended.status, 1, "{ended:?}");
    ended.has("It did NOT hold");
}
