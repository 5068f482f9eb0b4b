//! Comparing everything derived with the records, for people. Under the lock where there is one, and without
//! changing anything; [`LockedStore::rebuild_derived`] is the cure.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::path::PathBuf;

use crate::alloc::{Bitmap, Group, position};
use crate::store::files;
use crate::store::files::address_of;
use crate::store::lock::StoreLock;
use crate::store::records::reconcile::ReconcileDepth;
use crate::store::records::state;
use crate::store::records::state::ParsedPage;
use crate::store::records::{bitmaps, record};
use crate::store::{
    ASIDE, ATTACHMENTS, CLAIMANTS, DERIVED, Disk, LockedStore, NodeTime, Read, Record, STATE, Store,
    StoreError, StoredRecord, VERSION, inode_of,
};

/// The names that a network's directory has beside its addresses. host-local's cursors start with the last.
const OTHER_NAMES: [&str; 3] = ["lock", DERIVED, "last_reserved_ip."];
/// The names under `.sticky`; anything else was left by a process that ended, or put there by hand.
const DERIVED_NAMES: [&str; 10] = [
    "attachments",
    "claimants",
    "bitmaps",
    "aside",
    "state",
    "pending-updates",
    "claimants.lock",
    "decisions",
    "drafts",
    "detached",
];

/// What a check found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyFinding {
    /// Where.
    pub path: PathBuf,
    /// What is there, or is missing.
    pub what: String,
    /// Whether it is wrong; if not, it is worth a look.
    pub wrong: bool,
}

impl<D: Disk> Store<D> {
    /// Compares records, indexes and bitmaps, and changes nothing. Reads the whole directory: for people
    /// only.
    /// Errors: the lock is not to be had, the directory cannot be listed, or the store is of a newer version.
    pub fn verify(&self) -> Result<Vec<VerifyFinding>, StoreError> {
        // A directory without a lock file has never been used; making one would be a change.
        let lock = self.path("lock");
        let _held = match inode_of(&lock)? {
            Some(_) => Some(StoreLock::acquire(&lock, self.timeout)?),
            None => None,
        };
        let mut check = Check { store: self, records: Vec::new(), findings: Vec::new() };
        let reconciled = check.page()?;
        check.names(reconciled)?;
        if reconciled {
            check.indexes()?;
            check.bitmaps()?;
            check.leftovers()?;
        }
        check.set_aside()?;
        Ok(check.findings)
    }

    /// When this boot first looked into the store; none if it has not, or if the page cannot be read.
    pub(crate) fn first_opened(&self) -> Option<NodeTime> {
        match state::parse(&std::fs::read(self.path(STATE)).ok()?) {
            ParsedPage::StatePage(state) if state.first_opened_at.boot() == self.now.boot() => {
                Some(state.first_opened_at)
            }
            _ => None,
        }
    }
}

impl<D: Disk> LockedStore<'_, D> {
    /// Rebuilds everything derived from the records, as the first open of a boot does.
    /// Errors: the disk fails; the next one who opens the store starts again.
    pub(crate) fn rebuild_derived(&mut self) -> Result<(), StoreError> {
        self.state.reconciled = false;
        self.write_page()?;
        self.reconcile(ReconcileDepth::Everything)
    }
}

struct Check<'a, D: Disk> {
    store: &'a Store<D>,
    records: Vec<(IpAddr, StoredRecord)>,
    findings: Vec<VerifyFinding>,
}

impl<D: Disk> Check<'_, D> {
    fn wrong(&mut self, name: &str, what: impl Into<String>) {
        self.findings.push(VerifyFinding { path: self.store.path(name), what: what.into(), wrong: true });
    }

    fn notice(&mut self, name: &str, what: impl Into<String>) {
        self.findings.push(VerifyFinding { path: self.store.path(name), what: what.into(), wrong: false });
    }

    /// Looks at the page. Answers whether what is derived should agree with the records now.
    fn page(&mut self) -> Result<bool, StoreError> {
        let path = self.store.path(STATE);
        let bytes = match std::fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                if inode_of(&self.store.path(DERIVED))?.is_some() {
                    self.wrong(STATE, "is missing");
                } else {
                    self.notice("", "was never used by sticky-ipam; the first verb imports it");
                }
                return Ok(false);
            }
            Err(source) => return Err(StoreError::io("read", &path, source)),
        };
        match state::parse(&bytes) {
            ParsedPage::Newer(found) => {
                let path = self.store.root.clone();
                Err(StoreError::NewerVersion { path, found, known: VERSION })
            }
            ParsedPage::Nothing => {
                self.wrong(STATE, "cannot be read");
                Ok(false)
            }
            ParsedPage::StatePage(state) if state.first_opened_at.boot() != self.store.now.boot() => {
                self.notice(STATE, "is from before the reboot; the next verb puts the store in order");
                Ok(false)
            }
            ParsedPage::StatePage(state) if !state.reconciled => {
                self.wrong(STATE, "a process ended while it put the store in order");
                Ok(false)
            }
            ParsedPage::StatePage(state) => {
                if state.change.is_some() {
                    self.wrong(STATE, "a process ended in the middle of a change");
                }
                Ok(true)
            }
        }
    }

    /// Looks at every name of the directory.
    fn names(&mut self, reconciled: bool) -> Result<(), StoreError> {
        let mut names = files::names(&self.store.root)?;
        names.sort();
        for (name, _) in names {
            let Some(address) = address_of(&name) else {
                if !OTHER_NAMES.iter().any(|known| name.starts_with(known)) {
                    self.notice(&name, "is not the store's; it is ignored");
                }
                continue;
            };
            match self.store.read(&name) {
                Err(error) => self.wrong(&name, format!("cannot be read: {error}")),
                Ok(Read::Nothing) => self.wrong(&name, "is a link that leads nowhere; remove it"),
                Ok(Read::Ours(stored)) if !stored.record.addresses.contains(&address) => {
                    self.wrong(&name, "lists other addresses");
                }
                Ok(Read::Ours(stored)) => self.records.push((address, stored)),
                Ok(Read::Other { bytes, .. }) => {
                    match Record::from_host_local(&bytes, address, &self.store.now) {
                        Some(_) if reconciled => self.wrong(&name, "is host-local's, and not imported yet"),
                        Some(_) => {}
                        None if bytes.is_empty() => self.wrong(&name, "is empty"),
                        None => self.wrong(&name, "is no record"),
                    }
                }
            }
        }
        self.all_addresses()
    }

    /// A record of several addresses has the name of each.
    fn all_addresses(&mut self) -> Result<(), StoreError> {
        let mut missing = Vec::new();
        for (address, stored) in &self.records {
            for other in &stored.record.addresses {
                let name = other.to_string();
                if inode_of(&self.store.path(&name))? != Some(stored.inode) {
                    missing
                        .push((name, format!("is not the record of {address}, which has this address too")));
                }
            }
        }
        for (name, what) in missing {
            self.wrong(&name, what);
        }
        Ok(())
    }

    /// Every record has its entries, and every entry its record.
    fn indexes(&mut self) -> Result<(), StoreError> {
        let mut due: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
        for (_, stored) in &self.records {
            let record = &stored.record;
            if let Some(claimant) = record.claimant() {
                due.entry(claimant.index_path()).or_default().insert(stored.inode);
            }
            if record.is_attached(&self.store.now) {
                let name = record::attachment_index_path(&record.attachment);
                due.entry(name).or_default().insert(stored.inode);
            }
        }
        let mut there: HashMap<String, u64> = HashMap::new();
        for folder in [ATTACHMENTS, CLAIMANTS] {
            let names = files::names(&self.store.path(folder))?;
            there.extend(names.into_iter().map(|(name, inode)| (format!("{folder}/{name}"), inode)));
        }
        for (name, inodes) in &due {
            match there.remove(name) {
                None => self.wrong(name, "is missing: the record is not found by it"),
                Some(inode) if !inodes.contains(&inode) => self.wrong(name, "belongs to no record"),
                Some(_) if inodes.len() > 1 => {
                    self.wrong(name, "several records are of one claimant; remove those that no pod uses");
                }
                Some(_) => {}
            }
        }
        let mut left: Vec<String> = there.into_keys().collect();
        left.sort();
        for name in left {
            self.wrong(&name, "belongs to no record");
        }
        Ok(())
    }

    /// Every record has its bit, and every bit its record.
    fn bitmaps(&mut self) -> Result<(), StoreError> {
        let mut due: BTreeMap<Group, Bitmap> = BTreeMap::new();
        for (address, _) in &self.records {
            due.entry(Group::of(*address)).or_default().set(position(*address), true);
        }
        for group in bitmaps::groups(self.store)? {
            due.entry(group).or_default();
        }
        for (group, due) in due {
            let there = bitmaps::read_unlocked(self.store, group)?.unwrap_or_default();
            for at in due.taken().filter(|at| !there.get(*at)) {
                self.wrong(&group.address(at).to_string(), "is not marked as taken");
            }
            for at in there.taken().filter(|at| !due.get(*at)) {
                let address = group.address(at);
                // A file that is no record was found already.
                if inode_of(&self.store.path(&address.to_string()))?.is_none() {
                    self.wrong(&address.to_string(), "is marked as taken, but has no record");
                }
            }
        }
        Ok(())
    }

    fn leftovers(&mut self) -> Result<(), StoreError> {
        for (name, _) in files::names(&self.store.path(DERIVED))? {
            if !DERIVED_NAMES.contains(&name.as_str()) {
                self.wrong(&format!("{DERIVED}/{name}"), "was left by a process that ended");
            }
        }
        Ok(())
    }

    fn set_aside(&mut self) -> Result<(), StoreError> {
        let mut names = files::names(&self.store.path(ASIDE))?;
        names.sort();
        for (name, _) in names {
            self.notice(&format!("{ASIDE}/{name}"), "was set aside; remove it when you have looked at it");
        }
        Ok(())
    }
}
