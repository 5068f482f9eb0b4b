//! `ReportUse`: a claim says who has its address on this node although it is claimed for another. From then
//! on its StickyIP is not attached again, so that no further pod shares the address; both pods get an event.
//!
//! Must never say that it is over before the address is reserved for the StickyIP again.

use std::net::IpAddr;

use super::{ActionContext, Performed, bound, done, needs_attention, not_needed, postponed};
use crate::cluster::events::{self, NewEvent};
use crate::cluster::objects::Validate;
use crate::cluster::protocol::bind;
use crate::cluster::view::ClaimView;
use crate::cluster::writer::apply::{ApiWriter, Applied};
use crate::cluster::writer::write::{Precondition, Write};
use crate::store::{Disk, Record};

pub(super) async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, address: IpAddr) -> Performed {
    let mut api_writer = context.api_writer();
    let claim = context.claim_on(address).await?.filter(|claim| claim.validation_error().is_none());
    let Some(claim) = claim else { return not_needed("the claim is gone") };
    let view = ClaimView::from(&claim);
    if view.home_node.as_deref() != Some(&context.settings.node) || !view.is_granted() {
        return not_needed("the address is not granted by this node");
    }
    let store = context.store()?;
    let there = store.lock()?.find_by_address(address)?.map(|there| there.record);
    let claimant = bound(&view.sticky_ref)?;
    let is_reserved = there.as_ref().is_some_and(|record| record.is_for(&claimant));
    let user = there.filter(|record| record.is_attached(store.now()) && !is_reserved);
    let in_use_by = user.as_ref().map(Record::holder);
    if in_use_by == view.in_use_by {
        return not_needed("the claim says so already");
    }
    if in_use_by.is_none() && !is_reserved && context.settings.mode.needs_ranges() {
        return postponed("the address is to be reserved first");
    }
    let at = Precondition { uid: view.uid.clone(), resource_version: view.resource_version.clone() };
    let write = Write::ReportUse { address, at, in_use_by };
    if let Applied::Conflict = api_writer.apply(&write, None, "").await? {
        return postponed("the claim has changed");
    }
    let key = &view.sticky_ref;
    let Some(user) = user else { return done(format!("{address} is with StickyIP {key} alone again")) };
    let (holder, node) = (user.holder(), &context.settings.node);
    let message = format!(
        "{holder} of node {node} has {address}, which is claimed for StickyIP {key}; the StickyIP is not \
         attached again before that pod is gone: delete the pod, its next one gets another address"
    );
    report(&mut api_writer, &view, &user, &message).await?;
    needs_attention(message)
}

/// Sends the event on the pod that has the address, on the StickyIP, and on the pod that is attached to it.
async fn report(
    api_writer: &mut ApiWriter<'_>,
    claim: &ClaimView,
    user: &Record,
    message: &str,
) -> Performed<()> {
    let sticky = bind::read_sticky(api_writer, &claim.sticky_ref).await?;
    let mut about = Vec::new();
    if let Some(pod) = &user.pod {
        about.push(events::pod(pod.namespace(), pod.name(), pod.uid().unwrap_or_default()));
    }
    let status = sticky.as_ref().and_then(|sticky| sticky.status.as_ref());
    if let Some(held) = status.and_then(|status| status.attachment.as_ref()) {
        about.push(events::pod(&claim.sticky_ref.namespace, &held.pod_name, &held.pod_uid));
    }
    about.extend(sticky.as_ref().map(events::sticky_ip));
    for about in about {
        let event = NewEvent { about, reason: "AddressInUse", message: message.to_owned(), warning: true };
        events::send(api_writer, &event).await;
    }
    Ok(())
}
