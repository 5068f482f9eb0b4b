//! The cluster's part of the other verbs: a sandbox that has ended is hidden and detached, one that is checked is looked up,
//! and STATUS looks whether the API server could be asked. Must never detach what a newer sandbox has.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::cluster::api::client::Connection;
use crate::cluster::cilium::pool::PublishConfig;
use crate::cluster::cilium::socket;
use crate::cluster::cilium::socket::EndpointAnswer;
use crate::cluster::objects::StickyKey;
use crate::cluster::protocol::ADOPTED;
use crate::cluster::protocol::apply::{ApiWriter, NoObserver};
use crate::cluster::protocol::bind;
use crate::cluster::protocol::detach;
use crate::cluster::protocol::detach::{DetachError, Detached};
use crate::cluster::protocol::view::StickyView;
use crate::cni::{Attachment, ClusterConf, CniError, OnUnavailable, PodIdentity, code};
use crate::plugin::cluster::add::block_on;
use crate::plugin::{VerbContext, VerbLog};
use crate::store::{Claimant, Disk, LockedStore, StickyBinding, StoreError};

/// What a node's CiliumNode shows, by its configuration.
pub(crate) fn shape<D: Disk>(scene: &VerbContext<'_, D>) -> PublishConfig {
    let ranges = scene.ipam.sets.iter().flat_map(|set| set.ranges());
    let ranges: Vec<IpNet> = ranges.map(crate::alloc::range::Range::subnet).collect();
    PublishConfig { mode: scene.mode, ranges }
}

/// Hides and detaches the sandbox of this pod, if the runtime names one. Without a binding it is searched among the node's.
pub(crate) fn detach<D: Disk>(
    scene: &VerbContext<'_, D>,
    conf: &ClusterConf,
    (pod, attachment): (Option<&PodIdentity>, &Attachment),
    binding: Option<&StickyBinding>,
    story: &mut VerbLog<'_>,
) -> Result<(), String> {
    let container = attachment.container.as_str();
    let observer = story.observer;
    let work = async {
        let api =
            Connection::open(&conf.kubeconfig, conf.timeout).await.map_err(|error| error.to_string())?;
        let mut api_writer = ApiWriter::new(api, observer);
        let key = match binding {
            Some(b) => Some(StickyKey { namespace: b.namespace.clone(), name: b.name.clone() }),
            None => {
                detach::find(&api_writer, &conf.node, container).await.map_err(|error| error.to_string())?
            }
        };
        let Some(key) = key else { return Ok(None) };
        let claimant = Claimant::bound(&key.namespace, &key.name, &attachment.interface);
        // The store may never have been opened on this node.
        drop(scene.store.lock().map_err(|error| error.to_string())?);
        let pool_lock = scene.store.pool_lock(&claimant, scene.sticky.lock_timeout);
        let _pool_lock = pool_lock.map_err(|error| error.to_string())?;
        if newer_sandbox_has_it(scene, &claimant, attachment).map_err(|error| error.to_string())? {
            return Ok(None);
        }
        if scene.mode.cilium_picks_the_address()
            && binding.is_some_and(|binding| binding.container.starts_with(ADOPTED))
        {
            let object = bind::read_sticky(&api_writer, &key).await.map_err(|error| error.to_string())?;
            for address in object.iter().flat_map(|object| &object.spec.addresses) {
                ensure_no_endpoint(conf, *address)?;
            }
        }
        api_writer.api_mut().restart_time();
        // The sandbox may have taken the place of one that was prepared, or of its pod's older one. What is prepared for its pod's next
        // one bears the same name: the agent attaches and decides in this turn.
        let attachment_id = binding.map_or(container, |binding| binding.container.as_str());
        let awaited =
            scene.store.lock().and_then(|mut locked| locked.awaits_add(attachment_id, &attachment.interface));
        let attachment_id =
            if awaited.map_err(|error| error.to_string())? { container } else { attachment_id };
        let containers = [container, attachment_id];
        let left = detach::detach(&mut api_writer, &conf.node, &shape(scene), &key, &containers).await;
        if left.is_ok() || api_writer.count() > 0 {
            // Others may have the address from here on, also if the answer to the last write was lost.
            let mut locked = scene.store.lock().map_err(|error| error.to_string())?;
            let forgotten = locked.clear_attachment(&claimant, &containers);
            if let Ok(Some(left)) = &left {
                keep_snapshot(&mut locked, &claimant, left, pod);
            }
            forgotten.and_then(|()| locked.commit()).map_err(|error| error.to_string())?;
        }
        left.map_err(|error: DetachError| error.to_string())
    };
    let left: Result<Option<Detached>, String> = block_on(work).map_err(|error| error.to_string())?;
    if let Some(left) = left? {
        let view = StickyView::from(&left.object);
        tracing::info!(container, key = %view.key, addresses = crate::plugin::list(&view.addresses), "detached");
    }
    Ok(())
}

/// Keeps how a StickyIP stood when this node let go of it, for the claimant's next ADD here.
fn keep_snapshot<D: Disk>(
    locked: &mut LockedStore<'_, D>,
    claimant: &Claimant,
    left: &Detached,
    pod: Option<&PodIdentity>,
) {
    // A static pod has another uid for the runtime than in the API server, which only a read tells.
    if pod.and_then(PodIdentity::uid) != Some(&left.pod_uid) {
        return;
    }
    let mut object = left.object.clone();
    object.metadata.managed_fields = None;
    let remembered = match locked.find_by_claimant(claimant) {
        Ok(Some(_)) => locked.save_detached_snapshot(claimant, &object),
        kept => kept.map(drop),
    };
    if let Err(error) = remembered {
        tracing::debug!(%error, "the claimant's next ADD reads first");
    }
}

/// An address that anybody could have until its pod was marked. Cilium has known the owner since before the claim was granted; but if
/// somebody took the owner away by hand it may be with another pod. Then the agent detaches, once that one is gone too.
fn ensure_no_endpoint(conf: &ClusterConf, address: IpAddr) -> Result<(), String> {
    match socket::endpoint(&conf.cilium_socket, address) {
        Ok(EndpointAnswer::Absent) => Ok(()),
        Ok(EndpointAnswer::There(_)) => Err(format!("Cilium still has an endpoint with {address}")),
        Err(error) => Err(format!("cannot ask Cilium for the endpoint of {address}: {error}")),
    }
}

/// Whether a newer sandbox of this node has what the API server knows under this one's name: it took its place while the API
/// server was away.
fn newer_sandbox_has_it<D: Disk>(
    scene: &VerbContext<'_, D>,
    claimant: &Claimant,
    attachment: &Attachment,
) -> Result<bool, StoreError> {
    let held = scene.store.lock()?.find_by_claimant(claimant)?;
    Ok(held.is_some_and(|held| {
        held.record.is_attached(scene.store.now()) && held.record.attachment != *attachment
    }))
}

/// Whether the API server still says that this sandbox has the address. One that cannot be asked says nothing.
pub(crate) fn check(
    conf: &ClusterConf,
    binding: &StickyBinding,
    attachment: &Attachment,
) -> Result<(), CniError> {
    let key = StickyKey { namespace: binding.namespace.clone(), name: binding.name.clone() };
    let read = block_on(async {
        let api = Connection::open(&conf.kubeconfig, conf.timeout).await?;
        bind::read_sticky(&ApiWriter::new(api, &NoObserver), &key).await
    })?;
    let object = match read {
        Ok(object) => object,
        Err(error) => {
            let container = attachment.container.as_str();
            tracing::warn!(container, sticky_ip = %key, %error, "cannot check the binding");
            return Ok(());
        }
    };
    let status = object.as_ref().and_then(|object| object.status.as_ref());
    let holder = status.and_then(|status| status.attachment.as_ref()).map(|held| held.container_id.as_str());
    let ours = [attachment.container.as_str(), &binding.container];
    match holder {
        Some(holder) if ours.contains(&holder) => Ok(()),
        Some(holder) => Err(CniError::new(
            code::CHECK_FAILED,
            format!("StickyIP {key} is attached to container {holder}"),
        )),
        None => Err(CniError::new(code::CHECK_FAILED, format!("StickyIP {key} is attached to nobody"))),
    }
}

/// Whether an ADD of a sticky pod could succeed, as far as a look at the node tells.
pub(crate) fn is_ready(conf: &ClusterConf) -> Result<(), CniError> {
    match std::fs::File::open(&conf.kubeconfig) {
        Err(error) if conf.on_unavailable == OnUnavailable::Fail => Err(CniError::not_available(format!(
            "cannot read the kubeconfig {}: {error}; the agent of this node writes it",
            conf.kubeconfig.display()
        ))),
        _ => Ok(()),
    }
}
