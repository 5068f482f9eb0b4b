//! Freeing what nobody ended: attachments of sandboxes that are gone, StickyIPs without a sandbox, records kept for
//! nobody, keys and routes of addresses that left. Must never free on what the watches told alone: every proof is read
//! again, live or under the lock.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kube::api::Api;

use crate::agent::actions::release_blocks::{in_the_pool, is_of_its_namespace};
use crate::agent::actions::{ActionContext, ActionError, ActionOutcome, bound, interface, list};
use crate::agent::metrics::AgentMetrics;
use crate::agent::plan::{contains, uid_of};
use crate::alloc::RangeSet;
use crate::cluster::cilium::barrier;
use crate::cluster::cilium::objects::CiliumNode;
use crate::cluster::cilium::pool;
use crate::cluster::cilium::pool::{NodePatch, home_blocks};
use crate::cluster::objects::{AddressClaim, ClaimName, ClaimPhase, StickyKey};
use crate::cluster::protocol::bind;
use crate::store::{Claimant, Disk, Keep, PendingUpdate, Phase, Record, Told};

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Ends an attachment as a DEL would: the address is free, or kept for its StickyIP, and a note tells of it.
    pub(crate) async fn end_attachment(&self, seen: &Record) -> Result<ActionOutcome, ActionError> {
        for address in seen.addresses.iter().filter(|_| self.settings.mode.cilium_picks_the_address()) {
            // Another's says nothing of this one: Cilium gave the address away since. One without a name may be this one's.
            let container = seen.attachment.container.as_str();
            let about = self.endpoint_of(*address).await?;
            if about.is_some_and(|about| about.container.is_empty() || about.container == container) {
                return Ok(ActionOutcome::Postponed(format!("Cilium still has an endpoint with {address}")));
            }
        }
        if let (Some(pod), Some(uid)) = (&seen.pod, uid_of(seen)) {
            let store = self.store()?;
            // By a sandbox: what is only kept bears the name of whoever wanted it last.
            let replaced = store.walk()?.into_iter().filter_map(|look| look.record).any(|record| {
                record.is_attached(store.now())
                    && uid_of(&record) == Some(uid)
                    && record.attachment != seen.attachment
            });
            if !replaced && self.pod_exists(pod.namespace(), pod.name(), uid).await? {
                return Ok(ActionOutcome::Postponed("its pod still exists".into()));
            }
        }
        let store = self.store()?;
        let mut locked = store.lock()?;
        let stored = locked.find_by_attachment(&seen.attachment)?.filter(|stored| stored.record == *seen);
        let Some(stored) = stored else {
            return Ok(ActionOutcome::NotNeeded("its DEL came after all".into()));
        };
        let there = match &seen.netns {
            Some(netns) => self.may_exist(netns),
            // Where Cilium picks the addresses it was asked, and has let go.
            None => !self.settings.mode.cilium_picks_the_address(),
        };
        if there {
            return Ok(ActionOutcome::NotNeeded("its namespace is there".into()));
        }
        // The note first: whoever ends in between leaves a record that is found again.
        if let Some(binding) = &seen.binding {
            let container = seen.attachment.container.as_str();
            let note = PendingUpdate {
                what: Told::Ended,
                container: container.to_owned(),
                interface: seen.attachment.interface.as_str().to_owned(),
                namespace: Some(binding.namespace.clone()),
                name: Some(binding.name.clone()),
                attachment_id: Some(binding.container.clone()).filter(|known| known != container),
                uid: uid_of(seen).map(str::to_owned),
                at: store.now().clone(),
            };
            locked.put_pending_update(&seen.attachment, &note)?;
        }
        if seen.keep == Keep::No {
            locked.free(&stored)?;
        } else {
            let kept = Record { phase: Phase::Kept, since: store.now().clone(), netns: None, ..seen.clone() };
            locked.put(&kept, Some(&stored))?;
        }
        locked.commit()?;
        AgentMetrics::count(&self.metrics.leaks, "sandbox");
        Ok(ActionOutcome::Done(format!(
            "the sandbox of {} is gone without a DEL: {}",
            seen.holder(),
            list(&seen.addresses)
        )))
    }

    /// Detaches a StickyIP whose pod is gone and with which no sandbox of this node lives.
    pub(crate) async fn detach(
        &self,
        key: &StickyKey,
        container: &str,
    ) -> Result<ActionOutcome, ActionError> {
        let store = self.store()?;
        let api_writer = self.api_writer();
        let found = bind::read_sticky(&api_writer, key).await?;
        let attachment = found.as_ref().and_then(|found| found.status.as_ref()?.attachment.clone());
        let Some(old) =
            attachment.filter(|old| old.node == self.settings.node && old.container_id == container)
        else {
            return Ok(ActionOutcome::NotNeeded("another sandbox is attached, or none".into()));
        };
        if self.pod_exists(&key.namespace, &old.pod_name, &old.pod_uid).await? {
            return Ok(ActionOutcome::Postponed("its pod exists".into()));
        }
        let itself = Claimant::bound(&key.namespace, &old.pod_name, &interface()?);
        let Some(_lock) = self.try_claimant_lock(&store, &itself)? else {
            return Ok(ActionOutcome::Postponed("an ADD of this pod is on its way".into()));
        };
        let living = store.lock()?.find_by_claimant(&bound(key)?)?;
        if living.is_some_and(|living| living.record.is_attached(store.now())) {
            return Ok(ActionOutcome::NotNeeded("a sandbox lives with it".into()));
        }
        let prepared = store.decisions()?.into_iter().filter_map(|decision| decision.sticky);
        if prepared.into_iter().any(|sticky| sticky.attachment_id == container) {
            return Ok(ActionOutcome::NotNeeded("it is prepared for a pod".into()));
        }
        let outcome = self.detach_containers(&store, key, &[container]).await?;
        if let ActionOutcome::Done(_) = outcome {
            AgentMetrics::count(&self.metrics.leaks, "attachment");
        }
        Ok(outcome)
    }

    /// Forgets a record that is kept for nobody, or those of its addresses that its StickyIP neither has nor claims: they served range
    /// sets for which it has none.
    pub(crate) async fn free(&self, seen: &Record) -> Result<ActionOutcome, ActionError> {
        let Some(binding) = &seen.binding else {
            return Ok(ActionOutcome::NotNeeded("the cluster does not bind it".into()));
        };
        let key = StickyKey { namespace: binding.namespace.clone(), name: binding.name.clone() };
        let home = [self.index.blocks(), self.options.shape.ranges.clone()].concat();
        let of_home = seen.addresses.iter().any(|address| contains(&home, *address));
        let (mut unclaimed, mut wanted) = (Vec::new(), Vec::new());
        if of_home {
            let found = bind::read_sticky(&self.api_writer(), &key).await?;
            let bound = found.map(|found| found.spec.addresses).unwrap_or_default();
            for address in &seen.addresses {
                if bound.contains(address) {
                    wanted.push(*address);
                    continue;
                }
                match self.holder_of(*address).await? {
                    Some(holder) if holder == key => wanted.push(*address),
                    // What the pool shows of it is that one's business.
                    Some(_) => {}
                    None => unclaimed.push(*address),
                }
            }
        }
        // Its own pod's next sandbox gets what is remembered whole, or not at all.
        let pod_is_there = uid_of(seen).is_some_and(|uid| self.index.pod_of(uid).is_some());
        if wanted.len() == seen.addresses.len() || (pod_is_there && !wanted.is_empty()) {
            return Ok(ActionOutcome::Postponed(format!("StickyIP {key} has or claims {}", list(&wanted))));
        }
        let store = self.store()?;
        let mut locks = Vec::new();
        let own =
            seen.pod.as_ref().map(|pod| interface().map(|name| Claimant::new(pod, &name))).transpose()?;
        for claimant in [own, Some(bound(&key)?)].into_iter().flatten() {
            // A pod that bears its StickyIP's name has one turn.
            if locks.iter().any(|(taken, _)| *taken == claimant) {
                continue;
            }
            match self.try_claimant_lock(&store, &claimant)? {
                Some(lock) => locks.push((claimant, lock)),
                None => return Ok(ActionOutcome::Postponed("an ADD of this pod is on its way".into())),
            }
        }
        let changed = || Ok(ActionOutcome::NotNeeded("the record has changed".into()));
        let mut locked = store.lock()?;
        let mut found = None;
        // Whoever ended while it was being replaced left it some of its addresses only.
        for address in &seen.addresses {
            found = found.or(locked.at(*address)?.filter(|stored| stored.record == *seen));
        }
        drop(locked);
        let Some(stored) = found else { return changed() };
        let mut api_writer = self.api_writer();
        let mut anybodys = Vec::new();
        if self.settings.mode.publishes_pool_entries() && of_home {
            // What is of a Sticky pool is never anybody's.
            let blocks = self.index.blocks();
            let of_blocks: Vec<IpAddr> =
                unclaimed.iter().copied().filter(|address| contains(&blocks, *address)).collect();
            let node = pool::read_node(api_writer.api(), &self.settings.node).await?;
            anybodys = node.map(|node| in_the_pool(&node, &stored, &of_blocks)).unwrap_or_default();
            unclaimed.retain(|address| !anybodys.contains(address));
            // Before anything is changed: a record that is still kept has its keys as they were.
            if let Some(later) = self.postponed_by_cilium(&unclaimed).await? {
                return Ok(later);
            }
        }
        let mut locked = store.lock()?;
        let mut standing = Vec::new();
        for address in &seen.addresses {
            if locked.at(*address)?.as_ref() == Some(&stored) {
                standing.push(*address);
            }
        }
        if standing.is_empty() {
            return changed();
        }
        anybodys.retain(|address| standing.contains(address));
        standing.retain(|address| wanted.contains(address));
        locked.keep_only(&stored, standing, &Self::unowned_records(&store, &anybodys)?)?;
        locked.commit()?;
        if !anybodys.is_empty() {
            self.disown(&mut api_writer, &anybodys, |entry| is_of_its_namespace(seen, entry)).await?;
        }
        AgentMetrics::count(&self.metrics.leaks, "record");
        let mut freed = seen.addresses.clone();
        freed.retain(|address| !wanted.contains(address));
        Ok(ActionOutcome::Done(format!("{} was kept for {key}, which does not want it", list(&freed))))
    }

    /// The claim on an address, by a live look.
    pub(crate) async fn claim_on(&self, address: IpAddr) -> Result<Option<AddressClaim>, ActionError> {
        let api = self.connection();
        let claims: Api<AddressClaim> = Api::all(api.client());
        let name = ClaimName::of(address).to_string();
        Ok(api.read(&format!("get AddressClaim {address}"), || claims.get_opt(&name)).await?)
    }

    /// Who holds the claim on an address, by a live look.
    pub(crate) async fn holder_of(&self, address: IpAddr) -> Result<Option<StickyKey>, ActionError> {
        Ok(self.claim_on(address).await?.map(|claim| claim.spec.sticky_ref))
    }

    /// Takes a key or a route out of this node's CiliumNode whose StickyIP is not attached here.
    pub(crate) async fn unpublish(&self, address: IpAddr) -> Result<ActionOutcome, ActionError> {
        let Some(claim) = self.claim_on(address).await? else {
            if let Some(done) = self.remove_stale_owner(address).await? {
                return Ok(done);
            }
            return Ok(ActionOutcome::NeedsAttention(format!(
                "{address} stands in this CiliumNode for somebody and nobody claims it; take it out, or let it be adopted"
            )));
        };
        let (key, phase) = (claim.spec.sticky_ref, claim.spec.phase);
        let store = self.store()?;
        let Some(_lock) = self.pool_lock(&store, &key)? else {
            return Ok(ActionOutcome::Postponed("others are at its pool keys".into()));
        };
        let mut api_writer = self.api_writer();
        let found = bind::read_sticky(&api_writer, &key).await?;
        let found = found.filter(|found| found.spec.addresses.contains(&address));
        // A claim that was sealed once tells that the key is ours; a person has deleted its StickyIP since.
        if found.is_none() && !matches!(phase, ClaimPhase::Bound | ClaimPhase::Quarantined) {
            return Ok(ActionOutcome::NeedsAttention(format!(
                "{address} stands in this CiliumNode and is claimed for StickyIP {key}, which does not have it"
            )));
        }
        let attachment = found.and_then(|found| found.status?.attachment);
        if attachment.is_some_and(|attachment| attachment.node == self.settings.node) {
            return Ok(ActionOutcome::NotNeeded("it is attached here".into()));
        }
        let there = store.lock()?.at(address)?;
        if there.is_some_and(|there| there.record.is_attached(store.now())) {
            return Ok(ActionOutcome::Postponed("a sandbox lives with it".into()));
        }
        if let Some(later) = self.postponed_by_cilium(&[address]).await? {
            return Ok(later);
        }
        let node = &self.settings.node;
        pool::unpublish(&mut api_writer, node, &self.options.shape, &[address]).await?;
        AgentMetrics::count(&self.metrics.pool_writes, "removed");
        AgentMetrics::count(&self.metrics.leaks, "key");
        Ok(ActionOutcome::Done(format!("{address} of StickyIP {key} is not attached here")))
    }

    /// Takes out the signs that no grant waits for any more. One that does puts another in place.
    pub(crate) async fn remove_barriers(&self) -> Result<ActionOutcome, ActionError> {
        pool::change(&mut self.api_writer(), &self.settings.node, None, |object| {
            let keys: BTreeMap<_, _> = barrier::keys(object).map(|key| (key.clone(), None)).collect();
            (!keys.is_empty()).then(|| NodePatch::of_keys(object, keys))
        })
        .await?;
        AgentMetrics::count(&self.metrics.pool_writes, "removed");
        Ok(ActionOutcome::Done("no grant waits for Cilium any more".into()))
    }

    /// The node's own addresses: those of its configuration, else of its blocks.
    pub(crate) fn node_ranges(&self, node: Option<&CiliumNode>) -> Vec<RangeSet> {
        if !self.options.ranges.is_empty() {
            return self.options.ranges.clone();
        }
        RangeSet::over(&node.map(home_blocks).unwrap_or_default())
    }
}
