//! The cluster's part of ADD: the agent's prepared decision first, else the API server, else this node's own
//! record. Must never give a sticky pod another address than its own, unless the operator allowed it.

use std::net::IpAddr;
use std::path::PathBuf;

use crate::cluster::api::client::Connection;
use crate::cni::{CniError, OnUnavailable};
use crate::names::{Attachment, PodIdentity, StickyKey};
use crate::node::addresses::{AddressSource, NodeAddresses, may_exist};
use crate::node::end::attached_update;
use crate::node::list;
use crate::plugin::VerbLog;
use crate::plugin::cluster::api::{ApiAnswer, bind_by_api};
use crate::plugin::cluster::bypass;
use crate::plugin::cluster::context::{AddContext, AddError, LastKnown, block_on, start_connecting};
use crate::plugin::cluster::record::{RecordSources, write_record};
use crate::policy::selection::rules::StickyReason;
use crate::store::{self, ClaimantLock, Decision, Disk, LockedStore, Record, RecordState, StoredRecord};

pub(crate) enum Resolved {
    Sticky(Reserved),
    /// It is not, or gets an address without the cluster. With its claimant lock, where that was taken: until
    /// the pod has its address, no other process may decide otherwise.
    Plain(Option<ClaimantLock>),
}

impl From<Vec<IpAddr>> for Resolved {
    fn from(addresses: Vec<IpAddr>) -> Self {
        Self::Sticky(Reserved { addresses, pending_record: None, dead_sandbox: None })
    }
}

pub(crate) struct Reserved {
    /// By range set where this node has some.
    pub(crate) addresses: Vec<IpAddr>,
    /// In `crd` mode, what is left to be written before ADD answers.
    pub(crate) pending_record: Option<Box<PendingRecord>>,
    /// The sandbox that had the addresses before on this node, if that is proved dead.
    pub(crate) dead_sandbox: Option<DeadSandbox>,
}

/// A sandbox whose record an ADD replaces, and why it is known to be dead.
pub(crate) struct DeadSandbox {
    pub(crate) attachment: Attachment,
    pub(crate) netns: Option<PathBuf>,
    pub(crate) proof: &'static str,
}

impl DeadSandbox {
    /// By the record that it left. A kubelet starts a new sandbox of a pod, by its uid, only after the old
    /// one has ended; and without its network namespace no sandbox runs. Else it may live.
    fn of(record: &Record, pod: &PodIdentity, attachment: &Attachment) -> Option<Self> {
        let uid = record.pod.as_ref().and_then(PodIdentity::uid);
        let proof = match &record.netns {
            _ if record.attachment == *attachment => return None,
            _ if uid.is_some() && uid == pod.uid() => "the same pod has a new sandbox",
            Some(netns) if !may_exist(netns) => "its network namespace is gone",
            _ => return None,
        };
        Some(Self { attachment: record.attachment.clone(), netns: record.netns.clone(), proof })
    }
}

/// The agent's decision of which the pod's record is still to be made, and the claimant lock. Until then the
/// decision stays: if this process ends in between, the next ADD finds it as it was.
pub(crate) struct PendingRecord {
    decision: Decision,
    claimant_lock: ClaimantLock,
}

impl PendingRecord {
    /// Makes the record, and returns when it is on the disk.
    pub(crate) fn write<D: Disk>(self, context: &AddContext<'_, D>) -> Result<(), CniError> {
        write_decided_record(context, context.verb.store.lock()?, &self.decision)?;
        drop(self.claimant_lock);
        Ok(())
    }
}

/// Finds out whether the pod is sticky, and what it gets then.
pub(crate) fn add<D: Disk>(
    context: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    log: &mut VerbLog<'_>,
) -> Result<Resolved, CniError> {
    let AddContext { verb, conf, pod, attachment } = *context;
    if bypass::is_on(conf)
        && let Some(resolved) = pass_unknown(context, wanted, log)?
    {
        return Ok(resolved);
    }
    // What the node has decided already needs no connection, and so no runtime to wait in.
    let is_decided = pod.uid().is_some_and(|uid| verb.store.has_decision(uid));
    let is_known = is_decided || verb.store.has_record(attachment);
    let looked_up = is_known.then(|| look_up_locally(context, wanted, log)).transpose()?;
    if let Some(LocalLookup::Answered(resolved)) = looked_up {
        return Ok(resolved);
    }
    // Held until the record is written: no second pod of this name comes in between.
    let mut claimant_lock = None;
    let asked = block_on(async {
        let (connection, looked_up) = match looked_up {
            Some(looked_up) => (Connection::open(&conf.kubeconfig, conf.timeout).await, looked_up),
            None => (start_connecting(conf).await, look_up_locally(context, wanted, log)?),
        };
        let (last_known, dead_sandbox) = match looked_up {
            LocalLookup::Answered(resolved) => return Ok(Some(resolved)),
            LocalLookup::AskApi { last_known, claimant_lock: held, dead_sandbox } => {
                claimant_lock = Some(held);
                (last_known, dead_sandbox)
            }
        };
        let connection = connection.map_err(AddError::Unreachable)?;
        match bind_by_api(connection, context, wanted, last_known, log).await? {
            ApiAnswer::Bound(addresses) => {
                Ok(Some(Resolved::Sticky(Reserved { addresses, pending_record: None, dead_sandbox })))
            }
            ApiAnswer::NotSticky(reason) => {
                remember_plain(context, &reason);
                Ok(None)
            }
        }
    });
    let (nothing_written, error) = match asked {
        Ok(added) => return Ok(added.unwrap_or(Resolved::Plain(claimant_lock))),
        Err(AddError::Rejected(error)) => return Err(error),
        Err(AddError::Unreachable(error)) => (true, error),
        Err(AddError::WriteInDoubt(error)) => (false, error),
    };
    if let Some(addresses) = from_local_record(context)? {
        let recorded = list(&addresses);
        tracing::warn!(
            %pod, addresses = recorded, %error,
            "API server unavailable; using the address recorded on this node"
        );
        log.report(&addresses, "recorded on this node, the API server is unavailable");
        return Ok(addresses.into());
    }
    match conf.on_unavailable {
        OnUnavailable::Allocate if nothing_written => {
            tracing::warn!(
                %pod, %error,
                "API server unavailable; using an address that the pod does not keep"
            );
            Ok(Resolved::Plain(claimant_lock))
        }
        // If a write is in doubt, the runtime's DEL comes first and undoes it.
        _ => Err(CniError::try_again(error.to_string())),
    }
}

/// What the node itself can say of a pod while the bypass is on. None: its claimant has a record here, so it
/// gets its own address in the usual way, or fails.
fn pass_unknown<D: Disk>(
    context: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    log: &mut VerbLog<'_>,
) -> Result<Option<Resolved>, CniError> {
    let AddContext { verb, pod, .. } = *context;
    match verb.store.lock() {
        // Where Cilium picks the address an ordinary pod needs no store, so a store that is of no use does
        // not stop it either.
        Err(error) if verb.mode.cilium_picks_the_address() => {
            tracing::warn!(%pod, %error, "the bypass is on, and the store is unusable: the pod is passed");
            log.report(&[], "passed by the bypass, the store is unusable");
            return Ok(Some(Resolved::Plain(None)));
        }
        opened => drop(opened?),
    }
    match look_up_locally(context, wanted, log)? {
        LocalLookup::Answered(resolved) => Ok(Some(resolved)),
        LocalLookup::AskApi { last_known, .. } if last_known.is_sticky => Ok(None),
        LocalLookup::AskApi { claimant_lock, .. } => {
            tracing::warn!(%pod, "the bypass is on: the pod is passed without asking whether it is sticky");
            log.report(&[], "passed by the bypass");
            Ok(Some(Resolved::Plain(Some(claimant_lock))))
        }
    }
}

/// Leaves the decision that the pod is not sticky, as the agent would have: its next sandbox needs no API
/// server. The caller has the claimant lock, under which the agent decides, too. Nothing depends on it, so it
/// fails no ADD.
fn remember_plain<D: Disk>(context: &AddContext<'_, D>, reason: &StickyReason) {
    let AddContext { verb, pod, attachment, .. } = *context;
    let now = verb.store.now().clone();
    let Some(decision) = Decision::about(pod, None, &reason.to_string(), now) else { return };
    let own_claimant = store::ClaimantKey::of_pod(pod, &attachment.interface);
    let written = verb.store.lock().and_then(|mut locked| {
        // It may have been adopted since it was read.
        let kept = locked.find_by_claimant(&own_claimant)?;
        let is_adopted = kept.is_some_and(|kept| {
            kept.record.binding.is_some() && kept.record.pod.is_some_and(|known| known.uid() == pod.uid())
        });
        if is_adopted { Ok(()) } else { locked.put_decision(&decision) }
    });
    if let Err(error) = written {
        tracing::warn!(%pod, %error, "cannot write down that the pod is not sticky; its next sandbox asks again");
    }
}

/// What this node knows of a pod before the API server is asked.
enum LocalLookup {
    Answered(Resolved),
    /// It does not. With the claimant lock.
    AskApi {
        last_known: LastKnown,
        claimant_lock: ClaimantLock,
        dead_sandbox: Option<DeadSandbox>,
    },
}

fn look_up_locally<D: Disk>(
    context: &AddContext<'_, D>,
    wanted: &[Option<IpAddr>],
    log: &mut VerbLog<'_>,
) -> Result<LocalLookup, CniError> {
    let AddContext { verb, pod, attachment, .. } = *context;
    let own_claimant = store::ClaimantKey::of_pod(pod, &attachment.interface);
    let (last_known, dead_sandbox) = {
        let mut locked = verb.store.lock()?;
        if let Some(held) = locked.find_by_attachment(attachment)? {
            return repeat_answer(locked, &held, log);
        }
        // Most likely they are still the pod's own, so their claims can be asked for before its StickyIP has
        // named them.
        match locked.find_by_claimant(&own_claimant)? {
            Some(kept) => {
                let dead_sandbox = DeadSandbox::of(&kept.record, pod, attachment);
                let last_known = LastKnown {
                    is_sticky: kept.record.binding.is_some(),
                    addresses: kept.record.addresses.into_iter().collect(),
                    detached_snapshot: locked.detached_snapshot(&own_claimant),
                };
                (last_known, dead_sandbox)
            }
            None => (LastKnown::default(), None),
        }
    };
    let claimant_lock = verb.store.claimant_lock(&own_claimant, verb.sticky.lock_timeout)?;
    if verb.store.has_record(attachment) {
        // Another ADD of this very sandbox had the lock.
        let mut locked = verb.store.lock()?;
        if let Some(held) = locked.find_by_attachment(attachment)? {
            return repeat_answer(locked, &held, log);
        }
    }
    // The agent decides under this lock, so a decision that does not exist now does not come.
    let Some(uid) =
        pod.uid().filter(|uid| wanted.iter().all(Option::is_none) && verb.store.has_decision(uid))
    else {
        return Ok(LocalLookup::AskApi { last_known, claimant_lock, dead_sandbox });
    };
    let mut locked = verb.store.lock()?;
    let decision = locked.find_decision(uid, &attachment.interface)?;
    let Some(decision) = decision.filter(|decision| decision.is_for(pod, verb.store.now())) else {
        return Ok(LocalLookup::AskApi { last_known, claimant_lock, dead_sandbox });
    };
    let Some(sticky) = &decision.sticky else {
        tracing::debug!(%pod, reason = decision.reason, "the pod is not sticky by its prepared decision");
        return Ok(LocalLookup::Answered(Resolved::Plain(Some(claimant_lock))));
    };
    let from = format!("prepared for StickyIP {}/{}", sticky.namespace, sticky.name);
    let addresses = sticky.addresses.clone();
    if verb.mode.cilium_picks_the_address() {
        // Attached and published already, so cilium-cni can run while the disk writes.
        log.report(&addresses, from);
        let pending_record = Some(Box::new(PendingRecord { decision, claimant_lock }));
        return Ok(LocalLookup::Answered(Resolved::Sticky(Reserved {
            addresses,
            pending_record,
            dead_sandbox,
        })));
    }
    let addresses = write_decided_record(context, locked, &decision)?;
    log.report(&addresses, from);
    Ok(LocalLookup::Answered(addresses.into()))
}

fn repeat_answer<D: Disk>(
    mut locked: LockedStore<'_, D>,
    held: &StoredRecord,
    log: &mut VerbLog<'_>,
) -> Result<LocalLookup, CniError> {
    if held.record.binding.is_none() {
        return Ok(LocalLookup::Answered(Resolved::Plain(None)));
    }
    locked.sync_existing(held)?;
    locked.commit()?;
    log.report(&held.record.addresses, "this container has it already");
    Ok(LocalLookup::Answered(held.record.addresses.clone().into()))
}

/// Makes the record of a sticky pod's decision, which is used up by that. Returns its addresses, by range
/// set.
fn write_decided_record<D: Disk>(
    context: &AddContext<'_, D>,
    locked: LockedStore<'_, D>,
    decision: &Decision,
) -> Result<Vec<IpAddr>, CniError> {
    let AddContext { verb, pod, attachment, .. } = *context;
    let Some(sticky) = &decision.sticky else {
        return Err(CniError::internal("a pod that is not sticky has no record"));
    };
    let source = AddressSource::of_attached(verb.mode, &verb.ipam.sets);
    let key = StickyKey { namespace: sticky.namespace.clone(), name: sticky.name.clone() };
    let node = NodeAddresses::new(context.node(&|_, _| {}), &source, key, pod, attachment);
    let sources = RecordSources { decision: Some(decision), ..RecordSources::default() };
    write_record(context, &node, locked, &sticky.addresses, sources)
}

/// What this node has recorded of this very pod, for its new sandbox. Of this very pod only: a pod of the
/// same name and another uid may have come after one that runs on another node (docs/decisions/0013).
fn from_local_record<D: Disk>(context: &AddContext<'_, D>) -> Result<Option<Vec<IpAddr>>, CniError> {
    let AddContext { verb, pod, attachment, .. } = *context;
    let Some(uid) = pod.uid() else { return Ok(None) };
    // A record that was only reserved was never attached, and a released one is another pod's by now: neither
    // proves anything.
    let its_own = |record: &Record| {
        let is_meant = record.pod.as_ref().is_some_and(|known| {
            known.uid() == Some(uid) && known.name() == pod.name() && known.namespace() == pod.namespace()
        });
        let binding = record.binding.clone().filter(|binding| is_meant && binding.attachment_id.is_some());
        binding.filter(|_| record.attachment.interface == attachment.interface)
    };
    for entry in &verb.store.claimants()? {
        let seen = verb.store.lock()?.find_by_entry(entry)?;
        let Some(binding) = seen.and_then(|stored| its_own(&stored.record)) else { continue };
        let claimant = store::ClaimantKey::of_sticky(&binding.key, &attachment.interface);
        // The agent may be about to detach the pod's older sandbox: it has read that no sandbox runs.
        let _pool_lock = verb.store.pool_lock(&claimant, verb.sticky.lock_timeout)?;
        let mut locked = verb.store.lock()?;
        let Some(stored) = locked.find_by_entry(entry)? else { continue };
        if its_own(&stored.record).is_none() {
            continue;
        }
        let renewed = Record {
            attachment: attachment.clone(),
            state: RecordState::Attached,
            netns: verb.request.netns.clone(),
            since: verb.store.now().clone(),
            ..stored.record.clone()
        };
        locked.put(&renewed, Some(&stored))?;
        let update = attached_update(attachment, &renewed, verb.store.now());
        locked.put_pending_update(attachment, &update)?;
        locked.commit()?;
        return Ok(Some(renewed.addresses));
    }
    Ok(None)
}
