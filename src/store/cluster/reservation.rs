//! Reserving an address for a StickyIP before it is claimed, letting go of it again, and leaving it behind when the StickyIP has
//! another: as long as it is claimed, nobody on this node may have it. Must never let go of what a sandbox has.

use std::net::IpAddr;

use crate::alloc::Family;
use crate::names::{Attachment, PodIdentity};
use crate::store::{
    Claimant, Disk, LockedStore, NodeTime, Phase, Record, StickyBinding, Store, StoreError, StoredRecord,
};

/// What stands in the place of the container that the API server knows, where an address was left behind. No runtime gives such
/// a short id.
const LEFT: &str = "left";

impl Record {
    /// The mark of an address that was this claimant's, last with this sandbox, and may still be claimed for it.
    pub fn left(address: IpAddr, claimant: &Claimant, last: &Attachment, now: &NodeTime) -> Self {
        let reserved = Self::reserved(vec![address], claimant, None, last, now);
        let binding = reserved.binding.map(|binding| StickyBinding { container: LEFT.to_owned(), ..binding });
        Self { binding, ..reserved }
    }

    /// Whether this is such a mark. The claimant does not have what it left, so it is not found by its name.
    pub fn is_left(&self) -> bool {
        self.phase == Phase::Kept && self.binding.as_ref().is_some_and(|binding| binding.container == LEFT)
    }

    /// Whether this claimant left the address here, and may have it again.
    pub fn is_left_by(&self, claimant: &Claimant) -> bool {
        let by = |binding: &StickyBinding| {
            Claimant::bound(&binding.namespace, &binding.name, claimant.interface()) == *claimant
        };
        self.is_left() && self.binding.as_ref().is_some_and(by)
    }

    /// Whether nobody but this claimant may have the address: it is its own, or it left it here.
    pub fn is_for(&self, claimant: &Claimant) -> bool {
        self.claimant().as_ref() == Some(claimant) || self.is_left_by(claimant)
    }
}

impl<D: Disk> LockedStore<'_, D> {
    /// Puts an address beside those that are reserved for the claimant already, one a family; `kept` is what it has, found under
    /// this lock, and `tried` what this walk itself has reserved. What it has already, or has left here, is written anew: whoever is
    /// about to free it finds another record. On stable storage when this returns; whether nothing stood there before.
    ///
    /// # Errors
    /// As [`LockedStore::put`].
    pub fn reserve(
        mut self,
        address: IpAddr,
        claimant: &Claimant,
        pod: &PodIdentity,
        attachment: &Attachment,
        kept: Option<&StoredRecord>,
        tried: &[IpAddr],
    ) -> Result<bool, StoreError> {
        if let Some(kept) = kept.filter(|kept| kept.record.addresses.contains(&address)) {
            self.renew(kept, attachment)?;
            self.commit()?;
            return Ok(false);
        }
        let left = self.at(address)?.filter(|there| there.record.is_left_by(claimant));
        let mut addresses = kept.map(|kept| kept.record.addresses.clone()).unwrap_or_default();
        addresses.retain(|other| Family::of(*other) != Family::of(address));
        addresses.push(address);
        self.mark_superseded(kept, &addresses, tried)?;
        let record = Record::reserved(addresses, claimant, Some(pod.clone()), attachment, &self.store.now);
        self.put_reclaiming(&record, kept, left.as_slice())?;
        self.commit()?;
        Ok(left.is_none())
    }

    /// Writes down that what is kept is wanted now, and in whose name: whoever reserved it before, and gives up, does not let go of it
    /// any more ([`Store::unreserve`]). A record that a sandbox lives with is freed by nobody.
    ///
    /// # Errors
    /// As [`LockedStore::put`].
    pub fn renew(&mut self, kept: &StoredRecord, attachment: &Attachment) -> Result<(), StoreError> {
        let now = self.store.now.clone();
        if kept.record.is_attached(&now) {
            return Ok(());
        }
        // The pod stays: the record speaks for the one that had the address last, and for no other.
        let (attachment, known) = (attachment.clone(), kept.record.clone());
        let record = Record { attachment, phase: Phase::Kept, netns: None, since: now, ..known };
        self.put(&record, Some(kept))
    }

    /// Has a record keep these of its addresses alone, and puts the marks in place of some of the others. The rest is free. Whoever ends
    /// in between leaves it with those that are not marked yet.
    ///
    /// # Errors
    /// As [`LockedStore::put`].
    pub fn keep_only(
        &mut self,
        stored: &StoredRecord,
        addresses: Vec<IpAddr>,
        marks: &[Record],
    ) -> Result<(), StoreError> {
        for mark in marks {
            self.put_over_shared_names(mark, stored)?;
        }
        if addresses.is_empty() {
            return self.free(stored);
        }
        self.put(&Record { addresses, ..stored.record.clone() }, Some(stored))
    }

    /// Marks those of a claimant's addresses that its next record will not have: they may still be claimed for it, and who picks by
    /// this store alone must not give them to others. The agent frees them once nobody claims them. `kept` is to be replaced
    /// afterwards; whoever ends before that leaves it with its other addresses. What was only `tried` is not marked: whoever reserved
    /// it has undone what it claimed.
    ///
    /// # Errors
    /// As [`LockedStore::put`].
    pub fn mark_superseded(
        &mut self,
        kept: Option<&StoredRecord>,
        next: &[IpAddr],
        tried: &[IpAddr],
    ) -> Result<(), StoreError> {
        let Some(stored) = kept else { return Ok(()) };
        let Some(claimant) = stored.record.claimant() else { return Ok(()) };
        let is_left = |address: &&IpAddr| !next.contains(address) && !tried.contains(address);
        for address in stored.record.addresses.iter().filter(is_left) {
            let left = Record::left(*address, &claimant, &stored.record.attachment, &self.store.now);
            self.put_over_shared_names(&left, stored)?;
        }
        Ok(())
    }
}

impl<D: Disk> Store<D> {
    /// Lets go of those of these addresses that are reserved for the claimant in the name of this attachment.
    ///
    /// # Errors
    /// The disk fails.
    pub fn unreserve(
        &self,
        claimant: &Claimant,
        attachment: &Attachment,
        addresses: &[IpAddr],
    ) -> Result<(), StoreError> {
        let mut locked = self.lock()?;
        let its_own =
            |kept: &StoredRecord| kept.record.phase == Phase::Kept && kept.record.attachment == *attachment;
        let Some(stored) = locked.find_by_claimant(claimant)?.filter(its_own) else { return Ok(()) };
        let mut others = stored.record.addresses.clone();
        others.retain(|address| !addresses.contains(address));
        if others != stored.record.addresses {
            locked.keep_only(&stored, others, &[])?;
        }
        locked.commit()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{ContainerId, IfName, NetworkName};
    use crate::store::RealDisk;

    fn sandbox(container: &str) -> Attachment {
        let interface = IfName::new("eth0").unwrap();
        Attachment { container: ContainerId::new(container).unwrap(), interface }
    }

    #[test]
    fn what_a_claimant_leaves_stays_reserved_and_what_was_only_tried_does_not() {
        let dir = tempfile::tempdir().unwrap();
        let (network, now) = (NetworkName::new("net").unwrap(), NodeTime::new(1, 1, "a"));
        let store = Store::new(RealDisk, dir.path(), &network, now, std::time::Duration::ZERO);
        let pod = PodIdentity::new("db", "db-0", Some("u")).unwrap();
        let claimant = Claimant::bound("db", "db-0", &sandbox("c1").interface);
        let [a, b, c, six] = ["10.0.0.1", "10.0.0.2", "10.0.0.3", "fd00::1"].map(|ip| ip.parse().unwrap());
        let reserve = |address: IpAddr, container: &str, tried: &[IpAddr]| {
            let mut locked = store.lock().unwrap();
            let kept = locked.find_by_claimant(&claimant).unwrap();
            locked.reserve(address, &claimant, &pod, &sandbox(container), kept.as_ref(), tried).unwrap()
        };
        let at = |address: IpAddr| store.lock().unwrap().at(address).unwrap().map(|there| there.record);
        assert!(reserve(a, "c1", &[]) && reserve(six, "c1", &[a]) && reserve(b, "c1", &[a, six]));
        assert_eq!(at(a), None, "the same walk tried it and has undone what it claimed");
        assert!(reserve(c, "c1", &[]), "another walk, though of the same sandbox");
        assert!(at(b).unwrap().is_left_by(&claimant));
        let other = Claimant::bound("db", "db-1", &sandbox("c1").interface);
        assert!(!at(b).unwrap().is_left_by(&other) && at(b).unwrap().claimant().is_none());
        let kept = store.lock().unwrap().find_by_claimant(&claimant).unwrap().unwrap().record;
        assert_eq!(kept.addresses, [six, c]);
        assert!(!kept.is_left());
        // A process that ends between the mark and the next record loses nothing.
        let mut locked = store.lock().unwrap();
        let kept = locked.find_by_claimant(&claimant).unwrap();
        locked.mark_superseded(kept.as_ref(), &[six, a], &[]).unwrap();
        locked.commit().unwrap();
        assert!(at(c).unwrap().is_left_by(&claimant));
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
        let claimant = Claimant::bound("db", "db-0", &sandbox("c1").interface);
        let address: IpAddr = "10.0.0.1".parse().unwrap();
        let at = || store.lock().unwrap().at(address).unwrap();
        for promised_to in ["c2", "granted"] {
            store.lock().unwrap().reserve(address, &claimant, &pod, &sandbox("c1"), None, &[]).unwrap();
            let mut locked = store.lock().unwrap();
            let kept = locked.find_by_claimant(&claimant).unwrap().unwrap();
            match promised_to {
                "granted" => {
                    locked.renew(&kept, &sandbox("granted")).unwrap();
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
        let claimant = Claimant::bound("db", "db-0", &sandbox("c1").interface);
        let [kept, free, anybodys] = ["10.0.0.1", "fd00::1", "10.0.0.2"].map(|ip| ip.parse().unwrap());
        let all = vec![kept, free, anybodys];
        let record = Record::reserved(all.clone(), &claimant, None, &sandbox("c1"), store.now());
        let mark = Record::offered(anybodys, store.now()).unwrap();
        for rest in [vec![kept], Vec::new()] {
            let mut locked = store.lock().unwrap();
            locked.put(&record, None).unwrap();
            let stored = locked.find_by_claimant(&claimant).unwrap().unwrap();
            locked.keep_only(&stored, rest.clone(), std::slice::from_ref(&mark)).unwrap();
            let own = locked.find_by_claimant(&claimant).unwrap();
            assert_eq!(own.map(|own| own.record.addresses).unwrap_or_default(), rest);
            assert_eq!(locked.at(free).unwrap(), None);
            for address in [anybodys, kept] {
                let there = locked.at(address).unwrap();
                assert_eq!(there.as_ref().is_some_and(|it| it.record.is_unowned()), address == anybodys);
                there.iter().for_each(|there| locked.free(there).unwrap());
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
        let claimant = Claimant::bound("db", "db-0", &sandbox("c1").interface);
        let address: IpAddr = "10.0.0.1".parse().unwrap();
        let reserve = |store: &Store, container: &str| {
            let mut locked = store.lock().unwrap();
            let kept = locked.find_by_claimant(&claimant).unwrap();
            locked.reserve(address, &claimant, &pod, &sandbox(container), kept.as_ref(), &[]).unwrap();
            store.lock().unwrap().at(address).unwrap().unwrap()
        };
        let seen = reserve(&at(1, "a"), "c1");
        let again = reserve(&at(20, "a"), "c2");
        assert!(again.record != seen.record && again.inode != seen.inode);
        // One that a sandbox lives with is nobody's to free, and stays as it is; after a reboot nobody lives with it.
        let store = at(40, "a");
        let lives = Record { phase: Phase::Attached, ..again.record.clone() };
        let lives = Record { since: store.now().clone(), netns: Some("/run/netns/1".into()), ..lives };
        let mut locked = store.lock().unwrap();
        locked.put(&lives, Some(&again)).unwrap();
        locked.commit().unwrap();
        assert_eq!(reserve(&at(60, "a"), "c3").record, lives);
        let rebooted = reserve(&at(80, "b"), "c4").record;
        assert_eq!((rebooted.phase, rebooted.netns), (Phase::Kept, None));
        // One that was left becomes the claimant's own again.
        let store = at(100, "b");
        let mut locked = store.lock().unwrap();
        let kept = locked.find_by_claimant(&claimant).unwrap().unwrap();
        let left = Record::left(address, &claimant, &sandbox("c4"), store.now());
        locked.put(&left, Some(&kept)).unwrap();
        locked.commit().unwrap();
        assert_eq!(reserve(&at(120, "b"), "c5").record.claimant(), Some(claimant.clone()));
        assert!(store.verify().unwrap().iter().all(|finding| !finding.wrong));
    }
}
