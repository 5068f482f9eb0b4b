//! Results: the shape of each version, ranges, gateways, routes, name service, and what came before.

use serde_json::{Value, json};

use crate::net::{Net, VERSIONS};

fn dual() -> Net {
    let mut net = Net::new();
    net.ranges(json!([[{"subnet": "10.1.0.0/24"}], [{"subnet": "fd00:1::/64"}]]));
    net.set("ipam.routes", json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "fd00:1::9"}]));
    net
}

#[test]
fn each_version_has_its_own_shape() {
    let old = |version: &str| {
        json!({
            "cniVersion": version,
            "ip4": {"ip": "10.1.0.2/24", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}]},
            "ip6": {"ip": "fd00:1::2/64", "gateway": "fd00:1::1", "routes": [{"dst": "::/0", "gw": "fd00:1::9"}]},
            "dns": {},
        })
    };
    let new = |version: &str, families: bool| {
        let mut ips = json!([
            {"address": "10.1.0.2/24", "gateway": "10.1.0.1"},
            {"address": "fd00:1::2/64", "gateway": "fd00:1::1"},
        ]);
        if families {
            ips[0]["version"] = json!("4");
            ips[1]["version"] = json!("6");
        }
        let routes = json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "fd00:1::9"}]);
        json!({"cniVersion": version, "ips": ips, "routes": routes, "dns": {}})
    };
    for version in VERSIONS {
        let mut net = dual();
        net.set("cniVersion", json!(version));
        let expected = match version {
            "0.1.0" | "0.2.0" => old(version),
            "0.3.0" | "0.3.1" | "0.4.0" => new(version, true),
            _ => new(version, false),
        };
        let mut seen = net.add("c1").json();
        // From 1.0.0 on an empty name service may be left out.
        if seen.get("dns").is_none() {
            seen["dns"] = json!({});
        }
        assert_eq!(seen, expected, "{version}");
        assert_eq!(net.add("c1").json().get("cniVersion"), expected.get("cniVersion"));
        net.del("c1").silent();
        assert!(net.held().is_empty(), "{version}");
    }
}

#[test]
fn no_version_is_the_oldest() {
    for version in [json!(null), json!("")] {
        let mut net = Net::new();
        net.set("cniVersion", version);
        assert_eq!(net.add("c1").json()["cniVersion"], "0.1.0");
    }
}

#[test]
fn every_error_bears_the_version_that_was_asked_in() {
    for version in VERSIONS {
        let mut net = Net::new();
        net.set("cniVersion", json!(version)).set("ipam.subnet", json!("x"));
        assert_eq!(net.add("c1").fails(7, &[])["cniVersion"], version);
    }
}

#[test]
fn addresses_come_in_turn_and_wrap_round() {
    let net = Net::new();
    assert_eq!(["a", "b"].map(|id| net.add(id).ip()), ["10.1.0.2", "10.1.0.3"]);
    net.del("a").silent();
    assert_eq!(["c", "d", "e"].map(|id| net.add(id).ip()), ["10.1.0.4", "10.1.0.5", "10.1.0.6"]);
    assert_eq!(net.add("f").ip(), "10.1.0.2");
    let error = net.add("g").fails(100, &["10.1.0.1-10.1.0.6"]);
    assert!(error["details"].as_str().unwrap().contains("ranges"));
    net.del("d").silent();
    assert_eq!(net.add("g").ip(), "10.1.0.5");
}

#[test]
fn a_container_that_asks_twice_has_one_address_per_interface_and_network() {
    let mut net = Net::new();
    assert_eq!(net.add("a").json(), net.add("a").json());
    assert_eq!(net.held().len(), 1);
    assert_eq!(net.add_with("a", "CNI_IFNAME", "eth1").ip(), "10.1.0.3");
    net.set("name", json!("other"));
    assert_eq!(net.add("a").ip(), "10.1.0.2");
}

#[test]
fn the_ends_of_a_range_are_given_out_and_the_gateway_is_not() {
    for (range, expected) in [
        (
            json!({"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.10", "rangeEnd": "10.1.0.12", "gateway": "10.1.0.11"}),
            vec!["10.1.0.10", "10.1.0.12"],
        ),
        (json!({"subnet": "fd00::/126"}), vec!["fd00::2", "fd00::3"]),
        (json!({"subnet": "10.1.0.0/30"}), vec!["10.1.0.2"]),
        (json!({"subnet": "10.1.0.0/24", "rangeEnd": "10.1.0.2"}), vec!["10.1.0.2"]),
        (json!({"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.253"}), vec!["10.1.0.253", "10.1.0.254"]),
        (
            json!({"subnet": "10.1.0.0/24", "rangeStart": "10.1.0.0", "rangeEnd": "10.1.0.2"}),
            vec!["10.1.0.2"],
        ),
        (
            json!({"subnet": "10.1.0.0/24", "rangeEnd": "10.1.0.1", "gateway": "192.168.5.5"}),
            vec!["10.1.0.1"],
        ),
        (json!({"subnet": "::1234:0/112", "rangeEnd": "::1234:2"}), vec!["::1234:2"]),
        (
            json!({"subnet": "10.0.0.0/15", "rangeStart": "10.0.255.255", "rangeEnd": "10.1.0.0"}),
            vec!["10.0.255.255", "10.1.0.0"],
        ),
    ] {
        let mut net = Net::new();
        net.ranges(json!([[range.clone()]]));
        for (number, address) in expected.iter().enumerate() {
            assert_eq!(net.add(&format!("c{number}")).ip(), *address, "{range}");
        }
        net.add("one-more").fails(100, &[]);
    }
}

#[test]
fn ranges_of_a_set_are_used_up_in_their_order_and_sets_give_one_each() {
    let mut net = Net::new();
    net.ranges(json!([[{"subnet": "10.2.0.0/30"}, {"subnet": "10.1.0.0/30"}], [{"subnet": "fd00::/64"}]]));
    assert_eq!(net.add("a").ips(), ["10.2.0.2", "fd00::2"]);
    assert_eq!(net.add("b").ips(), ["10.1.0.2", "fd00::3"]);
    net.add("c").fails(100, &["10.2.0.1-10.2.0.2,10.1.0.1-10.1.0.2"]);
    assert_eq!(net.held().len(), 4, "a set that is used up takes nothing from the other");
}

#[test]
fn sets_of_the_runtime_come_first_then_the_single_subnet_then_the_list() {
    let mut net = Net::new();
    net.set("ipam.ranges", json!([[{"subnet": "10.2.0.0/24"}]]));
    net.set("runtimeConfig", json!({"ipRanges": [[{"subnet": "10.3.0.0/24", "rangeStart": "10.3.0.20"}]]}));
    assert_eq!(net.add("a").ips(), ["10.3.0.20", "10.1.0.2", "10.2.0.2"]);
}

#[test]
fn routes_and_name_service_are_passed_on() {
    let mut net = Net::new();
    let file = net.beside("resolv.conf");
    std::fs::write(
        &file,
        "# x\nnameserver 10.0.0.53\nsearch a.example b.example\noptions ndots:5\ndomain d\n",
    )
    .unwrap();
    net.set("ipam.resolvConf", json!(file));
    net.set("ipam.routes", json!([{"dst": "10.2.3.1/24", "gw": "::ffff:10.1.0.9", "mtu": 1400}]));
    let seen = net.add("a").json();
    assert_eq!(seen["routes"], json!([{"dst": "10.2.3.1/24", "gw": "10.1.0.9", "mtu": 1400}]));
    assert_eq!(
        seen["dns"],
        json!({"nameservers": ["10.0.0.53"], "domain": "d", "search": ["a.example", "b.example"], "options": ["ndots:5"]})
    );
}

#[test]
fn what_came_before_is_joined_with_ours() {
    let mut net = Net::new();
    net.set(
        "prevResult",
        json!({
            "cniVersion": "1.1.0",
            "interfaces": [{"name": "eth0", "sandbox": "/run/netns/x"}],
            "ips": [{"address": "192.0.2.5/24", "interface": 0}],
            "dns": {"domain": "d"},
        }),
    );
    let seen = net.add("a").json();
    assert_eq!(seen["interfaces"][0]["name"], "eth0");
    let ips: Vec<&Value> = seen["ips"].as_array().unwrap().iter().map(|ip| &ip["address"]).collect();
    assert_eq!(ips, ["192.0.2.5/24", "10.1.0.2/29"]);
    assert_eq!(seen["dns"]["domain"], "d");
}
