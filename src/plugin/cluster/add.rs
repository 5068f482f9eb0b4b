//! The cluster's part of ADD: the agent's prepared decision first, else the API server, else what this node remembers.
//! Must never give a sticky pod another address than its own, unless the operator allowed it.

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;

use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::objects::StickyKey;
use crate::cni::{Attachment, ClusterConf, CniError, OnUnavailable, PodIdentity, Request};
use crate::plugin::cluster::addresses::{AddressSource, NodeAddresses};
use crate::plugin::cluster::api::ask;
use crate::plugin::{VerbContext, VerbLog, attachment};
use crate::store;
use crate::store::{
    ClaimantLock, Decision, Disk, LockedStore, PendingUpdate, Phase, Record, StoredRecord, Told,
};

/// Why the cluster's part of an ADD did not come to an end.
pub(crate) enum AddError {
    /// The runtime gets this.
    Told(CniError),
    /// The API server could not be asked; nothing stands there.
    Unreachable(ApiError),
    /// The API server went away in the middle.
    WriteInDoubt(ApiError),
}

impl From<CniError> for AddError {
    fn from(error: CniError) -> Self {
        Self::Told(error)
    }
}

/// Who is to be added, where.
pub(crate) struct AddContext<'a, D: Disk> {
    pub(crate) request: &'a Request,
    pub(crate) scene: &'a VerbContext<'a, D>,
    pub(crate) conf: &'a ClusterConf,
    pub(crate) pod: &'a PodIdentity,
}

/// What came of an ADD.
pub(crate) enum Resolved {
    /// The pod is sticky.
    Sticky(Reserved),
    /// It is not, or is to be served without the cluster. Its turn, where it was taken: until the pod has what it gets instead,
    /// nobody shall decide otherwise.
    Plain(Option<ClaimantLock>),
}

impl From<Vec<IpAddr>> for Resolved {
    fn from(addresses: Vec<IpAddr>) -> Self {
        Self::Sticky(Reserved { addresses, pending_record: None })
    }
}

/// What a sticky pod gets.
pub(crate) struct Reserved {
    /// By range set where this node has some.
    pub(crate) addresses: Vec<IpAddr>,
    /// In `crd` mode, what is left to be written before ADD answers.
    pub(crate) pending_record: Option<Box<PendingRecord>>,
}

/// The agent's decision of which the pod's record is still to be made, and the pod's turn. Until then the decision speaks for
/// the pod: whoever comes after a process that ended in between finds it as it was.
pub(crate) struct PendingRecord {
    decision: Decision,
    claimant_lock: ClaimantLock,
}

impl PendingRecord {
    /// Makes the record, and returns when it is on the disk.
    pub(crate) fn write<D: Disk>(self, errand: &AddContext<'_, D>) -> Result<(), CniError> {
        write_decided_record(errand, errand.scene.store.lock()?, &self.decision)?;
        drop(self.claimant_lock);
        Ok(())
    }
}

/// Finds out whether the pod is sticky, and what it gets then.
pub(crate) fn add<D: Disk>(
    errand: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    story: &mut VerbLog<'_>,
) -> Result<Resolved, CniError> {
    let AddContext { request, scene, conf, pod, .. } = *errand;
    let attachment = attachment(request)?;
    // What the node has decided already needs no call.
    let is_decided = pod.uid().is_some_and(|uid| scene.store.has_decision(uid));
    let asks = !is_decided && !scene.store.has_record(attachment);
    // Held until the record stands: no second pod of this name comes in between.
    let mut claimant_lock = None;
    let asked = block_on(async {
        let line = if asks { Some(start_connecting(conf).await) } else { None };
        let last_known = match look_up_locally(errand, attachment, wanted, story)? {
            LocalLookup::Answered(added) => return Ok(Some(added)),
            LocalLookup::AskApi { last_known, claimant_lock: its } => {
                claimant_lock = Some(its);
                last_known
            }
        };
        let line = match line {
            Some(line) => line,
            None => Connection::open(&conf.kubeconfig, conf.timeout).await,
        };
        let asked = ask(line.map_err(AddError::Unreachable)?, errand, wanted, last_known, story).await?;
        Ok(asked.map(Resolved::from))
    })?;
    let (unasked, error) = match asked {
        Ok(added) => return Ok(added.unwrap_or(Resolved::Plain(claimant_lock))),
        Err(AddError::Told(error)) => return Err(error),
        Err(AddError::Unreachable(error)) => (true, error),
        Err(AddError::WriteInDoubt(error)) => (false, error),
    };
    if let Some(addresses) = from_local_record(request, scene, pod, attachment)? {
        let shown = crate::plugin::list(&addresses);
        tracing::warn!(%pod, addresses = shown, %error, "the API server was of no help; the pod has what this node remembers of it");
        story.tell(&addresses, "remembered, the API server is away");
        return Ok(addresses.into());
    }
    match conf.on_unavailable {
        OnUnavailable::Allocate if unasked => {
            tracing::warn!(%pod, %error, "the API server was of no help; the pod gets an address that it does not keep");
            Ok(Resolved::Plain(claimant_lock))
        }
        // In doubt the runtime's DEL comes first and takes back what may stand.
        _ => Err(CniError::try_again(error.to_string())),
    }
}

/// Calls the API server, and comes back while it answers: there is the node's store to be read meanwhile.
async fn start_connecting(conf: &ClusterConf) -> Result<Connection, ApiError> {
    let line = Connection::open(&conf.kubeconfig, conf.timeout).await?;
    // The connection, then the first words of the handshake. One that takes longer goes on with the first question.
    for _ in 0..2 {
        tokio::task::yield_now().await;
    }
    Ok(line)
}

/// What this node knows of a pod before anybody is asked.
enum LocalLookup {
    /// All that is needed.
    Answered(Resolved),
    /// Too little. And its turn.
    AskApi { last_known: LastKnown, claimant_lock: ClaimantLock },
}

/// What was a pod's own before, and most likely still is.
#[derive(Default)]
pub(crate) struct LastKnown {
    /// Its addresses.
    pub(crate) addresses: BTreeSet<IpAddr>,
    /// Its StickyIP as it stood when this node let go of it.
    pub(crate) detached_snapshot: Option<Vec<u8>>,
}

fn look_up_locally<D: Disk>(
    errand: &AddContext<'_, D>,
    attachment: &Attachment,
    wanted: &[Option<IpAddr>],
    story: &mut VerbLog<'_>,
) -> Result<LocalLookup, CniError> {
    let AddContext { scene, pod, .. } = *errand;
    let itself = store::Claimant::new(pod, &attachment.interface);
    let last_known = {
        let mut locked = scene.store.lock()?;
        if let Some(held) = locked.find_by_attachment(attachment)? {
            return repeat_answer(locked, &held, story);
        }
        // Most likely they are still the pod's own, so their claims can be asked for before its StickyIP has named them.
        match locked.find_by_claimant(&itself)? {
            Some(kept) => LastKnown {
                addresses: kept.record.addresses.into_iter().collect(),
                detached_snapshot: locked.detached_snapshot(&itself),
            },
            None => LastKnown::default(),
        }
    };
    let claimant_lock = scene.store.claimant_lock(&itself, scene.sticky.lock_timeout)?;
    if scene.store.has_record(attachment) {
        // Another ADD of this very sandbox had the turn.
        let mut locked = scene.store.lock()?;
        if let Some(held) = locked.find_by_attachment(attachment)? {
            return repeat_answer(locked, &held, story);
        }
    }
    // Whoever decides about the pod has this turn, so what is not there now does not come.
    let Some(uid) =
        pod.uid().filter(|uid| wanted.iter().all(Option::is_none) && scene.store.has_decision(uid))
    else {
        return Ok(LocalLookup::AskApi { last_known, claimant_lock });
    };
    let mut locked = scene.store.lock()?;
    let decision = locked.prepared(uid, &attachment.interface)?;
    let Some(decision) = decision.filter(|decision| decision.is_for(pod, scene.store.now())) else {
        return Ok(LocalLookup::AskApi { last_known, claimant_lock });
    };
    let Some(sticky) = &decision.sticky else {
        tracing::debug!(%pod, reason = decision.reason, "the pod is not sticky, as was decided before");
        return Ok(LocalLookup::Answered(Resolved::Plain(Some(claimant_lock))));
    };
    let from = format!("prepared for StickyIP {}/{}", sticky.namespace, sticky.name);
    let addresses = sticky.addresses.clone();
    if scene.mode.cilium_picks_the_address() {
        // Attached and shown already, so Cilium can be at work while the disk is.
        story.tell(&addresses, from);
        let pending_record = Some(Box::new(PendingRecord { decision, claimant_lock }));
        return Ok(LocalLookup::Answered(Resolved::Sticky(Reserved { addresses, pending_record })));
    }
    let addresses = write_decided_record(errand, locked, &decision)?;
    story.tell(&addresses, from);
    Ok(LocalLookup::Answered(addresses.into()))
}

/// The answer to a repeated ADD.
fn repeat_answer<D: Disk>(
    mut locked: LockedStore<'_, D>,
    held: &StoredRecord,
    story: &mut VerbLog<'_>,
) -> Result<LocalLookup, CniError> {
    if held.record.binding.is_none() {
        return Ok(LocalLookup::Answered(Resolved::Plain(None)));
    }
    locked.sync_existing(held)?;
    locked.commit()?;
    story.tell(&held.record.addresses, "this container has it already");
    Ok(LocalLookup::Answered(held.record.addresses.clone().into()))
}

/// Makes the record of a sticky pod's decision, which is used up by that. Tells its addresses, by range set.
fn write_decided_record<D: Disk>(
    errand: &AddContext<'_, D>,
    locked: LockedStore<'_, D>,
    decision: &Decision,
) -> Result<Vec<IpAddr>, CniError> {
    let AddContext { request, scene, conf, pod } = *errand;
    let Some(sticky) = &decision.sticky else {
        return Err(CniError::internal("there is no record of a pod that is not sticky"));
    };
    let home = AddressSource::of_attached(scene.mode, &scene.ipam.sets);
    let mut here = NodeAddresses {
        request,
        scene,
        home: &home,
        node: &conf.node,
        attachment: attachment(request)?,
        key: StickyKey { namespace: sticky.namespace.clone(), name: sticky.name.clone() },
        pod: pod.clone(),
        reserved: Vec::new(),
        draft: None,
    };
    here.write_record(locked, &sticky.addresses, Some(decision))
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
fn from_local_record<D: Disk>(
    request: &Request,
    scene: &VerbContext<'_, D>,
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
        let seen = scene.store.lock()?.find_by_entry(entry)?;
        let Some(binding) = seen.and_then(|stored| its_own(&stored.record)) else { continue };
        let claimant = store::Claimant::bound(&binding.namespace, &binding.name, &attachment.interface);
        // The agent may be about to detach the pod's older sandbox: it has looked for a living one and found none.
        let _pool_lock = scene.store.pool_lock(&claimant, scene.sticky.lock_timeout)?;
        let mut locked = scene.store.lock()?;
        let Some(stored) = locked.find_by_entry(entry)? else { continue };
        let Some(binding) = its_own(&stored.record) else { continue };
        let renewed = Record {
            attachment: attachment.clone(),
            phase: Phase::Attached,
            netns: request.netns.clone(),
            since: scene.store.now().clone(),
            ..stored.record.clone()
        };
        locked.put(&renewed, Some(&stored))?;
        let note = PendingUpdate {
            what: Told::Attached,
            container: attachment.container.as_str().to_owned(),
            interface: attachment.interface.as_str().to_owned(),
            namespace: Some(binding.namespace),
            name: Some(binding.name),
            attachment_id: Some(binding.container),
            uid: Some(uid.to_owned()),
            at: scene.store.now().clone(),
        };
        locked.put_pending_update(attachment, &note)?;
        locked.commit()?;
        return Ok(Some(renewed.addresses));
    }
    Ok(None)
}
