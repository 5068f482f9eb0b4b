//! The keeper of CiliumEndpoints on a real API server: a nudge, a deletion that hangs, a leftover, a wrong
//! one, a disagreement; with an end
//! at any write, and with conflicts on each.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::StickyIP;
use sticky_ipam::cluster::objects::cilium::CiliumEndpoint;
use sticky_ipam::cluster::writer::apply::{NoObserver, SentWrite, WriteObserver};
use sticky_ipam::controller::duties::endpoints::{Endpoints, NUDGED};
use sticky_ipam::controller::duty::{Duty, RoundResult};
use sticky_ipam::controller::index::Kind;
use sticky_ipam::controller::queue::Key;
use sticky_ipam::policy::endpoint::EndpointTimeouts;
use sticky_ipam::policy::mode::CiliumMode;

use crate::support::api_server::access::Access;
use crate::support::api_server::case::Case;
use crate::support::duty::{Desk, EndControllerAt, apply, case, node};
use crate::support::node::ended_by_the_witness;

/// Nobody waits.
const HURRIED: EndpointTimeouts =
    EndpointTimeouts { missing: 0, nudges: 3, terminating: 0, disagreeing: 0, wrong: 0 };

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

/// A StickyIP with this address, attached to the pod of its name.
async fn bound(case: &Case<'_>, name: &str, node: &str, uid: &str, address: &str) {
    let sticky = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP",
        "metadata": {"name": name, "namespace": case.namespace()},
        "spec": {"addresses": [address], "claimant": {"kind": "Pod"},
                 "workload": {"apiVersion": "v1", "kind": "Pod", "name": name}}});
    let stickies: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    apply(stickies.clone(), sticky).await;
    let attached = json!({"status": {"phase": "Attached", "attachment": {"node": node, "podName": name, "podUid": uid,
        "attachmentId": "c", "since": "2026-01-01T00:00:00Z"}}});
    stickies.patch_status(name, &PatchParams::default(), &Patch::Merge(attached)).await.unwrap();
}

fn duty() -> Endpoints {
    Endpoints::new(HURRIED, CiliumMode::Crd)
}

async fn round(desk: &Desk<'_>, keeper: &mut Endpoints) -> RoundResult {
    desk.look().await;
    let done = keeper.full_round(&desk.context, Vec::new()).await;
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
async fn a_running_pod_without_an_endpoint_is_nudged_with_new_values_a_few_times() {
    let case = case().await;
    let name = node(&case, "n", json!({}), &[]).await;
    let desk = Desk::as_shipped(&case, &[]).await;
    let mut keeper = duty();
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
    let mut second = duty();
    round(&desk, &mut second).await;
    assert_eq!(labelled(pods(&case).get("lone").await.unwrap()).as_deref(), Some("1"));
    assert!(told(&case).await.contains(&"EndpointMissing".to_owned()));
}

#[tokio::test]
async fn a_nudge_that_is_not_written_does_not_count() {
    let case = case().await;
    let name = node(&case, "n", json!({}), &[]).await;
    endpoint(&case, "other", None, "10.0.0.9", json!([])).await;
    running(&case, "lone", &name, "10.0.0.1").await;
    // It may look at everything, and may write no pod.
    let rules = json!([{"apiGroups": ["", "cilium.io", "sticky-ipam.io"], "resources": ["*"], "verbs": ["get", "list", "watch"]},
                       {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]}]);
    let poor = case.service_account("poor", serde_json::from_value(rules).unwrap()).await;
    let mut desk = Desk::with(&case, poor.client().await, &[], Box::new(NoObserver));
    let mut keeper = duty();
    for _ in 0..HURRIED.nudges {
        desk.look().await;
        assert_eq!(keeper.full_round(&desk.context, Vec::new()).await.failures, 1);
    }
    assert!(told(&case).await.is_empty(), "nothing was written, so nothing is told");
    assert!(!desk.context.metrics.page().contains(r#"endpoint_actions_total{action="nudged"}"#));
    desk = Desk::new(&case, &[]).await;
    for value in ["1", "2", "3", "3"] {
        round(&desk, &mut keeper).await;
        let pod = pods(&case).get("lone").await.unwrap();
        assert_eq!(pod.labels().get(NUDGED).map(String::as_str), Some(value), "all three are left");
    }
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
    let mut keeper = duty();
    let before = desk.context.writer.count();
    keeper.full_round(&desk.context, Vec::new()).await;
    assert_eq!(desk.context.writer.count(), before);
}

#[tokio::test]
async fn an_endpoint_whose_deletion_hangs_is_freed_and_its_successor_is_left_alone() {
    let case = case().await;
    let desk = Desk::as_shipped(&case, &[]).await;
    let held = json!(["test.sticky-ipam.io/held"]);
    endpoint(&case, "stuck", None, "10.0.0.1", held.clone()).await;
    endpoint(&case, "well", None, "10.0.0.2", held.clone()).await;
    endpoints(&case).delete("stuck", &DeleteParams::default()).await.unwrap();
    let mut late = duty();
    desk.look().await;
    // Between the look and the write it went, and another of the name is there, being deleted too.
    let off = json!({"metadata": {"finalizers": null}});
    endpoints(&case).patch("stuck", &PatchParams::default(), &Patch::Merge(off)).await.unwrap();
    endpoint(&case, "stuck", None, "10.0.0.1", held).await;
    endpoints(&case).delete("stuck", &DeleteParams::default()).await.unwrap();
    late.full_round(&desk.context, Vec::new()).await;
    assert!(
        endpoints(&case).get_opt("stuck").await.unwrap().is_some(),
        "it is another one, with its own time"
    );
    round(&desk, &mut late).await;
    assert!(endpoints(&case).get_opt("stuck").await.unwrap().is_none());
    assert!(endpoints(&case).get_opt("well").await.unwrap().is_some());
    assert!(told(&case).await.contains(&"EndpointFinalizersRemoved".to_owned()));
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
    round(&desk, &mut duty()).await;
    let left: Vec<String> = endpoints(&case)
        .list(&ListParams::default())
        .await
        .unwrap()
        .iter()
        .map(ResourceExt::name_any)
        .collect();
    assert_eq!(left, ["own", "podless"]);
    assert_eq!(told(&case).await, ["StaleEndpointRemoved"]);
}

#[tokio::test]
async fn a_disagreement_is_reported_once() {
    let case = case().await;
    let name = node(&case, "n", json!({}), &[]).await;
    let uid = running(&case, "db-0", &name, "10.0.0.1").await;
    endpoint(&case, "db-0", Some(&uid), "10.0.0.2", json!([])).await;
    bound(&case, "db-0", &name, &uid, "10.0.0.3").await;
    let desk = Desk::new(&case, &[]).await;
    let mut keeper = duty();
    round(&desk, &mut keeper).await;
    let expected = ["EndpointDisagreesWithPod", "PodDisagreesWithStickyIP", "PoolLacksStickyIP"];
    assert_eq!(told(&case).await, expected);
    let before = desk.context.writer.count();
    round(&desk, &mut keeper).await;
    assert_eq!(desk.context.writer.count(), before, "it was told");
    let page = desk.context.metrics.page();
    let counted = r#"sticky_ipam_controller_endpoint_disagreements_total{reason="PoolLacksStickyIP"} 1"#;
    assert!(page.contains(counted), "{page}");
}

#[tokio::test]
async fn a_tick_finds_who_disagrees_though_only_others_are_due() {
    let case = case().await;
    let name = node(&case, "n", json!({}), &[]).await;
    let uid = running(&case, "db-0", &name, "10.0.0.1").await;
    endpoint(&case, "db-0", Some(&uid), "10.0.0.1", json!([])).await;
    let busy = running(&case, "busy", &name, "10.0.0.2").await;
    endpoint(&case, "busy", Some(&busy), "10.0.0.2", json!([])).await;
    // Neither a StickyIP nor a pool wakes the keeper.
    bound(&case, "db-0", &name, &uid, "10.0.0.3").await;
    let desk = Desk::new(&case, &[]).await;
    let mut keeper = duty();
    desk.look().await;
    let due = vec![Key::new(Kind::Pod, format!("{}/busy", case.namespace()))];
    assert_eq!(keeper.round(&desk.context, due.clone()).await.failures, 0);
    assert!(told(&case).await.is_empty(), "it was not due");
    assert_eq!(keeper.full_round(&desk.context, due).await.failures, 0);
    assert_eq!(told(&case).await, ["PodDisagreesWithStickyIP", "PoolLacksStickyIP"]);
}

#[tokio::test]
async fn a_sticky_pods_endpoint_with_a_foreign_address_is_deleted_as_it_was_read() {
    let case = case().await;
    let name = node(&case, "n", json!({}), &[]).await;
    let sticky = running(&case, "db-0", &name, "10.0.0.1").await;
    bound(&case, "db-0", &name, &sticky, "10.0.0.1").await;
    let corrected = running(&case, "db-1", &name, "10.0.0.2").await;
    bound(&case, "db-1", &name, &corrected, "10.0.0.2").await;
    let plain = running(&case, "plain", &name, "10.0.0.3").await;
    endpoint(&case, "db-0", Some(&sticky), "10.0.0.9", json!([])).await;
    endpoint(&case, "db-1", Some(&corrected), "10.0.0.9", json!([])).await;
    endpoint(&case, "plain", Some(&plain), "10.0.0.9", json!([])).await;
    let desk = Desk::as_shipped(&case, &[]).await;
    let mut keeper = duty();
    desk.look().await;
    // After the look Cilium writes one of them right.
    endpoint(&case, "db-1", Some(&corrected), "10.0.0.2", json!([])).await;
    assert_eq!(keeper.full_round(&desk.context, Vec::new()).await.failures, 0);
    let there = async || -> Vec<String> {
        endpoints(&case)
            .list(&ListParams::default())
            .await
            .unwrap()
            .iter()
            .map(ResourceExt::name_any)
            .collect()
    };
    assert_eq!(there().await, ["db-1", "plain"], "of a pod that is not sticky nobody can say who is right");
    assert!(told(&case).await.contains(&"EndpointReplaced".to_owned()));
    let counted = r#"sticky_ipam_controller_endpoint_actions_total{action="replaced"} 1"#;
    assert!(desk.context.metrics.page().contains(counted));
    // Whoever writes it wrong again is not fought.
    endpoint(&case, "db-0", Some(&sticky), "10.0.0.9", json!([])).await;
    for _ in 0..3 {
        round(&desk, &mut keeper).await;
    }
    assert_eq!(there().await, ["db-0", "db-1", "plain"]);
    assert!(desk.context.metrics.page().contains(counted));
}

/// Something for each kind of write: a nudge, finalizers, a leftover, a wrong one.
async fn prepare(case: &Case<'_>, node: &str) {
    let pods_now = DeleteParams::default().grace_period(0);
    pods(case).delete_collection(&pods_now, &ListParams::default()).await.unwrap();
    endpoints(case).delete_collection(&DeleteParams::default(), &ListParams::default()).await.unwrap();
    running(case, "lone", node, "10.0.0.1").await;
    endpoint(case, "stuck", None, "10.0.0.2", json!(["test.sticky-ipam.io/held"])).await;
    endpoints(case).delete("stuck", &DeleteParams::default()).await.unwrap();
    running(case, "new", node, "10.0.0.3").await;
    endpoint(case, "new", Some("of-the-old-pod"), "10.0.0.4", json!([])).await;
    let uid = running(case, "db-0", node, "10.0.0.5").await;
    bound(case, "db-0", node, &uid, "10.0.0.5").await;
    endpoint(case, "db-0", Some(&uid), "10.0.0.6", json!([])).await;
    // Somebody has an endpoint, or none would be missed.
    endpoint(case, "other", None, "10.0.0.7", json!([])).await;
}

async fn is_done(case: &Case<'_>) -> bool {
    let left = endpoints(case).list(&ListParams::default()).await.unwrap();
    let nudged = pods(case).get("lone").await.unwrap().labels().contains_key(NUDGED);
    nudged && left.iter().map(ResourceExt::name_any).collect::<Vec<_>>() == ["other"]
}

#[tokio::test]
async fn a_keeper_that_ends_at_any_write_is_followed_by_one_that_finishes() {
    let case = case().await;
    let name = node(&case, "n", json!({}), &[]).await;
    for after in [false, true] {
        let mut number = 1;
        loop {
            prepare(&case, &name).await;
            let desk = Desk::watched(&case, &[], EndControllerAt::boxed(number, after)).await;
            let mut keeper = duty();
            let ended = ended_by_the_witness(async {
                round(&desk, &mut keeper).await;
            })
            .await;
            let second = Desk::new(&case, &[]).await;
            round(&second, &mut duty()).await;
            assert!(is_done(&case).await, "after {number} writes, {after}");
            if !ended {
                break;
            }
            number += 1;
        }
        assert!(number > 4, "nudge, free, remove, replace: it was {number}");
    }
}

/// Writes the object that is about to be written, the first time of each, so that its precondition fails.
struct Meddler {
    access: Access,
    namespace: String,
    met: Arc<Mutex<BTreeMap<String, usize>>>,
}

impl WriteObserver for Meddler {
    fn before(&self, _: usize, write: SentWrite<'_>) {
        let what = write.description();
        let words: Vec<&str> = what.split([' ', '/']).collect();
        let (kind, name) = match words[..] {
            ["patch" | "delete", kind, _, name] => (kind.to_owned(), name.to_owned()),
            _ => return,
        };
        let times = {
            let mut met = self.met.lock().unwrap();
            let times = met.entry(format!("{} {kind} {name}", words[0])).or_default();
            *times += 1;
            *times
        };
        if times > 1 {
            return;
        }
        let (access, namespace) = (self.access.clone(), self.namespace.clone());
        // On a thread of its own: the keeper's runtime stands still here.
        let work = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let client = access.client().await;
                let mark = json!({"metadata": {"annotations": {"meddled": "yes"}}});
                let (params, mark) = (PatchParams::default(), Patch::Merge(&mark));
                if kind == "Pod" {
                    Api::<Pod>::namespaced(client, &namespace).patch(&name, &params, &mark).await.unwrap();
                } else {
                    let api = Api::<CiliumEndpoint>::namespaced(client, &namespace);
                    api.patch(&name, &params, &mark).await.unwrap();
                }
            });
        });
        work.join().unwrap();
    }
}

#[tokio::test]
async fn conflicts_on_each_of_the_keepers_writes_delay_and_change_nothing() {
    let case = case().await;
    let name = node(&case, "n", json!({}), &[]).await;
    prepare(&case, &name).await;
    let met = Arc::default();
    let meddler =
        Meddler { access: case.admin(), namespace: case.namespace().to_owned(), met: Arc::clone(&met) };
    let desk = Desk::watched(&case, &[], Box::new(meddler)).await;
    let mut keeper = duty();
    round(&desk, &mut keeper).await;
    assert!(!desk.context.metrics.page().contains("endpoint_actions_total{"), "each write met a conflict");
    round(&desk, &mut keeper).await;
    assert!(is_done(&case).await);
    let met = met.lock().unwrap().clone();
    for write in [
        "patch Pod lone",
        "patch CiliumEndpoint stuck",
        "delete CiliumEndpoint new",
        "delete CiliumEndpoint db-0",
    ] {
        assert_eq!(met.get(write), Some(&2), "{write}: {met:?}");
    }
}
