//! `Grant`: a claim on an address of this node is granted or refused.
//!
//! Must never grant an address that is not reserved for the claim's StickyIP in the store.

use std::net::IpAddr;

use super::claim_answer::ClaimAnswer;
use super::context::{ActionContext, bound, interface};
use super::outcome::{ActionError, ActionOutcome};
use super::{adopt, live};
use crate::agent::plan::contains;
use crate::cluster::cilium::objects::CiliumNode;
use crate::cluster::cilium::pool;
use crate::cluster::objects::{ClaimPhase, Validate};
use crate::cluster::protocol::apply::Applied;
use crate::cluster::protocol::step;
use crate::cluster::protocol::view::ClaimView;
use crate::names::{Attachment, StickyKey};
use crate::node::list;
use crate::store::{Disk, Record};

/// Answers a claim on an address of this node: reserves the address for the StickyIP first, or says who has
/// it.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    address: IpAddr,
) -> Result<ActionOutcome, ActionError> {
    let mut api_writer = context.api_writer();
    let Some(claim) = live::claim_on(context, address).await? else {
        return Ok(ActionOutcome::NotNeeded("the claim is gone".into()));
    };
    if let Some(why) = claim.validation_error() {
        return Ok(ActionOutcome::NeedsAttention(format!(
            "the AddressClaim of {address} is not valid: {why}"
        )));
    }
    let view = ClaimView::from(&claim);
    if view.phase != ClaimPhase::Requested {
        return reserve_again(context, &view);
    }
    let answer = match &view.pod {
        Some(pod) => adopt::adopt(context, &mut api_writer, &view, pod).await?,
        None => {
            let node = pool::read_node(api_writer.api(), &context.settings.node).await?;
            reserve_for(context, address, &view.sticky_ref, node.as_ref())?
        }
    };
    let reserved = match answer {
        ClaimAnswer::Grant => Ok(()),
        ClaimAnswer::Refuse(reason) => Err(reason),
        ClaimAnswer::NotYet(reason) => return Ok(ActionOutcome::Postponed(reason)),
    };
    let Some(write) = step::answer(&context.settings.node, &view, reserved.clone()) else {
        return Ok(ActionOutcome::NotNeeded("another node answers it".into()));
    };
    if let Applied::Conflict = api_writer.apply(&write, None, "").await? {
        // If the claim is gone, `ReleaseRecord` finds what was reserved.
        return Ok(ActionOutcome::Postponed("the claim has changed".into()));
    }
    Ok(match reserved {
        Ok(()) => {
            context.metrics.claims.inc(["granted"]);
            ActionOutcome::Done(format!("{address} is granted to StickyIP {}", view.sticky_ref))
        }
        Err(why) => {
            context.metrics.claims.inc(["refused"]);
            ActionOutcome::Done(format!("{address} is refused to StickyIP {}: {why}", view.sticky_ref))
        }
    })
}

/// Reserves an address that is claimed and of which the store does not know any more. Where Cilium picks the
/// addresses, `Refill` reads the claims, and nothing depends on this.
fn reserve_again<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    view: &ClaimView,
) -> Result<ActionOutcome, ActionError> {
    let (address, key) = (view.address, &view.sticky_ref);
    let ours = view.home_node.as_deref() == Some(&context.settings.node);
    if view.phase == ClaimPhase::Refused || !ours || !contains(&context.options.shape.ranges, address) {
        return Ok(ActionOutcome::NotNeeded("it is answered already".into()));
    }
    if keep_beside_current(context, address, key)? {
        return Ok(ActionOutcome::Done(format!(
            "{address} is kept for StickyIP {key}, which a sandbox of this node has with another address"
        )));
    }
    Ok(match reserve_for(context, address, key, None)? {
        ClaimAnswer::Grant => ActionOutcome::Done(format!("{address} is kept for StickyIP {key} again")),
        ClaimAnswer::Refuse(reason) | ClaimAnswer::NotYet(reason) => {
            ActionOutcome::NeedsAttention(format!("{address} is claimed for StickyIP {key}, and {reason}"))
        }
    })
}

/// Reserves an address that is claimed for a StickyIP which a sandbox of this node has with other addresses:
/// as if an earlier sandbox had had it here.
fn keep_beside_current<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    address: IpAddr,
    key: &StickyKey,
) -> Result<bool, ActionError> {
    let store = context.store()?;
    let mut locked = store.lock()?;
    let claimant = bound(key)?;
    let current = locked.find_by_claimant(&claimant)?.filter(|kept| kept.record.is_attached(store.now()));
    let Some(current) = current.filter(|kept| !kept.record.addresses.contains(&address)) else {
        return Ok(false);
    };
    if locked.find_by_address(address)?.is_some() {
        return Ok(false);
    }
    locked.put(&Record::superseded(address, &claimant, &current.record.attachment, store.now()), None)?;
    locked.commit()?;
    Ok(true)
}

/// Reserves an address for a StickyIP in the store.
fn reserve_for<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    address: IpAddr,
    key: &StickyKey,
    node: Option<&CiliumNode>,
) -> Result<ClaimAnswer, ActionError> {
    let sets = context.node_ranges(node);
    let usable = sets.iter().find_map(|set| set.contains(address)).is_some_and(|range| range.usable(address));
    if !usable {
        return Ok(ClaimAnswer::Refuse(format!(
            "node {} has no such address for pods",
            context.settings.node
        )));
    }
    if context.settings.mode.publishes_pool_entries()
        && node.is_none_or(|node| node.barred_to(&key.to_string()).contains(&address))
    {
        return Ok(ClaimAnswer::Refuse("Cilium may give it to any pod of this node".into()));
    }
    let store = context.store()?;
    let mut locked = store.lock()?;
    let claimant = bound(key)?;
    let kept = locked.find_by_claimant(&claimant)?;
    let granted = Attachment::of_node(interface()?);
    match locked.find_by_address(address)? {
        // Of this grant from now on: a refused binding of this node that reserved it, and read no claim, must
        // not release it.
        Some(there) if there.record.is_for(&claimant) => {
            let its_own = kept.filter(|kept| kept.record.addresses.contains(&address));
            locked.renew(&its_own.unwrap_or(there), &granted)?;
            locked.commit()?;
            return Ok(ClaimAnswer::Grant);
        }
        Some(there) if there.record.is_unowned() => {
            return Ok(ClaimAnswer::Refuse("Cilium may give it to any pod of this node".into()));
        }
        Some(there) => return Ok(ClaimAnswer::Refuse(format!("{} has it", there.record.holder()))),
        None => {}
    }
    if let Some(kept) = kept.as_ref().filter(|kept| kept.record.is_attached(store.now())) {
        return Ok(ClaimAnswer::Refuse(format!(
            "{} runs here with {}",
            kept.record.holder(),
            list(&kept.record.addresses)
        )));
    }
    let mut addresses: Vec<IpAddr> =
        kept.iter().flat_map(|kept| kept.record.addresses.iter().copied()).collect();
    // Beside what is kept already, also of the same family: that may be claimed for the StickyIP too.
    addresses.push(address);
    let record = Record::reserved(addresses, &claimant, None, &granted, store.now());
    locked.put(&record, kept.as_ref())?;
    locked.commit()?;
    Ok(ClaimAnswer::Grant)
}
