//! Our plugin as delegated IPAM of unmodified cilium-cni.

use crate::support::lab::{Flavour, Lab, RANGE_SIZE, eventually};

/// With the local policy a pod that is deleted and made again on the same node has its address again, each
/// time.
pub fn keeps_the_address_of_a_sticky_pod(lab: &Lab) {
    lab.namespace("keeps");
    lab.stateful_set("keeps", "db", "node-1");
    let address = lab.address("keeps", "db-0");
    for time in 1..=3 {
        assert_eq!(lab.replace("keeps", "db-0"), address, "restart {time} of keeps/db-0");
        lab.answers("node-1", &address);
    }
    lab.kubectl(&["delete", "statefulset", "-n", "keeps", "db", "--wait=true"]);
    eventually("the end of keeps/db-0", || {
        match lab.attempt(&["kubectl", "get", "pod", "-n", "keeps", "db-0"]) {
            Ok(seen) => Err(seen),
            Err(_) => Ok(()),
        }
    });
}

/// More pods in all than there are addresses: the second half runs only when the first half's were freed.
pub fn frees_the_addresses_of_plain_pods(lab: &Lab, namespace: &str) {
    lab.namespace(namespace);
    let at_once = RANGE_SIZE / 2 + 1;
    for round in 1..=2 {
        let names: Vec<String> = (0..at_once).map(|index| format!("round-{round}-{index}")).collect();
        for name in &names {
            lab.pod(namespace, name, "node-1");
        }
        for name in &names {
            lab.address(namespace, name);
        }
        lab.kubectl(&["delete", "pods", "-n", namespace, "--all", "--wait=true", "--timeout=120s"]);
    }
    lab.delete_namespace(namespace);
}

#[test]
fn pods_with_our_addresses_reach_each_other_across_nodes() {
    Lab::of(Flavour::Delegated).proves_reach("reach");
}

#[test]
fn a_sticky_pod_keeps_its_address_over_restarts_on_its_node() {
    keeps_the_address_of_a_sticky_pod(&Lab::of(Flavour::Delegated));
}

#[test]
fn del_frees_the_addresses_of_plain_pods() {
    frees_the_addresses_of_plain_pods(&Lab::of(Flavour::Delegated), "frees");
}

#[test]
fn a_pod_waits_for_space_on_a_full_disk_and_then_runs() {
    let lab = Lab::of(Flavour::Delegated);
    lab.namespace("full-disk");
    lab.must(&["fill-disk", "node-2"]);
    lab.pod("full-disk", "one", "node-2");
    eventually("kubelet's word that the sandbox failed", || {
        let events = lab.attempt(&["kubectl", "events", "-n", "full-disk", "--for", "pod/one"])?;
        if events.contains("FailedCreatePodSandBox") { Ok(()) } else { Err(events) }
    });
    lab.must(&["fill-disk", "node-2", "--undo"]);
    let address = lab.address("full-disk", "one");
    lab.answers("node-2", &address);
    lab.delete_namespace("full-disk");
}
