//! Pods with an address of each family: one StickyIP, a claim a family, and both move together.

use std::net::IpAddr;

use ipnet::Ipv6Net;
use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::json;
use sticky_ipam::cluster::objects::cilium::CiliumNode;

use crate::support::agent::Stepped;
use crate::support::agent::{case, parts};
use crate::support::api_server::case::Case;
use crate::support::node::{
    TestNode, assert_in_step, claims, delete_pod, sandbox, stickies, sticky_pod, sticky_pool,
};

/// A range of the case's own.
fn six(case: &Case<'_>, number: u16) -> Ipv6Net {
    let [a, b, c, _] = case.range().network().octets();
    let high = u16::from_be_bytes([a, b]);
    Ipv6Net::new([0xfd00, high, c.into(), number, 0, 0, 0, 0].into(), 112).unwrap()
}

async fn two_nodes(case: &Case<'_>) -> [TestNode; 2] {
    let [one, two, ..] = parts(case);
    let mut nodes = [TestNode::ready(case, "n1", one).await, TestNode::ready(case, "n2", two).await];
    for (number, node) in (1..).zip(&mut nodes) {
        node.also(six(case, number));
    }
    nodes
}

fn families(addresses: &[IpAddr]) -> [bool; 2] {
    [addresses.iter().any(IpAddr::is_ipv4), addresses.iter().any(IpAddr::is_ipv6)]
}

#[tokio::test]
async fn both_addresses_stay_with_the_pod_over_restarts_and_nodes() {
    let case = case().await;
    let nodes = two_nodes(&case).await;
    let mut own: Option<Vec<IpAddr>> = None;
    for node in [&nodes[0], &nodes[0], &nodes[1], &nodes[0]] {
        let pod = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
        let addresses = node.add_all(&pod).await.unwrap();
        assert_eq!((addresses.len(), families(&addresses)), (2, [true, true]), "{addresses:?}");
        assert_eq!(&addresses, own.get_or_insert_with(|| addresses.clone()));
        assert_eq!(node.add_all(&pod).await.unwrap(), addresses, "the same again");
        node.check(&pod).await.unwrap();
        assert_in_step(&case, &[&nodes[0], &nodes[1]]).await;
        delete_pod(&case, "db-0").await;
        node.del(&pod).await;
    }
    assert_eq!(stickies(&case).await.remove(0).spec.addresses.len(), 2);
    assert_eq!(claims(&case).await.len(), 2, "one per family");
}

#[tokio::test]
async fn a_pod_pinned_in_one_family_gets_any_address_of_the_other() {
    let case = case().await;
    let nodes = two_nodes(&case).await;
    let wish: IpAddr = six(&case, 1).hosts().nth(40).unwrap().into();
    let annotations = json!({"sticky-ipam.io/ips": wish.to_string()});
    let pod = sandbox(&sticky_pod(&case, "db-0", &nodes[0].name, annotations).await);
    let addresses = nodes[0].add_all(&pod).await.unwrap();
    assert!(addresses.contains(&wish) && families(&addresses) == [true, true], "{addresses:?}");
    nodes[0].del(&pod).await;
}

#[tokio::test]
async fn the_agent_prepares_both_addresses() {
    let case = case().await;
    let [node, _] = two_nodes(&case).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let pod = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    agent.step().await;
    let bound = stickies(&case).await.remove(0);
    assert_eq!(families(&bound.spec.addresses), [true, true], "{bound:?}");
    assert_eq!(node.add_all(&pod).await.unwrap(), bound.spec.addresses);
    assert_in_step(&case, &[&node]).await;
}

#[tokio::test]
async fn an_address_beside_the_stickyips_only_one_is_free_once_the_pod_has_moved_on() {
    for of_a_pool in [true, false] {
        let case = case().await;
        let [one, two, three, _] = parts(&case);
        let (n1, mut n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
        if of_a_pool {
            sticky_pool(&case, three).await;
        }
        // Bound while the node's pods had one family.
        let first = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
        let address = n2.add(&first).await.unwrap();
        n2.del(&first).await;
        n2.also(six(&case, 2));
        let mut agent = Stepped::new(&case, &n2, "delegated", &[]).await;
        let second = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
        let given = n2.add_all(&second).await.unwrap();
        assert_eq!((given[0], families(&given)), (address, [true, true]), "{given:?}");
        agent.settle().await;
        assert_eq!(n2.in_use().len(), 2, "a sandbox lives with both");
        n2.del(&second).await;
        let moved = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
        assert_eq!(n1.add(&moved).await.unwrap(), address);
        agent.settle().await;
        let left: Vec<_> = n2.store().address_files().unwrap().into_iter().map(|look| look.address).collect();
        let of_its_block: Vec<_> = [address].into_iter().filter(|_| !of_a_pool).collect();
        assert_eq!(left, of_its_block, "of a pool: {of_a_pool}");
        n2.assert_nothing_reserved_without_claim(&case).await;
        assert!(n2.store().verify().unwrap().iter().all(|finding| !finding.wrong));
        assert_in_step(&case, &[&n1, &n2]).await;
    }
}

#[tokio::test]
async fn a_pod_starts_without_the_family_that_cilium_has_disabled_and_gets_an_event() {
    let case = case().await;
    let [one, ..] = parts(&case);
    // Cilium of this node serves IPv4 alone, whatever blocks it has.
    let node = TestNode::ready_crd(&case, "n1", one).await;
    let cidrs = json!({"spec": {"ipam": {"podCIDRs": [one.to_string(), six(&case, 1).to_string()]}}});
    let nodes: Api<CiliumNode> = Api::all(case.client());
    nodes.patch(&node.name, &PatchParams::default(), &Patch::Merge(cidrs)).await.unwrap();
    let mut agent = Stepped::new(&case, &node, "crd", &[]).await;
    let pod = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    agent.step().await;
    let bound = stickies(&case).await.remove(0).spec.addresses;
    assert_eq!(families(&bound), [true, true], "{bound:?}");
    let given = node.add_all(&pod).await.unwrap();
    let (four, six): (Vec<IpAddr>, Vec<IpAddr>) = bound.iter().partition(|address| address.is_ipv4());
    assert_eq!(given, four);
    for _ in 0..2 {
        agent.settle().await;
        agent.later();
    }
    let events: Api<Event> = Api::namespaced(case.client(), case.namespace());
    let listed = events.list(&ListParams::default()).await.unwrap().items;
    let told: Vec<_> = listed
        .into_iter()
        .filter(|event| event.reason.as_deref() == Some("AddressFamilyDisabled"))
        .map(|event| event.message.unwrap_or_default())
        .collect();
    assert!(told.len() == 1 && told[0].contains(&six[0].to_string()), "{told:?}");
    node.check(&pod).await.unwrap();
    node.del(&pod).await;
    assert_in_step(&case, &[&node]).await;
}
