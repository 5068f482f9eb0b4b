//! A node whose store is new, or is an older copy, while its addresses live on elsewhere: an ADD that comes
//! before the agent, or without it, gives none of them away.

use std::net::IpAddr;
use std::path::Path;
use std::process::Command;

use ipnet::Ipv6Net;
use k8s_openapi::api::core::v1::{Event, Node};
use kube::api::{Api, DeleteParams};
use serde_json::json;
use sticky_ipam::names::{Attachment, ContainerId, IfName, PodIdentity};
use sticky_ipam::store::{Record, RecordState};

use crate::support::agent::{Stepped, case, cut_off, fill, parts};
use crate::support::api_server::case::Case;
use crate::support::node::{Sandbox, TestNode, claims, delete_pod, sandbox, sticky_pod};

/// An address of n1's range that db-0 has on n2, and n1's own copy of its store from before that.
struct Away {
    n1: TestNode,
    n2: TestNode,
    address: IpAddr,
    moved: Sandbox,
}

async fn away(case: &Case<'_>) -> Away {
    let [one, two, ..] = parts(case);
    let (n1, n2) = (TestNode::ready(case, "n1", one).await, TestNode::ready(case, "n2", two).await);
    // So that the store has its mark before the address is reserved.
    n1.seed(case).await;
    copy(n1.store().root(), &backup(&n1));
    let first = sandbox(&sticky_pod(case, "db-0", &n1.name, json!({})).await);
    let address = n1.add(&first).await.unwrap();
    n1.del(&first).await;
    delete_pod(case, "db-0").await;
    let moved = sandbox(&sticky_pod(case, "db-0", &n2.name, json!({})).await);
    assert_eq!(n2.add(&moved).await.unwrap(), address);
    Away { n1, n2, address, moved }
}

fn backup(node: &TestNode) -> std::path::PathBuf {
    node.folder().join("backup")
}

fn copy(from: &Path, to: &Path) {
    assert!(Command::new("cp").arg("-a").arg(from).arg(to).status().unwrap().success());
}

fn wipe(node: &TestNode) {
    std::fs::remove_dir_all(node.store().root()).unwrap();
}

fn is_seeded(node: &TestNode) -> bool {
    node.store().lock().unwrap().is_seeded().unwrap()
}

/// Every address that the node gives to pods which are not sticky.
async fn all_but(case: &Case<'_>, away: &Away, names: &str) {
    let given = fill(case, &away.n1, names).await;
    assert!(given.len() > 40, "only {} pods got an address", given.len());
    assert!(!given.contains(&away.address), "{} lives on {}", away.address, away.n2.name);
}

#[tokio::test]
async fn a_new_store_gives_no_claimed_address_away_while_the_agent_is_down() {
    let case = case().await;
    let away = away(&case).await;
    wipe(&away.n1);
    all_but(&case, &away, "web").await;
    assert!(is_seeded(&away.n1));
    away.n1.assert_claims_of_its_block_are_reserved(&case).await;
}

#[tokio::test]
async fn an_older_copy_of_a_store_gives_no_claimed_address_away() {
    let case = case().await;
    let away = away(&case).await;
    wipe(&away.n1);
    copy(&backup(&away.n1), away.n1.store().root());
    all_but(&case, &away, "web").await;
}

#[tokio::test]
async fn a_store_whose_records_were_removed_by_hand_gives_no_claimed_address_away() {
    let case = case().await;
    let away = away(&case).await;
    assert!(is_seeded(&away.n1));
    // As `rm -rf /var/lib/cni/networks/*/*` does, which leaves what begins with a dot.
    for name in std::fs::read_dir(away.n1.store().root()).unwrap() {
        let path = name.unwrap().path();
        if path.is_file() {
            std::fs::remove_file(path).unwrap();
        }
    }
    all_but(&case, &away, "web").await;
}

#[tokio::test]
async fn a_new_store_is_seeded_by_the_agent_before_its_watches_have_listed() {
    let case = case().await;
    let away = away(&case).await;
    let mut agent = Stepped::new(&case, &away.n1, "delegated", &[]).await;
    wipe(&away.n1);
    agent.step_blind().await;
    assert!(is_seeded(&away.n1));
    all_but(&case, &away, "web").await;
    // The agent does no more of it, and its address is the claimant's own when it comes back.
    delete_pod(&case, "db-0").await;
    away.n2.del(&away.moved).await;
    agent.settle().await;
    let back = sandbox(&sticky_pod(&case, "db-0", &away.n1.name, json!({})).await);
    assert_eq!(away.n1.add(&back).await.unwrap(), away.address);
}

#[tokio::test]
async fn a_new_store_gives_nothing_while_the_api_server_is_away() {
    let case = case().await;
    let mut away = away(&case).await;
    let (own, plain) = (away.n1.kubeconfig(), sandbox(&case.pod("web", &[], Some(&away.n1.name)).await));
    away.n1.on_unavailable("allocate");
    let proxy = cut_off(&case, &mut away.n1);
    let given = away.n1.add(&plain).await.unwrap();
    away.n1.del(&plain).await;
    assert_ne!(given, away.address, "a store that has its mark needs no server");
    wipe(&away.n1);
    let error = away.n1.add(&plain).await.unwrap_err();
    let message = error["msg"].as_str().unwrap();
    assert_eq!(error["code"], 11, "{error}");
    assert!(message.contains("new or was restored") && message.contains("is away"), "{message}");
    assert!(away.n1.in_use().is_empty() && !is_seeded(&away.n1));
    drop(proxy);
    away.n1.by_file(own);
    away.n1.timeout("20s");
    away.n1.add(&plain).await.unwrap();
    // From now on it needs no server.
    let _proxy = cut_off(&case, &mut away.n1);
    let next = sandbox(&case.pod("web-2", &[], Some(&away.n1.name)).await);
    assert_ne!(away.n1.add(&next).await.unwrap(), away.address);
}

/// A range of the case's own.
fn six(case: &Case<'_>, number: u16) -> Ipv6Net {
    let [a, b, c, _] = case.range().network().octets();
    let (high, low) = (u16::from_be_bytes([a, b]), u16::from(c));
    Ipv6Net::new([0xfd01, high, low, number, 0, 0, 0, 0].into(), 126).unwrap()
}

#[tokio::test]
async fn a_sticky_pod_gets_no_claimed_address_of_a_family_that_it_does_not_keep() {
    let case = case().await;
    let [one, two, ..] = parts(&case);
    let mut nodes = [TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await];
    for (number, node) in (1..).zip(&mut nodes) {
        node.also(six(&case, number));
    }
    let [n1, n2] = &nodes;
    let first = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
    let addresses = n1.add_all(&first).await.unwrap();
    let its_six = *addresses.iter().find(|address| address.is_ipv6()).unwrap();
    n1.del(&first).await;
    delete_pod(&case, "db-0").await;
    let moved = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
    assert_eq!(n2.add_all(&moved).await.unwrap(), addresses);
    wipe(n1);
    let pinned: IpAddr = one.hosts().nth(40).unwrap().into();
    let pins = json!({"sticky-ipam.io/ips": pinned.to_string()});
    let other = sandbox(&sticky_pod(&case, "cache-0", &n1.name, pins).await);
    let given = n1.add_all(&other).await.unwrap();
    assert!(given.contains(&pinned) && !given.contains(&its_six), "{given:?}, and db-0 has {its_six}");
}

/// An ordinary pod of the node has this address, as if a store that was lost had given it out.
async fn give_by_mistake(case: &Case<'_>, node: &TestNode, address: IpAddr) -> Sandbox {
    wipe(node);
    let pod = sandbox(&case.pod("web", &[], Some(&node.name)).await);
    let store = node.store();
    let container = ContainerId::new(&pod.container).unwrap();
    let record = Record {
        addresses: vec![address],
        attachment: Attachment { container, interface: IfName::new("eth0").unwrap() },
        state: RecordState::Attached,
        netns: None,
        pod: Some(PodIdentity::new(&pod.namespace, &pod.pod, Some(&pod.uid)).unwrap()),
        retention: None,
        binding: None,
        since: store.now().clone(),
    };
    let mut locked = store.lock().unwrap();
    locked.put(&record, None).unwrap();
    locked.commit().unwrap();
    pod
}

async fn in_use_by(case: &Case<'_>) -> Option<String> {
    claims(case).await.remove(0).spec.in_use_by
}

/// The pods and StickyIPs that have an event of this reason.
async fn told(case: &Case<'_>, reason: &str) -> Vec<String> {
    let events: Api<Event> = Api::namespaced(case.client(), case.namespace());
    let events = events.list(&Default::default()).await.unwrap().items.into_iter();
    let mut told: Vec<String> = events
        .filter(|event| event.reason.as_deref() == Some(reason))
        .map(|event| {
            let about = event.involved_object;
            format!("{} {}", about.kind.unwrap_or_default(), about.name.unwrap_or_default())
        })
        .collect();
    told.sort();
    told
}

#[tokio::test]
async fn an_address_that_an_ordinary_pod_of_its_home_has_is_not_attached_again() {
    let case = case().await;
    let away = away(&case).await;
    let mut agent = Stepped::new(&case, &away.n1, "delegated", &[]).await;
    let web = give_by_mistake(&case, &away.n1, away.address).await;
    for _ in 0..3 {
        agent.step().await;
        agent.later();
    }
    let by = in_use_by(&case).await.expect("the claim says who has the address");
    assert!(by.contains(&format!("{}/web", case.namespace())), "{by}");
    assert_eq!(told(&case, "AddressInUse").await, ["Pod db-0", "Pod web", "StickyIP db-0"]);
    assert!(!is_seeded(&away.n1), "its next ADD looks again");
    // The pod that has it keeps it; its successor waits, wherever it is.
    delete_pod(&case, "db-0").await;
    away.n2.del(&away.moved).await;
    for node in [&away.n1, &away.n2] {
        let next = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
        let error = node.add(&next).await.unwrap_err();
        let message = error["msg"].as_str().unwrap();
        assert_eq!(error["code"], 11, "{error}");
        assert!(message.contains("/web") && message.contains("delete that pod"), "{message}");
        node.del(&next).await;
    }
    // Neither does another ordinary pod get it, with the mistake gone and the agent away.
    delete_pod(&case, "web").await;
    away.n1.del(&web).await;
    all_but(&case, &away, "next").await;
    agent.settle().await;
    assert_eq!(in_use_by(&case).await, None);
    let back = sandbox(&sticky_pod(&case, "db-0", &away.n2.name, json!({})).await);
    assert_eq!(away.n2.add(&back).await.unwrap(), away.address);
}

#[tokio::test]
async fn an_address_that_was_in_use_on_a_node_that_is_gone_is_attached() {
    let case = case().await;
    let away = away(&case).await;
    let mut agent = Stepped::new(&case, &away.n1, "delegated", &[]).await;
    give_by_mistake(&case, &away.n1, away.address).await;
    for _ in 0..3 {
        agent.step().await;
        agent.later();
    }
    assert!(in_use_by(&case).await.is_some());
    delete_pod(&case, "db-0").await;
    away.n2.del(&away.moved).await;
    let nodes: Api<Node> = Api::all(case.client());
    nodes.delete(&away.n1.name, &DeleteParams::default()).await.unwrap();
    let next = sandbox(&sticky_pod(&case, "db-0", &away.n2.name, json!({})).await);
    assert_eq!(away.n2.add(&next).await.unwrap(), away.address);
    assert_eq!(in_use_by(&case).await, None);
}
