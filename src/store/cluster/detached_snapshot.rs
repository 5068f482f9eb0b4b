//! A StickyIP as this node's detach left it, in `.sticky/detached`, one small file per claimant. The
//! claimant's next ADD here can attach with that state as its precondition, without reading it again; the API
//! server refuses a state that is over.
//!
//! So it may be old, torn or lost, and that costs time only. Must never be used as the StickyIP's state now.

use std::io;
use std::path::PathBuf;

use serde::Serialize;

use crate::store::error::cannot;
use crate::store::{ClaimantKey, DETACHED_SNAPSHOTS, Disk, LockedStore, Result, read_file};

impl<D: Disk> LockedStore<'_, D> {
    /// Saves the claimant's object. For this boot, and as long as the claimant has a record here.
    pub(crate) fn save_detached_snapshot(
        &mut self,
        claimant: &ClaimantKey,
        object: &impl Serialize,
    ) -> Result<()> {
        let path = self.snapshot_path(claimant);
        self.store.make_dir(&self.store.path(DETACHED_SNAPSHOTS))?;
        // In its place at once: a process that ends in between leaves what cannot be read.
        let bytes = serde_json::to_vec(object).map_err(io::Error::from);
        let made = bytes.and_then(|bytes| self.store.create_replacing(&path, &bytes));
        made.map(drop).map_err(cannot("write the snapshot", &path))
    }

    /// The saved object of the claimant; none if it cannot be read.
    pub(crate) fn detached_snapshot(&self, claimant: &ClaimantKey) -> Option<Vec<u8>> {
        let (bytes, _) = read_file("read the snapshot", &self.snapshot_path(claimant)).ok()??;
        Some(bytes)
    }

    pub(crate) fn remove_detached_snapshot(&mut self, claimant: &ClaimantKey) -> Result<()> {
        self.remove_if_there(&self.snapshot_path(claimant))
    }

    fn snapshot_path(&self, claimant: &ClaimantKey) -> PathBuf {
        self.store.path(DETACHED_SNAPSHOTS).join(claimant.entry())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{Attachment, ContainerId, IfName, NetworkName};
    use crate::store::{NodeTime, RealDisk, Record, Store};

    #[test]
    fn a_detached_snapshot_lasts_as_long_as_its_claimants_record_and_this_boot() {
        let dir = tempfile::tempdir().unwrap();
        let network = NetworkName::new("net").unwrap();
        let at = |boot: &str| {
            Store::new(RealDisk, dir.path(), &network, NodeTime::new(1, 1, boot), std::time::Duration::ZERO)
        };
        let interface = IfName::new("eth0").unwrap();
        let claimant = ClaimantKey::new("db", "db-0", &interface);
        let attachment = Attachment { container: ContainerId::new("c").unwrap(), interface };
        let store = at("a");
        let keep = |store: &Store| {
            let mut locked = store.lock().unwrap();
            let addresses = vec!["10.0.0.1".parse().unwrap()];
            let kept = locked.find_by_claimant(&claimant).unwrap();
            let record = Record::reserved(addresses, &claimant, None, &attachment, store.now());
            locked.put(&record, kept.as_ref()).unwrap();
            locked.save_detached_snapshot(&claimant, &"first").unwrap();
            locked.save_detached_snapshot(&claimant, &"second").unwrap();
            locked.commit().unwrap();
        };
        let seen = |store: &Store| store.lock().unwrap().detached_snapshot(&claimant);
        assert_eq!(seen(&store), None);
        keep(&store);
        assert_eq!(seen(&store), Some(b"\"second\"".to_vec()));
        assert!(store.verify().unwrap().iter().all(|finding| !finding.wrong));

        let mut locked = store.lock().unwrap();
        let kept = locked.find_by_claimant(&claimant).unwrap().unwrap();
        locked.release(&kept).unwrap();
        drop(locked);
        assert_eq!(seen(&store), None, "its claimant has nothing here any more");

        keep(&store);
        assert_eq!(seen(&at("b")), None, "of an earlier boot");

        let store = at("b");
        keep(&store);
        store.lock().unwrap().remove_detached_snapshot(&claimant).unwrap();
        assert_eq!(seen(&store), None);
    }
}
