//! Reserving an address for a StickyIP before it is claimed, and letting go of it again. Must never let go of what a sandbox has.

use std::net::IpAddr;

use super::{Claimant, Disk, Locked, Phase, Record, Store, StoreError, Stored};
use crate::alloc::Family;
use crate::cni::{Attachment, PodIdentity};

impl<D: Disk> Locked<'_, D> {
    /// Puts an address beside those that are reserved for the claimant already, one a family; `kept` is what it has, found under
    /// this lock. False if it has the address. Else it is on stable storage when this returns.
    ///
    /// # Errors
    /// As [`Locked::put`].
    pub fn reserve(
        mut self,
        address: IpAddr,
        claimant: &Claimant,
        pod: &PodIdentity,
        attachment: &Attachment,
        kept: Option<&Stored>,
    ) -> Result<bool, StoreError> {
        let mut addresses = kept.map(|kept| kept.record.addresses.clone()).unwrap_or_default();
        if addresses.contains(&address) {
            return Ok(false);
        }
        addresses.retain(|other| Family::of(*other) != Family::of(address));
        addresses.push(address);
        let record = Record::reserved(addresses, claimant, Some(pod.clone()), attachment, &self.store.now);
        self.put(&record, kept)?;
        self.commit()?;
        Ok(true)
    }
}

impl<D: Disk> Store<D> {
    /// Lets go of what was reserved for the claimant in the name of this attachment.
    ///
    /// # Errors
    /// The disk fails.
    pub fn unreserve(&self, claimant: &Claimant, attachment: &Attachment) -> Result<(), StoreError> {
        let mut locked = self.lock()?;
        match locked.of_claimant(claimant)? {
            Some(stored) if stored.record.phase == Phase::Kept && stored.record.attachment == *attachment => {
                locked.free(&stored)?;
                locked.commit()
            }
            _ => Ok(()),
        }
    }
}
