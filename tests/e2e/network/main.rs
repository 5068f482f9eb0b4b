//! Real network namespaces: cnitool and ptp with sticky-ipam, packets between pods, and the suites of the
//! reference plugins. Needs root, so `cargo test` alone does not run it; `make e2e` does. STICKY_IPAM_CNI_BIN
//! names the folder with cnitool, ptp and host-local, STICKY_IPAM_CNI_SUITES the folder with the suites,
//! STICKY_IPAM_BIN the release build of the plugin.

// Whatever a fixture cannot do is a failed test, said by a panic.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used, missing_docs)]

mod pods;
mod suites;

use pods::Pods;

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
