use super::*;
use crate::cni::code;
use crate::policy::lifetime::retention::Retention;
use proptest::prelude::*;
use std::collections::HashMap;
use std::os::unix::ffi::OsStringExt;

const ENV: [(&str, &str); 4] = [
    ("CNI_CONTAINERID", "c1"),
    ("CNI_NETNS", "/run/netns/does-not-exist"),
    ("CNI_IFNAME", "eth0"),
    ("CNI_PATH", "/opt/cni/bin:/usr/lib/cni"),
];

fn ask(verb: &str, changes: &[(&str, Option<&str>)], stdin: &[u8]) -> Result<ParsedRequest, RequestError> {
    let mut vars: HashMap<&str, OsString> = ENV.into_iter().map(|(k, v)| (k, v.into())).collect();
    vars.insert("CNI_COMMAND", verb.into());
    for (key, value) in changes {
        match value {
            Some(value) => vars.insert(key, value.into()),
            None => vars.remove(key),
        };
    }
    read_request(&|name| vars.get(name).cloned(), &mut &*stdin)
}

fn conf(ipam: Value) -> Value {
    json!({"cniVersion": "1.1.0", "name": "net1", "type": "bridge", "ipam": ipam})
}

fn good() -> Value {
    conf(json!({"type": "sticky-ipam", "dataDir": "/d", "subnet": "10.1.0.0/24"}))
}

fn with(key: &str, value: Value) -> Value {
    let mut all = good();
    all[key] = value;
    all
}

fn request(verb: &str, changes: &[(&str, Option<&str>)], config: &Value) -> Result<Request, CniError> {
    match ask(verb, changes, config.to_string().as_bytes()) {
        Ok(ParsedRequest::Verb(request)) => Ok(*request),
        Ok(other) => panic!("{other:?}"),
        Err(failure) => Err(failure.error),
    }
}

fn sets(config: &Value) -> Vec<String> {
    request("ADD", &[], config).unwrap().config.ipam.unwrap().sets.iter().map(ToString::to_string).collect()
}

#[test]
fn no_command_means_a_call_from_a_terminal() {
    for value in [None, Some("")] {
        assert_eq!(ask("ADD", &[("CNI_COMMAND", value)], b"garbage"), Ok(ParsedRequest::About));
    }
    assert!(about().contains("1.1.0"));
}

#[test]
fn a_good_request_has_everything_in_it() {
    let args = "IgnoreUnknown=1;K8S_POD_NAMESPACE=ns;K8S_POD_NAME=p;X=y";
    let request = request("ADD", &[("CNI_ARGS", Some(args))], &good()).unwrap();
    assert_eq!(request.attachment.unwrap().to_string(), "c1/eth0");
    assert_eq!(request.cni_path, [PathBuf::from("/opt/cni/bin"), PathBuf::from("/usr/lib/cni")]);
    assert_eq!(request.pod.unwrap().to_string(), "ns/p");
    assert_eq!(request.config.name.as_str(), "net1");
    assert_eq!(request.config.ipam.unwrap().data_dir, PathBuf::from("/d"));
    assert_eq!(request.warnings, Vec::<String>::new());
}

#[test]
fn each_verb_asks_for_its_own_variables_and_empty_is_missing() {
    let all = ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"];
    for (verb, needed) in [
        ("ADD", vec!["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]),
        ("CHECK", vec!["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"]),
        ("DEL", vec!["CNI_CONTAINERID", "CNI_IFNAME"]),
        ("GC", vec!["CNI_PATH"]),
        ("STATUS", vec![]),
    ] {
        for name in all {
            for value in [None, Some("")] {
                let answer = request(verb, &[(name, value)], &good());
                assert_eq!(answer.is_err(), needed.contains(&name), "{verb} {name}");
                if let Err(error) = answer {
                    assert_eq!(error.code, code::INVALID_ENVIRONMENT);
                    assert!(error.msg.contains(name), "{error}");
                }
            }
        }
    }
}

#[test]
fn wrong_variables_are_named_with_their_value() {
    for (name, value) in [
        ("CNI_COMMAND", "add"),
        ("CNI_CONTAINERID", "../../etc/passwd"),
        ("CNI_CONTAINERID", "-abc"),
        ("CNI_CONTAINERID", "é"),
        ("CNI_IFNAME", "abcdefghijklmnop"),
        ("CNI_IFNAME", ".."),
        ("CNI_IFNAME", "eth/0"),
        ("CNI_ARGS", "IP=foo"),
        ("CNI_ARGS", "K8S_POD_NAMESPACE=..;K8S_POD_NAME=p"),
    ] {
        let failure =
            ask("ADD", &[(name, Some(value))], br#"{"cniVersion":"0.4.0","name":"n"}"#).unwrap_err();
        assert_eq!(failure.error.code, 4, "{name}={value}");
        assert!(failure.error.msg.contains(name), "{}", failure.error);
        assert_eq!(failure.version, CniVersion::V0_4_0, "an error speaks the version of the input");
    }
    let bytes = OsString::from_vec(vec![0xff, b'a']);
    for name in ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_IFNAME", "CNI_ARGS"] {
        let env = |asked: &str| match asked {
            _ if asked == name => Some(bytes.clone()),
            "CNI_COMMAND" => Some("ADD".into()),
            _ => ENV.iter().find(|(k, _)| *k == asked).map(|(_, v)| v.into()),
        };
        let failure = read_request(&env, &mut good().to_string().as_bytes()).unwrap_err();
        assert_eq!(failure.error.code, 4);
        assert!(failure.error.msg.contains(name), "{}", failure.error);
    }
}

#[test]
fn documents_that_are_none_are_refused_as_undecodable() {
    let deep = "[".repeat(100_000);
    let huge = format!(r#"{{"name":"n","x":{}}}"#, "9".repeat(5000));
    let bom = format!("\u{feff}{}", good());
    for text in
        ["", "{", "[]", "5", "{} x", &deep, &huge, &bom, r#"{"name":5}"#, r#"{"name":"n","cniVersion":1}"#]
    {
        let failure = ask("ADD", &[], text.as_bytes()).unwrap_err();
        assert_eq!(failure.error.code, 6, "{}: {}", clipped(text), failure.error);
    }
    let long = vec![b' '; MAX_INPUT as usize + 1];
    let failure = ask("ADD", &[], &long).unwrap_err();
    assert!(failure.error.code == 6 && failure.error.msg.contains("32 MiB"), "{}", failure.error);
}

#[test]
fn versions_are_refused_as_each_verb_does() {
    for (verb, version, code) in [
        ("ADD", "9.9.9", 1),
        ("ADD", "abc", 1),
        ("DEL", "9.9.9", 1),
        ("CHECK", "abc", 6),
        ("CHECK", "0.3.1", 1),
        ("CHECK", "", 1),
        ("GC", "1.0.0", 1),
        ("STATUS", "1.0.0", 1),
        ("STATUS", "9.9.9", 1),
        ("STATUS", "x", 6),
    ] {
        let error = request(verb, &[], &with("cniVersion", json!(version))).unwrap_err();
        assert_eq!(error.code, code, "{verb} {version}: {error}");
    }
    let mut unnamed = good();
    unnamed.as_object_mut().unwrap().remove("cniVersion");
    assert_eq!(request("ADD", &[], &unnamed).unwrap().config.version, CniVersion::V0_1_0);
    assert!(request("CHECK", &[], &with("cniVersion", json!("0.4.0"))).is_ok());
}

#[test]
fn the_name_is_checked_before_the_version() {
    let error = request("ADD", &[], &json!({"cniVersion": "9.9.9", "name": "a/b"})).unwrap_err();
    assert!(error.code == 7 && error.msg.contains("name") && error.msg.contains("a/b"), "{error}");
}

#[test]
fn version_repeats_the_version_of_the_input_and_never_fails() {
    for (stdin, want) in [
        (r#"{"cniVersion":"0.4.0"}"#, "0.4.0"),
        (r#"{"cniVersion":"9.9.9"}"#, "9.9.9"),
        (r#"{"cniVersion":5}"#, "1.1.0"),
        (r#"{"cniVersion":"\u0000<x>"}"#, "1.1.0"),
        ("", "1.1.0"),
        ("garbage", "1.1.0"),
    ] {
        let Ok(ParsedRequest::Version { reply }) =
            ask("VERSION", &[("CNI_CONTAINERID", Some("../x"))], stdin.as_bytes())
        else {
            panic!("{stdin}");
        };
        assert_eq!(reply["cniVersion"], want, "{stdin}");
        assert_eq!(reply["supportedVersions"].as_array().unwrap().len(), 7);
    }
}

#[test]
fn the_plugins_own_namespace_is_refused_on_add_only_and_unless_overridden() {
    let own = ("CNI_NETNS", Some("/proc/thread-self/ns/net"));
    assert_eq!(request("ADD", &[own], &good()).unwrap_err().code, 8);
    for value in ["1", "true", "TRUE"] {
        assert!(request("ADD", &[own, ("CNI_NETNS_OVERRIDE", Some(value))], &good()).is_ok(), "{value}");
    }
    assert_eq!(request("DEL", &[own], &good()).unwrap().warnings.len(), 1);
}

#[test]
fn ranges_come_from_the_runtime_then_the_old_fields_then_the_list() {
    let mut config = conf(json!({"subnet": "10.1.0.0/30", "ranges": [[{"subnet": "10.2.0.0/30"}]]}));
    config["runtimeConfig"] = json!({"ipRanges": [[{"subnet": "10.3.0.0/24", "rangeStart": "10.3.0.20"}]]});
    assert_eq!(sets(&config), ["10.3.0.20-10.3.0.254", "10.1.0.1-10.1.0.2", "10.2.0.1-10.2.0.2"]);
    config["ipam"] = json!({});
    assert_eq!(sets(&config), ["10.3.0.20-10.3.0.254"]);
}

#[test]
fn requested_addresses_are_joined_and_the_network_overrides_the_environment() {
    let ips = |env: Option<&str>, config: &Value| -> Vec<String> {
        let request = request("ADD", &[("CNI_ARGS", env)], config).unwrap();
        request.config.ipam.unwrap().requested.iter().map(|r| r.ip.to_string()).collect()
    };
    let env = Some("IP=10.1.0.50");
    assert_eq!(ips(env, &good()), ["10.1.0.50"]);
    let mut config = with("args", json!({"cni": {"ips": ["10.1.0.60"]}}));
    assert_eq!(ips(env, &config), ["10.1.0.60"]);
    config["runtimeConfig"] = json!({"ips": ["::ffff:10.1.0.70", "10.1.0.60/24"]});
    assert_eq!(ips(env, &config), ["10.1.0.60", "10.1.0.70"]);
    config["args"] = json!(null);
    assert_eq!(ips(env, &config), ["10.1.0.50", "10.1.0.70", "10.1.0.60"]);
}

#[test]
fn every_mistake_in_the_configuration_names_its_field() {
    let subnet = |value: &str| json!({"subnet": value});
    for (config, codes, part) in [
        (json!({"cniVersion": "1.1.0", "name": "n"}), 7, "ipam"),
        (json!({"cniVersion": "1.1.0", "name": "n", "ipam": null}), 7, "ipam"),
        (conf(json!({})), 7, "ipam.ranges"),
        (conf(json!({"rangeStart": "10.1.0.5"})), 7, "ipam.rangeStart"),
        (conf(json!({"ranges": [[]]})), 7, "ipam.ranges[0]"),
        (conf(json!({"ranges": [subnet("10.1.0.0/24")]})), 6, "ipam.ranges[0]"),
        (conf(json!({"ranges": [[subnet("10.1.0.0/24"), {}]]})), 7, "ipam.ranges[0][1].subnet"),
        (conf(subnet("10.1.0.7/24")), 7, "10.1.0.0"),
        (conf(json!({"subnet": 5})), 6, "ipam.subnet"),
        (conf(json!({"ranges": [[subnet("10.1.0.0/20")], [subnet("10.1.1.0/24")]]})), 7, "overlaps"),
        (conf(json!({"subnet": "10.1.0.0/24", "routes": [{"dst": "x"}]})), 7, "ipam.routes[0].dst"),
        (conf(json!({"subnet": "10.1.0.0/24", "dataDir": "rel"})), 7, "ipam.dataDir"),
        (conf(json!({"subnet": "10.1.0.0/24", "resolvConf": 1})), 6, "ipam.resolvConf"),
        (conf(json!({"subnet": "10.1.0.0/24", "sticky": {"pod": []}})), 7, "\"pods\""),
        (with("runtimeConfig", json!({"ips": ["x"]})), 7, "runtimeConfig.ips[0]"),
        (with("args", json!({"cni": {"ips": [""]}})), 7, "args.cni.ips[0]"),
        (with("sticky", json!({})), 7, "sticky"),
        (with("delegate", json!({})), 7, "delegate.type"),
        (with("delegate", json!({"type": "../x"})), 7, "delegate.type"),
        (with("delegate", json!("cilium-cni")), 6, "delegate"),
        (with("prevResult", json!({"ips": 5})), 6, "prevResult.ips"),
    ] {
        let error = request("ADD", &[], &config).unwrap_err();
        assert_eq!(error.code, codes, "{config}: {error}");
        assert!(error.msg.contains(part), "{config}: {error} lacks {part}");
    }
    let mut old = conf(json!({"ranges": [[subnet("10.1.0.0/24")], [subnet("10.2.0.0/24")]]}));
    old["cniVersion"] = json!("0.2.0");
    let error = request("ADD", &[], &old).unwrap_err();
    assert!(error.code == 7 && error.msg.contains("0.2.0"), "{error}");
}

#[test]
fn del_forgives_what_it_does_not_need_and_says_so() {
    let broken = json!({"dataDir": "/d", "subnet": "10.1.0.0/32", "routes": 5, "sticky": {"pod": 1}});
    let mut config = conf(broken);
    config["prevResult"] = json!(5);
    config["runtimeConfig"] = json!("x");
    let request_ = request("DEL", &[("CNI_ARGS", Some("nonsense"))], &config).unwrap();
    let ipam = request_.config.ipam.unwrap();
    assert_eq!(ipam.data_dir, PathBuf::from("/d"));
    assert_eq!(ipam.sticky.unwrap().retention, Retention::FOREVER);
    assert_eq!(request_.warnings.len(), 4, "{:?}", request_.warnings);
    for config in [conf(json!({"dataDir": 5})), json!({"cniVersion": "1.1.0", "name": "n"})] {
        assert!(request("DEL", &[], &config).is_err(), "the store is not known: {config}");
    }
}

#[test]
fn gc_distinguishes_an_absent_list_from_an_empty_one_and_refuses_a_broken_one() {
    let list =
        |key: &str, value: Value| request("GC", &[], &with(key, value)).map(|r| r.config.valid_attachments);
    let key = "cni.dev/valid-attachments";
    assert_eq!(request("GC", &[], &good()).unwrap().config.valid_attachments, None);
    assert_eq!(list(key, json!(null)), Ok(None));
    assert_eq!(list(key, json!([])), Ok(Some(vec![])));
    let entry = json!([{"containerID": "a", "ifname": "eth0"}]);
    for key in [key, "cni.dev/attachments"] {
        assert_eq!(list(key, entry.clone()).unwrap().unwrap()[0].to_string(), "a/eth0");
    }
    for value in [
        json!({}),
        json!("x"),
        json!([5]),
        json!([{"containerID": "a"}]),
        json!([{"containerID": "../a", "ifname": "e"}]),
    ] {
        assert_eq!(list(key, value.clone()).unwrap_err().code, 7, "{value}");
    }
    let error = request("GC", &[], &json!({"cniVersion": "1.1.0", "name": "n"})).unwrap_err();
    assert_eq!(error.code, 7);
}

#[test]
fn gc_and_status_know_no_container_whatever_the_environment_says() {
    for verb in ["GC", "STATUS"] {
        let request = request(verb, &[("CNI_ARGS", Some("nonsense"))], &good()).unwrap();
        assert_eq!((request.attachment, request.netns, request.pod), (None, None, None));
    }
}

#[test]
fn status_refuses_broken_ranges_but_not_ranges_that_the_runtime_brings_with_add() {
    assert_eq!(request("STATUS", &[], &conf(json!({"subnet": "10.1.0.0/32"}))).unwrap_err().code, 7);
    assert_eq!(request("STATUS", &[], &conf(json!({}))).unwrap_err().code, 7);
    let mut config = conf(json!({}));
    config["capabilities"] = json!({"ipRanges": true});
    assert!(request("STATUS", &[], &config).is_ok());
}

#[test]
fn a_delegate_needs_no_ipam_and_takes_sticky_at_the_top() {
    let config = json!({"cniVersion": "1.1.0", "name": "n", "type": "sticky-ipam", "delegate": {"type": "cilium-cni"},
                        "sticky": {"retention": "1h"}});
    let request_ = request("ADD", &[], &config).unwrap();
    assert_eq!(request_.config.sticky().unwrap().retention, Retention::for_time(Duration::from_secs(3600)));
    assert_eq!(request_.config.delegate, Some(json!({"type": "cilium-cni"})));
    let mut both = config;
    both["ipam"] = json!({"subnet": "10.1.0.0/24", "sticky": {}});
    assert!(request("ADD", &[], &both).unwrap_err().msg.contains("keep one"));
}

#[test]
fn a_misspelt_field_of_a_range_is_no_error_but_a_warning() {
    let request =
        request("ADD", &[], &conf(json!({"ranges": [[{"subnet": "10.1.0.0/24", "rangStart": "10.1.0.9"}]]})));
    assert!(request.unwrap().warnings[0].contains("rangeStart"));
}

proptest! {
    #[test]
    fn no_bytes_on_standard_input_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        for verb in Verb::ALL {
            let _ = ask(verb.as_str(), &[], &bytes);
        }
    }

    #[test]
    fn no_values_in_place_of_any_field_make_it_panic(which in 0usize..20, value in any_json(), verb in 0usize..6) {
        let mut config = good();
        config["sticky"] = json!(null);
        match which {
            0..=9 => config["ipam"][crate::cni::reference::IPAM_FIELDS[which]] = value,
            _ => config[crate::cni::reference::TOP_FIELDS[which - 10]] = value,
        }
        let answer = ask(Verb::ALL[verb].as_str(), &[], config.to_string().as_bytes());
        if let Err(failure) = answer {
            prop_assert!([1, 6, 7].contains(&failure.error.code), "{}", failure.error);
        }
    }

    #[test]
    fn no_environment_makes_it_panic(id in "\\PC{0,20}", name in "\\PC{0,20}", args in "\\PC{0,40}") {
        let changes = [("CNI_CONTAINERID", Some(&*id)), ("CNI_IFNAME", Some(&*name)), ("CNI_ARGS", Some(&*args))];
        let _ = request("ADD", &changes, &good());
    }
}

fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z0-9:./*]{0,16}".prop_map(Value::from),
        Just(json!("10.1.0.0/24")),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        let keys = prop::sample::select(vec![
            "subnet", "type", "cni", "ips", "ipRanges", "dst", "address", "pods", "x",
        ]);
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((keys, inner), 0..4).prop_map(|pairs| pairs
                .into_iter()
                .map(|(k, v)| (k.to_owned(), v))
                .collect::<Map<_, _>>()
                .into()),
        ]
    })
}
