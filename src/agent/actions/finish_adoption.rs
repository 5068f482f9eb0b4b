//! `FinishAdoption`: a claim names the pod that its address was adopted from until that pod is gone.
//!
//! Must never clear the pod while its sandbox may run with the address.

use std::net::IpAddr;

use super::context::ActionContext;
use super::outcome::{ActionError, ActionOutcome};
use super::{cilium, live};
use crate::agent::snapshot::{is_bound_to, uid_of};
use crate::cluster::objects::{ClaimPhase, Validate};
use crate::cluster::protocol::apply::Applied;
use crate::cluster::protocol::view::ClaimView;
use crate::cluster::protocol::write::{Precondition, Write};
use crate::store::{Disk, Record};

/// Removes from a claim the pod that had its address before it was claimed: from here on its StickyIP may be
/// attached to others, also if it was never attached to that pod.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    address: IpAddr,
) -> Result<ActionOutcome, ActionError> {
    let mut api_writer = context.api_writer();
    let claim = live::claim_on(context, address).await?;
    let Some(view) =
        claim.filter(|claim| claim.validation_error().is_none()).map(|claim| ClaimView::from(&claim))
    else {
        return Ok(ActionOutcome::NotNeeded("the claim is gone".into()));
    };
    let ours = view.home_node.as_deref() == Some(&context.settings.node);
    let granted = matches!(view.phase, ClaimPhase::Granted | ClaimPhase::Bound | ClaimPhase::Quarantined);
    let Some(pod) = view.pod.filter(|_| ours && granted) else {
        return Ok(ActionOutcome::NotNeeded("the claim names no pod".into()));
    };
    if live::pod_exists(context, &view.sticky_ref.namespace, &pod.name, &pod.uid).await? {
        return Ok(ActionOutcome::Postponed("its pod still exists".into()));
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
        Some(_) => return Ok(ActionOutcome::Postponed("a sandbox runs with it".into())),
        None => {
            if let Some(postponed) = cilium::postponed_by_cilium(context, &[address]).await? {
                return Ok(postponed);
            }
        }
    }
    let at = Precondition { uid: view.uid, resource_version: view.resource_version };
    match api_writer.apply(&Write::ClearPod { address, at }, None, "").await? {
        Applied::Conflict => Ok(ActionOutcome::Postponed("the claim has changed".into())),
        _ => Ok(ActionOutcome::Done(format!(
            "pod {} is gone; {address} is StickyIP {}'s",
            pod.name, view.sticky_ref
        ))),
    }
}
