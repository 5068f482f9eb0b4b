//! The mark of an address that Cilium may give to anybody: it stands unowned in the pool of the node's CiliumNode. As
//! long as the mark stands, nobody on this node can reserve the address for a claimant.

use std::net::IpAddr;

use super::{Disk, Keep, Locked, Moment, Phase, Record, StoreError, Stored};
use crate::cni::{Attachment, ContainerId, IfName};

/// What stands in the place of a container. No runtime gives such a short id.
const OFFERED: &str = "offered";

impl Record {
    /// The mark of an address that is about to be offered.
    ///
    /// # Errors
    /// Never, as long as the marks are sound names; a sentence then.
    pub fn offered(address: IpAddr, now: &Moment) -> Result<Self, String> {
        let attachment =
            Attachment { container: ContainerId::new(OFFERED)?, interface: IfName::new("cilium")? };
        Ok(Self {
            addresses: vec![address],
            attachment,
            phase: Phase::Kept,
            netns: None,
            pod: None,
            keep: Keep::Forever,
            binding: None,
            since: now.clone(),
        })
    }

    /// Whether this is such a mark.
    pub fn is_offered(&self) -> bool {
        self.phase == Phase::Kept
            && self.pod.is_none()
            && self.binding.is_none()
            && self.attachment.container.as_str() == OFFERED
    }
}

impl<D: Disk> Locked<'_, D> {
    /// Puts these marks in place of those addresses of a record. Its others it keeps, or they are free, too. Whoever ends in between
    /// leaves it with those that are not marked yet.
    ///
    /// # Errors
    /// As [`Locked::put`].
    pub fn offer_instead_of(
        &mut self,
        stored: &Stored,
        marks: &[Record],
        keeps_others: bool,
    ) -> Result<(), StoreError> {
        for mark in marks {
            self.put_over_its_own_names(mark, stored)?;
        }
        let is_marked = |address: &IpAddr| marks.iter().any(|mark| mark.addresses.contains(address));
        let mut others = stored.record.addresses.clone();
        others.retain(|address| keeps_others && !is_marked(address));
        if others.is_empty() {
            return self.free(stored);
        }
        self.put(&Record { addresses: others, ..stored.record.clone() }, Some(stored))
    }
}

#[cfg(test)]
mod tests {
    use super::super::{RealDisk, Store};
    use super::*;
    use crate::cni::NetworkName;

    #[test]
    fn a_mark_outlasts_a_reboot_and_keeps_the_address_from_everybody() {
        let dir = tempfile::tempdir().unwrap();
        let store = |boot: &str| {
            let network = NetworkName::new("net").unwrap();
            Store::new(RealDisk, dir.path(), &network, Moment::new(1, 1, boot), std::time::Duration::ZERO)
        };
        let set = crate::alloc::RangeSet::new(vec![
            crate::alloc::Range::from_spec(&crate::alloc::range::RangeSpec {
                subnet: "10.0.0.0/30",
                ..Default::default()
            })
            .unwrap(),
        ])
        .unwrap();
        let first = store("a");
        let mut locked = first.lock().unwrap();
        let address = locked.next_free(0, &set).unwrap().unwrap();
        locked.put(&Record::offered(address, first.now()).unwrap(), None).unwrap();
        locked.commit().unwrap();
        let later = store("b");
        let mut locked = later.lock().unwrap();
        assert_eq!(locked.next_free(0, &set).unwrap(), None, "the only address is offered");
        assert!(locked.at(address).unwrap().unwrap().record.is_offered());
        drop(locked);
        assert!(later.verify().unwrap().iter().all(|finding| !finding.wrong));
    }

    #[test]
    fn marks_take_the_place_of_some_of_a_records_addresses_or_of_the_whole_record() {
        let dir = tempfile::tempdir().unwrap();
        let (network, now) = (NetworkName::new("net").unwrap(), Moment::new(1, 1, "a"));
        let store = Store::new(RealDisk, dir.path(), &network, now, std::time::Duration::ZERO);
        let addresses: Vec<IpAddr> =
            ["10.0.0.1", "10.0.0.2", "fd00::1"].iter().map(|ip| ip.parse().unwrap()).collect();
        let attachment = Attachment {
            container: ContainerId::new("c1").unwrap(),
            interface: IfName::new("eth0").unwrap(),
        };
        let claimant = super::super::Claimant::bound("db", "db-0", &attachment.interface);
        let record = Record::reserved(addresses.clone(), &claimant, None, &attachment, store.now());
        store.lock().unwrap().put(&record, None).unwrap();
        let of_claimant = || store.lock().unwrap().of_claimant(&claimant).unwrap();
        let marks = |which: &[IpAddr]| -> Vec<Record> {
            which.iter().map(|address| Record::offered(*address, store.now()).unwrap()).collect()
        };
        let kept = of_claimant().unwrap();
        store.lock().unwrap().offer_instead_of(&kept, &marks(&addresses[..1]), true).unwrap();
        let kept = of_claimant().unwrap();
        assert_eq!(kept.record.addresses, addresses[1..]);
        let at = |address: IpAddr| store.lock().unwrap().at(address).unwrap().map(|there| there.record);
        assert_eq!(at(addresses[1]), Some(kept.record.clone()), "the record itself says so");
        store.lock().unwrap().offer_instead_of(&kept, &marks(&addresses[1..2]), false).unwrap();
        assert_eq!((of_claimant(), at(addresses[2])), (None, None));
        assert!(addresses[..2].iter().all(|address| at(*address).unwrap().is_offered()));
        assert!(store.verify().unwrap().iter().all(|finding| !finding.wrong));
    }
}
