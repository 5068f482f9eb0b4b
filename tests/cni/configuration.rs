//! The configuration: every mistake is refused with the field, the value and what would be right.

use serde_json::{Value, json};

use crate::net::{Net, env, run};

#[test]
fn what_is_no_configuration_is_undecodable() {
    for bytes in [
        &b""[..],
        b"[]",
        b"{",
        b"\xef\xbb\xbf{}",
        b"{} {}",
        b"{\"a\":1}x",
        b"\xff\xfe",
        b"\0",
        b"{\"name\":5}",
    ] {
        for verb in ["ADD", "DEL", "CHECK", "GC", "STATUS"] {
            run(&env(verb, "c1"), bytes).fails(6, &[]);
        }
    }
    // As for any field, null is the same as nothing said.
    run(&env("ADD", "c1"), b"null").fails(7, &["name"]);
}

#[test]
fn a_wrong_field_is_named_with_its_value() {
    let cases: &[(&str, Value, u64, &[&str])] = &[
        ("name", json!(null), 7, &["name"]),
        ("name", json!("a/b"), 7, &["name", "a/b"]),
        ("name", json!("../x"), 7, &["name", "../x"]),
        ("name", json!(5), 6, &["name"]),
        ("ipam", json!(null), 7, &["ipam"]),
        ("ipam", json!("x"), 6, &["ipam"]),
        ("ipam.subnet", json!(null), 7, &["ranges"]),
        ("ipam.subnet", json!("10.1.0.0"), 7, &["subnet", "10.1.0.0"]),
        ("ipam.subnet", json!("10.1.0.5/24"), 7, &["10.1.0.5/24", "10.1.0.0/24"]),
        ("ipam.subnet", json!("fd00::5/64"), 7, &["fd00::/64"]),
        ("ipam.subnet", json!("10.1.0.0/31"), 7, &["10.1.0.0/31"]),
        ("ipam.subnet", json!("10.1.0.0/32"), 7, &["10.1.0.0/32"]),
        ("ipam.subnet", json!("fd00::/127"), 7, &["fd00::/127"]),
        ("ipam.subnet", json!("::ffff:10.1.0.0/120"), 7, &["IPv4"]),
        ("ipam.subnet", json!(7), 6, &["ipam.subnet"]),
        ("ipam.rangeStart", json!("10.2.0.5"), 7, &["rangeStart", "10.2.0.5", "10.1.0.0/29"]),
        ("ipam.rangeEnd", json!("10.2.0.5"), 7, &["rangeEnd", "10.2.0.5"]),
        ("ipam.gateway", json!("foo"), 7, &["gateway", "foo"]),
        ("ipam.routes", json!([{"dst": "x"}]), 7, &["dst", "x"]),
        ("ipam.ranges", json!([[]]), 7, &["ipam.ranges[0]"]),
        ("ipam.ranges", json!([{"subnet": "10.2.0.0/24"}]), 6, &["ipam.ranges[0]"]),
        ("ipam.ranges", json!([[{"subnet": "10.1.0.0/16"}]]), 7, &["overlap"]),
        ("ipam.ranges", json!([[{"subnet": "10.2.0.0/24"}, {"subnet": "fd00::/64"}]]), 7, &["IPv4", "IPv6"]),
        ("ipam.dataDir", json!("relative"), 7, &["dataDir", "relative"]),
        ("ipam.dataDir", json!("/a\0b"), 7, &["dataDir"]),
        ("ipam.resolvConf", json!("relative"), 7, &["resolvConf"]),
        ("ipam.resolvConf", json!("/no/such/file"), 5, &["resolvConf", "/no/such/file"]),
        ("ipam.sticky", json!({"retenton": "1h"}), 7, &["ipam.sticky.retenton", "retention"]),
        ("ipam.sticky", json!({"retention": "soon"}), 7, &["retention", "soon"]),
        ("ipam.sticky", json!({"pods": ["nopattern"]}), 7, &["pods[0]", "nopattern"]),
        ("ipam.sticky", json!({"onExhaustion": "panic"}), 7, &["onExhaustion", "panic", "reclaim"]),
        ("ipam.sticky", json!({"lockTimeout": "1y"}), 7, &["lockTimeout"]),
        ("ipam.sticky", json!({"logMaxFiles": 0}), 7, &["logMaxFiles"]),
        ("sticky", json!({}), 7, &["sticky", "ipam"]),
        ("cniVersion", json!("9.9.9"), 1, &["9.9.9", "1.1.0"]),
        ("cniVersion", json!("abc"), 1, &["abc"]),
        ("cniVersion", json!(1), 6, &["cniVersion"]),
        ("args", json!({"cni": {"ips": ["x"]}}), 7, &["args.cni.ips[0]", "x"]),
        ("runtimeConfig", json!({"ips": [5]}), 6, &["runtimeConfig.ips[0]"]),
        ("runtimeConfig", json!({"ipRanges": [[{"subnet": "x"}]]}), 7, &["runtimeConfig.ipRanges[0][0]"]),
        ("prevResult", json!({"ips": [{"address": "x"}]}), 7, &["prevResult"]),
    ];
    for (path, value, code, words) in cases {
        let mut net = Net::new();
        net.set(path, value.clone());
        let seen = net.add("c1");
        let error: Value = serde_json::from_str(&seen.stdout).unwrap();
        assert_eq!(error["code"], *code, "{path} = {value}: {seen:?}");
        seen.fails(*code, words);
        assert!(!net.beside("data").exists(), "{path} = {value} touched the disk");
    }
}

#[test]
fn two_sets_of_a_family_need_a_version_that_can_express_them() {
    let mut net = Net::new();
    net.ranges(json!([[{"subnet": "10.1.0.0/29"}], [{"subnet": "10.2.0.0/29"}]]));
    for (version, fits) in [("0.2.0", false), ("0.3.0", true)] {
        net.set("cniVersion", json!(version));
        match fits {
            true => assert_eq!(net.add("c1").ips(), ["10.1.0.2", "10.2.0.2"]),
            false => drop(net.add("c1").fails(7, &["0.2.0"])),
        }
    }
}

#[test]
fn del_refuses_two_sets_of_a_family_only_while_there_is_no_store() {
    let two_sets = json!([[{"subnet": "10.1.0.0/29"}], [{"subnet": "10.2.0.0/29"}]]);
    for version in ["0.1.0", "0.2.0"] {
        let sentence = format!("CNI version {version} does not support more than 1 address per family");
        let mut net = Net::new();
        net.ranges(two_sets.clone()).set("cniVersion", json!(version));
        for verb in ["ADD", "DEL", "DEL"] {
            let error = net.verb(verb, "c1").fails(7, &[]);
            assert_eq!(error["msg"], sentence.as_str(), "{verb}");
            assert_eq!(error.get("details"), None, "libcni's clients would see it as a part of the sentence");
        }
        assert!(!net.beside("data").exists(), "nothing was given, so nothing is written");

        // The version was another when the addresses were given: they are released all the same.
        net.set("cniVersion", json!("1.1.0"));
        net.add("c1").ips();
        net.add("c2").ips();
        net.set("cniVersion", json!(version));
        net.del("c1").silent();
        assert_eq!(net.held(), ["10.1.0.3", "10.2.0.3"], "{version}");
        net.del("c1").silent();
        net.del("c2").silent();
        assert!(net.held().is_empty(), "{version}");
    }
}

#[test]
fn a_megabyte_of_what_is_not_ours_changes_nothing() {
    let mut net = Net::new();
    net.set("other", json!("x".repeat(1 << 20)));
    let many: Vec<Value> = (0..20_000).map(|n| json!({"n": n, "text": "y".repeat(30)})).collect();
    net.set("ipam.foreign", json!(many));
    assert_eq!(net.add("c1").ip(), "10.1.0.2");
}

#[test]
fn what_nests_too_deeply_is_refused_and_does_not_overflow() {
    let deep = format!("{{\"name\":\"net\",\"x\":{}1{}}}", "[".repeat(100_000), "]".repeat(100_000));
    run(&env("ADD", "c1"), deep.as_bytes()).fails(6, &[]);
}

#[test]
fn del_and_gc_forgive_a_configuration_that_broke_later() {
    let mut net = Net::new();
    net.add("c1").ip();
    net.add("c2").ip();
    net.set("ipam.subnet", json!("nonsense")).set("ipam.sticky", json!({"no": "such"}));
    net.del("c1").silent();
    assert_eq!(net.held(), ["10.1.0.3"]);
    net.gc(&[]).silent();
    assert!(net.held().is_empty());
}
