//! `Withdraw`: a prepared decision is removed whose pod will not come, that was made before a reboot, or
//! whose StickyIP is not attached for it any more: an operator may have deleted it.
//!
//! Must never withdraw a decision that a sandbox uses.

use super::{
    ActionContext, ActionError, ActionOutcome, Performed, done, interface, live, not_needed, own_claimant,
    postponed,
};
use crate::cluster::pod;
use crate::cluster::protocol::bind;
use crate::names::{AttachmentId, StickyKey};
use crate::node::list;
use crate::policy::handover::OldPod;
use crate::store::{Decision, Disk, Withdrawn};

pub(super) async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, uid: &str) -> Performed {
    let store = context.store()?;
    let Some(decision) = store.decisions()?.into_iter().find(|decision| decision.uid == uid) else {
        return not_needed("the decision is gone");
    };
    let of_this_boot = decision.at.boot() == store.now().boot();
    let Some(sticky) = &decision.sticky else {
        if of_this_boot && context.pod_exists(&decision.namespace, &decision.pod, uid).await? {
            return postponed("the pod still exists");
        }
        store.lock()?.remove_decision(uid)?;
        context.metrics.withdrawn.inc();
        return done(format!("pod {}/{} is gone", decision.namespace, decision.pod));
    };
    let pod = decision.pod().ok_or_else(|| ActionError::Name(format!("{uid} is not the uid of a pod")))?;
    let _claimant_lock = context.claimant_lock(&store, &own_claimant(&pod)?)?;
    let key = StickyKey { namespace: sticky.namespace.clone(), name: sticky.name.clone() };
    if of_this_boot
        && context.is_expected(&decision).await?
        && context.is_attached(&key, &sticky.attachment_id).await?
    {
        return postponed("the pod may still come");
    }
    // If the process ends between the file and the detach, the attachment has no sandbox: `Detach` finds it.
    let withdrawn = store.lock()?.withdraw_decision(uid, &interface()?)?;
    match withdrawn {
        Withdrawn::Unused(_) => {
            let ids = std::slice::from_ref(&sticky.attachment_id);
            let detached = context.detach_ids(&store, &key, ids).await?;
            context.metrics.withdrawn.inc();
            match detached {
                ActionOutcome::Done(_) => {
                    let addresses = list(&sticky.addresses);
                    done(format!("pod {pod} will not come; {addresses} is free for the next pod"))
                }
                ActionOutcome::NotNeeded(why) => done(format!("its StickyIP was not attached for it: {why}")),
                other => Ok(other),
            }
        }
        Withdrawn::InUse => done("a sandbox uses it; its DEL detaches"),
        Withdrawn::Nothing => not_needed("its sandbox has ended"),
    }
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Whether a StickyIP is attached to this node by this id, by a live read.
    async fn is_attached(&self, key: &StickyKey, attachment_id: &AttachmentId) -> Performed<bool> {
        let found = bind::read_sticky(&self.api_writer(), key).await?;
        let attachment = found.and_then(|found| found.status?.attachment);
        Ok(attachment.is_some_and(|attachment| {
            attachment.node == self.settings.node && attachment.attachment_id == *attachment_id
        }))
    }

    /// Whether the pod of a decision exists and is not ending, by a live read.
    async fn is_expected(&self, decision: &Decision) -> Performed<bool> {
        let found = live::read_pod(&self.connection(), &decision.namespace, &decision.pod).await?;
        Ok(pod::old_pod(found.as_ref(), &decision.uid) == OldPod::Running)
    }
}
