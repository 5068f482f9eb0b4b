//! The keeper of CiliumEndpoints on a real API server: a nudge, a deletion that hangs, a leftover, a disagreement.

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::cilium::CiliumEndpoint;
use sticky_ipam::cluster::objects::StickyIP;
use sticky_ipam::controller::endpoints::{Endpoints, NUDGED};
use sticky_ipam::controller::settings::CiliumIpam;
use sticky_ipam::controller::world::{Done, Duty};
use sticky_ipam::policy::endpoint::Patience;

use crate::bench::case::Case;
use crate::desk::{Desk, apply, case, node};

/// Nobody waits.
const HURRIED: Patience = Patience { missing: 0, nudges: 3, terminating: 0, disagreeing: 0 };

fn pods(case: &Case<'_>) -> Api<Pod> {
    Api::namespaced(case.client(), case.namespace())
}

fn endpoints(case: &Case<'_>) -> Api<CiliumEndpoint> {
    Api::namespaced(case.client(), case.namespace())
}

/// A running pod with this address; its uid.
async fn running(case: &Case<'_>, name: &str, node: &str, address: &str) -> String {
    let pod = case.pod(name, &[], Some(node)).await;
    let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
    pods(case).patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    pod.uid().unwrap()
}

/// A CiliumEndpoint made for the pod with this uid.
async fn endpoint(case: &Case<'_>, name: &str, made_for: Option<&str>, address: &str, finalizers: Value) {
    let owners: Vec<Value> = made_for
        .map(|uid| json!({"apiVersion": "v1", "kind": "Pod", "name": name, "uid": uid}))
        .into_iter()
        .collect();
    let object = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumEndpoint",
        "metadata": {"name": name, "namespace": case.namespace(), "ownerReferences": owners, "finalizers": finalizers},
        "status": {"networking": {"addressing": [{"ipv4": address}], "node": "172.30.0.11"}}});
    apply(endpoints(case), object).await;
}

fn duty(desk: &Desk<'_>) -> Endpoints {
    Endpoints::new(HURRIED, CiliumIpam::Crd, &desk.world.metrics)
}

async fn round(desk: &Desk<'_>, keeper: &mut Endpoints) -> Done {
    desk.look().await;
    let done = keeper.round(&desk.world, Vec::new()).await;
    assert_eq!(done.failures, 0);
    done
}

async fn told(case: &Case<'_>) -> Vec<String> {
    let api: Api<Event> = Api::namespaced(case.client(), case.namespace());
    let all = api.list(&ListParams::default()).await.unwrap();
    let mut reasons: Vec<String> = all.items.into_iter().filter_map(|event| event.reason).collect();
    reasons.sort();
    reasons
}

#[tokio::test]
async fn a_running_pod_without_an_endpoint_is_nudged_by_another_value_each_time_and_not_for_ever() {
    let case = case().await;
    let name = node(&case, "n", json!({}), &[]).await;
    let desk = Desk::as_shipped(&case, &[]).await;
    let mut keeper = duty(&desk);
    running(&case, "lone", &name, "10.0.0.1").await;
    round(&desk, &mut keeper).await;
    let labelled = |pod: Pod| pod.labels().get(NUDGED).cloned();
    assert_eq!(labelled(pods(&case).get("lone").await.unwrap()), None, "nobody here has an endpoint");
    endpoint(&case, "other", None, "10.0.0.9", json!([])).await;
    for value in ["1", "2", "3", "3", "3"] {
        round(&desk, &mut keeper).await;
        assert_eq!(labelled(pods(&case).get("lone").await.unwrap()).as_deref(), Some(value));
    }
    // Another controller begins where this one ended: the value changes, or nobody would look.
    let mut second = duty(&desk);
    round(&desk, &mut second).await;
    assert_eq!(labelled(pods(&case).get("lone").await.unwrap()).as_deref(), Some("1"));
    assert!(told(&case).await.contains(&"EndpointMissing".to_owned()));
}

#[tokio::test]
async fn a_pod_that_was_replaced_or_has_its_endpoint_by_now_is_not_nudged() {
    let case = case().await;
    let name = node(&case, "n", json!({}), &[]).await;
    endpoint(&case, "other", None, "10.0.0.9", json!([])).await;
    running(&case, "a", &name, "10.0.0.1").await;
    running(&case, "b", &name, "10.0.0.2").await;
    let desk = Desk::new(&case, &[]).await;
    desk.look().await;
    // After the look: one gets its endpoint, of the other there is a new pod.
    endpoint(&case, "a", None, "10.0.0.1", json!([])).await;
    pods(&case).delete("b", &DeleteParams::default().grace_period(0)).await.unwrap();
    running(&case, "b", &name, "10.0.0.2").await;
    let mut keeper = duty(&desk);
    let before = desk.world.hands.count();
    keeper.round(&desk.world, Vec::new()).await;
    assert_eq!(desk.world.hands.count(), before);
}

#[tokio::test]
async fn an_endpoint_whose_deletion_hangs_is_freed_and_its_successor_is_left_alone() {
    let case = case().await;
    let desk = Desk::as_shipped(&case, &[]).await;
    let held = json!(["test.sticky-ipam.io/held"]);
    endpoint(&case, "stuck", None, "10.0.0.1", held.clone()).await;
    endpoint(&case, "well", None, "10.0.0.2", held.clone()).await;
    endpoints(&case).delete("stuck", &DeleteParams::default()).await.unwrap();
    let mut late = duty(&desk);
    desk.look().await;
    // Between the look and the write it went, and another of the name is there, being deleted too.
    let off = json!({"metadata": {"finalizers": null}});
    endpoints(&case).patch("stuck", &PatchParams::default(), &Patch::Merge(off)).await.unwrap();
    endpoint(&case, "stuck", None, "10.0.0.1", held).await;
    endpoints(&case).delete("stuck", &DeleteParams::default()).await.unwrap();
    late.round(&desk.world, Vec::new()).await;
    assert!(
        endpoints(&case).get_opt("stuck").await.unwrap().is_some(),
        "it is another one, with its own time"
    );
    round(&desk, &mut late).await;
    assert!(endpoints(&case).get_opt("stuck").await.unwrap().is_none());
    assert!(endpoints(&case).get_opt("well").await.unwrap().is_some());
    assert!(told(&case).await.contains(&"EndpointFreed".to_owned()));
}

#[tokio::test]
async fn the_endpoint_of_an_earlier_pod_goes_and_those_that_are_right_stay() {
    let case = case().await;
    let name = node(&case, "n", json!({}), &[]).await;
    let uid = running(&case, "own", &name, "10.0.0.1").await;
    running(&case, "new", &name, "10.0.0.2").await;
    endpoint(&case, "own", Some(&uid), "10.0.0.1", json!([])).await;
    endpoint(&case, "new", Some("of-the-old-pod"), "10.0.0.7", json!([])).await;
    endpoint(&case, "podless", Some("of-a-gone-pod"), "10.0.0.8", json!([])).await;
    let desk = Desk::as_shipped(&case, &[]).await;
    round(&desk, &mut duty(&desk)).await;
    let left: Vec<String> = endpoints(&case)
        .list(&ListParams::default())
        .await
        .unwrap()
        .iter()
        .map(ResourceExt::name_any)
        .collect();
    assert_eq!(left, ["own", "podless"]);
    assert_eq!(told(&case).await, ["EndpointLeftOver"]);
}

#[tokio::test]
async fn who_disagrees_is_told_once() {
    let case = case().await;
    let name = node(&case, "n", json!({}), &[]).await;
    let uid = running(&case, "db-0", &name, "10.0.0.1").await;
    endpoint(&case, "db-0", Some(&uid), "10.0.0.2", json!([])).await;
    let sticky = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP",
        "metadata": {"name": "db-0", "namespace": case.namespace()},
        "spec": {"addresses": ["10.0.0.3"], "claimant": {"kind": "Pod"},
                 "workload": {"apiVersion": "v1", "kind": "Pod", "name": "db-0"}}});
    let stickies: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    apply(stickies.clone(), sticky).await;
    let attached = json!({"status": {"phase": "Attached", "attachment": {"node": name, "podName": "db-0", "podUid": uid,
        "containerId": "c", "since": "2026-01-01T00:00:00Z"}}});
    stickies.patch_status("db-0", &PatchParams::default(), &Patch::Merge(attached)).await.unwrap();
    let desk = Desk::new(&case, &[]).await;
    let mut keeper = duty(&desk);
    round(&desk, &mut keeper).await;
    let expected = ["EndpointDisagreesWithPod", "PodDisagreesWithStickyIP", "PoolLacksStickyIP"];
    assert_eq!(told(&case).await, expected);
    let before = desk.world.hands.count();
    round(&desk, &mut keeper).await;
    assert_eq!(desk.world.hands.count(), before, "it was told");
    let page = desk.world.metrics.page();
    let counted = r#"sticky_ipam_controller_endpoint_disagreements_total{what="PoolLacksStickyIP"} 1"#;
    assert!(page.contains(counted), "{page}");
}
