//! The cluster's part of the other verbs: DEL unpublishes and detaches, CHECK reads the StickyIP, and STATUS
//! looks whether the API server could be asked. Must never detach what a newer sandbox has.

use std::net::IpAddr;

use thiserror::Error;

use crate::alloc::Range;
use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::cilium::pool::PublishConfig;
use crate::cluster::cilium::socket::{self, EndpointAnswer};
use crate::cluster::protocol::bind;
use crate::cluster::protocol::detach::{self, DetachError};
use crate::cluster::view::StickyView;
use crate::cluster::writer::apply::{ApiWriter, NoObserver};
use crate::cni::{ClusterConf, CniError, OnUnavailable, code};
use crate::names::{Attachment, PodIdentity};
use crate::node::addresses::{ThisNode, may_exist};
use crate::node::detach::{DetachOutcome, EndedSandbox};
use crate::plugin::cluster::bypass;
use crate::plugin::cluster::context::block_on;
use crate::plugin::{VerbContext, VerbLog};
use crate::store::{ClaimantKey, Disk, StickyBinding, StoreError};

fn publish_config<D: Disk>(verb: &VerbContext<'_, D>) -> PublishConfig {
    let ranges = verb.ipam.sets.iter().flat_map(|set| set.ranges()).map(Range::subnet).collect();
    PublishConfig { mode: verb.mode, ranges, known_blocks: Vec::new() }
}

/// Why a sandbox that has ended is still attached in the API server.
#[derive(Debug, Error)]
pub(crate) enum ClusterDelError {
    #[error("sticky.cluster is missing or cannot be read")]
    NotConfigured,
    #[error(transparent)]
    Api(#[from] ApiError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Detach(#[from] DetachError),
    #[error("cilium-agent still has an endpoint with {address}")]
    EndpointExists { address: IpAddr },
    #[error("cannot ask cilium-agent for the endpoint of {address}: {source}")]
    CiliumSocket { address: IpAddr, source: std::io::Error },
    /// No runtime to wait in.
    #[error(transparent)]
    Runtime(#[from] CniError),
}

/// Unpublishes and detaches the sandbox of this pod, if the runtime names one. Without a binding it is
/// searched among those of the node.
pub(crate) fn detach<D: Disk>(
    verb: &VerbContext<'_, D>,
    conf: &ClusterConf,
    (pod, attachment): (Option<&PodIdentity>, &Attachment),
    binding: Option<&StickyBinding>,
    log: &VerbLog<'_>,
) -> Result<(), ClusterDelError> {
    let (container, own_id) = (attachment.container.as_str(), attachment.id());
    let outcome = block_on(async {
        let api = Connection::open(&conf.kubeconfig, conf.timeout).await?;
        let mut api_writer = ApiWriter::new(api, log.observer);
        let key = match binding {
            Some(binding) => Some(binding.key.clone()),
            None => detach::find(&api_writer, &conf.node, &own_id).await?,
        };
        let Some(key) = key else { return Ok(DetachOutcome::NotAttached) };
        let claimant = ClaimantKey::of_sticky(&key, &attachment.interface);
        // The store may never have been opened on this node, and the lock lies in it.
        drop(verb.store.lock()?);
        let _pool_lock = verb.store.pool_lock(&claimant, verb.sticky.lock_timeout)?;
        let node = ThisNode {
            name: &conf.node,
            store: &verb.store,
            netns_may_exist: &may_exist,
            on_attaching: &|_, _| {},
        };
        // The API server may know the sandbox by the id that was prepared, or by that of its pod's older
        // sandbox.
        let id = binding.and_then(|binding| binding.attachment_id.as_ref()).unwrap_or(&own_id);
        let cilium_knows = verb.mode.cilium_picks_the_address();
        let endpoint_gone = async |addresses: &[IpAddr]| {
            addresses
                .iter()
                .filter(|_| cilium_knows)
                .try_for_each(|address| ensure_no_endpoint(conf, *address))
        };
        let sandbox = EndedSandbox {
            key: &key,
            interface: &attachment.interface,
            ids: &[own_id.clone(), id.clone()],
            snapshot_for: pod,
        };
        node.detach(&mut api_writer, &publish_config(verb), &sandbox, endpoint_gone).await
    });
    match outcome? {
        DetachOutcome::Detached(detached) => {
            let view = StickyView::from(&detached.object);
            let addresses = crate::node::list(&view.addresses);
            tracing::info!(container, sticky_ip = %view.key, addresses, "detached");
        }
        DetachOutcome::InUseBy(newer) => {
            let newer = newer.as_str();
            tracing::debug!(container, newer, "not detached: a newer sandbox has the StickyIP");
        }
        DetachOutcome::NotAttached | DetachOutcome::NoStickyIP => {}
    }
    Ok(())
}

/// A DEL of cilium-cni that succeeded does not prove that the endpoint is gone: while cilium-agent is away it
/// is only queued. And another pod may have the address by now: one of the same name that is not sticky gets
/// what the pool has for that name, and an adopted address was free for any pod until its claim was granted.
/// Without its pool entry a live endpoint loses its network with the next start of cilium-agent. So the agent
/// of this node detaches, once no endpoint has the address.
fn ensure_no_endpoint(conf: &ClusterConf, address: IpAddr) -> Result<(), ClusterDelError> {
    match socket::endpoint(&conf.cilium_socket, address) {
        Ok(EndpointAnswer::Absent) => Ok(()),
        Ok(EndpointAnswer::There(_)) => Err(ClusterDelError::EndpointExists { address }),
        Err(source) => Err(ClusterDelError::CiliumSocket { address, source }),
    }
}

/// Whether this sandbox is still attached in the API server. If that cannot be asked, CHECK does not fail.
pub(crate) fn check(
    conf: &ClusterConf,
    binding: &StickyBinding,
    attachment: &Attachment,
) -> Result<(), CniError> {
    let key = &binding.key;
    let read = block_on(async {
        let api = Connection::open(&conf.kubeconfig, conf.timeout).await?;
        Ok(bind::read_sticky(&ApiWriter::new(api, &NoObserver), key).await?)
    });
    let object = match read {
        Ok(object) => object,
        Err(ClusterDelError::Runtime(error)) => return Err(error),
        Err(error) => {
            let container = attachment.container.as_str();
            tracing::warn!(container, sticky_ip = %key, %error, "cannot check the binding");
            return Ok(());
        }
    };
    let status = object.as_ref().and_then(|object| object.status.as_ref());
    let attached = status.and_then(|status| status.attachment.as_ref()).map(|held| &held.attachment_id);
    let ours = [Some(&attachment.id()), binding.attachment_id.as_ref()];
    if attached.is_some() && ours.contains(&attached) {
        return Ok(());
    }
    let other = attached.map_or_else(|| "no container".to_owned(), |id| format!("container {id}"));
    Err(CniError::new(code::CHECK_FAILED, format!("StickyIP {key} is attached to {other}")))
}

/// Whether an ADD could succeed, as far as the node knows.
pub(crate) fn is_ready(conf: &ClusterConf) -> Result<(), CniError> {
    if bypass::is_on(conf) {
        return Ok(());
    }
    match std::fs::File::open(&conf.kubeconfig) {
        Err(error) if conf.on_unavailable == OnUnavailable::Fail => Err(CniError::not_available(format!(
            "cannot read the kubeconfig {}: {error}; the agent of this node writes it",
            conf.kubeconfig.display()
        ))),
        _ => Ok(()),
    }
}
