//! What stands before the controller starts: thousands of nodes, pods and bindings, made side by side.

use std::net::Ipv4Addr;
use std::ops::Range;

use futures_util::StreamExt;
use http::Request;
use serde_json::{Value, json};

use super::super::bench::access::Access;
use super::super::bench::case::Case;

/// Threads that make objects, each with a client of its own, and how many requests each has under way.
const THREADS: usize = 2;
const AT_ONCE: usize = 24;
/// Bindings and pods of one node.
const OF_ONE_NODE: usize = 100;
/// Where the selector of the bench finds its pods.
pub const LABEL: &str = "sticky";

/// Does something for every number, side by side.
pub fn for_all<Done: Future<Output = ()>>(
    access: &Access,
    numbers: Range<usize>,
    work: impl Fn(Hand, usize) -> Done + Sync,
) {
    let part = numbers.len().div_ceil(THREADS);
    std::thread::scope(|scope| {
        for from in numbers.clone().step_by(part.max(1)) {
            let (work, until) = (&work, numbers.end.min(from + part));
            scope.spawn(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let hand = Hand(access.client().await);
                    let all = futures_util::stream::iter(from..until);
                    all.for_each_concurrent(AT_ONCE, |number| work(hand.clone(), number)).await;
                });
            });
        }
    });
}

/// Makes objects from plain text: reading each answer into its type would cost more than making it.
#[derive(Clone)]
pub struct Hand(pub kube::Client);

impl Hand {
    /// Creates an object; its uid.
    pub async fn create(&self, path: &str, object: &Value) -> String {
        let made = self.send("POST", path, "application/json", object).await;
        let made: Value = serde_json::from_str(&made).expect("an object");
        made["metadata"]["uid"].as_str().expect("every object has one").to_owned()
    }

    /// Patches an object, or a part of it.
    pub async fn patch(&self, path: &str, patch: &Value) {
        self.send("PATCH", path, "application/merge-patch+json", patch).await;
    }

    async fn send(&self, method: &str, path: &str, kind: &str, body: &Value) -> String {
        let request = Request::builder().method(method).uri(path).header("Content-Type", kind);
        let request = request.body(body.to_string().into_bytes()).expect("a request");
        let answer = self.0.request_text(request).await;
        answer.unwrap_or_else(|why| panic!("cannot {method} {path}: {why}"))
    }
}

/// A namespace of its own, in which pods are admitted.
pub async fn namespace(hand: &Hand, name: &str) {
    hand.create("/api/v1/namespaces", &json!({"metadata": {"name": name}})).await;
    let account = json!({"metadata": {"name": "default"}});
    hand.create(&format!("/api/v1/namespaces/{name}/serviceaccounts"), &account).await;
}

/// The node of a binding.
fn node_of(number: usize) -> String {
    format!("old-{}", number / OF_ONE_NODE)
}

/// The address of a binding: one of its node's block.
fn address_of(number: usize) -> Ipv4Addr {
    let (node, pod) = (number / OF_ONE_NODE, number % OF_ONE_NODE);
    Ipv4Addr::from_bits(0x0b00_0000 + u32::try_from(node * 256 + pod + 2).expect("not so many"))
}

fn block_of(number: usize) -> String {
    let [a, b, c, _] = address_of(number).octets();
    format!("{a}.{b}.{c}.0/24")
}

/// A node with the block that it has had for long, and its CiliumNode.
pub async fn old_node(hand: Hand, number: usize) {
    let first = number * OF_ONE_NODE;
    let (name, block) = (node_of(first), block_of(first));
    let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
    let node =
        json!({"metadata": {"name": name}, "spec": {"podCIDR": block, "podCIDRs": [block]}, "status": ready});
    hand.create("/api/v1/nodes", &node).await;
    cilium_node(&hand, &name, &[&block]).await;
}

/// How many of those nodes there are for so many bindings.
pub fn old_nodes(bindings: usize) -> usize {
    bindings.div_ceil(OF_ONE_NODE)
}

/// A node that has no block yet.
pub async fn new_node(hand: Hand, number: usize) {
    let name = format!("new-{number}");
    hand.create("/api/v1/nodes", &json!({"metadata": {"name": name}})).await;
    cilium_node(&hand, &name, &[]).await;
}

async fn cilium_node(hand: &Hand, name: &str, blocks: &[&str]) {
    let node = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name},
                      "spec": {"ipam": {"podCIDRs": blocks}}});
    hand.create("/apis/cilium.io/v2/ciliumnodes", &node).await;
}

/// A pool of these ranges.
pub async fn pool(hand: &Hand, name: &str, purpose: &str, ranges: &[String]) {
    let pool = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "IPPool", "metadata": {"name": name},
                      "spec": {"cidrs": ranges, "use": purpose, "blockSize": {"ipv4": 24}}});
    hand.create("/apis/sticky-ipam.io/v1alpha1/ippools", &pool).await;
}

/// A pod as the scheduler leaves it; its uid.
pub async fn pod(hand: &Hand, namespace: &str, name: &str, node: &str, set: &str, labels: Value) -> String {
    let owner =
        json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": set, "uid": set, "controller": true});
    let variables: Vec<Value> = (0..12)
        .map(|n| json!({"name": format!("SETTING_{n}"), "value": "a value of middling length"}))
        .collect();
    let container = json!({"name": "main", "image": "registry.example/database:1", "command": ["/bin/serve"], "env": variables});
    let pod = json!({"metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
                     "spec": {"nodeName": node, "containers": [container]}});
    hand.create(&format!("/api/v1/namespaces/{namespace}/pods"), &pod).await
}

/// Has a pod run with this address.
pub async fn run(hand: &Hand, namespace: &str, name: &str, address: Ipv4Addr) {
    let address = address.to_string();
    let ready = json!([{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}]);
    let status =
        json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": ready});
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/status");
    hand.patch(&path, &json!({"status": status})).await;
}

/// A StickyIP with its sealed claim and this status.
async fn binding(hand: &Hand, namespace: &str, name: &str, set: &str, ordinal: usize, of: Of, status: Value) {
    let address = of.address.to_string();
    let workload = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": set});
    let sticky = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP", "metadata": {"name": name},
        "spec": {"addresses": [address], "claimant": {"kind": "Pod", "ordinal": ordinal}, "workload": workload}});
    let stickies = format!("/apis/sticky-ipam.io/v1alpha1/namespaces/{namespace}/stickyips");
    let uid = hand.create(&stickies, &sticky).await;
    let label = of.block.replace('/', "-");
    let mut spec = json!({"address": address, "phase": "Bound", "stickyUid": uid, "block": of.block,
                          "holder": {"namespace": namespace, "name": name}});
    if let Some(home) = of.home {
        spec["homeNode"] = home.into();
    }
    let metadata = json!({"name": address, "labels": {"sticky-ipam.io/block": label}});
    let claim = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "AddressClaim", "metadata": metadata, "spec": spec});
    hand.create("/apis/sticky-ipam.io/v1alpha1/addressclaims", &claim).await;
    hand.patch(&format!("{stickies}/{name}/status"), &json!({"status": status})).await;
}

/// Where a binding's address is from.
struct Of {
    address: Ipv4Addr,
    block: String,
    home: Option<String>,
}

/// A pod that runs, with its binding, as the plugin's ADD leaves them.
pub async fn bound(hand: Hand, namespace: &str, number: usize) {
    let (name, node, address) = (format!("db-{number}"), node_of(number), address_of(number));
    let uid = pod(&hand, namespace, &name, &node, "db", json!({LABEL: "yes", "app": "db"})).await;
    run(&hand, namespace, &name, address).await;
    let since = "2026-01-01T00:00:00Z";
    let attachment = json!({"node": node, "podName": name, "podUid": uid, "containerId": format!("{number:064x}"), "since": since});
    let handover = json!({"from": "", "to": node, "reason": "the address was free", "at": since});
    let status =
        json!({"phase": "Attached", "lastSeen": since, "attachment": attachment, "handovers": [handover]});
    let of = Of { address, block: block_of(number), home: Some(node_of(number)) };
    binding(&hand, namespace, &name, "db", number, of, status).await;
}

/// A binding whose pod is gone, of a workload; its address is of a Sticky pool.
pub async fn retained(
    hand: Hand,
    namespace: &str,
    set: &str,
    ordinal: usize,
    address: Ipv4Addr,
    range: &str,
) {
    let status = json!({"phase": "Retained", "lastSeen": "2026-01-01T00:00:00Z"});
    let of = Of { address, block: range.to_owned(), home: None };
    binding(&hand, namespace, &format!("{set}-{ordinal}"), set, ordinal, of, status).await;
}

/// A StatefulSet. Nobody runs its pods.
pub async fn stateful_set(hand: &Hand, namespace: &str, name: &str, replicas: usize) {
    let template = json!({"metadata": {"labels": {"set": name}}, "spec": {"containers": [{"name": "main", "image": "none"}]}});
    let set = json!({"metadata": {"name": name}, "spec": {"replicas": replicas, "serviceName": name,
                     "selector": {"matchLabels": {"set": name}}, "template": template}});
    hand.create(&format!("/apis/apps/v1/namespaces/{namespace}/statefulsets"), &set).await;
}

/// The administrator's hand, of the calling runtime.
pub fn hand(case: &Case<'_>) -> Hand {
    Hand(case.client())
}
