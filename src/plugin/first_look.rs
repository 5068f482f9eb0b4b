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

use super::bound::{Errand, Why};
use crate::cluster::cilium::CiliumNode;
use crate::cluster::claims::carry::Carrier;
use crate::cluster::claims::errand::{self, ErrandError};
use crate::cluster::claims::walk::{self, Claims};
use crate::cluster::client::ApiError;
use crate::cluster::memory;
use crate::cluster::objects::{Holder, StickyIP};
use crate::cluster::pod;
use crate::cluster::projection;
use crate::cni::{CniError, PodIdentity, code};
use crate::policy::facts::PodFacts;
use crate::policy::sticky::Reason;
use crate::store::Disk;

/// What was found.
pub(super) struct Found {
    /// The pod's facts if it is sticky, else why it is not.
    pub(super) facts: Result<PodFacts, Reason>,
    /// The StickyIP of the pod's own name.
    pub(super) sticky: Option<StickyIP>,
    /// Its claims, if all of them were found and are sealed to it.
    pub(super) claims: Option<Claims>,
    /// The node's CiliumNode, in `crd` mode.
    pub(super) node: Option<CiliumNode>,
}

/// Looks. `remembered` are the addresses that this node knows of the pod.
///
/// From the API server's [memory] are taken: a pod of the very uid that is asked for; a StickyIP that nobody has; claims that
/// are sealed to it; and the word of the namespace where it makes the pod sticky.
pub(super) async fn look<D: Disk>(
    carrier: &Carrier<'_>,
    errand: &Errand<'_, D>,
    remembered: &BTreeSet<IpAddr>,
) -> Result<Found, Why> {
    let Errand { conf, pod, crd, .. } = *errand;
    let api = carrier.api();
    let itself = Holder { namespace: pod.namespace().to_owned(), name: pod.name().to_owned() };
    let pods: Api<Pod> = Api::namespaced(api.client(), pod.namespace());
    let stickies: Api<StickyIP> = Api::namespaced(api.client(), pod.namespace());
    let what_pod = format!("get Pod {pod}");
    let what_sticky = format!("get StickyIP {itself}");
    api.settled().await;
    let own_node = async { if crd { projection::read_node(api, &conf.node).await } else { Ok(None) } };
    let (first, namespace, claims) = tokio::join!(
        async {
            tokio::try_join!(
                memory::object(api, &what_pod, &pods, pod.name()),
                memory::object(api, &what_sticky, &stickies, pod.name()),
                own_node,
            )
        },
        memory::annotations(api, pod.namespace()),
        memory::claims(api, remembered),
    );
    let (seen, sticky, node) = first.map_err(Why::Unasked)?;
    let certain = seen.filter(|seen| is_certain(seen, pod, &conf.node));
    let free = sticky.filter(memory::is_free);
    let (seen, sticky) = tokio::try_join!(
        async {
            match certain {
                Some(seen) => Ok(Some(seen)),
                None => api.read(&what_pod, || pods.get_opt(pod.name())).await,
            }
        },
        async {
            match free {
                Some(sticky) => Ok(Some(sticky)),
                None => walk::read_sticky(carrier, &itself).await,
            }
        },
    )
    .map_err(Why::Unasked)?;
    let seen = the_pod_that_is_meant(seen, pod, &conf.node)?;
    let facts = match judge(errand, &seen, namespace).await {
        Ok(Ok(facts)) => Ok(facts),
        Ok(Err(_)) | Err(_) => judge(errand, &seen, errand::of_namespace(api, pod.namespace()).await).await?,
    };
    let claims =
        claims.filter(|claims| sticky.as_ref().is_some_and(|sticky| memory::are_all(claims, sticky)));
    Ok(Found { facts, sticky, claims, node })
}

/// Whether this is surely the pod that is asked for, on this node.
fn is_certain(seen: &Pod, pod: &PodIdentity, node: &str) -> bool {
    let bound = seen.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
    pod.uid().is_some_and(|uid| pod::is_meant(seen, uid)) && bound == Some(node)
}

/// Refuses a pod that does not exist, is another one, or runs elsewhere: names in CNI_ARGS prove nothing.
fn the_pod_that_is_meant(found: Option<Pod>, pod: &PodIdentity, node: &str) -> Result<Pod, CniError> {
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
    errand: &Errand<'_, D>,
    found: &Pod,
    namespace: Result<BTreeMap<String, String>, ApiError>,
) -> Result<Result<PodFacts, Reason>, Why> {
    let facts = pod::facts(found, Default::default());
    match errand::judge(&errand.conf.rules, facts, async { namespace }).await {
        Ok((true, facts, _)) => Ok(Ok(facts)),
        Ok((false, _, reason)) => Ok(Err(reason)),
        Err(ErrandError::Policy(error)) => {
            Err(Why::Told(CniError::new(code::REQUEST_REFUSED, error.to_string())))
        }
        Err(ErrandError::Api(error)) => Err(Why::Unasked(error)),
    }
}
