//! Freeing what nobody ended: attachments of sandboxes that are gone, StickyIPs without a sandbox, records kept for
//! nobody, keys and routes of addresses that left. Must never free on what the watches told alone: every proof is read
//! again, live or under the lock.

use std::collections::BTreeMap;
use std::net::IpAddr;

use kube::api::Api;

use crate::agent::actions::release_blocks::{is_of_its_namespace, of_the_pool};
use crate::agent::actions::{ActError, Hands, Outcome, bound, interface, list};
use crate::agent::metrics::Metrics;
use crate::agent::plan::{contains, uid_of};
use crate::alloc::RangeSet;
use crate::cluster::cilium::barrier;
use crate::cluster::cilium::objects::CiliumNode;
use crate::cluster::cilium::pool;
use crate::cluster::cilium::pool::{NodePatch, home_blocks};
use crate::cluster::objects::{AddressClaim, ClaimName, ClaimPhase, Holder};
use crate::cluster::protocol::bind;
use crate::store::{Claimant, Disk, Keep, Note, Phase, Record, Told};

impl<D: Disk + Clone> Hands<'_, D> {
    /// Ends an attachment as a DEL would: the address is free, or kept for its StickyIP, and a note tells of it.
    pub(crate) async fn end(&self, seen: &Record) -> Result<Outcome, ActError> {
        for address in seen.addresses.iter().filter(|_| self.terms.shape.pool) {
            // Another's says nothing of this one: Cilium gave the address away since. One without a name may be this one's.
            let container = seen.attachment.container.as_str();
            let about = self.endpoint_of(*address).await?;
            if about.is_some_and(|about| about.container.is_empty() || about.container == container) {
                return Ok(Outcome::Later(format!("Cilium still has an endpoint with {address}")));
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
                return Ok(Outcome::Later("its pod still exists".into()));
            }
        }
        let store = self.store()?;
        let mut locked = store.lock()?;
        let stored = locked.of_attachment(&seen.attachment)?.filter(|stored| stored.record == *seen);
        let Some(stored) = stored else {
            return Ok(Outcome::Needless("its DEL came after all".into()));
        };
        let there = match &seen.netns {
            Some(netns) => self.may_be_there(netns),
            // Where Cilium picks the addresses it was asked, and has let go.
            None => !self.terms.shape.pool,
        };
        if there {
            return Ok(Outcome::Needless("its namespace is there".into()));
        }
        // The note first: whoever ends in between leaves a record that is found again.
        if let Some(binding) = &seen.binding {
            let container = seen.attachment.container.as_str();
            let note = Note {
                what: Told::Ended,
                container: container.to_owned(),
                interface: seen.attachment.interface.as_str().to_owned(),
                namespace: Some(binding.namespace.clone()),
                name: Some(binding.name.clone()),
                known_as: Some(binding.container.clone()).filter(|known| known != container),
                uid: uid_of(seen).map(str::to_owned),
                at: store.now().clone(),
            };
            locked.leave_note(&seen.attachment, &note)?;
        }
        if seen.keep == Keep::No {
            locked.free(&stored)?;
        } else {
            let kept = Record { phase: Phase::Kept, since: store.now().clone(), netns: None, ..seen.clone() };
            locked.put(&kept, Some(&stored))?;
        }
        locked.commit()?;
        Metrics::count(&self.metrics.leaks, "sandbox");
        Ok(Outcome::Done(format!(
            "the sandbox of {} is gone without a DEL: {}",
            seen.holder(),
            list(&seen.addresses)
        )))
    }

    /// Detaches a StickyIP whose pod is gone and with which no sandbox of this node lives.
    pub(crate) async fn detach(&self, key: &Holder, container: &str) -> Result<Outcome, ActError> {
        let store = self.store()?;
        let carrier = self.carrier();
        let found = bind::read_sticky(&carrier, key).await?;
        let attachment = found.as_ref().and_then(|found| found.status.as_ref()?.attachment.clone());
        let Some(old) =
            attachment.filter(|old| old.node == self.settings.node && old.container_id == container)
        else {
            return Ok(Outcome::Needless("another sandbox is attached, or none".into()));
        };
        if self.pod_exists(&key.namespace, &old.pod_name, &old.pod_uid).await? {
            return Ok(Outcome::Later("its pod exists".into()));
        }
        let itself = Claimant::bound(&key.namespace, &old.pod_name, &interface()?);
        let Some(_turn) = self.try_turn(&store, &itself)? else {
            return Ok(Outcome::Later("an ADD of this pod is on its way".into()));
        };
        let living = store.lock()?.of_claimant(&bound(key)?)?;
        if living.is_some_and(|living| living.record.is_attached(store.now())) {
            return Ok(Outcome::Needless("a sandbox lives with it".into()));
        }
        let prepared = store.decisions()?.into_iter().filter_map(|decision| decision.sticky);
        if prepared.into_iter().any(|sticky| sticky.known_as == container) {
            return Ok(Outcome::Needless("it is prepared for a pod".into()));
        }
        let outcome = self.let_go(&store, key, &[container]).await?;
        if let Outcome::Done(_) = outcome {
            Metrics::count(&self.metrics.leaks, "attachment");
        }
        Ok(outcome)
    }

    /// Forgets a record that is kept for nobody, or those of its addresses that its StickyIP neither has nor claims: they served range
    /// sets for which it has none.
    pub(crate) async fn free(&self, seen: &Record) -> Result<Outcome, ActError> {
        let Some(binding) = &seen.binding else {
            return Ok(Outcome::Needless("the cluster does not bind it".into()));
        };
        let key = Holder { namespace: binding.namespace.clone(), name: binding.name.clone() };
        let home = [self.index.blocks(), self.terms.shape.ranges.clone()].concat();
        let of_home = seen.addresses.iter().any(|address| contains(&home, *address));
        let (mut unclaimed, mut wanted) = (Vec::new(), Vec::new());
        if of_home {
            let found = bind::read_sticky(&self.carrier(), &key).await?;
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
            return Ok(Outcome::Later(format!("StickyIP {key} has or claims {}", list(&wanted))));
        }
        let store = self.store()?;
        let mut turns = Vec::new();
        let own =
            seen.pod.as_ref().map(|pod| interface().map(|name| Claimant::new(pod, &name))).transpose()?;
        for claimant in [own, Some(bound(&key)?)].into_iter().flatten() {
            // A pod that bears its StickyIP's name has one turn.
            if turns.iter().any(|(taken, _)| *taken == claimant) {
                continue;
            }
            match self.try_turn(&store, &claimant)? {
                Some(turn) => turns.push((claimant, turn)),
                None => return Ok(Outcome::Later("an ADD of this pod is on its way".into())),
            }
        }
        let changed = || Ok(Outcome::Needless("the record has changed".into()));
        let mut locked = store.lock()?;
        let mut found = None;
        // Whoever ended while it was being replaced left it some of its addresses only.
        for address in &seen.addresses {
            found = found.or(locked.at(*address)?.filter(|stored| stored.record == *seen));
        }
        drop(locked);
        let Some(stored) = found else { return changed() };
        let mut carrier = self.carrier();
        let mut anybodys = Vec::new();
        if self.terms.shape.pool && of_home {
            // What is of a Sticky pool is never anybody's.
            let blocks = self.index.blocks();
            let of_blocks: Vec<IpAddr> =
                unclaimed.iter().copied().filter(|address| contains(&blocks, *address)).collect();
            let node = pool::read_node(carrier.api(), &self.settings.node).await?;
            anybodys = node.map(|node| of_the_pool(&node, &stored, &of_blocks)).unwrap_or_default();
            unclaimed.retain(|address| !anybodys.contains(address));
            // Before anything is changed: a record that is still kept has its keys as they were.
            if let Some(later) = self.waits_for_cilium(&unclaimed).await? {
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
        locked.keep_only(&stored, standing, &Self::marks(&store, &anybodys)?)?;
        locked.commit()?;
        if !anybodys.is_empty() {
            self.disown(&mut carrier, &anybodys, |entry| is_of_its_namespace(seen, entry)).await?;
        }
        Metrics::count(&self.metrics.leaks, "record");
        let mut freed = seen.addresses.clone();
        freed.retain(|address| !wanted.contains(address));
        Ok(Outcome::Done(format!("{} was kept for {key}, which does not want it", list(&freed))))
    }

    /// The claim on an address, by a live look.
    pub(crate) async fn claim_on(&self, address: IpAddr) -> Result<Option<AddressClaim>, ActError> {
        let api = self.connection();
        let claims: Api<AddressClaim> = Api::all(api.client());
        let name = ClaimName::of(address).to_string();
        Ok(api.read(&format!("get AddressClaim {address}"), || claims.get_opt(&name)).await?)
    }

    /// Who holds the claim on an address, by a live look.
    pub(crate) async fn holder_of(&self, address: IpAddr) -> Result<Option<Holder>, ActError> {
        Ok(self.claim_on(address).await?.map(|claim| claim.spec.holder))
    }

    /// Takes a key or a route out of this node's CiliumNode whose StickyIP is not attached here.
    pub(crate) async fn hide(&self, address: IpAddr) -> Result<Outcome, ActError> {
        let Some(claim) = self.claim_on(address).await? else {
            if let Some(done) = self.disown_what_is_anybodys(address).await? {
                return Ok(done);
            }
            return Ok(Outcome::Odd(format!(
                "{address} stands in this CiliumNode for somebody and nobody claims it; take it out, or let it be adopted"
            )));
        };
        let (key, phase) = (claim.spec.holder, claim.spec.phase);
        let store = self.store()?;
        let Some(_turn) = self.pool_turn(&store, &key)? else {
            return Ok(Outcome::Later("others are at its pool keys".into()));
        };
        let mut carrier = self.carrier();
        let found = bind::read_sticky(&carrier, &key).await?;
        let found = found.filter(|found| found.spec.addresses.contains(&address));
        // A claim that was sealed once tells that the key is ours; a person has deleted its StickyIP since.
        if found.is_none() && !matches!(phase, ClaimPhase::Bound | ClaimPhase::Resting) {
            return Ok(Outcome::Odd(format!(
                "{address} stands in this CiliumNode and is claimed for StickyIP {key}, which does not have it"
            )));
        }
        let attachment = found.and_then(|found| found.status?.attachment);
        if attachment.is_some_and(|attachment| attachment.node == self.settings.node) {
            return Ok(Outcome::Needless("it is attached here".into()));
        }
        let there = store.lock()?.at(address)?;
        if there.is_some_and(|there| there.record.is_attached(store.now())) {
            return Ok(Outcome::Later("a sandbox lives with it".into()));
        }
        if let Some(later) = self.waits_for_cilium(&[address]).await? {
            return Ok(later);
        }
        let node = &self.settings.node;
        pool::remove(&mut carrier, node, &self.terms.shape, &[address]).await?;
        Metrics::count(&self.metrics.pool_writes, "removed");
        Metrics::count(&self.metrics.leaks, "key");
        Ok(Outcome::Done(format!("{address} of StickyIP {key} is not attached here")))
    }

    /// Takes out the signs that no grant waits for any more. One that does puts another in place.
    pub(crate) async fn unsign(&self) -> Result<Outcome, ActError> {
        pool::change(&mut self.carrier(), &self.settings.node, None, |object| {
            let keys: BTreeMap<_, _> = barrier::keys(object).map(|key| (key.clone(), None)).collect();
            (!keys.is_empty()).then(|| NodePatch::of_keys(object, keys))
        })
        .await?;
        Metrics::count(&self.metrics.pool_writes, "removed");
        Ok(Outcome::Done("no grant waits for Cilium any more".into()))
    }

    /// The node's own addresses: those of its configuration, else of its blocks.
    pub(crate) fn own_sets(&self, node: Option<&CiliumNode>) -> Vec<RangeSet> {
        if !self.terms.ranges.is_empty() {
            return self.terms.ranges.clone();
        }
        RangeSet::over(&node.map(home_blocks).unwrap_or_default())
    }
}
