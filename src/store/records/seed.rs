//! The mark that every claim on an address of this node is reserved here. As long as it is missing, a store
//! that is new, or that was restored from an older copy, does not know which addresses are another pod's.
//!
//! Must never hold for a copy: the page has the inode and the change time of the mark's file, which the
//! kernel sets and no copy keeps. Both are renewed with every address that is reserved for a StickyIP, so a
//! copy from before it does not fit either, also where a tool leaves a file alone that looks unchanged. After
//! a reboot the mark counts no more: then nothing tells an older copy from the store.

use std::net::IpAddr;

use crate::names::Attachment;
use crate::store::error::cannot;
use crate::store::files::open_plain;
use crate::store::records::state::{PendingChange, SeedMark};
use crate::store::{ClaimantKey, Disk, LockedStore, Record, Result, SEEDED, Store, StoredRecord};

/// What the file says, to those who find it.
const TEXT: &[u8] = b"Every claim on an address of this node is reserved in this store.\n";

impl<D: Disk> Store<D> {
    /// Whether the store has its mark, seen without the lock: another process may be about to change that.
    pub(crate) fn is_seeded(&self) -> Result<bool> {
        let Some(state) = self.page_of_this_boot().filter(|state| state.reconciled) else { return Ok(false) };
        self.has_mark(state.seeded.as_ref())
    }

    fn has_mark(&self, mark: Option<&SeedMark>) -> Result<bool> {
        let path = self.path(SEEDED);
        match mark {
            Some(mark) => Ok(SeedMark::of(&path).map_err(cannot("look at", &path))?.as_ref() == Some(mark)),
            None => Ok(false),
        }
    }
}

impl<D: Disk> LockedStore<'_, D> {
    /// Whether every claim on an address of this node is reserved here. Otherwise an address without a record
    /// may be another pod's.
    pub fn is_seeded(&self) -> Result<bool> {
        self.store.has_mark(self.state.seeded.as_ref())
    }

    /// Every claim is reserved from here on: those that were listed are, and a process that makes another
    /// one reserves its address here first.
    pub fn mark_seeded(&mut self) -> Result<()> {
        let path = self.store.path(SEEDED);
        self.store.create_replacing(&path, TEXT).map_err(cannot("make", &path))?;
        self.state.seeded = SeedMark::of(&path).map_err(cannot("look at", &path))?;
        self.write_page()
    }

    /// Renews the mark for an address that this change reserves for a StickyIP: a copy from before it does
    /// not know it. The page is written with the change; a process that ends before that leaves no mark.
    pub(crate) fn renew_mark(
        &mut self,
        record: &Record,
        olds: &[&StoredRecord],
        change: &PendingChange,
    ) -> Result<()> {
        let is_address = |name: &str| name.parse::<IpAddr>().is_ok();
        let is_new = change.place.iter().any(|place| place.replaces.is_none() && is_address(&place.name))
            || olds.iter().any(|old| old.record.binding.is_none());
        if record.binding.is_none() || !is_new || !self.is_seeded()? {
            return Ok(());
        }
        let path = self.store.path(SEEDED);
        let file = open_plain(&path, true).map_err(cannot("open", &path))?;
        self.store.disk.write_at(&file, 0, TEXT).map_err(cannot("write", &path))?;
        self.state.seeded = SeedMark::of(&path).map_err(cannot("look at", &path))?;
        Ok(())
    }

    /// Keeps an address from others that is claimed for this claimant. `by` is who asks for it, if it is new.
    /// On stable storage with the next commit.
    /// Returns the record of the sandbox that has it although it is claimed; then nothing is changed.
    pub fn reserve_claimed(
        &mut self,
        address: IpAddr,
        claimant: &ClaimantKey,
        by: &Attachment,
    ) -> Result<Option<StoredRecord>> {
        let now = self.store.now.clone();
        match self.find_by_address(address)? {
            Some(there) if there.record.is_for(claimant) || there.record.is_unowned() => return Ok(None),
            Some(there) if there.record.is_attached(&now) => return Ok(Some(there)),
            // Kept for a claimant whose claim is gone, or by this node's own settings of an earlier time. It
            // keeps its other addresses.
            Some(there) => {
                let mut others = self.store.standing(&there)?;
                others.retain(|other| *other != address);
                let record = Record::superseded(address, claimant, by, &now);
                return self.keep_addresses(&there, others, &[record]).map(|()| None);
            }
            None => {}
        }
        let kept = self.find_by_claimant(claimant)?;
        match &kept {
            // Its sandbox has others: as if an earlier one had had this here.
            Some(current) if current.record.is_attached(&now) => {
                let record = Record::superseded(address, claimant, &current.record.attachment, &now);
                self.put(&record, None)?;
            }
            // Beside what is kept already, also of the same family: that may be claimed for it too.
            _ => {
                let mut addresses =
                    kept.as_ref().map(|kept| kept.record.addresses.clone()).unwrap_or_default();
                addresses.push(address);
                let record = Record::reserved(addresses, claimant, None, by, &now);
                self.put(&record, kept.as_ref())?;
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{ContainerId, IfName, NetworkName, StickyKey};
    use crate::store::{NodeTime, RealDisk, RecordState, StickyBinding};
    use std::path::PathBuf;
    use std::process::Command;
    use std::time::Duration;

    struct Node {
        dir: tempfile::TempDir,
    }

    impl Node {
        fn new() -> Self {
            Self { dir: tempfile::tempdir().unwrap() }
        }

        fn at(&self, boot: &str) -> Store {
            let network = NetworkName::new("net").unwrap();
            Store::new(RealDisk, self.dir.path(), &network, NodeTime::new(9, 9, boot), Duration::ZERO)
        }

        fn store(&self) -> Store {
            self.at("a")
        }

        fn copy(&self, from: &str, to: &str) {
            let path = |name: &str| -> PathBuf { self.dir.path().join(name) };
            let copied = Command::new("cp").arg("-a").arg(path(from)).arg(path(to)).status().unwrap();
            assert!(copied.success());
        }
    }

    fn seed(store: &Store) {
        let mut locked = store.lock().unwrap();
        locked.mark_seeded().unwrap();
        locked.commit().unwrap();
    }

    fn is_seeded(store: &Store) -> bool {
        let locked = store.lock().unwrap().is_seeded().unwrap();
        assert_eq!(store.is_seeded().unwrap(), locked, "with the lock and without it");
        locked
    }

    fn sandbox(container: &str) -> Attachment {
        let interface = IfName::new("eth0").unwrap();
        Attachment { container: ContainerId::new(container).unwrap(), interface }
    }

    fn claimant(name: &str) -> ClaimantKey {
        let key = StickyKey { namespace: "db".into(), name: name.into() };
        ClaimantKey::of_sticky(&key, &sandbox("c").interface)
    }

    fn reserve(store: &Store, address: &str, name: &str) -> Option<String> {
        let mut locked = store.lock().unwrap();
        let by = Attachment::of_node(sandbox("c").interface);
        let held = locked.reserve_claimed(address.parse().unwrap(), &claimant(name), &by).unwrap();
        locked.commit().unwrap();
        held.map(|held| held.record.holder())
    }

    fn plain(store: &Store, address: &str, container: &str) {
        let mut locked = store.lock().unwrap();
        let record = Record::attached(vec![address.parse().unwrap()], sandbox(container), store.now());
        locked.put(&record, None).unwrap();
        locked.commit().unwrap();
    }

    fn at(store: &Store, address: &str) -> Record {
        store.lock().unwrap().find_by_address(address.parse().unwrap()).unwrap().unwrap().record
    }

    #[test]
    fn a_new_store_has_no_mark_and_a_marked_one_keeps_it_until_the_reboot() {
        let node = Node::new();
        assert!(!node.store().is_seeded().unwrap() && !is_seeded(&node.store()));
        seed(&node.store());
        assert!(is_seeded(&node.store()));
        plain(&node.store(), "10.0.0.1", "c1");
        reserve(&node.store(), "10.0.0.2", "db-0");
        assert!(is_seeded(&node.store()), "its own changes leave the mark");
        assert!(node.store().verify().unwrap().iter().all(|finding| !finding.wrong));
        assert!(!is_seeded(&node.at("b")), "an older copy cannot be told from it after a reboot");
        seed(&node.at("b"));
        assert!(is_seeded(&node.at("b")));
    }

    #[test]
    fn a_copy_of_a_store_has_no_mark_wherever_it_is_put() {
        let node = Node::new();
        seed(&node.store());
        reserve(&node.store(), "10.0.0.1", "db-0");
        node.copy("net", "backup");
        reserve(&node.store(), "10.0.0.2", "db-1");
        assert!(is_seeded(&node.store()));
        // In the place of the store.
        std::fs::remove_dir_all(node.store().root()).unwrap();
        node.copy("backup", "net");
        assert!(!is_seeded(&node.store()));
        seed(&node.store());
        reserve(&node.store(), "10.0.0.2", "db-1");
        // Over the store, file by file.
        node.copy("backup/.", "net");
        assert!(!is_seeded(&node.store()));
    }

    #[test]
    fn a_tool_that_restores_only_what_changed_leaves_no_mark() {
        let node = Node::new();
        seed(&node.store());
        node.copy("net", "backup");
        reserve(&node.store(), "10.0.0.2", "db-1");
        // It leaves the mark's file alone, which has the same size.
        let state = node.store().root().join(".sticky/state");
        std::fs::copy(node.dir.path().join("backup/.sticky/state"), &state).unwrap();
        assert!(!is_seeded(&node.store()));
    }

    #[test]
    fn records_that_were_removed_by_hand_take_the_mark_with_them() {
        let node = Node::new();
        reserve(&node.store(), "10.0.0.1", "db-0");
        seed(&node.store());
        // As `rm -rf /var/lib/cni/networks/net/*` does, which leaves .sticky.
        std::fs::remove_file(node.store().root().join("10.0.0.1")).unwrap();
        let root = std::fs::File::open(node.store().root()).unwrap();
        root.set_modified(std::time::UNIX_EPOCH).unwrap();
        assert!(!is_seeded(&node.store()));
    }

    #[test]
    fn a_claimed_address_is_kept_beside_whatever_its_claimant_has() {
        let node = Node::new();
        let store = node.store();
        assert_eq!(reserve(&store, "10.0.0.1", "db-0"), None);
        assert_eq!(reserve(&store, "fd00::1", "db-0"), None);
        assert_eq!(at(&store, "10.0.0.1").addresses.len(), 2, "one record for both");
        assert_eq!(reserve(&store, "10.0.0.1", "db-0"), None, "again");
        // Its sandbox has another one here.
        let stored = store.lock().unwrap().find_by_claimant(&claimant("db-0")).unwrap().unwrap();
        let lives = Record { state: RecordState::Attached, ..stored.record.clone() };
        let mut locked = store.lock().unwrap();
        locked.put(&lives, Some(&stored)).unwrap();
        locked.commit().unwrap();
        assert_eq!(reserve(&store, "10.0.0.9", "db-0"), None);
        assert!(at(&store, "10.0.0.9").is_superseded_of(&claimant("db-0")));
        assert_eq!(at(&store, "10.0.0.1"), lives);
        assert!(store.verify().unwrap().iter().all(|finding| !finding.wrong));
    }

    #[test]
    fn a_claim_wins_over_what_is_kept_and_not_over_a_sandbox() {
        let node = Node::new();
        let store = node.store();
        plain(&store, "10.0.0.1", "c1");
        assert!(reserve(&store, "10.0.0.1", "db-0").unwrap().contains("c1"));
        assert_eq!(at(&store, "10.0.0.1").attachment, sandbox("c1"));
        reserve(&store, "10.0.0.2", "db-1");
        reserve(&store, "10.0.0.3", "db-1");
        assert_eq!(reserve(&store, "10.0.0.2", "db-0"), None, "db-1 has lost its claim");
        assert!(at(&store, "10.0.0.2").is_for(&claimant("db-0")));
        let left = store.lock().unwrap().find_by_claimant(&claimant("db-1")).unwrap().unwrap();
        assert_eq!(left.record.addresses, ["10.0.0.3".parse::<IpAddr>().unwrap()]);
        assert!(store.verify().unwrap().iter().all(|finding| !finding.wrong));
    }

    #[test]
    fn a_process_that_ends_while_it_renews_the_mark_leaves_none() {
        let node = Node::new();
        seed(&node.store());
        let mark = node.store().root().join(SEEDED);
        // The file was written, and the page was not.
        std::fs::write(&mark, TEXT).unwrap();
        assert!(!is_seeded(&node.store()));
        let binding = StickyBinding {
            key: StickyKey { namespace: "db".into(), name: "db-0".into() },
            attachment_id: None,
        };
        assert_eq!(reserve(&node.store(), "10.0.0.1", "db-0"), None);
        assert_eq!(at(&node.store(), "10.0.0.1").binding, Some(binding), "nothing else depends on it");
    }
}
