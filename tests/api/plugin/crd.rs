//! `crd` mode on a real API server, with an agent of Cilium's that gives out of the live pool.

use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Event;
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::cluster::objects::{AddressClaim, ClaimPhase, StickyIP};
use sticky_ipam::names::{AttachmentId, PodIdentity};
use sticky_ipam::store::{Decision, NodeTime, PendingUpdateKind, PreparedSticky};

use crate::support::agent::Stepped;
use crate::support::api_server::case::Case;
use crate::support::api_server::{ApiServer, comes_true};
use crate::support::cilium::{CiliumRelease, Scribe, assert_in_one_pool, cilium_nodes, owned};
use crate::support::node::{
    Sandbox, TestNode, assert_in_step, claims, delete_pod, sandbox, stickies, sticky_pod, sticky_pool,
};

async fn case() -> Case<'static> {
    let server = ApiServer::shared().await;
    server.install_our_kinds().await;
    server.case().await
}

async fn two_nodes(case: &Case<'_>) -> (TestNode, TestNode) {
    let parts: Vec<_> = case.range().subnets(26).unwrap().collect();
    (TestNode::ready_crd(case, "n1", parts[0]).await, TestNode::ready_crd(case, "n2", parts[1]).await)
}

fn code(error: &Value) -> u64 {
    error["code"].as_u64().unwrap()
}

fn message(error: &Value) -> &str {
    error["msg"].as_str().unwrap()
}

async fn pod(case: &Case<'_>, name: &str, node: &TestNode) -> Sandbox {
    sandbox(&sticky_pod(case, name, &node.name, json!({})).await)
}

async fn routes(case: &Case<'_>, node: &TestNode) -> Vec<String> {
    let nodes = cilium_nodes(case).await;
    let node = nodes.into_iter().find(|found| found.metadata.name.as_deref() == Some(&node.name)).unwrap();
    node.spec.ipam.pod_cidrs.into_iter().skip(1).collect()
}

#[tokio::test]
async fn a_sticky_pod_keeps_its_address_over_restarts_and_nodes() {
    let case = case().await;
    let (n1, n2) = two_nodes(&case).await;
    let owner = format!("{}/db-0", case.namespace());
    let first = pod(&case, "db-0", &n1).await;
    let address = n1.add(&first).await.unwrap();
    n1.check(&first).await.unwrap();
    assert_eq!(n1.add(&first).await.unwrap(), address, "the same again");
    n1.del(&first).await;
    for node in [&n1, &n2, &n2, &n1] {
        let again = pod(&case, "db-0", node).await;
        assert_eq!(node.add(&again).await.unwrap(), address);
        let nodes = cilium_nodes(&case).await;
        assert_in_one_pool(&nodes);
        assert_eq!(owned(&nodes, &owner), [(node.name.clone(), address)]);
        let shows = nodes.iter().find(|shows| shows.metadata.name.as_deref() == Some(&node.name)).unwrap();
        assert_eq!(shows.metadata.managed_fields, None, "docs/decisions/0024");
        let away = if node.name == n2.name { vec![format!("{address}/32")] } else { vec![] };
        assert_eq!((routes(&case, &n1).await, routes(&case, &n2).await), (vec![], away));
        assert_in_step(&case, &[&n1, &n2]).await;
        node.del(&again).await;
        assert_eq!(owned(&cilium_nodes(&case).await, &owner), []);
        assert_eq!(routes(&case, node).await, [""; 0]);
        assert!(node.cilium().endpoints().is_empty());
    }
    assert!(stickies(&case).await.remove(0).status.unwrap().attachment.is_none());
    assert!(n1.pending_updates().is_empty() && n2.pending_updates().is_empty());
}

#[tokio::test]
async fn a_pod_that_is_not_sticky_goes_straight_to_cilium() {
    let case = case().await;
    let (n1, _) = two_nodes(&case).await;
    let plain = sandbox(&case.pod("web", &[], Some(&n1.name)).await);
    let address = n1.add(&plain).await.unwrap();
    let nodes = cilium_nodes(&case).await;
    assert!(nodes.iter().any(|node| node.spec.ipam.pool.contains_key(&address.to_string())));
    n1.check(&plain).await.unwrap();
    n1.del(&plain).await;
    assert!(n1.cilium().endpoints().is_empty() && n1.in_use().is_empty());
    assert!(stickies(&case).await.is_empty() && claims(&case).await.is_empty());
    assert_eq!(cilium_nodes(&case).await.len(), nodes.len());
}

#[tokio::test]
async fn the_entry_is_published_before_ciliums_add_and_unpublished_between_del_and_detach() {
    let case = case().await;
    let (n1, _) = two_nodes(&case).await;
    let first = pod(&case, "db-0", &n1).await;
    let diary = n1.cilium().diary();
    let address = n1.add_before(&first, Arc::new(Scribe(diary.clone()))).await.unwrap().unwrap();
    let namespace = case.namespace();
    let key = format!("+{address}={namespace}/db-0,{namespace}/Pod/db-0");
    assert_eq!(*diary.lock().unwrap(), ["claim", "claim", "claim", "attach", key.as_str(), "cilium ADD"]);
    diary.lock().unwrap().clear();
    n1.del_before(&first, Arc::new(Scribe(diary.clone()))).await.unwrap();
    assert_eq!(*diary.lock().unwrap(), ["cilium DEL", &format!("-{address}"), "detach"]);
}

#[tokio::test]
async fn a_wrong_address_is_taken_down_and_tried_again_and_in_the_end_refused() {
    let case = case().await;
    let (mut n1, _) = two_nodes(&case).await;
    let first = pod(&case, "db-0", &n1).await;
    n1.cilium().be_blind(1);
    let error = n1.add(&first).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains("Cilium gave"), "{error}");
    assert!(n1.cilium().endpoints().is_empty(), "nothing is left of it");
    let calls = |node: &TestNode| node.cilium().diary().lock().unwrap().clone();
    assert_eq!(calls(&n1), ["cilium ADD", "cilium DEL"]);
    n1.del(&first).await;
    n1.patience("60s");
    n1.cilium().be_blind(2);
    let address = n1.add(&first).await.unwrap();
    let held: Vec<IpAddr> = n1.cilium().endpoints().into_values().collect();
    assert_eq!(held, [address]);
    assert_eq!(stickies(&case).await.remove(0).spec.addresses, [address]);
}

#[tokio::test]
async fn an_add_waits_while_cilium_has_the_address_for_another_sandbox() {
    let case = case().await;
    let (mut n1, _) = two_nodes(&case).await;
    let first = pod(&case, "db-0", &n1).await;
    let address = n1.add(&first).await.unwrap();
    n1.del(&first).await;
    n1.cilium().put_endpoint("the-old-one", address);
    n1.cilium().diary().lock().unwrap().clear();
    let second = pod(&case, "db-0", &n1).await;
    let error = n1.add(&second).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains("another sandbox"), "{error}");
    assert!(n1.cilium().diary().lock().unwrap().is_empty(), "cilium-cni was not run");
    n1.del(&second).await;
    n1.patience("60s");
    let before = n1.cilium().asked();
    let (added, ()) = tokio::join!(n1.add(&second), async {
        let asked =
            comes_true(std::time::Duration::from_secs(60), || async { n1.cilium().asked() > before + 1 });
        assert!(asked.await, "nobody asks Cilium's socket");
        n1.cilium().end_endpoint("the-old-one");
    });
    assert_eq!(added.unwrap(), address);
}

#[tokio::test]
async fn an_add_waits_until_cilium_has_seen_its_entry_whatever_it_says_meanwhile() {
    for release in CiliumRelease::ALL {
        let case = case().await;
        let (mut n1, _) = two_nodes(&case).await;
        let cilium = n1.cilium();
        cilium.be_release(release);
        // Nothing unowned is free, and what is published now is seen later.
        let offered = cilium_nodes(&case).await.remove(0).spec.ipam.pool;
        for (number, address) in offered.keys().enumerate() {
            cilium.put_endpoint(&format!("other-{number}"), address.parse().unwrap());
        }
        cilium.hold_back().await;
        let first = pod(&case, "db-0", &n1).await;
        let error = n1.add(&first).await.unwrap_err();
        assert!(code(&error) == 11 && message(&error).contains("available"), "{release:?}: {error}");
        n1.del(&first).await;
        n1.patience("60s");
        let diary = n1.cilium().diary();
        diary.lock().unwrap().clear();
        let (added, ()) = tokio::join!(n1.add(&first), async {
            let tries = || diary.lock().unwrap().iter().filter(|call| *call == "cilium ADD").count();
            let tried = comes_true(std::time::Duration::from_secs(60), || async { tries() > 1 });
            assert!(tried.await, "{release:?}: it does not try again");
            n1.cilium().catch_up();
        });
        assert_eq!(stickies(&case).await.remove(0).spec.addresses, [added.unwrap()], "{release:?}");
    }
}

#[tokio::test]
async fn an_endpoint_of_a_dead_sandbox_is_deleted_and_that_of_a_live_one_is_waited_for() {
    for (same_uid, netns_left, is_dead) in
        [(true, true, true), (true, false, true), (false, false, true), (false, true, false)]
    {
        let case = case().await;
        let (n1, _) = two_nodes(&case).await;
        let old = pod(&case, "db-0", &n1).await;
        let address = n1.add(&old).await.unwrap();
        let new = match same_uid {
            true => Sandbox { container: "new-one".into(), ..old.clone() },
            false => pod(&case, "db-0", &n1).await,
        };
        if !netns_left {
            n1.end(&old);
        }
        n1.cilium().diary().lock().unwrap().clear();
        let added = n1.add(&new).await;
        let calls = n1.cilium().diary().lock().unwrap().clone();
        if is_dead {
            assert_eq!(added.unwrap(), address, "{same_uid} {netns_left}");
            assert_eq!(calls, ["cilium DEL", "cilium ADD"]);
            assert_eq!(n1.cilium().endpoints().into_keys().collect::<Vec<_>>(), [new.container.as_str()]);
        } else {
            assert_eq!(code(&added.unwrap_err()), 11);
            assert_eq!(calls, [""; 0], "cilium-cni was not run");
            assert_eq!(n1.cilium().endpoints().into_keys().collect::<Vec<_>>(), [old.container.as_str()]);
        }
    }
}

#[tokio::test]
async fn a_del_leaves_the_entry_to_the_agent_while_cilium_has_an_endpoint_with_it() {
    let case = case().await;
    let (n1, _) = two_nodes(&case).await;
    let owner = format!("{}/db-0", case.namespace());
    let first = pod(&case, "db-0", &n1).await;
    let address = n1.add(&first).await.unwrap();
    // The DEL reaches cilium-agent later, as when that is down: cilium-cni only puts it into its queue.
    n1.cilium().queue_deletes();
    delete_pod(&case, "db-0").await;
    n1.del(&first).await;
    assert_eq!(owned(&cilium_nodes(&case).await, &owner), [(n1.name.clone(), address)]);
    assert!(stickies(&case).await.remove(0).status.unwrap().attachment.is_some());
    assert_eq!(n1.pending_updates().len(), 1);
    let mut agent = Stepped::new(&case, &n1, "crd", &[]).await;
    agent.settle().await;
    assert_eq!(owned(&cilium_nodes(&case).await, &owner), [(n1.name.clone(), address)]);
    n1.cilium().end_endpoint(&first.container);
    agent.later();
    agent.settle().await;
    assert_eq!(owned(&cilium_nodes(&case).await, &owner), []);
    assert!(n1.pending_updates().is_empty());
    assert_in_step(&case, &[&n1]).await;
}

#[tokio::test]
async fn a_pod_that_is_not_sticky_does_not_start_with_an_address_kept_for_a_stickyip() {
    let case = case().await;
    let (n1, _) = two_nodes(&case).await;
    let sticky = pod(&case, "db-0", &n1).await;
    let address = n1.add(&sticky).await.unwrap();
    n1.del(&sticky).await;
    // Its entry is there, as if nothing could have removed it: Cilium gives it to every pod of the name.
    let nodes: Api<CiliumNode> = Api::all(case.client());
    let owner = format!("{}/db-0", case.namespace());
    let entry = json!({"spec": {"ipam": {"pool": {address.to_string(): {"owner": owner}}}}});
    nodes.patch(&n1.name, &PatchParams::default(), &Patch::Merge(entry)).await.unwrap();
    delete_pod(&case, "db-0").await;
    let plain = sandbox(&case.pod("db-0", &[], Some(&n1.name)).await);
    let error = n1.add(&plain).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains("keeps it for StickyIP"), "{error}");
    assert!(n1.cilium().endpoints().is_empty(), "nothing is left of it");
    let removed = json!({"spec": {"ipam": {"pool": {address.to_string(): null}}}});
    nodes.patch(&n1.name, &PatchParams::default(), &Patch::Merge(removed)).await.unwrap();
    assert_ne!(n1.add(&plain).await.unwrap(), address);
}

#[tokio::test]
async fn an_add_that_overtakes_the_old_pods_del_keeps_its_entry_after_that_del() {
    let case = case().await;
    let (mut n1, n2) = two_nodes(&case).await;
    n1.patience("60s");
    let mut old = pod(&case, "db-0", &n1).await;
    let address = n1.add(&old).await.unwrap();
    for node in [&n1, &n1] {
        let new = pod(&case, "db-0", node).await;
        let (added, ()) = tokio::join!(node.add(&new), async {
            // The new one reads everything and waits for the old one's sandbox.
            let waits = comes_true(std::time::Duration::from_secs(60), || async { n1.is_adding(&new) });
            assert!(waits.await, "the ADD never began");
            // Another one's whole ADD, which begins later and reads the same.
            let other = sandbox(&sticky_pod(&case, "other", &n1.name, json!({})).await);
            n1.add(&other).await.unwrap();
            n1.del(&other).await;
            n1.del(&old).await;
        });
        assert_eq!(added.unwrap(), address);
        let nodes = cilium_nodes(&case).await;
        assert_eq!(owned(&nodes, &format!("{}/db-0", case.namespace())), [(n1.name.clone(), address)]);
        old = new;
    }
    assert_in_step(&case, &[&n1, &n2]).await;
}

#[tokio::test]
async fn a_missing_cilium_node_is_reported_and_nothing_is_claimed() {
    let case = case().await;
    let (n1, _) = two_nodes(&case).await;
    let nodes: Api<CiliumNode> = Api::all(case.client());
    nodes.delete(&n1.name, &Default::default()).await.unwrap();
    let first = pod(&case, "db-0", &n1).await;
    let error = n1.add(&first).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains(&format!("CiliumNode {}", n1.name)), "{error}");
    assert!(stickies(&case).await.is_empty() && claims(&case).await.is_empty());
}

#[tokio::test]
async fn a_new_claimant_waits_for_the_nodes_blocks_and_a_known_one_does_not() {
    let case = case().await;
    let (n1, n2) = two_nodes(&case).await;
    // With one of these the address would be of IPv4 alone, for good.
    let pool: Vec<_> = case.range().subnets(26).unwrap().collect();
    sticky_pool(&case, pool[2]).await;
    let known = pod(&case, "db-0", &n2).await;
    let address = n2.add(&known).await.unwrap();
    n2.del(&known).await;
    let nodes: Api<CiliumNode> = Api::all(case.client());
    let blocks = |blocks: Value| json!({"spec": {"ipam": {"podCIDRs": blocks}}});
    let patch = Patch::Merge(blocks(json!([])));
    nodes.patch(&n1.name, &PatchParams::default(), &patch).await.unwrap();

    let new = pod(&case, "db-1", &n1).await;
    let error = n1.add(&new).await.unwrap_err();
    assert_eq!(code(&error), 11, "{error}");
    assert!(message(&error).contains("podCIDRs is empty"), "{error}");
    assert!(stickies(&case).await.iter().all(|sticky| sticky.metadata.name.as_deref() != Some("db-1")));
    assert_eq!(claims(&case).await.len(), 1, "nothing is claimed for db-1");
    let moved = pod(&case, "db-0", &n1).await;
    assert_eq!(n1.add(&moved).await.unwrap(), address);

    let patch = Patch::Merge(blocks(json!([n1.range().to_string()])));
    nodes.patch(&n1.name, &PatchParams::default(), &patch).await.unwrap();
    n1.add(&new).await.unwrap();
}

#[tokio::test]
async fn an_unowned_address_is_never_claimed() {
    let case = case().await;
    let (n1, _) = two_nodes(&case).await;
    let offered: Vec<String> = cilium_nodes(&case).await[0].spec.ipam.pool.keys().cloned().collect();
    let pin = json!({"sticky-ipam.io/ips": offered[0]});
    let thief = sandbox(&sticky_pod(&case, "thief", &n1.name, pin).await);
    let error = n1.add(&thief).await.unwrap_err();
    assert!(code(&error) == 101 && message(&error).contains("Cilium"), "{error}");
    // 62 usable, the first is the gateway's, two are offered.
    let range = case.range().subnets(26).unwrap().next().unwrap();
    let pool: serde_json::Map<String, Value> =
        range.hosts().skip(3).map(|ip| (ip.to_string(), json!({}))).collect();
    let nodes: Api<CiliumNode> = Api::all(case.client());
    let patch = Patch::Merge(json!({"spec": {"ipam": {"pool": pool}}}));
    nodes.patch(&n1.name, &PatchParams::default(), &patch).await.unwrap();
    for name in ["a", "b"] {
        let address = n1.add(&pod(&case, name, &n1).await).await.unwrap();
        assert!(!pool.contains_key(&address.to_string()), "{address}");
    }
    let error = n1.add(&pod(&case, "c", &n1).await).await.unwrap_err();
    assert_eq!(code(&error), 100, "{error}");
}

/// Does what the agent does before an ADD: attaches, shows, and leaves the decision.
async fn prepare(case: &Case<'_>, node: &TestNode, sandbox: &Sandbox, address: IpAddr) {
    let attachment_id = AttachmentId::Prepared(sandbox.uid.clone());
    let attachment = json!({"node": node.name, "podName": sandbox.pod, "podUid": sandbox.uid,
                            "attachmentId": attachment_id, "since": "2026-01-01T00:00:00Z"});
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    let patch = Patch::Merge(json!({"status": {"phase": "Attached", "attachment": attachment}}));
    api.patch_status(&sandbox.pod, &PatchParams::default(), &patch).await.unwrap();
    if node.cilium.is_some() {
        let owner = format!("{}/{}", sandbox.namespace, sandbox.pod);
        let patch = json!({"spec": {"ipam": {"pool": {address.to_string(): {"owner": owner}}}}});
        let nodes: Api<CiliumNode> = Api::all(case.client());
        nodes.patch(&node.name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
    }
    let store = node.store();
    let identity = PodIdentity::new(&sandbox.namespace, &sandbox.pod, Some(&sandbox.uid)).unwrap();
    let sticky = PreparedSticky {
        namespace: sandbox.namespace.clone(),
        name: sandbox.pod.clone(),
        addresses: vec![address],
        resource: "r".into(),
        attachment_id,
    };
    let decision = Decision::about(&identity, Some(sticky), "test", store.now().clone()).unwrap();
    store.lock().unwrap().put_decision(&decision).unwrap();
}

async fn a_prepared_decision(case: Case<'_>, mut n1: TestNode) {
    let first = pod(&case, "db-0", &n1).await;
    let address = n1.add(&first).await.unwrap();
    n1.del(&first).await;
    let second = pod(&case, "db-0", &n1).await;
    prepare(&case, &n1, &second, address).await;
    // Nobody listens there: whoever asks fails.
    let (good, closed) = (n1.kubeconfig(), n1.store().root().join("closed"));
    let text = std::fs::read_to_string(&good).unwrap();
    let server = text.find("https://").unwrap();
    let end = server + text[server..].find('"').unwrap();
    std::fs::write(&closed, format!("{}https://127.0.0.1:1{}", &text[..server], &text[end..])).unwrap();
    n1.by_file(closed.clone());
    assert_eq!(n1.add(&second).await.unwrap(), address);
    assert_eq!(n1.store().decisions().unwrap(), [], "it is used up");
    let other =
        Sandbox { uid: "33333333-3333-3333-3333-333333333333".into(), ..sandbox_of(&second, "other") };
    assert_eq!(code(&n1.add(&other).await.unwrap_err()), 11, "others must ask");
    // With the server away the note says under which name it is known.
    n1.del(&second).await;
    let note = n1.pending_updates().pop().unwrap();
    assert_eq!(
        (note.kind, note.attachment_id),
        (PendingUpdateKind::Ended, Some(AttachmentId::Prepared(second.uid.clone())))
    );
    n1.by_file(good);
    // The runtime repeats itself, and the note tells what the first one could not.
    n1.del(&second).await;
    assert!(stickies(&case).await[0].status.as_ref().unwrap().attachment.is_none());
    assert_eq!(n1.pending_updates(), []);
    // Once more, and its DEL finds the server; a late one of the former changes nothing.
    let third = pod(&case, "db-0", &n1).await;
    prepare(&case, &n1, &third, address).await;
    assert_eq!(n1.add(&third).await.unwrap(), address);
    n1.del(&second).await;
    assert_eq!(n1.in_use(), [(address, third.container.clone())]);
    n1.check(&third).await.unwrap();
    n1.del(&third).await;
    assert!(stickies(&case).await[0].status.as_ref().unwrap().attachment.is_none());
    assert_eq!(owned(&cilium_nodes(&case).await, &format!("{}/db-0", case.namespace())), []);
    // A decision that the pod is not sticky needs no server either.
    let plain = sandbox(&case.pod("web", &[("sticky", "yes")], Some(&n1.name)).await);
    let identity = PodIdentity::new(&plain.namespace, &plain.pod, Some(&plain.uid)).unwrap();
    let decision = Decision::about(&identity, None, "test", NodeTime::new(1, 1, "another boot")).unwrap();
    n1.store().lock().unwrap().put_decision(&decision).unwrap();
    n1.by_file(closed);
    assert_ne!(n1.add(&plain).await.unwrap(), address);
    let before = n1.pending_updates().len();
    n1.del(&plain).await;
    assert_eq!(n1.pending_updates().len(), before, "its DEL has nothing to tell");
    assert_eq!(n1.store().decisions().unwrap().len(), 1, "it stays until the agent takes it away");
}

fn sandbox_of(sandbox: &Sandbox, container: &str) -> Sandbox {
    Sandbox { container: container.into(), ..sandbox.clone() }
}

#[tokio::test]
async fn a_prepared_decision_needs_no_api_server_and_is_used_once() {
    let case = case().await;
    let (n1, _) = two_nodes(&case).await;
    a_prepared_decision(case, n1).await;
}

#[tokio::test]
async fn a_prepared_decision_needs_no_api_server_and_is_used_once_where_this_plugin_picks() {
    let case = case().await;
    let range = case.range().subnets(26).unwrap().next().unwrap();
    let n1 = TestNode::ready(&case, "n1", range).await;
    n1.seed(&case).await;
    a_prepared_decision(case, n1).await;
}

#[tokio::test]
async fn an_attachment_that_was_prepared_for_a_pod_that_is_gone_is_taken_over() {
    let case = case().await;
    let (n1, _) = two_nodes(&case).await;
    let first = pod(&case, "db-0", &n1).await;
    let address = n1.add(&first).await.unwrap();
    n1.del(&first).await;
    let second = pod(&case, "db-0", &n1).await;
    prepare(&case, &n1, &second, address).await;
    let third = pod(&case, "db-0", &n1).await;
    assert_eq!(n1.add(&third).await.unwrap(), address);
    assert_eq!(n1.store().decisions().unwrap(), [], "the gone pod's ADD could not use it any more");
    let late = n1.add(&second).await;
    assert!(late.is_err(), "{late:?}");
    assert_eq!(n1.in_use(), [(address, third.container.clone())]);
}

#[tokio::test]
async fn a_pin_in_another_nodes_block_is_requested_and_used_when_it_is_granted() {
    let case = case().await;
    let parts: Vec<_> = case.range().subnets(26).unwrap().collect();
    let (crd, _) = two_nodes(&case).await;
    let plain = TestNode::ready(&case, "n3", parts[2]).await;
    for (number, node) in [&crd, &plain].into_iter().enumerate() {
        let pinned = IpAddr::from(parts[1].hosts().nth(9 + number).unwrap());
        let name = format!("db-{number}");
        let pin = json!({"sticky-ipam.io/ips": pinned.to_string()});
        let asking = sandbox(&sticky_pod(&case, &name, &node.name, pin).await);
        let error = node.add(&asking).await.unwrap_err();
        assert!(code(&error) == 11 && message(&error).contains("to grant"), "{error}");
        let claim = claims(&case).await.into_iter().find(|claim| claim.spec.address == pinned).unwrap();
        assert_eq!(claim.spec.phase, ClaimPhase::Requested);
        assert_eq!(claim.spec.home_node, Some(case.unique("n2")));
        assert_eq!(claim.spec.block, Some(parts[1].to_string()));
        let api: Api<AddressClaim> = Api::all(case.client());
        let granted = Patch::Merge(json!({"spec": {"phase": "Granted"}}));
        api.patch(claim.metadata.name.as_deref().unwrap(), &PatchParams::default(), &granted).await.unwrap();
        assert_eq!(node.add(&asking).await.unwrap(), pinned);
        assert_eq!(routes(&case, node).await, [format!("{pinned}/32")]);
        node.del(&asking).await;
        assert_eq!(routes(&case, node).await, [""; 0]);
    }
    assert_in_step(&case, &[&crd, &plain]).await;
}

async fn events(case: &Case<'_>, about: &str) -> Vec<(String, String)> {
    let api: Api<Event> = Api::namespaced(case.client(), case.namespace());
    let of = ListParams::default().fields(&format!("involvedObject.name={about}"));
    let listed = api.list(&of).await.unwrap().items.into_iter();
    listed.map(|event| (event.involved_object.kind.unwrap(), event.message.unwrap())).collect()
}

#[tokio::test]
async fn a_refused_pin_and_a_move_are_reported_once() {
    let case = case().await;
    let (n1, n2) = two_nodes(&case).await;
    let pool = case.range().subnets(26).unwrap().nth(2).unwrap();
    sticky_pool(&case, pool).await;
    let pinned = pool.hosts().nth(5).unwrap().to_string();
    let pin = json!({"sticky-ipam.io/ips": pinned});
    let owner = sandbox(&sticky_pod(&case, "db-0", &n1.name, pin.clone()).await);
    n1.add(&owner).await.unwrap();
    let thief = sandbox(&sticky_pod(&case, "thief", &n1.name, pin.clone()).await);
    for _ in 0..2 {
        assert_eq!(code(&n1.add(&thief).await.unwrap_err()), 101);
    }
    let told = events(&case, "thief").await;
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].0 == "Pod" && told[0].1.contains(&format!("{}/db-0", case.namespace())), "{told:?}");
    for (name, value, part) in [("bad", "ten", "ten"), ("lost", "192.0.2.1", "no IPPool")] {
        let pin = json!({"sticky-ipam.io/ips": value});
        let refused = sandbox(&sticky_pod(&case, name, &n1.name, pin).await);
        n1.add(&refused).await.unwrap_err();
        let told = events(&case, name).await;
        assert!(told.len() == 1 && told[0].1.contains(part), "{told:?}");
    }
    n1.del(&owner).await;
    assert_eq!(events(&case, "db-0").await, []);
    let moved = sandbox(&sticky_pod(&case, "db-0", &n2.name, pin).await);
    n2.add(&moved).await.unwrap();
    let mut told = events(&case, "db-0").await;
    told.sort();
    let kinds: Vec<&str> = told.iter().map(|(kind, _)| kind.as_str()).collect();
    assert_eq!(kinds, ["Pod", "StickyIP"], "{told:?}");
    assert!(told.iter().all(|(_, text)| text.contains(&n1.name) && text.contains(&n2.name)), "{told:?}");
}

#[tokio::test]
async fn gc_and_status_know_of_the_cluster() {
    let case = case().await;
    let (mut n1, _) = two_nodes(&case).await;
    let first = pod(&case, "db-0", &n1).await;
    n1.add(&first).await.unwrap();
    n1.status(&first).await.unwrap();
    n1.gc(&first).await.unwrap();
    let note = n1.pending_updates().pop().unwrap();
    assert_eq!((note.kind, note.container), (PendingUpdateKind::Ended, first.container.clone()));
    assert!(n1.in_use().is_empty());
    n1.by_file("/nowhere/kubeconfig".into());
    assert_eq!(code(&n1.status(&first).await.unwrap_err()), 50);
}

#[tokio::test]
async fn a_sticky_pool_over_blocks_of_nodes_gives_none_of_their_addresses() {
    let case = case().await;
    let parts: Vec<_> = case.range().subnets(26).unwrap().collect();
    let (n1, _n2) = two_nodes(&case).await;
    let n3 = TestNode::ready(&case, "n3", parts[2]).await;
    sticky_pool(&case, case.range()).await;
    for node in [&n1, &n3] {
        for number in 0..6 {
            let new = pod(&case, &format!("db-{number}-{}", node.name), node).await;
            let address = node.add(&new).await.unwrap();
            let blocks = parts[..3].iter().filter(|block| ipnet::IpNet::from(**block).contains(&address));
            assert_eq!(blocks.count(), 0, "{address} is of a node's block");
        }
    }
    // Nor by a pin: the node whose block it is of is asked.
    let pinned = IpAddr::from(parts[1].hosts().nth(7).unwrap());
    let pin = json!({"sticky-ipam.io/ips": pinned.to_string()});
    let mut n3 = n3;
    n3.patience("1s");
    let asking = sandbox(&sticky_pod(&case, "pinned", &n3.name, pin).await);
    n3.add(&asking).await.unwrap_err();
    let asked = claims(&case).await.into_iter().find(|claim| claim.spec.address == pinned).unwrap().spec;
    assert_eq!((asked.phase, asked.home_node), (ClaimPhase::Requested, Some(case.unique("n2"))));
    assert_eq!(asked.block, Some(parts[1].to_string()));
    // An address of the own block is reserved on the node.
    let pinned = IpAddr::from(parts[2].hosts().nth(7).unwrap());
    let pin = json!({"sticky-ipam.io/ips": pinned.to_string()});
    let own = sandbox(&sticky_pod(&case, "own", &n3.name, pin).await);
    assert_eq!(n3.add(&own).await.unwrap(), pinned);
    let bound = claims(&case).await.into_iter().find(|claim| claim.spec.address == pinned).unwrap().spec;
    assert_eq!((bound.phase, bound.home_node), (ClaimPhase::Bound, Some(n3.name.clone())));
}

#[tokio::test]
async fn where_a_sticky_pool_is_nothing_but_blocks_of_nodes_the_nodes_own_is_used() {
    let case = case().await;
    let (n1, _n2) = two_nodes(&case).await;
    sticky_pool(&case, case.range().subnets(25).unwrap().next().unwrap()).await;
    let address = n1.add(&pod(&case, "db-0", &n1).await).await.unwrap();
    let claim = claims(&case).await.remove(0).spec;
    assert_eq!((claim.address, claim.home_node), (address, Some(n1.name.clone())));
    assert_in_step(&case, &[&n1]).await;
}

#[tokio::test]
async fn the_next_pod_elsewhere_waits_while_a_pod_of_a_deleted_stickyip_lives() {
    let case = case().await;
    case.install_cilium_kinds().await;
    let (n1, n2) = two_nodes(&case).await;
    let mut agent = Stepped::new(&case, &n1, "crd", &[]).await;
    agent.settle().await;
    let first = pod(&case, "db-0", &n1).await;
    let address = n1.add(&first).await.unwrap();
    // A person deletes it, and the pod by force: its sandbox lives on.
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    api.delete("db-0", &Default::default()).await.unwrap();
    let next = pod(&case, "db-0", &n2).await;
    let error = n2.add(&next).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains(&n1.name), "{error}");
    agent.settle().await;
    assert!(n2.add(&next).await.is_err(), "it lives");
    n1.del(&first).await;
    agent.settle().await;
    assert_eq!(n2.add(&next).await.unwrap(), address);
    assert_in_step(&case, &[&n2]).await;
    assert_in_one_pool(&cilium_nodes(&case).await);
}
