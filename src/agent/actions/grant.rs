//! `Grant`: a claim on an address of this node is granted or refused.
//!
//! Must never grant an address that is not reserved for the claim's StickyIP in the store.

use std::net::IpAddr;

use super::claim_answer::{ClaimAnswer, refuse};
use super::{ActionContext, Performed, bound, done, interface, needs_attention, not_needed, postponed};
use crate::agent::index::attachment_of;
use crate::agent::plan::contains;
use crate::cluster::cilium::pool::{self, Publication};
use crate::cluster::objects::cilium::CiliumNode;
use crate::cluster::objects::{ClaimPhase, Validate};
use crate::cluster::protocol::{bind, step};
use crate::cluster::view::ClaimView;
use crate::cluster::writer::apply::Applied;
use crate::names::{Attachment, StickyKey};
use crate::node::list;
use crate::store::{Disk, Record, StoredRecord};

pub(super) async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, address: IpAddr) -> Performed {
    let mut api_writer = context.api_writer();
    let Some(claim) = context.claim_on(address).await? else { return not_needed("the claim is gone") };
    if let Some(why) = claim.validation_error() {
        return needs_attention(format!("the AddressClaim of {address} is not valid: {why}"));
    }
    let view = ClaimView::from(&claim);
    let key = &view.sticky_ref;
    if view.phase != ClaimPhase::Requested {
        return context.reserve_again(&view);
    }
    let answer = match &view.pod {
        Some(pod) => context.adopt(&mut api_writer, &view, pod).await?,
        None => {
            let node = pool::read_node(api_writer.api(), &context.settings.node).await?;
            let owners = context.owners_of(key).await?;
            context.reserve_for(address, key, node.as_ref(), owners)?
        }
    };
    let (reserved, counted, outcome) = match answer {
        ClaimAnswer::Grant => (Ok(()), "granted", format!("{address} is granted to StickyIP {key}")),
        ClaimAnswer::Refuse(why) => {
            let outcome = format!("{address} is refused to StickyIP {key}: {why}");
            (Err(why), "refused", outcome)
        }
    };
    let Some(write) = step::answer(&context.settings.node, &view, reserved) else {
        return not_needed("another node answers it");
    };
    if let Applied::Conflict = api_writer.apply(&write, None, "").await? {
        // If the claim is gone, `ReleaseRecord` finds what was reserved.
        return postponed("the claim has changed");
    }
    context.metrics.claims.inc([counted]);
    done(outcome)
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Reserves an address that is claimed and of which the store does not know any more. Where Cilium picks
    /// the addresses, `Refill` reads the claims, and nothing depends on this.
    fn reserve_again(&self, view: &ClaimView) -> Performed {
        let (address, key) = (view.address, &view.sticky_ref);
        let ours = view.home_node.as_deref() == Some(&self.settings.node);
        if view.phase == ClaimPhase::Refused || !ours || !contains(&self.options.shape.ranges, address) {
            return not_needed("it is answered already");
        }
        let store = self.store()?;
        let mut locked = store.lock()?;
        let granted = Attachment::of_node(interface()?);
        let in_use = locked.reserve_claimed(address, &bound(key)?, &granted)?;
        locked.commit()?;
        match in_use {
            None => done(format!("{address} is kept for StickyIP {key} again")),
            Some(there) => needs_attention(format!(
                "{address} is claimed for StickyIP {key}, and {} has it",
                there.record.holder()
            )),
        }
    }

    /// The owners by which the pool entries of a StickyIP are its own: the pod of its name, and the one that
    /// is attached here. A slot and a virtual machine are called otherwise than their pods.
    async fn owners_of(&self, key: &StickyKey) -> Performed<Vec<String>> {
        let mut owners = vec![key.to_string()];
        if self.settings.mode.publishes_pool_entries() {
            let sticky = bind::read_sticky(&self.api_writer(), key).await?;
            let here = sticky
                .filter(|sticky| attachment_of(sticky).is_some_and(|held| held.node == self.settings.node));
            owners.extend(here.as_ref().and_then(Publication::of).map(|shown| shown.owner));
        }
        Ok(owners)
    }

    fn reserve_for(
        &self,
        address: IpAddr,
        key: &StickyKey,
        node: Option<&CiliumNode>,
        mut owners: Vec<String>,
    ) -> Performed<ClaimAnswer> {
        let sets = self.node_ranges(node);
        let store = self.store()?;
        let mut locked = store.lock()?;
        let claimant = bound(key)?;
        let kept = locked.find_by_claimant(&claimant)?;
        let granted = Attachment::of_node(interface()?);
        let there = locked.find_by_address(address)?;
        let own = there.as_ref().map(|there| &there.record).filter(|record| record.is_for(&claimant));
        let pod = own.and_then(|record| record.pod.as_ref());
        owners.extend(pod.map(|pod| format!("{}/{}", pod.namespace(), pod.name())));
        if own.is_none() && sets.is_empty() && self.settings.mode.publishes_pool_entries() {
            return postponed("the CiliumNode names no blocks of this node yet");
        }
        let range = sets.iter().find_map(|set| set.contains(address));
        if own.is_none() && !range.is_some_and(|range| range.usable(address)) {
            return refuse(format!("node {} has no such address for pods", self.settings.node));
        }
        // The record decides where a sandbox runs with it: Cilium gave the address to that one.
        let runs_here = own.is_some_and(|record| record.is_attached(store.now()));
        let is_barred =
            |node: &CiliumNode| owners.iter().all(|owner| node.barred_to(owner).contains(&address));
        if self.settings.mode.publishes_pool_entries() && !runs_here && node.is_none_or(is_barred) {
            return refuse("Cilium may give it to any pod of this node");
        }
        match there {
            // Of this grant from now on: a refused binding of this node that reserved it, and read no claim,
            // must not release it.
            Some(there) if there.record.is_for(&claimant) => {
                let its_own = kept.filter(|kept| kept.record.addresses.contains(&address));
                locked.renew(&its_own.unwrap_or(there), &granted)?;
                locked.commit()?;
                return Ok(ClaimAnswer::Grant);
            }
            Some(there) if there.record.is_unowned() => {
                return refuse("Cilium may give it to any pod of this node");
            }
            Some(there) => return refuse(format!("{} has it", there.record.holder())),
            None => {}
        }
        if let Some(StoredRecord { record, .. }) = &kept
            && record.is_attached(store.now())
        {
            return refuse(format!("{} runs here with {}", record.holder(), list(&record.addresses)));
        }
        let mut addresses = kept.as_ref().map(|kept| kept.record.addresses.clone()).unwrap_or_default();
        // Beside what is kept already, also of the same family: that may be claimed for the StickyIP too.
        addresses.push(address);
        let record = Record::reserved(addresses, &claimant, None, &granted, store.now());
        locked.put(&record, kept.as_ref())?;
        locked.commit()?;
        Ok(ClaimAnswer::Grant)
    }
}
