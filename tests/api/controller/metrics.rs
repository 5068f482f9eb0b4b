//! What `/metrics` of the program says after known actions: names, help, values. And a controller without a
//! lease.

use k8s_openapi::api::coordination::v1::Lease;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::IPPool;
use sticky_ipam::cluster::objects::cilium::CiliumNode;

use crate::support::controller::{Desk, until};
use crate::support::replica::{Replica, blocks};

fn gone() -> Value {
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "gone"})
}

async fn pool(desk: &Desk, name: &str, spec: Value) {
    let object = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "IPPool", "metadata": {"name": name}, "spec": spec});
    let api: Api<IPPool> = Api::all(desk.case.client());
    api.create(&Default::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}

/// The value of a metric, with its labels as they are printed; none if it is not there.
async fn value(replica: &Replica, metric: &str) -> Option<f64> {
    let (_, page) = replica.page("/metrics").await?;
    let start = format!("{metric} ");
    page.lines().find_map(|line| line.strip_prefix(&start)?.parse().ok())
}

async fn comes(replica: &Replica, metric: &str, expected: f64) {
    until(&format!("{metric} {expected}"), || async { value(replica, metric).await == Some(expected) }).await;
}

#[tokio::test]
async fn the_page_says_what_stands_and_what_was_done() {
    let desk = Desk::take().await;
    let access = desk.case.controller().await;
    desk.node("n1").await;
    // A block of the flags' pool, in which an address is claimed, three keys that are anybody's, of which one
    // is given out, and one
    // that is somebody's.
    let keys = json!({"10.250.0.1": {}, "10.250.0.2": {}, "10.250.0.3": {}, "10.250.0.4": {"owner": "x/y"}});
    desk.make_cilium_node("n1", json!({"podCIDRs": ["10.250.0.0/24"], "pool": keys})).await;
    let used = json!({"status": {"ipam": {"used": {"10.250.0.1": {"owner": "x/z"}, "10.250.0.4": {"owner": "x/y"}}}}});
    let nodes: Api<CiliumNode> = Api::all(desk.case.client());
    nodes.patch_status("n1", &PatchParams::default(), &Patch::Merge(used)).await.unwrap();
    // Half of it is excluded, and so is one of four blocks.
    pool(
        &desk,
        "kept",
        json!({"cidrs": ["10.249.0.0/24"], "use": "Sticky", "excluded": ["10.249.0.128/25"]}),
    )
    .await;
    let of_blocks = json!({"cidrs": ["10.248.0.0/22"], "use": "NodeBlocks", "blockSize": {"ipv4": 24},
        "excluded": ["10.248.0.0/24"], "nodeSelector": {"matchLabels": {"disk": "none"}}});
    pool(&desk, "blocks", of_blocks).await;
    let flags = [
        "--proof-gap=0s",
        "--quarantine=1h",
        "--recycle-rate=1",
        "--block-min-free=0",
        "--adopt-running=false",
        "--cluster-pool-ipv4-cidr=10.248.0.0/14",
        "--cluster-pool-ipv4-mask-size=24",
        &blocks(&desk),
    ];
    let only = Replica::start(&access.kubeconfig(), desk.case.namespace(), &flags);
    comes(&only, "leader_election_status", 1.0).await;
    comes(&only, r#"cilium_ipam_available_ips{node="n1"}"#, 2.0).await;
    comes(&only, r#"sticky_ipam_controller_block_addresses{node="n1"}"#, 256.0).await;
    comes(&only, r#"sticky_ipam_controller_pool_size{pool="kept"}"#, 128.0).await;
    comes(&only, r#"sticky_ipam_controller_pool_used{pool="kept"}"#, 0.0).await;
    comes(&only, r#"sticky_ipam_controller_pool_size{pool="blocks"}"#, 3.0).await;
    // A /14 of 1024 blocks, but for the five that the two pools name.
    comes(&only, r#"sticky_ipam_controller_pool_size{pool="cluster-pool"}"#, 1019.0).await;
    comes(&only, r#"sticky_ipam_controller_pool_used{pool="cluster-pool"}"#, 1.0).await;
    comes(&only, "sticky_ipam_controller_duplicate_addresses", 0.0).await;
    comes(&only, r#"sticky_ipam_controller_queue_depth{duty="gauges"}"#, 0.0).await;
    let forecast = r#"sticky_ipam_controller_pool_exhaustion_seconds{pool="kept"}"#;
    assert_eq!(value(&only, forecast).await, None, "it does not fill");

    // Somebody who wakes those that look after pods.
    desk.pod("seen", "n1", None, json!({})).await;
    // Two addresses of the Sticky pool and one of the node's block are bound: the pool fills.
    desk.stateful_set("db", 9).await;
    let set = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db"});
    desk.retained("db-0", "10.249.0.5", set.clone(), json!({})).await;
    desk.retained("db-1", "10.249.0.6", set.clone(), json!({})).await;
    desk.retained("db-2", "10.250.0.9", set, json!({})).await;
    desk.answer("10.250.0.9", json!({"homeNode": "n1", "block": "10.250.0.0/24"})).await;
    comes(&only, r#"sticky_ipam_controller_pool_used{pool="kept"}"#, 2.0).await;
    comes(&only, r#"sticky_ipam_controller_block_used_addresses{node="n1"}"#, 1.0).await;
    until("the forecast", || async { value(&only, forecast).await.is_some_and(|hours| hours > 0.0) }).await;
    // Another block of the flags' pool.
    desk.make_cilium_node("n2", json!({"podCIDRs": ["10.250.1.0/24"]})).await;
    // A Node without a CiliumNode would get a block of its own.
    desk.node("n2").await;
    comes(&only, r#"sticky_ipam_controller_pool_used{pool="cluster-pool"}"#, 2.0).await;
    let of_flags = r#"sticky_ipam_controller_pool_exhaustion_seconds{pool="cluster-pool"}"#;
    until("its forecast", || async { value(&only, of_flags).await.is_some_and(|hours| hours > 0.0) }).await;

    // A move to another node, as whoever attaches writes it down.
    let moved = json!({"status": {"handovers": [{"from": "n1", "to": "n2", "reason": "the old node is gone",
        "at": "2026-02-01T00:00:00Z"}]}});
    desk.stickies().patch_status("db-0", &PatchParams::default(), &Patch::Merge(moved)).await.unwrap();
    comes(&only, r#"sticky_ipam_controller_handovers_total{reason="the old node is gone"}"#, 1.0).await;

    // One a second may go: of several the rest waits, and then none.
    for n in 1..=4 {
        desk.retained(&format!("gone-{n}"), &desk.address(n), gone(), json!({})).await;
    }
    let waiting = "sticky_ipam_controller_releases_waiting";
    until("some that wait", || async { value(&only, waiting).await.is_some_and(|many| many >= 1.0) }).await;
    until("their end", || async { desk.names().await.len() == 3 }).await;
    comes(&only, waiting, 0.0).await;
    comes(&only, r#"sticky_ipam_controller_sticky_ips_released_total{reason="WorkloadGone"}"#, 4.0).await;
    comes(&only, "sticky_ipam_controller_quarantined_addresses", 4.0).await;

    let (_, page) = only.page("/metrics").await.unwrap();
    let duties = [
        "gauges",
        "repair",
        "duplicates",
        "recycling",
        "owners",
        "dead_nodes",
        "retention",
        "drift",
        "endpoints",
        "node_blocks",
    ];
    for duty in duties {
        let depth = format!("sticky_ipam_controller_queue_depth{{duty=\"{duty}\"}} ");
        assert!(page.contains(&depth), "{duty} has no depth: {page}");
    }
    for (name, help) in [
        ("leader_election_status", "1 while this process leads"),
        ("cilium_ipam_available_ips", "Addresses of a node's CiliumNode pool"),
        ("sticky_ipam_controller_handovers", "Moves of an address to another node"),
        ("sticky_ipam_controller_queue_depth", "Objects that wait for a duty"),
        ("sticky_ipam_controller_releases_waiting", "StickyIPs whose release is due"),
        ("sticky_ipam_controller_block_used_addresses", "Claimed addresses of a node's blocks"),
        ("sticky_ipam_controller_block_addresses", "Addresses of a node's blocks"),
        ("sticky_ipam_controller_duplicate_addresses", "Addresses that more than one live pod has"),
        ("sticky_ipam_controller_pool_size", "Addresses of a Sticky pool"),
        ("sticky_ipam_controller_pool_used", "Claimed addresses of a Sticky pool"),
        ("sticky_ipam_controller_pool_exhaustion_seconds", "Time until a pool is full"),
    ] {
        assert!(page.contains(&format!("# HELP {name} {help}")), "{name}: {page}");
    }
}

#[tokio::test]
async fn without_an_election_it_works_and_writes_no_lease() {
    let desk = Desk::take().await;
    let access = desk.case.controller().await;
    desk.retained("gone-0", &desk.address(1), gone(), json!({})).await;
    let flags = ["--enable-leader-election=false", "--proof-gap=0s", &blocks(&desk)];
    let only = Replica::start(&access.kubeconfig(), desk.case.namespace(), &flags);
    until("its work", || async { desk.names().await.is_empty() }).await;
    comes(&only, "leader_election_status", 1.0).await;
    assert_eq!(only.page("/readyz").await.unwrap().0, 200);
    let leases: Api<Lease> = Api::all(desk.case.client());
    let all = leases.list(&ListParams::default()).await.unwrap().items;
    let named = |lease: &&Lease| lease.metadata.name.as_deref() == Some("cilium-ipam-leader");
    assert!(all.iter().find(named).is_none(), "{all:?}");
}
