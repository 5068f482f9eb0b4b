use serde_json::Value;

use super::*;
use crate::policy::mode::PluginMode;

fn node(pool: Value, pod_cidrs: &[&str]) -> CiliumNode {
    serde_json::from_value(json!({
        "metadata": {"name": "n1", "resourceVersion": "7"},
        "spec": {"ipam": {"pool": pool, "podCIDRs": pod_cidrs}}}))
    .unwrap()
}

fn shown(addresses: &[&str]) -> Publication {
    Publication {
        addresses: addresses.iter().map(|text| text.parse().unwrap()).collect(),
        owner: "db/mysql-0".into(),
        resource: "db/StatefulSet/mysql".into(),
    }
}

fn crd() -> PublishConfig {
    PublishConfig { mode: PluginMode::Crd, ranges: Vec::new(), known_blocks: Vec::new() }
}

fn routes(range: &str) -> PublishConfig {
    PublishConfig {
        mode: PluginMode::Delegated,
        ranges: vec![range.parse().unwrap()],
        known_blocks: Vec::new(),
    }
}

const ENTRY: &str = r#"{"owner": "db/mysql-0", "resource": "db/StatefulSet/mysql"}"#;

fn entry() -> Value {
    serde_json::from_str(ENTRY).unwrap()
}

#[test]
fn at_home_the_key_goes_in_alone_and_without_a_precondition() {
    let patch = publish_patch(&node(json!({}), &["10.0.1.0/24"]), &crd(), &shown(&["10.0.1.7"])).unwrap();
    assert_eq!(patch.body(), json!({"spec": {"ipam": {"pool": {"10.0.1.7": entry()}}}}));
}

#[test]
fn away_from_home_key_and_route_go_in_together_under_the_version_that_was_read() {
    let there = node(json!({"10.0.1.9": {}}), &["10.0.1.0/24", "10.0.3.3/32"]);
    let patch = publish_patch(&there, &crd(), &shown(&["10.0.2.7", "fd00::7"])).unwrap();
    assert_eq!(
        patch.body(),
        json!({"metadata": {"resourceVersion": "7"}, "spec": {"ipam": {
            "pool": {"10.0.2.7": entry(), "fd00::7": entry()},
            "podCIDRs": ["10.0.1.0/24", "10.0.3.3/32", "10.0.2.7/32", "fd00::7/128"]}}})
    );
}

#[test]
fn what_is_shown_already_is_not_written_again_and_another_owner_is_replaced() {
    let there = node(json!({"10.0.2.7": entry()}), &["10.0.1.0/24", "10.0.2.7/32"]);
    assert_eq!(publish_patch(&there, &crd(), &shown(&["10.0.2.7"])), None);
    let others = node(json!({"10.0.1.7": {"owner": "db/old", "resource": "x"}}), &["10.0.1.0/24"]);
    let patch = publish_patch(&others, &crd(), &shown(&["10.0.1.7"])).unwrap();
    assert_eq!(patch.body(), json!({"spec": {"ipam": {"pool": {"10.0.1.7": entry()}}}}));
}

#[test]
fn an_address_that_came_home_loses_its_route() {
    let there = node(json!({"10.0.1.7": entry()}), &["10.0.1.0/24", "10.0.1.7/32"]);
    let patch = publish_patch(&there, &crd(), &shown(&["10.0.1.7"])).unwrap();
    assert_eq!(
        patch.body(),
        json!({"metadata": {"resourceVersion": "7"}, "spec": {"ipam": {"podCIDRs": ["10.0.1.0/24"]}}})
    );
}

#[test]
fn where_cilium_picks_no_address_only_routes_are_written() {
    let there = node(json!({}), &["10.0.1.0/24"]);
    assert_eq!(publish_patch(&there, &routes("10.0.5.0/24"), &shown(&["10.0.5.7"])), None);
    assert_eq!(publish_patch(&there, &routes("10.0.5.0/24"), &shown(&["10.0.1.7"])), None);
    let patch = publish_patch(&there, &routes("10.0.5.0/24"), &shown(&["10.0.2.7"])).unwrap();
    assert!(patch.pool.is_empty());
    assert_eq!(patch.pod_cidrs.unwrap(), ["10.0.1.0/24", "10.0.2.7/32"]);
    assert_eq!(patch.resource_version.as_deref(), Some("7"));
    assert!(routes("10.0.5.0/24").is_silent_about(&["10.0.5.7".parse().unwrap()]));
    assert!(!routes("10.0.5.0/24").is_silent_about(&["10.0.1.7".parse().unwrap()]));
    assert!(!crd().is_silent_about(&[]));
}

#[test]
fn a_released_address_loses_entry_and_route_and_unowned_entries_stay() {
    let there = node(json!({"10.0.2.7": entry(), "10.0.2.8": {}}), &["10.0.1.0/24", "10.0.2.7/32"]);
    let ended: Vec<IpAddr> = ["10.0.2.7", "10.0.2.8"].iter().map(|text| text.parse().unwrap()).collect();
    let patch = unpublish_patch(&there, &crd(), &ended).unwrap();
    assert_eq!(
        patch.body(),
        json!({"metadata": {"resourceVersion": "7"},
               "spec": {"ipam": {"pool": {"10.0.2.7": null}, "podCIDRs": ["10.0.1.0/24"]}}})
    );
    assert_eq!(unpublish_patch(&node(json!({"10.0.2.8": {}}), &["10.0.1.0/24"]), &crd(), &ended), None);
    let patch = unpublish_patch(&there, &routes("10.0.1.0/24"), &ended).unwrap();
    assert!(patch.pool.is_empty(), "only routes are ours where Cilium picks no address");
}

#[test]
fn home_blocks_are_the_ranges_of_more_than_one_address() {
    let there = node(json!({}), &["10.0.1.0/24", "10.0.2.7/32", "fd00:1::/96", "fd00::7/128", "nonsense"]);
    let texts: Vec<String> = home_blocks(&there).iter().map(ToString::to_string).collect();
    assert_eq!(texts, ["10.0.1.0/24", "fd00:1::/96"]);
    assert_eq!(single_routes(&there).len(), 2);
}
