use super::*;
use proptest::prelude::*;

fn read(value: Value, version: CniVersion) -> CniResult {
    CniResult::from_json("prevResult", &value, version).unwrap()
}

fn dual_stack() -> Value {
    json!({"cniVersion": "1.1.0",
        "ips": [{"address": "10.1.0.2/24", "gateway": "10.1.0.1"}, {"address": "fd00:1::2/64", "gateway": "fd00:1::1"}],
        "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "fd00:1::9"}]})
}

#[test]
fn each_version_has_its_own_shape() {
    let result = read(dual_stack(), CniVersion::LATEST);
    for version in ["0.1.0", "0.2.0"] {
        let want = json!({"cniVersion": version,
            "ip4": {"ip": "10.1.0.2/24", "gateway": "10.1.0.1", "routes": [{"dst": "0.0.0.0/0"}]},
            "ip6": {"ip": "fd00:1::2/64", "gateway": "fd00:1::1", "routes": [{"dst": "::/0", "gw": "fd00:1::9"}]},
            "dns": {}});
        assert_eq!(result.print_as(CniVersion::parse(version).unwrap()), want);
    }
    for version in ["0.3.0", "0.3.1", "0.4.0"] {
        let want = json!({"cniVersion": version, "ips": [
                {"version": "4", "address": "10.1.0.2/24", "gateway": "10.1.0.1"},
                {"version": "6", "address": "fd00:1::2/64", "gateway": "fd00:1::1"}],
            "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0", "gw": "fd00:1::9"}], "dns": {}});
        assert_eq!(result.print_as(CniVersion::parse(version).unwrap()), want);
    }
    assert_eq!(result.print_as(CniVersion::V1_1_0), dual_stack());
    assert_eq!(result.print_as(CniVersion::V1_0_0)["cniVersion"], "1.0.0");
    assert_eq!(result.print_as(CniVersion::V1_0_0)["ips"], dual_stack()["ips"]);
}

#[test]
fn old_versions_drop_routes_without_an_address_of_their_family_and_all_but_the_hop() {
    let mut result =
        read(json!({"ips": [{"address": "10.1.0.2/24"}], "routes": [{"dst": "::/0"}]}), CniVersion::LATEST);
    let printed = result.print_as(CniVersion::V0_2_0);
    assert_eq!(printed, json!({"cniVersion": "0.2.0", "ip4": {"ip": "10.1.0.2/24"}, "dns": {}}));
    result.routes = read(
        json!({"routes": [{"dst": "192.168.0.0/16", "gw": "10.1.0.9", "mtu": 1400, "table": 0, "scope": 253, "x": 1}]}),
        CniVersion::LATEST,
    )
    .routes;
    let old = result.print_as(CniVersion::V0_2_0);
    assert_eq!(old["ip4"]["routes"], json!([{"dst": "192.168.0.0/16", "gw": "10.1.0.9"}]));
    let new = result.print_as(CniVersion::V1_1_0);
    assert_eq!(new["routes"][0]["table"], 0);
    assert_eq!(new["routes"][0]["x"], 1);
}

#[test]
fn route_destinations_keep_host_bits_and_addresses_become_canonical() {
    let result = read(
        json!({"routes": [{"dst": "10.2.3.1/24", "gw": "::ffff:10.1.0.9"}, {"dst": "2001:DB8:0::/32"},
                          {"dst": "::ffff:10.9.0.0/112"}]}),
        CniVersion::LATEST,
    );
    let printed = result.print_as(CniVersion::LATEST);
    assert_eq!(
        printed["routes"],
        json!([{"dst": "10.2.3.1/24", "gw": "10.1.0.9"}, {"dst": "2001:db8::/32"}, {"dst": "10.9.0.0/16"}])
    );
}

#[test]
fn interfaces_show_what_their_version_has_room_for_and_unknown_fields_survive() {
    let value = json!({"cniVersion": "1.1.0", "odd": {"a": 1}, "interfaces": [
        {"name": "eth0", "mac": "aa", "mtu": 1500, "sandbox": "/x", "socketPath": "/s", "pciID": "p", "new": true}]});
    let result = read(value.clone(), CniVersion::LATEST);
    assert_eq!(result.print_as(CniVersion::V1_1_0), value);
    let older = result.print_as(CniVersion::V0_4_0);
    assert_eq!(older["interfaces"], json!([{"name": "eth0", "mac": "aa", "sandbox": "/x", "new": true}]));
    let oldest = result.print_as(CniVersion::V0_2_0);
    assert_eq!(oldest, json!({"cniVersion": "0.2.0", "dns": {}}));
}

#[test]
fn merging_keeps_what_was_there_and_adds_ours_once() {
    let prev = read(
        json!({"interfaces": [{"name": "eth0", "sandbox": "/x"}], "ips": [{"address": "192.0.2.5/24", "interface": 0}],
               "routes": [{"dst": "0.0.0.0/0"}], "dns": {"domain": "d", "search": ["a"]}, "odd": 1}),
        CniVersion::LATEST,
    );
    let ours = read(
        json!({"interfaces": [{"name": "x"}], "ips": [{"address": "10.1.0.2/24", "interface": 0}, {"address": "192.0.2.5/24"}],
               "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.0.0.0/8"}], "dns": {"domain": "e", "search": ["a", "b"]}}),
        CniVersion::LATEST,
    );
    let printed = CniResult::merged(prev.clone(), ours).print_as(CniVersion::LATEST);
    assert_eq!(
        printed,
        json!({"cniVersion": "1.1.0", "odd": 1,
               "interfaces": [{"name": "eth0", "sandbox": "/x"}, {"name": "x"}],
               "ips": [{"address": "192.0.2.5/24", "interface": 0}, {"address": "10.1.0.2/24", "interface": 1}],
               "routes": [{"dst": "0.0.0.0/0"}, {"dst": "10.0.0.0/8"}], "dns": {"domain": "d", "search": ["a", "b"]}})
    );
    assert_eq!(CniResult::merged(prev.clone(), CniResult::default()), prev);
}

#[test]
fn a_broken_result_is_refused_with_the_path_to_the_fault() {
    for (value, path) in [
        (json!({"ips": [{"address": "x"}]}), "prevResult.ips[0].address"),
        (json!({"ips": [{}]}), "prevResult.ips[0].address"),
        (json!({"ips": [{"address": "10.0.0.1/8", "interface": "0"}]}), "prevResult.ips[0].interface"),
        (json!({"routes": {}}), "prevResult.routes"),
        (json!({"dns": {"search": "a"}}), "prevResult.dns.search"),
        (json!({"cniVersion": "7.0.0"}), "prevResult.cniVersion"),
        (json!([]), "prevResult"),
    ] {
        let error = CniResult::from_json("prevResult", &value, CniVersion::LATEST).unwrap_err();
        assert!(error.msg.starts_with(path), "{value}: {error}");
    }
}

#[test]
fn the_interface_minus_one_means_none() {
    let result = read(json!({"ips": [{"address": "10.0.0.1/8", "interface": -1}]}), CniVersion::LATEST);
    assert_eq!(result.ips[0].interface, None);
}

fn any_net() -> impl Strategy<Value = IpNet> {
    prop_oneof![
        (any::<u32>(), 0u8..=32).prop_map(|(a, p)| IpNet::new(IpAddr::V4(a.into()), p).unwrap()),
        // The first bit set: never an IPv4-mapped address, which reads back as IPv4.
        (any::<u128>(), 0u8..=128)
            .prop_map(|(a, p)| IpNet::new(IpAddr::V6((a | 1 << 127).into()), p).unwrap()),
    ]
}

prop_compose! {
    fn any_result()(
        nets in prop::collection::vec((any_net(), prop::option::of(any_net()), prop::option::of(0u64..4)), 0..4),
        routes in prop::collection::vec((any_net(), prop::option::of(1u64..9000), prop::option::of(0u64..256)), 0..4),
        names in prop::collection::vec(("[a-z]{1,8}", prop::option::of("[a-z/]{1,8}"), prop::option::of(1u64..9000)), 0..3),
        domain in prop::option::of("[a-z.]{1,9}"), search in prop::collection::vec("[a-z.]{1,9}", 0..3),
    ) -> CniResult {
        CniResult {
            interfaces: names.into_iter().map(|(name, sandbox, mtu)| Interface { name, sandbox, mtu, ..Interface::default() }).collect(),
            ips: nets.into_iter().map(|(address, gw, interface)| IpConfig { address, gateway: gw.map(|n| n.addr()), interface, extra: Map::new() }).collect(),
            routes: routes.into_iter().map(|(dst, mtu, table)| Route { dst, gw: None, mtu, advmss: None, priority: None, table, scope: None, extra: Map::new() }).collect(),
            dns: Dns { domain, search, ..Dns::default() },
            extra: Map::new(),
        }
    }
}

proptest! {
    #[test]
    fn what_is_printed_reads_back_as_the_same_and_prints_the_same_again(result in any_result()) {
        for version in CniVersion::SUPPORTED {
            let printed = result.print_as(version);
            let back = CniResult::from_json("x", &printed, version).unwrap();
            prop_assert_eq!(back.print_as(version), printed);
            if version >= CniVersion::V1_0_0 {
                prop_assert_eq!(&back, &result);
            }
        }
    }
}
