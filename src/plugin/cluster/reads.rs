//! What an ADD asks the API server for before it decides anything, all at once: the pod, its namespace, its
//! StickyIP with the claims, and in `crd` mode the node's CiliumNode.
//!
//! The API server's own cache is asked first, which costs it a fraction of a read from etcd. It may be a
//! moment old. So its answer counts only where a moment does not matter; see [`read_all`]. Must never be the
//! reason for a "no": what is missing, attached or not sticky by the cache is read again live.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

use crate::cluster::api::cached;
use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::cilium::pool;
use crate::cluster::objects::StickyIP;
use crate::cluster::objects::cilium::CiliumNode;
use crate::cluster::pod;
use crate::cluster::protocol::bind::ClaimsByAddress;
use crate::cluster::protocol::sticky_identity::{self, Stickiness, StickyIdentityError};
use crate::cni::{CniError, code};
use crate::names::PodIdentity;
use crate::plugin::cluster::context::{AddContext, AddError};
use crate::store::Disk;

pub(crate) struct AddReads {
    /// The StickyIP of the pod's own name.
    pub(crate) sticky: Option<StickyIP>,
    /// With its claims, if all of them were found and are sealed to it.
    pub(crate) others: SideReads,
}

/// What was found beside the StickyIP.
pub(crate) struct SideReads {
    pub(crate) stickiness: Stickiness,
    /// Those on the addresses that this node knows, if all of them were found.
    pub(crate) claims: Option<ClaimsByAddress>,
    /// The node's CiliumNode, in `crd` mode.
    pub(crate) node: Option<CiliumNode>,
}

impl SideReads {
    /// All of it, with the StickyIP of the pod's own name.
    pub(crate) fn with(self, sticky: Option<StickyIP>) -> AddReads {
        let are_its =
            |claims: &ClaimsByAddress| sticky.as_ref().is_some_and(|sticky| cached::are_all(claims, sticky));
        AddReads { others: Self { claims: self.claims.filter(are_its), ..self }, sticky }
    }
}

/// Reads everything. `known` are the addresses that this node has recorded of the pod.
///
/// From the API server's [cache](crate::cluster::api::cached) are taken: a pod of the very uid that is asked
/// for; a StickyIP that is not attached; claims that are sealed to it; and the annotations of the namespace
/// where they make the pod sticky.
pub(crate) async fn read_all<D: Disk>(
    api: &Connection,
    context: &AddContext<'_, D>,
    known: &BTreeSet<IpAddr>,
) -> Result<AddReads, AddError> {
    let (others, sticky) = tokio::join!(read_others(api, context, known), sticky_of(api, context.pod));
    Ok(others?.with(sticky.map_err(AddError::Unreachable)?))
}

/// Reads everything but the StickyIP.
pub(crate) async fn read_others<D: Disk>(
    api: &Connection,
    context: &AddContext<'_, D>,
    known: &BTreeSet<IpAddr>,
) -> Result<SideReads, AddError> {
    let AddContext { verb, conf, pod, .. } = *context;
    let pods: Api<Pod> = Api::namespaced(api.client(), pod.namespace());
    let what = format!("get Pod {pod}");
    let own_node = async {
        if verb.mode.publishes_pool_entries() { pool::read_node(api, &conf.node).await } else { Ok(None) }
    };
    let (first, namespace, claims) = tokio::join!(
        async { tokio::try_join!(cached::object(api, &what, &pods, pod.name()), own_node) },
        cached::annotations(api, pod.namespace()),
        cached::claims(api, known),
    );
    let (seen, node) = first.map_err(AddError::Unreachable)?;
    let seen = match seen.filter(|seen| is_surely_expected(seen, pod, &conf.node)) {
        Some(seen) => Some(seen),
        None => api.read(&what, || pods.get_opt(pod.name())).await.map_err(AddError::Unreachable)?,
    };
    let seen = expected_pod(seen, pod, &conf.node)?;
    let stickiness = match judge(context, &seen, namespace).await {
        Ok(sticky @ Stickiness::Sticky { .. }) => sticky,
        Ok(Stickiness::NotSticky { .. }) | Err(_) => {
            judge(context, &seen, sticky_identity::of_namespace(api, pod.namespace()).await).await?
        }
    };
    Ok(SideReads { stickiness, claims, node })
}

async fn sticky_of(api: &Connection, pod: &PodIdentity) -> Result<Option<StickyIP>, ApiError> {
    let stickies: Api<StickyIP> = Api::namespaced(api.client(), pod.namespace());
    let what = format!("get StickyIP {pod}");
    let cached = cached::object(api, &what, &stickies, pod.name()).await?;
    match cached.filter(cached::is_free) {
        Some(free) => Ok(Some(free)),
        None => api.read(&what, || stickies.get_opt(pod.name())).await,
    }
}

/// Whether this is surely the pod that is asked for, on this node.
fn is_surely_expected(seen: &Pod, pod: &PodIdentity, node: &str) -> bool {
    pod.uid().is_some_and(|uid| pod::is_meant(seen, uid)) && bound_to(seen) == Some(node)
}

/// Refuses a pod that does not exist, is another one, or runs elsewhere: names in CNI_ARGS prove nothing.
fn expected_pod(found: Option<Pod>, pod: &PodIdentity, node: &str) -> Result<Pod, CniError> {
    let Some(found) = found else {
        return Err(CniError::try_again(format!("pod {pod} does not exist in the API server")));
    };
    if let Some(uid) = pod.uid().filter(|uid| !pod::is_meant(&found, uid)) {
        let there = found.metadata.uid.as_deref().unwrap_or_default();
        let message = format!("pod {pod} has the uid {there} in the API server, not {uid} as in CNI_ARGS");
        return Err(CniError::try_again(message));
    }
    let bound = bound_to(&found);
    if bound == Some(node) {
        return Ok(found);
    }
    let place = bound.map_or_else(|| "no node".to_owned(), |bound| format!("node {bound}"));
    Err(CniError::invalid_environment(format!(
        "CNI_ARGS: pod {pod} is bound to {place}, and this is node {node}; is sticky.cluster.node right?"
    )))
}

fn bound_to(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

async fn judge<D: Disk>(
    context: &AddContext<'_, D>,
    found: &Pod,
    namespace: Result<BTreeMap<String, String>, ApiError>,
) -> Result<Stickiness, AddError> {
    let facts = pod::facts(found, Default::default());
    let judged = sticky_identity::judge(&context.conf.rules, facts, async { namespace }).await;
    judged.map_err(|error| match error {
        StickyIdentityError::Policy(error) => CniError::new(code::REQUEST_REFUSED, error.to_string()).into(),
        StickyIdentityError::Api(error) => AddError::Unreachable(error),
    })
}
