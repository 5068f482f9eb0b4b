//! Two live pods with one address, on a real API server: told on both, counted, and over when it is over.

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;
use sticky_ipam::controller::duties::duplicates::{Duplicates, GRACE_SECONDS, REASON};
use sticky_ipam::controller::duty::Duty;

use crate::support::api_server::case::Case;
use crate::support::duty::{Desk, case, node};

fn pods(case: &Case<'_>) -> Api<Pod> {
    Api::namespaced(case.client(), case.namespace())
}

async fn says(case: &Case<'_>, name: &str, phase: &str, address: &str) {
    let status = json!({"status": {"phase": phase, "podIP": address, "podIPs": [{"ip": address}]}});
    pods(case).patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
}

async fn running(case: &Case<'_>, name: &str, node: &str, address: &str) {
    case.pod(name, &[], Some(node)).await;
    says(case, name, "Running", address).await;
}

/// A round on what stands now; the gauge afterwards.
async fn round(desk: &Desk<'_>, duty: &mut Duplicates) -> String {
    desk.look().await;
    assert_eq!(duty.round(&desk.context, Vec::new()).await.failures, 0);
    let page = desk.context.metrics.page();
    let line = page.lines().rfind(|line| line.starts_with("sticky_ipam_controller_duplicate_addresses "));
    line.unwrap().rsplit(' ').next().unwrap().to_owned()
}

/// Whom an event of ours is about, and what it says.
async fn told(case: &Case<'_>) -> Vec<(String, String)> {
    let api: Api<Event> = Api::namespaced(case.client(), case.namespace());
    let all = api.list(&ListParams::default()).await.unwrap().items.into_iter();
    let ours = all.filter(|event| event.reason.as_deref() == Some(REASON));
    let mut told: Vec<_> =
        ours.map(|event| (event.involved_object.name.unwrap(), event.message.unwrap())).collect();
    told.sort();
    told
}

#[tokio::test]
async fn an_address_with_two_live_pods_is_reported_on_both_once_and_counted_until_over() {
    let case = case().await;
    let (one, two) = (node(&case, "n1", json!({}), &[]).await, node(&case, "n2", json!({}), &[]).await);
    running(&case, "a", &one, "10.0.0.1").await;
    running(&case, "b", &two, "10.0.0.1").await;
    running(&case, "c", &two, "10.0.0.2").await;
    let desk = Desk::as_shipped(&case, &[]).await;
    assert_eq!(
        round(&desk, &mut Duplicates::new(GRACE_SECONDS, &desk.context.metrics)).await,
        "0",
        "it may be over soon"
    );
    assert!(told(&case).await.is_empty());
    let mut duty = Duplicates::new(0, &desk.context.metrics);
    assert_eq!(round(&desk, &mut duty).await, "1");
    let told_of = told(&case).await;
    let names: Vec<&str> = told_of.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["a", "b"]);
    let ns = case.namespace();
    for (_, message) in &told_of {
        for part in ["10.0.0.1", &format!("{ns}/a on node {one}"), &format!("{ns}/b on node {two}"), "delete"]
        {
            assert!(message.contains(part), "{part}: {message}");
        }
    }
    let before = desk.context.writer.count();
    assert_eq!(round(&desk, &mut duty).await, "1");
    assert_eq!(desk.context.writer.count(), before, "it was told");
    // One of them ends, and its object is still there.
    says(&case, "b", "Succeeded", "10.0.0.1").await;
    assert_eq!(round(&desk, &mut duty).await, "0");
    // Another pod comes up with it, and is taken away again.
    running(&case, "d", &one, "10.0.0.1").await;
    assert_eq!(round(&desk, &mut duty).await, "1");
    pods(&case).delete("d", &DeleteParams::default().grace_period(0)).await.unwrap();
    assert_eq!(round(&desk, &mut duty).await, "0");
    assert_eq!(told(&case).await.len(), 4);
}
