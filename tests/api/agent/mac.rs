//! The MAC of a sticky pod: recorded from Cilium's socket, and asked for again where it is to be kept.

use k8s_openapi::api::core::v1::{Event, Namespace, Pod};
use kube::api::{Api, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::StickyIP;

use crate::support::agent::Stepped;
use crate::support::agent::{case, parts};
use crate::support::api_server::case::Case;
use crate::support::node::{Sandbox, TestNode, assert_in_step, delete_pod, sandbox, stickies, sticky_pod};

const MAC: &str = "cni.cilium.io/mac-address";
const FEW: &[&str] = &["--ip-rate-num", "3", "--max-allocated-ip", "8"];
const KEEP: &[&str] = &["--ip-rate-num", "3", "--max-allocated-ip", "8", "--keep-mac"];

async fn pod(case: &Case<'_>, node: &TestNode, annotations: Value) -> Sandbox {
    sandbox(&sticky_pod(case, "db-0", &node.name, annotations).await)
}

async fn recorded(case: &Case<'_>) -> Option<String> {
    stickies(case).await.remove(0).status.and_then(|status| status.mac)
}

/// What the pod asks of Cilium.
async fn asked(case: &Case<'_>) -> Option<String> {
    let pods: Api<Pod> = Api::namespaced(case.client(), case.namespace());
    pods.get("db-0").await.unwrap().metadata.annotations.unwrap_or_default().get(MAC).cloned()
}

async fn mac_events(case: &Case<'_>) -> Vec<String> {
    let events: Api<Event> = Api::namespaced(case.client(), case.namespace());
    let listed = events.list(&ListParams::default()).await.unwrap().into_iter();
    let of_it = listed.filter(|event| event.reason.as_deref() == Some("MacNotKept"));
    of_it.map(|event| event.message.unwrap_or_default()).collect()
}

/// Prepares the pod, runs its ADD, and lets the agent see it.
async fn starts(node: &TestNode, agent: &mut Stepped, first: &Sandbox) -> String {
    agent.step().await;
    node.add(first).await.unwrap();
    agent.settle().await;
    node.cilium().mac(&first.container)
}

async fn ends(case: &Case<'_>, node: &TestNode, agent: &mut Stepped, first: &Sandbox) {
    delete_pod(case, "db-0").await;
    node.del(first).await;
    agent.settle().await;
}

/// A node on which the pod has come and gone, its agent, and the MAC that the pod had.
async fn ran_once(case: &Case<'_>, flags: &[&str]) -> (TestNode, Stepped, String) {
    let node = TestNode::ready_crd(case, "n1", parts(case)[0]).await;
    let mut agent = Stepped::new(case, &node, "crd", flags).await;
    let first = pod(case, &node, json!({})).await;
    let mac = starts(&node, &mut agent, &first).await;
    ends(case, &node, &mut agent, &first).await;
    (node, agent, mac)
}

#[tokio::test]
async fn with_keep_mac_the_next_pod_has_the_same_mac_on_any_node_and_without_it_another() {
    for keep in [true, false] {
        let case = case().await;
        let [one, two, ..] = parts(&case);
        let flags = if keep { KEEP } else { FEW };
        let n1 = TestNode::ready_crd(&case, "n1", one).await;
        let n2 = TestNode::ready_crd(&case, "n2", two).await;
        let mut a1 = Stepped::new(&case, &n1, "crd", flags).await;
        let mut a2 = Stepped::new(&case, &n2, "crd", flags).await;
        let first = pod(&case, &n1, json!({})).await;
        let mac = starts(&n1, &mut a1, &first).await;
        assert_eq!(recorded(&case).await, Some(mac.clone()));
        assert_eq!(asked(&case).await, None, "there was nothing to ask for");
        assert_eq!(a1.step().await.done, 0, "nothing is written twice");
        ends(&case, &n1, &mut a1, &first).await;
        let next = pod(&case, &n2, json!({})).await;
        let again = starts(&n2, &mut a2, &next).await;
        assert_eq!(again == mac, keep);
        assert_eq!(recorded(&case).await, Some(again));
        assert_eq!(asked(&case).await, keep.then_some(mac));
        assert!(mac_events(&case).await.is_empty());
        assert_in_step(&case, &[&n1, &n2]).await;
    }
}

#[tokio::test]
async fn annotations_of_pod_and_namespace_count_and_a_pods_own_mac_is_left_alone() {
    let case = case().await;
    let (node, mut agent, mac) = ran_once(&case, FEW).await;
    let own = pod(&case, &node, json!({"sticky-ipam.io/keep-mac": "true"})).await;
    assert_eq!(starts(&node, &mut agent, &own).await, mac, "the pod's own word");
    ends(&case, &node, &mut agent, &own).await;
    let namespaces: Api<Namespace> = Api::all(case.client());
    let word = json!({"metadata": {"annotations": {"sticky-ipam.io/keep-mac": "true"}}});
    namespaces.patch(case.namespace(), &PatchParams::default(), &Patch::Merge(word)).await.unwrap();
    let by_namespace = pod(&case, &node, json!({})).await;
    assert_eq!(starts(&node, &mut agent, &by_namespace).await, mac, "the namespace's");
    ends(&case, &node, &mut agent, &by_namespace).await;
    let wish = "0a:58:00:00:00:07";
    let wishes = pod(&case, &node, json!({MAC: wish})).await;
    assert_eq!(starts(&node, &mut agent, &wishes).await, wish);
    assert_eq!(recorded(&case).await.as_deref(), Some(wish), "what it asked for is recorded");
    assert!(mac_events(&case).await.is_empty());
}

#[tokio::test]
async fn a_pod_not_prepared_in_time_gets_an_event_about_its_mac_and_the_kept_one_stays() {
    let case = case().await;
    let (node, mut agent, mac) = ran_once(&case, KEEP).await;
    let early = pod(&case, &node, json!({})).await;
    node.add(&early).await.unwrap();
    agent.settle().await;
    let other = node.cilium().mac(&early.container);
    assert_ne!(other, mac);
    let events = mac_events(&case).await;
    assert!(events.len() == 1 && events[0].contains(&mac) && events[0].contains(&other), "{events:?}");
    assert_eq!(recorded(&case).await, Some(mac.clone()));
    ends(&case, &node, &mut agent, &early).await;
    let next = pod(&case, &node, json!({})).await;
    assert_eq!(starts(&node, &mut agent, &next).await, mac);
}

#[tokio::test]
async fn what_is_no_mac_is_refused_by_the_api_server() {
    let case = case().await;
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    let sticky = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP", "metadata": {"name": "db-0"},
        "spec": {"addresses": ["10.0.0.1"], "claimant": {"kind": "Pod"},
                 "workload": {"apiVersion": "v1", "kind": "Pod", "name": "db-0"}}});
    api.create(&Default::default(), &serde_json::from_value(sticky).unwrap()).await.unwrap();
    for (mac, good) in [("0a:58:0a:f1:00:07", true), ("0A:58:0a:f1:00:07", false), ("nonsense", false)] {
        let patch = Patch::Merge(json!({"status": {"mac": mac}}));
        let patched = api.patch_status("db-0", &PatchParams::default(), &patch).await;
        assert_eq!(patched.is_ok(), good, "{mac}: {patched:?}");
    }
}
