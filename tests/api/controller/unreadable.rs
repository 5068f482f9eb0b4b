//! An object that cannot be read is told of once, ends no watch, and is left alone.

use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    Api, ApiResource, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams, PostParams,
};
use serde_json::json;
use tokio::sync::OnceCell;

use crate::support::api_server::ApiServer;
use crate::support::controller::{Desk, HURRIED, rounds, until, while_at_work};

/// A server whose schema of StickyIPs lets anything pass.
static LOOSE: OnceCell<ApiServer> = OnceCell::const_new();

#[tokio::test]
async fn a_stickyip_that_cannot_be_read_is_reported_once_and_blocks_no_other_work() {
    let desk = Desk::at(LOOSE.get_or_init(ApiServer::start).await).await;
    let kinds: Api<CustomResourceDefinition> = Api::all(desk.case.client());
    let mut kind = kinds.get("stickyips.sticky-ipam.io").await.unwrap();
    let schema = &mut kind.spec.versions[0].schema.as_mut().unwrap().open_api_v3_schema;
    // As a newer version, or a schema that was not there yet, would let one pass.
    *schema = Some(
        serde_json::from_value(json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true,
            "properties": {"status": {"type": "object", "x-kubernetes-preserve-unknown-fields": true,
                "properties": {"attachment": {"type": "object", "x-kubernetes-preserve-unknown-fields": true,
                    "properties": {"node": {"type": "string"}}}}}}}))
        .unwrap(),
    );
    kind.metadata.managed_fields = None;
    kinds.replace("stickyips.sticky-ipam.io", &PostParams::default(), &kind).await.unwrap();
    let gvk = GroupVersionKind::gvk("sticky-ipam.io", "v1alpha1", "StickyIP");
    let any: Api<DynamicObject> =
        Api::namespaced_with(desk.case.client(), desk.case.namespace(), &ApiResource::from_gvk(&gvk));
    let odd = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP", "metadata": {"name": "odd"},
        "spec": {"addresses": ["ten"], "claimant": {"kind": "Ghost"}}});
    let odd: DynamicObject = serde_json::from_value(odd).unwrap();
    until("a schema that lets it pass", || async {
        any.create(&PostParams::default(), &odd).await.is_ok() || any.get("odd").await.is_ok()
    })
    .await;
    let uid = any.get("odd").await.unwrap().metadata.uid;
    let events: Api<Event> = Api::namespaced(desk.case.client(), desk.case.namespace());
    let told = async || {
        let all = events.list(&ListParams::default()).await.unwrap().items;
        let is_it = |event: &Event| event.involved_object.name.as_deref() == Some("odd");
        all.into_iter().filter(is_it).collect::<Vec<_>>()
    };
    for number in 1..=2 {
        let context = desk.context(HURRIED);
        while_at_work(&context, async {
            until("the event", || async { !told().await.is_empty() }).await;
            // Changed, and as odd as before: nothing new.
            let touched = json!({"metadata": {"annotations": {"touched": number.to_string()}}});
            any.patch("odd", &PatchParams::default(), &Patch::Merge(touched)).await.unwrap();
            let gone = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "gone"});
            desk.retained(&format!("gone-{number}"), &desk.address(number), gone, json!({})).await;
            until("work on the others", || async { desk.claims().await.is_empty() }).await;
            let so_far = rounds(&context, "repair");
            until("some time", || async { rounds(&context, "repair") > so_far + 2 }).await;
        })
        .await;
        let page = context.metrics.page();
        assert!(page.contains("sticky_ipam_controller_objects_skipped_total{kind=\"StickyIP\"}"), "{page}");
    }
    let told = told().await;
    assert_eq!(told.len(), 1, "two controllers, and two changes: {told:?}");
    let about = &told[0].involved_object;
    assert_eq!((about.kind.as_deref(), &about.uid), (Some("StickyIP"), &uid));
    assert_eq!(about.api_version.as_deref(), Some("sticky-ipam.io/v1alpha1"));
    let message = told[0].message.as_deref().unwrap();
    assert!(message.contains("odd is skipped") && message.contains("correct or delete it"), "{message}");
    assert!(any.get("odd").await.is_ok(), "it is left alone");
}
