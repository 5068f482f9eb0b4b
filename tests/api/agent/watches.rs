//! The agent with its watches: readiness, a watch that lags, a server that has forgotten where the watches
//! were, tokens that are refused, an object that cannot be read.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, Node};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{Api, DynamicObject, ListParams, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::json;
use sticky_ipam::agent::flags::AgentSettings;
use sticky_ipam::runtime::flags::ClientFlags;

use crate::support::agent::Loose;
use crate::support::agent::{attached, case, parts};
use crate::support::agent::{decided, is_ready, loose, page};
use crate::support::api_server::case::Case;
use crate::support::api_server::{ApiServer, Weather, comes_true};
use crate::support::node::{Sandbox, TestNode, assert_in_step, delete_pod, sandbox, stickies, sticky_pod};

const SOON: Duration = Duration::from_secs(60);

async fn pod(case: &Case<'_>, name: &str, node: &TestNode) -> Sandbox {
    sandbox(&sticky_pod(case, name, &node.name, json!({})).await)
}

#[tokio::test]
async fn an_agent_becomes_ready_prepares_on_an_event_and_shows_what_it_did() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let (settings, address) = loose(&node, &case.agent(&node.name).await, "crd");
    let _agent = Loose::start(settings);
    assert!(comes_true(SOON, || is_ready(address)).await);
    let first = pod(&case, "db-0", &node).await;
    assert!(comes_true(SOON, || async { decided(&node, &first.uid) }).await);
    let page = tokio::task::spawn_blocking(move || page(address, "/metrics").unwrap()).await.unwrap();
    for part in [
        "decisions_prepared_total{kind=\"sticky\"} 1",
        "pool_addresses{family=\"IPv4\",state=\"Free\"} 8",
        "api_requests_total{method=\"GET\"}",
        "last_success_timestamp_seconds",
    ] {
        assert!(page.contains(part), "{part} is not in {page}");
    }
    let added = node.add(&first).await.unwrap();
    assert_eq!(stickies(&case).await[0].spec.addresses, [added]);
}

#[tokio::test]
async fn an_agent_whose_watch_lags_releases_nothing_that_another_node_has_by_now() {
    let case = case().await;
    let [one, two, ..] = parts(&case);
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    let proxy = case.proxy();
    let (settings, address) = loose(&n1, &case.agent(&n1.name).await.through(&proxy), "delegated");
    let _agent = Loose::start(settings);
    assert!(comes_true(SOON, || is_ready(address)).await);
    let first = pod(&case, "db-0", &n1).await;
    assert!(comes_true(SOON, || async { decided(&n1, &first.uid) }).await);
    let own = stickies(&case).await[0].spec.addresses[0];
    proxy.set(Weather::AnswersHeld);
    // The taint says that the node is off; its pod is created again on another node.
    let nodes: Api<Node> = Api::all(case.client());
    let taint =
        json!({"spec": {"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]}});
    nodes.patch(&n1.name, &PatchParams::default(), &Patch::Merge(taint)).await.unwrap();
    let moved = pod(&case, "db-0", &n2).await;
    assert_eq!(n2.add(&moved).await.unwrap(), own);
    assert!(decided(&n1, &first.uid), "the agent knows nothing of it yet");
    proxy.heal();
    // Counted once everything that belongs to it is done.
    let withdrawn = comes_true(SOON, || async {
        let asked = tokio::task::spawn_blocking(move || page(address, "/metrics")).await.unwrap();
        asked.is_some_and(|text| text.contains("decisions_withdrawn_total 1"))
    });
    assert!(withdrawn.await && !decided(&n1, &first.uid));
    assert_eq!(attached(&case).await, Some(moved.container.clone()));
    assert_in_step(&case, &[&n1, &n2]).await;
}

#[tokio::test]
async fn what_changed_while_no_watch_ran_is_listed_again_when_the_server_is_back() {
    let server = ApiServer::start().await;
    server.install_our_kinds().await;
    server.install_cilium_kinds().await;
    let case = server.case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let proxy = case.proxy();
    let (settings, address) = loose(&node, &case.agent(&node.name).await.through(&proxy), "delegated");
    let _agent = Loose::start(settings);
    assert!(comes_true(SOON, || is_ready(address)).await);
    let before = pod(&case, "db-0", &node).await;
    assert!(comes_true(SOON, || async { decided(&node, &before.uid) }).await);
    proxy.set(Weather::Reset);
    // While nothing watches, one pod ends and another starts; a server that restarts has no old events.
    delete_pod(&case, "db-0").await;
    let after = pod(&case, "db-1", &node).await;
    server.restart().await;
    proxy.heal();
    assert!(comes_true(SOON, || async { decided(&node, &after.uid) && !decided(&node, &before.uid) }).await);
    // The decision goes before the attachment does.
    let detached = comes_true(SOON, || async {
        let mut all = stickies(&case).await.into_iter();
        let gone = all.find(|sticky| sticky.metadata.name.as_deref() == Some("db-0"));
        gone.unwrap().status.unwrap().attachment.is_none()
    });
    assert!(detached.await);
}

#[tokio::test]
async fn refused_credentials_are_read_again_until_they_are_good() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let file = node.folder().join("agent.kubeconfig");
    std::fs::copy(case.forged_token().kubeconfig(), &file).unwrap();
    let good = case.agent(&node.name).await;
    let (settings, address) = loose(&node, &good, "delegated");
    let client = ClientFlags { kubeconfig: Some(file.clone()) };
    let _agent = Loose::start(AgentSettings { client, ..settings });
    let refused = comes_true(SOON, || async {
        let asked = tokio::task::spawn_blocking(move || page(address, "/metrics")).await.unwrap();
        // Of a watch, or of the first request of the agent, which does not wait for the watches.
        let refused = |text: String| {
            ["watch", "seed"]
                .iter()
                .any(|action| text.contains(&format!("errors_total{{action=\"{action}\"}}")))
        };
        asked.is_some_and(refused)
    });
    assert!(refused.await);
    assert!(!is_ready(address).await);
    std::fs::copy(good.kubeconfig(), &file).unwrap();
    assert!(comes_true(SOON, || is_ready(address)).await);
}

#[tokio::test]
async fn an_object_that_cannot_be_read_is_reported_and_ends_no_watch() {
    let server = ApiServer::start().await;
    server.install_our_kinds().await;
    server.install_cilium_kinds().await;
    let case = server.case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    // As a newer version, or a schema that was not there yet, would let one pass.
    let kinds: Api<CustomResourceDefinition> = Api::all(case.client());
    let mut kind = kinds.get("addressclaims.sticky-ipam.io").await.unwrap();
    let schema = &mut kind.spec.versions[0].schema.as_mut().unwrap().open_api_v3_schema;
    *schema = Some(
        serde_json::from_value(json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true,
            "properties": {"spec": {"type": "object", "x-kubernetes-preserve-unknown-fields": true,
                "properties": {"homeNode": {"type": "string"}, "stickyRef": {"type": "object",
                    "properties": {"namespace": {"type": "string"}, "name": {"type": "string"}}}}}}}))
        .unwrap(),
    );
    kind.metadata.managed_fields = None;
    kinds.replace("addressclaims.sticky-ipam.io", &PostParams::default(), &kind).await.unwrap();
    let gvk = GroupVersionKind::gvk("sticky-ipam.io", "v1alpha1", "AddressClaim");
    let broken: Api<DynamicObject> = Api::all_with(case.client(), &ApiResource::from_gvk(&gvk));
    let claim = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "AddressClaim",
        "metadata": {"name": "10.9.9.9"}, "spec": {"address": "ten", "homeNode": node.name, "phase": "Odd"}});
    let claim: DynamicObject = serde_json::from_value(claim).unwrap();
    let created = comes_true(SOON, || async {
        broken.create(&PostParams::default(), &claim).await.is_ok() || broken.get("10.9.9.9").await.is_ok()
    });
    assert!(created.await, "the loosened schema lets it pass");
    let (settings, address) = loose(&node, &case.agent(&node.name).await, "delegated");
    let _agent = Loose::start(settings);
    assert!(comes_true(SOON, || is_ready(address)).await);
    let first = pod(&case, "db-0", &node).await;
    assert!(comes_true(SOON, || async { decided(&node, &first.uid) }).await);
    let events: Api<Event> = Api::namespaced(case.client(), "default");
    let reported = comes_true(SOON, || async {
        let all = events.list(&ListParams::default()).await.unwrap().items;
        all.iter().any(|event| event.involved_object.name.as_deref() == Some("10.9.9.9"))
    });
    assert!(reported.await);
}
