//! The agent in `crd` mode: what its CiliumNode publishes, and its unowned pool entries.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::cluster::objects::{AddressClaim, ClaimPhase};

use crate::support::agent::Stepped;
use crate::support::agent::{attached, case, cut_off, parts};
use crate::support::api_server::case::Case;
use crate::support::cilium::{assert_in_one_pool, cilium_node, cilium_nodes, owned};
use crate::support::node::{
    Sandbox, TestNode, assert_in_step, claims, delete_pod, sandbox, stickies, sticky_pod, sticky_pool,
};

const FEW: &[&str] = &["--ip-rate-num", "4", "--max-allocated-ip", "6"];

async fn patch_node(case: &Case<'_>, name: &str, patch: Value) {
    let nodes: Api<CiliumNode> = Api::all(case.client());
    nodes.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
}

async fn cilium_node_of(case: &Case<'_>, node: &TestNode) -> CiliumNode {
    let nodes: Api<CiliumNode> = Api::all(case.client());
    nodes.get(&node.name).await.unwrap()
}

async fn unowned(case: &Case<'_>, node: &TestNode) -> BTreeSet<IpAddr> {
    let pool = cilium_node_of(case, node).await.spec.ipam.pool;
    let unowned = pool.into_iter().filter(|(_, entry)| entry.owner.is_empty());
    unowned.map(|(key, _)| key.parse().unwrap()).collect()
}

async fn pod(case: &Case<'_>, name: &str, node: &TestNode) -> Sandbox {
    sandbox(&sticky_pod(case, name, &node.name, json!({})).await)
}

fn unowned_records(node: &TestNode) -> BTreeSet<IpAddr> {
    let records = node.store().address_files().unwrap().into_iter();
    records.filter(|found| found.record.as_ref().unwrap().is_unowned()).map(|found| found.address).collect()
}

#[tokio::test]
async fn a_prepared_pod_has_its_key_before_its_add_and_loses_it_with_its_del() {
    let case = case().await;
    let mut node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    let owner = format!("{}/db-0", case.namespace());
    let first = pod(&case, "db-0", &node).await;
    agent.step().await;
    let address = stickies(&case).await[0].spec.addresses[0];
    assert_eq!(owned(&cilium_nodes(&case).await, &owner), [(node.name.clone(), address)]);
    let proxy = cut_off(&case, &mut node);
    assert_eq!(node.add(&first).await.unwrap(), address);
    agent.settle().await;
    assert_eq!(owned(&cilium_nodes(&case).await, &owner).len(), 1, "a running pod keeps its pool entry");
    delete_pod(&case, "db-0").await;
    node.del(&first).await;
    drop(proxy);
    assert_eq!(owned(&cilium_nodes(&case).await, &owner).len(), 1, "the API server was away");
    agent.settle().await;
    assert!(owned(&cilium_nodes(&case).await, &owner).is_empty(), "the pending update was sent");
    assert_eq!(attached(&case).await, None);
    assert_in_step(&case, &[&node]).await;
}

#[tokio::test]
async fn the_pool_is_kept_between_its_watermarks_and_nothing_offered_is_ever_claimed() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    // Claimed, and not reserved here: it must not become an unowned entry.
    let next: IpAddr = node.range().hosts().nth(1).unwrap().into();
    let api: Api<AddressClaim> = Api::all(case.client());
    let claim = json!({"metadata": {"name": next.to_string()}, "spec": {"address": next, "phase": "Granted",
        "homeNode": node.name, "stickyRef": {"namespace": case.namespace(), "name": "x"}}});
    api.create(&PostParams::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
    let given = unowned(&case, &node).await;
    agent.settle().await;
    let offered = unowned(&case, &node).await;
    assert!(offered.len() == 4 && offered.is_superset(&given), "{offered:?}");
    assert!(!offered.contains(&next), "{next} is claimed");
    assert_eq!(unowned_records(&node), offered, "every unowned entry is recorded");
    // Cilium gives two of them to pods: two more are offered, and no more than the upper watermark.
    for (number, address) in offered.iter().take(3).enumerate() {
        node.cilium().put_endpoint(&format!("pod-{number}"), *address);
    }
    agent.settle().await;
    assert_eq!(unowned(&case, &node).await, offered, "Cilium's status does not show it yet");
    node.cilium().write_status().await;
    agent.settle().await;
    assert_eq!(unowned(&case, &node).await.len(), 6);
    // A new sticky address is none of them, and a pin to one of them is refused.
    let own = pod(&case, "db-0", &node).await;
    let address = node.add(&own).await.unwrap();
    assert!(!unowned(&case, &node).await.contains(&address), "{address}");
    let stolen = offered.iter().next().unwrap().to_string();
    let thief = sticky_pod(&case, "db-1", &node.name, json!({"sticky-ipam.io/ips": stolen})).await;
    assert!(node.add(&sandbox(&thief)).await.is_err());
}

#[tokio::test]
async fn many_pods_at_once_have_an_entry_each_by_one_write_before_their_add() {
    const PODS: usize = 24;
    let case = case().await;
    let mut node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", &[]).await;
    agent.settle().await;
    assert_eq!(unowned(&case, &node).await.len(), 8);
    let mut waiting = Vec::new();
    for number in 0..PODS {
        waiting.push(sandbox(&case.pod(&format!("web-{number}"), &[], Some(&node.name)).await));
    }
    let before = cilium_node_of(&case, &node).await.metadata.generation.unwrap();
    agent.step().await;
    let written = cilium_node_of(&case, &node).await.metadata.generation.unwrap();
    assert_eq!(written - before, 1, "every write goes to each cilium-agent of the cluster");
    let offered = unowned(&case, &node).await;
    assert_eq!(offered.len(), PODS + 8);
    assert_eq!(unowned_records(&node), offered, "every unowned entry is recorded");
    let _proxy = cut_off(&case, &mut node);
    let mut given = BTreeSet::new();
    for pod in &waiting {
        given.insert(node.add(pod).await.unwrap());
    }
    assert!(given.len() == PODS && given.is_subset(&offered), "{given:?}");
    // Cilium's status comes seconds later, and pods that do not get further are no more than before.
    agent.settle().await;
    assert_eq!(unowned(&case, &node).await, offered);
}

#[tokio::test]
async fn a_pool_may_have_more_addresses_than_255() {
    let case = case().await;
    // A case's own range has no more than that.
    let node = TestNode::ready_crd(&case, "n1", "100.64.0.0/22".parse().unwrap()).await;
    let many = &["--ip-rate-num", "300", "--max-allocated-ip", "500"];
    let mut agent = Stepped::new(&case, &node, "crd", many).await;
    agent.settle().await;
    let offered = unowned(&case, &node).await;
    assert_eq!(offered.len(), 300);
    let used: serde_json::Map<String, Value> =
        offered.iter().map(|ip| (ip.to_string(), json!({"owner": "x/y"}))).collect();
    let nodes: Api<CiliumNode> = Api::all(case.client());
    let status = json!({"status": {"ipam": {"used": used}}});
    nodes.patch_status(&node.name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    agent.settle().await;
    assert_eq!(unowned(&case, &node).await.len(), 500, "the upper watermark");
}

#[tokio::test]
async fn an_address_that_is_claimed_of_a_sticky_pool_over_the_block_is_not_offered() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    sticky_pool(&case, case.range()).await;
    // From before the node had its block.
    let label = case.range().to_string().replace('/', "-");
    let api: Api<AddressClaim> = Api::all(case.client());
    let claimed: BTreeSet<IpAddr> = node.range().hosts().take(5).map(IpAddr::from).collect();
    for address in &claimed {
        let claim = json!({"metadata": {"name": address.to_string(), "labels": {"sticky-ipam.io/block": label}},
            "spec": {"address": address, "phase": "Granted", "block": case.range().to_string(),
                     "stickyRef": {"namespace": case.namespace(), "name": "x"}}});
        api.create(&PostParams::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
    }
    agent.settle().await;
    let offered = unowned(&case, &node).await;
    assert!(offered.len() == 4 && offered.is_disjoint(&claimed), "{offered:?}");
}

#[tokio::test]
async fn a_ciliumnode_emptied_by_hand_gets_its_owned_and_unowned_entries_again() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    let first = pod(&case, "db-0", &node).await;
    let address = node.add(&first).await.unwrap();
    agent.settle().await;
    let before = cilium_node_of(&case, &node).await.spec.ipam.pool;
    assert!(before.contains_key(&address.to_string()) && before.len() == 5, "{before:?}");
    let empty: serde_json::Map<String, Value> = before.keys().map(|key| (key.clone(), Value::Null)).collect();
    patch_node(&case, &node.name, json!({"spec": {"ipam": {"pool": empty}}})).await;
    agent.settle().await;
    assert_eq!(cilium_node_of(&case, &node).await.spec.ipam.pool, before);
}

/// Deletes the CiliumNode and makes it as cilium-agent does: with neither pool nor ranges.
async fn create_again(case: &Case<'_>, node: &TestNode) {
    let nodes: Api<CiliumNode> = Api::all(case.client());
    nodes.delete(&node.name, &Default::default()).await.unwrap();
    cilium_node(case, &node.name, &[], json!({})).await;
}

#[tokio::test]
async fn a_ciliumnode_created_again_gets_its_entries_back_and_no_route_to_what_is_home() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    let first = pod(&case, "db-0", &node).await;
    let address = node.add(&first).await.unwrap();
    agent.settle().await;
    let before = cilium_node_of(&case, &node).await.spec.ipam.pool;
    assert!(before.contains_key(&address.to_string()) && before.len() == 5, "{before:?}");
    create_again(&case, &node).await;
    agent.settle().await;
    let ipam = cilium_node_of(&case, &node).await.spec.ipam;
    assert_eq!(ipam.pool, before, "live ordinary pods may have the unowned ones");
    assert_eq!(ipam.pod_cidrs, [""; 0], "the address was home a moment ago");
    // Neither does the plugin, whose pod starts again.
    node.del(&first).await;
    let again = pod(&case, "db-0", &node).await;
    assert_eq!(node.add(&again).await.unwrap(), address);
    assert_eq!(cilium_node_of(&case, &node).await.spec.ipam.pod_cidrs, [""; 0]);
}

#[tokio::test]
async fn an_entry_is_not_written_again_once_it_is_claimed_or_another_nodes() {
    let case = case().await;
    let [one, two, ..] = parts(&case);
    let node = TestNode::ready_crd(&case, "n1", one).await;
    let other = TestNode::ready_crd(&case, "n2", two).await;
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    agent.settle().await;
    let recorded: Vec<IpAddr> = unowned_records(&node).into_iter().collect();
    assert_eq!(recorded.len(), 4);
    create_again(&case, &node).await;
    let claim = json!({"metadata": {"name": recorded[0].to_string()},
        "spec": {"address": recorded[0], "phase": "Granted", "homeNode": node.name,
                 "stickyRef": {"namespace": case.namespace(), "name": "x"}}});
    let claims: Api<AddressClaim> = Api::all(case.client());
    claims.create(&PostParams::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
    let routes = [two.to_string(), format!("{}/31", recorded[1])];
    let pool = json!({recorded[3].to_string(): {}});
    patch_node(&case, &other.name, json!({"spec": {"ipam": {"podCIDRs": routes, "pool": pool}}})).await;
    agent.settle().await;
    let of_block: ipnet::IpNet = routes[1].parse().unwrap();
    let left = recorded[1..3].iter().filter(|address| !of_block.contains(*address));
    assert_eq!(unowned(&case, &node).await, left.copied().collect());
}

#[tokio::test]
async fn a_stale_entry_goes_once_cilium_has_no_endpoint_and_a_foreign_entry_stays() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    let owner = format!("{}/db-0", case.namespace());
    let first = pod(&case, "db-0", &node).await;
    let address = node.add(&first).await.unwrap();
    node.del(&first).await;
    delete_pod(&case, "db-0").await;
    // Left by another program, with an endpoint that still exists.
    let stranger = node.range().hosts().nth(30).unwrap();
    let keys = json!({address.to_string(): {"owner": owner}, stranger.to_string(): {"owner": "shop/cart"}});
    let routes = [node.range().to_string(), format!("{address}/32")];
    patch_node(&case, &node.name, json!({"spec": {"ipam": {"pool": keys, "podCIDRs": routes}}})).await;
    node.cilium().put_endpoint("old", address);
    agent.settle().await;
    assert_eq!(owned(&cilium_nodes(&case).await, &owner).len(), 1, "an endpoint has it");
    node.cilium().end_endpoint("old");
    agent.step().await;
    agent.settle().await;
    assert!(owned(&cilium_nodes(&case).await, &owner).is_empty());
    let left = cilium_node_of(&case, &node).await.spec.ipam;
    assert_eq!(left.pod_cidrs, [node.range().to_string()], "and its route");
    assert_eq!(left.pool[&stranger.to_string()].owner, "shop/cart");
}

#[tokio::test]
async fn an_address_away_from_home_has_a_route_as_long_as_it_is_away() {
    let case = case().await;
    let [one, two, ..] = parts(&case);
    let n1 = TestNode::ready_crd(&case, "n1", one).await;
    let n2 = TestNode::ready_crd(&case, "n2", two).await;
    let mut agents = [Stepped::new(&case, &n1, "crd", FEW).await, Stepped::new(&case, &n2, "crd", FEW).await];
    let home = pod(&case, "db-0", &n1).await;
    for agent in &mut agents {
        agent.settle().await;
    }
    let address = n1.add(&home).await.unwrap();
    let route = format!("{address}/32");
    n1.del(&home).await;
    let away = pod(&case, "db-0", &n2).await;
    for agent in &mut agents {
        agent.settle().await;
    }
    assert!(cilium_node_of(&case, &n2).await.spec.ipam.pod_cidrs.contains(&route), "prepared with its route");
    assert_eq!(n2.add(&away).await.unwrap(), address);
    // Removed by hand, it is published again.
    patch_node(&case, &n2.name, json!({"spec": {"ipam": {"podCIDRs": [two.to_string()]}}})).await;
    agents[1].settle().await;
    assert!(cilium_node_of(&case, &n2).await.spec.ipam.pod_cidrs.contains(&route));
    assert_in_one_pool(&cilium_nodes(&case).await);
    n2.del(&away).await;
    let back = pod(&case, "db-0", &n1).await;
    for agent in &mut agents {
        agent.settle().await;
    }
    assert_eq!(cilium_node_of(&case, &n2).await.spec.ipam.pod_cidrs, [two.to_string()]);
    assert_eq!(n1.add(&back).await.unwrap(), address);
    assert_eq!(cilium_node_of(&case, &n1).await.spec.ipam.pod_cidrs, [one.to_string()]);
    assert_in_step(&case, &[&n1, &n2]).await;
}

#[tokio::test]
async fn a_pin_in_another_nodes_block_is_granted_by_that_agent_unless_it_is_unowned() {
    let case = case().await;
    let [one, two, ..] = parts(&case);
    let n1 = TestNode::ready_crd(&case, "n1", one).await;
    let n2 = TestNode::ready_crd(&case, "n2", two).await;
    let mut home = Stepped::new(&case, &n1, "crd", FEW).await;
    home.settle().await;
    let offered = *unowned(&case, &n1).await.iter().next().unwrap();
    let free: IpAddr = one.hosts().nth(30).unwrap().into();
    for (name, pin, granted) in [("db-0", free, true), ("db-1", offered, false)] {
        let asker = sticky_pod(&case, name, &n2.name, json!({"sticky-ipam.io/ips": pin.to_string()})).await;
        let asker = sandbox(&asker);
        // Nobody has answered yet.
        let error = n2.add(&asker).await.unwrap_err();
        let asked = claims(&case).await;
        let asked = asked.iter().find(|claim| claim.spec.address == pin);
        let asked = asked.unwrap_or_else(|| panic!("there is no claim: {error}"));
        assert_eq!(asked.spec.phase, ClaimPhase::Requested);
        home.settle().await;
        let added = n2.add(&asker).await;
        assert_eq!(added.is_ok(), granted, "{added:?}");
    }
    assert!(n1.store().address_files().unwrap().iter().any(|look| look.address == free), "kept at home");
}
