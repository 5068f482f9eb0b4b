//! Addresses that somebody asks for.

use serde_json::json;

use crate::net::{Net, pod};

#[test]
fn an_address_may_be_asked_for_in_three_places() {
    let mut net = Net::new();
    assert_eq!(net.add_with("a", "CNI_ARGS", "IP=10.1.0.5").ip(), "10.1.0.5");
    assert_eq!(net.add("next").ip(), "10.1.0.6", "the search goes on behind it");
    assert_eq!(net.add_with("b", "CNI_ARGS", "IP=").ip(), "10.1.0.2");
    net.set("args", json!({"cni": {"ips": ["10.1.0.3"]}}));
    assert_eq!(net.add_with("c", "CNI_ARGS", "IP=10.1.0.4").ip(), "10.1.0.3", "the list wins");
    net.set("args", json!(null)).set("runtimeConfig", json!({"ips": ["10.1.0.4/29"]}));
    assert_eq!(net.add("d").json()["ips"][0]["address"], "10.1.0.4/29");
}

#[test]
fn one_is_asked_for_in_each_family() {
    let mut net = Net::new();
    net.ranges(json!([[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]]));
    net.set("runtimeConfig", json!({"ips": ["fd00:1::55/64", "::ffff:10.1.0.55"]}));
    assert_eq!(net.add("a").ips(), ["10.1.0.55", "fd00:1::55"]);
    net.set("runtimeConfig", json!({"ips": ["10.1.0.56", "10.1.0.57"]}));
    net.add("b").fails(101, &["10.1.0.56", "10.1.0.57"]);
    assert_eq!(net.held().len(), 2);
}

#[test]
fn what_is_not_to_be_had_is_refused_with_the_reason() {
    let net = Net::new();
    assert_eq!(net.add_with("a", "CNI_ARGS", "IP=10.1.0.5").ip(), "10.1.0.5");
    for (address, word) in [
        ("10.1.0.5", "container a"),
        ("10.1.0.1", "gateway"),
        ("10.9.0.1", "none of the range sets"),
        ("10.1.0.0", "none of the range sets"),
        ("10.1.0.7", "none of the range sets"),
        ("fd00::1", "none of the range sets"),
    ] {
        net.add_with("b", "CNI_ARGS", &format!("IP={address}")).fails(101, &[address, word]);
    }
    assert_eq!(net.held(), ["10.1.0.5"]);
    net.add_with("a", "CNI_ARGS", "IP=10.1.0.4").fails(101, &["10.1.0.4", "10.1.0.5"]);
    assert_eq!(net.add_with("a", "CNI_ARGS", "IP=10.1.0.5").ip(), "10.1.0.5");
}

#[test]
fn a_kept_address_is_refused_to_others_and_a_pin_moves_its_own_pod() {
    let net = Net::sticky();
    assert_eq!(net.add_pod("a", "web-0", "u1").ip(), "10.1.0.2");
    net.del("a").silent();
    net.add_with("b", "CNI_ARGS", "IP=10.1.0.2").fails(101, &["kept for", "db/web-0"]);
    let pinned = format!("{};IP=10.1.0.6", pod("db", "web-0", "u1"));
    assert_eq!(net.add_with("c", "CNI_ARGS", &pinned).ip(), "10.1.0.6");
    assert_eq!(net.held(), ["10.1.0.6"], "the old one is let go of");
    net.del("c").silent();
    assert_eq!(net.add_pod("d", "web-0", "u1").ip(), "10.1.0.6", "and the pin stays");
}

#[test]
fn a_refused_request_takes_no_address() {
    // One set is full of kept addresses, which may be reclaimed; the request in the other set is refused.
    let mut net = Net::sticky();
    net.ranges(json!([[{"subnet": "10.1.0.0/30"}], [{"subnet": "fd00::/64"}]]));
    net.set("ipam.sticky.onExhaustion", json!("reclaim"));
    let kept = net.add_pod("a", "web-0", "u1").ips();
    net.del("a").silent();
    net.add_with("b", "CNI_ARGS", "IP=fd00::1").fails(101, &["gateway"]);
    net.add_with("b", "CNI_ARGS", &format!("IP={}", kept[1])).fails(101, &["kept for"]);
    assert_eq!(net.add_pod("c", "web-0", "u1").ips(), kept);
}
