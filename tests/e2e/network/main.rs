//! Real network namespaces: cnitool and ptp with sticky-ipam, packets between pods, and the suites of the
//! reference plugins. Needs root, so `cargo test` alone does not run it; `make e2e` does. STICKY_IPAM_CNI_BIN
//! names the folder with cnitool, ptp and host-local, STICKY_IPAM_CNI_SUITES the folder with the suites,
//! STICKY_IPAM_BIN the release build of the plugin.

// Whatever a fixture cannot do is a failed test, said by a panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs)]

mod podman;
mod pods;
mod suites;

use podman::Podman;
use pods::Pods;
use serde_json::json;

#[test]
fn two_pods_and_the_host_reach_each_other() {
    let pods = Pods::new("sticky-ipam");
    let (one, two) = (pods.add("web-0"), pods.add("web-1"));
    assert_ne!(one, two);
    pods.ping("web-0", &two);
    pods.ping("web-1", &one);
    pods.ping_from_host(&one);
    pods.check("web-0");
    pods.del("web-0");
    assert!(!pods.answers_the_host(&one), "a deleted pod answers no more");
    pods.ping_from_host(&two);
}

#[test]
fn a_pod_keeps_its_address_over_del_and_add_and_packets_find_it_there() {
    let pods = Pods::new("sticky-ipam");
    let before = pods.add("web-0");
    pods.add("web-1");
    pods.del("web-0");
    pods.add("web-2");
    let after = pods.add("web-0");
    assert_eq!(before, after);
    pods.ping("web-1", &after);
    pods.ping_from_host(&after);
}

#[test]
fn with_host_local_the_same_pod_has_another_address() {
    let pods = Pods::new("host-local");
    let before = pods.add("web-0");
    pods.add("web-1");
    pods.del("web-0");
    assert_ne!(before, pods.add("web-0"), "if it kept its address, nobody would need sticky-ipam");
}

#[test]
fn a_container_of_podman_keeps_its_address_by_its_name() {
    let podman = Podman::new(json!({"type": "ptp"}), &[]);
    let before = podman.run("db-0", &[]);
    podman.remove("db-0");
    let other = podman.run("web-0", &[]);
    assert_ne!(before, other, "the address of db-0 is kept for it");
    assert_eq!(podman.run("db-0", &[]), before);
    assert!(podman.answer(&before, 8080).is_some(), "the node reaches it");
}

#[test]
fn ports_of_portmap_lead_to_the_same_container_on_a_bridge() {
    let capabilities = json!({"mac": true});
    let bridge = json!({
        "type": "bridge", "bridge": "sip0", "isGateway": true, "ipMasq": true, "capabilities": capabilities,
    });
    let portmap = json!({"type": "portmap", "capabilities": {"portMappings": true}});
    let podman = Podman::new(bridge, &[portmap]);
    // With another MAC, neighbours on the bridge would send to the old one until their entries are old.
    let options = ["--publish", "18080:8080", "--mac-address", "02:00:0a:4d:00:02"];
    let before = podman.run("db-0", &options);
    let other = podman.run("web-0", &[]);
    for round in 0..2 {
        let direct = podman.answer(&before, 8080);
        assert!(direct.is_some(), "round {round}: the node reaches the container");
        assert_ne!(direct, podman.answer(&other, 8080), "two containers have two names");
        assert_eq!(podman.answer("10.77.0.1", 18080), direct, "round {round}: and so by its port");
        podman.remove("db-0");
        assert_eq!(podman.answer_now("10.77.0.1", 18080), None, "round {round}: the port ends with it");
        assert_eq!(podman.run("db-0", &options), before);
    }
}
