//! Every conflist that the project hands out can be followed: by the schema, and by the plugin's own parser.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use sticky_ipam::cni::{ParsedRequest, Request, Verb, read_request};

use crate::node::project;

fn conflists() -> Vec<(String, Value)> {
    let mut found: Vec<(String, Value)> = fs::read_dir(project().join("conflist"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|ext| ext == "conflist"))
        .map(|path: PathBuf| {
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            let list =
                serde_json::from_slice(&fs::read(&path).unwrap()).unwrap_or_else(|e| panic!("{name}: {e}"));
            (name, list)
        })
        .collect();
    found.sort_by(|one, other| one.0.cmp(&other.0));
    found
}

/// An entry as a runtime passes it on: with the list's name and version.
fn request(list: &Value, entry: &Value, verb: &str) -> Box<Request> {
    let mut config = entry.clone();
    config["name"] = list["name"].clone();
    // STATUS came with 1.1.0.
    config["cniVersion"] = if verb == "STATUS" { json!("1.1.0") } else { list["cniVersion"].clone() };
    let env = |name: &str| -> Option<OsString> {
        let value = match name {
            "CNI_COMMAND" => verb,
            "CNI_CONTAINERID" => "c1",
            "CNI_NETNS" => "/run/netns/does-not-exist",
            "CNI_IFNAME" => "eth0",
            "CNI_PATH" => "/opt/cni/bin",
            _ => return None,
        };
        Some(value.into())
    };
    match read_request(&env, &mut config.to_string().as_bytes()) {
        Ok(ParsedRequest::Verb(request)) => request,
        other => panic!("{config}: {other:?}"),
    }
}

fn is_ours(entry: &Value) -> bool {
    entry["type"] == "sticky-ipam" || entry["ipam"]["type"] == "sticky-ipam"
}

#[test]
fn the_four_ways_have_a_conflist_and_the_readme_names_each() {
    let names: Vec<String> = conflists().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["10-ptp-cnitool.conflist", "chained.conflist", "crd.conflist", "delegated.conflist"]);
    let readme = fs::read_to_string(project().join("conflist/README.md")).unwrap();
    for name in names {
        assert!(readme.contains(&format!("[{name}]({name})")), "conflist/README.md lacks {name}");
    }
}

#[test]
fn every_conflist_is_valid_by_the_schema() {
    let schema = fs::read(project().join("docs/conflist.schema.json")).unwrap();
    let validator = jsonschema::draft202012::new(&serde_json::from_slice(&schema).unwrap()).unwrap();
    for (name, list) in conflists() {
        let errors: Vec<String> = validator.iter_errors(&list).map(|error| error.to_string()).collect();
        assert!(errors.is_empty(), "{name}: {errors:?}");
    }
}

#[test]
fn the_plugin_follows_every_entry_that_is_its_own_without_a_warning() {
    for (name, list) in conflists() {
        let ours: Vec<&Value> =
            list["plugins"].as_array().unwrap().iter().filter(|entry| is_ours(entry)).collect();
        assert_eq!(ours.len(), 1, "{name}");
        for verb in [Verb::Add, Verb::Del, Verb::Check, Verb::Status] {
            let request = request(&list, ours[0], verb.as_str());
            assert_eq!(request.verb, verb);
            assert_eq!(request.warnings, Vec::<String>::new(), "{name}");
            assert!(request.config.sticky().is_some(), "{name} keeps nothing");
        }
    }
}

#[test]
fn each_conflist_is_what_its_mode_needs() {
    let lists = conflists();
    let plugins = |name: &str| {
        let (_, list) = lists.iter().find(|(file, _)| file.starts_with(name)).unwrap();
        list["plugins"].as_array().unwrap().clone()
    };
    assert_eq!(plugins("delegated")[0]["type"], "cilium-cni");
    let chained = plugins("chained");
    assert_eq!((&chained[0]["type"], &chained[1]["type"]), (&json!("ptp"), &json!("cilium-cni")));
    assert_eq!(chained[1]["chaining-mode"], "generic-veth");
    assert_eq!(plugins("crd")[0]["delegate"]["type"], "cilium-cni");
    // cilium-cni reads these keys of `ipam` as its own.
    for (name, list) in &lists {
        for entry in list["plugins"].as_array().unwrap() {
            for key in ["pool", "ipv6-pool", "pools", "podCIDRs", "min-allocate", "max-allocate"] {
                assert!(entry["ipam"].get(key).is_none(), "{name}: ipam.{key} is Cilium's");
            }
        }
    }
}
