//! What stands before the controller starts: thousands of nodes, pods and bindings, made side by side.

use std::net::Ipv4Addr;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use super::writer::Hand;
use crate::support::api_server::access::Access;

/// Hands that make objects side by side.
const HANDS: usize = 32;
/// Bindings and pods of one node.
const OF_ONE_NODE: usize = 100;
/// Where the selector of the bench finds its pods.
pub const LABEL: &str = "sticky";

/// Does something for every number, side by side.
pub fn for_all(access: &Access, numbers: Range<usize>, work: impl Fn(&mut Hand, usize) + Sync) {
    let next = AtomicUsize::new(numbers.start);
    let hand = Hand::of(access);
    std::thread::scope(|scope| {
        for _ in 0..HANDS.min(numbers.len()) {
            let (mut hand, work, next) = (hand.another(), &work, &next);
            scope.spawn(move || {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= numbers.end {
                        return;
                    }
                    work(&mut hand, number);
                }
            });
        }
    });
}

/// A namespace of its own, in which pods are admitted.
pub fn namespace(hand: &mut Hand, name: &str) {
    hand.create("/api/v1/namespaces", &json!({"metadata": {"name": name}}));
    let account = json!({"metadata": {"name": "default"}});
    hand.create(&format!("/api/v1/namespaces/{name}/serviceaccounts"), &account);
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
pub fn old_node(hand: &mut Hand, number: usize) {
    let first = number * OF_ONE_NODE;
    let (name, block) = (node_of(first), block_of(first));
    let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
    let node =
        json!({"metadata": {"name": name}, "spec": {"podCIDR": block, "podCIDRs": [block]}, "status": ready});
    hand.create("/api/v1/nodes", &node);
    cilium_node(hand, &name, &[&block]);
}

/// How many of those nodes there are for so many bindings.
pub fn old_nodes(bindings: usize) -> usize {
    bindings.div_ceil(OF_ONE_NODE)
}

/// A node that has no block yet.
pub fn new_node(hand: &mut Hand, number: usize) {
    let name = format!("new-{number}");
    hand.create("/api/v1/nodes", &json!({"metadata": {"name": name}}));
    cilium_node(hand, &name, &[]);
}

fn cilium_node(hand: &mut Hand, name: &str, blocks: &[&str]) {
    let node = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name},
                      "spec": {"ipam": {"podCIDRs": blocks}}});
    hand.create("/apis/cilium.io/v2/ciliumnodes", &node);
}

/// A pool of these ranges.
pub fn pool(hand: &mut Hand, name: &str, purpose: &str, ranges: &[String]) {
    let pool = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "IPPool", "metadata": {"name": name},
                      "spec": {"cidrs": ranges, "use": purpose, "blockSize": {"ipv4": 24}}});
    hand.create("/apis/sticky-ipam.io/v1alpha1/ippools", &pool);
}

/// A pod as the scheduler leaves it; its uid.
pub fn pod(hand: &mut Hand, namespace: &str, name: &str, node: &str, set: &str, labels: Value) -> String {
    let owner =
        json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": set, "uid": set, "controller": true});
    let variables: Vec<Value> = (0..12)
        .map(|n| json!({"name": format!("SETTING_{n}"), "value": "a value of middling length"}))
        .collect();
    let container = json!({"name": "main", "image": "registry.example/database:1", "command": ["/bin/serve"], "env": variables});
    let pod = json!({"metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
                     "spec": {"nodeName": node, "containers": [container]}});
    hand.create(&format!("/api/v1/namespaces/{namespace}/pods"), &pod)
}

/// Has a pod run with this address.
pub fn run(hand: &mut Hand, namespace: &str, name: &str, address: Ipv4Addr) {
    let address = address.to_string();
    let ready = json!([{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}]);
    let status =
        json!({"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": ready});
    let path = format!("/api/v1/namespaces/{namespace}/pods/{name}/status");
    hand.patch(&path, &json!({"status": status}));
}

/// A StickyIP with its sealed claim and this status.
fn binding(hand: &mut Hand, namespace: &str, name: &str, set: &str, ordinal: usize, of: Of, status: Value) {
    let address = of.address.to_string();
    let workload = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": set});
    let sticky = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP", "metadata": {"name": name},
        "spec": {"addresses": [address], "claimant": {"kind": "Pod", "ordinal": ordinal}, "workload": workload}});
    let stickies = format!("/apis/sticky-ipam.io/v1alpha1/namespaces/{namespace}/stickyips");
    let uid = hand.create(&stickies, &sticky);
    let label = of.block.replace('/', "-");
    let mut spec = json!({"address": address, "phase": "Bound", "stickyUid": uid, "block": of.block,
                          "stickyRef": {"namespace": namespace, "name": name}});
    if let Some(home) = of.home {
        spec["homeNode"] = home.into();
    }
    let metadata = json!({"name": address, "labels": {"sticky-ipam.io/block": label}});
    let claim = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "AddressClaim", "metadata": metadata, "spec": spec});
    hand.create("/apis/sticky-ipam.io/v1alpha1/addressclaims", &claim);
    hand.patch(&format!("{stickies}/{name}/status"), &json!({"status": status}));
}

/// Where a binding's address is from.
struct Of {
    address: Ipv4Addr,
    block: String,
    home: Option<String>,
}

/// A pod that runs, with its binding, as the plugin's ADD leaves them.
pub fn bound(hand: &mut Hand, namespace: &str, number: usize) {
    let (name, node, address) = (format!("db-{number}"), node_of(number), address_of(number));
    let uid = pod(hand, namespace, &name, &node, "db", json!({LABEL: "yes", "app": "db"}));
    run(hand, namespace, &name, address);
    let since = "2026-01-01T00:00:00Z";
    let attachment = json!({"node": node, "podName": name, "podUid": uid, "attachmentId": format!("{number:064x}"), "since": since});
    let handover = json!({"from": "", "to": node, "reason": "the address was free", "at": since});
    let status =
        json!({"phase": "Attached", "lastSeen": since, "attachment": attachment, "handovers": [handover]});
    let of = Of { address, block: block_of(number), home: Some(node_of(number)) };
    binding(hand, namespace, &name, "db", number, of, status);
}

/// A binding whose pod is gone, of a workload; its address is of a Sticky pool.
pub fn retained(hand: &mut Hand, namespace: &str, set: &str, ordinal: usize, address: Ipv4Addr, range: &str) {
    let status = json!({"phase": "Retained", "lastSeen": "2026-01-01T00:00:00Z"});
    let of = Of { address, block: range.to_owned(), home: None };
    binding(hand, namespace, &format!("{set}-{ordinal}"), set, ordinal, of, status);
}

/// A StatefulSet. Nobody runs its pods.
pub fn stateful_set(hand: &mut Hand, namespace: &str, name: &str, replicas: usize) {
    let template = json!({"metadata": {"labels": {"set": name}}, "spec": {"containers": [{"name": "main", "image": "none"}]}});
    let set = json!({"metadata": {"name": name}, "spec": {"replicas": replicas, "serviceName": name,
                     "selector": {"matchLabels": {"set": name}}, "template": template}});
    hand.create(&format!("/apis/apps/v1/namespaces/{namespace}/statefulsets"), &set);
}
