//! The addresses of this node as the binding of a claimant needs them: what is known of an old sandbox, and
//! addresses that are reserved in the store before they are claimed.
//!
//! Must never release an address that a sandbox here has, or count a decision as gone that an ADD could use.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;

use crate::alloc::RangeSet;
use crate::alloc::range::{Family, Range};
use crate::cluster::cilium::pool::{PublishConfig, home_blocks};
use crate::cluster::objects::cilium::CiliumNode;
use crate::cluster::protocol::bind::{self, BindError, LocalNode};
use crate::cluster::protocol::step::Candidate;
use crate::cluster::view::Origin;
use crate::cluster::writer::apply::ApiWriter;
use crate::names::{Attachment, AttachmentId, PodIdentity, StickyKey};
use crate::policy::handover::{OldPod, OldSandbox};
use crate::policy::mode::PluginMode;
use crate::store::{ClaimantKey, Disk, LockedStore, Record, Store, StoreError, StoredRecord, Withdrawn};

/// How many addresses that others hold are skipped before a range set counts as full.
const MAX_SKIPPED: usize = 1024;

/// Where the addresses of a node come from, and what its CiliumNode publishes of them.
#[derive(Debug)]
pub(crate) struct AddressSource {
    /// A family may have several.
    pub(crate) sets: Vec<RangeSet>,
    /// Addresses that Cilium may give to other pods, whatever the store says. None: the CiliumNode was not
    /// read live, so nothing may be reserved.
    pub(crate) barred: Option<BTreeSet<IpAddr>>,
    /// What the node's CiliumNode publishes.
    pub(crate) publish: PublishConfig,
}

impl AddressSource {
    /// The ranges of the node's configuration: the plugin picks, and every range set gives an address.
    pub(crate) fn of_ranges(mode: PluginMode, sets: &[RangeSet]) -> Self {
        let ranges = sets.iter().flat_map(|set| set.ranges()).map(Range::subnet).collect();
        let publish = PublishConfig { mode, ranges, known_blocks: Vec::new() };
        Self { sets: sets.to_vec(), barred: Some(BTreeSet::new()), publish }
    }

    /// For addresses that are attached already: nothing is picked any more.
    pub(crate) fn of_attached(mode: PluginMode, sets: &[RangeSet]) -> Self {
        if mode.cilium_picks_the_address() { Self::without_ranges(mode) } else { Self::of_ranges(mode, sets) }
    }

    /// The home blocks of the node's CiliumNode, without what Cilium may have given to others than `owner`.
    pub(crate) fn of_cilium_node(mode: PluginMode, node: &CiliumNode, owner: &str) -> Self {
        let (sets, barred) = (RangeSet::over(&home_blocks(node)), Some(node.barred_to(owner)));
        Self { sets, barred, ..Self::without_ranges(mode) }
    }

    fn without_ranges(mode: PluginMode) -> Self {
        let publish = PublishConfig { mode, ranges: Vec::new(), known_blocks: Vec::new() };
        Self { sets: Vec::new(), barred: Some(BTreeSet::new()), publish }
    }
}

/// This node, for one verb or action.
pub(crate) struct ThisNode<'a, D: Disk> {
    pub(crate) name: &'a str,
    pub(crate) store: &'a Store<D>,
    /// Whether a network namespace may exist; one that cannot be looked at may.
    pub(crate) netns_may_exist: &'a dyn Fn(&Path) -> bool,
    /// Called while the write that attaches these addresses is on its way.
    pub(crate) on_attaching: &'a dyn Fn(&NodeAddresses<'_, D>, &[IpAddr]),
}

impl<D: Disk> Clone for ThisNode<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Disk> Copy for ThisNode<'_, D> {}

/// The addresses of this node, for one claimant.
pub(crate) struct NodeAddresses<'a, D: Disk> {
    pub(crate) node: ThisNode<'a, D>,
    pub(crate) source: &'a AddressSource,
    pub(crate) key: StickyKey,
    pub(crate) pod: PodIdentity,
    pub(crate) attachment: Attachment,
    /// Reserved for this binding, and new in the store.
    pub(crate) reserved: Vec<IpAddr>,
}

impl<'a, D: Disk> NodeAddresses<'a, D> {
    pub(crate) fn new(
        node: ThisNode<'a, D>,
        source: &'a AddressSource,
        key: StickyKey,
        pod: &PodIdentity,
        attachment: &Attachment,
    ) -> Self {
        let (pod, attachment) = (pod.clone(), attachment.clone());
        Self { node, source, key, pod, attachment, reserved: Vec::new() }
    }

    pub(crate) fn claimant(&self) -> ClaimantKey {
        ClaimantKey::of_sticky(&self.key, &self.attachment.interface)
    }

    /// Whether a sandbox of another pod may run with the addresses of this record.
    fn is_in_use(&self, record: &Record) -> bool {
        let same_pod = record.pod.as_ref().and_then(PodIdentity::uid) == self.pod.uid();
        record.is_attached(self.node.store.now())
            && record.attachment != self.attachment
            && !same_pod
            && record.netns.as_ref().is_none_or(|netns| (self.node.netns_may_exist)(netns))
    }

    /// What the claimant has on this node.
    /// Errors: a sandbox of another pod may run with it.
    pub(crate) fn kept(&self, locked: &mut LockedStore<'_, D>) -> Result<Option<StoredRecord>, BindError> {
        let kept = locked.find_by_claimant(&self.claimant())?;
        let used = kept.as_ref().filter(|stored| self.is_in_use(&stored.record));
        let Some(used) = used else { return Ok(kept) };
        let address = used.record.addresses.first().copied().unwrap_or(IpAddr::from([0, 0, 0, 0]));
        Err(BindError::HeldOnNode { address, held_by: used.record.holder() })
    }

    /// Reserves an address beside the claimant's others, one per family; or writes again that it is wanted.
    fn reserve(&mut self, mut locked: LockedStore<'_, D>, address: IpAddr) -> Result<(), BindError> {
        let kept = self.kept(&mut locked)?;
        let (claimant, tried) = (self.claimant(), &self.reserved);
        let is_new = locked.reserve(address, &claimant, &self.pod, &self.attachment, kept.as_ref(), tried);
        if is_new? {
            self.reserved.push(address);
        }
        Ok(())
    }

    /// Releases what was reserved for a refused binding, if a live read finds no claim: a pod of another node
    /// may have attached the StickyIP that this binding made. Then this node, its home, must keep it.
    pub(crate) async fn unreserve_unclaimed(&self, api_writer: &ApiWriter<'_>) -> Result<(), StoreError> {
        if self.reserved.is_empty() {
            return Ok(());
        }
        match bind::is_any_claimed(api_writer, &self.reserved).await {
            Ok(true) => Ok(()),
            Ok(false) => self.node.store.unreserve(&self.claimant(), &self.attachment, &self.reserved),
            Err(error) => {
                let addresses = super::list(&self.reserved);
                tracing::warn!(
                    pod = %self.pod, addresses, %error,
                    "cannot read whether the addresses are claimed; they stay reserved until the agent \
                     releases them"
                );
                Ok(())
            }
        }
    }

    fn barred(&self) -> Result<&BTreeSet<IpAddr>, BindError> {
        let not_read = || BindError::LocalNode(format!("StickyIP {} changed since it was cached", self.key));
        self.source.barred.as_ref().ok_or_else(not_read)
    }

    fn own_block(&self, address: IpAddr) -> Option<Origin> {
        let range = self.source.sets.iter().find_map(|set| set.contains(address))?;
        let node = self.node.name.to_owned();
        range.usable(address).then(|| Origin::OwnBlock { node, block: range.subnet() })
    }
}

impl<D: Disk> LocalNode for NodeAddresses<'_, D> {
    fn node(&self) -> &str {
        self.node.name
    }

    fn families(&self) -> Result<Vec<Family>, BindError> {
        let mut families = Vec::new();
        for set in &self.source.sets {
            if !families.contains(&set.family()) {
                families.push(set.family());
            }
        }
        // A CiliumNode before its blocks were written. What a StickyIP has is not changed later, so a family
        // that is guessed, or left out, stays so.
        if families.is_empty() {
            Err(BindError::NoBlocks { node: self.node().to_owned() })
        } else {
            Ok(families)
        }
    }

    fn is_own(&self, address: IpAddr) -> bool {
        self.source.sets.iter().any(|set| set.contains(address).is_some())
    }

    fn old_sandbox(&mut self, id: &AttachmentId, pod: OldPod) -> Result<OldSandbox, BindError> {
        let Ok(container) = id.container() else { return Ok(OldSandbox::Gone) };
        let old = Attachment { container, interface: self.attachment.interface.clone() };
        let mut locked = self.node.store.lock()?;
        let by_container = locked.find_by_attachment(&old)?;
        // The API server may know the sandbox by another id than the runtime's: it took the place of an older
        // one, or was prepared. So any sandbox with the claimant's addresses counts, whatever its id.
        let by_claimant = locked.find_by_claimant(&self.claimant())?;
        if by_container.iter().chain(&by_claimant).any(|stored| self.is_in_use(&stored.record)) {
            return Ok(OldSandbox::MayLive);
        }
        // An unused decision for a pod that will not come must not be used from here on.
        let prepared = id.prepared_uid();
        if let Some(uid) = prepared.filter(|uid| pod != OldPod::Running && Some(*uid) != self.pod.uid()) {
            match locked.withdraw_decision(uid, &self.attachment.interface)? {
                // Its ADD has used it: by the record a sandbox has the address, and no DEL has come.
                Withdrawn::InUse => return Ok(OldSandbox::MayLive),
                Withdrawn::Unused(_) => return Ok(OldSandbox::Gone),
                Withdrawn::Nothing => {}
            }
        }
        // Without a record its DEL came, or its ADD never finished. A store that was lost would look the
        // same, so a pod that the API server knows as running counts as running.
        let has_this_id = |stored: &StoredRecord| stored.record.attachment_id() == Some(id);
        let is_known = by_container.is_some() || by_claimant.as_ref().is_some_and(has_this_id);
        Ok(if !is_known && pod == OldPod::Running { OldSandbox::MayLive } else { OldSandbox::Gone })
    }

    fn attaching(&mut self, addresses: &[IpAddr]) {
        (self.node.on_attaching)(self, addresses);
    }

    fn reserve_any(
        &mut self,
        family: Family,
        avoid: &BTreeSet<IpAddr>,
    ) -> Result<Option<Candidate>, BindError> {
        let barred = self.barred()?;
        let mut locked = self.node.store.lock()?;
        let kept = self.kept(&mut locked)?;
        let kept = kept.iter().flat_map(|stored| stored.record.addresses.iter().copied());
        // Cilium may have given a barred address to another pod since it was kept.
        let is_skipped = |address: &IpAddr| avoid.contains(address) || barred.contains(address);
        let mut own = kept.filter(|address| Family::of(*address) == family && !is_skipped(address));
        if let Some((address, origin)) = own.find_map(|address| Some((address, self.own_block(address)?))) {
            self.reserve(locked, address)?;
            return Ok(Some(Candidate { address, origin }));
        }
        // Every set of the family in turn: the first may be full.
        for (index, set) in self.source.sets.iter().enumerate().filter(|(_, set)| set.family() == family) {
            for _ in 0..MAX_SKIPPED {
                let Some(address) = locked.next_free(index, set)? else { break };
                locked.set_cursor(index, address);
                if is_skipped(&address) {
                    continue;
                }
                let Some(origin) = self.own_block(address) else { continue };
                self.reserve(locked, address)?;
                return Ok(Some(Candidate { address, origin }));
            }
        }
        Ok(None)
    }

    fn reserve_this(&mut self, address: IpAddr) -> Result<Origin, BindError> {
        let is_barred = self.barred()?.contains(&address);
        let Some(origin) = self.own_block(address) else { return Ok(Origin::Nowhere) };
        let mut locked = self.node.store.lock()?;
        match locked.find_by_address(address)? {
            // First, because it is known by name: the pool shows addresses of others too.
            Some(there) if !there.record.is_for(&self.claimant()) => {
                Err(BindError::HeldOnNode { address, held_by: there.record.holder() })
            }
            // Own, and not available: from nowhere it would be taken unreserved, by an older attempt's claim.
            _ if is_barred => {
                let held_by = "Cilium, which gives it to any pod".to_owned();
                Err(BindError::HeldOnNode { address, held_by })
            }
            // Nothing releases an address while a sandbox runs with it.
            Some(there) if there.record.is_attached(self.node.store.now()) => Ok(origin),
            _ => self.reserve(locked, address).map(|()| origin),
        }
    }
}

/// A path that cannot be looked at may belong to a pod that runs.
pub(crate) fn may_exist(path: &Path) -> bool {
    path.try_exists().unwrap_or(true)
}

impl From<StoreError> for BindError {
    fn from(error: StoreError) -> Self {
        Self::LocalNode(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::range::RangeSpec;
    use crate::names::{ContainerId, IfName, NetworkName};
    use crate::store::{Decision, NodeTime, PreparedSticky, RealDisk, RecordState, StickyBinding};

    #[test]
    fn a_namespace_that_cannot_be_looked_at_counts_as_there() {
        let dir = tempfile::tempdir().unwrap();
        assert!(may_exist(dir.path()));
        assert!(!may_exist(&dir.path().join("gone")));
        // Root is refused by no permission, but a link that leads to itself cannot be followed by any user.
        let circle = dir.path().join("circle");
        std::os::unix::fs::symlink(&circle, &circle).unwrap();
        assert!(may_exist(&circle));
    }

    const BOOT: &str = "boot";

    fn store(dir: &Path) -> Store {
        let (network, now) = (NetworkName::new("net").unwrap(), NodeTime::new(1, 1, BOOT));
        Store::new(RealDisk, dir, &network, now, std::time::Duration::ZERO)
    }

    fn sandbox(container: &str) -> Attachment {
        let interface = IfName::new("eth0").unwrap();
        Attachment { container: ContainerId::new(container).unwrap(), interface }
    }

    fn set(subnet: &str, first: &str, last: &str) -> RangeSet {
        let (range_start, range_end) = (Some(first), Some(last));
        let spec = RangeSpec { subnet, range_start, range_end, ..RangeSpec::default() };
        RangeSet::new(vec![Range::from_spec(&spec).unwrap()]).unwrap()
    }

    fn key() -> StickyKey {
        StickyKey { namespace: "db".into(), name: "db-0".into() }
    }

    fn this_node<'a>(store: &'a Store, netns_may_exist: &'a dyn Fn(&Path) -> bool) -> ThisNode<'a, RealDisk> {
        ThisNode { name: "n1", store, netns_may_exist, on_attaching: &|_, _| {} }
    }

    #[test]
    fn an_address_is_reserved_from_the_next_range_set_if_the_first_is_full() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let sets =
            [set("10.1.0.0/24", "10.1.0.10", "10.1.0.10"), set("10.2.0.0/24", "10.2.0.10", "10.2.0.11")];
        let other =
            ClaimantKey::of_sticky(&StickyKey { name: "other".into(), ..key() }, &sandbox("c0").interface);
        let taken =
            Record::reserved(vec!["10.1.0.10".parse().unwrap()], &other, None, &sandbox("c0"), store.now());
        let mut locked = store.lock().unwrap();
        locked.put(&taken, None).unwrap();
        locked.commit().unwrap();
        let source = AddressSource::of_ranges(PluginMode::Delegated, &sets);
        let pod = PodIdentity::new("db", "db-0", Some("u1")).unwrap();
        let mut node =
            NodeAddresses::new(this_node(&store, &may_exist), &source, key(), &pod, &sandbox("c1"));
        let reserved = node.reserve_any(Family::V4, &BTreeSet::new()).unwrap();
        let reserved = reserved.expect("the second set has free addresses").address;
        assert!(sets[1].contains(reserved).is_some(), "{reserved}");
        assert_eq!(node.reserved, [reserved]);
    }

    #[test]
    fn an_old_sandbox_may_live_while_a_record_uses_its_decision() {
        let dir = tempfile::tempdir().unwrap();
        let store = store(dir.path());
        let old = PodIdentity::new("db", "db-0", Some("u0")).unwrap();
        let id = AttachmentId::Prepared("u0".into());
        let addresses: Vec<IpAddr> = vec!["10.1.0.10".parse().unwrap()];
        let prepared = PreparedSticky {
            namespace: "db".into(),
            name: "db-0".into(),
            addresses: addresses.clone(),
            resource: "db/StatefulSet/db".into(),
            attachment_id: id.clone(),
        };
        let decision = Decision::about(&old, Some(prepared), "test", store.now().clone()).unwrap();
        let claimant = ClaimantKey::of_sticky(&key(), &sandbox("c0").interface);
        let record = Record {
            state: RecordState::Attached,
            netns: Some("/gone".into()),
            binding: Some(StickyBinding { key: key(), attachment_id: Some(id.clone()) }),
            ..Record::reserved(addresses, &claimant, Some(old), &sandbox("c0"), store.now())
        };
        let mut locked = store.lock().unwrap();
        locked.put(&record, None).unwrap();
        // An ADD that ended between its record and its decision has left both.
        locked.put_decision(&decision).unwrap();
        locked.commit().unwrap();
        let source = AddressSource::of_attached(PluginMode::Crd, &[]);
        let new = PodIdentity::new("db", "db-0", Some("u1")).unwrap();
        let is_gone = |_: &Path| false;
        let mut node = NodeAddresses::new(this_node(&store, &is_gone), &source, key(), &new, &sandbox("c1"));
        assert_eq!(node.old_sandbox(&id, OldPod::Gone).unwrap(), OldSandbox::MayLive);
        assert!(!store.has_decision("u0"), "it must not be used any more");
    }
}
