//! `sticky-ipam store import-host-local`: in place and from another data directory.

use std::fs;

use crate::node::Node;

/// A data directory as host-local leaves it: two running containers, its cursor and its lock.
fn host_locals(data: &std::path::Path) {
    Node::host_local(data, "10.7.0.2", "run-1");
    Node::host_local(data, "10.7.0.3", "run-2");
    fs::write(data.join("net/last_reserved_ip.0"), "10.7.0.3").unwrap();
    fs::write(data.join("net/lock"), "").unwrap();
}

#[test]
fn a_dry_run_reports_what_would_happen_and_changes_nothing() {
    let node = Node::new();
    host_locals(&node.data());
    fs::write(node.path("10.7.0.8"), b"torn").unwrap();
    let before = Node::everything(&node.data());
    let ended = node.store(&["import-host-local", "--dry-run"]).well();
    let ended = ended.has("net: 10.7.0.2 would be imported from run-1/eth0");
    ended.has("10.7.0.8 is no record, would be set aside").has("net: 2 addresses would be imported");
    assert_eq!(Node::everything(&node.data()), before);
}

#[test]
fn in_place_running_containers_keep_their_addresses_and_their_del_frees_them() {
    let node = Node::new();
    host_locals(&node.data());
    node.store(&["import-host-local"]).well().has("net: 2 addresses imported");
    node.store(&["check"]).well().has("net: in order, 2 addresses");
    assert_eq!(node.add("run-1", "a"), "10.7.0.2", "a repeated ADD of a running container");
    assert_eq!(node.add("new", "b"), "10.7.0.4", "host-local's cursor goes on");
    node.del("run-2", "c");
    assert!(!node.path("10.7.0.3").exists());
    node.store(&["import-host-local"])
        .well()
        .has("10.7.0.2 is here already")
        .has("net: 0 addresses imported");
}

#[test]
fn from_another_directory_records_are_copied_and_the_source_is_left_as_it_is() {
    let node = Node::new();
    let source = tempfile::tempdir().unwrap();
    host_locals(source.path());
    Node::host_local(source.path(), "fd00::2", "run-1");
    let before = Node::everything(source.path());
    let from = source.path().to_str().unwrap();
    node.store(&["import-host-local", "--from", from, "--dry-run"]).well().has("would be imported");
    assert!(!node.data().join("net").exists(), "a dry run made a directory");
    node.store(&["import-host-local", "--from", from]).well().has("net: 3 addresses imported");
    assert_eq!(Node::everything(source.path()), before);
    node.store(&["check"]).well().has("net: in order, 3 addresses");
    assert!(fs::read_to_string(node.path("10.7.0.2")).unwrap().contains("fd00::2"), "one record a container");
    assert_eq!(node.add("new", "b"), "10.7.0.4");
    node.store(&["import-host-local", "--from", from]).well().has("net: 0 addresses imported");
}

#[test]
fn a_conflict_is_named_and_nothing_is_copied() {
    let node = Node::new();
    assert_eq!(node.add("mine", "db-0"), "10.7.0.2");
    let source = tempfile::tempdir().unwrap();
    host_locals(source.path());
    let from = source.path().to_str().unwrap();
    for more in [&["--dry-run"][..], &[]] {
        let arguments = [&["import-host-local", "--from", from], more].concat();
        let ended = node.store(&arguments);
        assert_eq!(ended.status, 1, "{ended:?}");
        let ended = ended.has("10.7.0.2 conflict: container run-1 has it there");
        ended.has("pod default/db-0 (container mine) has it here").has("net: refused, nothing is changed");
        assert!(!node.path("10.7.0.3").exists());
    }
    node.store(&["check"]).well();
}

#[test]
fn a_source_that_is_a_store_of_ours_is_refused() {
    let source = Node::new();
    source.add("c1", "db-0");
    let node = Node::new();
    let ended = node.store(&["import-host-local", "--from", source.data().to_str().unwrap()]);
    assert_eq!(ended.status, 1);
    ended.has("sticky-ipam's own record").has("refused");
}
