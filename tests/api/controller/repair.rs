//! The repair loop inside the controller: violations are cured or told with both names, and a claim rests its
//! time.

use serde_json::{Value, json};
use sticky_ipam::cluster::objects::{ClaimPhase, StickyPhase};

use crate::support::controller::steal;
use crate::support::controller::{Desk, HURRIED, rounds, until, while_at_work};
use crate::support::node::sticky_pool;

fn set() -> Value {
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db"})
}

#[tokio::test]
async fn two_bindings_of_one_address_are_reported_with_both_names() {
    let desk = Desk::take().await;
    steal(&desk).await;
    let api = desk.stickies();
    let context = desk.context(&[HURRIED, &["--adopt-running=false"]].concat());
    while_at_work(&context, async {
        until("the mark", || async {
            api.get("thief").await.unwrap().status.unwrap().phase == Some(StickyPhase::Conflict)
        })
        .await;
        until("the event", || async { !desk.told("Repaired").await.is_empty() }).await;
        let told = desk.told("Repaired").await;
        assert!(told.iter().any(|text| text.contains("thief") && text.contains("rightful")), "{told:?}");
        until("the metric", || async {
            context.metrics.page().contains("sticky_ipam_controller_conflicts 1")
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn a_lost_claim_is_recreated_and_nothing_is_written_when_idle() {
    let desk = Desk::take().await;
    desk.stateful_set("db", 9).await;
    sticky_pool(&desk.case, desk.case.range()).await;
    desk.retained("db-0", &desk.address(1), set(), json!({})).await;
    let claims = kube::Api::<sticky_ipam::cluster::objects::AddressClaim>::all(desk.case.client());
    claims.delete(&desk.address(1), &Default::default()).await.unwrap();
    let context = desk.context(HURRIED);
    while_at_work(&context, async {
        until("the claim", || async {
            desk.claims().await.first().is_some_and(|claim| claim.spec.phase == ClaimPhase::Bound)
        })
        .await;
        let so_far = rounds(&context, "repair");
        until("quiet", || async { rounds(&context, "repair") > so_far + 2 }).await;
        let writes = context.writer.count();
        let so_far = rounds(&context, "repair");
        until("some time at rest", || async { rounds(&context, "repair") > so_far + 3 }).await;
        assert_eq!(context.writer.count(), writes, "nothing is written at rest");
    })
    .await;
}

#[tokio::test]
async fn a_claim_is_quarantined_for_the_whole_time() {
    let desk = Desk::take().await;
    desk.retained("db-0", &desk.address(1), set(), json!({})).await;
    let context = desk.context(&["--proof-gap=0s", "--quarantine=1h"]);
    while_at_work(&context, async {
        until("the rest", || async { desk.claims().await[0].spec.phase == ClaimPhase::Quarantined }).await;
        until("the metric", || async {
            context.metrics.page().contains("sticky_ipam_controller_quarantined_addresses 1")
        })
        .await;
        let so_far = rounds(&context, "repair");
        until("some time", || async { rounds(&context, "repair") > so_far + 2 }).await;
        assert_eq!(desk.claims().await.len(), 1);
    })
    .await;
}
