//! The cluster's part of ADD: the agent's prepared decision first, else the API server, else what this node remembers.
//! Must never give a sticky pod another address than its own, unless the operator allowed it.

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;

use super::ask::ask;
use super::ground::{Here, Home};
use super::{Scene, Story, attachment};
use crate::cluster::client::ApiError;
use crate::cluster::objects::Holder;
use crate::cni::{Attachment, ClusterConf, CniError, OnUnavailable, PodIdentity, Request};
use crate::store::{self, Binding, Disk, Note, Phase, Record, Told};

/// Why the cluster's part of an ADD did not come to an end.
pub(super) enum Why {
    /// The runtime gets this.
    Told(CniError),
    /// The API server could not be asked; nothing was written yet.
    Unasked(ApiError),
    /// The API server went away in the middle.
    Doubt(ApiError),
}

impl From<CniError> for Why {
    fn from(error: CniError) -> Self {
        Self::Told(error)
    }
}

/// Who is to be added, where.
pub(super) struct Errand<'a, D: Disk> {
    pub(super) request: &'a Request,
    pub(super) scene: &'a Scene<'a, D>,
    pub(super) conf: &'a ClusterConf,
    pub(super) pod: &'a PodIdentity,
    /// Cilium picks the address from its pool; this node's ranges are its CiliumNode's.
    pub(super) crd: bool,
}

/// The addresses of a sticky pod, by range set where this node has some; none if the pod is not sticky, or is to be served
/// without the cluster.
pub(super) fn add<D: Disk>(
    errand: &Errand<'_, D>,
    wanted: &[Option<IpAddr>],
    story: &mut Story<'_>,
) -> Result<Option<Vec<IpAddr>>, CniError> {
    let Errand { request, scene, conf, pod, .. } = *errand;
    let attachment = attachment(request)?;
    let itself = store::Claimant::new(pod, &attachment.interface);
    let remembered: BTreeSet<IpAddr> = {
        let mut locked = scene.store.lock()?;
        if let Some(held) = locked.of_attachment(attachment)? {
            if held.record.binding.is_none() {
                return Ok(None);
            }
            locked.sync_again(&held)?;
            locked.commit()?;
            story.tell(&held.record.addresses, "this container has it already");
            return Ok(Some(held.record.addresses));
        }
        // Most likely they are still the pod's own, so their claims can be asked for before its StickyIP has named them.
        locked
            .of_claimant(&itself)?
            .map(|kept| kept.record.addresses)
            .unwrap_or_default()
            .into_iter()
            .collect()
    };
    let _turn = scene.store.turn(&itself, scene.sticky.lock_timeout)?;
    if wanted.iter().all(Option::is_none)
        && let Some(prepared) = prepared(errand, attachment, story)?
    {
        return Ok(prepared);
    }
    let asked = block_on(ask(errand, wanted, &remembered, story))?;
    let (unasked, error) = match asked {
        Ok(answer) => return Ok(answer),
        Err(Why::Told(error)) => return Err(error),
        Err(Why::Unasked(error)) => (true, error),
        Err(Why::Doubt(error)) => (false, error),
    };
    if let Some(addresses) = from_record(request, scene, pod, attachment)? {
        let shown = super::list(&addresses);
        tracing::warn!(%pod, addresses = shown, %error, "the API server was of no help; the pod has what this node remembers of it");
        story.tell(&addresses, "remembered, the API server is away");
        return Ok(Some(addresses));
    }
    match conf.on_unavailable {
        OnUnavailable::Allocate if unasked => {
            tracing::warn!(%pod, %error, "the API server was of no help; the pod gets an address that it does not keep");
            Ok(None)
        }
        // In doubt the runtime's DEL comes first and takes back what may stand.
        _ => Err(CniError::try_again(error.to_string())),
    }
}

/// What the agent has decided about this pod before: nothing; that it is not sticky; or its addresses, which are attached
/// and shown already. The decision is used up by that.
#[allow(clippy::option_option, reason = "undecided, not sticky, sticky")]
fn prepared<D: Disk>(
    errand: &Errand<'_, D>,
    attachment: &Attachment,
    story: &mut Story<'_>,
) -> Result<Option<Option<Vec<IpAddr>>>, CniError> {
    let Errand { request, scene, conf, pod, crd } = *errand;
    let Some(uid) = pod.uid() else { return Ok(None) };
    let mut locked = scene.store.lock()?;
    let decision = locked.prepared(uid, &attachment.interface)?;
    let Some(decision) = decision.filter(|decision| decision.is_for(pod, scene.store.now())) else {
        return Ok(None);
    };
    let Some(sticky) = &decision.sticky else {
        tracing::debug!(%pod, reason = decision.reason, "the pod is not sticky, as was decided before");
        return Ok(Some(None));
    };
    let home = if crd { Home::elsewhere() } else { Home::of_ranges(&scene.ipam.sets) };
    let here = Here {
        request,
        scene,
        home: &home,
        node: &conf.node,
        attachment,
        key: Holder { namespace: sticky.namespace.clone(), name: sticky.name.clone() },
        pod: pod.clone(),
        reserved: Vec::new(),
    };
    let addresses = here.settle(locked, &sticky.addresses, Some(&decision))?;
    story.tell(&addresses, format!("prepared for StickyIP {}", here.key));
    Ok(Some(Some(addresses)))
}

/// Waits for the API server, in this one thread.
pub(super) fn block_on<T>(work: impl Future<Output = T>) -> Result<T, CniError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime {
        Ok(runtime) => Ok(runtime.block_on(work)),
        Err(error) => Err(CniError::io(format!("cannot wait for the API server: {error}"))),
    }
}

/// What this node remembers of this very pod, for its new sandbox. Of this very pod only: a pod of the same name and
/// another uid may have come after one that lives elsewhere (docs/decisions/0013).
fn from_record<D: Disk>(
    request: &Request,
    scene: &Scene<'_, D>,
    pod: &PodIdentity,
    attachment: &Attachment,
) -> Result<Option<Vec<IpAddr>>, CniError> {
    let Some(uid) = pod.uid() else { return Ok(None) };
    let entries = scene.store.claimants()?;
    let mut locked = scene.store.lock()?;
    for entry in &entries {
        let Some(stored) = locked.of_entry(entry)? else { continue };
        let record = &stored.record;
        let its_own = record.pod.as_ref().is_some_and(|known| {
            known.uid() == Some(uid) && known.name() == pod.name() && known.namespace() == pod.namespace()
        });
        // One that was only reserved was never attached, so it proves nothing.
        let was_attached = |binding: &Binding| !binding.container.is_empty();
        let binding = record.binding.clone().filter(|binding| its_own && was_attached(binding));
        let Some(binding) = binding else { continue };
        if record.attachment.interface != attachment.interface {
            continue;
        }
        let renewed = Record {
            attachment: attachment.clone(),
            phase: Phase::Attached,
            netns: request.netns.clone(),
            since: scene.store.now().clone(),
            ..record.clone()
        };
        locked.put(&renewed, Some(&stored))?;
        let note = Note {
            what: Told::Attached,
            container: attachment.container.as_str().to_owned(),
            interface: attachment.interface.as_str().to_owned(),
            namespace: Some(binding.namespace),
            name: Some(binding.name),
            known_as: Some(binding.container),
            uid: Some(uid.to_owned()),
            at: scene.store.now().clone(),
        };
        locked.leave_note(attachment, &note)?;
        locked.commit()?;
        return Ok(Some(renewed.addresses));
    }
    Ok(None)
}
