//! DEL: the container's addresses are released, or kept for their pod.
//!
//! By container, never by pod: a late or repeated DEL finds nothing of what a newer container has.

use crate::cni::CniError;
use crate::names::{Attachment, StickyKey};
use crate::node::end::{UpdateFirst, detached_update, end_attachment};
use crate::plugin::cluster::del::{ClusterDelError, detach};
use crate::plugin::{VerbContext, VerbLog};
use crate::store::{Disk, PendingUpdateKind, StickyBinding, StoredRecord};

pub(crate) fn run<D: Disk>(verb: &VerbContext<'_, D>, log: &mut VerbLog<'_>) -> Result<(), CniError> {
    let attachment = verb.attachment()?;
    let mut answer = Ok(());
    let stored = match verb.store.lock_existing()? {
        None => {
            log.report(&[], "there is no store");
            // host-local refuses every DEL whose version cannot express the ranges. Here DEL does so only
            // where no address was ever given: then it follows an ADD that was refused for the same reason.
            // Where there is a store, an ADD before an edit of the version may have left an address, which
            // must be released, and a repeated DEL must succeed as the first one did.
            answer = verb.ipam.check_version(verb.request.config.version);
            None
        }
        Some(mut locked) => match locked.find_by_attachment(attachment)? {
            None => {
                locked.remove_draft(attachment)?;
                log.report(&[], "this container has no address");
                None
            }
            Some(stored) => {
                let now = verb.store.now();
                let why = end_attachment(&mut locked, &stored, now, UpdateFirst::IfOtherId)?;
                log.report(&stored.record.addresses, why);
                locked.commit()?;
                Some(stored)
            }
        },
    };
    detach_in_cluster(verb, stored.as_ref(), log)?;
    answer
}

/// Detaches the sandbox in the API server: at once, or by a pending update that the agent sends. The API
/// server may have an attachment of which this node knows nothing, if its ADD ended half way.
fn detach_in_cluster<D: Disk>(
    verb: &VerbContext<'_, D>,
    stored: Option<&StoredRecord>,
    log: &mut VerbLog<'_>,
) -> Result<(), CniError> {
    let attachment = verb.attachment()?;
    // The API server never heard of it, and cilium-agent repeats its DEL at every start.
    if attachment.container.is_cilium_ingress() {
        return Ok(());
    }
    let record = stored.map(|stored| &stored.record);
    if record.is_none() && is_not_sticky(verb, attachment)? {
        return Ok(());
    }
    let earlier = if record.is_none() { earlier_update(verb, attachment)? } else { None };
    let outcome = match (&verb.sticky.cluster, record.map(|record| &record.binding)) {
        (_, Some(None)) | (None, None) => return Ok(()),
        (None, Some(Some(_))) => Err(ClusterDelError::NotConfigured),
        (Some(conf), binding) => {
            let binding = binding.map_or(earlier.as_ref(), Option::as_ref);
            detach(verb, conf, (verb.request.pod.as_ref(), attachment), binding, log)
        }
    };
    let Err(reason) = outcome else {
        return match verb.store.lock_existing()? {
            Some(mut locked) => Ok(locked.clear_pending_update(attachment)?),
            None => Ok(()),
        };
    };
    let container = attachment.container.as_str();
    tracing::warn!(container, %reason, "not detached yet; the agent sends the pending update");
    let mut locked = verb.store.lock()?;
    if earlier.is_some() {
        // The pending update of the earlier DEL knows more than this one does.
        return Ok(());
    }
    Ok(locked.put_pending_update(attachment, &detached_update(attachment, record, verb.store.now()))?)
}

/// What an earlier DEL of this sandbox knew of its attachment and could not send: it has released the record
/// since.
fn earlier_update<D: Disk>(
    verb: &VerbContext<'_, D>,
    attachment: &Attachment,
) -> Result<Option<StickyBinding>, CniError> {
    let Some(mut locked) = verb.store.lock_existing()? else { return Ok(None) };
    let update =
        locked.pending_update_of(attachment)?.filter(|update| update.kind == PendingUpdateKind::Ended);
    Ok(update.and_then(|update| {
        Some(StickyBinding {
            key: StickyKey { namespace: update.namespace?, name: update.name? },
            attachment_id: Some(update.attachment_id.unwrap_or_else(|| attachment.id())),
        })
    }))
}

/// Whether this node knows, without a request, that the pod has nothing in the cluster. Where Cilium picks
/// the addresses, pods that are not sticky have no record, and there are many of them.
fn is_not_sticky<D: Disk>(verb: &VerbContext<'_, D>, attachment: &Attachment) -> Result<bool, CniError> {
    let Some(pod) = &verb.request.pod else { return Ok(false) };
    if !verb.sticky.selects(pod) {
        return Ok(true);
    }
    let (Some(uid), Some(mut locked)) = (pod.uid(), verb.store.lock_existing()?) else { return Ok(false) };
    let decision = locked.find_decision(uid, &attachment.interface)?;
    let is_decided =
        decision.is_some_and(|decision| decision.sticky.is_none() && decision.is_for(pod, verb.store.now()));
    // What was sticky once may have been attached by an ADD that ended before it read that the pod is not.
    let claimant = crate::store::ClaimantKey::of_pod(pod, &attachment.interface);
    Ok(is_decided && locked.find_by_claimant(&claimant)?.is_none())
}
