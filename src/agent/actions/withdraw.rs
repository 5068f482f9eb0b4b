//! `Withdraw`: a prepared decision is removed whose pod will not come, or whose StickyIP is not attached for
//! it.
//!
//! Must never withdraw a decision that a sandbox uses.

use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

use super::context::{ActionContext, interface};
use super::outcome::{ActionError, ActionOutcome};
use super::{detach_sandbox, live};
use crate::cluster::pod;
use crate::cluster::protocol::apply::ApiWriter;
use crate::cluster::protocol::bind;
use crate::names::{AttachmentId, StickyKey};
use crate::node::list;
use crate::policy::handover::OldPod;
use crate::store::{ClaimantKey, Decision, Disk, Withdrawn};

/// Removes a decision whose pod will not come, that was made before a reboot, or whose StickyIP is not
/// attached for it any more: an operator may have deleted it.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    uid: &str,
) -> Result<ActionOutcome, ActionError> {
    let store = context.store()?;
    let Some(decision) = store.decisions()?.into_iter().find(|decision| decision.uid == uid) else {
        return Ok(ActionOutcome::NotNeeded("the decision is gone".into()));
    };
    let of_this_boot = decision.at.boot() == store.now().boot();
    let Some(sticky) = decision.sticky.clone() else {
        if of_this_boot && live::pod_exists(context, &decision.namespace, &decision.pod, uid).await? {
            return Ok(ActionOutcome::Postponed("the pod still exists".into()));
        }
        store.lock()?.remove_decision(uid)?;
        context.metrics.withdrawn.inc();
        return Ok(ActionOutcome::Done(format!("pod {}/{} is gone", decision.namespace, decision.pod)));
    };
    let pod = decision.pod().ok_or_else(|| ActionError::Name(format!("{uid} is not the uid of a pod")))?;
    let Some(_claimant_lock) =
        context.try_claimant_lock(&store, &ClaimantKey::of_pod(&pod, &interface()?))?
    else {
        return Ok(ActionOutcome::Postponed("an ADD of this pod is running".into()));
    };
    let key = StickyKey { namespace: sticky.namespace.clone(), name: sticky.name.clone() };
    if of_this_boot
        && is_expected(context, &decision).await?
        && is_attached(context, &context.api_writer(), &key, &sticky.attachment_id).await?
    {
        return Ok(ActionOutcome::Postponed("the pod may still come".into()));
    }
    // If the process ends between the file and the detach, the attachment has no sandbox: `Detach` finds it.
    let withdrawn = store.lock()?.withdraw_decision(uid, &interface()?)?;
    match withdrawn {
        Withdrawn::Unused(_) => {
            let detached = detach_sandbox::detach_ids(context, &store, &key, &[sticky.attachment_id]).await?;
            context.metrics.withdrawn.inc();
            Ok(match detached {
                ActionOutcome::Done(_) => ActionOutcome::Done(format!(
                    "pod {pod} will not come; {} is free for the next pod",
                    list(&sticky.addresses)
                )),
                ActionOutcome::NotNeeded(why) => {
                    ActionOutcome::Done(format!("its StickyIP was not attached for it: {why}"))
                }
                other => other,
            })
        }
        Withdrawn::InUse => Ok(ActionOutcome::Done("a sandbox uses it; its DEL detaches".into())),
        Withdrawn::Nothing => Ok(ActionOutcome::NotNeeded("its sandbox has ended".into())),
    }
}

/// Whether a StickyIP is attached to this node by this id, by a live read.
async fn is_attached<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    api_writer: &ApiWriter<'_>,
    key: &StickyKey,
    attachment_id: &AttachmentId,
) -> Result<bool, ActionError> {
    let found = bind::read_sticky(api_writer, key).await?;
    let attachment = found.and_then(|found| found.status?.attachment);
    Ok(attachment.is_some_and(|attachment| {
        attachment.node == context.settings.node && attachment.attachment_id == *attachment_id
    }))
}

/// Whether the pod of a decision exists and is not ending, by a live read.
async fn is_expected<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    decision: &Decision,
) -> Result<bool, ActionError> {
    let api = context.connection();
    let Decision { namespace, pod: name, .. } = decision;
    let pods: Api<Pod> = Api::namespaced(api.client(), namespace);
    let found = api.read(&format!("get Pod {namespace}/{name}"), || pods.get_opt(name)).await?;
    Ok(pod::old_pod(found.as_ref(), &decision.uid) == OldPod::Running)
}
