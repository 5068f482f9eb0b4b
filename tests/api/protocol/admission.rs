//! What a node's token may write under the shipped roles and the shipped admission policies.

use std::time::Duration;

use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::StickyIP;
use sticky_ipam::cluster::objects::cilium::CiliumNode;

use crate::support::agent::Stepped;
use crate::support::agent::{case, parts};
use crate::support::api_server::access::Access;
use crate::support::api_server::case::Case;
use crate::support::api_server::comes_true;
use crate::support::cilium::{cilium_nodes, owned};
use crate::support::node::{TestNode, assert_in_step, sandbox, stickies, sticky_pod};

/// The server's own watch of its policies needs a moment.
const SOON: Duration = Duration::from_secs(30);
const ACCOUNTS: [&str; 2] = ["sticky-ipam-agent", "sticky-ipam-node"];

/// A token of one of the shipped accounts, bound to a node.
async fn token(case: &Case<'_>, account: &str, node: &TestNode) -> Access {
    case.token(account, Some(case.bound_to(&node.name).await)).await
}

/// Has an identity change a CiliumNode; the server's words if it may not.
async fn write_node(access: &Access, name: &str) -> Result<(), String> {
    let nodes: Api<CiliumNode> = Api::all(access.client().await);
    let patch = json!({"metadata": {"annotations": {"test": "was-here"}}});
    match nodes.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 403 => Err(status.message),
        Err(other) => panic!("{other}"),
    }
}

fn verdict(written: kube::Result<StickyIP>) -> Result<(), String> {
    match written {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 403 => Err(status.message),
        Err(other) => panic!("{other}"),
    }
}

async fn patch_attachment(access: &Access, case: &Case<'_>, attachment: &Value) -> Result<(), String> {
    let stickies: Api<StickyIP> = Api::namespaced(access.client().await, case.namespace());
    let patch = json!({"status": {"attachment": attachment}});
    verdict(stickies.patch_status("db-0", &PatchParams::default(), &Patch::Merge(patch)).await)
}

/// Has an identity write an attachment, by an update of the status and by a patch; the server's words if it
/// may not.
async fn write_attachment(access: &Access, case: &Case<'_>, attachment: &Value) -> Result<(), String> {
    let stickies: Api<StickyIP> = Api::namespaced(access.client().await, case.namespace());
    let mut object = stickies.get("db-0").await.unwrap();
    object.status.as_mut().unwrap().attachment = serde_json::from_value(attachment.clone()).unwrap();
    let updated = verdict(stickies.replace_status("db-0", &PostParams::default(), &object).await);
    let patched = patch_attachment(access, case, attachment).await;
    assert_eq!(updated.is_ok(), patched.is_ok(), "{updated:?}, {patched:?}");
    patched
}

/// Two nodes with the shipped accounts in use, once the policies are in force.
async fn stage(case: &Case<'_>) -> (TestNode, TestNode) {
    let [one, two, ..] = parts(case);
    let mut n1 = TestNode::ready_crd(case, "n1", one).await;
    let mut n2 = TestNode::ready_crd(case, "n2", two).await;
    case.shipped_roles().await;
    case.shipped("admission.yaml").await;
    n1.by(&token(case, "sticky-ipam-node", &n1).await);
    n2.by(&token(case, "sticky-ipam-node", &n2).await);
    let probe = token(case, "sticky-ipam-node", &n1).await;
    let in_force = comes_true(SOON, || async { write_node(&probe, &n2.name).await.is_err() });
    assert!(in_force.await, "the policy does not come into force");
    (n1, n2)
}

#[tokio::test]
async fn a_nodes_token_writes_its_own_cilium_node_and_no_other() {
    let case = case().await;
    let (n1, n2) = stage(&case).await;
    for account in ACCOUNTS {
        let own = token(&case, account, &n1).await;
        write_node(&own, &n1.name).await.unwrap();
        let why = write_node(&own, &n2.name).await.unwrap_err();
        let told = format!("CiliumNode {} is not of node \"{}\"", n2.name, n1.name);
        assert!(why.contains(&told) && why.contains("only its own CiliumNode"), "{why}");
        // A token that names no node is of none.
        let unbound = case.token(account, None).await;
        let why = write_node(&unbound, &n1.name).await.unwrap_err();
        assert!(why.contains("is not of node \"\""), "{why}");
    }
    write_node(&case.admin(), &n2.name).await.unwrap();
}

#[tokio::test]
async fn a_nodes_token_attaches_to_its_own_node_and_ends_no_others_attachment() {
    let case = case().await;
    let (n1, n2) = stage(&case).await;
    let pod = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
    n1.add(&pod).await.unwrap();
    let as_it_stands = || async {
        let status = stickies(&case).await.remove(0).status.unwrap();
        serde_json::to_value(status.attachment).unwrap()
    };
    let attached = as_it_stands().await;
    let thief = token(&case, "sticky-ipam-node", &n2).await;
    // This policy may come into force later than the other.
    let changed = || {
        let mut other = attached.clone();
        other["attachmentId"] = "another".into();
        other
    };
    let in_force = comes_true(SOON, || async { patch_attachment(&thief, &case, &changed()).await.is_err() });
    assert!(in_force.await, "the policy does not come into force");
    let why = write_attachment(&thief, &case, &Value::Null).await.unwrap_err();
    let told = format!("may not go from node \"{}\" to \"\"", n1.name);
    assert!(why.contains(&told) && why.contains("ends its own attachments"), "{why}");
    let why = write_attachment(&case.token("sticky-ipam-agent", None).await, &case, &attached).await;
    why.unwrap_err();
    // What each may do.
    let mut taken_over = attached.clone();
    taken_over["node"] = n2.name.clone().into();
    write_attachment(&thief, &case, &taken_over).await.unwrap();
    write_attachment(&thief, &case, &Value::Null).await.unwrap();
    assert_eq!(as_it_stands().await, Value::Null);
}

#[tokio::test]
async fn pods_are_added_moved_and_ended_under_the_shipped_roles_and_policies() {
    let case = case().await;
    let (n1, n2) = stage(&case).await;
    let mut agents = Vec::new();
    for node in [&n1, &n2] {
        let access = token(&case, "sticky-ipam-agent", node).await;
        let few = ["--ip-rate-num", "3", "--max-allocated-ip", "8"];
        agents.push(Stepped::by(&access, node, "crd", &few).await);
    }
    let mut address = None;
    for (number, node) in [(0, &n1), (1, &n2), (0, &n1)] {
        for prepared in [true, false] {
            let pod = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
            if prepared {
                agents[number].settle().await;
                assert!(node.store().has_decision(&pod.uid));
            }
            let given = node.add(&pod).await.unwrap();
            assert_eq!(*address.get_or_insert(given), given);
            let owner = format!("{}/db-0", case.namespace());
            assert_eq!(owned(&cilium_nodes(&case).await, &owner), [(node.name.clone(), given)]);
            agents[number].settle().await;
            assert_in_step(&case, &[&n1, &n2]).await;
            node.del(&pod).await;
            assert_eq!(node.pending_updates(), [], "it was told at once");
            assert_eq!(owned(&cilium_nodes(&case).await, &owner), []);
        }
    }
}
