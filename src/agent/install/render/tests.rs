use super::*;
use crate::names::NetworkName;
use crate::policy::mode::PluginMode;
use std::path::PathBuf;

fn settings(mode: PluginMode) -> InstallSettings {
    InstallSettings::new("n1", mode, NetworkName::new("cilium").unwrap())
}

fn blocks(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn built_in(settings: &InstallSettings, texts: &[&str]) -> Result<Value, InstallError> {
    let bytes = conflist(Template::BuiltIn, settings, &blocks(texts))?;
    Ok(serde_json::from_slice(&bytes).unwrap())
}

fn from_text(settings: &InstallSettings, template: &Value) -> Result<Value, InstallError> {
    let text = template.to_string();
    let bytes =
        conflist(Template::Text { from: "site.conflist", text: &text }, settings, &blocks(&["10.9.1.0/24"]))?;
    Ok(serde_json::from_slice(&bytes).unwrap())
}

fn delegated() -> Value {
    json!({"cniVersion": "1.0.0", "name": "cilium", "plugins": [
        {"type": "cilium-cni", "ipam": {"type": "sticky-ipam", "sticky": {}}}]})
}

#[test]
fn every_mode_has_a_conflist_of_its_own_with_the_nodes_name_and_credentials() {
    for mode in PluginMode::ALL {
        let list = built_in(&settings(mode), &["10.9.1.0/24"]).unwrap();
        assert_eq!(list["name"], "cilium");
        let entry = &list["plugins"][0];
        let sticky = if mode == PluginMode::Crd { &entry["sticky"] } else { &entry["ipam"]["sticky"] };
        let cluster = json!({"kubeconfig": "/etc/cni/net.d/sticky-ipam.d/kubeconfig", "node": "n1"});
        assert_eq!(sticky["cluster"], cluster, "{mode}");
        // The agent prepares pods by the rules alone, and the plugin must not leave one out that it prepared.
        assert_eq!((sticky.get("pods"), sticky.get("excludePods")), (None, None), "{mode}");
    }
    assert_eq!(
        built_in(&settings(PluginMode::Crd), &[]).unwrap()["plugins"][0]["delegate"]["type"],
        "cilium-cni"
    );
    let chained = built_in(&settings(PluginMode::Chained), &["10.9.1.0/24"]).unwrap();
    assert_eq!(chained["plugins"][1]["chaining-mode"], "generic-veth");
}

#[test]
fn the_home_blocks_are_the_ranges_one_set_per_family() {
    let settings = settings(PluginMode::Delegated);
    let list = built_in(&settings, &["10.9.1.0/24", "fd00:1::/112", "10.9.7.0/24", "10.9.2.9/32"]).unwrap();
    let ipam = &list["plugins"][0]["ipam"];
    assert_eq!(
        ipam["ranges"],
        json!([[{"subnet": "10.9.1.0/24"}, {"subnet": "10.9.7.0/24"}], [{"subnet": "fd00:1::/112"}]])
    );
    assert_eq!(ipam["routes"], json!([{"dst": "0.0.0.0/0"}, {"dst": "::/0"}]));
    let only_six = built_in(&settings, &["fd00:1::/112"]).unwrap();
    assert_eq!(only_six["plugins"][0]["ipam"]["routes"], json!([{"dst": "::/0"}]));
    for none in [&[][..], &["10.9.2.9/32"]] {
        let error = built_in(&settings, none).unwrap_err().to_string();
        assert!(error.contains("n1") && error.contains("podCIDRs"), "{error}");
    }
}

#[test]
fn the_agents_rules_and_choices_go_into_the_conflist() {
    let mut settings = settings(PluginMode::Crd);
    settings.rules = Rules {
        selector: Some(Selector::parse(r#"{"matchLabels": {"app": "db"}}"#).unwrap()),
        exclude_key: "branch".into(),
        exclude_prefixes: vec!["test-".into()],
    };
    settings.on_unavailable = Some(OnUnavailable::Allocate);
    let list = built_in(&settings, &[]).unwrap();
    let cluster = &list["plugins"][0]["sticky"]["cluster"];
    assert_eq!(Selector::parse(&cluster["selector"].to_string()).ok(), settings.rules.selector);
    assert_eq!((&cluster["excludeKey"], &cluster["excludePrefixes"]), (&json!("branch"), &json!(["test-"])));
    assert_eq!(cluster["onUnavailable"], "allocate");
}

#[test]
fn what_a_template_says_beyond_that_is_kept() {
    let mut template = delegated();
    template["plugins"][0]["enable-debug"] = json!(true);
    template["plugins"][0]["ipam"]["site"] = json!({"rack": 7});
    template["plugins"][0]["ipam"]["sticky"] = json!({"logLevel": "debug", "cluster": {"timeout": "5s"}});
    template["plugins"]
        .as_array_mut()
        .unwrap()
        .push(json!({"type": "portmap", "capabilities": {"portMappings": true}}));
    template["cni.dev/site"] = json!("x");
    let list = from_text(&settings(PluginMode::Delegated), &template).unwrap();
    let ipam = &list["plugins"][0]["ipam"];
    assert_eq!(list["plugins"][0]["enable-debug"], true);
    assert_eq!((&ipam["site"]["rack"], &list["cni.dev/site"]), (&json!(7), &json!("x")));
    assert_eq!(list["plugins"][1], template["plugins"][1]);
    assert_eq!(ipam["sticky"]["logLevel"], "debug");
    assert_eq!(
        (&ipam["sticky"]["cluster"]["timeout"], &ipam["sticky"]["cluster"]["node"]),
        (&json!("5s"), &json!("n1"))
    );
    assert_eq!(ipam["ranges"], json!([[{"subnet": "10.9.1.0/24"}]]));
    template["plugins"][0]["ipam"]["ranges"] = json!([[{"subnet": "10.5.0.0/16", "rangeStart": "10.5.0.9"}]]);
    let own = from_text(&settings(PluginMode::Delegated), &template).unwrap();
    assert_eq!(own["plugins"][0]["ipam"]["ranges"], template["plugins"][0]["ipam"]["ranges"]);
}

#[test]
fn the_same_template_gives_the_same_bytes() {
    let settings = settings(PluginMode::Chained);
    let render = || conflist(Template::BuiltIn, &settings, &blocks(&["10.9.1.0/24"])).unwrap();
    assert_eq!(render(), render());
    let list: Value = serde_json::from_slice(&render()).unwrap();
    assert_eq!(from_text(&settings, &list).unwrap(), list, "what was rendered is a template too");
}

#[test]
fn a_bad_template_is_refused_with_the_file_the_field_and_the_value() {
    let with = |change: &dyn Fn(&mut Value)| {
        let mut template = delegated();
        change(&mut template);
        from_text(&settings(PluginMode::Delegated), &template).unwrap_err().to_string()
    };
    let entry = |template: &mut Value, key: &str, value: Value| template["plugins"][0][key] = value;
    let ipam = |template: &mut Value, key: &str, value: Value| template["plugins"][0]["ipam"][key] = value;
    let sticky = |template: &mut Value, value: Value| template["plugins"][0]["ipam"]["sticky"] = value;
    for (error, parts) in [
        (with(&|t| *t = json!([])), ["the document", "[]"]),
        (with(&|t| t["name"] = json!("other")), ["name: \"other\"", "--network"]),
        (with(&|t| t["plugins"] = json!("x")), ["plugins: \"x\"", "list"]),
        (with(&|t| t["plugins"] = json!([])), ["plugins", "0 entries"]),
        (with(&|t| t["plugins"] = json!([t["plugins"][0], t["plugins"][0]])), ["plugins", "2 entries"]),
        (with(&|t| entry(t, "type", json!("bridge"))), ["plugins[0].type: \"bridge\"", "--mode delegated"]),
        (with(&|t| ipam(t, "dataDir", json!("/else"))), ["plugins[0].ipam.dataDir: \"/else\"", "--data-dir"]),
        (with(&|t| ipam(t, "sticky", json!(3))), ["plugins[0].ipam.sticky: 3", "object"]),
        (with(&|t| ipam(t, "ranges", json!([[{"subnet": "10.0.0.7/24"}]]))), ["10.0.0.7/24", "ipam.ranges"]),
        (with(&|t| sticky(t, json!({"retenton": "1h"}))), ["ipam.sticky.retenton", "1h"]),
        (with(&|t| sticky(t, json!({"cluster": {"nodeName": "x"}}))), ["ipam.sticky.cluster.nodeName", "x"]),
        (
            with(&|t| sticky(t, json!({"cluster": {"selector": {"matchLabels": {"a": "b"}}}}))),
            ["plugins[0].ipam.sticky.cluster.selector: {\"matchLabels\":{\"a\":\"b\"}}", "--label-selector"],
        ),
        (
            with(&|t| sticky(t, json!({"cluster": {"excludePrefixes": ["x"]}}))),
            ["sticky.cluster.excludePrefixes: [\"x\"]", "--exclude-prefixes"],
        ),
        (
            with(&|t| sticky(t, json!({"excludePods": ["kube-system/*"]}))),
            ["plugins[0].ipam.sticky.excludePods: [\"kube-system/*\"]", "--label-selector"],
        ),
        (with(&|t| sticky(t, json!({"pods": ["db/*"]}))), ["sticky.pods: [\"db/*\"]", "--label-selector"]),
        (with(&|t| t["cniVersion"] = json!("9.9.9")), ["cniVersion", "9.9.9"]),
    ] {
        assert!(error.starts_with("site.conflist: "), "{error}");
        assert!(parts.iter().all(|part| error.contains(part)), "{error}");
    }
    let broken =
        conflist(Template::Text { from: "site.conflist", text: "{" }, &settings(PluginMode::Crd), &[]);
    assert!(broken.unwrap_err().to_string().contains("not JSON"));
}

#[test]
fn a_conflist_of_another_mode_is_refused() {
    for made_for in PluginMode::ALL {
        let list = built_in(&settings(made_for), &["10.9.1.0/24"]).unwrap();
        for asked in PluginMode::ALL {
            let rendered = from_text(&settings(asked), &list);
            assert_eq!(rendered.is_ok(), asked == made_for, "{made_for} for {asked}: {rendered:?}");
        }
    }
}

#[test]
fn another_store_or_socket_is_named_in_the_conflist() {
    for (mode, place) in
        [(PluginMode::Chained, "/plugins/0/ipam/dataDir"), (PluginMode::Crd, "/plugins/0/sticky/dataDir")]
    {
        let mut settings = settings(mode);
        assert_eq!(
            built_in(&settings, &["10.9.1.0/24"]).unwrap().pointer(place),
            None,
            "the default need not be said"
        );
        settings.data_dir = PathBuf::from("/var/lib/site");
        settings.cilium_socket = Some(PathBuf::from("/run/site.sock"));
        let list = built_in(&settings, &["10.9.1.0/24"]).unwrap();
        assert_eq!(list.pointer(place), Some(&json!("/var/lib/site")));
        let socket = place.replace("dataDir", "cluster/ciliumSocket").replace("ipam/", "ipam/sticky/");
        assert_eq!(list.pointer(&socket), Some(&json!("/run/site.sock")));
    }
}

#[test]
fn plugin_and_agent_read_the_boot_id_from_one_file() {
    let mut settings = settings(PluginMode::Delegated);
    settings.boot_id_file = "/run/boot-id".into();
    let list = built_in(&settings, &["10.9.1.0/24"]).unwrap();
    assert_eq!(list["plugins"][0]["ipam"]["sticky"]["bootIDFile"], "/run/boot-id");
    let mut template = delegated();
    template["plugins"][0]["ipam"]["sticky"]["bootIDFile"] = json!("/run/other");
    let error = from_text(&settings, &template).unwrap_err().to_string();
    assert!(error.contains("bootIDFile") && error.contains("--boot-id-file"), "{error}");
    template["plugins"][0]["ipam"]["sticky"]["bootIDFile"] = json!("/run/boot-id");
    from_text(&settings, &template).unwrap();
}
