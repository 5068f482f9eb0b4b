//! Blocks for nodes that join and leave, and from the pool that selects a node.

use serde_json::{Value, json};

use super::{is_free, told};
use crate::support::lab::api::{Seen, named};
use crate::support::lab::reach::{self, From, NODES};
use crate::support::lab::stage::Stage;
use crate::support::lab::workloads::{pod, spec, stateful_set, sticky};
use crate::support::lab::{CONTROLLER_FLAGS, eventually};

/// The node that joins. A real one, with kubelet, containerd, Cilium and our agent.
const NODE: &str = "node-3";
const BLOCK: &str = "10.243.0.0/24";

/// The node has left when the test ends, also one that fails, and the others take pods.
struct Joined<'a>(&'a Stage);

impl Drop for Joined<'_> {
    fn drop(&mut self) {
        let _ = self.0.lab.attempt(&["kubectl", "uncordon", NODES[0], NODES[1]]);
        let _ = self.0.lab.attempt(&["remove-node", NODE]);
        let _ = self.0.lab.attempt(&["kubectl", "delete", "ippool", GREEN.0, "--ignore-not-found"]);
    }
}

fn pod_cidrs(stage: &Stage, node: &str) -> Vec<String> {
    let node = stage.api.get(named("cilium.io/v2", "CiliumNode", "", node)).unwrap_or_default();
    let all = node["spec"]["ipam"]["podCIDRs"].as_array().cloned().unwrap_or_default();
    all.iter().filter_map(Value::as_str).map(str::to_owned).collect()
}

/// The node that a block's Lease names.
fn locked_for(stage: &Stage, block: &str) -> Option<String> {
    let name = format!("sticky-ipam-block-{}", block.replace('/', "-"));
    let lease = stage.api.get(named("coordination.k8s.io/v1", "Lease", "sticky-ipam-blocks", &name))?;
    Some(lease["spec"]["holderIdentity"].as_str()?.to_owned())
}

fn becomes_locked_for(stage: &Stage, block: &str, node: Option<&str>) {
    eventually(&format!("the Lease of {block} to be of {node:?}"), || match locked_for(stage, block) {
        now if now.as_deref() == node => Ok(()),
        now => Err(format!("{now:?}")),
    });
}

pub fn come_and_go(stage: &Stage) {
    let namespace = "joins";
    stage.lab.namespace(namespace);
    let _leaves = Joined(stage);
    stage.lab.must(&["add-node", NODE]);
    reach::start_clients(stage, namespace);
    assert_eq!(pod_cidrs(stage, NODE), [BLOCK], "the block of its CiliumNode");
    becomes_locked_for(stage, BLOCK, Some(NODE));
    told(stage, "default", "Node", NODE, "BlockAssigned");

    // A sticky pod starts there, with an address of the block.
    stage.lab.kubectl(&["cordon", NODES[0], NODES[1]]);
    stage.api.create(stateful_set(namespace, "guest", 1, spec(None)));
    let there = stage.api.ready(namespace, "guest-0");
    stage.lab.kubectl(&["uncordon", NODES[0], NODES[1]]);
    assert_eq!(there.node, NODE);
    assert!(there.address().starts_with("10.243.0."), "{there:?}");
    stage.lab.answers(NODES[0], there.address());

    // The node leaves; the address lives on elsewhere, and its block stays locked for as long.
    stage.lab.must(&["remove-node", NODE]);
    stage.api.delete_pod(namespace, "guest-0", Some(0));
    let moved: Seen = stage.api.ready_after(namespace, "guest-0", &there.uid);
    assert_eq!(moved.addresses, there.addresses);
    assert!(NODES.contains(&&*moved.node), "{moved:?}");
    reach::soon(stage, namespace, &reach::everyone(), moved.address());
    assert_eq!(locked_for(stage, BLOCK).as_deref(), Some(NODE), "something sticky is in it");

    stage.api.delete(named("apps/v1", "StatefulSet", namespace, "guest"));
    is_free(stage, there.address());
    becomes_locked_for(stage, BLOCK, None);
    stage.lab.delete_namespace(namespace);
}

/// Name, range, and the first block of it: for the node that joins.
const GREEN: (&str, &str, &str) = ("lab-green", "10.252.0.0/16", "10.252.0.0/24");

/// A pool for the nodes whose label names it.
fn selecting_pool(name: &str, range: &str) -> Value {
    json!({
        "apiVersion": "sticky-ipam.io/v1alpha1", "kind": "IPPool", "metadata": {"name": name},
        "spec": {"use": "NodeBlocks", "cidrs": [range], "blockSize": {"ipv4": 24}, "priority": 10,
                 "nodeSelector": {"matchLabels": {"lab-pool": name}}},
    })
}

/// A node joins with the label of a pool: its first block is of that pool, although the one behind all pools
/// has free ones. Its Node names no range, because such a one would be its block, if only some pool that
/// serves the node has it.
pub fn first_of_pool(stage: &Stage) {
    let namespace = "first";
    let (pool, range, block) = GREEN;
    stage.lab.namespace(namespace);
    let _leaves = Joined(stage);
    stage.api.create(selecting_pool(pool, range));
    stage.lab.must(&["add-node", NODE, "--without-range", &format!("lab-pool={pool}")]);
    eventually(&format!("a block of {NODE}"), || match pod_cidrs(stage, NODE) {
        none if none.is_empty() => Err("none".to_owned()),
        some => Ok(some),
    });
    becomes_locked_for(stage, block, Some(NODE));
    assert_eq!(pod_cidrs(stage, NODE), [block], "its first block, and no other");
    // Pods there have addresses of it, and are reached.
    stage.api.create(pod(namespace, "guest", json!({}), json!({}), spec(Some(NODE))));
    let guest = stage.api.ready(namespace, "guest");
    assert!(guest.address().starts_with("10.252.0."), "{guest:?}");
    stage.lab.answers(NODES[0], guest.address());
    stage.lab.answers(NODE, guest.address());

    // It leaves with its block: under the same name it may join again without.
    stage.lab.must(&["remove-node", NODE]);
    stage.api.delete_pod(namespace, "guest", Some(0));
    becomes_locked_for(stage, block, None);
    stage.lab.delete_namespace(namespace);
}

/// Labels, pools and flags as before when the test ends.
struct Pooled<'a>(&'a Stage);

impl Drop for Pooled<'_> {
    fn drop(&mut self) {
        for (node, pool) in NODES.into_iter().zip(POOLS) {
            let _ = self.0.lab.attempt(&["kubectl", "label", "node", node, "lab-pool-"]);
            let _ = self.0.lab.attempt(&["kubectl", "delete", "ippool", pool.0, "--ignore-not-found"]);
        }
        let flags: Vec<&str> = ["controllers"].into_iter().chain(CONTROLLER_FLAGS).collect();
        let _ = self.0.lab.attempt(&flags);
    }
}

/// Name, range, and the first block of it.
const POOLS: [(&str, &str, &str); 2] =
    [("lab-red", "10.250.0.0/16", "10.250.0.0/24"), ("lab-blue", "10.251.0.0/16", "10.251.0.0/24")];

/// Both nodes run low, by a mark that is higher than what a block has, and each gets one block more: of its
/// own pool.
pub fn two_pools(stage: &Stage) {
    let namespace = "pools";
    stage.lab.namespace(namespace);
    let _as_before = Pooled(stage);
    for (node, (pool, range, _)) in NODES.into_iter().zip(POOLS) {
        stage.lab.kubectl(&["label", "node", node, &format!("lab-pool={pool}")]);
        stage.api.create(selecting_pool(pool, range));
    }
    let before: Vec<Vec<String>> = NODES.into_iter().map(|node| pod_cidrs(stage, node)).collect();
    // 254 addresses of one block are fewer; those of two are not.
    let flags: Vec<&str> =
        ["controllers"].into_iter().chain(CONTROLLER_FLAGS).chain(["--block-min-free=300"]).collect();
    stage.lab.must(&flags);
    for ((node, (pool, _, block)), before) in NODES.into_iter().zip(POOLS).zip(before) {
        let expected: Vec<String> = before.into_iter().chain([block.to_owned()]).collect();
        eventually(&format!("the block of {pool} on {node}"), || match pod_cidrs(stage, node) {
            now if now == expected => Ok(()),
            now => Err(format!("{now:?}")),
        });
        becomes_locked_for(stage, block, Some(node));
        eventually(&format!("the status of {pool}"), || {
            let pool =
                stage.api.get(named("sticky-ipam.io/v1alpha1", "IPPool", "", pool)).unwrap_or_default();
            if pool["status"]["allocated"] == json!(1) { Ok(()) } else { Err(pool["status"].to_string()) }
        });
    }
    // An address of the further block is as good as one of the first.
    reach::start_clients(stage, namespace);
    let pin = json!({"sticky-ipam.io/ips": "10.250.0.77"});
    stage.api.create(pod(namespace, "pinned", sticky("pinned"), pin, spec(Some(NODES[0]))));
    let pinned = stage.api.ready(namespace, "pinned");
    assert_eq!(pinned.address(), "10.250.0.77");
    let everyone: Vec<From<'_>> = reach::everyone();
    reach::soon(stage, namespace, &everyone, pinned.address());
    stage.lab.delete_namespace(namespace);
}
