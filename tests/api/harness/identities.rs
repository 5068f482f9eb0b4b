//! The bench hands out what it promises: namespaces, identities, kinds.

use k8s_openapi::api::authentication::v1::SelfSubjectReview;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use kube::api::{Api, DynamicObject, ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::core::{ApiResource, GroupVersionKind};
use serde_json::json;

use crate::support::api_server::ApiServer;

#[tokio::test]
async fn the_administrator_creates_a_pod_bound_to_a_node() {
    let case = ApiServer::shared().await.case().await;
    let created = case.pod("mysql-0", &[("app", "mysql")], Some("node-1")).await;
    let pods: Api<Pod> = Api::namespaced(case.admin().client().await, case.namespace());
    let read = pods.get("mysql-0").await.unwrap();
    assert_eq!(read.metadata.uid, created.metadata.uid);
    assert_eq!(read.spec.unwrap().node_name.as_deref(), Some("node-1"));
}

#[tokio::test]
async fn nobody_is_known_and_refused() {
    let case = ApiServer::shared().await.case().await;
    let client = case.nobody().client().await;
    assert_eq!(who_is(&client).await.0, "nobody");
    let pods: Api<Pod> = Api::namespaced(client, case.namespace());
    assert_eq!(code(pods.list(&ListParams::default()).await), 403);
}

#[tokio::test]
async fn an_agent_is_a_service_account_whose_token_names_its_node() {
    let case = ApiServer::shared().await.case().await;
    let node = case.unique("node");
    let client = case.agent(&node).await.client().await;
    let (name, extra) = who_is(&client).await;
    assert_eq!(name, format!("system:serviceaccount:{}:agent-{node}", case.namespace()));
    assert_eq!(extra["authentication.kubernetes.io/node-name"], json!([node]));
    let pods: Api<Pod> = Api::namespaced(client, case.namespace());
    pods.list(&ListParams::default()).await.unwrap();
    assert_eq!(code(pods.delete("any", &Default::default()).await), 403);
}

#[tokio::test]
async fn an_agent_writes_its_own_cilium_node_and_no_other() {
    let server = ApiServer::shared().await;
    server.install_cilium_kinds().await;
    let case = server.case().await;
    let (own, other) = (case.unique("own"), case.unique("other"));
    let admin = cilium_nodes(case.client());
    for name in [&own, &other] {
        let node = json!({
            "apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name},
            "spec": {"ipam": {"pool": {}}},
        });
        admin.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
    }
    let agent = cilium_nodes(case.agent(&own).await.client().await);
    let address = case.range().addr().to_string();
    let patch =
        Patch::Merge(json!({"spec": {"ipam": {"pool": {address.clone(): {"owner": "default/mysql-0"}}}}}));
    agent.patch(&own, &PatchParams::default(), &patch).await.unwrap();
    assert_eq!(code(agent.patch(&other, &PatchParams::default(), &patch).await), 403);
    let seen = admin.get(&own).await.unwrap();
    assert_eq!(seen.data["spec"]["ipam"]["pool"][&address]["owner"], "default/mysql-0");
}

#[tokio::test]
async fn the_controller_reads_everything_and_deletes_no_pod() {
    let case = ApiServer::shared().await.case().await;
    let pods: Api<Pod> = Api::namespaced(case.controller().await.client().await, case.namespace());
    pods.list(&ListParams::default()).await.unwrap();
    assert_eq!(code(pods.delete("any", &Default::default()).await), 403);
}

#[tokio::test]
async fn the_controller_writes_its_own_lease_and_those_of_blocks_and_no_other() {
    let case = ApiServer::shared().await.case().await;
    let client = case.controller().await.client().await;
    let lease = |name: &str| Lease {
        metadata: ObjectMeta { name: Some(name.into()), ..Default::default() },
        ..Default::default()
    };
    let make = PostParams::default();
    let patch = Patch::Merge(json!({"spec": {"holderIdentity": "me"}}));
    let params = PatchParams::default();
    let everybodys: Api<Lease> = Api::namespaced(case.client(), case.namespace());
    everybodys.create(&make, &lease("kube-scheduler")).await.unwrap();
    let beside: Api<Lease> = Api::namespaced(client.clone(), case.namespace());
    let own = beside.create(&make, &lease("cilium-ipam-leader")).await.unwrap();
    beside.replace("cilium-ipam-leader", &make, &own).await.unwrap();
    assert_eq!(code(beside.get("kube-scheduler").await), 403);
    assert_eq!(code(beside.patch("kube-scheduler", &params, &patch).await), 403);
    assert_eq!(code(beside.delete("kube-scheduler", &Default::default()).await), 403);
    assert_eq!(code(beside.list(&ListParams::default()).await), 403);
    let blocks: Api<Lease> = Api::namespaced(client, &case.block_namespace());
    blocks.create(&make, &lease("sticky-ipam-block-10.1.2.0-24")).await.unwrap();
    blocks.patch("sticky-ipam-block-10.1.2.0-24", &params, &patch).await.unwrap();
    assert_eq!(blocks.list(&ListParams::default()).await.unwrap().items.len(), 1);
    blocks.delete("sticky-ipam-block-10.1.2.0-24", &Default::default()).await.unwrap();
}

#[tokio::test]
async fn a_token_of_a_deleted_account_is_refused() {
    let case = ApiServer::shared().await.case().await;
    let access = case.service_account("short-lived", Vec::new()).await;
    who_is(&access.client().await).await;
    let accounts: Api<k8s_openapi::api::core::v1::ServiceAccount> =
        Api::namespaced(case.client(), case.namespace());
    accounts.delete("short-lived", &Default::default()).await.unwrap();
    let client = access.client().await;
    let refused = crate::support::api_server::comes_true(std::time::Duration::from_secs(30), || async {
        let review: Api<SelfSubjectReview> = Api::all(client.clone());
        matches!(review.create(&PostParams::default(), &Default::default()).await,
            Err(kube::Error::Api(status)) if status.code == 401)
    });
    assert!(refused.await, "the token outlives its account");
}

#[tokio::test]
async fn two_tests_share_a_server_and_nothing_else() {
    let server = ApiServer::shared().await;
    let (one, two) = (server.case().await, server.case().await);
    assert_ne!(one.namespace(), two.namespace());
    assert_ne!(one.unique("node"), two.unique("node"));
    assert!(!one.range().contains(&two.range()) && !two.range().contains(&one.range()));
    one.pod("mine", &[], None).await;
    let seen: Api<Pod> = Api::namespaced(two.client(), two.namespace());
    assert_eq!(seen.list(&ListParams::default()).await.unwrap().items, []);
}

#[tokio::test]
async fn a_kubeconfig_is_private_and_names_the_namespace() {
    use std::os::unix::fs::PermissionsExt;
    let case = ApiServer::shared().await.case().await;
    let path = case.admin().kubeconfig();
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    let client = case.admin().client().await;
    assert_eq!(client.default_namespace(), case.namespace());
    // The default namespace is not only written down, requests go there.
    let maps: Api<ConfigMap> = Api::default_namespaced(client);
    let map = ConfigMap {
        metadata: kube::core::ObjectMeta { name: Some("here".into()), ..Default::default() },
        ..Default::default()
    };
    let made = maps.create(&PostParams::default(), &map).await.unwrap();
    assert_eq!(made.metadata.namespace.as_deref(), Some(case.namespace()));
}

fn cilium_nodes(client: kube::Client) -> Api<DynamicObject> {
    Api::all_with(client, &ApiResource::from_gvk(&GroupVersionKind::gvk("cilium.io", "v2", "CiliumNode")))
}

async fn who_is(client: &kube::Client) -> (String, serde_json::Value) {
    let review: Api<SelfSubjectReview> = Api::all(client.clone());
    let answer = review.create(&PostParams::default(), &SelfSubjectReview::default()).await.unwrap();
    let user = answer.status.unwrap().user_info.unwrap();
    (user.username.unwrap(), json!(user.extra))
}

fn code<T: std::fmt::Debug>(answer: Result<T, kube::Error>) -> u16 {
    match answer {
        Err(kube::Error::Api(status)) => status.code,
        other => panic!("a refusal was expected, not {other:?}"),
    }
}
