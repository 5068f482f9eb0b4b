//! A workload that is gone while what made it is still there: its addresses wait for it.

use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use serde_json::{Value, json};

use crate::support::controller::fleet;
use crate::support::controller::{Desk, HURRIED, rounds, until, while_at_work};

fn set(name: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name})
}

fn numbered() -> Value {
    json!({"claimant": {"kind": "Pod", "ordinal": 0}})
}

/// An operator with its set, and the StickyIP of a pod of that set which has just gone.
async fn with_its_set(desk: &Desk, operator: &str) -> (Api<DynamicObject>, Value) {
    let (operators, owner) = fleet(desk, operator).await;
    desk.owned_set("db", 1, &[&owner]).await;
    desk.retained("db-0", &desk.address(1), set("db"), numbered()).await;
    seen_now(desk, "db-0").await;
    (operators, owner)
}

/// As if its pod had just gone.
async fn seen_now(desk: &Desk, name: &str) {
    let status = Patch::Merge(json!({"status": {"lastSeen": Timestamp::now().to_string()}}));
    desk.stickies().patch_status(name, &PatchParams::default(), &status).await.unwrap();
}

async fn owners(desk: &Desk, name: &str) -> Vec<String> {
    let sticky = desk.stickies().get(name).await.unwrap();
    sticky.spec.owners.into_iter().map(|owner| format!("{} {}", owner.kind, owner.name)).collect()
}

async fn conditions(desk: &Desk, name: &str) -> Vec<(String, String)> {
    let status = desk.stickies().get(name).await.unwrap().status.unwrap_or_default();
    status.conditions.into_iter().map(|one| (one.kind, one.message)).collect()
}

#[tokio::test]
async fn the_owner_of_a_workload_is_recorded_and_keeps_its_addresses_until_it_is_gone() {
    let desk = Desk::take().await;
    let (operators, owner) = with_its_set(&desk, "red").await;
    // A pod of a random name of the same workload: nobody will ever ask for it by its name again.
    desk.retained("db-x7k2p", &desk.address(2), set("db"), json!({})).await;
    seen_now(&desk, "db-x7k2p").await;
    let context = desk.context(HURRIED);
    while_at_work(&context, async {
        until("the owner", || async { owners(&desk, "db-0").await == ["Operator red"] }).await;
        assert!(owners(&desk, "db-x7k2p").await.is_empty());
        desk.delete_set("db").await;
        until("the release of one", || async { desk.names().await == ["db-0"] }).await;
        until("its claim's end", || async { desk.claims().await.len() == 1 }).await;
        until("the event", || async { !desk.told("Released").await.is_empty() }).await;
        until("the condition", || async { !conditions(&desk, "db-0").await.is_empty() }).await;
        let (kind, message) = conditions(&desk, "db-0").await.remove(0);
        assert!(kind == "Releasing" && message.contains("Operator red"), "{kind}: {message}");
        desk.owned_set("db", 1, &[&owner]).await;
        until("the condition's end", || async { conditions(&desk, "db-0").await.is_empty() }).await;
        let (writes, so_far) = (context.writer.count(), rounds(&context, "repair"));
        until("some time at rest", || async { rounds(&context, "repair") > so_far + 2 }).await;
        assert_eq!(context.writer.count(), writes, "nothing is written at rest");
        desk.delete_set("db").await;
        until("the condition again", || async { !conditions(&desk, "db-0").await.is_empty() }).await;
        operators.delete("red", &Default::default()).await.unwrap();
        until("the release", || async { desk.names().await.is_empty() }).await;
    })
    .await;
}

#[tokio::test]
async fn an_owner_keeps_no_longer_than_its_time_and_not_at_all_without_one() {
    let desk = Desk::take().await;
    let (operators, owner) = fleet(&desk, "blue").await;
    let above = json!({"claimant": {"kind": "Pod", "ordinal": 0}, "owners": [
        {"apiVersion": "owner.example/v1", "kind": "Operator", "name": "blue", "uid": owner["uid"]}]});
    // Last seen long ago.
    desk.retained("old-0", &desk.address(1), set("old"), above.clone()).await;
    desk.retained("new-0", &desk.address(2), set("new"), above.clone()).await;
    seen_now(&desk, "new-0").await;
    let context = desk.context(HURRIED);
    while_at_work(&context, async {
        until("the release", || async { desk.names().await == ["new-0"] }).await;
        until("the condition", || async { !conditions(&desk, "new-0").await.is_empty() }).await;
    })
    .await;
    let context = desk.context(&[HURRIED, &["--owner-grace=0s"]].concat());
    while_at_work(&context, until("the other's release", || async { desk.names().await.is_empty() })).await;
    operators.delete("blue", &Default::default()).await.unwrap();
}

#[tokio::test]
async fn an_owner_that_may_not_be_looked_at_keeps_and_the_missing_right_is_named() {
    let desk = Desk::take().await;
    let (operators, _) = with_its_set(&desk, "green").await;
    // The controller's own rights: no custom kind is among them.
    let client = desk.case.controller().await.client().await;
    let context =
        desk.context_with(client, HURRIED, Box::new(sticky_ipam::cluster::writer::apply::NoObserver));
    while_at_work(&context, async {
        until("the owner", || async { owners(&desk, "db-0").await == ["Operator green"] }).await;
        desk.delete_set("db").await;
        until("the doubt", || async { !desk.told("ReleaseBlocked").await.is_empty() }).await;
        let told = desk.told("ReleaseBlocked").await.remove(0);
        assert!(told.contains("cannot get resource") && told.contains("operators"), "{told}");
        until("the condition", || async { !conditions(&desk, "db-0").await.is_empty() }).await;
        let (kind, message) = conditions(&desk, "db-0").await.remove(0);
        assert!(kind == "ReleaseBlocked" && message.contains("operators"), "{kind}: {message}");
        assert_eq!(desk.names().await, ["db-0"]);
    })
    .await;
    operators.delete("green", &Default::default()).await.unwrap();
}

#[tokio::test]
async fn a_kind_defined_after_the_controller_started_is_found_and_keeps_until_then() {
    let desk = Desk::take().await;
    let slot = json!({"claimant": {"kind": "Slot", "ordinal": 0}});
    let workload = json!({"apiVersion": "late.example/v1", "kind": "Convoy", "name": "red"});
    desk.retained("red-0", &desk.address(1), workload, slot).await;
    seen_now(&desk, "red-0").await;
    let context = desk.context(HURRIED);
    while_at_work(&context, async {
        until("the doubt", || async { !conditions(&desk, "red-0").await.is_empty() }).await;
        let (kind, message) = conditions(&desk, "red-0").await.remove(0);
        assert!(kind == "ReleaseBlocked" && message.contains("no kind Convoy"), "{kind}: {message}");
        let boss = desk.stateful_set("boss", 1).await;
        let convoys = desk.of_foreign_kind("late.example", "v1", "Convoy", "red").await;
        let owned = Patch::Merge(json!({"metadata": {"ownerReferences": [boss]}}));
        convoys.patch("red", &PatchParams::default(), &owned).await.unwrap();
        until("what made it", || async { owners(&desk, "red-0").await == ["StatefulSet boss"] }).await;
        until("the doubt's end", || async { conditions(&desk, "red-0").await.is_empty() }).await;
        assert_eq!(desk.names().await, ["red-0"]);
        desk.delete_set("boss").await;
        convoys.delete("red", &Default::default()).await.unwrap();
        until("the release", || async { desk.names().await.is_empty() }).await;
    })
    .await;
}
