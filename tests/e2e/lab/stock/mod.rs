//! The baseline: what Cilium does by itself, without us.

// The last by their name: they leave nodes behind that were rebooted.
mod faults;

use crate::support::lab::{Flavour, Lab};
use std::collections::BTreeSet;

#[test]
fn stock_cilium_gives_a_statefulset_pod_another_address_after_a_delete() {
    let lab = Lab::of(Flavour::Stock);
    lab.namespace("baseline");
    lab.stateful_set("baseline", "db", "node-1");
    let mut seen = BTreeSet::from([lab.address("baseline", "db-0")]);
    // One of some thirty at random: three times the same is as good as impossible.
    for _ in 0..3 {
        seen.insert(lab.replace("baseline", "db-0"));
    }
    assert!(seen.len() > 1, "four pods in a row had the address {seen:?} without us");
    lab.delete_namespace("baseline");
}

#[test]
fn stock_pods_reach_each_other_across_nodes() {
    Lab::of(Flavour::Stock).proves_reach("reach");
}

#[test]
fn a_pod_writes_its_address_into_its_log_and_echoes_over_tcp() {
    let lab = Lab::of(Flavour::Stock);
    lab.namespace("image");
    lab.pod("image", "one", "node-1");
    let address = lab.address("image", "one");
    assert_eq!(lab.kubectl(&["logs", "-n", "image", "one"]), address);
    let echoed =
        lab.must(&["pod-exec", "image/one", "sh", "-c", &format!("echo hello | nc -w 2 {address} 7007")]);
    assert_eq!(echoed, "hello");
    lab.delete_namespace("image");
}
