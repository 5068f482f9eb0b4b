//! What dead nodes leave behind: attachments that no agent will end, and pool entries and routes of addresses
//! that moved. Must never act without the proof that a takeover needs: the Node deleted or tainted
//! out-of-service, by a live read.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, Patch};

use crate::cluster::api::client::ApiError;
use crate::cluster::api::events;
use crate::cluster::api::events::NewEvent;
use crate::cluster::cilium::objects::CiliumNode;
use crate::cluster::cilium::pool::{NodePatch, read_node};
use crate::cluster::objects::StickyIP;
use crate::cluster::pod;
use crate::cluster::protocol::apply::{Applied, patch_params};
use crate::cluster::protocol::read::read_sticky;
use crate::cluster::protocol::view::StickyView;
use crate::cluster::protocol::write::{Precondition, Write};
use crate::controller::context::Context;
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::objects::{IndexedCiliumNode, sticky_key_of};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::queue::Key;
use crate::names::StickyKey;
use crate::policy::handover::{OldPod, Takeover};

/// After something that failed.
const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(5);
/// While a pod of a dead node is still there, or an address is not yet elsewhere.
const RETRY_UNTIL_GONE: Duration = Duration::from_secs(30);

/// The duty. It remembers nothing.
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

/// What must be cleaned up after dead nodes.
fn plan(index: &ClusterIndex) -> Vec<Cleanup> {
    let mut cleanups = Vec::new();
    for (name, sticky) in index.stickies.iter() {
        let attachment = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
        let Some(attachment) = attachment.filter(|attachment| index.is_dead_node(&attachment.node)) else {
            continue;
        };
        let namespace = sticky.metadata.namespace.as_deref().unwrap_or_default();
        let pod = index.pods.get(&format!("{namespace}/{}", attachment.pod_name));
        if pod.is_none_or(|pod| pod.facts.uid != attachment.pod_uid) {
            cleanups.push(Cleanup::Detach { sticky: name.clone(), node: attachment.node.clone() });
        }
    }
    let dead: Vec<(&String, &IndexedCiliumNode)> =
        index.cilium_nodes.iter().filter(|(name, _)| index.is_dead_node(name)).collect();
    if dead.is_empty() {
        return cleanups;
    }
    let elsewhere: BTreeMap<IpAddr, (&String, &str)> = index
        .stickies
        .iter()
        .filter_map(|(name, sticky)| {
            let attachment = sticky.status.as_ref()?.attachment.as_ref()?;
            Some(
                sticky.spec.addresses.iter().map(move |address| (*address, (name, attachment.node.as_str()))),
            )
        })
        .flatten()
        .collect();
    for (node, seen) in dead {
        let routes = seen
            .pod_cidrs
            .iter()
            .filter(|net| net.prefix_len() == net.max_prefix_len())
            .map(|net| net.addr());
        let mut shown: Vec<IpAddr> = seen.owned.keys().copied().chain(routes).collect();
        shown.sort();
        shown.dedup();
        for address in shown {
            if let Some((sticky, _)) = elsewhere.get(&address).filter(|(_, lives)| lives != node) {
                cleanups.push(Cleanup::Unpublish { node: node.clone(), address, sticky: (*sticky).clone() });
            }
        }
    }
    cleanups
}

impl Duty for DeadNodes {
    const NAME: &'static str = "dead_nodes";
    const TRIGGERS: &'static [Kind] = &[Kind::Node, Kind::CiliumNode, Kind::StickyIP, Kind::Pod];
    const BATCH_DELAY: Duration = Duration::from_millis(200);

    async fn round(&mut self, context: &Context, _: Vec<Key>) -> RoundResult {
        let cleanups = plan(&context.index());
        let mut done = RoundResult::default();
        for cleanup in &cleanups {
            match clean_up(context, cleanup).await {
                Ok(true) => {}
                Ok(false) => done.again.push((Key::new(Kind::Node, ""), RETRY_UNTIL_GONE)),
                Err(error) => {
                    let (Cleanup::Detach { sticky, node } | Cleanup::Unpublish { sticky, node, .. }) =
                        cleanup;
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
    let (node, sticky) = match cleanup {
        Cleanup::Detach { sticky, node } | Cleanup::Unpublish { node, sticky, .. } => (node, sticky),
    };
    // The proof, live.
    let nodes: Api<Node> = Api::all(context.writer.client());
    let found = context.writer.connection().read(&format!("get Node {node}"), || nodes.get_opt(node)).await?;
    let Some(proof) = pod::node_state(found.as_ref()).proof_of_death() else { return Ok(true) };
    let (namespace, name) = sticky.split_once('/').unwrap_or_default();
    let key = StickyKey { namespace: namespace.to_owned(), name: name.to_owned() };
    let Some(object) = read_sticky(&context.writer.api_writer(), &key).await? else { return Ok(true) };
    match cleanup {
        Cleanup::Detach { node, .. } => detach(context, &object, node, proof).await,
        Cleanup::Unpublish { node, address, .. } => unpublish(context, &object, node, *address).await,
    }
}

async fn detach(context: &Context, object: &StickyIP, node: &str, proof: Takeover) -> Result<bool, ApiError> {
    let attachment = object.status.as_ref().and_then(|status| status.attachment.as_ref());
    let Some(attachment) = attachment.filter(|attachment| attachment.node == node) else { return Ok(true) };
    let key = sticky_key_of(object);
    let pods: Api<Pod> = Api::namespaced(context.writer.client(), &key.namespace);
    let what = format!("get Pod {}/{}", key.namespace, attachment.pod_name);
    let found = context.writer.connection().read(&what, || pods.get_opt(&attachment.pod_name)).await?;
    if pod::old_pod(found.as_ref(), &attachment.pod_uid) != OldPod::Gone {
        return Ok(false);
    }
    let view = StickyView::from(object);
    let at = Precondition { uid: view.uid, resource_version: view.resource_version };
    let write = Write::Detach { key, at, proof: Some(proof) };
    let applied = context.writer.api_writer().apply(&write, Some(object), "").await?;
    if !matches!(applied, Applied::Conflict) {
        tracing::info!(sticky = %view.key, node, "detached a StickyIP: its node and its pod are gone");
        context
            .record_event(NewEvent {
                about: events::sticky_ip(object),
                reason: "DetachedFromDeadNode",
                message: format!(
                    "pod {} was attached on node {node}, which is gone or out of service; the address is \
                     kept for its next pod",
                    attachment.pod_name
                ),
                warning: false,
            })
            .await;
    }
    Ok(!matches!(applied, Applied::Conflict))
}

async fn unpublish(
    context: &Context,
    object: &StickyIP,
    node: &str,
    address: IpAddr,
) -> Result<bool, ApiError> {
    let attachment = object.status.as_ref().and_then(|status| status.attachment.as_ref());
    // The proof of the takeover: it lives on another node.
    let elsewhere = attachment.is_some_and(|attachment| attachment.node != node);
    if !elsewhere || !object.spec.addresses.contains(&address) {
        return Ok(true);
    }
    let api: Api<CiliumNode> = Api::all(context.writer.client());
    let Some(found) = read_node(&context.writer.connection(), node).await? else { return Ok(true) };
    let Some(patch) = without(&found, address) else { return Ok(true) };
    let what = format!("patch CiliumNode {node}: {address} out");
    let params = patch_params();
    let written = context.writer.write(&what, api.patch(node, &params, &Patch::Merge(patch.body()))).await?;
    if written.is_some() {
        tracing::info!(
            %address, node, sticky = %sticky_key_of(object),
            "removed an address from a dead node's CiliumNode"
        );
        let lives = attachment.map(|attachment| attachment.node.as_str()).unwrap_or_default();
        let message = format!(
            "{address} was removed from the CiliumNode of node {node}, which is gone or out of service; it \
             is on node {lives} now"
        );
        let about = events::sticky_ip(object);
        context
            .record_event(NewEvent { about, reason: "RemovedFromDeadNode", message, warning: false })
            .await;
    }
    Ok(written.is_some())
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
    use crate::cluster::cilium::objects::PoolEntry;
    use crate::controller::index::fixture::{pod, sticky};
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
