use super::*;
use crate::cluster::objects::cilium::CiliumNode;
use crate::controller::index::objects::IndexedNode;
use crate::runtime::cache::CacheEvent;
use serde_json::{Value, json};

/// Plans with so many free addresses, or for a cluster that is in crd mode already.
fn into(index: &ClusterIndex, free: Option<usize>) -> (Vec<NodePlan>, Vec<Obstacle>) {
    let mode = if free.is_some() { CiliumMode::ClusterPool } else { CiliumMode::Crd };
    let installation = Installation::default();
    into_crd(index, &Wish { installation: &installation, mode, free: free.unwrap_or(3), canary: None })
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn cilium(name: &str, spec: Value) -> (String, IndexedCiliumNode) {
    let object: CiliumNode =
        serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
    (name.to_owned(), IndexedCiliumNode::from(object))
}

fn node(name: &str, pod_cidrs: &[&str]) -> (String, IndexedNode) {
    let object = json!({"metadata": {"name": name, "uid": "u"}, "spec": {"podCIDRs": pod_cidrs}});
    (
        name.to_owned(),
        IndexedNode::from(serde_json::from_value::<k8s_openapi::api::core::v1::Node>(object).unwrap()),
    )
}

fn pod(name: &str, node: &str, addresses: &[&str]) -> (String, IndexedPod) {
    let ips: Vec<Value> = addresses.iter().map(|ip| json!({"ip": ip})).collect();
    let object = json!({"metadata": {"name": name, "namespace": "db", "uid": format!("uid-{name}")},
        "spec": {"nodeName": node, "containers": []}, "status": {"phase": "Running", "podIPs": ips}});
    let seen = IndexedPod::from(serde_json::from_value::<k8s_openapi::api::core::v1::Pod>(object).unwrap());
    (format!("db/{name}"), seen)
}

fn index(
    nodes: Vec<(String, IndexedNode)>,
    cilium: Vec<(String, IndexedCiliumNode)>,
    pods: Vec<(String, IndexedPod)>,
) -> ClusterIndex {
    let mut index = ClusterIndex::default();
    for one in nodes {
        index.nodes.apply(CacheEvent::Applied(one));
    }
    for one in cilium {
        index.cilium_nodes.apply(CacheEvent::Applied(one));
    }
    for one in pods {
        index.apply_pod(CacheEvent::Applied(one));
    }
    index
}

fn router(address: &str, mut spec: Value) -> Value {
    spec["addresses"] =
        json!([{"type": "InternalIP", "ip": "172.30.0.11"}, {"type": "CiliumInternalIP", "ip": address}]);
    spec
}

fn sticky(index: &mut ClusterIndex, name: &str, address: &str) {
    let object = json!({"metadata": {"name": name, "namespace": "db"},
        "spec": {"addresses": [address], "claimant": {"kind": "Pod"},
                 "workload": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "mysql"}}});
    index
        .stickies
        .apply(CacheEvent::Applied((format!("db/{name}"), serde_json::from_value(object).unwrap())));
}

#[test]
fn a_pool_holds_live_pods_cilium_itself_and_free_addresses_and_nothing_that_is_kept() {
    let spec =
        router("10.1.0.9", json!({"ipam": {"podCIDRs": ["10.1.0.0/28"]}, "health": {"ipv4": "10.1.0.8"}}));
    let mut index = index(
        vec![node("n1", &["10.1.0.0/28"])],
        vec![cilium("n1", spec)],
        vec![pod("mysql-0", "n1", &["10.1.0.5"]), pod("web", "n1", &["10.1.0.1"])],
    );
    sticky(&mut index, "mysql-0", "10.1.0.5");
    let claim = json!({"metadata": {"name": "10.1.0.2"}, "spec": {"address": "10.1.0.2", "phase": "Granted",
        "stickyRef": {"namespace": "db", "name": "mysql-1"}}});
    index.claims.apply(CacheEvent::Applied(("10.1.0.2".into(), serde_json::from_value(claim).unwrap())));
    let (plans, obstacles) = into(&index, Some(3));
    assert_eq!(obstacles, []);
    let plan = &plans[0];
    let put: Vec<String> = plan.put.keys().map(ToString::to_string).collect();
    assert_eq!(put, ["10.1.0.1", "10.1.0.3", "10.1.0.4", "10.1.0.5", "10.1.0.6", "10.1.0.8", "10.1.0.9"]);
    assert_eq!(plan.put[&ip("10.1.0.5")].owner, "db/mysql-0");
    assert_eq!(plan.put[&ip("10.1.0.5")].resource, "db/StatefulSet/mysql");
    assert_eq!(plan.put.values().filter(|entry| !entry.owner.is_empty()).count(), 1);
    assert_eq!((plan.pods, plan.sticky, plan.own, plan.free), (2, 1, 2, 3));
    assert_eq!((&plan.pod_cidrs, &plan.node_cidrs), (&None, &None));
    // Agents that may go by the pool already are offered nothing.
    assert_eq!(into(&index, None).0[0].put.len(), 4);
    assert_eq!(missing(&index).len(), 4);
}

#[test]
fn what_stands_is_left_and_only_the_rest_is_put() {
    let pool = json!({"10.1.0.5": {}, "10.1.0.1": {}, "10.1.0.9": {}, "10.1.0.3": {}, "10.1.0.4": {}});
    let spec = router("10.1.0.9", json!({"ipam": {"podCIDRs": ["10.1.0.0/28"], "pool": pool}}));
    let mut index = index(
        vec![node("n1", &["10.1.0.0/28"])],
        vec![cilium("n1", spec)],
        vec![pod("mysql-0", "n1", &["10.1.0.5"]), pod("web", "n1", &["10.1.0.1"])],
    );
    sticky(&mut index, "mysql-0", "10.1.0.5");
    let (plans, _) = into(&index, Some(2));
    // The sticky pod's own key gets its owner: the pod has it.
    assert_eq!(plans[0].put.keys().collect::<Vec<_>>(), [&ip("10.1.0.5")]);
    assert_eq!(missing(&index), []);
}

#[test]
fn a_pod_whose_address_another_is_to_have_is_in_the_way_and_missing() {
    let pool = json!({"10.1.0.5": {"owner": "db/other"}});
    let spec = json!({"ipam": {"podCIDRs": ["10.1.0.0/28"], "pool": pool}});
    let index = index(
        vec![node("n1", &["10.1.0.0/28"])],
        vec![cilium("n1", spec)],
        vec![pod("mysql-0", "n1", &["10.1.0.5"])],
    );
    assert!(
        matches!(&into(&index, Some(0)).1[..], [Obstacle::Contested { owner, .. }] if owner == "db/other")
    );
    assert!(matches!(&missing(&index)[..], [Obstacle::Missing { .. }]));
}

#[test]
fn ranges_come_from_the_node_where_the_ciliumnode_has_none_and_the_other_way_round() {
    let from_node = index(vec![node("n1", &["10.1.0.0/28"])], vec![cilium("n1", json!({}))], vec![]);
    let (plans, _) = into(&from_node, Some(0));
    assert_eq!(plans[0].pod_cidrs, Some(vec!["10.1.0.0/28".parse().unwrap()]));
    assert_eq!(plans[0].node_cidrs, None);
    let blocks = json!({"ipam": {"podCIDRs": ["fd00::/112", "10.1.0.0/28", "10.2.0.0/28"]}});
    let from_cilium = index(vec![node("n1", &[])], vec![cilium("n1", blocks)], vec![]);
    let (plans, _) = into(&from_cilium, Some(0));
    assert_eq!(plans[0].pod_cidrs, None);
    let expected: Vec<IpNet> = vec!["10.1.0.0/28".parse().unwrap(), "fd00::/112".parse().unwrap()];
    assert_eq!(plans[0].node_cidrs, Some(expected));
    let neither =
        index(vec![node("n1", &[])], vec![cilium("n1", json!({}))], vec![pod("a", "n2", &["10.9.0.1"])]);
    let (_, obstacles) = into(&neither, Some(0));
    assert!(
        matches!(&obstacles[..], [Obstacle::NoCiliumNode { .. }, Obstacle::NoBlock { .. }]),
        "{obstacles:?}"
    );
}

#[test]
fn no_way_back_while_an_address_is_away_from_home() {
    let spec = json!({"ipam": {"podCIDRs": ["10.1.0.0/28", "10.2.0.7/32"]}});
    let mut index = index(
        vec![node("n1", &["10.1.0.0/28"])],
        vec![cilium("n1", spec)],
        vec![pod("home", "n1", &["10.1.0.5"]), pod("away", "n1", &["10.2.0.7"])],
    );
    assert!(
        matches!(&back(&index, BackTo::ClusterPool)[..], [Obstacle::Away { pod, .. }, Obstacle::Route { .. }] if pod == "db/away")
    );
    index.apply_pod(CacheEvent::Deleted("db/away".into()));
    index
        .cilium_nodes
        .apply(CacheEvent::Applied(cilium("n1", json!({"ipam": {"podCIDRs": ["10.1.0.0/28"]}}))));
    assert_eq!(back(&index, BackTo::ClusterPool), []);
    assert_eq!(back(&index, BackTo::Kubernetes), []);
}

#[test]
fn kubernetes_mode_takes_back_only_what_the_node_itself_names() {
    let blocks = json!({"ipam": {"podCIDRs": ["10.1.0.0/28", "10.2.0.0/28"]}});
    let mut index = index(
        vec![node("n1", &["10.1.0.0/28"])],
        vec![cilium("n1", blocks.clone())],
        vec![pod("first", "n1", &["10.1.0.5"]), pod("further", "n1", &["10.2.0.7"])],
    );
    assert_eq!(back(&index, BackTo::ClusterPool), []);
    let found = back(&index, BackTo::Kubernetes);
    assert!(matches!(&found[..], [Obstacle::NotOfNode { pod, .. }] if pod == "db/further"), "{found:?}");
    index.apply_pod(CacheEvent::Deleted("db/further".into()));
    assert_eq!(back(&index, BackTo::Kubernetes), []);

    // A node that got its block later: Cilium's agent would wait for a range of the Node.
    index.nodes.apply(CacheEvent::Applied(node("n2", &[])));
    index
        .cilium_nodes
        .apply(CacheEvent::Applied(cilium("n2", json!({"ipam": {"podCIDRs": ["10.3.0.0/28"]}}))));
    assert!(matches!(&back(&index, BackTo::Kubernetes)[..], [Obstacle::NoRange { node }] if node == "n2"));
}

#[test]
fn while_a_claim_cannot_be_read_nothing_is_offered_and_one_may_not_go_on() {
    let mut index = index(
        vec![node("n1", &["10.1.0.0/28"])],
        vec![cilium("n1", json!({"ipam": {"podCIDRs": ["10.1.0.0/28"]}}))],
        vec![pod("web", "n1", &["10.1.0.1"])],
    );
    assert!(into(&index, Some(3)).0[0].free > 0);
    index.claims.apply(CacheEvent::Unreadable("10.1.0.2".into()));
    let (plans, obstacles) = into(&index, Some(3));
    assert_eq!(plans[0].put.keys().collect::<Vec<_>>(), [&ip("10.1.0.1")]);
    let unread = |kind: &str, name: &str| Obstacle::Unreadable { kind: kind.into(), name: name.into() };
    assert_eq!(obstacles, [unread("AddressClaim", "10.1.0.2")]);
    assert!(obstacles[0].to_string().contains("AddressClaim 10.1.0.2"), "{}", obstacles[0]);
    index.claims.apply(CacheEvent::Deleted("10.1.0.2".into()));
    index.cilium_nodes.apply(CacheEvent::Unreadable("n2".into()));
    assert_eq!(into(&index, Some(3)).1, [unread("CiliumNode", "n2")]);
}
