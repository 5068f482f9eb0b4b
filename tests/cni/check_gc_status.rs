//! CHECK, GC and STATUS.

use serde_json::{Value, json};

use crate::net::{Net, VERSIONS};

#[test]
fn verbs_need_the_version_that_brought_them() {
    for version in VERSIONS {
        let mut net = Net::new();
        net.set("cniVersion", json!(version));
        net.add("c1").json();
        for (verb, since) in [("CHECK", "0.4.0"), ("GC", "1.1.0"), ("STATUS", "1.1.0"), ("DEL", "0.1.0")] {
            let seen = net.verb(verb, "c1");
            if version >= since {
                seen.silent();
                continue;
            }
            // The whole sentence: clients of libcni compare it.
            let error = seen.fails(1, &[verb]);
            assert_eq!(error["msg"], format!("config version does not allow {verb}"));
            assert_eq!((&error["cniVersion"], &error["details"]), (&json!(version), &Value::Null));
        }
    }
    let mut net = Net::new();
    for (verb, version, code) in
        [("DEL", "9.9.9", 1), ("CHECK", "abc", 6), ("STATUS", "9.9.9", 1), ("GC", "x", 6)]
    {
        net.set("cniVersion", json!(version));
        net.verb(verb, "c1").fails(code, &[version]);
    }
}

#[test]
fn check_compares_the_reservation_with_what_came_before() {
    let mut net = Net::new();
    net.verb("CHECK", "a").fails(3, &["a", "eth0"]);
    let result = net.add("a").json();
    net.verb("CHECK", "a").silent();
    net.set("prevResult", result.clone());
    let seen = net.verb("CHECK", "a");
    seen.silent();
    assert_eq!(seen.stderr, "");
    for (ips, code) in [
        (json!([{"address": "10.1.0.2/29"}, {"address": "192.0.2.1/24"}]), 0),
        (json!([{"address": "10.1.0.3/29"}]), 103),
        (json!([{"address": "10.1.0.2/29"}, {"address": "10.1.0.3/29"}]), 103),
        // A later plugin of the chain may have changed what it found, so the specification asks only for what
        // is listed.
        (json!([{"address": "192.0.2.1/24"}]), 0),
        (json!([]), 0),
    ] {
        net.set("prevResult", json!({"cniVersion": "1.1.0", "ips": ips}));
        let seen = net.verb("CHECK", "a");
        if code == 0 { seen.silent() } else { drop(seen.fails(code, &["10.1.0."])) }
    }
    net.set("prevResult", json!(null));
    net.del("a").silent();
    net.verb("CHECK", "a").fails(3, &[]);
}

#[test]
fn del_is_by_container_and_interface_and_may_come_twice_or_too_early() {
    let net = Net::new();
    net.del("a").silent();
    assert!(!net.beside("data").exists(), "a DEL makes no store");
    net.add("a").ip();
    net.add_with("a", "CNI_IFNAME", "eth1").ip();
    net.del("a").silent();
    net.del("a").silent();
    assert_eq!(net.held(), ["10.1.0.3"]);
}

#[test]
fn gc_frees_what_is_not_listed_and_nothing_without_a_list_that_it_can_trust() {
    let mut net = Net::new();
    net.gc(&[]).silent();
    assert!(!net.beside("data").exists());
    for id in ["a", "b", "c"] {
        net.add(id).ip();
    }
    net.verb("GC", "").silent();
    for list in [
        json!("x"),
        json!({}),
        json!([5]),
        json!([{"containerID": "a"}]),
        json!([{"containerID": "a", "ifname": "eth0"}, {"containerID": "../b", "ifname": "eth0"}]),
        json!([{"containerID": "a", "ifname": ""}]),
    ] {
        net.set("cni.dev/valid-attachments", json!(null));
        net.config["cni.dev/valid-attachments"] = list.clone();
        net.verb("GC", "").fails(7, &["cni.dev/valid-attachments"]);
        assert_eq!(net.held().len(), 3, "{list}");
    }
    net.gc(&["a", "c", "unknown"]).silent();
    assert_eq!(net.held(), ["10.1.0.2", "10.1.0.4"]);
    // The interface counts as much as the container.
    net.config["cni.dev/attachments"] =
        json!([{"containerID": "a", "ifname": "eth1"}, {"containerID": "c", "ifname": "eth0"}]);
    net.verb("GC", "").silent();
    assert_eq!(net.held(), ["10.1.0.4"]);
    net.gc(&[]).silent();
    assert!(net.held().is_empty());
    net.set("ipam", json!(null));
    net.gc(&[]).fails(7, &["ipam"]);
}

#[test]
fn gc_keeps_the_address_of_a_stale_sticky_pod_for_it() {
    let mut net = Net::sticky();
    assert_eq!(net.add_pod("a", "web-0", "u1").ip(), "10.1.0.2");
    net.gc(&[]).silent();
    net.verb("CHECK", "a").fails(3, &[]);
    assert_eq!(net.held(), ["10.1.0.2"]);
    assert_eq!(net.add_pod("b", "web-0", "u1").ip(), "10.1.0.2");
    net.set("ipam.sticky.retention", json!("0s"));
    net.add_pod("c", "web-0", "u1").ip();
    net.gc(&[]).silent();
    assert!(net.held().is_empty(), "a retention of nought has run out at once");
}

#[test]
fn status_reports_a_full_pool_only_without_sticky_settings_or_when_configured() {
    for (settings, full) in [
        (json!(null), 50),
        (json!({}), 0),
        (json!({"statusWhenExhausted": "ready"}), 0),
        (json!({"statusWhenExhausted": "notReady"}), 50),
    ] {
        let mut net = Net::new();
        net.set("ipam.subnet", json!("10.1.0.0/30")).set("ipam.sticky", settings.clone());
        net.verb("STATUS", "").silent();
        assert!(!net.beside("data").exists(), "a STATUS makes no store");
        net.add("a").ip();
        let seen = net.verb("STATUS", "");
        if full == 0 {
            seen.silent()
        } else {
            drop(seen.fails(50, &["10.1.0.1-10.1.0.2"]))
        }
        net.del("a").silent();
        net.verb("STATUS", "").silent();
    }
}

#[test]
fn status_counts_what_could_be_reclaimed_in_the_set_that_is_full() {
    let mut net = Net::sticky();
    net.ranges(json!([[{"subnet": "10.1.0.0/30"}]]));
    net.set("ipam.sticky.statusWhenExhausted", json!("notReady"));
    net.add_pod("a", "web-0", "u1").ip();
    net.del("a").silent();
    net.verb("STATUS", "").fails(50, &[]);
    net.set("ipam.sticky.onExhaustion", json!("reclaim"));
    net.verb("STATUS", "").silent();
    // What is kept in another set is of no use.
    net.ranges(json!([[{"subnet": "10.2.0.0/30"}]]));
    net.add("b").ip();
    net.verb("STATUS", "").fails(50, &["10.2.0"]);
}

#[test]
fn status_refuses_a_configuration_that_add_would_refuse() {
    let mut net = Net::new();
    net.set("ipam.subnet", json!("10.1.0.5/24"));
    net.verb("STATUS", "").fails(7, &["10.1.0.5/24"]);
    net.set("ipam.subnet", json!(null));
    net.verb("STATUS", "").fails(7, &["ranges"]);
    net.set("capabilities", json!({"ipRanges": true}));
    net.verb("STATUS", "").silent();
}
