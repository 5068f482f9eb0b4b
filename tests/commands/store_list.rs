//! `sticky-ipam store list`, and what all store commands share.

use std::fs;

use serde_json::{Value, json};

use crate::node::{Node, command};

#[test]
fn every_address_is_listed_with_its_pod_and_state() {
    let node = Node::new();
    let db = node.add("c-db", "db-0");
    let web = node.add("c-web", "web-0");
    node.del("c-web", "web-0");
    let plain = node.verb("ADD", "c-plain", "x", &json!({"pods": []})).unwrap();
    let short = node.verb("ADD", "c-short", "y", &json!({"retention": "90m"})).unwrap();
    let listed = node.store(&["list"]).well().stdout;
    let line = |address: &str| {
        let line = listed.lines().find(|line| line.split_whitespace().nth(1) == Some(address));
        let words: Vec<&str> =
            line.unwrap_or_else(|| panic!("{address} in {listed}")).split_whitespace().collect();
        words.join(" ")
    };
    assert!(listed.starts_with("NETWORK  ADDRESS"), "{listed}");
    assert!(line(&db).starts_with(&format!("net {db} attached default/db-0 c-db eth0 2")), "{listed}");
    assert!(line(&db).ends_with(" Forever"), "{listed}");
    assert!(line(&web).starts_with(&format!("net {web} kept default/web-0 c-web eth0 ")), "{listed}");
    assert!(line(&plain).ends_with(" no"), "{listed}");
    assert!(line(&short).ends_with(" 1h30m"), "{listed}");
}

#[test]
fn after_a_reboot_sticky_addresses_are_kept_and_others_stale() {
    let node = Node::new();
    node.add("c1", "db-0");
    node.verb("ADD", "c2", "x", &json!({"pods": []}));
    node.reboot();
    let rows: Value = serde_json::from_str(&node.store(&["list", "-o", "json"]).well().stdout).unwrap();
    let states: Vec<&str> =
        rows.as_array().unwrap().iter().map(|row| row["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["kept", "stale"]);
    assert_eq!(rows[0]["pod"], "default/db-0");
    assert_eq!(rows[0]["container"], "c1");
}

#[test]
fn host_locals_records_and_torn_files_are_listed_as_what_they_are() {
    let node = Node::new();
    Node::host_local(&node.data(), "10.7.0.9", "old");
    fs::write(node.path("10.7.0.10"), "{").unwrap();
    let before = Node::everything(&node.data());
    let listed = node.store(&["list", "--network=net"]).well();
    assert_eq!(Node::everything(&node.data()), before);
    let rows: Vec<Vec<&str>> = listed.stdout.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(rows[1], ["net", "10.7.0.9", "host-local", "-", "old", "eth0", "-", "-"]);
    assert_eq!(rows[2], ["net", "10.7.0.10", "unreadable", "-", "-", "-", "-", "-"]);
}

#[test]
fn what_is_not_understood_is_refused_with_what_would_be() {
    for (arguments, told) in [
        (&["store"][..], "which command?"),
        (&["store", "lst"], "there is no command 'lst'; there are: list, check, import-host-local"),
        (&["store", "list", "--fix"], "'--fix' is not understood; there are: --dir"),
        (&["store", "list", "--dir"], "--dir needs a value"),
        (&["store", "list", "-o", "yaml"], "-o takes json or table"),
        (&["store", "check", "--fix=no"], "--fix takes no value"),
        (&["store", "check", "--network", "../x"], "is not a network name"),
        (&["stor"], "there is no command 'stor'"),
    ] {
        let ended = command(arguments);
        assert_eq!(ended.status, 2, "{arguments:?}: {ended:?}");
        assert!(ended.stderr.contains(told) && ended.stdout.is_empty(), "{arguments:?}: {ended:?}");
    }
}

#[test]
fn every_command_has_its_help() {
    command(&["--help"]).well().has("import-host-local");
    command(&["--version"]).well().has(env!("CARGO_PKG_VERSION"));
    command(&["store", "--help"]).well().has("--boot-id-file");
    for name in ["list", "check", "import-host-local"] {
        command(&["store", name, "--help"]).well().has(&format!("usage: sticky-ipam store {name}"));
    }
}

#[test]
fn a_directory_or_network_that_is_not_there_is_named() {
    let ended = command(&["store", "list", "--dir", "/does/not/exist"]);
    assert_eq!(ended.status, 1);
    assert!(ended.stderr.contains("there is no directory /does/not/exist"), "{ended:?}");
    let ended = command(&["store", "import-host-local", "--from", "/does/not/exist"]);
    assert!(ended.stderr.contains("/does/not/exist; name the data directory with --from"), "{ended:?}");
    let ended = command(&["store", "list", "--dir", "/proc/self/stat"]);
    assert!(ended.stderr.contains("name the data directory with --dir"), "{ended:?}");
    let node = Node::new();
    node.add("c1", "db-0");
    let ended = node.store(&["list", "--network", "other"]);
    assert_eq!(ended.status, 1);
    assert!(
        ended.stderr.contains("no network other") && ended.stderr.contains("there are: net"),
        "{ended:?}"
    );
}
