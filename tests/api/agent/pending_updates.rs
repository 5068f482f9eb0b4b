//! Pending updates of an older sandbox that are sent late, while the pod's next one starts.

use std::time::Duration;

use serde_json::json;
use sticky_ipam::names::{Attachment, AttachmentId, ContainerId, IfName};
use sticky_ipam::store::{ClaimantKey, PendingUpdate, PendingUpdateKind};

use crate::support::agent::Stepped;
use crate::support::agent::{attached, case, cut_off, parts};
use crate::support::node::{Sandbox, TestNode, assert_in_step, sandbox, sticky_pod};

fn interface() -> IfName {
    IfName::new("eth0").unwrap()
}

fn attachment(sandbox: &Sandbox) -> Attachment {
    Attachment { container: ContainerId::new(&sandbox.container).unwrap(), interface: interface() }
}

/// The pending update of a DEL that could not reach the API server: an older sandbox of the pod, which was
/// prepared, has ended.
fn put_pending_update(node: &TestNode, old: &Sandbox) {
    let store = node.store();
    let update = PendingUpdate {
        kind: PendingUpdateKind::Ended,
        container: old.container.clone(),
        interface: "eth0".into(),
        namespace: Some(old.namespace.clone()),
        name: Some(old.pod.clone()),
        attachment_id: Some(AttachmentId::Prepared(old.uid.clone())),
        uid: Some(old.uid.clone()),
        at: store.now().clone(),
    };
    store.lock().unwrap().put_pending_update(&attachment(old), &update).unwrap();
}

#[tokio::test]
async fn a_pending_update_of_an_older_sandbox_leaves_the_next_ones_decision_alone() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let pod = sticky_pod(&case, "db-0", &node.name, json!({})).await;
    let (old, new) = (sandbox(&pod), sandbox(&pod));
    agent.step().await;
    let prepared = Some(format!("prepared-{}", old.uid));
    assert_eq!(attached(&case).await, prepared);
    put_pending_update(&node, &old);
    // One step: after more of them it would be prepared again.
    agent.step().await;
    assert_eq!(attached(&case).await, prepared, "the next sandbox's attachment was taken for the old one's");
    assert!(node.pending_updates().is_empty());
    // The same from the runtime, which repeats its DELs.
    put_pending_update(&node, &old);
    node.del(&old).await;
    assert_eq!(attached(&case).await, prepared, "a late DEL took it");
    node.add(&new).await.unwrap();
    agent.settle().await;
    assert_eq!(attached(&case).await, prepared);
    assert_in_step(&case, &[&node]).await;
    node.del(&new).await;
    assert_eq!(attached(&case).await, None);
}

/// The API server comes back while an ADD has given it up: the agent has seen that no sandbox runs and is
/// about to detach.
#[tokio::test]
async fn an_add_without_the_api_server_waits_for_the_release_of_its_pods_older_sandbox() {
    let case = case().await;
    let mut node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let pod = sticky_pod(&case, "db-0", &node.name, json!({})).await;
    let (old, new) = (sandbox(&pod), sandbox(&pod));
    let address = node.add(&old).await.unwrap();
    let proxy = cut_off(&case, &mut node);
    node.del(&old).await;
    let claimant = ClaimantKey::new(case.namespace(), "db-0", &interface());
    let store = node.store();
    let pool_lock = store.pool_lock(&claimant, Duration::from_secs(5)).unwrap();
    let detaching = async {
        // As long as the detach runs, no sandbox starts with what the node has recorded.
        let mut checks = 0;
        while checks < 20 {
            tokio::time::sleep(Duration::from_millis(25)).await;
            checks += usize::from(node.is_adding(&new));
            assert!(node.in_use().is_empty(), "{:?}", node.in_use());
        }
        let mut locked = store.lock().unwrap();
        locked.clear_attachment(&claimant, &[old.container.as_str().into()]).unwrap();
        locked.commit().unwrap();
        drop(pool_lock);
    };
    let (answer, ()) = tokio::join!(node.add(&new), detaching);
    let error = answer.unwrap_err();
    assert_eq!(error["code"], 11, "{error}");
    drop(proxy);
    node.by(&case.admin());
    assert_eq!(node.add(&new).await.unwrap(), address, "once it can be asked");
}
