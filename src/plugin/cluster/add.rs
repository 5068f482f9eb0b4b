//! The cluster's part of ADD: the agent's prepared decision first, else the API server, else what this node remembers.
//! Must never give a sticky pod another address than its own, unless the operator allowed it.

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;

use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::objects::Holder;
use crate::cni::{Attachment, ClusterConf, CniError, OnUnavailable, PodIdentity, Request};
use crate::plugin::cluster::addresses::{Here, Home};
use crate::plugin::cluster::api::ask;
use crate::plugin::{Scene, Story, attachment};
use crate::store;
use crate::store::{Decision, Disk, Locked, Note, Phase, Record, Stored, Told, Turn};

/// Why the cluster's part of an ADD did not come to an end.
pub(crate) enum Why {
    /// The runtime gets this.
    Told(CniError),
    /// The API server could not be asked; nothing stands there.
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
pub(crate) struct Errand<'a, D: Disk> {
    pub(crate) request: &'a Request,
    pub(crate) scene: &'a Scene<'a, D>,
    pub(crate) conf: &'a ClusterConf,
    pub(crate) pod: &'a PodIdentity,
    /// Cilium picks the address from its pool; this node's ranges are its CiliumNode's.
    pub(crate) crd: bool,
}

/// What came of an ADD.
pub(crate) enum Added {
    /// The pod is sticky.
    Sticky(Bound),
    /// It is not, or is to be served without the cluster. Its turn, where it was taken: until the pod has what it gets instead,
    /// nobody shall decide otherwise.
    Plain(Option<Turn>),
}

impl From<Vec<IpAddr>> for Added {
    fn from(addresses: Vec<IpAddr>) -> Self {
        Self::Sticky(Bound { addresses, unwritten: None })
    }
}

/// What a sticky pod gets.
pub(crate) struct Bound {
    /// By range set where this node has some.
    pub(crate) addresses: Vec<IpAddr>,
    /// In `crd` mode, what is left to be written before ADD answers.
    pub(crate) unwritten: Option<Box<Unwritten>>,
}

/// The agent's decision of which the pod's record is still to be made, and the pod's turn. Until then the decision speaks for
/// the pod: whoever comes after a process that ended in between finds it as it was.
pub(crate) struct Unwritten {
    decision: Decision,
    turn: Turn,
}

impl Unwritten {
    /// Makes the record, and returns when it is on the disk.
    pub(crate) fn write<D: Disk>(self, errand: &Errand<'_, D>) -> Result<(), CniError> {
        take_over(errand, errand.scene.store.lock()?, &self.decision)?;
        drop(self.turn);
        Ok(())
    }
}

/// Finds out whether the pod is sticky, and what it gets then.
pub(crate) fn add<D: Disk>(
    errand: &Errand<'_, D>,
    wanted: &[Option<IpAddr>],
    story: &mut Story<'_>,
) -> Result<Added, CniError> {
    let Errand { request, scene, conf, pod, .. } = *errand;
    let attachment = attachment(request)?;
    // What the node has decided already needs no call.
    let is_decided = pod.uid().is_some_and(|uid| scene.store.has_decision(uid));
    let asks = !is_decided && !scene.store.has_record(attachment);
    // Held until the record stands: no second pod of this name comes in between.
    let mut turn = None;
    let asked = block_on(async {
        let line = if asks { Some(call(conf).await) } else { None };
        let remembered = match recall(errand, attachment, wanted, story)? {
            Recalled::Enough(added) => return Ok(Some(added)),
            Recalled::Little { remembered, turn: its } => {
                turn = Some(its);
                remembered
            }
        };
        let line = match line {
            Some(line) => line,
            None => Connection::open(&conf.kubeconfig, conf.timeout).await,
        };
        let asked = ask(line.map_err(Why::Unasked)?, errand, wanted, remembered, story).await?;
        Ok(asked.map(Added::from))
    })?;
    let (unasked, error) = match asked {
        Ok(added) => return Ok(added.unwrap_or(Added::Plain(turn))),
        Err(Why::Told(error)) => return Err(error),
        Err(Why::Unasked(error)) => (true, error),
        Err(Why::Doubt(error)) => (false, error),
    };
    if let Some(addresses) = from_record(request, scene, pod, attachment)? {
        let shown = crate::plugin::list(&addresses);
        tracing::warn!(%pod, addresses = shown, %error, "the API server was of no help; the pod has what this node remembers of it");
        story.tell(&addresses, "remembered, the API server is away");
        return Ok(addresses.into());
    }
    match conf.on_unavailable {
        OnUnavailable::Allocate if unasked => {
            tracing::warn!(%pod, %error, "the API server was of no help; the pod gets an address that it does not keep");
            Ok(Added::Plain(turn))
        }
        // In doubt the runtime's DEL comes first and takes back what may stand.
        _ => Err(CniError::try_again(error.to_string())),
    }
}

/// Calls the API server, and comes back while it answers: there is the node's store to be read meanwhile.
async fn call(conf: &ClusterConf) -> Result<Connection, ApiError> {
    let line = Connection::open(&conf.kubeconfig, conf.timeout).await?;
    // The connection, then the first words of the handshake. One that takes longer goes on with the first question.
    for _ in 0..2 {
        tokio::task::yield_now().await;
    }
    Ok(line)
}

/// What this node knows of a pod before anybody is asked.
enum Recalled {
    /// All that is needed.
    Enough(Added),
    /// Too little. And its turn.
    Little { remembered: Remembered, turn: Turn },
}

/// What was a pod's own before, and most likely still is.
#[derive(Default)]
pub(crate) struct Remembered {
    /// Its addresses.
    pub(crate) addresses: BTreeSet<IpAddr>,
    /// Its StickyIP as it stood when this node let go of it.
    pub(crate) parting: Option<Vec<u8>>,
}

fn recall<D: Disk>(
    errand: &Errand<'_, D>,
    attachment: &Attachment,
    wanted: &[Option<IpAddr>],
    story: &mut Story<'_>,
) -> Result<Recalled, CniError> {
    let Errand { scene, pod, .. } = *errand;
    let itself = store::Claimant::new(pod, &attachment.interface);
    let remembered = {
        let mut locked = scene.store.lock()?;
        if let Some(held) = locked.of_attachment(attachment)? {
            return has_it_already(locked, &held, story);
        }
        // Most likely they are still the pod's own, so their claims can be asked for before its StickyIP has named them.
        match locked.of_claimant(&itself)? {
            Some(kept) => Remembered {
                addresses: kept.record.addresses.into_iter().collect(),
                parting: locked.parting(&itself),
            },
            None => Remembered::default(),
        }
    };
    let turn = scene.store.turn(&itself, scene.sticky.lock_timeout)?;
    if scene.store.has_record(attachment) {
        // Another ADD of this very sandbox had the turn.
        let mut locked = scene.store.lock()?;
        if let Some(held) = locked.of_attachment(attachment)? {
            return has_it_already(locked, &held, story);
        }
    }
    // Whoever decides about the pod has this turn, so what is not there now does not come.
    let Some(uid) =
        pod.uid().filter(|uid| wanted.iter().all(Option::is_none) && scene.store.has_decision(uid))
    else {
        return Ok(Recalled::Little { remembered, turn });
    };
    let mut locked = scene.store.lock()?;
    let decision = locked.prepared(uid, &attachment.interface)?;
    let Some(decision) = decision.filter(|decision| decision.is_for(pod, scene.store.now())) else {
        return Ok(Recalled::Little { remembered, turn });
    };
    let Some(sticky) = &decision.sticky else {
        tracing::debug!(%pod, reason = decision.reason, "the pod is not sticky, as was decided before");
        return Ok(Recalled::Enough(Added::Plain(Some(turn))));
    };
    let from = format!("prepared for StickyIP {}/{}", sticky.namespace, sticky.name);
    let addresses = sticky.addresses.clone();
    if errand.crd {
        // Attached and shown already, so Cilium can be at work while the disk is.
        story.tell(&addresses, from);
        let unwritten = Some(Box::new(Unwritten { decision, turn }));
        return Ok(Recalled::Enough(Added::Sticky(Bound { addresses, unwritten })));
    }
    let addresses = take_over(errand, locked, &decision)?;
    story.tell(&addresses, from);
    Ok(Recalled::Enough(addresses.into()))
}

/// The answer to a repeated ADD.
fn has_it_already<D: Disk>(
    mut locked: Locked<'_, D>,
    held: &Stored,
    story: &mut Story<'_>,
) -> Result<Recalled, CniError> {
    if held.record.binding.is_none() {
        return Ok(Recalled::Enough(Added::Plain(None)));
    }
    locked.sync_again(held)?;
    locked.commit()?;
    story.tell(&held.record.addresses, "this container has it already");
    Ok(Recalled::Enough(held.record.addresses.clone().into()))
}

/// Makes the record of a sticky pod's decision, which is used up by that. Tells its addresses, by range set.
fn take_over<D: Disk>(
    errand: &Errand<'_, D>,
    locked: Locked<'_, D>,
    decision: &Decision,
) -> Result<Vec<IpAddr>, CniError> {
    let Errand { request, scene, conf, pod, crd } = *errand;
    let Some(sticky) = &decision.sticky else {
        return Err(CniError::internal("there is no record of a pod that is not sticky"));
    };
    let home = if crd { Home::elsewhere() } else { Home::of_ranges(&scene.ipam.sets) };
    let mut here = Here {
        request,
        scene,
        home: &home,
        node: &conf.node,
        attachment: attachment(request)?,
        key: Holder { namespace: sticky.namespace.clone(), name: sticky.name.clone() },
        pod: pod.clone(),
        reserved: Vec::new(),
        draft: None,
    };
    here.settle(locked, &sticky.addresses, Some(decision))
}

/// Waits for the API server, in this one thread.
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> Result<T, CniError> {
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
    // One that was only reserved was never attached, and one that was let go of is another's by now: neither proves anything.
    let its_own = |record: &Record| {
        let is_meant = record.pod.as_ref().is_some_and(|known| {
            known.uid() == Some(uid) && known.name() == pod.name() && known.namespace() == pod.namespace()
        });
        let binding = record.binding.clone().filter(|binding| is_meant && !binding.container.is_empty());
        binding.filter(|_| record.attachment.interface == attachment.interface)
    };
    for entry in &scene.store.claimants()? {
        let seen = scene.store.lock()?.of_entry(entry)?;
        let Some(binding) = seen.and_then(|stored| its_own(&stored.record)) else { continue };
        let claimant = store::Claimant::bound(&binding.namespace, &binding.name, &attachment.interface);
        // The agent may be about to detach the pod's older sandbox: it has looked for a living one and found none.
        let _turn = scene.store.pool_turn(&claimant, scene.sticky.lock_timeout)?;
        let mut locked = scene.store.lock()?;
        let Some(stored) = locked.of_entry(entry)? else { continue };
        let Some(binding) = its_own(&stored.record) else { continue };
        let renewed = Record {
            attachment: attachment.clone(),
            phase: Phase::Attached,
            netns: request.netns.clone(),
            since: scene.store.now().clone(),
            ..stored.record.clone()
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
