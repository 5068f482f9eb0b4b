//! Reserving an address for a StickyIP before it is claimed, releasing it again, and keeping it from others
//! when the StickyIP has another: as long as it is claimed, no other claimant on this node may have it. Must
//! never release what a sandbox has.

use std::net::IpAddr;

use crate::alloc::Family;
use crate::names::{Attachment, PodIdentity};
use crate::store::{
    ClaimantKey, Disk, LockedStore, NodeTime, Record, RecordState, Result, StickyBinding, Store, StoredRecord,
};

impl Record {
    /// The record of an address that was this claimant's, with this sandbox, and may still be claimed for it.
    pub fn superseded(address: IpAddr, claimant: &ClaimantKey, last: &Attachment, now: &NodeTime) -> Self {
        let state = RecordState::Superseded;
        Self { state, ..Self::reserved(vec![address], claimant, None, last, now) }
    }

    /// Whether this claimant had the address here before the one that it has now, and may have it again.
    pub(crate) fn is_superseded_of(&self, claimant: &ClaimantKey) -> bool {
        let former = |by: &StickyBinding| ClaimantKey::of_sticky(&by.key, claimant.interface());
        self.state == RecordState::Superseded && self.binding.as_ref().map(former).as_ref() == Some(claimant)
    }

    /// Whether only this claimant may have the address: it has it, or had it here before.
    pub fn is_for(&self, claimant: &ClaimantKey) -> bool {
        self.claimant().as_ref() == Some(claimant) || self.is_superseded_of(claimant)
    }
}

impl<D: Disk> LockedStore<'_, D> {
    /// Reserves an address beside those that are reserved for the claimant already, one per family; `kept` is
    /// what it has, found under this lock, and `tried` what this binding itself has reserved. What it has
    /// already, or had before, is written again: a process that is about to release it finds another record.
    /// On stable storage when this returns. True if the address had no record before.
    pub fn reserve(
        mut self,
        address: IpAddr,
        claimant: &ClaimantKey,
        pod: &PodIdentity,
        attachment: &Attachment,
        kept: Option<&StoredRecord>,
        tried: &[IpAddr],
    ) -> Result<bool> {
        if let Some(kept) = kept.filter(|kept| kept.record.addresses.contains(&address)) {
            self.renew(kept, attachment)?;
            self.commit()?;
            return Ok(false);
        }
        let left = self.find_by_address(address)?.filter(|there| there.record.is_superseded_of(claimant));
        let mut addresses = kept.map(|kept| kept.record.addresses.clone()).unwrap_or_default();
        addresses.retain(|other| Family::of(*other) != Family::of(address));
        addresses.push(address);
        self.mark_superseded(kept, &addresses, tried)?;
        let record = Record::reserved(addresses, claimant, Some(pod.clone()), attachment, &self.store.now);
        self.put_reclaiming(&record, kept, left.as_slice())?;
        self.commit()?;
        Ok(left.is_none())
    }

    /// Writes that what is kept is wanted now, and by which sandbox: one that reserved it before, and gives
    /// up, does not release it any more ([`Store::unreserve`]). A record that a sandbox runs with is not
    /// changed.
    pub(crate) fn renew(&mut self, kept: &StoredRecord, attachment: &Attachment) -> Result<()> {
        let now = self.store.now.clone();
        if kept.record.is_attached(&now) {
            return Ok(());
        }
        // The pod stays: the record is evidence for the one that had the address last, and for no other.
        let (attachment, known) = (attachment.clone(), kept.record.clone());
        let state = if known.state == RecordState::Attached { RecordState::Kept } else { known.state };
        let record = Record { attachment, state, netns: None, since: now, ..known };
        self.put(&record, Some(kept))
    }

    /// Has a record keep only these of its addresses, and puts other records in place of some of the others.
    /// The rest is released. A process that ends in between leaves the record those not yet replaced.
    pub(crate) fn keep_addresses(
        &mut self,
        stored: &StoredRecord,
        addresses: Vec<IpAddr>,
        others: &[Record],
    ) -> Result<()> {
        for other in others {
            self.put_over_shared_names(other, stored)?;
        }
        if addresses.is_empty() {
            return self.release(stored);
        }
        self.put(&Record { addresses, ..stored.record.clone() }, Some(stored))
    }

    /// Keeps from others those of a claimant's addresses that its next record will not have: they may still
    /// be claimed for it. The agent releases them when no claim is left. `kept` is to be replaced afterwards;
    /// a process that ends before that leaves it with its other addresses. What was only `tried` is not kept:
    /// the binding has undone what it claimed.
    pub(crate) fn mark_superseded(
        &mut self,
        kept: Option<&StoredRecord>,
        next: &[IpAddr],
        tried: &[IpAddr],
    ) -> Result<()> {
        let Some(stored) = kept else { return Ok(()) };
        let Some(claimant) = stored.record.claimant() else { return Ok(()) };
        let is_left = |address: &&IpAddr| !next.contains(address) && !tried.contains(address);
        for address in stored.record.addresses.iter().filter(is_left) {
            let left = Record::superseded(*address, &claimant, &stored.record.attachment, &self.store.now);
            self.put_over_shared_names(&left, stored)?;
        }
        Ok(())
    }
}

impl<D: Disk> Store<D> {
    /// Releases those of these addresses that this attachment has reserved for the claimant.
    pub fn unreserve(&self, claimant: &ClaimantKey, by: &Attachment, addresses: &[IpAddr]) -> Result<()> {
        let mut locked = self.lock()?;
        let its_own =
            |kept: &StoredRecord| kept.record.state == RecordState::Kept && kept.record.attachment == *by;
        let Some(stored) = locked.find_by_claimant(claimant)?.filter(its_own) else { return Ok(()) };
        let mut others = stored.record.addresses.clone();
        others.retain(|address| !addresses.contains(address));
        if others != stored.record.addresses {
            locked.keep_addresses(&stored, others, &[])?;
        }
        locked.commit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{ContainerId, IfName, NetworkName, StickyKey};
    use crate::store::RealDisk;

    fn sandbox(container: &str) -> Attachment {
        let interface = IfName::new("eth0").unwrap();
        Attachment { container: ContainerId::new(container).unwrap(), interface }
    }

    fn sticky(name: &str) -> StickyKey {
        StickyKey { namespace: "db".into(), name: name.into() }
    }

    #[test]
    fn what_a_claimant_leaves_stays_reserved_and_what_was_only_tried_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let (network, now) = (NetworkName::new("net").unwrap(), NodeTime::new(1, 1, "a"));
        let store = Store::new(RealDisk, dir.path(), &network, now, std::time::Duration::ZERO);
        let pod = PodIdentity::new("db", "db-0", Some("u")).unwrap();
        let claimant = ClaimantKey::of_sticky(&sticky("db-0"), &sandbox("c1").interface);
        let [a, b, c, six] = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1"].map(|ip| ip.parse().unwrap());
        let reserve = |address: IpAddr, container: &str, tried: &[IpAddr]| {
            let mut locked = store.lock().unwrap();
            let kept = locked.find_by_claimant(&claimant).unwrap();
            locked.reserve(address, &claimant, &pod, &sandbox(container), kept.as_ref(), tried).unwrap()
        };
        let at = |address: IpAddr| {
            store.lock().unwrap().find_by_address(address).unwrap().map(|there| there.record)
        };
        assert!(reserve(a, "c1", &[]) && reserve(six, "c1", &[a]) && reserve(b, "c1", &[a, six]));
        assert_eq!(at(a), None, "the same binding tried it and has undone what it claimed");
        assert!(reserve(c, "c1", &[]), "another binding, though of the same sandbox");
        assert!(at(b).unwrap().is_superseded_of(&claimant));
        let other = ClaimantKey::of_sticky(&sticky("db-1"), &sandbox("c1").interface);
        assert!(!at(b).unwrap().is_superseded_of(&other) && at(b).unwrap().claimant().is_none());
        let kept = store.lock().unwrap().find_by_claimant(&claimant).unwrap().unwrap().record;
        assert_eq!(kept.addresses, [six, c]);
        assert_eq!(kept.state, RecordState::Kept);
        // A process that ends between the mark and the next record loses nothing.
        let mut locked = store.lock().unwrap();
        let kept = locked.find_by_claimant(&claimant).unwrap();
        locked.mark_superseded(kept.as_ref(), &[six, a], &[]).unwrap();
        locked.commit().unwrap();
        assert!(at(c).unwrap().is_superseded_of(&claimant));
        assert_eq!(at(six).unwrap().claimant(), Some(claimant.clone()));
        assert_eq!(
            store.lock().unwrap().find_by_claimant(&claimant).unwrap().unwrap().record.addresses,
            [six]
        );
        assert!(reserve(a, "c3", &[]));
        assert_eq!(
            store.lock().unwrap().find_by_claimant(&claimant).unwrap().unwrap().record.addresses,
            [six, a]
        );
        assert!(!reserve(c, "c3", &[a]), "it may be claimed");
        assert_eq!((at(a), at(c).unwrap().claimant()), (None, Some(claimant.clone())));
        store.unreserve(&claimant, &sandbox("c3"), &[a, six]).unwrap();
        assert_eq!(store.lock().unwrap().find_by_claimant(&claimant).unwrap().unwrap().record.addresses, [c]);
        store.unreserve(&claimant, &sandbox("c4"), &[c]).unwrap();
        assert!(at(c).is_some(), "another's");
        assert!(store.verify().unwrap().iter().all(|finding| !finding.wrong));
    }

    #[test]
    fn an_address_promised_to_another_since_is_not_released_by_its_first_claimant() {
        let dir = tempfile::tempdir().unwrap();
        let (network, now) = (NetworkName::new("net").unwrap(), NodeTime::new(1, 1, "a"));
        let store = Store::new(RealDisk, dir.path(), &network, now, std::time::Duration::ZERO);
        let pod = PodIdentity::new("db", "db-0", Some("u")).unwrap();
        let claimant = ClaimantKey::of_sticky(&sticky("db-0"), &sandbox("c1").interface);
        let address: IpAddr = "10.0.0.1".parse().unwrap();
        let at = || store.lock().unwrap().find_by_address(address).unwrap();
        for promised_to in ["c2", "node"] {
            store.lock().unwrap().reserve(address, &claimant, &pod, &sandbox("c1"), None, &[]).unwrap();
            let mut locked = store.lock().unwrap();
            let kept = locked.find_by_claimant(&claimant).unwrap().unwrap();
            match promised_to {
                "node" => {
                    locked.renew(&kept, &Attachment::of_node(sandbox("c1").interface)).unwrap();
                    locked.commit().unwrap();
                }
                asker => {
                    let again = locked.reserve(address, &claimant, &pod, &sandbox(asker), Some(&kept), &[]);
                    assert!(!again.unwrap(), "it was reserved before");
                }
            }
            store.unreserve(&claimant, &sandbox("c1"), &[address]).unwrap();
            assert_eq!(at().unwrap().record.claimant(), Some(claimant.clone()), "{promised_to}");
            store.unreserve(&claimant, &sandbox(promised_to), &[address]).unwrap();
            assert_eq!(at(), None, "its own");
        }
    }

    #[test]
    fn a_record_keeps_some_of_its_addresses_while_others_are_free_or_unowned() {
        let dir = tempfile::tempdir().unwrap();
        let (network, now) = (NetworkName::new("net").unwrap(), NodeTime::new(1, 1, "a"));
        let store = Store::new(RealDisk, dir.path(), &network, now, std::time::Duration::ZERO);
        let claimant = ClaimantKey::of_sticky(&sticky("db-0"), &sandbox("c1").interface);
        let [kept, free, anybodys] = ["10.0.0.1", "fd00::1", "10.0.0.2"].map(|ip| ip.parse().unwrap());
        let all = vec![kept, free, anybodys];
        let record = Record::reserved(all.clone(), &claimant, None, &sandbox("c1"), store.now());
        let mark = Record::unowned(anybodys, store.now());
        for rest in [vec![kept], Vec::new()] {
            let mut locked = store.lock().unwrap();
            locked.put(&record, None).unwrap();
            let stored = locked.find_by_claimant(&claimant).unwrap().unwrap();
            locked.keep_addresses(&stored, rest.clone(), std::slice::from_ref(&mark)).unwrap();
            let own = locked.find_by_claimant(&claimant).unwrap();
            assert_eq!(own.map(|own| own.record.addresses).unwrap_or_default(), rest);
            assert_eq!(locked.find_by_address(free).unwrap(), None);
            for address in [anybodys, kept] {
                let there = locked.find_by_address(address).unwrap();
                assert_eq!(there.as_ref().is_some_and(|it| it.record.is_unowned()), address == anybodys);
                there.iter().for_each(|there| locked.release(there).unwrap());
            }
            drop(locked);
            assert!(store.verify().unwrap().iter().all(|finding| !finding.wrong));
        }
    }

    #[test]
    fn what_is_reserved_again_is_another_record_than_the_one_that_was_about_to_be_freed() {
        let dir = tempfile::tempdir().unwrap();
        let network = NetworkName::new("net").unwrap();
        let at = |second: u64, boot: &str| {
            let now = NodeTime::new(second, second, boot);
            Store::new(RealDisk, dir.path(), &network, now, std::time::Duration::ZERO)
        };
        let pod = PodIdentity::new("db", "db-0", Some("u")).unwrap();
        let claimant = ClaimantKey::of_sticky(&sticky("db-0"), &sandbox("c1").interface);
        let address: IpAddr = "10.0.0.1".parse().unwrap();
        let reserve = |store: &Store, container: &str| {
            let mut locked = store.lock().unwrap();
            let kept = locked.find_by_claimant(&claimant).unwrap();
            locked.reserve(address, &claimant, &pod, &sandbox(container), kept.as_ref(), &[]).unwrap();
            store.lock().unwrap().find_by_address(address).unwrap().unwrap()
        };
        let seen = reserve(&at(1, "a"), "c1");
        let again = reserve(&at(20, "a"), "c2");
        assert!(again.record != seen.record && again.inode != seen.inode);
        // One that a sandbox runs with is not released and stays as it is; after a reboot no sandbox runs
        // with it.
        let store = at(40, "a");
        let lives = Record { state: RecordState::Attached, ..again.record.clone() };
        let lives = Record { since: store.now().clone(), netns: Some("/run/netns/1".into()), ..lives };
        let mut locked = store.lock().unwrap();
        locked.put(&lives, Some(&again)).unwrap();
        locked.commit().unwrap();
        assert_eq!(reserve(&at(60, "a"), "c3").record, lives);
        let rebooted = reserve(&at(80, "b"), "c4").record;
        assert_eq!((rebooted.state, rebooted.netns), (RecordState::Kept, None));
        // One that was left becomes the claimant's own again.
        let store = at(100, "b");
        let mut locked = store.lock().unwrap();
        let kept = locked.find_by_claimant(&claimant).unwrap().unwrap();
        let left = Record::superseded(address, &claimant, &sandbox("c4"), store.now());
        locked.put(&left, Some(&kept)).unwrap();
        locked.commit().unwrap();
        assert_eq!(reserve(&at(120, "b"), "c5").record.claimant(), Some(claimant.clone()));
        assert!(store.verify().unwrap().iter().all(|finding| !finding.wrong));
    }
}
