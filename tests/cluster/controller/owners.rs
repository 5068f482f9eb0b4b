//! A workload that is gone while what made it is still there: its addresses wait for it.

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, Patch, PatchParams};
use serde_json::{Value, json};

use super::{Desk, HURRIED, rounds, until, while_at_work};

fn set(name: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name})
}

fn numbered() -> Value {
    json!({"claimant": {"kind": "Pod", "ordinal": 0}})
}

/// An operator's kind, and one object of it.
async fn fleet(desk: &Desk, name: &str) -> (Api<DynamicObject>, Value) {
    let client = desk.case.client();
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "operators.owner.example"}, "spec": {"group": "owner.example", "scope": "Namespaced",
        "names": {"plural": "operators", "singular": "operator", "kind": "Operator"},
        "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object",
            "x-kubernetes-preserve-unknown-fields": true}}}]}});
    let crds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let force = PatchParams::apply("test").force();
    crds.patch("operators.owner.example", &force, &Patch::Apply(&definition)).await.unwrap();
    let kind = ApiResource::from_gvk(&GroupVersionKind::gvk("owner.example", "v1", "Operator"));
    let api: Api<DynamicObject> = Api::namespaced_with(client, desk.case.namespace(), &kind);
    until("the kind", || async {
        api.create(&Default::default(), &DynamicObject::new(name, &kind)).await.is_ok()
    })
    .await;
    let uid = api.get(name).await.unwrap().metadata.uid;
    (
        api,
        json!({"apiVersion": "owner.example/v1", "kind": "Operator", "name": name, "uid": uid, "controller": true}),
    )
}

/// Made with its owner, as operators do.
async fn owned_set(desk: &Desk, name: &str, owner: &Value) {
    let api: Api<StatefulSet> = Api::namespaced(desk.case.client(), desk.case.namespace());
    let set = json!({"metadata": {"name": name, "ownerReferences": [owner]}, "spec": {"replicas": 1, "serviceName": name,
        "selector": {"matchLabels": {"set": name}}, "template": {"metadata": {"labels": {"set": name}},
        "spec": {"containers": [{"name": "main", "image": "none"}]}}}});
    api.create(&Default::default(), &serde_json::from_value(set).unwrap()).await.unwrap();
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
async fn what_made_a_workload_is_written_down_and_keeps_its_addresses_until_it_is_gone_too() {
    let desk = Desk::take().await;
    let (operators, owner) = fleet(&desk, "red").await;
    owned_set(&desk, "db", &owner).await;
    desk.retained("db-0", &desk.address(1), set("db"), numbered()).await;
    seen_now(&desk, "db-0").await;
    // A pod of a random name of the same workload: nobody will ever ask for it by its name again.
    desk.retained("db-x7k2p", &desk.address(2), set("db"), json!({})).await;
    seen_now(&desk, "db-x7k2p").await;
    let world = desk.world(HURRIED);
    while_at_work(&world, async {
        until("the owner", || async { owners(&desk, "db-0").await == ["Operator red"] }).await;
        assert!(owners(&desk, "db-x7k2p").await.is_empty());
        desk.delete_set("db").await;
        until("the release of one", || async { desk.names().await == ["db-0"] }).await;
        until("its claim's end", || async { desk.claims().await.len() == 1 }).await;
        until("the event", || async { !desk.told("Released").await.is_empty() }).await;
        until("the condition", || async { !conditions(&desk, "db-0").await.is_empty() }).await;
        let (kind, message) = conditions(&desk, "db-0").await.remove(0);
        assert!(kind == "Releasing" && message.contains("Operator red"), "{kind}: {message}");
        owned_set(&desk, "db", &owner).await;
        until("the condition's end", || async { conditions(&desk, "db-0").await.is_empty() }).await;
        let (writes, so_far) = (world.hands.count(), rounds(&world, "repair"));
        until("some time at rest", || async { rounds(&world, "repair") > so_far + 2 }).await;
        assert_eq!(world.hands.count(), writes, "nothing is written at rest");
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
    let world = desk.world(HURRIED);
    while_at_work(&world, async {
        until("the release", || async { desk.names().await == ["new-0"] }).await;
        until("the condition", || async { !conditions(&desk, "new-0").await.is_empty() }).await;
    })
    .await;
    let world = desk.world(&[HURRIED, &["--owner-grace=0s"]].concat());
    while_at_work(&world, until("the other's release", || async { desk.names().await.is_empty() })).await;
    operators.delete("blue", &Default::default()).await.unwrap();
}

#[tokio::test]
async fn an_owner_that_may_not_be_looked_at_keeps_and_the_missing_right_is_named() {
    let desk = Desk::take().await;
    let (operators, owner) = fleet(&desk, "green").await;
    owned_set(&desk, "db", &owner).await;
    desk.retained("db-0", &desk.address(1), set("db"), numbered()).await;
    seen_now(&desk, "db-0").await;
    // The controller's own rights: no custom kind is among them.
    let client = desk.case.controller().await.client().await;
    let world = desk.world_of(client, HURRIED, Box::new(sticky_ipam::controller::act::Unwatched));
    while_at_work(&world, async {
        until("the owner", || async { owners(&desk, "db-0").await == ["Operator green"] }).await;
        desk.delete_set("db").await;
        until("the doubt", || async { !desk.told("KeptInDoubt").await.is_empty() }).await;
        let told = desk.told("KeptInDoubt").await.remove(0);
        assert!(told.contains("cannot get resource") && told.contains("operators"), "{told}");
        until("the condition", || async { !conditions(&desk, "db-0").await.is_empty() }).await;
        let (kind, message) = conditions(&desk, "db-0").await.remove(0);
        assert!(kind == "KeptInDoubt" && message.contains("operators"), "{kind}: {message}");
        assert_eq!(desk.names().await, ["db-0"]);
    })
    .await;
    operators.delete("green", &Default::default()).await.unwrap();
}
