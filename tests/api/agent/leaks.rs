//! The agent releases what no DEL ended, on the second check and after a live read; what is in use stays.

use std::net::IpAddr;

use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use sticky_ipam::cluster::objects::{AddressClaim, StickyIP};

use crate::support::agent::Stepped;
use crate::support::agent::fill;
use crate::support::agent::{attached, case, parts};
use crate::support::node::{
    EndAt, Sandbox, TestNode, assert_in_step, claims, delete_pod, sandbox, stickies, sticky_pod,
};

#[tokio::test]
async fn a_sandbox_gone_without_a_del_is_released_on_the_second_check_without_its_pod() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let sticky = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    let plain = sandbox(&case.pod("web", &[], Some(&node.name)).await);
    let lives = sandbox(&case.pod("lives", &[], Some(&node.name)).await);
    for one in [&sticky, &plain, &lives] {
        node.add(one).await.unwrap();
    }
    node.end(&sticky);
    node.end(&plain);
    agent.step().await;
    agent.later();
    agent.step().await;
    assert_eq!(node.in_use().len(), 3, "the runtime may still come with a DEL for a pod that exists");
    delete_pod(&case, "db-0").await;
    delete_pod(&case, "web").await;
    agent.step().await;
    assert_eq!(node.in_use().len(), 3, "one check is no proof");
    agent.settle().await;
    assert_eq!(node.in_use().len(), 1);
    assert_eq!(attached(&case).await, None);
    assert!(node.pending_updates().is_empty());
    assert_in_step(&case, &[&node]).await;
    node.assert_nothing_reserved_without_claim(&case).await;
}

#[tokio::test]
async fn an_attachment_whose_add_crashed_half_way_is_released_once_its_pod_is_gone() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let first = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    // The fourth write is the attachment; the record does not follow.
    assert!(node.add_before(&first, EndAt::new(4, true)).await.is_none());
    assert_eq!(attached(&case).await, Some(first.container.clone()));
    agent.settle().await;
    assert_eq!(attached(&case).await, Some(first.container.clone()), "its pod exists and may come again");
    delete_pod(&case, "db-0").await;
    agent.step().await;
    assert_eq!(attached(&case).await, Some(first.container.clone()), "one check is no proof");
    agent.settle().await;
    assert_eq!(attached(&case).await, None);
    assert_in_step(&case, &[&node]).await;
}

#[tokio::test]
async fn a_reservation_without_a_claim_goes_and_one_with_a_claim_stays() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    // Reserved, and ended before the claim was created.
    let lost = sandbox(&sticky_pod(&case, "lost-0", &node.name, json!({})).await);
    assert!(node.add_before(&lost, EndAt::new(1, false)).await.is_none());
    let kept = sandbox(&sticky_pod(&case, "kept-0", &node.name, json!({})).await);
    let address = node.add(&kept).await.unwrap();
    node.del(&kept).await;
    delete_pod(&case, "lost-0").await;
    delete_pod(&case, "kept-0").await;
    agent.settle().await;
    let left: Vec<_> = node.store().address_files().unwrap().into_iter().map(|look| look.address).collect();
    assert_eq!(left, [address]);
    // Recycled: the StickyIP and its claim go, and with them the last record.
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    api.delete("kept-0", &Default::default()).await.unwrap();
    agent.settle().await;
    assert_eq!(node.store().address_files().unwrap().len(), 1, "its claim stands");
    let claims: Api<AddressClaim> = Api::all(case.client());
    claims.delete(&address.to_string(), &Default::default()).await.unwrap();
    agent.settle().await;
    assert!(node.store().address_files().unwrap().is_empty());
}

#[tokio::test]
async fn what_is_remembered_of_an_address_from_elsewhere_goes_with_its_pod() {
    let case = case().await;
    let [one, two, ..] = parts(&case);
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    let mut agent = Stepped::new(&case, &n2, "delegated", &[]).await;
    let home = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
    let address = n1.add(&home).await.unwrap();
    n1.del(&home).await;
    let away = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
    assert_eq!(n2.add(&away).await.unwrap(), address);
    n2.del(&away).await;
    agent.settle().await;
    assert_eq!(n2.store().address_files().unwrap().len(), 1, "for its pod's next sandbox");
    delete_pod(&case, "db-0").await;
    agent.settle().await;
    assert!(n2.store().address_files().unwrap().is_empty());
    assert_eq!(stickies(&case).await.len(), 1);
    assert_eq!(n1.store().address_files().unwrap().len(), 1, "its home keeps it");
}

#[tokio::test]
async fn a_live_pod_whose_attachment_was_taken_away_by_hand_is_attached_again() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let first = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    node.add(&first).await.unwrap();
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    let edit = json!({"status": {"attachment": null, "phase": "Retained"}});
    api.patch_status("db-0", &PatchParams::default(), &Patch::Merge(edit)).await.unwrap();
    agent.settle().await;
    assert_eq!(attached(&case).await, Some(first.container.clone()));
    assert_in_step(&case, &[&node]).await;
}

#[tokio::test]
async fn an_agent_that_restarts_changes_nothing_that_holds() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let prepared = sticky_pod(&case, "db-0", &node.name, json!({})).await;
    let lives = sandbox(&sticky_pod(&case, "db-1", &node.name, json!({})).await);
    agent.settle().await;
    node.add(&lives).await.unwrap();
    agent.settle().await;
    let state = async || {
        let versions: Vec<_> =
            stickies(&case).await.into_iter().map(|sticky| sticky.metadata.resource_version).collect();
        let claims: Vec<_> =
            claims(&case).await.into_iter().map(|claim| claim.metadata.resource_version).collect();
        let decisions = node.store().decisions().unwrap();
        (versions, claims, node.in_use(), decisions)
    };
    let before = state().await;
    assert_eq!(before.3.len(), 1);
    assert_eq!(Some(&before.3[0].uid), prepared.metadata.uid.as_ref());
    let mut again = agent.anew();
    again.settle().await;
    assert_eq!(state().await, before);
}

#[tokio::test]
async fn an_address_that_a_pod_has_left_for_its_pin_is_kept_as_long_as_it_is_claimed() {
    let case = case().await;
    let range = parts(&case)[0].subnets(29).unwrap().next().unwrap();
    let node = TestNode::ready(&case, "n1", range).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let first = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    let old = node.add(&first).await.unwrap();
    node.del(&first).await;
    // A person lets it have another one.
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    api.delete("db-0", &Default::default()).await.unwrap();
    let another = IpAddr::from(range.hosts().last().unwrap());
    let pin = json!({"sticky-ipam.io/ips": another.to_string()});
    let second = sandbox(&sticky_pod(&case, "db-0", &node.name, pin).await);
    assert_eq!(node.add(&second).await.unwrap(), another);
    assert!(claims(&case).await.iter().any(|claim| claim.spec.address == old), "it rests, or will");
    node.assert_claims_of_its_block_are_reserved(&case).await;
    // Lost from the store, it is recorded again, also while a sandbox here has its StickyIP with another
    // address.
    std::fs::remove_file(node.folder().join("net").join(old.to_string())).unwrap();
    agent.settle().await;
    let given = fill(&case, &node, "web").await;
    assert!(!given.is_empty() && !given.contains(&old), "{given:?}");
    // It may have it again.
    node.del(&second).await;
    api.delete("db-0", &Default::default()).await.unwrap();
    let pin = json!({"sticky-ipam.io/ips": old.to_string()});
    let third = sandbox(&sticky_pod(&case, "db-0", &node.name, pin).await);
    assert_eq!(node.add(&third).await.unwrap(), old);
    node.assert_claims_of_its_block_are_reserved(&case).await;
    assert!(fill(&case, &node, "more").await.is_empty());
    // Once it is not claimed any more, any pod may have it.
    let claims: Api<AddressClaim> = Api::all(case.client());
    claims.delete(&another.to_string(), &Default::default()).await.unwrap();
    agent.settle().await;
    assert_eq!(fill(&case, &node, "last").await, [another]);
    let mut found = node.store().verify().unwrap();
    found.retain(|finding| finding.wrong);
    assert!(found.is_empty(), "{found:?}");
}

#[tokio::test]
async fn the_address_of_ciliums_ingress_is_asked_of_no_api_server_and_is_no_leak() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let name = format!("cilium-ingress-{}", node.name);
    let namespace = "kube-system".to_owned();
    let ingress = Sandbox { pod: name.clone(), uid: String::new(), namespace, container: name };
    let address = node.add(&ingress).await.unwrap();
    // cilium-agent ends the namespace with the call.
    node.end(&ingress);
    agent.settle().await;
    agent.later();
    agent.settle().await;
    assert_eq!(node.in_use().len(), 1, "only its DEL ends it");
    assert_eq!(node.add(&ingress).await.unwrap(), address);
    assert!(stickies(&case).await.is_empty());
    node.del(&ingress).await;
    node.del(&ingress).await;
    assert!(node.in_use().is_empty() && node.pending_updates().is_empty());
}

#[tokio::test]
async fn plugin_and_agent_by_one_boot_id_file_keep_each_others_records() {
    let case = case().await;
    let mut node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let file = node.folder().join("boot-id");
    std::fs::write(&file, "a node in a container").unwrap();
    node.boots_by(file.clone());
    let flags = ["--boot-id-file", file.to_str().unwrap()];
    let mut agent = Stepped::new(&case, &node, "delegated", &flags).await;
    let sticky = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    let plain = sandbox(&case.pod("web", &[], Some(&node.name)).await);
    let (kept, given) = (node.add(&sticky).await.unwrap(), node.add(&plain).await.unwrap());
    let known = || -> Vec<IpAddr> {
        node.store().address_files().unwrap().into_iter().map(|found| found.address).collect()
    };
    for _ in 0..2 {
        agent.settle().await;
        assert!(known().contains(&given), "{given} would be given to another pod");
        let third = sandbox(&case.pod("third", &[], Some(&node.name)).await);
        let other = node.add(&third).await.unwrap();
        assert!(other != given && other != kept, "{other}");
        node.del(&third).await;
        delete_pod(&case, "third").await;
    }
    node.check(&sticky).await.unwrap();
    node.check(&plain).await.unwrap();
    assert_eq!(attached(&case).await, Some(sticky.container.clone()));
}
