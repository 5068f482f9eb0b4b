//! `FinishAdoption`: a claim names the pod that its address was adopted from until that pod is gone. From
//! then on its StickyIP may be attached to others, also if it was never attached to that pod.
//!
//! Must never clear the pod while its sandbox may run with the address.

use std::net::IpAddr;

use super::{ActionContext, Performed, done, not_needed, postponed};
use crate::agent::snapshot::{is_bound_to, uid_of};
use crate::cluster::objects::{ClaimPhase, Validate};
use crate::cluster::view::ClaimView;
use crate::cluster::writer::apply::Applied;
use crate::cluster::writer::write::{Precondition, Write};
use crate::store::{Disk, Record};

pub(super) async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, address: IpAddr) -> Performed {
    let mut api_writer = context.api_writer();
    let claim = context.claim_on(address).await?.filter(|claim| claim.validation_error().is_none());
    let Some(claim) = claim else { return not_needed("the claim is gone") };
    let view = ClaimView::from(&claim);
    let ours = view.home_node.as_deref() == Some(&context.settings.node);
    let granted = matches!(view.phase, ClaimPhase::Granted | ClaimPhase::Bound | ClaimPhase::Quarantined);
    let Some(pod) = view.pod.filter(|_| ours && granted) else {
        return not_needed("the claim names no pod");
    };
    if context.pod_exists(&view.sticky_ref.namespace, &pod.name, &pod.uid).await? {
        return postponed("its pod still exists");
    }
    let store = context.store()?;
    let current = store.lock()?.find_by_address(address)?.map(|there| there.record);
    let current = current.filter(|record| record.is_attached(store.now()));
    // A newer pod of the StickyIP has it: it was bound by the protocol, so the first one is gone.
    let is_next = |record: &Record| {
        is_bound_to(record, &view.sticky_ref) && uid_of(record).is_some_and(|uid| uid != pod.uid)
    };
    match current {
        Some(record) if is_next(&record) => {}
        Some(_) => return postponed("a sandbox runs with it"),
        None => context.require_no_endpoint(&[address]).await?,
    }
    let at = Precondition { uid: view.uid, resource_version: view.resource_version };
    match api_writer.apply(&Write::ClearPod { address, at }, None, "").await? {
        Applied::Conflict => postponed("the claim has changed"),
        _ => done(format!("pod {} is gone; {address} is StickyIP {}'s", pod.name, view.sticky_ref)),
    }
}
