//! `Attach`: a StickyIP is attached to a sandbox of this node that runs with its addresses and of which the
//! API server does not know.
//!
//! Must never attach a sandbox that does not have the addresses of the StickyIP.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use super::{ActionContext, Performed, done, needs_attention, not_needed, own_claimant, postponed, publish};
use crate::agent::{index::attachment_of, snapshot::is_bound_to};
use crate::alloc::Family;
use crate::cluster::objects::StickyIP;
use crate::cluster::protocol::bind::{self, BindError, Binder, StickyRead};
use crate::cluster::protocol::step::Refusal;
use crate::names::{Attachment, AttachmentId, StickyKey};
use crate::node::addresses::{AddressSource, NodeAddresses, ThisNode};
use crate::node::list;
use crate::policy::handover::Attached;
use crate::store::{Disk, Record, StickyBinding, Store};

pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    key: &StickyKey,
    attachment: &Attachment,
) -> Performed {
    let store = context.store()?;
    let found = store.lock()?.find_by_attachment(attachment)?.map(|stored| stored.record);
    let Some(record) = found.filter(|record| is_bound_to(record, key)) else {
        return not_needed("the sandbox has ended");
    };
    let Some(pod) = record.pod.clone() else {
        return needs_attention(format!("the record of {attachment} names no pod"));
    };
    let _lock = context.claimant_lock(&store, &own_claimant(&pod)?)?;
    let runs = format!("pod {pod} runs with {}", list(&record.addresses));
    let mut api_writer = context.api_writer();
    let Some(object) = bind::read_sticky(&api_writer, key).await? else {
        if record.attachment_id().is_some_and(AttachmentId::is_adopted) {
            return postponed("its claim is granted, and the controller has not bound it yet");
        }
        return needs_attention(format!(
            "{runs} and its StickyIP {key} does not exist; delete the pod, or create the StickyIP again"
        ));
    };
    // Another pod of the workload made it since: a sandbox that is attached to it must have its addresses.
    if !matches_addresses(&record.addresses, &object.spec.addresses) {
        let has = list(&object.spec.addresses);
        return needs_attention(format!("{runs}, and its StickyIP {key} has {has}"));
    }
    // The API server's uid of a static pod is not the runtime's.
    let node = &context.settings.node;
    let own = attachment_of(&object).filter(|old| old.node == *node && old.pod_name == pod.name());
    let pod_uid = own.map_or(pod.uid().unwrap_or_default(), |old| &old.pod_uid).to_owned();
    let binder = Binder {
        asker: Attached { node: node.clone(), pod_uid, attachment_id: attachment.id() },
        pod: pod.name().to_owned(),
        key: key.clone(),
        claimant: object.spec.claimant,
        workload: object.spec.workload.clone(),
        retention: object.spec.retention,
        pinned: Vec::new(),
        patience: Duration::ZERO,
    };
    let may_exist = |path: &Path| context.may_exist(path);
    let this_node =
        ThisNode { name: node, store: &store, netns_may_exist: &may_exist, on_attaching: &|_, _| {} };
    let sets = context.node_ranges(context.index.cilium_node());
    let publish = context.options.shape.clone();
    let source = AddressSource { sets, barred: Some(Default::default()), publish };
    let mut addresses = NodeAddresses::new(this_node, &source, key.clone(), &pod, attachment);
    match binder.bind(&mut api_writer, &mut addresses, StickyRead::found(object)).await {
        Ok(StickyIP { spec, .. }) => {
            record_attachment_id(&store, attachment, key)?;
            publish::perform(context, key).await?;
            done(format!("{} is attached to pod {pod}", list(&spec.addresses)))
        }
        Err(BindError::Refused(reason @ (Refusal::Handover { .. } | Refusal::Conflict { .. }))) => {
            needs_attention(format!("{runs}, and {reason}"))
        }
        Err(BindError::Waited { what, .. }) => needs_attention(format!("{runs}, which waits for {what}")),
        Err(error) => Err(error.into()),
    }
}

/// Records by which id the API server knows the sandbox now.
fn record_attachment_id<D: Disk>(
    store: &Store<D>,
    attachment: &Attachment,
    key: &StickyKey,
) -> Performed<()> {
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
