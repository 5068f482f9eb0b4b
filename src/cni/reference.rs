//! Holds the code, the JSON Schema and the written reference together.

use std::collections::BTreeSet;
use std::ffi::OsString;

use serde_json::{Value, json};

use crate::cni::config::{cluster, ipam, sticky};
use crate::cni::{ParsedRequest, code, config, read_request};

const REFERENCE: &str = include_str!("../../docs/configuration.md");
const SCHEMA: &str = include_str!("../../docs/conflist.schema.json");

/// Every key at the top of the configuration that is read.
pub(crate) const TOP_FIELDS: &[&str] = &[
    "cniVersion",
    "name",
    "type",
    "capabilities",
    "ipam",
    "args",
    "runtimeConfig",
    "prevResult",
    "delegate",
    "sticky",
    "cni.dev/valid-attachments",
    "cni.dev/attachments",
];

/// Every key of the `ipam` section that is read. Others may stand there for other plugins.
pub(crate) const IPAM_FIELDS: &[&str] = &[
    "type",
    "dataDir",
    "ranges",
    "subnet",
    "rangeStart",
    "rangeEnd",
    "gateway",
    "routes",
    "resolvConf",
    "sticky",
];

const ROUTE_FIELDS: &[&str] = &super::result::ROUTE_KEYS;

/// The parts of a configuration, by their name in the schema, with the fields that the code reads there.
const PARTS: [(&str, &[&str]); 6] = [
    ("plugin", TOP_FIELDS),
    ("ipam", IPAM_FIELDS),
    ("range", ipam::RANGE_FIELDS),
    ("route", ROUTE_FIELDS),
    ("sticky", sticky::FIELDS),
    ("cluster", cluster::FIELDS),
];

/// Every code with a name and its meaning.
pub(crate) const CODES: &[(u32, &str, &str)] = &[
    (code::INCOMPATIBLE_VERSION, "incompatible version", "cniVersion is not spoken, or lacks the verb"),
    (code::UNSUPPORTED_FIELD, "unsupported field", "a field that cannot be honoured"),
    (code::UNKNOWN_CONTAINER, "unknown container", "nothing to clean up"),
    (code::INVALID_ENVIRONMENT, "invalid environment", "a CNI_ variable is missing or invalid"),
    (code::IO_FAILURE, "I/O failure", "a file or standard input could not be read or written"),
    (code::DECODING_FAILURE, "decoding failure", "not JSON, or a field of the wrong JSON type"),
    (code::INVALID_CONFIG, "invalid configuration", "a field has a value that cannot be followed"),
    (code::INVALID_NETNS, "invalid network namespace", "CNI_NETNS is the plugin's own namespace"),
    (code::TRY_AGAIN, "try again later", "a passing condition"),
    (code::NOT_AVAILABLE, "not available", "ADD cannot be served"),
    (code::LIMITED_CONNECTIVITY, "limited connectivity", "ADD cannot be served and pods may be cut off"),
    (code::EXHAUSTED, "no address free", "every address of a range set is in use or kept"),
    (
        code::REQUEST_REFUSED,
        "requested address refused",
        "outside the ranges, the gateway, or someone else's",
    ),
    (code::STORE_UNUSABLE, "store unusable", "written by a newer version, or damaged"),
    (code::CHECK_FAILED, "check failed", "the attachment is not as ADD left it"),
    (code::DELEGATE_FAILED, "delegate failed", "the delegate plugin could not be run or answered nonsense"),
    (code::INTERNAL, "internal error", "a defect; please report it"),
];

fn schema() -> Value {
    serde_json::from_str(SCHEMA).unwrap()
}

/// A validator for one definition of the schema.
fn validator(definition: &str) -> jsonschema::Validator {
    let mut schema = schema();
    schema["$ref"] = json!(format!("#/$defs/{definition}"));
    jsonschema::draft202012::new(&schema).unwrap()
}

#[test]
fn schema_and_code_know_the_same_fields() {
    let schema = schema();
    for (part, fields) in PARTS {
        let known: BTreeSet<&str> = fields.iter().copied().collect();
        let properties = schema["$defs"][part]["properties"].as_object().unwrap();
        let written: BTreeSet<&str> = properties.keys().map(String::as_str).collect();
        assert_eq!(written, known, "docs/conflist.schema.json, {part}");
    }
}

#[test]
fn the_reference_names_every_field_and_every_error_code() {
    for (part, fields) in PARTS {
        for field in fields {
            assert!(REFERENCE.contains(&format!("`{field}`")), "docs/configuration.md lacks {part}: {field}");
        }
    }
    for (code, name, meaning) in CODES {
        let row = format!("| {code} | {name} | {meaning} |");
        assert!(REFERENCE.contains(&row), "docs/configuration.md lacks {row}");
    }
}

#[test]
fn the_defaults_in_the_schema_are_those_of_the_code() {
    let schema = schema();
    let properties = schema["$defs"]["sticky"]["properties"].as_object().unwrap();
    let written: serde_json::Map<_, _> = properties
        .iter()
        .filter_map(|(key, property)| Some((key.clone(), property.get("default")?.clone())))
        .collect();
    assert!(written.len() >= 9, "{written:?}");
    assert_eq!(settings(Value::Object(written)), settings(json!({})));
    let data_dir = &schema["$defs"]["ipam"]["properties"]["dataDir"]["default"];
    assert_eq!(data_dir, config::DEFAULT_DATA_DIR);
}

#[test]
fn the_clusters_defaults_in_the_schema_are_those_of_the_code() {
    let schema = schema();
    let mut written = json!({"kubeconfig": "/k", "node": "n1"});
    let least = settings(json!({"cluster": written.clone()}));
    for (key, property) in schema["$defs"]["cluster"]["properties"].as_object().unwrap() {
        if let Some(default) = property.get("default") {
            written[key] = default.clone();
        }
    }
    assert!(written.as_object().unwrap().len() >= 6, "{written}");
    assert_eq!(settings(json!({"cluster": written})), least);
}

fn settings(sticky: Value) -> super::StickyConf {
    let config =
        json!({"cniVersion": "1.1.0", "name": "n", "type": "x", "delegate": {"type": "y"}, "sticky": sticky});
    match ask(&config) {
        Some(ParsedRequest::Verb(request)) => request.config.sticky().unwrap().clone(),
        other => panic!("{other:?}"),
    }
}

fn request(ipam: Value) -> Value {
    json!({"cniVersion": "1.1.0", "name": "n", "type": "ptp", "ipam": ipam})
}

fn ask(config: &Value) -> Option<ParsedRequest> {
    let env = |name: &str| -> Option<OsString> {
        let value = match name {
            "CNI_COMMAND" => "ADD",
            "CNI_CONTAINERID" => "c1",
            "CNI_NETNS" => "/run/netns/does-not-exist",
            "CNI_IFNAME" => "eth0",
            "CNI_PATH" => "/opt/cni/bin",
            _ => return None,
        };
        Some(value.into())
    };
    read_request(&env, &mut config.to_string().as_bytes()).ok()
}

/// Configurations of every kind and what both must say of them.
fn samples() -> Vec<(bool, Value)> {
    let sticky = |sticky: Value| request(json!({"subnet": "10.1.0.0/24", "sticky": sticky}));
    let top = |key: &str, value: Value| {
        let mut config = request(json!({"subnet": "10.1.0.0/24"}));
        config[key] = value;
        config
    };
    let cluster = |key: &str, value: Value| {
        let mut cluster = json!({"kubeconfig": "/k", "node": "n1"});
        cluster[key] = value;
        sticky(json!({"cluster": cluster}))
    };
    vec![
        (
            true,
            request(
                json!({"type": "sticky-ipam", "subnet": "10.1.0.0/24", "dataDir": "/d", "resolvConf": "/r"}),
            ),
        ),
        (
            true,
            request(
                json!({"ranges": [[{"subnet": "10.1.0.0/30", "gateway": ""}], [{"subnet": "fd00::/126"}]]}),
            ),
        ),
        (
            true,
            request(
                json!({"subnet": "10.1.0.0/24", "min-allocate": 5, "routes": [{"dst": "0.0.0.0/0", "mtu": 9}]}),
            ),
        ),
        (false, request(json!({"subnet": "10.1.0.0/31"}))),
        (false, request(json!({"subnet": "fd00::/127"}))),
        (false, request(json!({"subnet": "10.1.0.0"}))),
        (false, request(json!({"subnet": "10.1.0.256/24"}))),
        (false, request(json!({"subnet": "10.1.0.0/24", "gateway": "foo"}))),
        (false, request(json!({"subnet": "10.1.0.0/24", "rangeStart": 5}))),
        (false, request(json!({"subnet": "10.1.0.0/24", "dataDir": "rel"}))),
        (false, request(json!({"subnet": "10.1.0.0/24", "resolvConf": "rel"}))),
        (false, request(json!({"subnet": "10.1.0.0/24", "routes": [{"gw": "10.1.0.1"}]}))),
        (false, request(json!({"subnet": "10.1.0.0/24", "routes": [{"dst": "x"}]}))),
        (false, request(json!({"subnet": "10.1.0.0/24", "routes": [{"dst": "::/0", "mtu": -1}]}))),
        (false, request(json!({"ranges": [[]]}))),
        (false, request(json!({"ranges": [{"subnet": "10.1.0.0/24"}]}))),
        (false, request(json!({"ranges": [[{"rangeStart": "10.1.0.1"}]]}))),
        (false, json!({"name": "n"})),
        (false, json!({"name": "n", "ipam": null})),
        (false, top("name", json!("a/b"))),
        (false, top("cniVersion", json!("9.9.9"))),
        (true, top("cniVersion", json!(""))),
        (true, top("args", json!({"cni": {"ips": ["10.1.0.9", "10.1.0.8/24", "fd00::1"]}}))),
        (false, top("args", json!({"cni": {"ips": ["x"]}}))),
        (true, top("runtimeConfig", json!({"ips": ["10.1.0.9"], "ipRanges": [[{"subnet": "10.9.0.0/24"}]]}))),
        (false, top("runtimeConfig", json!({"ips": "10.1.0.9"}))),
        (true, top("delegate", json!({"type": "cilium-cni"}))),
        (false, top("delegate", json!({}))),
        (false, top("delegate", json!({"type": "a/b"}))),
        (false, top("sticky", json!({}))),
        (true, json!({"name": "n", "delegate": {"type": "cilium-cni"}, "sticky": {"retention": "1h"}})),
        (true, json!({"name": "n", "delegate": {"type": "cilium-cni"}, "sticky": {"dataDir": "/d"}})),
        (false, json!({"name": "n", "delegate": {"type": "cilium-cni"}, "sticky": {"dataDir": "d"}})),
        (false, sticky(json!({"dataDir": "/d"}))),
        (true, sticky(json!({}))),
        (true, sticky(json!(null))),
        (
            true,
            sticky(
                json!({"pods": ["a/*"], "excludePods": ["*/x-?"], "retention": "1h30m", "lockTimeout": "1.5s"}),
            ),
        ),
        (true, sticky(json!({"logFile": "/l", "logLevel": "debug", "logMaxFiles": 1, "bootIDFile": "/b"}))),
        (
            true,
            sticky(
                json!({"onExhaustion": "reclaim", "statusWhenExhausted": "notReady", "waitForOldPod": "0"}),
            ),
        ),
        (false, sticky(json!([]))),
        (false, sticky(json!({"pod": ["a/b"]}))),
        (false, sticky(json!({"pods": ["web"]}))),
        (false, sticky(json!({"excludePods": ["a/b/c"]}))),
        (false, sticky(json!({"retention": "3d"}))),
        (false, sticky(json!({"retention": 5}))),
        (false, sticky(json!({"onExhaustion": "steal"}))),
        (false, sticky(json!({"statusWhenExhausted": "NotReady"}))),
        (false, sticky(json!({"lockTimeout": "10"}))),
        (false, sticky(json!({"waitForOldPod": "-1s"}))),
        (false, sticky(json!({"logFile": "x"}))),
        (false, sticky(json!({"logLevel": "loud"}))),
        (false, sticky(json!({"logMaxFiles": 0}))),
        (false, sticky(json!({"logMaxFiles": 1001}))),
        (false, sticky(json!({"bootIDFile": "x"}))),
        (false, sticky(json!({"cluster": {"node": "n1"}}))),
        (false, sticky(json!({"cluster": []}))),
        (false, cluster("kubeconfig", json!("rel"))),
        (false, cluster("node", json!("Node_1"))),
        (false, cluster("timeout", json!("0s"))),
        (false, cluster("onUnavailable", json!("panic"))),
        (false, cluster("selector", json!({"app": "db"}))),
        (false, cluster("selector", json!({"matchLabels": {"a b": "c"}}))),
        (false, cluster("selector", json!({"matchExpressions": [{"key": "a", "operator": "Is"}]}))),
        (false, cluster("excludePrefixes", json!("x"))),
        (false, cluster("colour", json!("blue"))),
        (true, cluster("timeout", json!("1.5s"))),
        (true, cluster("onUnavailable", json!("allocate"))),
        (true, cluster("selector", json!({"matchLabels": {"example.com/app": "db"}}))),
        (true, cluster("selector", json!({"matchExpressions": [{"key": "a", "operator": "Exists"}]}))),
        (true, cluster("excludePrefixes", json!(["test-"]))),
    ]
}

#[test]
fn schema_and_code_take_and_refuse_the_same() {
    let validator = validator("request");
    for (valid, config) in samples() {
        assert_eq!(ask(&config).is_some(), valid, "the code: {config}");
        assert_eq!(validator.is_valid(&config), valid, "the schema: {config}");
    }
}

#[test]
fn a_conflist_is_checked_where_it_is_ours_and_left_alone_where_not() {
    let validator = jsonschema::draft202012::new(&schema()).unwrap();
    let list = |entry: Value| json!({"cniVersion": "1.1.0", "name": "n", "plugins": [{"type": "ptp", "ipam": {}}, entry]});
    for (valid, entry) in [
        (
            true,
            json!({"type": "ptp", "ipam": {"type": "sticky-ipam", "subnet": "10.1.0.0/24", "sticky": {}}}),
        ),
        (
            true,
            json!({"type": "sticky-ipam", "delegate": {"type": "cilium-cni"}, "sticky": {"pods": ["*/*"]}}),
        ),
        (true, json!({"type": "other", "ipam": {"type": "other", "sticky": 5}})),
        (false, json!({"type": "ptp", "ipam": {"type": "sticky-ipam", "sticky": {"pod": 1}}})),
        (false, json!({"type": "sticky-ipam"})),
        (false, json!({})),
    ] {
        assert_eq!(validator.is_valid(&list(entry.clone())), valid, "{entry}");
    }
}
