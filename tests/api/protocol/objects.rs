//! A real API server takes our definitions and refuses what they must refuse.

use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::{Value, json};

use crate::support::api_server::ApiServer;

fn api(client: kube::Client, kind: &str, plural: &str, namespace: Option<&str>) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("sticky-ipam.io", "v1alpha1", kind);
    let resource = ApiResource::from_gvk_with_plural(&kind, plural);
    match namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
        None => Api::all_with(client, &resource),
    }
}

fn object(kind: &str, name: &str, spec: &Value) -> DynamicObject {
    serde_json::from_value(json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": kind,
                                  "metadata": {"name": name}, "spec": spec}))
    .unwrap()
}

async fn refused(api: &Api<DynamicObject>, kind: &str, name: &str, spec: Value, why: &str) {
    match api.create(&PostParams::default(), &object(kind, name, &spec)).await {
        Ok(_) => panic!("{kind} {name} was taken: {spec}"),
        Err(error) => assert!(error.to_string().contains(why), "{kind} {spec}: {error} does not say {why:?}"),
    }
}

async fn unchangeable(api: &Api<DynamicObject>, name: &str, spec: Value, why: &str) {
    match api.patch(name, &PatchParams::default(), &Patch::Merge(json!({"spec": spec}))).await {
        Ok(_) => panic!("{name} was changed: {spec}"),
        Err(error) => assert!(error.to_string().contains(why), "{spec}: {error} does not say {why:?}"),
    }
}

fn with(base: &Value, change: Value) -> Value {
    let mut spec = base.clone();
    for (key, value) in change.as_object().unwrap() {
        spec[key] = value.clone();
    }
    spec
}

#[tokio::test]
async fn a_stickyip_keeps_its_addresses_and_its_rules() {
    let server = ApiServer::shared().await;
    server.install_our_kinds().await;
    let case = server.case().await;
    let api = api(case.client(), "StickyIP", "stickyips", Some(case.namespace()));
    let good = json!({"addresses": ["10.0.9.9", "fd00::9"], "claimant": {"kind": "Pod", "ordinal": 0},
                      "workload": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db"}});
    api.create(&PostParams::default(), &object("StickyIP", "db-0", &good)).await.unwrap();
    for (addresses, why) in [
        (json!(["10.0.9.9", "10.0.9.10"]), "one address per family"),
        (json!(["fd00:0::9"]), "canonical"),
        (json!(["010.0.9.9"]), "canonical"),
        (json!(["ten"]), "canonical"),
        (json!([]), "addresses"),
        (json!(["10.0.9.9", "fd00::9", "10.0.9.8"]), "addresses"),
    ] {
        refused(&api, "StickyIP", "bad", with(&good, json!({"addresses": addresses})), why).await;
    }
    refused(&api, "StickyIP", "bad", with(&good, json!({"retention": {"keep": "TTL"}})), "ttlSeconds").await;
    let scale_down = json!({"retention": {"onScaleDown": "TTL"}});
    refused(&api, "StickyIP", "bad", with(&good, scale_down), "scaleDownTtlSeconds").await;
    unchangeable(&api, "db-0", json!({"addresses": ["10.0.9.8"]}), "addresses cannot change").await;
    unchangeable(&api, "db-0", json!({"claimant": {"ordinal": 1}}), "claimant cannot change").await;
}

#[tokio::test]
async fn a_claim_is_its_address_and_moves_only_through_its_phases() {
    let server = ApiServer::shared().await;
    server.install_our_kinds().await;
    let case = server.case().await;
    let api = api(case.client(), "AddressClaim", "addressclaims", None);
    let address = case.range().hosts().next().unwrap().to_string();
    let good =
        json!({"address": address, "phase": "Granted", "stickyRef": {"namespace": "db", "name": "db-0"}});
    refused(&api, "AddressClaim", "192.0.2.77", good.clone(), "the name must be the address").await;
    let six = with(&good, json!({"address": "fd00::9"}));
    refused(&api, "AddressClaim", "fd00--9", six, "the name must be the address").await;
    refused(&api, "AddressClaim", &address, with(&good, json!({"phase": "Bound"})), "names the uid").await;
    refused(&api, "AddressClaim", &address, with(&good, json!({"phase": "Requested"})), "node's block").await;
    refused(&api, "AddressClaim", &address, with(&good, json!({"stickyUid": "u1"})), "is Bound").await;
    let asked = json!({"phase": "Requested", "homeNode": "n1", "stickyUid": "u1"});
    refused(&api, "AddressClaim", &address, with(&good, asked), "before it is Granted").await;
    // Made for a StickyIP that stands, it is sealed from the beginning.
    let sealed = with(&good, json!({"phase": "Bound", "stickyUid": "u1"}));
    api.create(&PostParams::default(), &object("AddressClaim", &address, &sealed)).await.unwrap();
    unchangeable(&api, &address, json!({"stickyUid": "u2"}), "never replaced").await;
    unchangeable(&api, &address, json!({"phase": "Granted"}), "phases go").await;
    api.delete(&address, &Default::default()).await.unwrap();
    api.create(&PostParams::default(), &object("AddressClaim", &address, &good)).await.unwrap();
    let again = api.create(&PostParams::default(), &object("AddressClaim", &address, &good)).await;
    assert!(again.is_err(), "the lock was taken twice");
    unchangeable(&api, &address, json!({"stickyRef": {"name": "thief"}}), "stickyRef cannot change").await;
    unchangeable(&api, &address, json!({"phase": "Quarantined"}), "phases go").await;
    unchangeable(&api, &address, json!({"address": "192.0.2.78"}), "cannot change").await;
    let seal = Patch::Merge(json!({"spec": {"phase": "Bound", "stickyUid": "u1"}}));
    api.patch(&address, &PatchParams::default(), &seal).await.unwrap();
    unchangeable(&api, &address, json!({"stickyUid": "u2"}), "never replaced").await;
    api.delete(&address, &Default::default()).await.unwrap();
    let written_out = "fd00-0000-0000-0000-0000-0000-0000-0009";
    let six = with(&good, json!({"address": "fd00::9"}));
    api.create(&PostParams::default(), &object("AddressClaim", written_out, &six)).await.unwrap();
    api.delete(written_out, &Default::default()).await.unwrap();
}

#[tokio::test]
async fn a_pool_is_refused_when_its_ranges_or_blocks_make_no_sense() {
    let server = ApiServer::shared().await;
    server.install_our_kinds().await;
    let case = server.case().await;
    let api = api(case.client(), "IPPool", "ippools", None);
    let good = json!({"cidrs": ["10.8.0.0/16", "fd08::/64"], "use": "NodeBlocks", "excluded": ["10.8.0.1", "10.8.4.0/24"]});
    let name = case.unique("pool");
    api.create(&PostParams::default(), &object("IPPool", &name, &good)).await.unwrap();
    for (change, why) in [
        (json!({"cidrs": ["10.8.0.0/16", "10.8.4.0/24"]}), "must not overlap"),
        (json!({"cidrs": ["10.8.0.0/16", "10.8.0.0/16"]}), "must not overlap"),
        (json!({"cidrs": ["10.8.0.1/16"]}), "canonical"),
        (json!({"cidrs": ["fd08:0::/64"], "excluded": []}), "canonical"),
        (json!({"blockSize": {"ipv4": 12}}), "blockSize"),
        (json!({"cidrs": ["10.8.0.0/28"], "excluded": [], "blockSize": {"ipv4": 24}}), "blockSize.ipv4"),
        (json!({"blockSize": {"ipv6": 127}}), "blockSize"),
        (json!({"excluded": ["10.9.0.1"]}), "must lie inside"),
        (json!({"excluded": ["x"]}), "excluded"),
        (json!({"use": "Fun"}), "use"),
    ] {
        refused(&api, "IPPool", "bad", with(&good, change), why).await;
    }
    unchangeable(&api, &name, json!({"use": "Sticky"}), "cannot change").await;
    // A Sticky pool has no blocks, so their size does not bound it.
    let small = case.unique("small");
    let sticky = json!({"cidrs": ["10.9.0.0/28"], "use": "Sticky",
                        "nodeSelector": {"matchLabels": {"no": "node"}}});
    api.create(&PostParams::default(), &object("IPPool", &small, &sticky)).await.unwrap();
    api.delete(&small, &Default::default()).await.unwrap();
    api.delete(&name, &Default::default()).await.unwrap();
}
