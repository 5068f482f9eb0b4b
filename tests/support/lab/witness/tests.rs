//! What the witness takes for a double, and what for a handover.

use super::*;

fn stands(all: &[(&str, &str, &str)]) -> Stands {
    all.iter().map(|(address, owner, by)| ((*address).into(), (*owner).into(), (*by).into())).collect()
}

/// Pods that have begun and not ended.
fn alive(uids: &[&str]) -> History {
    let pods = uids.iter().map(|uid| ((*uid).to_owned(), Life::from(1))).collect();
    History { pods, ..History::default() }
}

/// What kubelet says of a pod's container.
#[derive(Clone, Copy, PartialEq)]
enum Container {
    Runs,
    Terminated,
}

fn pod_with(uid: &str, at: Revision, address: &str, ending: bool, container: Container) -> Pod {
    let state = match container {
        Container::Runs => serde_json::json!({"running": {}}),
        Container::Terminated => serde_json::json!({"terminated": {"exitCode": 0}}),
    };
    let mut pod = serde_json::json!({
        "metadata": {"namespace": "x", "name": uid, "uid": uid, "resourceVersion": at.to_string()},
        "spec": {"nodeName": "node-1", "containers": []},
        "status": {
            "phase": "Running", "podIPs": [{"ip": address}],
            "containerStatuses": [
                {"name": "pod", "image": "", "imageID": "", "ready": false, "restartCount": 0, "state": state},
            ],
        },
    });
    if ending {
        pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    }
    serde_json::from_value(pod).expect("a pod")
}

fn node_with(at: Revision, taint: Option<&str>) -> Node {
    let taints: Vec<_> =
        taint.iter().map(|key| serde_json::json!({"key": key, "effect": "NoExecute"})).collect();
    serde_json::from_value(serde_json::json!({
        "metadata": {"name": "node-1", "resourceVersion": at.to_string()}, "spec": {"taints": taints},
    }))
    .expect("a node")
}

fn doubles(history: &History) -> Vec<String> {
    history.doubled().iter().map(Twice::to_string).collect()
}

#[test]
fn a_pod_that_is_ending_has_its_address_until_its_containers_have_terminated() {
    use Container::{Runs, Terminated};
    let told = |successor: Revision| {
        let mut history = History::default();
        pod(&mut history, &pod_with("a", 3, "10.0.0.1", false, Runs), true);
        pod(&mut history, &pod_with("a", 5, "10.0.0.1", true, Runs), true);
        pod(&mut history, &pod_with("a", 7, "10.0.0.1", true, Terminated), true);
        pod(&mut history, &pod_with("a", 9, "10.0.0.1", true, Terminated), false);
        pod(&mut history, &pod_with("b", successor, "10.0.0.1", false, Runs), true);
        doubles(&history)
    };
    assert_eq!(told(6).len(), 1, "it was ending, and had not ended");
    assert_eq!(told(7), Vec::<String>::new(), "it had ended, and its object was still there");
}

#[test]
fn a_container_that_terminated_in_a_pod_that_was_not_deleted_ends_nothing() {
    let mut history = History::default();
    pod(&mut history, &pod_with("a", 3, "10.0.0.1", false, Container::Terminated), true);
    pod(&mut history, &pod_with("b", 5, "10.0.0.1", false, Container::Runs), true);
    assert_eq!(doubles(&history).len(), 1);
}

fn endpoint_of(uid: &str, at: Revision, address: &str) -> DynamicObject {
    serde_json::from_value(serde_json::json!({
        "apiVersion": "cilium.io/v2", "kind": "CiliumEndpoint",
        "metadata": {
            "namespace": "x", "name": uid, "uid": format!("of {uid}"), "resourceVersion": at.to_string(),
            "ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": uid, "uid": uid}],
        },
        "status": {"networking": {"addressing": [{"ipv4": address}]}},
    }))
    .expect("an endpoint")
}

#[test]
fn a_terminating_pod_has_released_its_address_when_its_endpoint_is_gone() {
    use Container::Runs;
    let told = |ending: Revision, unplugged: Revision, successor: Revision| {
        let mut history = History::default();
        pod(&mut history, &pod_with("a", 1, "10.0.0.1", false, Runs), true);
        endpoint(&mut history, &endpoint_of("a", 2, "10.0.0.1"), true);
        pod(&mut history, &pod_with("a", ending, "10.0.0.1", true, Runs), true);
        pod(&mut history, &pod_with("b", 1, "10.0.0.9", false, Runs), true);
        endpoint(&mut history, &endpoint_of("b", successor, "10.0.0.1"), true);
        endpoint(&mut history, &endpoint_of("a", unplugged, "10.0.0.1"), false);
        doubles(&history).len()
    };
    assert_eq!(told(4, 6, 7), 0, "Cilium has taken it down");
    assert_eq!(told(4, 6, 5), 2, "it was ending and both it and its endpoint still had it");
    assert_eq!(told(8, 6, 7), 1, "somebody deleted the endpoint of a pod that was not ending");
}

#[test]
fn a_pod_ends_with_its_node_only_when_that_is_said_to_be_dead() {
    const OUT: Option<&str> = Some("node.kubernetes.io/out-of-service");
    let told = |events: &[(Revision, Option<&str>, bool)]| {
        let mut history = History::default();
        pod(&mut history, &pod_with("a", 3, "10.0.0.1", false, Container::Runs), true);
        pod(&mut history, &pod_with("a", 4, "10.0.0.1", true, Container::Runs), true);
        for (at, taint, there) in events {
            node(&mut history, &node_with(*at, *taint), *there);
        }
        let mut elsewhere = pod_with("b", 8, "10.0.0.1", false, Container::Runs);
        elsewhere.spec.as_mut().expect("a spec").node_name = Some("node-2".into());
        pod(&mut history, &elsewhere, true);
        doubles(&history).len()
    };
    assert_eq!(told(&[(5, Some("node.kubernetes.io/unreachable"), true)]), 1, "cut off");
    assert_eq!(told(&[(5, OUT, true)]), 0, "out of service");
    assert_eq!(told(&[(5, None, false)]), 0, "deleted");
    assert_eq!(told(&[(9, OUT, true)]), 1, "too late");
    // Tainted before the pod was bound to it, as one that is repaired: what starts there lives.
    assert_eq!(told(&[(1, OUT, true), (6, OUT, true), (7, None, true)]), 1, "tainted before");
}

#[test]
fn a_handover_is_no_duplicate_and_an_overlap_of_one_revision_is() {
    let mut history = alive(&["a", "b", "c"]);
    history.note("pod a", 5, stands(&[("10.0.0.1", "a", "Pod x/a")]));
    history.note("pod a", 7, stands(&[]));
    history.note("pod b", 7, stands(&[("10.0.0.1", "b", "Pod x/b")]));
    assert!(history.doubled().is_empty());
    history.note("pod c", 6, stands(&[("10.0.0.1", "c", "Pod x/c")]));
    let doubled: Vec<String> = history.doubled().iter().map(Twice::to_string).collect();
    assert_eq!(doubled.len(), 2, "{doubled:?}");
    assert!(doubled.iter().all(|text| text.contains("10.0.0.1 was with") && text.contains("Pod x/c")));
}

#[test]
fn an_endpoint_counts_while_its_pod_lives() {
    let mut history = History::default();
    history.pods.insert("a".into(), Life { span: Span { from: 1, to: Some(4) }, bound: None, ending: None });
    history.pods.insert("b".into(), Life::from(3));
    history.note("endpoint a", 2, stands(&[("10.0.0.1", "a", "CiliumEndpoint x/a")]));
    history.note("pod b", 4, stands(&[("10.0.0.1", "b", "Pod x/b")]));
    assert!(history.doubled().is_empty(), "the old pod's endpoint is only slow to go");
    history.note("endpoint b", 3, stands(&[("10.0.0.1", "b", "CiliumEndpoint x/b")]));
    assert_eq!(history.doubled().len(), 1);
}

#[test]
fn two_pools_may_not_offer_one_address_but_a_pod_has_what_its_pool_offers() {
    let mut history = alive(&["a"]);
    history.note("pod a", 2, stands(&[("10.0.0.1", "a", "Pod x/a")]));
    history.note("node 1", 1, stands(&[("10.0.0.1", "the pool of 1", "pool")]));
    assert!(history.doubled().is_empty());
    history.note("node 2", 5, stands(&[("10.0.0.1", "the pool of 2", "pool")]));
    assert_eq!(history.doubled().len(), 1);
}
