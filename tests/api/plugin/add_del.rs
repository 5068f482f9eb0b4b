//! ADD and DEL of sticky pods on a real API server: the plain way, races, faults and lies.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::Ipv4Net;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::StickyIP;
use sticky_ipam::cluster::writer::apply::{SentWrite, WriteObserver};
use sticky_ipam::store::PendingUpdateKind;

use crate::support::api_server::case::Case;
use crate::support::api_server::proxy::Proxy;
use crate::support::api_server::{ApiServer, Weather};
use crate::support::node::{
    TestNode, assert_in_step, claims, delete_pod, sandbox, set_ready, stickies, sticky_pod, sticky_pool,
};
use crate::support::repair::mend;
use crate::support::workloads::{deployed, deployed_by, launched};

async fn case() -> Case<'static> {
    let server = ApiServer::shared().await;
    server.install_our_kinds().await;
    server.case().await
}

/// Pools are seen by every test of a server: a test whose pods must not find one takes its own server.
async fn parts(case: &Case<'_>) -> [Ipv4Net; 4] {
    let quarters: Vec<Ipv4Net> = case.range().subnets(26).unwrap().collect();
    quarters.try_into().unwrap()
}

/// How often two nodes race. Rare interleavings want many rounds; the races run beside the other tests.
const RACES: usize = 200;

/// Lists every object only now and then: what a race leaves behind stays to be seen.
fn is_time_to_look(round: usize) -> bool {
    round % 8 == 7 || round + 1 == RACES
}

/// Networks of the case's own that are large enough for an address a race.
fn wide(case: &Case<'_>, number: u8) -> Ipv4Net {
    let [ten, high, low, _] = case.range().network().octets();
    Ipv4Net::new([ten, high + number, low, 0].into(), 24).unwrap()
}

fn code(error: &Value) -> u64 {
    error["code"].as_u64().unwrap()
}

fn message(error: &Value) -> &str {
    error["msg"].as_str().unwrap()
}

#[tokio::test]
async fn a_sticky_pod_keeps_its_address_over_restarts_and_nodes() {
    let case = case().await;
    let [one, two, ..] = parts(&case).await;
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    let first = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
    let address = n1.add(&first).await.unwrap();
    assert_eq!(n1.add(&first).await.unwrap(), address, "the same again");
    n1.check(&first).await.unwrap();
    n1.del(&first).await;
    for node in [&n1, &n2, &n2, &n1] {
        let again = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
        assert_eq!(node.add(&again).await.unwrap(), address);
        assert_in_step(&case, &[&n1, &n2]).await;
        node.del(&again).await;
    }
    let sticky = stickies(&case).await.remove(0);
    let status = sticky.status.unwrap();
    assert!(status.attachment.is_none() && status.handovers.len() == 3, "{status:?}");
    assert!(n1.pending_updates().is_empty() && n2.pending_updates().is_empty());
    let claims = claims(&case).await;
    assert!(
        claims.len() == 1 && claims[0].metadata.managed_fields.is_none(),
        "nobody asks who wrote which field"
    );
}

#[tokio::test]
async fn an_attachment_changes_the_status_alone_and_keeps_manual_edits() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case).await[0]).await;
    let first = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    node.add(&first).await.unwrap();
    node.del(&first).await;
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    let word = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP",
                      "metadata": {"name": "db-0", "labels": {"team": "blue"}},
                      "spec": {"retention": {"keep": "Forever"}}});
    api.patch("db-0", &PatchParams::apply("person").force(), &Patch::Apply(word)).await.unwrap();
    let status = json!({"status": {"mac": "02:00:00:00:00:01"}});
    let before = api.patch_status("db-0", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    node.add(&sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await)).await.unwrap();
    let after = api.get("db-0").await.unwrap();
    assert_eq!((&after.spec, &after.metadata.labels), (&before.spec, &before.metadata.labels));
    assert_eq!(after.status.as_ref().unwrap().mac.as_deref(), Some("02:00:00:00:00:01"));
    let of_person = |object: &StickyIP| {
        let mut owners = object.metadata.managed_fields.clone().unwrap().into_iter();
        owners.find(|owner| owner.manager.as_deref() == Some("person")).and_then(|owner| owner.fields_v1)
    };
    assert!(of_person(&before).is_some());
    assert_eq!(of_person(&after), of_person(&before));
}

#[tokio::test]
async fn every_question_of_a_verb_goes_over_one_connection() {
    let case = case().await;
    let mut node = TestNode::ready(&case, "n1", parts(&case).await[0]).await;
    let proxy = case.proxy();
    let access = case.agent(&node.name).await.through(&proxy);
    node.by(&access);
    for round in 1..=2 {
        let pod = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
        let before = proxy.connections();
        node.add(&pod).await.unwrap();
        assert_eq!(proxy.connections() - before, 1, "ADD, round {round}");
        node.del(&pod).await;
        assert_eq!(proxy.connections() - before, 2, "DEL, round {round}");
    }
}

#[tokio::test]
async fn a_pod_that_is_not_sticky_has_no_objects_and_keeps_nothing() {
    let case = case().await;
    let [one, ..] = parts(&case).await;
    let node = TestNode::ready(&case, "n1", one).await;
    let plain = sandbox(&case.pod("web", &[], Some(&node.name)).await);
    let address = node.add(&plain).await.unwrap();
    assert!(one.contains(&match address {
        IpAddr::V4(v4) => v4,
        IpAddr::V6(_) => panic!("{address}"),
    }));
    node.del(&plain).await;
    assert!(stickies(&case).await.is_empty() && claims(&case).await.is_empty());
    assert!(node.in_use().is_empty());
}

#[tokio::test]
async fn an_address_of_the_nodes_own_block_is_not_given_to_others_while_its_pod_is_away() {
    let case = case().await;
    let (one, two) = ("10.255.0.0/29".parse().unwrap(), parts(&case).await[1]);
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    let first = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
    let address = n1.add(&first).await.unwrap();
    n1.del(&first).await;
    let away = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
    assert_eq!(n2.add(&away).await.unwrap(), address);
    let mut given = vec![];
    for number in 0..8 {
        let plain = sandbox(&case.pod(&format!("web-{number}"), &[], Some(&n1.name)).await);
        match n1.add(&plain).await {
            Ok(address) => given.push(address),
            Err(error) => assert_eq!(code(&error), 100, "{error}"),
        }
    }
    assert!(!given.is_empty() && !given.contains(&address), "{given:?} has {address}");
    assert_in_step(&case, &[&n1, &n2]).await;
}

#[tokio::test]
async fn two_nodes_race_for_one_claimant_and_one_wins() {
    let case = case().await;
    let (one, two) = (wide(&case, 64), wide(&case, 65));
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    for round in 0..RACES {
        // Two pods of one virtual machine, as in a live migration.
        let machine = format!("vm-{round}");
        let a = sandbox(&launched(&case, &format!("{machine}-a"), &machine, &n1.name).await);
        let b = sandbox(&launched(&case, &format!("{machine}-b"), &machine, &n2.name).await);
        let outcome = tokio::join!(n1.add(&a), n2.add(&b));
        let (address, lost, winner) = match outcome {
            (Ok(address), Err(error)) => (address, error, &a),
            (Err(error), Ok(address)) => (address, error, &b),
            other => panic!("{other:?}"),
        };
        assert_eq!(code(&lost), 11, "{lost}");
        let used: Vec<_> = [n1.in_use(), n2.in_use()].concat();
        assert_eq!(used, [(address, winner.container.clone())]);
        if is_time_to_look(round) {
            assert_in_step(&case, &[&n1, &n2]).await;
        }
        n1.del(&a).await;
        n2.del(&b).await;
        if is_time_to_look(round) {
            for node in [&n1, &n2] {
                node.assert_nothing_reserved_without_claim(&case).await;
                node.assert_claims_of_its_block_are_reserved(&case).await;
            }
        }
    }
}

#[tokio::test]
async fn two_nodes_race_for_one_address_and_one_wins() {
    let case = case().await;
    let [one, two, ..] = parts(&case).await;
    let pool = wide(&case, 66);
    sticky_pool(&case, pool).await;
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    let mut addresses = pool.hosts();
    for round in 0..RACES {
        let pin = json!({"sticky-ipam.io/ips": addresses.next().unwrap().to_string()});
        let (a, b) = (format!("a{round}"), format!("b{round}"));
        let a = sandbox(&sticky_pod(&case, &a, &n1.name, pin.clone()).await);
        let b = sandbox(&sticky_pod(&case, &b, &n2.name, pin).await);
        let outcome = tokio::join!(n1.add(&a), n2.add(&b));
        let (lost, winner) = match outcome {
            (Ok(_), Err(error)) => (error, &a.pod),
            (Err(error), Ok(_)) => (error, &b.pod),
            other => panic!("{other:?}"),
        };
        assert_eq!(code(&lost), 101, "{lost}");
        assert!(message(&lost).contains(&format!("{}/{winner}", case.namespace())), "{lost}");
        n1.del(&a).await;
        n2.del(&b).await;
        if is_time_to_look(round) {
            assert_in_step(&case, &[&n1, &n2]).await;
        }
    }
}

#[tokio::test]
async fn two_nodes_race_for_one_slot_and_the_loser_takes_the_next() {
    let case = case().await;
    let [one, two, ..] = parts(&case).await;
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    for round in 0..RACES {
        // The first race of a Deployment makes its slots, the others attach to them.
        let deployment = format!("web{}", round / 8);
        let (a, b) = (format!("{deployment}-1-a{round}"), format!("{deployment}-1-b{round}"));
        let a = sandbox(&deployed_by(&case, &a, &deployment, &n1.name).await);
        let b = sandbox(&deployed_by(&case, &b, &deployment, &n2.name).await);
        let (first, second) = tokio::join!(n1.add(&a), n2.add(&b));
        let (first, second) = (first.unwrap(), second.unwrap());
        assert_ne!(first, second);
        let mut slots: Vec<(String, String)> = stickies(&case)
            .await
            .into_iter()
            .filter_map(|sticky| {
                let attachment = sticky.status?.attachment?;
                Some((sticky.metadata.name?, attachment.attachment_id.to_string()))
            })
            .collect();
        slots.sort();
        assert_eq!(slots.len(), 2, "{slots:?}");
        assert_eq!((&*slots[0].0, &*slots[1].0), (&*format!("{deployment}-0"), &*format!("{deployment}-1")));
        let mut containers = [&slots[0].1, &slots[1].1];
        containers.sort();
        let mut expected = [&a.container, &b.container];
        expected.sort();
        assert_eq!(containers, expected);
        if is_time_to_look(round) {
            assert_in_step(&case, &[&n1, &n2]).await;
        }
        for (node, sandbox) in [(&n1, &a), (&n2, &b)] {
            node.del(sandbox).await;
            delete_pod(&case, &sandbox.pod).await;
        }
        if is_time_to_look(round) {
            for node in [&n1, &n2] {
                node.assert_nothing_reserved_without_claim(&case).await;
                node.assert_claims_of_its_block_are_reserved(&case).await;
            }
        }
    }
}

#[tokio::test]
async fn a_stolen_pin_is_refused_with_the_claimants_name_and_so_is_one_outside_every_pool() {
    let case = case().await;
    let [one, _, pool, _] = parts(&case).await;
    sticky_pool(&case, pool).await;
    let node = TestNode::ready(&case, "n1", one).await;
    for pinned in [pool.hosts().nth(5).unwrap(), one.hosts().nth(5).unwrap()] {
        let pin = json!({"sticky-ipam.io/ips": pinned.to_string()});
        let name = format!("owner-{}", pinned.octets()[3]);
        let owner = sandbox(&sticky_pod(&case, &name, &node.name, pin.clone()).await);
        assert_eq!(node.add(&owner).await.unwrap(), IpAddr::from(pinned));
        node.del(&owner).await;
        let thief = sandbox(&sticky_pod(&case, "thief", &node.name, pin).await);
        let error = node.add(&thief).await.unwrap_err();
        assert_eq!(code(&error), 101, "{error}");
        assert!(message(&error).contains(&format!("{}/{name}", case.namespace())), "{error}");
    }
    let nowhere = json!({"sticky-ipam.io/ips": "192.0.2.1"});
    let lost = sandbox(&sticky_pod(&case, "lost", &node.name, nowhere).await);
    let error = node.add(&lost).await.unwrap_err();
    assert!(code(&error) == 101 && message(&error).contains("no IPPool"), "{error}");
    let malformed =
        sandbox(&sticky_pod(&case, "bad", &node.name, json!({"sticky-ipam.io/ips": "ten"})).await);
    let error = node.add(&malformed).await.unwrap_err();
    assert!(code(&error) == 101 && message(&error).contains("ten"), "{error}");
    assert_in_step(&case, &[&node]).await;
}

#[tokio::test]
async fn forged_and_unknown_pods_are_refused_and_nothing_is_claimed() {
    let case = case().await;
    let [one, two, ..] = parts(&case).await;
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    let real = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
    // Another node's pod.
    let error = n2.add(&real).await.unwrap_err();
    assert!(code(&error) == 4 && message(&error).contains(&n1.name), "{error}");
    // A pod that does not exist.
    let mut forged = real.clone();
    forged.pod = "db-9".into();
    let error = n1.add(&forged).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains("db-9"), "{error}");
    // A pod of another uid.
    let mut older = real.clone();
    older.uid = "11111111-1111-1111-1111-111111111111".into();
    let error = n1.add(&older).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains(&older.uid), "{error}");
    assert!(stickies(&case).await.is_empty() && claims(&case).await.is_empty());
    assert!(n1.in_use().is_empty() && n2.in_use().is_empty());
}

#[tokio::test]
async fn a_late_del_of_an_old_container_frees_nothing() {
    let case = case().await;
    let [one, two, ..] = parts(&case).await;
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    let old = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
    let address = n1.add(&old).await.unwrap();
    n1.del(&old).await;
    let new = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
    assert_eq!(n2.add(&new).await.unwrap(), address);
    n1.del(&old).await;
    n2.del(&old).await;
    let attachment = stickies(&case).await.remove(0).status.unwrap().attachment.unwrap();
    assert_eq!(attachment.attachment_id.to_string(), new.container);
    assert_eq!(n2.in_use(), [(address, new.container.clone())]);
    n2.check(&new).await.unwrap();
    assert_eq!(code(&n1.check(&old).await.unwrap_err()), 3);
}

#[tokio::test]
async fn a_pod_waits_for_the_old_node_and_takes_over_only_with_proof() {
    let case = case().await;
    let [one, two, ..] = parts(&case).await;
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    let old = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
    let address = n1.add(&old).await.unwrap();
    // Forcibly deleted: the object is gone, the process may run.
    let new = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
    let error = n2.add(&new).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains(&n1.name), "{error}");
    set_ready(&case, &n1.name, false).await;
    let error = n2.add(&new).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains("NotReady"), "{error}");
    let nodes: Api<Node> = Api::all(case.client());
    let taint =
        json!({"spec": {"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]}});
    nodes.patch(&n1.name, &PatchParams::default(), &Patch::Merge(taint)).await.unwrap();
    assert_eq!(n2.add(&new).await.unwrap(), address);
    let status = stickies(&case).await.remove(0).status.unwrap();
    assert!(status.handovers[0].reason.contains("out-of-service"), "{status:?}");
}

#[tokio::test]
async fn a_waiting_pod_goes_on_as_soon_as_the_old_one_is_detached() {
    let case = case().await;
    let [one, two, ..] = parts(&case).await;
    let (n1, mut n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    n2.patience("60s");
    let old = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
    let address = n1.add(&old).await.unwrap();
    let new = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
    let (added, ()) = tokio::join!(n2.add(&new), async {
        tokio::task::yield_now().await;
        n1.del(&old).await;
    });
    assert_eq!(added.unwrap(), address);
    assert_in_step(&case, &[&n1, &n2]).await;
}

#[tokio::test]
async fn on_one_node_a_new_pod_waits_for_the_old_ones_sandbox() {
    let case = case().await;
    let [one, ..] = parts(&case).await;
    let node = TestNode::ready(&case, "n1", one).await;
    let old = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    let address = node.add(&old).await.unwrap();
    let new = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    let error = node.add(&new).await.unwrap_err();
    assert_eq!(code(&error), 11, "{error}");
    node.del(&new).await;
    assert_eq!(node.in_use(), [(address, old.container.clone())]);
    node.del(&old).await;
    assert_eq!(node.add(&new).await.unwrap(), address);
    assert_in_step(&case, &[&node]).await;
}

#[tokio::test]
async fn with_the_server_away_a_pod_restarts_with_its_address_and_others_fail_or_get_any() {
    let case = case().await;
    let [one, ..] = parts(&case).await;
    let proxy = case.proxy();
    let mut node = TestNode::ready(&case, "n1", one).await;
    let access = case.admin().through(&proxy);
    node.by(&access);
    node.seed(&case).await;
    let pod = sticky_pod(&case, "db-0", &node.name, json!({})).await;
    let first = sandbox(&pod);
    let address = node.add(&first).await.unwrap();
    for weather in [Weather::Reset, Weather::Blackhole] {
        node.timeout(if weather == Weather::Blackhole { "300ms" } else { "20s" });
        proxy.set(weather);
        node.del(&first).await;
        let pending_updates = node.pending_updates();
        assert!(
            pending_updates.iter().any(|note| note.kind == PendingUpdateKind::Ended
                && note.container == first.container
                && note.name.as_deref() == Some("db-0")),
            "{pending_updates:?}"
        );
        // The same pod, a new sandbox.
        let again = sandbox(&pod);
        assert_eq!(node.add(&again).await.unwrap(), address);
        assert!(
            node.pending_updates()
                .iter()
                .any(|note| note.kind == PendingUpdateKind::Attached && note.container == again.container)
        );
        node.del(&again).await;
        // A pod of which this node knows nothing.
        let mut stranger = sandbox(&pod);
        stranger.uid = "22222222-2222-2222-2222-222222222222".into();
        let error = node.add(&stranger).await.unwrap_err();
        assert!(code(&error) == 11 && message(&error).contains("API server"), "{error}");
        node.on_unavailable("allocate");
        let other = node.add(&stranger).await.unwrap();
        assert_ne!(other, address);
        node.del(&stranger).await;
        node.on_unavailable("fail");
        proxy.heal();
        node.timeout("20s");
        assert_eq!(node.add(&first).await.unwrap(), address);
    }
    node.del(&first).await;
    assert_in_step(&case, &[&node]).await;
}

#[tokio::test]
async fn a_check_fails_if_the_api_server_says_that_none_or_another_is_attached() {
    let case = case().await;
    let [one, ..] = parts(&case).await;
    let node = TestNode::ready(&case, "n1", one).await;
    let first = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    node.add(&first).await.unwrap();
    node.check(&first).await.unwrap();
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    let other = json!({"node": "elsewhere", "podName": "db-0", "podUid": "u", "attachmentId": "another", "since": "2026-01-01T00:00:00Z"});
    for (attachment, said) in [(other, "another"), (Value::Null, "no container")] {
        let patch = Patch::Merge(json!({"status": {"attachment": attachment}}));
        api.patch_status("db-0", &PatchParams::default(), &patch).await.unwrap();
        let error = node.check(&first).await.unwrap_err();
        assert!(code(&error) == 103 && message(&error).contains(said), "{error}");
    }
}

#[tokio::test]
async fn a_late_del_after_an_outage_takes_nothing_from_the_sandbox_that_took_its_place() {
    let case = case().await;
    let [one, ..] = parts(&case).await;
    let proxy = case.proxy();
    let mut node = TestNode::ready(&case, "n1", one).await;
    node.by(&case.admin().through(&proxy));
    let pod = sticky_pod(&case, "db-0", &node.name, json!({})).await;
    let (first, again) = (sandbox(&pod), sandbox(&pod));
    let address = node.add(&first).await.unwrap();
    proxy.set(Weather::Reset);
    node.del(&first).await;
    assert_eq!(node.add(&again).await.unwrap(), address);
    proxy.heal();
    // The runtime repeats itself, and the API server knows the attachment by the first one's name still.
    node.del(&first).await;
    let attachment = stickies(&case).await.remove(0).status.unwrap().attachment;
    assert!(attachment.is_some_and(|attachment| attachment.attachment_id.to_string() == first.container));
    assert_eq!(node.in_use(), [(address, again.container.clone())]);
    node.del(&again).await;
    assert!(stickies(&case).await.remove(0).status.unwrap().attachment.is_none());
}

#[tokio::test]
async fn what_a_node_keeps_for_a_stickyip_that_is_no_more_does_not_bar_the_next_one() {
    let case = case().await;
    let [one, pool, ..] = parts(&case).await;
    sticky_pool(&case, pool).await;
    let node = TestNode::ready(&case, "n1", one).await;
    let address = pool.hosts().nth(9).unwrap();
    for name in ["old-0", "new-0"] {
        let pin = json!({"sticky-ipam.io/ips": address.to_string()});
        let first = sandbox(&sticky_pod(&case, name, &node.name, pin).await);
        assert_eq!(node.add(&first).await.unwrap(), IpAddr::from(address));
        assert_eq!(node.in_use(), [(IpAddr::from(address), first.container.clone())]);
        node.del(&first).await;
        delete_pod(&case, name).await;
        let objects: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
        objects.delete(name, &Default::default()).await.unwrap();
        mend(&case).await;
        assert!(claims(&case).await.is_empty());
    }
}

#[tokio::test]
async fn a_slow_server_and_one_whose_answers_are_lost_leave_no_doubt_in_the_end() {
    let case = case().await;
    let [one, ..] = parts(&case).await;
    let proxy = Arc::new(case.proxy());
    let mut node = TestNode::ready(&case, "n1", one).await;
    node.by(&case.admin().through(&proxy));
    let pod = sticky_pod(&case, "db-0", &node.name, json!({})).await;
    proxy.set(Weather::Slow(Duration::from_millis(20)));
    let first = sandbox(&pod);
    let address = node.add(&first).await.unwrap();
    node.del(&first).await;
    proxy.heal();
    // A connection that breaks at some write: the plugin looks again.
    let breaker = Arc::new(Breaker(Arc::clone(&proxy)));
    let second = sandbox(&pod);
    assert_eq!(node.add_before(&second, breaker.clone()).await.unwrap().unwrap(), address);
    node.del_before(&second, breaker).await.unwrap();
    let status = stickies(&case).await.remove(0).status.unwrap();
    assert!(status.attachment.is_none(), "{status:?}");
    assert_in_step(&case, &[&node]).await;
}

#[tokio::test]
async fn credentials_that_are_missing_expired_or_too_weak_are_named() {
    let case = case().await;
    let [one, ..] = parts(&case).await;
    let mut node = TestNode::ready(&case, "n1", one).await;
    let pod = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    node.by_file("/nonexistent/kubeconfig".into());
    let error = node.add(&pod).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains("/nonexistent/kubeconfig"), "{error}");
    let error = node.status(&pod).await.unwrap_err();
    assert_eq!(code(&error), 50, "{error}");
    node.by(&case.nobody());
    let error = node.add(&pod).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains("do not allow to get"), "{error}");
    node.by(&case.forged_token());
    let error = node.add(&pod).await.unwrap_err();
    assert!(code(&error) == 11 && message(&error).contains("does not accept the credentials"), "{error}");
    assert!(stickies(&case).await.is_empty() && claims(&case).await.is_empty());
}

#[tokio::test]
async fn pods_of_a_deployment_take_slots_that_are_free() {
    let case = case().await;
    let [one, two, ..] = parts(&case).await;
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    let (a, b) = (deployed(&case, "web-1-a", &n1.name).await, deployed(&case, "web-1-b", &n2.name).await);
    let (a, b) = (sandbox(&a), sandbox(&b));
    let (first, second) = tokio::join!(n1.add(&a), n2.add(&b));
    let (first, second) = (first.unwrap(), second.unwrap());
    assert_ne!(first, second);
    let mut names: Vec<String> =
        stickies(&case).await.into_iter().filter_map(|sticky| sticky.metadata.name).collect();
    names.sort();
    assert_eq!(names, ["web-0", "web-1"]);
    n1.del(&a).await;
    delete_pod(&case, &a.pod).await;
    let c = sandbox(&deployed(&case, "web-1-c", &n2.name).await);
    assert_eq!(n2.add(&c).await.unwrap(), first);
    assert_in_step(&case, &[&n1, &n2]).await;
}

/// Loses the answer to every write.
struct Breaker(Arc<Proxy>);

impl WriteObserver for Breaker {
    fn before(&self, _: usize, _: SentWrite<'_>) {
        self.0.set(Weather::AnswersLost);
    }
    fn after(&self, _: usize, _: SentWrite<'_>) {
        self.0.heal();
    }
}
