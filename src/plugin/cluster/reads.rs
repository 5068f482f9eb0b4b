//! What an ADD asks the API server for before it decides anything, all at once: the pod, its namespace, its StickyIP with the
//! claims, and in `crd` mode the node's CiliumNode.
//!
//! The API server's own memory is asked first, which costs it a fraction of a look into etcd. It may be a moment old. So what
//! it says counts only where a moment does not matter; see [`look`]. Must never be the ground for a "no": whatever is missing,
//! held or not sticky by that memory is looked up again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

use crate::cluster::api::cached;
use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::cilium::objects::CiliumNode;
use crate::cluster::cilium::pool;
use crate::cluster::objects::StickyIP;
use crate::cluster::pod;
use crate::cluster::protocol::bind::ClaimsByAddress;
use crate::cluster::protocol::sticky_identity;
use crate::cluster::protocol::sticky_identity::StickyIdentityError;
use crate::cni::{CniError, PodIdentity, code};
use crate::plugin::cluster::add::{AddContext, AddError};
use crate::policy::selection::facts::PodFacts;
use crate::policy::selection::rules::StickyReason;
use crate::store::Disk;

/// What was found.
pub(crate) struct AddReads {
    /// The pod's facts if it is sticky, else why it is not.
    pub(crate) facts: Result<PodFacts, StickyReason>,
    /// The StickyIP of the pod's own name.
    pub(crate) sticky: Option<StickyIP>,
    /// Its claims, if all of them were found and are sealed to it.
    pub(crate) claims: Option<ClaimsByAddress>,
    /// The node's CiliumNode, in `crd` mode.
    pub(crate) node: Option<CiliumNode>,
}

/// What was found beside the StickyIP.
pub(crate) struct SideReads {
    /// As in [`AddReads`].
    pub(crate) facts: Result<PodFacts, StickyReason>,
    /// Those on the addresses that were remembered, if all of them were found.
    pub(crate) claims: Option<ClaimsByAddress>,
    /// As in [`AddReads`].
    pub(crate) node: Option<CiliumNode>,
}

impl SideReads {
    /// All of it, with the StickyIP of the pod's own name.
    pub(crate) fn with(self, sticky: Option<StickyIP>) -> AddReads {
        let Self { facts, claims, node } = self;
        let are_its =
            |claims: &ClaimsByAddress| sticky.as_ref().is_some_and(|sticky| cached::are_all(claims, sticky));
        let claims = claims.filter(are_its);
        AddReads { facts, sticky, claims, node }
    }
}

/// Looks. `remembered` are the addresses that this node knows of the pod.
///
/// From the API server's [cache](crate::cluster::api::cached) are taken: a pod of the very uid that is asked for; a StickyIP that nobody has; claims that
/// are sealed to it; and the word of the namespace where it makes the pod sticky.
pub(crate) async fn look<D: Disk>(
    api: &Connection,
    errand: &AddContext<'_, D>,
    remembered: &BTreeSet<IpAddr>,
) -> Result<AddReads, AddError> {
    let (around, sticky) = tokio::join!(read_others(api, errand, remembered), sticky_of(api, errand.pod));
    Ok(around?.with(sticky.map_err(AddError::Unreachable)?))
}

/// Looks at all but the StickyIP.
pub(crate) async fn read_others<D: Disk>(
    api: &Connection,
    errand: &AddContext<'_, D>,
    remembered: &BTreeSet<IpAddr>,
) -> Result<SideReads, AddError> {
    let AddContext { scene, conf, pod, .. } = *errand;
    let pods: Api<Pod> = Api::namespaced(api.client(), pod.namespace());
    let what = format!("get Pod {pod}");
    let own_node = async {
        if scene.mode.publishes_pool_entries() { pool::read_node(api, &conf.node).await } else { Ok(None) }
    };
    let (first, namespace, claims) = tokio::join!(
        async { tokio::try_join!(cached::object(api, &what, &pods, pod.name()), own_node) },
        cached::annotations(api, pod.namespace()),
        cached::claims(api, remembered),
    );
    let (seen, node) = first.map_err(AddError::Unreachable)?;
    let seen = match seen.filter(|seen| is_surely_expected(seen, pod, &conf.node)) {
        Some(seen) => Some(seen),
        None => api.read(&what, || pods.get_opt(pod.name())).await.map_err(AddError::Unreachable)?,
    };
    let seen = expected_pod(seen, pod, &conf.node)?;
    let facts = match judge(errand, &seen, namespace).await {
        Ok(Ok(facts)) => Ok(facts),
        Ok(Err(_)) | Err(_) => {
            judge(errand, &seen, sticky_identity::of_namespace(api, pod.namespace()).await).await?
        }
    };
    Ok(SideReads { facts, claims, node })
}

/// The StickyIP of the pod's own name.
async fn sticky_of(api: &Connection, pod: &PodIdentity) -> Result<Option<StickyIP>, ApiError> {
    let stickies: Api<StickyIP> = Api::namespaced(api.client(), pod.namespace());
    let what = format!("get StickyIP {pod}");
    let remembered = cached::object(api, &what, &stickies, pod.name()).await?;
    match remembered.filter(cached::is_free) {
        Some(free) => Ok(Some(free)),
        None => api.read(&what, || stickies.get_opt(pod.name())).await,
    }
}

/// Whether this is surely the pod that is asked for, on this node.
fn is_surely_expected(seen: &Pod, pod: &PodIdentity, node: &str) -> bool {
    let bound = seen.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    pod.uid().is_some_and(|uid| pod::is_meant(seen, uid)) && bound == Some(node)
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
    match found.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) {
        Some(bound) if bound == node => Ok(found),
        bound => Err(CniError::invalid_environment(format!(
            "CNI_ARGS: pod {pod} is bound to node {:?}, and this is node {node:?}; is sticky.cluster.node right?",
            bound.unwrap_or_default()
        ))),
    }
}

/// The facts of a sticky pod, or why it is none.
async fn judge<D: Disk>(
    errand: &AddContext<'_, D>,
    found: &Pod,
    namespace: Result<BTreeMap<String, String>, ApiError>,
) -> Result<Result<PodFacts, StickyReason>, AddError> {
    let facts = pod::facts(found, Default::default());
    match sticky_identity::judge(&errand.conf.rules, facts, async { namespace }).await {
        Ok((true, facts, _)) => Ok(Ok(facts)),
        Ok((false, _, reason)) => Ok(Err(reason)),
        Err(StickyIdentityError::Policy(error)) => {
            Err(AddError::Told(CniError::new(code::REQUEST_REFUSED, error.to_string())))
        }
        Err(StickyIdentityError::Api(error)) => Err(AddError::Unreachable(error)),
    }
}
