//! `Unpublish`: an address is removed from this node's CiliumNode that no sandbox of this node has.
//!
//! Must never remove an entry on what the watches show alone: the claim, the StickyIP, the store and Cilium
//! are asked first.

use std::net::IpAddr;

use super::context::ActionContext;
use super::outcome::{ActionError, ActionOutcome};
use super::{cilium, live, unowned};
use crate::cluster::cilium::{barrier, pool};
use crate::cluster::objects::ClaimPhase;
use crate::cluster::protocol::bind;
use crate::store::Disk;

/// Removes a pool entry or a route from this node's CiliumNode whose StickyIP is not attached here.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    address: IpAddr,
) -> Result<ActionOutcome, ActionError> {
    let Some(claim) = live::claim_on(context, address).await? else {
        if let Some(done) = remove_stale_owner(context, address).await? {
            return Ok(done);
        }
        return Ok(ActionOutcome::NeedsAttention(format!(
            "{address} has an owner in this CiliumNode and no AddressClaim; remove the pool entry, or have \
             the \
             address adopted"
        )));
    };
    let (key, phase) = (claim.spec.sticky_ref, claim.spec.phase);
    let store = context.store()?;
    let Some(_lock) = context.pool_lock(&store, &key)? else {
        return Ok(ActionOutcome::Postponed("another process changes its pool entries".into()));
    };
    let mut api_writer = context.api_writer();
    let found = bind::read_sticky(&api_writer, &key).await?;
    let found = found.filter(|found| found.spec.addresses.contains(&address));
    // A claim that was sealed proves that the entry is ours; an operator has deleted its StickyIP since.
    if found.is_none() && !matches!(phase, ClaimPhase::Bound | ClaimPhase::Quarantined) {
        return Ok(ActionOutcome::NeedsAttention(format!(
            "{address} is in this CiliumNode and claimed for StickyIP {key}, which does not have it"
        )));
    }
    let attachment = found.and_then(|found| found.status?.attachment);
    if attachment.is_some_and(|attachment| attachment.node == context.settings.node) {
        return Ok(ActionOutcome::NotNeeded("it is attached here".into()));
    }
    let there = store.lock()?.find_by_address(address)?;
    if there.is_some_and(|there| there.record.is_attached(store.now())) {
        return Ok(ActionOutcome::Postponed("a sandbox runs with it".into()));
    }
    if let Some(postponed) = cilium::postponed_by_cilium(context, &[address]).await? {
        return Ok(postponed);
    }
    let node = &context.settings.node;
    pool::unpublish(&mut api_writer, node, &context.options.shape, &[address]).await?;
    context.metrics.pool_writes.inc(["unpublish"]);
    context.metrics.leaks.inc(["pool_entry"]);
    Ok(ActionOutcome::Done(format!("{address} of StickyIP {key} is not attached here")))
}

/// Removes the owner from the entry of an unowned address that is not claimed: the process that released it
/// ended in between. None if the address is not unowned.
async fn remove_stale_owner<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    address: IpAddr,
) -> Result<Option<ActionOutcome>, ActionError> {
    let there = context.store()?.lock()?.find_by_address(address)?;
    if !there.is_some_and(|there| there.record.is_unowned()) {
        return Ok(None);
    }
    let mut api_writer = context.api_writer();
    unowned::disown(context, &mut api_writer, &[address], |entry| !barrier::is_barrier(entry)).await?;
    if api_writer.count() == 0 {
        return Ok(None);
    }
    context.metrics.leaks.inc(["pool_entry"]);
    Ok(Some(ActionOutcome::Done(format!("{address} is unowned, and its pool entry had an owner"))))
}
