//! A directory of host-local's, taken over while its pods run.

use std::fs;

use serde_json::json;

use crate::net::Net;

fn host_locals(net: &Net) {
    fs::create_dir_all(net.file("")).unwrap();
    let long = "e".repeat(64);
    for (name, text) in [
        ("10.1.0.2", "one\r\neth0"),
        ("fd00::2", "one\r\neth0"),
        ("10.1.0.3", "two\r\neth1"),
        ("10.1.0.4", long.as_str()),
        ("10.1.0.5", "not an id"),
        ("last_reserved_ip.0", "10.1.0.5"),
        ("lock", ""),
    ] {
        fs::write(net.file(name), text).unwrap();
    }
}

#[test]
fn its_pods_keep_their_addresses_and_release_them() {
    let mut net = Net::new();
    net.ranges(json!([[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/64"}]]));
    host_locals(&net);
    assert_eq!(net.add("new").ips(), ["10.1.0.6", "fd00::3"], "it goes on where host-local was");
    net.verb("CHECK", "one").silent();
    assert_eq!(net.add("one").ips(), ["10.1.0.2", "fd00::2"]);
    assert_eq!(net.add("last").ips()[0], "10.1.0.5", "what is no record is nobody's");
    net.del("one").silent();
    assert_eq!(net.held(), ["10.1.0.3", "10.1.0.4", "10.1.0.5", "10.1.0.6", "fd00::3", "fd00::4"]);
    net.del(&"e".repeat(64)).silent();
    net.gc(&["new", "last"]).silent();
    assert_eq!(net.held(), ["10.1.0.5", "10.1.0.6", "fd00::3", "fd00::4"]);
}

#[test]
fn a_record_that_host_local_writes_later_counts_too() {
    let net = Net::new();
    net.add("a").ip();
    fs::write(net.file("10.1.0.3"), "theirs\r\neth0").unwrap();
    assert_eq!(net.add("b").ip(), "10.1.0.4");
    net.verb("CHECK", "theirs").silent();
    net.add_with("c", "CNI_ARGS", "IP=10.1.0.3").fails(101, &["theirs"]);
    net.del("theirs").silent();
    assert_eq!(net.add_with("c", "CNI_ARGS", "IP=10.1.0.3").ip(), "10.1.0.3");
}
