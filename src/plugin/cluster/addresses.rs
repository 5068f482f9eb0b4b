//! The node's store as a pod's walk needs it: what is known of an old sandbox, addresses reserved before they are
//! claimed, and the record in the end. Must never let go of an address that somebody on this node has.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::alloc::RangeSet;
use crate::alloc::range::{Family, Range};
use crate::cluster::cilium::objects::CiliumNode;
use crate::cluster::cilium::pool::{PublishConfig, home_blocks};
use crate::cluster::objects::StickyKey;
use crate::cluster::protocol::bind::{BindError, LocalNode};
use crate::cluster::protocol::step::Candidate;
use crate::cluster::protocol::view::Origin;
use crate::cni::{Attachment, CniError, ContainerId, PodIdentity, Request, code};
use crate::plugin::VerbContext;
use crate::plugin::verbs::wait::may_be_there;
use crate::policy::handover::{OldPod, OldSandbox};
use crate::policy::mode::PluginMode;
use crate::store::{
    Claimant, Decision, Disk, Draft, Keep, LockedStore, Phase, Record, StickyBinding, StoreError,
    StoredRecord,
};

/// How many addresses that others hold are passed over before the node counts as full.
const MAX_SKIPPED: usize = 1024;

/// Where a node's addresses come from, and what is shown of them.
#[derive(Debug)]
pub(crate) struct AddressSource {
    sets: Vec<RangeSet>,
    /// Addresses that Cilium gives to others, whatever the store says.
    barred: BTreeSet<IpAddr>,
    /// What the node's CiliumNode shows.
    pub(crate) shape: PublishConfig,
}

impl AddressSource {
    /// The ranges of the node's configuration: this plugin picks, and every range set gives an address.
    pub(crate) fn of_ranges(mode: PluginMode, sets: &[RangeSet]) -> Self {
        let ranges = sets.iter().flat_map(|set| set.ranges()).map(Range::subnet).collect();
        Self { sets: sets.to_vec(), barred: BTreeSet::new(), shape: PublishConfig { mode, ranges } }
    }

    /// For addresses that are attached already: nothing is picked any more.
    pub(crate) fn of_attached(mode: PluginMode, sets: &[RangeSet]) -> Self {
        if mode.cilium_picks_the_address() { Self::without_ranges(mode) } else { Self::of_ranges(mode, sets) }
    }

    fn without_ranges(mode: PluginMode) -> Self {
        let shape = PublishConfig { mode, ranges: Vec::new() };
        Self { sets: Vec::new(), barred: BTreeSet::new(), shape }
    }

    /// The home blocks of the node's CiliumNode, without what Cilium may have given to others than `owner`.
    pub(crate) fn of_cilium_node(mode: PluginMode, node: &CiliumNode, owner: &str) -> Self {
        let (sets, barred) = (RangeSet::over(&home_blocks(node)), node.barred_to(owner));
        Self { sets, barred, ..Self::without_ranges(mode) }
    }
}

/// This node, for one claimant.
pub(crate) struct NodeAddresses<'a, D: Disk> {
    pub(crate) request: &'a Request,
    pub(crate) scene: &'a VerbContext<'a, D>,
    pub(crate) home: &'a AddressSource,
    pub(crate) node: &'a str,
    pub(crate) attachment: &'a Attachment,
    pub(crate) key: StickyKey,
    pub(crate) pod: PodIdentity,
    /// Reserved in this walk.
    pub(crate) reserved: Vec<IpAddr>,
    /// The file of the record that this walk will leave, most likely.
    pub(crate) draft: Option<Draft>,
}

impl<D: Disk> NodeAddresses<'_, D> {
    pub(crate) fn claimant(&self) -> Claimant {
        Claimant::bound(&self.key.namespace, &self.key.name, &self.attachment.interface)
    }

    fn record(&self, addresses: Vec<IpAddr>, attachment_id: &str) -> Record {
        Record {
            addresses,
            attachment: self.attachment.clone(),
            phase: Phase::Attached,
            netns: self.request.netns.clone(),
            pod: Some(self.pod.clone()),
            keep: Keep::Forever,
            binding: Some(StickyBinding {
                namespace: self.key.namespace.clone(),
                name: self.key.name.clone(),
                container: attachment_id.to_owned(),
            }),
            since: self.scene.store.now().clone(),
        }
    }

    /// What the claimant has on this node; an error if a sandbox lives with it.
    fn kept(&self, locked: &mut LockedStore<'_, D>) -> Result<Option<StoredRecord>, BindError> {
        let kept = locked.find_by_claimant(&self.claimant()).map_err(ground)?;
        if let Some(stored) = &kept
            && self.lives(&stored.record)
        {
            let address = stored.record.addresses.first().copied().unwrap_or(IpAddr::from([0, 0, 0, 0]));
            return Err(BindError::HeldOnNode { address, held_by: stored.record.holder() });
        }
        Ok(kept)
    }

    /// Whether another pod's sandbox is there with this record's addresses.
    fn lives(&self, record: &Record) -> bool {
        let same_pod = record.pod.as_ref().and_then(PodIdentity::uid) == self.pod.uid();
        record.is_attached(self.scene.store.now())
            && record.attachment != *self.attachment
            && !same_pod
            && record.netns.as_ref().is_none_or(|netns| may_be_there(netns))
    }

    /// Puts an address beside those that are reserved for the claimant already, one a family, or says anew that it is wanted.
    fn keep(&mut self, mut locked: LockedStore<'_, D>, address: IpAddr) -> Result<(), BindError> {
        let kept = self.kept(&mut locked)?;
        let claimant = self.claimant();
        let (attachment, tried) = (self.attachment, &self.reserved);
        let reserved = locked.reserve(address, &claimant, &self.pod, attachment, kept.as_ref(), tried);
        if reserved.map_err(ground)? {
            self.reserved.push(address);
        }
        Ok(())
    }

    /// Lets go of what was reserved in this walk. Only if it is not claimed: the caller has looked.
    pub(crate) fn unreserve(&self) -> Result<(), StoreError> {
        if self.reserved.is_empty() {
            return Ok(());
        }
        self.scene.store.unreserve(&self.claimant(), self.attachment, &self.reserved)
    }

    /// Writes down that the sandbox has these addresses, and one of this node's ranges for every range set that they do
    /// not serve. Tells the addresses by range set; where Cilium picks the address there are none. With a `decision`,
    /// that is used up in the same hold of the lock.
    pub(crate) fn write_record(
        &mut self,
        mut locked: LockedStore<'_, D>,
        addresses: &[IpAddr],
        decision: Option<&Decision>,
    ) -> Result<Vec<IpAddr>, CniError> {
        let kept = self.kept(&mut locked).map_err(|error| CniError::try_again(error.to_string()))?;
        let mut outlived: Vec<StoredRecord> = Vec::new();
        for address in addresses {
            let there = locked.at(*address)?;
            let ours = there.as_ref().is_none_or(|there| there.record.claimant() == Some(self.claimant()));
            if let (false, Some(there)) = (ours, there) {
                // The claim is sealed to our StickyIP: one for which it was only kept here has ceased to be. Or we left it here.
                if there.record.phase == Phase::Kept && there.record.binding.is_some() {
                    outlived.push(there);
                    continue;
                }
                let message = format!("{address} of StickyIP {} is with {}", self.key, there.record.holder());
                return Err(CniError::try_again(message));
            }
        }
        let all = if self.home.shape.mode.cilium_picks_the_address() {
            addresses.to_vec()
        } else {
            self.by_set(&mut locked, addresses)?
        };
        let prepared = decision.and_then(|decision| decision.sticky.as_ref());
        let attachment_id =
            prepared.map_or(self.attachment.container.as_str(), |prepared| prepared.attachment_id.as_str());
        let record = self.record(all.clone(), attachment_id);
        locked.use_draft(self.draft.take());
        locked.mark_superseded(kept.as_ref(), &all, &self.reserved)?;
        match decision {
            Some(decision) => locked.consume(decision, &record, kept.as_ref(), &outlived)?,
            None => locked.put_reclaiming(&record, kept.as_ref(), &outlived)?,
        }
        locked.commit()?;
        Ok(all)
    }

    /// Takes a draft away that this walk did not need.
    pub(crate) fn discard_draft(&mut self) {
        if let Some(Err(error)) = self.draft.take().map(|draft| self.scene.store.discard_draft(&draft)) {
            tracing::warn!(pod = %self.pod, %error, "a draft is left; this container's DEL takes it away");
        }
    }

    /// The address that serves each range set.
    fn serving(&self, addresses: &[IpAddr]) -> Vec<Option<IpAddr>> {
        let mut all: Vec<Option<IpAddr>> = Vec::new();
        for set in &self.home.sets {
            let bound = addresses.iter().find(|address| Family::of(**address) == set.family());
            all.push(bound.copied().filter(|address| !all.contains(&Some(*address))));
        }
        all
    }

    fn by_set(&self, locked: &mut LockedStore<'_, D>, addresses: &[IpAddr]) -> Result<Vec<IpAddr>, CniError> {
        let mut all = self.serving(addresses);
        if all.iter().all(Option::is_none) {
            let message = format!(
                "StickyIP {} has {addresses:?}, and this node's ranges are of another family",
                self.key
            );
            return Err(CniError::new(code::REQUEST_REFUSED, message));
        }
        for (index, set) in self.home.sets.iter().enumerate() {
            if all[index].is_none() {
                let next = locked.next_free(index, set)?.ok_or_else(|| {
                    CniError::new(code::EXHAUSTED, format!("no IP addresses available in range set: {set}"))
                })?;
                locked.set_cursor(index, next);
                all[index] = Some(next);
            }
        }
        Ok(all.into_iter().flatten().collect())
    }

    fn own(&self, address: IpAddr) -> Option<Origin> {
        let range = self.home.sets.iter().find_map(|set| set.contains(address))?;
        range.usable(address).then(|| Origin::OwnBlock { node: self.node.to_owned(), block: range.subnet() })
    }

    fn set_of(&self, family: Family) -> Option<(usize, &RangeSet)> {
        self.home.sets.iter().enumerate().find(|(_, set)| set.family() == family)
    }
}

impl<D: Disk> LocalNode for NodeAddresses<'_, D> {
    fn node(&self) -> &str {
        self.node
    }

    fn families(&self) -> Vec<Family> {
        let mut families = Vec::new();
        for set in &self.home.sets {
            if !families.contains(&set.family()) {
                families.push(set.family());
            }
        }
        if families.is_empty() {
            // A CiliumNode without blocks: what stands in its pool tells, or nothing does.
            families
                .extend(self.home.barred.iter().map(|address| Family::of(*address)).collect::<BTreeSet<_>>());
        }
        if families.is_empty() { vec![Family::V4] } else { families }
    }

    fn is_own(&self, address: IpAddr) -> bool {
        self.home.sets.iter().any(|set| set.contains(address).is_some())
    }

    fn old_sandbox(&mut self, container_id: &str, pod: OldPod) -> Result<OldSandbox, BindError> {
        let Ok(container) = ContainerId::new(container_id) else { return Ok(OldSandbox::Gone) };
        let old = Attachment { container, interface: self.attachment.interface.clone() };
        let mut locked = self.scene.store.lock().map_err(ground)?;
        let known = match locked.find_by_attachment(&old).map_err(ground)? {
            Some(stored) => Some(stored),
            // The record may bear the id of a sandbox that took its place, or for which it was prepared.
            None => locked.find_by_claimant(&self.claimant()).map_err(ground)?.filter(|stored| {
                stored.record.binding.as_ref().is_some_and(|binding| binding.container == container_id)
            }),
        };
        Ok(match known {
            Some(stored) if self.lives(&stored.record) => OldSandbox::MayLive,
            Some(_) => OldSandbox::Gone,
            // Its DEL came by here, or its ADD never got to the end; a store that was lost would look the same, so a pod that
            // is supposed to run is believed to.
            None if pod == OldPod::Running => OldSandbox::MayLive,
            None => {
                // Prepared for a pod that will not come: from here on it could not use it.
                if let Some(uid) = Decision::prepared_uid(container_id) {
                    locked.withdraw(uid, &self.attachment.interface).map_err(ground)?;
                }
                OldSandbox::Gone
            }
        })
    }

    fn attaching(&mut self, addresses: &[IpAddr]) {
        let all = match self.home.shape.mode.cilium_picks_the_address() {
            true => Some(addresses.to_vec()),
            // One for a set that they do not serve is found under the lock.
            false => self.serving(addresses).into_iter().collect(),
        };
        let Some(all) = all.filter(|_| self.draft.is_none()) else { return };
        match self.scene.store.draft(&self.record(all, self.attachment.container.as_str())) {
            Ok(draft) => self.draft = Some(draft),
            // The record itself will tell, if it is of the same kind.
            Err(error) => tracing::debug!(pod = %self.pod, %error, "no draft of the record"),
        }
    }

    fn reserve_any(
        &mut self,
        family: Family,
        avoid: &BTreeSet<IpAddr>,
    ) -> Result<Option<Candidate>, BindError> {
        let home = self.home;
        let mut locked = self.scene.store.lock().map_err(ground)?;
        let kept = self.kept(&mut locked)?;
        let kept = kept.iter().flat_map(|stored| stored.record.addresses.iter().copied());
        // What is barred, Cilium may have given to anybody since it was kept.
        let passed = |address: &IpAddr| avoid.contains(address) || home.barred.contains(address);
        let mut mine = kept.filter(|address| Family::of(*address) == family && !passed(address));
        if let Some((address, origin)) = mine.find_map(|address| Some((address, self.own(address)?))) {
            self.keep(locked, address)?;
            return Ok(Some(Candidate { address, origin }));
        }
        let Some((index, set)) = self.set_of(family) else { return Ok(None) };
        for _ in 0..MAX_SKIPPED {
            let Some(address) = locked.next_free(index, set).map_err(ground)? else { return Ok(None) };
            locked.set_cursor(index, address);
            if passed(&address) {
                continue;
            }
            let Some(origin) = self.own(address) else { continue };
            self.keep(locked, address)?;
            return Ok(Some(Candidate { address, origin }));
        }
        Ok(None)
    }

    fn reserve_this(&mut self, address: IpAddr) -> Result<Origin, BindError> {
        let Some(origin) = self.own(address) else { return Ok(Origin::Nowhere) };
        let mut locked = self.scene.store.lock().map_err(ground)?;
        match locked.at(address).map_err(ground)? {
            // First, because it is known by name: the pool shows addresses of others too.
            Some(there) if !there.record.is_for(&self.claimant()) => {
                Err(BindError::HeldOnNode { address, held_by: there.record.holder() })
            }
            _ if self.home.barred.contains(&address) => {
                let held_by = "Cilium, which gives it to any pod".to_owned();
                Err(BindError::HeldOnNode { address, held_by })
            }
            // Nobody frees what a sandbox lives with.
            Some(there) if there.record.is_attached(self.scene.store.now()) => Ok(origin),
            _ => {
                self.keep(locked, address)?;
                Ok(origin)
            }
        }
    }
}

fn ground(error: StoreError) -> BindError {
    BindError::LocalNode(error.to_string())
}
