//! What the index keeps of objects, and what it finds.

use super::objects::sticky_key_of;
use super::*;
use crate::cluster::objects::cilium::CiliumNode;
use crate::controller::index::fixture::{pod, sticky};
use serde_json::json;

#[test]
fn an_address_is_shown_as_long_as_any_pod_shows_it() {
    let mut index = ClusterIndex::default();
    let address = "10.0.0.1".parse().unwrap();
    index.apply_pod(CacheEvent::Applied(pod("a", "10.0.0.1", None)));
    index.apply_pod(CacheEvent::Applied(pod("a", "10.0.0.1", None)));
    index.apply_pod(CacheEvent::Applied(pod("b", "10.0.0.1", None)));
    index.apply_pod(CacheEvent::Deleted("db/a".into()));
    assert!(index.is_shown_by_pod(address));
    index.apply_pod(CacheEvent::Applied(pod("b", "10.0.0.2", None)));
    assert!(!index.is_shown_by_pod(address) && index.is_shown_by_pod("10.0.0.2".parse().unwrap()));
    index.apply_pod(CacheEvent::ListStarted);
    index.apply_pod(CacheEvent::Listed(pod("c", "10.0.0.1", None)));
    assert!(!index.is_shown_by_pod(address), "the list is not complete");
    index.apply_pod(CacheEvent::ListComplete);
    assert!(index.is_shown_by_pod(address) && !index.is_shown_by_pod("10.0.0.2".parse().unwrap()));
}

#[test]
fn an_address_is_a_duplicate_as_long_as_two_live_pods_show_it() {
    let mut index = ClusterIndex::default();
    let duplicates =
        |index: &ClusterIndex| index.duplicates().iter().map(ToString::to_string).collect::<Vec<_>>();
    let nothing: [&str; 0] = [];
    index.apply_pod(CacheEvent::Applied(pod("a", "10.0.0.1", None)));
    index.apply_pod(CacheEvent::Applied(pod("b", "10.0.0.2", None)));
    assert_eq!(duplicates(&index), nothing);
    index.apply_pod(CacheEvent::Applied(pod("b", "10.0.0.1", None)));
    index.apply_pod(CacheEvent::Applied(pod("c", "10.0.0.1", None)));
    assert_eq!(duplicates(&index), ["10.0.0.1"]);
    index.apply_pod(CacheEvent::Deleted("db/a".into()));
    assert_eq!(duplicates(&index), ["10.0.0.1"], "two are left");
    let (name, mut ended) = pod("b", "10.0.0.1", None);
    ended.ended = true;
    index.apply_pod(CacheEvent::Applied((name, ended)));
    assert_eq!(duplicates(&index), nothing, "one has ended");
    let (name, mut of_the_host) = pod("b", "10.0.0.1", None);
    of_the_host.facts.host_network = true;
    index.apply_pod(CacheEvent::Applied((name, of_the_host)));
    assert_eq!(duplicates(&index), nothing, "one has its node's");
    index.apply_pod(CacheEvent::ListStarted);
    index.apply_pod(CacheEvent::Listed(pod("a", "10.0.0.3", None)));
    index.apply_pod(CacheEvent::Listed(pod("b", "10.0.0.3", None)));
    index.apply_pod(CacheEvent::ListComplete);
    assert_eq!(duplicates(&index), ["10.0.0.3"]);
    index.apply_pod(CacheEvent::ListStarted);
    index.apply_pod(CacheEvent::Listed(pod("b", "10.0.0.3", None)));
    index.apply_pod(CacheEvent::ListComplete);
    assert_eq!(duplicates(&index), nothing, "the other is not in the new list");
}

#[test]
fn a_workload_has_pods_as_long_as_one_of_them_has_not_ended() {
    let mut index = ClusterIndex::default();
    let workload = WorkloadRef { kind: "StatefulSet".into(), name: "mysql".into(), ..WorkloadRef::default() };
    let of = |name: &str| pod(name, "10.0.0.1", Some(("StatefulSet", "mysql")));
    assert!(!index.has_pods_of("db", &workload));
    index.apply_pod(CacheEvent::Applied(of("mysql-0")));
    index.apply_pod(CacheEvent::Applied(of("mysql-0")));
    index.apply_pod(CacheEvent::Applied(of("mysql-1")));
    index.apply_pod(CacheEvent::Deleted("db/mysql-1".into()));
    assert!(index.has_pods_of("db", &workload) && !index.has_pods_of("d", &workload));
    let (name, mut ended) = of("mysql-0");
    ended.ended = true;
    index.apply_pod(CacheEvent::Applied((name, ended)));
    assert!(!index.has_pods_of("db", &workload));
    index.apply_pod(CacheEvent::ListStarted);
    index.apply_pod(CacheEvent::Listed(of("mysql-2")));
    index.apply_pod(CacheEvent::ListComplete);
    assert!(index.has_pods_of("db", &workload));
    index.apply_pod(CacheEvent::Deleted("db/mysql-2".into()));
    assert!(!index.has_pods_of("db", &workload));
}

#[test]
fn a_pod_is_trimmed_to_what_decides() {
    let (_, seen) = pod("a", "10.0.0.1", Some(("StatefulSet", "mysql")));
    assert!(seen.facts.annotations.is_empty() && seen.running && seen.node == "n1");
    assert_eq!(seen.facts.owners[0].name, "mysql");
}

#[test]
fn a_pods_binding_is_found_by_name_or_by_attachment() {
    let mut index = ClusterIndex::default();
    index.stickies.apply(CacheEvent::Applied(sticky("mysql-0", "10.0.0.1", None)));
    let (_, mut by_slot) = sticky("web-0", "10.0.0.2", Some("n1"));
    by_slot.status.as_mut().unwrap().attachment.as_mut().unwrap().pod_uid = "uid-web-x".into();
    index.stickies.apply(CacheEvent::Applied(("db/web-0".into(), by_slot)));
    let (_, named) = pod("mysql-0", "10.0.0.1", Some(("StatefulSet", "mysql")));
    assert_eq!(index.sticky_of(&named).map(sticky_key_of).unwrap().name, "mysql-0");
    let (_, slotted) = pod("web-x", "10.0.0.2", Some(("Fleet", "web")));
    assert_eq!(index.sticky_of(&slotted).map(sticky_key_of).unwrap().name, "web-0");
    let (_, unattached) = pod("web-y", "10.0.0.3", Some(("Fleet", "web")));
    assert!(index.sticky_of(&unattached).is_none());
}

#[test]
fn a_cilium_node_is_trimmed_to_pools_and_ranges() {
    let node: CiliumNode = serde_json::from_value(json!({"metadata": {"name": "n1"}, "spec": {"ipam": {
        "podCIDRs": ["10.0.0.0/24", "10.9.0.1/32"],
        "pool": {"10.0.0.1": {"owner": "db/a"}, "10.0.0.2": {}, "10.0.0.3": {}, "nonsense": {},
                 "240.0.0.7": {"owner": "sticky-ipam.io/barrier", "resource": "10.0.0.1"}}}},
        "status": {"ipam": {"used": {"10.0.0.2": {}}}}}))
    .unwrap();
    let seen = IndexedCiliumNode::from(node);
    assert_eq!((seen.owned.len(), seen.unowned.len(), seen.available()), (1, 2, 1));
    assert_eq!(seen.blocks().collect::<Vec<_>>(), ["10.0.0.0/24".parse().unwrap()]);
    let mut index = ClusterIndex::default();
    index.cilium_nodes.apply(CacheEvent::Applied(("n1".into(), seen)));
    assert_eq!(index.home_of("10.0.0.9".parse().unwrap()).unwrap().0, "n1");
    assert!(index.home_of("10.9.0.1".parse().unwrap()).is_none(), "a route is no home");
}
