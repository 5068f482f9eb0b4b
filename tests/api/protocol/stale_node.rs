//! What a node remembers, and what its CiliumNode shows, once the API server knows otherwise: it counts no
//! more.

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use sticky_ipam::cluster::objects::StickyIP;

use crate::support::agent::Stepped;
use crate::support::agent::{attached, case, cut_off, parts};
use crate::support::api_server::case::Case;
use crate::support::cilium::{cilium_nodes, owned};
use crate::support::node::{TestNode, assert_in_step, delete_pod, sandbox, stickies, sticky_pod};

async fn delete_sticky(case: &Case<'_>, name: &str) {
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    api.delete(name, &Default::default()).await.unwrap();
}

#[tokio::test]
async fn a_node_that_released_an_address_does_not_give_it_again_when_it_is_cut_off() {
    let case = case().await;
    let [one, two, ..] = parts(&case);
    let mut n1 = TestNode::ready(&case, "n1", one).await;
    let n2 = TestNode::ready(&case, "n2", two).await;
    let pod = sticky_pod(&case, "db-0", &n1.name, json!({})).await;
    let first = sandbox(&pod);
    let address = n1.add(&first).await.unwrap();
    // The sandbox is to be made anew; in between the node loses the API server.
    n1.del(&first).await;
    assert_eq!(attached(&case).await, None);
    let own = n1.kubeconfig();
    let proxy = cut_off(&case, &mut n1);
    // Nobody is attached, so the pod's successor on another node need not wait for anybody.
    delete_pod(&case, "db-0").await;
    let next = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
    assert_eq!(n2.add(&next).await.unwrap(), address);
    let error = n1.add(&sandbox(&pod)).await.unwrap_err();
    assert_eq!(error["code"], 11, "{address} lives on the other node: {error}");
    // The same where a note told of the end.
    n2.del(&next).await;
    delete_pod(&case, "db-0").await;
    n1.by_file(own);
    let mut agent = Stepped::new(&case, &n1, "delegated", &[]).await;
    let pod = sticky_pod(&case, "db-0", &n1.name, json!({})).await;
    let first = sandbox(&pod);
    assert_eq!(n1.add(&first).await.unwrap(), address);
    drop(proxy);
    let _proxy = cut_off(&case, &mut n1);
    n1.del(&first).await;
    delete_pod(&case, "db-0").await;
    agent.step().await;
    assert_eq!((attached(&case).await, n1.pending_updates().len()), (None, 0));
    let error = n1.add(&sandbox(&pod)).await.unwrap_err();
    assert_eq!(error["code"], 11, "{error}");
    assert_in_step(&case, &[&n1, &n2]).await;
}

#[tokio::test]
async fn a_repeated_del_writes_what_the_first_one_could_not() {
    let case = case().await;
    let mut node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let first = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    agent.step().await;
    node.add(&first).await.unwrap();
    let own = node.kubeconfig();
    let proxy = cut_off(&case, &mut node);
    node.del(&first).await;
    drop(proxy);
    assert_eq!(node.pending_updates().len(), 1);
    assert_eq!(attached(&case).await, Some(format!("prepared-{}", first.uid)));
    node.by_file(own);
    node.timeout("20s");
    // It does not find the attachment by its own container id.
    node.del(&first).await;
    assert_eq!((attached(&case).await, node.pending_updates().len()), (None, 0));
}

#[tokio::test]
async fn a_decision_whose_stickyip_was_deleted_by_hand_is_made_again() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let first = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    agent.step().await;
    assert_eq!(attached(&case).await, Some(format!("prepared-{}", first.uid)));
    delete_sticky(&case, "db-0").await;
    agent.settle().await;
    let bound = stickies(&case).await;
    assert_eq!(bound.len(), 1, "the decision rests on a StickyIP that is gone");
    assert_eq!(attached(&case).await, Some(format!("prepared-{}", first.uid)));
    assert_eq!(bound[0].spec.addresses, [node.add(&first).await.unwrap()]);
    assert_in_step(&case, &[&node]).await;
}

#[tokio::test]
async fn a_decision_for_a_pod_that_the_kubelet_turned_away_is_taken_back() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    sticky_pod(&case, "db-0", &node.name, json!({})).await;
    agent.step().await;
    assert!(attached(&case).await.is_some());
    let pods: Api<Pod> = Api::namespaced(case.client(), case.namespace());
    let failed = json!({"status": {"phase": "Failed", "reason": "OutOfcpu"}});
    pods.patch_status("db-0", &PatchParams::default(), &Patch::Merge(failed)).await.unwrap();
    agent.settle().await;
    assert_eq!((attached(&case).await, node.store().decisions().unwrap().len()), (None, 0));
}

#[tokio::test]
async fn the_entry_of_a_stickyip_deleted_by_hand_leaves_the_pool_after_its_pod() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", &["--ip-rate-num", "1"]).await;
    let owner = format!("{}/db-0", case.namespace());
    let first = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    let address = node.add(&first).await.unwrap();
    delete_sticky(&case, "db-0").await;
    agent.settle().await;
    let shown = [(node.name.clone(), address)];
    assert_eq!(owned(&cilium_nodes(&case).await, &owner), shown, "a live pod keeps its key");
    node.del(&first).await;
    delete_pod(&case, "db-0").await;
    agent.settle().await;
    // A pod of this name that is not sticky would be given what may be another's by then.
    assert_eq!(owned(&cilium_nodes(&case).await, &owner), []);
}

#[tokio::test]
async fn a_node_that_lost_its_store_keeps_claimed_addresses_from_others_again() {
    let case = case().await;
    let [one, two, ..] = parts(&case);
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    let mut agent = Stepped::new(&case, &n1, "delegated", &[]).await;
    let first = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
    let address = n1.add(&first).await.unwrap();
    n1.del(&first).await;
    delete_pod(&case, "db-0").await;
    let moved = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
    assert_eq!(n2.add(&moved).await.unwrap(), address);
    std::fs::remove_dir_all(n1.store().root()).unwrap();
    agent.settle().await;
    n1.assert_claims_of_its_block_are_reserved(&case).await;
    let plain = sandbox(&case.pod("web", &[], Some(&n1.name)).await);
    assert_ne!(n1.add(&plain).await.unwrap(), address, "it lives on the other node");
}
