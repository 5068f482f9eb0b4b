//! Reserving what is claimed before anything else is given out: a store that is new, or an old copy, learns
//! from the API server which addresses of this node are claimed. One list, then everything under one lock.
//!
//! What is claimed after the list needs no second look: the home node alone makes a claim on its address
//! usable, and its process, plugin or agent, has reserved the address in this store first. A claim of
//! another node is Requested until then (docs/decisions/0035).
//!
//! Must never count the store as seeded while a sandbox has an address that is claimed for another: once it
//! ends, the address must not be given out.

use std::net::IpAddr;

use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::objects::{AddressClaim, ClaimPhase};
use crate::cluster::protocol::bind::list_claims;
use crate::names::{Attachment, IfName, StickyKey};
use crate::store::{ClaimantKey, Disk, LockedStore, Record, StoreError};

/// An address that a sandbox of this node has although it is claimed for another.
#[derive(Debug)]
pub(crate) struct InUse {
    pub(crate) address: IpAddr,
    pub(crate) key: StickyKey,
    pub(crate) record: Record,
}

/// The claims whose home is this node, read live.
pub(crate) async fn home_claims(api: &Connection, node: &str) -> Result<Vec<AddressClaim>, ApiError> {
    list_claims(api, &format!("spec.homeNode={node}")).await
}

/// Reserves what these claims are on, and marks the store if all of it is reserved; the caller commits.
/// `claims` were listed while the store had no mark. Returns what sandboxes have although it is claimed.
pub(crate) fn reserve_claims<D: Disk>(
    locked: &mut LockedStore<'_, D>,
    claims: &[AddressClaim],
    interface: &IfName,
) -> Result<Vec<InUse>, StoreError> {
    let by = Attachment::of_node(interface.clone());
    let mut in_use = Vec::new();
    for claim in claims.iter().map(|claim| &claim.spec).filter(|claim| match claim.phase {
        ClaimPhase::Refused => false,
        // Of an address that a pod has: the answer looks for the record of exactly this pod. One without a
        // pod may be granted at this moment, by a process that reserved the address in a store that is gone.
        ClaimPhase::Requested => claim.pod.is_none(),
        ClaimPhase::Granted | ClaimPhase::Bound | ClaimPhase::Quarantined => true,
    }) {
        let (address, key) = (claim.address, claim.sticky_ref.clone());
        let claimant = ClaimantKey::of_sticky(&key, interface);
        if let Some(there) = locked.reserve_claimed(address, &claimant, &by)? {
            in_use.push(InUse { address, key, record: there.record });
        }
    }
    if in_use.is_empty() {
        locked.mark_seeded()?;
    }
    Ok(in_use)
}
