//! The environment: what is missing, malformed or not ours to have.

use std::io::Write;

use crate::net::{Net, Seen, VERSIONS, env, run, start};

#[test]
fn without_a_command_it_prints_what_it_is() {
    let seen = run(&Default::default(), b"");
    assert_eq!((seen.status, seen.stdout.as_str()), (0, ""), "{seen:?}");
    assert!(seen.stderr.contains("sticky-ipam") && seen.stderr.contains("1.1.0"), "{seen:?}");
}

#[test]
fn a_missing_or_empty_variable_is_named() {
    let net = Net::new();
    for (verb, key, code) in [
        ("ADD", "CNI_CONTAINERID", 4),
        ("ADD", "CNI_NETNS", 4),
        ("ADD", "CNI_IFNAME", 4),
        ("ADD", "CNI_PATH", 0),
        ("DEL", "CNI_CONTAINERID", 4),
        ("DEL", "CNI_IFNAME", 4),
        ("DEL", "CNI_NETNS", 0),
        ("CHECK", "CNI_NETNS", 4),
        ("CHECK", "CNI_CONTAINERID", 4),
        ("GC", "CNI_PATH", 4),
        ("STATUS", "CNI_CONTAINERID", 0),
    ] {
        for empty in [false, true] {
            let mut env = env(verb, "c1");
            env.remove(key);
            if empty {
                env.insert(key.to_owned(), String::new());
            }
            let seen = net.call(&env);
            match code {
                0 => assert_eq!(seen.status, 0, "{verb} without {key}: {seen:?}"),
                code => drop(seen.fails(code, &[key, verb])),
            }
        }
    }
}

#[test]
fn verbs_ids_and_interfaces_that_are_none_are_refused_and_leave_nothing() {
    let net = Net::new();
    for verb in ["add", "ADDD", " ADD", "Ä"] {
        net.verb(verb, "c1").fails(4, &["CNI_COMMAND"]);
    }
    for id in ["../x", "a/b", "..", ".x", "-x", "é", "a b", "a\nb"] {
        for verb in ["ADD", "DEL", "CHECK"] {
            net.verb(verb, id).fails(4, &["CNI_CONTAINERID"]);
        }
    }
    for name in ["abcdefghijklmnop", "..", ".", "eth/0", "eth:0", "eth 0", "../../x"] {
        let mut env = env("ADD", "c1");
        env.insert("CNI_IFNAME".into(), name.into());
        net.call(&env).fails(4, &["CNI_IFNAME"]);
    }
    assert!(!net.beside("data").exists(), "a refused request touches no disk");
}

#[test]
fn long_ids_are_distinct_and_released() {
    let net = Net::new();
    let (one, other) = ("e".repeat(300), format!("{}f", "e".repeat(299)));
    let addresses = [&one, &other].map(|id| net.add(id).ip());
    assert_ne!(addresses[0], addresses[1]);
    assert_eq!(net.add(&one).ip(), addresses[0]);
    net.del(&one).silent();
    assert_eq!(net.held(), [addresses[1].clone()]);
}

#[test]
fn cni_args_are_read_by_their_rules() {
    let net = Net::new();
    for (args, word) in [
        ("IP=nonsense", "IP=nonsense"),
        ("ip=10.1.0.3", "ip=10.1.0.3"),
        ("FOO=bar", "FOO=bar"),
        ("novalue", "novalue"),
        ("IgnoreUnknown=perhaps", "perhaps"),
        ("K8S_POD_NAMESPACE=../..;K8S_POD_NAME=x", "../.."),
        ("K8S_POD_NAMESPACE=a;K8S_POD_NAME=b/c", "b/c"),
        ("K8S_POD_NAMESPACE=a;K8S_POD_NAME=b;K8S_POD_UID=../u", "../u"),
    ] {
        net.add_with("c1", "CNI_ARGS", args).fails(4, &["CNI_ARGS", word]);
    }
    assert_eq!(net.add_with("c1", "CNI_ARGS", "FOO=bar;IgnoreUnknown=true").ips().len(), 1);
    // What cannot be understood must not keep an address from going back.
    let mut env = env("DEL", "c1");
    env.insert("CNI_ARGS".into(), "nonsense".into());
    net.call(&env).silent();
    assert!(net.held().is_empty());
}

#[test]
fn the_plugins_own_namespace_gets_no_address_unless_configured() {
    let net = Net::new();
    let mut env = env("ADD", "c1");
    env.insert("CNI_NETNS".into(), format!("/proc/{}/ns/net", std::process::id()));
    net.call(&env).fails(8, &["CNI_NETNS"]);
    env.insert("CNI_NETNS_OVERRIDE".into(), "1".into());
    net.call(&env).ip();
    env.insert("CNI_COMMAND".into(), "DEL".into());
    env.remove("CNI_NETNS_OVERRIDE");
    net.call(&env).silent();
}

#[test]
fn version_is_answered_whatever_comes_on_standard_input_and_though_it_stays_open() {
    let env: std::collections::BTreeMap<_, _> = [("CNI_COMMAND".to_owned(), "VERSION".to_owned())].into();
    for (stdin, version) in [
        (&b"{\"cniVersion\":\"1.0.0\"}"[..], "1.0.0"),
        (b"{\"cniVersion\":\"0.4.0\",\"name\":5}", "0.4.0"),
        (b"", "1.1.0"),
        (b"no json", "1.1.0"),
        (b"{\"cniVersion\":7}", "1.1.0"),
    ] {
        let reply = run(&env, stdin).json();
        assert_eq!(reply["cniVersion"], version);
        assert_eq!(reply["supportedVersions"], serde_json::json!(VERSIONS));
    }
    let mut child = start(&env);
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(b"{\"cniVersion\":\"0.3.1\"}").unwrap();
    stdin.flush().unwrap();
    assert_eq!(Seen::of(child).json()["cniVersion"], "0.3.1");
    drop(stdin);
}
