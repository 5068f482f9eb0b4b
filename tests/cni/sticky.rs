//! Pods that keep their addresses on one node.

use std::fs;
use std::io::Write;

use serde_json::json;

use crate::net::{Net, Seen, env, pod, start};

#[test]
fn a_pod_of_the_selected_namespace_has_its_address_back_and_another_never_gets_it() {
    let net = Net::sticky();
    assert_eq!(net.add_pod("a", "web-0", "u1").ip(), "10.1.0.2");
    net.del("a").silent();
    let others: Vec<String> = (0..4).map(|n| net.add(&format!("o{n}")).ip()).collect();
    assert!(!others.contains(&"10.1.0.2".to_owned()), "{others:?}");
    net.add("o9").fails(100, &[]);
    assert_eq!(net.add_pod("b", "web-0", "u2").ip(), "10.1.0.2");
}

#[test]
fn others_lose_theirs_and_the_same_name_elsewhere_is_another_pod() {
    let mut net = Net::sticky();
    net.set("ipam.sticky.excludePods", json!(["db/tmp-*"]));
    for (namespace, name) in [("web", "web-0"), ("db", "tmp-1")] {
        net.add_with("x", "CNI_ARGS", &pod(namespace, name, "u")).ip();
        net.del("x").silent();
        assert!(net.held().is_empty(), "{namespace}/{name}");
    }
    let own = net.add_pod("a", "web-0", "u1").ip();
    net.del("a").silent();
    let other = net.add_pod("b", "web-1", "u1").ip();
    let interface = {
        let mut env = env("ADD", "c");
        env.insert("CNI_ARGS".into(), pod("db", "web-0", "u1"));
        env.insert("CNI_IFNAME".into(), "eth1".into());
        net.call(&env).ip()
    };
    assert!(own != other && own != interface && other != interface);
}

#[test]
fn a_new_sandbox_takes_over_at_once_and_the_old_ones_late_del_frees_nothing() {
    let mut net = Net::sticky();
    let here = net.beside("netns");
    fs::write(&here, "").unwrap();
    let add = |net: &Net, id: &str| {
        let mut env = env("ADD", id);
        env.insert("CNI_ARGS".into(), pod("db", "web-0", "u1"));
        env.insert("CNI_NETNS".into(), here.display().to_string());
        net.call(&env)
    };
    let address = add(&net, "old").ip();
    assert_eq!(add(&net, "new").ip(), address, "though the old namespace is still there: it is the same pod");
    for _ in 0..2 {
        net.del("old").silent();
        net.verb("CHECK", "new").silent();
    }
    net.gc(&["new"]).silent();
    net.verb("CHECK", "new").silent();
    net.verb("CHECK", "old").fails(3, &[]);
    net.del("new").silent();
    net.del("old").silent();
    assert_eq!(net.held(), [address]);
}

#[test]
fn another_pod_of_the_same_name_is_asked_to_try_again_while_the_old_one_lives() {
    let mut net = Net::sticky();
    let old = net.beside("old-netns");
    fs::write(&old, "").unwrap();
    let ask = |id: &str, uid: &str, netns: &str| {
        let mut env = env("ADD", id);
        env.insert("CNI_ARGS".into(), pod("db", "web-0", uid));
        env.insert("CNI_NETNS".into(), netns.to_owned());
        env
    };
    let address = net.call(&ask("old", "u1", &old.display().to_string())).ip();
    net.call(&ask("new", "u2", "/run/netns/b")).fails(11, &["db/web-0", "old"]);
    net.verb("CHECK", "old").silent();
    // It waits, and goes on as soon as the old namespace is gone.
    net.set("ipam.sticky.waitForOldPod", json!("5m"));
    let mut waiting = start(&ask("new", "u2", "/run/netns/b"));
    waiting.stdin.take().unwrap().write_all(net.config.to_string().as_bytes()).unwrap();
    net.verb("CHECK", "old").silent();
    assert!(waiting.try_wait().unwrap().is_none(), "it waits");
    fs::remove_file(&old).unwrap();
    assert_eq!(Seen::of(waiting).ip(), address);
    net.del("old").silent();
    net.verb("CHECK", "new").silent();
}

#[test]
fn another_pod_waits_until_the_old_one_is_deleted() {
    let mut net = Net::sticky();
    let old = net.beside("old-netns");
    fs::write(&old, "").unwrap();
    let mut env = env("ADD", "old");
    env.insert("CNI_ARGS".into(), pod("db", "web-0", "u1"));
    env.insert("CNI_NETNS".into(), old.display().to_string());
    let address = net.call(&env).ip();
    net.set("ipam.sticky.waitForOldPod", json!("5m"));
    env.insert("CNI_ARGS".into(), pod("db", "web-0", "u2"));
    env.insert("CNI_CONTAINERID".into(), "new".into());
    env.insert("CNI_NETNS".into(), "/run/netns/b".into());
    let mut waiting = start(&env);
    waiting.stdin.take().unwrap().write_all(net.config.to_string().as_bytes()).unwrap();
    net.del("old").silent();
    assert_eq!(Seen::of(waiting).ip(), address);
}

#[test]
fn a_reboot_frees_what_was_dynamic_and_keeps_what_was_sticky() {
    let mut net = Net::sticky();
    let boot = net.beside("boot-id");
    net.set("ipam.sticky.bootIDFile", json!(boot));
    fs::write(&boot, "first\n").unwrap();
    let sticky = net.add_pod("a", "web-0", "u1").ip();
    net.add("b").ip();
    let away = net.add_pod("c", "web-1", "u1").ip();
    net.del("c").silent();
    fs::write(&boot, "second\n").unwrap();
    net.verb("CHECK", "a").fails(3, &[]);
    assert_eq!(net.held(), [sticky.clone(), away.clone()]);
    // Late DELs of containers from before the boot.
    net.del("a").silent();
    net.del("b").silent();
    assert_eq!(net.add_pod("d", "web-1", "u1").ip(), away);
    assert_eq!(net.add_pod("e", "web-0", "u9").ip(), sticky);
    fs::write(&boot, "").unwrap();
    net.add("f").fails(5, &["boot-id", "empty"]);
    fs::remove_file(&boot).unwrap();
    net.add("f").fails(5, &["boot-id"]);
}

#[test]
fn a_full_pool_fails_reclaims_the_longest_kept_or_takes_what_has_expired() {
    let fill = |net: &Net| -> Vec<String> {
        let all: Vec<_> =
            (0..5).map(|n| net.add_pod(&format!("c{n}"), &format!("w-{n}"), "u").ip()).collect();
        for n in [3, 1] {
            net.del(&format!("c{n}")).silent();
        }
        all
    };
    let net = Net::sticky();
    fill(&net);
    net.add("x").fails(100, &["sticky.onExhaustion", "sticky.retention"]);

    let mut net = Net::sticky();
    let all = fill(&net);
    net.set("ipam.sticky.onExhaustion", json!("reclaim"));
    let taken = [net.add("x").ip(), net.add("y").ip()];
    assert!(taken.contains(&all[3]) && taken.contains(&all[1]), "{taken:?}");
    net.add("z").fails(100, &[]);
    net.verb("CHECK", "c0").silent();

    let mut net = Net::sticky();
    net.set("ipam.sticky.retention", json!("0s"));
    let all = fill(&net);
    let taken = [net.add("x").ip(), net.add("y").ip()];
    assert!(taken.contains(&all[3]) && taken.contains(&all[1]), "{taken:?}");
    net.add("z").fails(100, &[]);
}

#[test]
fn a_pod_keeps_both_families_and_joins_a_range_set_that_is_new() {
    let mut net = Net::sticky();
    net.ranges(json!([[{"subnet": "10.1.0.0/29"}]]));
    assert_eq!(net.add_pod("a", "web-0", "u1").ips(), ["10.1.0.2"]);
    net.del("a").silent();
    net.ranges(json!([[{"subnet": "fd00::/64"}], [{"subnet": "10.1.0.0/29"}]]));
    let both = net.add_pod("b", "web-0", "u1").ips();
    assert_eq!(both, ["fd00::2", "10.1.0.2"]);
    net.add("other").ips();
    net.del("b").silent();
    assert_eq!(net.add_pod("c", "web-0", "u1").ips(), both);
    // A range that is no longer there gives nothing.
    net.ranges(json!([[{"subnet": "10.9.0.0/29"}]]));
    assert_eq!(net.add_pod("d", "web-0", "u1").ips(), ["10.9.0.2"]);
}

#[test]
fn a_pod_named_without_a_namespace_keeps_its_address() {
    let mut net = Net::new();
    // podman's, and a runtime's that passes an empty namespace.
    for args in ["IgnoreUnknown=1;K8S_POD_NAME=db-0", "IgnoreUnknown=1;K8S_POD_NAMESPACE=;K8S_POD_NAME=db-0"]
    {
        net.set("ipam.sticky", json!({"logLevel": "error", "waitForOldPod": "0s"}));
        let address = net.add_with("c1", "CNI_ARGS", args).ip();
        net.del("c1").silent();
        assert_ne!(net.add_with("c2", "CNI_ARGS", "K8S_POD_NAME=db-1").ip(), address);
        assert_eq!(net.add_with("c3", "CNI_ARGS", args).ip(), address);
        net.del("c2").silent();
        net.del("c3").silent();
    }
    // Its namespace is `default`, so patterns of other namespaces leave it alone.
    net.set("ipam.sticky.pods", json!(["db/*"]));
    net.add_with("c4", "CNI_ARGS", "K8S_POD_NAME=web-0").ip();
    let held = net.held().len();
    net.del("c4").silent();
    assert_eq!(net.held().len(), held - 1, "it is no sticky pod, and its address is released");
}

#[test]
fn the_address_of_ciliums_ingress_is_kept_until_its_del_and_never_for_a_pod() {
    let mut net = Net::sticky();
    net.set("ipam.sticky.pods", json!(["*/*"]));
    let args = pod("kube-system", "cilium-ingress-n1", "");
    let address = net.add_with("cilium-ingress-n1", "CNI_ARGS", &args).ip();
    // Each start of cilium-agent asks again, with another namespace.
    assert_eq!(net.add_with("cilium-ingress-n1", "CNI_ARGS", &args).ip(), address);
    let mut env = env("ADD", "cilium-ingress-n1");
    env.insert("CNI_NETNS".into(), "/proc/self/ns/net".into());
    assert_eq!(net.call(&env).ip(), address, "cilium-agent may name its own namespace");
    net.add("c1").ip();
    net.gc(&[]).silent();
    assert_eq!(net.held(), [address], "no runtime lists it");
    net.del("cilium-ingress-n1").silent();
    net.del("cilium-ingress-n1").silent();
    assert!(net.held().is_empty());
}
