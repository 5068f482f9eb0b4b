//! What is published on a node's own CiliumNode for the StickyIPs that are attached to the node: in `crd`
//! mode a pool entry with its owner, and in every mode a route of its own (/32, /128) for an address outside
//! the node's home blocks.
//!
//! Published after the StickyIP is attached here, unpublished before it is detached: the attachment is on one
//! node at a time, so an address is in one node's pool at most. Must never write another node's object, never
//! touch an unowned entry, and never replace the list of ranges if it was written since it was read.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;
use kube::api::{Api, ListParams, Patch};
use serde_json::json;
use thiserror::Error;

use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::cilium::barrier;
use crate::cluster::objects::cilium::{CiliumNode, PoolEntry};
use crate::cluster::objects::{StickyIP, WorkloadRef};
use crate::cluster::writer::apply::{ApiWriter, SentWrite, patch_params};
use crate::policy::mode::PluginMode;

pub(crate) use crate::cluster::objects::cilium_patch::{NodePatch, PoolChanges};

/// How many conflicts are allowed in a row.
const MAX_TRIES: usize = 64;
/// Between two tries: others write the same object.
const PAUSE: Duration = Duration::from_millis(3);

/// What a node publishes, and which ranges are its home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishConfig {
    /// How the plugin stands before Cilium, and so whether addresses stand in the pool.
    pub mode: PluginMode,
    /// Ranges of the node's own configuration (`delegated`, `chained`), which count as home besides its
    /// blocks.
    pub ranges: Vec<IpNet>,
    /// The blocks that the CiliumNode had last. They are home as long as it names none: one that was
    /// created again says nothing of what was home a moment ago.
    pub known_blocks: Vec<IpNet>,
}

impl PublishConfig {
    /// What is home on this CiliumNode.
    fn home(&self, node: &CiliumNode) -> Vec<IpNet> {
        let blocks = Some(home_blocks(node)).filter(|blocks| !blocks.is_empty());
        [blocks.unwrap_or_else(|| self.known_blocks.clone()), self.ranges.clone()].concat()
    }

    /// Whether nothing is published for these addresses: no pool, and all at home.
    pub(crate) fn is_silent_about(&self, addresses: &[IpAddr]) -> bool {
        !self.mode.publishes_pool_entries()
            && addresses.iter().all(|address| contains(&self.ranges, *address))
    }
}

/// The addresses of an attached StickyIP, as they are published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Publication {
    pub addresses: Vec<IpAddr>,
    /// `namespace/pod`: the one that Cilium gives them to.
    pub owner: String,
    /// `namespace/Kind/name` of the workload, for people.
    pub resource: String,
}

impl Publication {
    /// How an attached StickyIP is published; none if it is not attached.
    pub(crate) fn of(sticky: &StickyIP) -> Option<Self> {
        let attachment = sticky.status.as_ref()?.attachment.as_ref()?;
        let namespace = sticky.metadata.namespace.as_deref()?;
        Some(Self {
            addresses: sticky.spec.addresses.clone(),
            owner: format!("{namespace}/{}", attachment.pod_name),
            resource: resource(namespace, &sticky.spec.workload),
        })
    }
}

/// How a pool names a workload.
pub fn resource(namespace: &str, workload: &WorkloadRef) -> String {
    format!("{namespace}/{}/{}", workload.kind, workload.name)
}

/// The node's home blocks: the ranges of its list that are more than one address.
pub(crate) fn home_blocks(node: &CiliumNode) -> Vec<IpNet> {
    let listed = node.spec.ipam.pod_cidrs.iter().filter_map(|text| text.parse::<IpNet>().ok());
    listed.filter(|net| net.prefix_len() < net.max_prefix_len()).map(|net| net.trunc()).collect()
}

/// The single addresses that the node's list routes here.
pub fn single_routes(node: &CiliumNode) -> Vec<IpAddr> {
    let listed = node.spec.ipam.pod_cidrs.iter().filter_map(|text| text.parse::<IpNet>().ok());
    listed.filter(|net| net.prefix_len() == net.max_prefix_len()).map(|net| net.addr()).collect()
}

/// What must change on this CiliumNode for an address that is attached here; none if it is already published.
pub(crate) fn publish_patch(
    node: &CiliumNode,
    shape: &PublishConfig,
    shown: &Publication,
) -> Option<NodePatch> {
    let wanted = PoolEntry { owner: shown.owner.clone(), resource: shown.resource.clone() };
    let is_other = |key: &String| node.spec.ipam.pool.get(key) != Some(&wanted);
    let keys =
        shown.addresses.iter().filter(|_| shape.mode.publishes_pool_entries()).map(ToString::to_string);
    let pool = keys.filter(is_other).map(|key| (key, Some(wanted.clone()))).collect();
    let home = shape.home(node);
    let mut routes = node.spec.ipam.pod_cidrs.clone();
    for address in &shown.addresses {
        if contains(&home, *address) {
            // If it is home again, its block leads here.
            routes.retain(|text| !is_route_of(text, *address));
        } else if !routes.iter().any(|text| is_route_of(text, *address)) {
            routes.push(IpNet::from(*address).to_string());
        }
    }
    patch(node, pool, routes)
}

/// What must change on this CiliumNode when these addresses are no longer attached here; none if nothing of
/// them is published. An unowned entry is for Cilium to give to any pod, and stays.
pub(crate) fn unpublish_patch(
    node: &CiliumNode,
    shape: &PublishConfig,
    addresses: &[IpAddr],
) -> Option<NodePatch> {
    let owned = |key: &String| node.spec.ipam.pool.get(key).is_some_and(|entry| !entry.owner.is_empty());
    let keys = addresses.iter().filter(|_| shape.mode.publishes_pool_entries()).map(ToString::to_string);
    let pool = keys.filter(owned).map(|key| (key, None)).collect();
    let mut routes = node.spec.ipam.pod_cidrs.clone();
    routes.retain(|text| !addresses.iter().any(|address| is_route_of(text, *address)));
    patch(node, pool, routes)
}

/// What must change so that these addresses become unowned where the owner matches, and their barrier entries
/// are removed; none if no owner matches.
pub(crate) fn disown(
    node: &CiliumNode,
    addresses: &[IpAddr],
    whose: impl Fn(&PoolEntry) -> bool,
) -> Option<NodePatch> {
    let entry = |key: &String| node.spec.ipam.pool.get(key);
    let is_owned = |key: &String| entry(key).is_some_and(|entry| !entry.owner.is_empty() && whose(entry));
    let keys = addresses.iter().map(ToString::to_string).filter(is_owned);
    let mut keys: BTreeMap<_, _> = keys.map(|key| (key, Some(PoolEntry::default()))).collect();
    if keys.is_empty() {
        return None;
    }
    let signs = addresses.iter().filter_map(|address| barrier::of(node, *address));
    keys.extend(signs.map(|sign| (sign.to_string(), None)));
    Some(NodePatch::of_keys(node, keys))
}

fn patch(node: &CiliumNode, pool: PoolChanges, routes: Vec<String>) -> Option<NodePatch> {
    let routes = (routes != node.spec.ipam.pod_cidrs).then_some(routes);
    (!pool.is_empty() || routes.is_some()).then(|| NodePatch::of(node, pool, routes))
}

/// The CiliumNode without these addresses: neither a pool entry nor a route of their own.
pub fn without(mut node: CiliumNode, addresses: &[IpAddr]) -> CiliumNode {
    let ipam = &mut node.spec.ipam;
    ipam.pool.retain(|key, _| key.parse().is_ok_and(|key| !addresses.contains(&key)));
    ipam.pod_cidrs.retain(|text| !addresses.iter().any(|address| is_route_of(text, *address)));
    node
}

fn contains(ranges: &[IpNet], address: IpAddr) -> bool {
    ranges.iter().any(|range| range.contains(&address))
}

fn is_route_of(text: &str, address: IpAddr) -> bool {
    text.parse::<IpNet>().is_ok_and(|net| net == IpNet::from(address))
}

#[derive(Debug, Error)]
pub enum PublishError {
    #[error("CiliumNode {node} does not exist; Cilium's agent on this node, or its operator, creates it")]
    Missing { node: String },
    #[error("CiliumNode {node} was changed by others {MAX_TRIES} times in a row; try again")]
    TooManyConflicts { node: String },
    #[error(transparent)]
    Api(#[from] ApiError),
}

pub(crate) async fn read_node(api: &Connection, node: &str) -> Result<Option<CiliumNode>, ApiError> {
    let nodes: Api<CiliumNode> = Api::all(api.client());
    api.read(&format!("get CiliumNode {node}"), || nodes.get_opt(node)).await
}

/// Reads all CiliumNodes, live. Without Cilium's kinds there are none.
pub(crate) async fn list_nodes(api: &Connection) -> Result<Vec<CiliumNode>, ApiError> {
    let (nodes, every) = (Api::<CiliumNode>::all(api.client()), ListParams::default());
    match api.read("list CiliumNodes", || nodes.list(&every)).await {
        Err(ApiError::Refused { code: 404, .. }) => Ok(Vec::new()),
        listed => Ok(listed?.items),
    }
}

/// Publishes an attached StickyIP on the node's CiliumNode. `known` is the object if it was just read.
/// Errors: see [`PublishError`]; if the server left doubt, the write may have happened.
pub(crate) async fn publish(
    writer: &mut ApiWriter<'_>,
    node: &str,
    shape: &PublishConfig,
    shown: &Publication,
    known: Option<CiliumNode>,
) -> Result<(), PublishError> {
    let published = change(writer, node, known, |object| publish_patch(object, shape, shown)).await?;
    published.ok_or_else(|| PublishError::Missing { node: node.to_owned() })
}

/// Unpublishes addresses whose sandbox has ended from the node's CiliumNode. It succeeds if there is none.
pub(crate) async fn unpublish(
    writer: &mut ApiWriter<'_>,
    node: &str,
    shape: &PublishConfig,
    addresses: &[IpAddr],
) -> Result<(), PublishError> {
    change(writer, node, None, |object| unpublish_patch(object, shape, addresses)).await.map(|_| ())
}

/// Reads, writes what must change, and reads again until nothing must; none if there is no such object.
pub async fn change(
    writer: &mut ApiWriter<'_>,
    node: &str,
    mut known: Option<CiliumNode>,
    decide: impl Fn(&CiliumNode) -> Option<NodePatch>,
) -> Result<Option<()>, PublishError> {
    for _ in 0..MAX_TRIES {
        if known.is_none() {
            known = read_node(writer.api(), node).await?;
        }
        let Some(object) = known.take() else { return Ok(None) };
        let Some(patch) = decide(&object) else { return Ok(Some(())) };
        match apply_patch(writer, &patch).await {
            Ok(()) => return Ok(Some(())),
            Err(ApiError::Refused { code: 404, .. }) => return Ok(None),
            // A conflict, or a write in doubt: read again.
            Err(ApiError::Refused { code: 409 | 412, .. }) => {}
            Err(error) if error.leaves_doubt() => {
                tracing::warn!(cilium_node = node, %error, "write in doubt; reading again");
            }
            Err(error) => return Err(error.into()),
        }
        writer.api().pause(&format!("patch CiliumNode {node}"), PAUSE).await?;
    }
    Err(PublishError::TooManyConflicts { node: node.to_owned() })
}

pub(crate) async fn apply_patch(writer: &mut ApiWriter<'_>, patch: &NodePatch) -> Result<(), ApiError> {
    let api = writer.api().clone();
    let nodes: Api<CiliumNode> = Api::all(api.client());
    let what = format!("patch CiliumNode {}", patch.node);
    let mut body = patch.body();
    // Every start of a pod waits for this, and a pool has many fields to keep owners of
    // (docs/decisions/0024).
    body["metadata"]["managedFields"] = json!([{}]);
    let (params, body) = (patch_params(), Patch::Merge(body));
    // The answer is the whole object, which may be large and is not needed.
    let sent = async { api.once(&what, nodes.patch_metadata(&patch.node, &params, &body)).await };
    writer.observed(SentWrite::Node(patch), sent).await.map(|_| ())
}

#[cfg(test)]
mod tests;
