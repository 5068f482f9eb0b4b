//! The node's store as the agent's walk for a pod needs it. Must never let go of an address that somebody on this node
//! has, and never take a decision for gone that an ADD could still use.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::alloc::RangeSet;
use crate::alloc::range::Family;
use crate::cluster::objects::StickyKey;
use crate::cluster::protocol::bind::{BindError, LocalNode};
use crate::cluster::protocol::step::Candidate;
use crate::cluster::protocol::view::Origin;
use crate::cni::{Attachment, ContainerId, PodIdentity};
use crate::policy::handover::{OldPod, OldSandbox};
use crate::store::{
    Claimant, Decision, Disk, LockedStore, Record, Store, StoreError, StoredRecord, Withdrawn,
};

/// How many addresses that others hold are passed over before the node counts as full.
const MAX_SKIPPED: usize = 1024;

/// This node, for one claimant.
pub(crate) struct NodeAddresses<'a, D: Disk> {
    pub(crate) store: &'a Store<D>,
    pub(crate) node: &'a str,
    pub(crate) key: StickyKey,
    pub(crate) pod: PodIdentity,
    pub(crate) attachment: Attachment,
    /// The node's own addresses.
    pub(crate) sets: &'a [RangeSet],
    /// Addresses that Cilium could give to anybody, whatever the store says. None: nobody has looked, so nothing is reserved.
    pub(crate) barred: Option<BTreeSet<IpAddr>>,
    /// Whether a network namespace of this node is still there, as far as one can see.
    pub(crate) netns_is_there: &'a dyn Fn(&std::path::Path) -> bool,
    /// Reserved in this walk.
    pub(crate) reserved: Vec<IpAddr>,
}

impl<D: Disk> NodeAddresses<'_, D> {
    pub(crate) fn claimant(&self) -> Claimant {
        Claimant::bound(&self.key.namespace, &self.key.name, &self.attachment.interface)
    }

    /// Whether another pod's sandbox is there with this record's addresses.
    fn lives(&self, record: &Record) -> bool {
        let same_pod = record.pod.as_ref().and_then(PodIdentity::uid) == self.pod.uid();
        record.is_attached(self.store.now())
            && !same_pod
            && record.netns.as_ref().is_none_or(|netns| (self.netns_is_there)(netns))
    }

    fn kept(&self, locked: &mut LockedStore<'_, D>) -> Result<Option<StoredRecord>, BindError> {
        let kept = locked.find_by_claimant(&self.claimant()).map_err(ground)?;
        match kept.as_ref().filter(|stored| self.lives(&stored.record)) {
            Some(stored) => Err(BindError::HeldOnNode {
                address: stored.record.addresses.first().copied().unwrap_or(IpAddr::from([0, 0, 0, 0])),
                held_by: stored.record.holder(),
            }),
            None => Ok(kept),
        }
    }

    fn keep(&mut self, mut locked: LockedStore<'_, D>, address: IpAddr) -> Result<(), BindError> {
        let kept = self.kept(&mut locked)?;
        let (claimant, attachment, tried) = (self.claimant(), &self.attachment, &self.reserved);
        let reserved = locked.reserve(address, &claimant, &self.pod, attachment, kept.as_ref(), tried);
        if reserved.map_err(ground)? {
            self.reserved.push(address);
        }
        Ok(())
    }

    /// Lets go of what was reserved in this walk and is not claimed.
    pub(crate) fn unreserve(&self) -> Result<(), StoreError> {
        if self.reserved.is_empty() {
            return Ok(());
        }
        self.store.unreserve(&self.claimant(), &self.attachment, &self.reserved)
    }

    fn barred(&self) -> Result<&BTreeSet<IpAddr>, BindError> {
        let unknown = || BindError::LocalNode(format!("StickyIP {} is not as it was remembered", self.key));
        self.barred.as_ref().ok_or_else(unknown)
    }

    fn own(&self, address: IpAddr) -> Option<Origin> {
        let range = self.sets.iter().find_map(|set| set.contains(address))?;
        range.usable(address).then(|| Origin::OwnBlock { node: self.node.to_owned(), block: range.subnet() })
    }
}

impl<D: Disk> LocalNode for NodeAddresses<'_, D> {
    fn node(&self) -> &str {
        self.node
    }

    fn families(&self) -> Vec<Family> {
        let mut families: Vec<Family> = self.sets.iter().map(RangeSet::family).collect();
        families.sort();
        families.dedup();
        families
    }

    fn is_own(&self, address: IpAddr) -> bool {
        self.sets.iter().any(|set| set.contains(address).is_some())
    }

    fn old_sandbox(&mut self, container_id: &str, pod: OldPod) -> Result<OldSandbox, BindError> {
        let Ok(container) = ContainerId::new(container_id) else { return Ok(OldSandbox::Gone) };
        let old = Attachment { container, interface: self.attachment.interface.clone() };
        let mut locked = self.store.lock().map_err(ground)?;
        let by_container = locked.find_by_attachment(&old).map_err(ground)?;
        // The API server may know the sandbox by another id than the runtime's.
        let by_claimant = locked.find_by_claimant(&self.claimant()).map_err(ground)?;
        // Any sandbox that lives with the claimant's addresses counts, whatever its id.
        for stored in by_container.iter().chain(&by_claimant) {
            if self.lives(&stored.record) {
                return Ok(OldSandbox::MayLive);
            }
        }
        // A decision that nobody has used, for a pod that will not come, must not be used any more.
        let prepared = Decision::prepared_uid(container_id);
        let prepared = prepared.filter(|uid| pod != OldPod::Running && Some(*uid) != self.pod.uid());
        if let Some(uid) = prepared {
            match locked.withdraw(uid, &self.attachment.interface).map_err(ground)? {
                Withdrawn::InUse => return Ok(OldSandbox::MayLive),
                Withdrawn::Unused(_) => return Ok(OldSandbox::Gone),
                Withdrawn::Nothing => {}
            }
        }
        // Its DEL came by here, or its ADD never got to the end; a store that was lost would look the same, so a pod that is
        // supposed to run is believed to.
        let attachment_id = |stored: &StoredRecord| {
            stored.record.binding.as_ref().is_some_and(|binding| binding.container == container_id)
        };
        let known = by_container.is_some() || by_claimant.is_some_and(|stored| attachment_id(&stored));
        Ok(if !known && pod == OldPod::Running { OldSandbox::MayLive } else { OldSandbox::Gone })
    }

    fn reserve_any(
        &mut self,
        family: Family,
        avoid: &BTreeSet<IpAddr>,
    ) -> Result<Option<Candidate>, BindError> {
        let barred = self.barred()?.clone();
        let mut locked = self.store.lock().map_err(ground)?;
        let kept = self.kept(&mut locked)?;
        let kept = kept.iter().flat_map(|stored| stored.record.addresses.iter().copied());
        // What is barred, Cilium may have given to anybody since it was kept.
        let passed = |address: &IpAddr| avoid.contains(address) || barred.contains(address);
        let mut mine = kept.filter(|address| Family::of(*address) == family && !passed(address));
        if let Some((address, origin)) = mine.find_map(|address| Some((address, self.own(address)?))) {
            self.keep(locked, address)?;
            return Ok(Some(Candidate { address, origin }));
        }
        for (index, set) in self.sets.iter().enumerate().filter(|(_, set)| set.family() == family) {
            for _ in 0..MAX_SKIPPED {
                let Some(address) = locked.next_free(index, set).map_err(ground)? else { break };
                locked.set_cursor(index, address);
                if passed(&address) {
                    continue;
                }
                let Some(origin) = self.own(address) else { continue };
                self.keep(locked, address)?;
                return Ok(Some(Candidate { address, origin }));
            }
        }
        Ok(None)
    }

    fn reserve_this(&mut self, address: IpAddr) -> Result<Origin, BindError> {
        let is_barred = self.barred()?.contains(&address);
        let Some(origin) = self.own(address) else { return Ok(Origin::Nowhere) };
        let mut locked = self.store.lock().map_err(ground)?;
        match locked.at(address).map_err(ground)? {
            // First, because it is known by name: the pool shows addresses of others too.
            Some(there) if !there.record.is_for(&self.claimant()) => {
                Err(BindError::HeldOnNode { address, held_by: there.record.holder() })
            }
            // Own, and not to be had: from nowhere it would be taken unreserved, by a claim of an earlier attempt.
            _ if is_barred => {
                let held_by = "Cilium, which gives it to any pod".to_owned();
                Err(BindError::HeldOnNode { address, held_by })
            }
            // Nobody frees what a sandbox lives with.
            Some(there) if there.record.is_attached(self.store.now()) => Ok(origin),
            _ => {
                self.keep(locked, address)?;
                Ok(origin)
            }
        }
    }
}

pub(crate) fn ground(error: StoreError) -> BindError {
    BindError::LocalNode(error.to_string())
}
