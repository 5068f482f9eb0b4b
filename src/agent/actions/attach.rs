//! `Attach`: a StickyIP is attached to a sandbox of this node that runs with its addresses and of which the
//! API server does not know.
//!
//! Must never attach a sandbox that does not have the addresses of the StickyIP.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use super::context::{ActionContext, interface};
use super::outcome::{ActionError, ActionOutcome};
use super::publish;
use crate::agent::index::key_of;
use crate::agent::snapshot::is_bound_to;
use crate::alloc::Family;
use crate::cluster::objects::StickyIP;
use crate::cluster::protocol::bind::{self, BindError, Binder, StickyRead};
use crate::cluster::protocol::step::Refusal;
use crate::names::{Attachment, AttachmentId, StickyKey};
use crate::node::addresses::{AddressSource, NodeAddresses, ThisNode};
use crate::node::list;
use crate::policy::handover::Attached;
use crate::store::{ClaimantKey, Disk, Record, StickyBinding, Store};

/// Attaches a running sandbox of this node, and publishes it.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    key: &StickyKey,
    attachment: &Attachment,
) -> Result<ActionOutcome, ActionError> {
    let store = context.store()?;
    let current = |store: &Store<D>| -> Result<Option<Record>, ActionError> {
        let found = store.lock()?.find_by_attachment(attachment)?.map(|stored| stored.record);
        Ok(found.filter(|record| is_bound_to(record, key)))
    };
    let Some(record) = current(&store)? else {
        return Ok(ActionOutcome::NotNeeded("the sandbox has ended".into()));
    };
    let Some(pod) = record.pod.clone() else {
        return Ok(ActionOutcome::NeedsAttention(format!("the record of {attachment} names no pod")));
    };
    let Some(_lock) = context.try_claimant_lock(&store, &ClaimantKey::of_pod(&pod, &interface()?))? else {
        return Ok(ActionOutcome::Postponed("an ADD of this pod is running".into()));
    };
    let mut api_writer = context.api_writer();
    let Some(object) = bind::read_sticky(&api_writer, key).await? else {
        if record.attachment_id().is_some_and(AttachmentId::is_adopted) {
            return Ok(ActionOutcome::Postponed(
                "its claim is granted, and the controller has not bound it yet".into(),
            ));
        }
        return Ok(ActionOutcome::NeedsAttention(format!(
            "pod {pod} runs with {} and its StickyIP {key} does not exist; delete the pod, or create the \
             StickyIP again",
            list(&record.addresses)
        )));
    };
    // Another pod of the workload made it since: a sandbox that is attached to it must have its addresses.
    if !matches_addresses(&record.addresses, &object.spec.addresses) {
        return Ok(ActionOutcome::NeedsAttention(format!(
            "pod {pod} runs with {}, and its StickyIP {key} has {}",
            list(&record.addresses),
            list(&object.spec.addresses)
        )));
    }
    let status = object.status.as_ref().and_then(|status| status.attachment.as_ref());
    // The API server's uid of a static pod is not the runtime's.
    let uid = match status.filter(|old| old.node == context.settings.node && old.pod_name == pod.name()) {
        Some(old) => old.pod_uid.clone(),
        None => pod.uid().unwrap_or_default().to_owned(),
    };
    let asker =
        Attached { node: context.settings.node.clone(), pod_uid: uid, attachment_id: attachment.id() };
    let netns_may_exist = |path: &Path| context.may_exist(path);
    let this_node = ThisNode {
        name: &context.settings.node,
        store: &store,
        netns_may_exist: &netns_may_exist,
        on_attaching: &|_, _| {},
    };
    let source = AddressSource {
        sets: context.node_ranges(context.index.cilium_node()),
        barred: Some(Default::default()),
        publish: context.options.shape.clone(),
    };
    let mut addresses = NodeAddresses::new(this_node, &source, key.clone(), &pod, attachment);
    let binder = binder_of(&object, asker, pod.name());
    match binder.bind(&mut api_writer, &mut addresses, StickyRead::found(object)).await {
        Ok(StickyIP { spec, .. }) => {
            record_attachment_id(&store, attachment, key)?;
            publish::perform(context, key).await?;
            Ok(ActionOutcome::Done(format!("{} is attached to pod {pod}", list(&spec.addresses))))
        }
        Err(BindError::Refused(reason @ (Refusal::Handover { .. } | Refusal::Conflict { .. }))) => {
            Ok(ActionOutcome::NeedsAttention(format!(
                "pod {pod} runs with {}, and {reason}",
                list(&record.addresses)
            )))
        }
        Err(BindError::Waited { what, .. }) => Ok(ActionOutcome::NeedsAttention(format!(
            "pod {pod} runs with {}, which waits for {what}",
            list(&record.addresses)
        ))),
        Err(error) => Err(error.into()),
    }
}

/// Records by which id the API server knows the sandbox now.
fn record_attachment_id<D: Disk + Clone>(
    store: &Store<D>,
    attachment: &Attachment,
    key: &StickyKey,
) -> Result<(), ActionError> {
    let mut locked = store.lock()?;
    let Some(stored) = locked.find_by_attachment(attachment)? else { return Ok(()) };
    if stored.record.attachment_id() == Some(&attachment.id()) {
        return Ok(());
    }
    let binding = StickyBinding { key: key.clone(), attachment_id: Some(attachment.id()) };
    let record = Record { binding: Some(binding), ..stored.record.clone() };
    locked.put(&record, Some(&stored))?;
    Ok(locked.commit()?)
}

/// The binding to the addresses that a StickyIP has already.
fn binder_of(object: &StickyIP, asker: Attached, pod: &str) -> Binder {
    Binder {
        asker,
        pod: pod.to_owned(),
        key: key_of(object),
        claimant: object.spec.claimant,
        workload: object.spec.workload.clone(),
        retention: object.spec.retention,
        pinned: Vec::new(),
        patience: Duration::ZERO,
    }
}

/// Whether a sandbox with these addresses has those of a StickyIP. It may have others beside, of range sets
/// that the StickyIP does not serve, and lack one whose family its node does not have.
fn matches_addresses(has: &[IpAddr], bound: &[IpAddr]) -> bool {
    let serves = |address: &IpAddr| has.iter().any(|own| Family::of(*own) == Family::of(*address));
    bound.iter().any(|address| has.contains(address))
        && bound.iter().all(|address| has.contains(address) || !serves(address))
}
#[cfg(test)]
mod tests {
    #[test]
    fn a_sandbox_has_the_addresses_of_its_stickyip_whatever_else_it_has() {
        let matches = |has: &[&str], bound: &[&str]| {
            let parsed = |all: &[&str]| all.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
            super::matches_addresses(&parsed(has), &parsed(bound))
        };
        assert!(matches(&["10.0.0.1"], &["10.0.0.1"]));
        assert!(matches(&["10.0.0.1", "fd00::5"], &["10.0.0.1"]), "its second family is not the StickyIP's");
        assert!(matches(&["10.0.0.1", "10.1.0.1"], &["10.0.0.1"]), "nor its second range set");
        assert!(matches(&["10.0.0.1"], &["10.0.0.1", "fd00::5"]), "its node has one family");
        assert!(!matches(&["10.0.0.1"], &["10.0.0.2"]));
        assert!(!matches(&["10.0.0.1", "fd00::5"], &["10.0.0.1", "fd00::6"]));
        assert!(!matches(&["10.0.0.1"], &["fd00::5"]));
        assert!(!matches(&[], &["10.0.0.1"]));
    }
}
