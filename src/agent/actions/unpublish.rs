//! `Unpublish`: an address is removed from this node's CiliumNode that no sandbox of this node has.
//!
//! Must never remove an entry on what the watches show alone: the claim, the StickyIP, the store and Cilium
//! are asked first.

use std::net::IpAddr;

use super::context::try_pool_lock;
use super::outcome::pool_is_locked;
use super::{ActionContext, Performed, bound, done, needs_attention, not_needed, postponed};
use crate::cluster::cilium::{barrier, pool};
use crate::cluster::objects::ClaimPhase;
use crate::cluster::protocol::bind;
use crate::store::Disk;

pub(super) async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, address: IpAddr) -> Performed {
    let Some(claim) = context.claim_on(address).await? else {
        if context.remove_stale_owner(address).await? {
            return done(format!("{address} is unowned, and its pool entry had an owner"));
        }
        return needs_attention(format!(
            "{address} has an owner in this CiliumNode and no AddressClaim; remove the pool entry, or have \
             the address adopted"
        ));
    };
    let (key, phase) = (claim.spec.sticky_ref, claim.spec.phase);
    let store = context.store()?;
    let Some(_lock) = try_pool_lock(&store, &bound(&key)?)? else { return pool_is_locked() };
    let mut api_writer = context.api_writer();
    let found = bind::read_sticky(&api_writer, &key).await?;
    let found = found.filter(|found| found.spec.addresses.contains(&address));
    // A claim that was sealed proves that the entry is ours; an operator has deleted its StickyIP since.
    if found.is_none() && !matches!(phase, ClaimPhase::Bound | ClaimPhase::Quarantined) {
        return needs_attention(format!(
            "{address} is in this CiliumNode and claimed for StickyIP {key}, which does not have it"
        ));
    }
    let attachment = found.and_then(|found| found.status?.attachment);
    if attachment.is_some_and(|attachment| attachment.node == context.settings.node) {
        return not_needed("it is attached here");
    }
    let there = store.lock()?.find_by_address(address)?;
    if there.is_some_and(|there| there.record.is_attached(store.now())) {
        return postponed("a sandbox runs with it");
    }
    context.require_no_endpoint(&[address]).await?;
    let node = &context.settings.node;
    pool::unpublish(&mut api_writer, node, &context.options.shape, &[address]).await?;
    context.metrics.pool_writes.inc(["unpublish"]);
    context.metrics.leaks.inc(["pool_entry"]);
    done(format!("{address} of StickyIP {key} is not attached here"))
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Removes the owner from the entry of an unowned address that is not claimed: the process that released
    /// it ended in between. False if there was nothing to remove.
    async fn remove_stale_owner(&self, address: IpAddr) -> Performed<bool> {
        let there = self.store()?.lock()?.find_by_address(address)?;
        if !there.is_some_and(|there| there.record.is_unowned()) {
            return Ok(false);
        }
        let mut api_writer = self.api_writer();
        self.disown(&mut api_writer, &[address], |entry| !barrier::is_barrier(entry)).await?;
        let is_removed = api_writer.count() > 0;
        if is_removed {
            self.metrics.leaks.inc(["pool_entry"]);
        }
        Ok(is_removed)
    }
}
