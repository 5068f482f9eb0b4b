//! What dead nodes leave behind goes only with the proof that a takeover needs.

use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::cilium::CiliumNode;

use crate::support::controller::{Desk, HURRIED, rounds, until, while_at_work};

impl Desk {
    /// A node that is ready.
    pub async fn node(&self, name: &str) {
        let api: Api<Node> = Api::all(self.case.client());
        let node = json!({"metadata": {"name": name}});
        api.create(&Default::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
        crate::support::node::set_ready(&self.case, name, true).await;
    }

    async fn attach(&self, name: &str, node: &str) {
        self.attached(name, node, "u").await;
    }

    /// Attaches a pod of the StickyIP's name.
    pub async fn attached(&self, name: &str, node: &str, uid: &str) {
        let status = json!({"status": {"phase": "Attached", "attachment": {"node": node, "podName": name,
            "podUid": uid, "attachmentId": "c", "since": "2026-01-01T00:00:00Z"}}});
        self.stickies().patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    async fn cilium_node(&self, name: &str) -> CiliumNode {
        Api::<CiliumNode>::all(self.case.client()).get(name).await.unwrap()
    }

    /// A CiliumNode with this specification.
    pub async fn make_cilium_node(&self, name: &str, ipam: Value) {
        let node = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name}, "spec": {"ipam": ipam}});
        let api: Api<CiliumNode> = Api::all(self.case.client());
        api.create(&Default::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
    }
}

#[tokio::test]
async fn keys_and_routes_of_a_dead_node_go_once_the_address_lives_elsewhere() {
    let desk = Desk::take().await;
    for node in ["dead", "alive"] {
        desk.node(node).await;
    }
    let set = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db"});
    desk.stateful_set("db", 9).await;
    let (moved, home) = (desk.address(1), desk.address(2));
    desk.retained("db-0", &moved, set.clone(), json!({})).await;
    desk.retained("db-1", &home, set, json!({})).await;
    desk.attach("db-0", "alive").await;
    desk.attach("db-1", "dead").await;
    desk.pod("db-1", "dead", None, json!({})).await;
    let ns = desk.case.namespace();
    let node = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": "dead"}, "spec": {"ipam": {
        "podCIDRs": ["10.250.0.0/24", format!("{moved}/32")],
        "pool": {moved.as_str(): {"owner": format!("{ns}/db-0")}, home.as_str(): {"owner": format!("{ns}/db-1")}, "10.250.0.9": {}}}}});
    Api::<kube::api::DynamicObject>::all_with(
        desk.case.client(),
        &kube::api::ApiResource::from_gvk(&kube::api::GroupVersionKind::gvk("cilium.io", "v2", "CiliumNode")),
    )
    .create(&Default::default(), &serde_json::from_value(node).unwrap())
    .await
    .unwrap();
    let context = desk.context(&[HURRIED, &["--adopt-running=false"]].concat());
    while_at_work(&context, async {
        until("a look", || async { rounds(&context, "dead_nodes") > 0 }).await;
        assert_eq!(desk.cilium_node("dead").await.spec.ipam.pool.len(), 3, "its node is ready: no proof");
        let taint = json!({"spec": {"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]}});
        let nodes: Api<Node> = Api::all(desk.case.client());
        nodes.patch("dead", &PatchParams::default(), &Patch::Merge(taint)).await.unwrap();
        until("the key's end", || async { desk.cilium_node("dead").await.spec.ipam.pool.len() == 2 }).await;
        let left = desk.cilium_node("dead").await.spec.ipam;
        assert_eq!(left.pod_cidrs, ["10.250.0.0/24"]);
        assert!(left.pool.contains_key(&home) && left.pool.contains_key("10.250.0.9"), "nothing else was \
            touched");
        until("the event", || async { !desk.told("RemovedFromDeadNode").await.is_empty() }).await;
    })
    .await;
}

#[tokio::test]
async fn an_attachment_to_a_node_that_is_gone_ends_when_its_pod_is_gone_too() {
    let desk = Desk::take().await;
    desk.stateful_set("db", 9).await;
    let set = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db"});
    desk.node("slow").await;
    crate::support::node::set_ready(&desk.case, "slow", false).await;
    desk.retained("db-0", &desk.address(1), set.clone(), json!({})).await;
    desk.retained("db-1", &desk.address(2), set, json!({})).await;
    desk.attach("db-0", "vanished").await;
    desk.attach("db-1", "slow").await;
    let context = desk.context(HURRIED);
    let is_attached =
        async |name: &str| desk.stickies().get(name).await.unwrap().status.unwrap().attachment.is_some();
    while_at_work(&context, async {
        until("the detach", || async { !is_attached("db-0").await }).await;
        assert!(is_attached("db-1").await, "a node that is not ready proves nothing");
        until("the event", || async { !desk.told("DetachedFromDeadNode").await.is_empty() }).await;
    })
    .await;
}
