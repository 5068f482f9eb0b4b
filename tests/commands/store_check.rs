//! `sticky-ipam store check`: each damage is found, nothing is changed without `--fix`, and `--fix` cures it.

use std::fs;

use serde_json::json;

use crate::node::Node;

/// A node with a sticky pod, one that is away, and one that is not sticky.
fn node() -> Node {
    let node = Node::new();
    node.add("c1", "db-0");
    node.add("c2", "web-0");
    node.del("c2", "web-0");
    node.verb("ADD", "c3", "x", &json!({"pods": []}));
    node.store(&["check"]).well().has("net: in order, 3 addresses");
    node
}

/// Damages a node and sees it found, left alone, cured, and every record still there.
fn found_and_cured(damage: impl Fn(&Node), told: &str) {
    let node = node();
    damage(&node);
    let before = Node::everything(&node.data());
    let ended = node.store(&["check"]);
    assert_eq!(ended.status, 1, "{ended:?}");
    assert!(ended.stdout.contains(told), "{told:?} is not in {ended:?}");
    assert!(ended.stderr.contains("--fix"), "{ended:?}");
    assert_eq!(Node::everything(&node.data()), before, "a check without --fix changed something");
    node.store(&["check", "--fix"]).well().has("found: ").has("net: in order");
    node.store(&["check"]).well();
    let listed = node.store(&["list"]).well().stdout;
    for pod in ["default/db-0", "default/web-0", "default/x"] {
        assert!(listed.contains(pod), "{listed}");
    }
    assert_eq!(node.add("c9", "web-0"), "10.7.0.3", "the kept address is lost");
}

#[test]
fn a_lost_index_entry_is_found_and_recreated() {
    found_and_cured(
        |node| fs::remove_file(node.path(".sticky/attachments/c1,eth0")).unwrap(),
        ".sticky/attachments/c1,eth0 is missing",
    );
    found_and_cured(
        |node| fs::remove_file(node.path(".sticky/claimants/default,web-0,eth0")).unwrap(),
        ".sticky/claimants/default,web-0,eth0 is missing",
    );
}

#[test]
fn an_index_entry_without_a_record_is_found_and_removed() {
    found_and_cured(
        |node| fs::copy(node.path("10.7.0.2"), node.path(".sticky/attachments/c77,eth0")).map(drop).unwrap(),
        ".sticky/attachments/c77,eth0 belongs to no record",
    );
}

#[test]
fn a_bitmap_that_lost_or_gained_a_bit_is_found_and_rebuilt() {
    let bitmap = |node: &Node| node.path(".sticky/bitmaps/10.7.0.0");
    found_and_cured(|node| fs::write(bitmap(node), b"").unwrap(), "10.7.0.2 is not marked as taken");
    found_and_cured(
        |node| {
            let mut bytes = fs::read(bitmap(node)).unwrap();
            bytes.resize(8, 0);
            bytes[7] |= 1;
            fs::write(bitmap(node), bytes).unwrap();
        },
        "10.7.0.56 is marked as taken, but has no record",
    );
}

#[test]
fn leftovers_of_a_process_that_ended_are_found_and_removed() {
    found_and_cured(
        |node| fs::write(node.path(".sticky/new"), b"half").unwrap(),
        ".sticky/new was left by a process that ended",
    );
}

#[test]
fn what_the_way_to_the_cluster_leaves_under_the_store_is_not_wrong() {
    let node = Node::new();
    node.add("c1", "db-0");
    for folder in ["pending-updates", "drafts"] {
        fs::create_dir(node.path(".sticky").join(folder)).unwrap();
        fs::write(node.path(".sticky").join(folder).join("c1,eth0"), b"{}").unwrap();
    }
    fs::write(node.path(".sticky/claimants.lock"), b"").unwrap();
    node.store(&["check"]).well().has("net: in order, 1 addresses");
    node.store(&["check", "--fix"]).well();
    assert!(
        node.path(".sticky/pending-updates/c1,eth0").exists(),
        "a note is derived from nothing: nobody can make it anew"
    );
}

#[test]
fn a_page_that_is_lost_or_torn_is_found_and_rebuilt() {
    found_and_cured(
        |node| fs::write(node.path(".sticky/state"), b"{").unwrap(),
        ".sticky/state cannot be read",
    );
    found_and_cured(|node| fs::remove_file(node.path(".sticky/state")).unwrap(), ".sticky/state is missing");
}

#[test]
fn a_record_of_host_locals_that_came_in_later_is_found_and_taken_over() {
    found_and_cured(
        |node| Node::host_local(&node.data(), "10.7.0.40", "later"),
        "10.7.0.40 is host-local's, and not imported yet",
    );
}

#[test]
fn files_that_are_no_records_are_found_and_set_aside_for_inspection() {
    let node = node();
    fs::write(node.path("10.7.0.50"), b"").unwrap();
    fs::write(node.path("10.7.0.51"), b"what").unwrap();
    fs::copy(node.path("10.7.0.2"), node.path("10.7.0.52")).unwrap();
    let ended = node.store(&["check"]);
    assert_eq!(ended.status, 1);
    let ended = ended.has("10.7.0.50 is empty").has("10.7.0.51 is no record");
    ended.has("10.7.0.52 lists other addresses").has("net: 3 things are wrong");
    let ended = node.store(&["check", "--fix"]).well().has("notice: ");
    assert_eq!(ended.stdout.matches("was set aside").count(), 3, "{ended:?}");
    assert!(!node.path("10.7.0.51").exists());
    assert_eq!(fs::read_dir(node.path(".sticky/aside")).unwrap().count(), 3);
}

#[test]
fn a_store_from_before_a_reboot_is_not_wrong() {
    let node = node();
    node.reboot();
    node.store(&["check"]).well().has("notice: ").has("is from before the reboot");
}

#[test]
fn a_store_of_a_newer_version_is_refused_and_left_alone() {
    let node = node();
    fs::write(node.path(".sticky/state"), r#"{"version": 99}"#).unwrap();
    for arguments in [&["check"][..], &["check", "--fix"]] {
        let ended = node.store(arguments);
        assert_eq!(ended.status, 1);
        assert!(ended.stderr.contains("has version 99"), "{ended:?}");
    }
    assert_eq!(fs::read_to_string(node.path(".sticky/state")).unwrap(), r#"{"version": 99}"#);
}
