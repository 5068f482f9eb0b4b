use std::io::{Read, Write};
use std::os::unix::net::UnixListener;

use serde_json::json;

use super::*;

/// `GET /v1/healthz` as Cilium of all versions from 1.17 on answers it, without what does not concern us.
fn status(version: &str, routing: Value, masquerading: Value) -> Value {
    json!({
        "cilium": {"state": "Ok", "msg": version},
        "cluster": {"self": "n1"},
        "cni-chaining": {"mode": "none"},
        "kube-proxy-replacement": {"mode": "False"},
        "masquerading": masquerading,
        "routing": routing,
    })
}

fn tunnel() -> Value {
    let within = "Legacy";
    json!({"inter-host-routing-mode": "Tunnel", "intra-host-routing-mode": within, "tunnel-protocol": "vxlan"})
}

/// `GET /v1/config` of one version. The map holds the exported fields of its option structure; 1.17 names
/// the kube-proxy replacement there, later ones do not.
fn config(extra: Value) -> Value {
    let mut map = json!({
        "AgentHealthPort": 9879, "EnableAutoDirectRouting": false, "EnableBPFMasquerade": false,
        "EnableEndpointRoutes": false, "EnableIPv4": true, "EnableIPv4Masquerade": true, "EnableIPv6": false,
        "EnableIPv6Masquerade": true, "IPAM": "crd", "IPv4NativeRoutingCIDR": null, "IPv4Range": "auto",
        "MasqueradeInterfaces": ["eth0"], "RoutingMode": "tunnel",
    });
    let fields = extra.as_object().unwrap();
    map.as_object_mut().unwrap().extend(fields.iter().map(|(name, value)| (name.clone(), value.clone())));
    let realized = json!({"options": {"Debug": "Disabled"}, "policy-enforcement": "default"});
    json!({"spec": realized, "status": {
        "addressing": {"ipv4": {"alloc-range": "10.241.0.0/24", "enabled": true, "ip": "10.241.0.77"}},
        "daemonConfigurationMap": map, "datapathMode": "veth", "deviceMTU": 1500, "ipam-mode": "crd",
        "masquerade": true, "masqueradeProtocols": {"ipv4": true, "ipv6": true}, "realized": realized,
    }})
}

#[test]
fn version_and_settings_are_read_as_cilium_1_17_to_1_20_give_them() {
    let legacy =
        json!({"EnableHostLegacyRouting": true, "JoinCluster": false, "KubeProxyReplacement": "false"});
    for (text, version, extra) in [
        ("1.17.18 (v1.17.18-5b1b3ba4)", (1, 17, 18), legacy),
        ("1.18.3 (v1.18.3-c1601689)", (1, 18, 3), json!({})),
        ("1.19.5 (v1.19.5-a9a12a1c)    Stale status data", (1, 19, 5), json!({})),
        ("1.20.1 (v1.20.1-7d68cfb3)", (1, 20, 1), json!({"UnsafeDaemonConfigOption": {}})),
    ] {
        let masquerading = json!({"enabled": true, "enabledProtocols": {"ipv4": true}, "mode": "iptables",
            "snat-exclusion-cidr": "10.241.0.0/24", "snat-exclusion-cidr-v4": "10.241.0.0/24"});
        let read = CiliumSettings::of(&status(text, tunnel(), masquerading), &config(extra));
        let found = read.version.clone().unwrap();
        assert_eq!((found.major, found.minor, found.patch), version);
        assert_eq!(read.mode(), CiliumMode::Crd);
        let block = Some("10.241.0.0/24".parse().unwrap());
        let ipv4 = FamilySettings {
            enabled: true,
            range: block,
            router: Some("10.241.0.77".parse().unwrap()),
            masquerade: true,
            not_masqueraded_to: block,
        };
        assert_eq!(read.family(Family::V4), &ipv4);
        assert!(!read.family(Family::V6).enabled, "a family that is masqueraded by default and switched off");
        assert_eq!((read.endpoint_routes, read.auto_direct_routes), (Some(false), Some(false)));
        assert_eq!(read.routing, Some(CiliumRouting::Tunnel("vxlan".into())));
        assert_eq!((read.kube_proxy_replacement, read.bpf_masquerade), (Some(false), Some(false)));
        assert_eq!(read.masquerade_interfaces, ["eth0"]);
        assert_eq!(read.chaining.as_deref(), Some("none"));
    }
}

#[test]
fn native_routing_both_families_and_bpf_are_read_too() {
    let native = json!({"inter-host-routing-mode": "Native", "intra-host-routing-mode": "BPF"});
    let mut status = status("1.20.1 (v1.20.1-7d68cfb3)", native, json!({}));
    status["kube-proxy-replacement"]["mode"] = json!("True");
    status["cni-chaining"]["mode"] = json!("generic-veth");
    let mut config =
        config(json!({"EnableIPv6": true, "EnableBPFMasquerade": true, "EnableEndpointRoutes": true,
        "MasqueradeInterfaces": null, "IPAM": "delegated-plugin"}));
    config["status"]["ipam-mode"] = json!("delegated-plugin");
    config["status"]["addressing"]["ipv6"] =
        json!({"alloc-range": "fd24:1::/96", "enabled": true, "ip": "fd24:1::7"});
    let read = CiliumSettings::of(&status, &config);
    assert_eq!((read.mode(), read.routing), (CiliumMode::Delegated, Some(CiliumRouting::Native)));
    assert_eq!((read.kube_proxy_replacement, read.bpf_masquerade), (Some(true), Some(true)));
    assert_eq!(read.ipv6.range, Some("fd24:1::/96".parse().unwrap()));
    assert!(read.ipv6.enabled && read.masquerade_interfaces.is_empty());
    assert_eq!((read.endpoint_routes, read.chaining.as_deref()), (Some(true), Some("generic-veth")));
}

#[test]
fn what_cilium_does_not_say_is_not_guessed() {
    let starting = json!({"cilium": {"state": "Warning", "msg": "Not all probes executed at least once"}});
    let read = CiliumSettings::of(&starting, &json!({"status": {"ipam-mode": ""}}));
    assert_eq!(read, CiliumSettings::default());
    assert_eq!((read.mode(), read.version), (CiliumMode::Unknown, None));
    let unnamed = json!({"cilium": {"state": "Ok", "msg": " (v-)"}});
    assert_eq!(CiliumSettings::of(&unnamed, &Value::Null).version, None, "built without a version");
}

#[test]
fn a_version_is_three_numbers_and_what_follows_them() {
    for (text, shown) in [
        ("1.19.5", "1.19.5"),
        ("v1.20.0-rc.1 (v1.20.0-rc.1-abc)", "1.20.0-rc.1"),
        ("1.21.0-dev 2", "1.21.0-dev"),
    ] {
        assert_eq!(CiliumVersion::parse(text).unwrap().to_string(), shown);
    }
    for text in ["", " ", "1.19", "1.19.x", "1.2.3.4", "Not all probes executed at least once", "(v-)"] {
        assert_eq!(CiliumVersion::parse(text), None, "{text:?}");
    }
    assert!(CiliumVersion::parse("1.9.12") < CiliumVersion::parse("1.19.0"));
}

#[test]
fn the_socket_is_asked_for_status_and_configuration() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    let answers = [status("1.19.5 (v1.19.5-a9a12a1c)", tunnel(), json!({})), config(json!({}))];
    let agent = std::thread::spawn(move || {
        answers.map(|answer| {
            let (mut stream, _) = listener.accept().unwrap();
            let mut asked = [0; 512];
            let length = stream.read(&mut asked).unwrap();
            write!(stream, "HTTP/1.0 200 OK\r\n\r\n{answer}").unwrap();
            String::from_utf8_lossy(&asked[..length]).lines().next().unwrap().to_owned()
        })
    });
    let read = CiliumSettings::read(&path).unwrap();
    assert_eq!(agent.join().unwrap(), ["GET /v1/healthz HTTP/1.0", "GET /v1/config HTTP/1.0"]);
    assert_eq!(read.version.unwrap().to_string(), "1.19.5");
    assert_eq!(read.ipam.as_deref(), Some("crd"));
}
