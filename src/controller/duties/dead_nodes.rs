//! What dead nodes leave behind: attachments that no agent will end, and pool entries and routes of addresses
//! that moved. Must never act without the proof that a takeover needs: the Node deleted or tainted
//! out-of-service, by a live read.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, Patch};

use crate::cluster::api::client::ApiError;
use crate::cluster::cilium::pool::{NodePatch, read_node};
use crate::cluster::events;
use crate::cluster::objects::cilium::CiliumNode;
use crate::cluster::objects::{Attachment, StickyIP};
use crate::cluster::pod;
use crate::cluster::protocol::read::read_sticky;
use crate::cluster::writer::apply::{Applied, patch_params};
use crate::cluster::writer::write::{Precondition, Write};
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::index::{indexed::IndexKeys, objects::sticky_key_of};
use crate::controller::{context::Context, duties::record_event, queue::Key};
use crate::names::StickyKey;
use crate::policy::handover::{OldPod, Takeover};

const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(5);
/// While a pod of a dead node is still there, or an address is not yet elsewhere.
const RETRY_UNTIL_GONE: Duration = Duration::from_secs(30);

/// It remembers nothing.
#[derive(Debug, Default)]
pub(crate) struct DeadNodes {}

/// What could be done about a dead node, as the index has it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Cleanup {
    /// Detach what is attached to a pod of it.
    Detach { sticky: String, node: String },
    /// Take an address out of its CiliumNode.
    Unpublish { node: String, address: IpAddr, sticky: String },
}

fn plan(index: &ClusterIndex) -> Vec<Cleanup> {
    let attached = || {
        let all = index.stickies.iter();
        all.filter_map(|(name, object)| Some((name, object, &attachment_of(object)?.node)))
    };
    let stuck =
        attached().filter(|(_, object, node)| index.is_dead_node(node) && index.pod_of(object).is_none());
    let mut cleanups: Vec<Cleanup> =
        stuck.map(|(name, _, node)| Cleanup::Detach { sticky: name.clone(), node: node.clone() }).collect();
    let mut dead = index.cilium_nodes.iter().filter(|(name, _)| index.is_dead_node(name)).peekable();
    if dead.peek().is_none() {
        return cleanups;
    }
    let lives = attached().flat_map(|(name, object, node)| {
        object.spec.addresses.iter().map(move |address| (*address, (name, node)))
    });
    let lives: BTreeMap<IpAddr, (&String, &String)> = lives.collect();
    for (node, seen) in dead {
        // What it publishes: owned pool entries, and routes of single addresses.
        for address in BTreeSet::from_iter(seen.index_keys()) {
            if let Some((sticky, _)) = lives.get(&address).filter(|(_, lives_on)| *lives_on != node) {
                cleanups.push(Cleanup::Unpublish { node: node.clone(), address, sticky: (*sticky).clone() });
            }
        }
    }
    cleanups
}

fn attachment_of(object: &StickyIP) -> Option<&Attachment> {
    object.status.as_ref()?.attachment.as_ref()
}

impl Duty for DeadNodes {
    const NAME: &'static str = "dead_nodes";
    const TRIGGERS: &'static [Kind] = &[Kind::Node, Kind::CiliumNode, Kind::StickyIP, Kind::Pod];
    const BATCH_DELAY: Duration = Duration::from_millis(200);

    async fn round(&mut self, context: &Context, _: Vec<Key>) -> RoundResult {
        let cleanups = plan(&context.index());
        let mut done = RoundResult::default();
        for cleanup in &cleanups {
            let (Cleanup::Detach { sticky, node } | Cleanup::Unpublish { sticky, node, .. }) = cleanup;
            match clean_up(context, cleanup).await {
                Ok(true) => {}
                Ok(false) => done.again.push((Key::new(Kind::Node, ""), RETRY_UNTIL_GONE)),
                Err(error) => {
                    tracing::warn!(sticky, node, %error, "cannot clean up after a dead node; trying again");
                    done.retry(Key::new(Kind::Node, ""), RETRY_AFTER_FAILURE);
                }
            }
        }
        done
    }
}

/// Whether it is done, or there is nothing to do any more.
async fn clean_up(context: &Context, cleanup: &Cleanup) -> Result<bool, ApiError> {
    let (Cleanup::Detach { sticky, node } | Cleanup::Unpublish { sticky, node, .. }) = cleanup;
    // The proof, live.
    let nodes: Api<Node> = Api::all(context.writer.client());
    let found = context.writer.connection().read(&format!("get Node {node}"), || nodes.get_opt(node)).await?;
    let Some(proof) = pod::node_state(found.as_ref()).proof_of_death() else { return Ok(true) };
    let (namespace, name) = sticky.split_once('/').unwrap_or_default();
    let key = StickyKey { namespace: namespace.to_owned(), name: name.to_owned() };
    let Some(object) = read_sticky(&context.writer.api_writer(), &key).await? else { return Ok(true) };
    match cleanup {
        Cleanup::Detach { .. } => detach(context, &object, node, proof).await,
        Cleanup::Unpublish { address, .. } => unpublish(context, &object, node, *address).await,
    }
}

async fn detach(context: &Context, object: &StickyIP, node: &str, proof: Takeover) -> Result<bool, ApiError> {
    let attachment = attachment_of(object).filter(|attachment| attachment.node == node);
    let Some(attachment) = attachment else { return Ok(true) };
    let (key, name) = (sticky_key_of(object), &attachment.pod_name);
    let pods: Api<Pod> = Api::namespaced(context.writer.client(), &key.namespace);
    let what = format!("get Pod {}/{name}", key.namespace);
    let found = context.writer.connection().read(&what, || pods.get_opt(name)).await?;
    if pod::old_pod(found.as_ref(), &attachment.pod_uid) != OldPod::Gone {
        return Ok(false);
    }
    let write = Write::Detach { key: key.clone(), at: Precondition::of(object), proof: Some(proof) };
    if let Applied::Conflict = context.writer.api_writer().apply(&write, Some(object), "").await? {
        return Ok(false);
    }
    tracing::info!(sticky = %key, node, "detached a StickyIP: its node and its pod are gone");
    let message = format!(
        "pod {name} was attached on node {node}, which is gone or out of service; the address is kept for \
         its next pod"
    );
    record_event(context, events::sticky_ip(object), "DetachedFromDeadNode", message).await;
    Ok(true)
}

async fn unpublish(
    context: &Context,
    object: &StickyIP,
    node: &str,
    address: IpAddr,
) -> Result<bool, ApiError> {
    // The proof of the takeover: it lives on another node.
    let elsewhere = attachment_of(object).filter(|attachment| attachment.node != node);
    let Some(elsewhere) = elsewhere.filter(|_| object.spec.addresses.contains(&address)) else {
        return Ok(true);
    };
    let api: Api<CiliumNode> = Api::all(context.writer.client());
    let Some(found) = read_node(&context.writer.connection(), node).await? else { return Ok(true) };
    let Some(patch) = without(&found, address) else { return Ok(true) };
    let what = format!("patch CiliumNode {node}: {address} out");
    let params = patch_params();
    let patch = Patch::Merge(patch.body());
    if context.writer.write(&what, api.patch(node, &params, &patch)).await?.is_none() {
        return Ok(false);
    }
    let sticky = sticky_key_of(object);
    tracing::info!(%address, node, %sticky, "removed an address from a dead node's CiliumNode");
    let message = format!(
        "{address} was removed from the CiliumNode of node {node}, which is gone or out of service; it is on \
         node {} now",
        elsewhere.node
    );
    record_event(context, events::sticky_ip(object), "RemovedFromDeadNode", message).await;
    Ok(true)
}

/// The patch that takes an address out of a CiliumNode, key and route at once; none if it is not there.
fn without(node: &CiliumNode, address: IpAddr) -> Option<NodePatch> {
    let is_it = |text: &str| text.parse::<IpAddr>().is_ok_and(|parsed| parsed == address);
    let owned = node.spec.ipam.pool.iter().filter(|(key, entry)| is_it(key) && !entry.owner.is_empty());
    let pool: BTreeMap<_, _> = owned.map(|(key, _)| (key.clone(), None)).collect();
    let route = ipnet::IpNet::from(address);
    let is_route = |text: &String| text.parse::<ipnet::IpNet>().is_ok_and(|net| net == route);
    let listed = &node.spec.ipam.pod_cidrs;
    let pod_cidrs =
        listed.iter().any(is_route).then(|| listed.iter().filter(|text| !is_route(text)).cloned().collect());
    (!pool.is_empty() || pod_cidrs.is_some()).then(|| NodePatch {
        node: node.metadata.name.clone().unwrap_or_default(),
        // Always: its agent may have come back and be at work on it.
        resource_version: node.metadata.resource_version.clone(),
        pool,
        pod_cidrs,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::objects::cilium::PoolEntry;
    use crate::controller::index::fixture::{pod, sticky};
    use crate::controller::index::objects::IndexedCiliumNode;
    use crate::runtime::cache::CacheEvent;
    use serde_json::json;

    fn node(index: &mut ClusterIndex, name: &str, taints: serde_json::Value) {
        let node: Node =
            serde_json::from_value(json!({"metadata": {"name": name}, "spec": {"taints": taints}})).unwrap();
        index.nodes.apply(CacheEvent::Applied((name.into(), node.into())));
    }

    #[test]
    fn only_what_is_of_a_dead_node_and_lives_elsewhere_or_not_at_all_is_planned() {
        let mut index = ClusterIndex::default();
        node(&mut index, "alive", json!([]));
        node(&mut index, "off", json!([{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]));
        let address = |n: u8| IpAddr::from([10, 0, 0, n]);
        for (name, n, on) in [("a", 1, "alive"), ("b", 2, "off"), ("c", 3, "gone"), ("d", 4, "gone")] {
            index.stickies.apply(CacheEvent::Applied(sticky(name, &address(n).to_string(), Some(on))));
        }
        // The pod of one is still there.
        index.apply_pod(CacheEvent::Applied(pod("d", "10.0.0.4", None)));
        let owned = |n: u8| (address(n), PoolEntry { owner: "db/x".into(), resource: String::new() });
        for name in ["alive", "off"] {
            let seen = IndexedCiliumNode {
                owned: [owned(1), owned(2), owned(9)].into(),
                pod_cidrs: vec!["10.0.0.1/32".parse().unwrap()],
                ..IndexedCiliumNode::default()
            };
            index.cilium_nodes.apply(CacheEvent::Applied((name.into(), seen)));
        }
        let detach =
            |name: &str, node: &str| Cleanup::Detach { sticky: format!("db/{name}"), node: node.into() };
        assert_eq!(
            plan(&index),
            [
                detach("b", "off"),
                detach("c", "gone"),
                Cleanup::Unpublish { node: "off".into(), address: address(1), sticky: "db/a".into() },
            ]
        );
    }

    #[test]
    fn a_patch_names_key_and_route_and_the_version_that_was_read() {
        let node: CiliumNode = serde_json::from_value(json!({"metadata": {"name": "n", "resourceVersion": "7"},
            "spec": {"ipam": {"podCIDRs": ["10.1.0.0/24", "10.0.0.1/32"], "pool": {"10.0.0.1": {"owner": "db/a"}, "10.0.0.2": {}}}}}))
        .unwrap();
        let body = without(&node, "10.0.0.1".parse().unwrap()).unwrap().body();
        assert_eq!(
            body,
            json!({"metadata": {"resourceVersion": "7"},
            "spec": {"ipam": {"pool": {"10.0.0.1": null}, "podCIDRs": ["10.1.0.0/24"]}}})
        );
        assert_eq!(without(&node, "10.0.0.2".parse().unwrap()), None, "it is unowned");
    }
}
