//! Comparing everything derived with the records, for people. Under the lock where there is one, and without
//! changing anything; [`LockedStore::rebuild_derived`] is the cure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::PathBuf;

use crate::alloc::{Bitmap, Group, position};
use crate::store::error::cannot;
use crate::store::files::{self, address_of, if_there};
use crate::store::lock::StoreLock;
use crate::store::records::bitmaps;
use crate::store::records::reconcile::ReconcileDepth;
use crate::store::{ASIDE, ATTACHMENTS, CLAIMANTS, DERIVED, STATE};
use crate::store::{Disk, LockedStore, Read, Record, Result, Store, StoredRecord};

/// The names that a network's directory has beside its addresses. host-local's cursors start with the last.
const OTHER_NAMES: [&str; 3] = ["lock", DERIVED, "last_reserved_ip."];
/// The names under `.sticky`; anything else was left by a process that ended, or put there by hand.
const DERIVED_NAMES: [&str; 12] = [
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
    "seeded",
    "blocks",
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifyFinding {
    pub path: PathBuf,
    pub what: String,
    /// Whether it is wrong; if not, it is worth a look.
    pub wrong: bool,
}

impl<D: Disk> Store<D> {
    /// Compares records, indexes and bitmaps. Reads the whole directory: for people only.
    /// Errors: the lock is not to be had, the directory cannot be listed, or the store is of a newer version.
    pub fn verify(&self) -> Result<Vec<VerifyFinding>> {
        let _held = StoreLock::acquire_existing(&self.path("lock"), self.timeout)?;
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
}

impl<D: Disk> LockedStore<'_, D> {
    /// Rebuilds everything derived from the records, as the first open of a boot does.
    /// Errors: the disk fails; the next one who opens the store starts again.
    pub(crate) fn rebuild_derived(&mut self) -> Result<()> {
        self.state.reconciled = false;
        self.state.seeded = None;
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
    fn page(&mut self) -> Result<bool> {
        let path = self.store.path(STATE);
        let Some(bytes) = if_there(std::fs::read(&path)).map_err(cannot("read", &path))? else {
            if self.store.inode(DERIVED)?.is_some() {
                self.wrong(STATE, "is missing");
            } else {
                self.notice("", "was never used by sticky-ipam; the first verb imports it");
            }
            return Ok(false);
        };
        match self.store.parse_page(&bytes)? {
            None => self.wrong(STATE, "cannot be read"),
            Some(state) if state.first_opened_at.boot() != self.store.now.boot() => {
                self.notice(STATE, "is from before the reboot; the next verb puts the store in order");
            }
            Some(state) if !state.reconciled => {
                self.wrong(STATE, "a process ended while it put the store in order");
            }
            Some(state) => {
                if state.change.is_some() {
                    self.wrong(STATE, "a process ended in the middle of a change");
                }
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn names(&mut self, reconciled: bool) -> Result<()> {
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
    fn all_addresses(&mut self) -> Result<()> {
        let mut missing = Vec::new();
        for (address, stored) in &self.records {
            let standing = self.store.standing(stored)?;
            let others = stored.record.addresses.iter().filter(|other| !standing.contains(other));
            missing.extend(others.map(|other| (*other, *address)));
        }
        for (name, address) in missing {
            let what = format!("is not the record of {address}, which has this address too");
            self.wrong(&name.to_string(), what);
        }
        Ok(())
    }

    /// Every record has its entries, and every entry its record.
    fn indexes(&mut self) -> Result<()> {
        let mut due: BTreeMap<String, BTreeSet<u64>> = BTreeMap::new();
        for (_, stored) in &self.records {
            for name in stored.record.index_paths(&self.store.now) {
                due.entry(name).or_default().insert(stored.inode);
            }
        }
        let mut there: BTreeMap<String, u64> = BTreeMap::new();
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
        for name in there.into_keys() {
            self.wrong(&name, "belongs to no record");
        }
        Ok(())
    }

    /// Every record has its bit, and every bit its record.
    fn bitmaps(&mut self) -> Result<()> {
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
                let name = address.to_string();
                if self.store.inode(&name)?.is_none() {
                    self.wrong(&name, "is marked as taken, but has no record");
                }
            }
        }
        Ok(())
    }

    fn leftovers(&mut self) -> Result<()> {
        for (name, _) in files::names(&self.store.path(DERIVED))? {
            if !DERIVED_NAMES.contains(&name.as_str()) {
                self.wrong(&format!("{DERIVED}/{name}"), "was left by a process that ended");
            }
        }
        Ok(())
    }

    fn set_aside(&mut self) -> Result<()> {
        let mut names = files::names(&self.store.path(ASIDE))?;
        names.sort();
        for (name, _) in names {
            self.notice(&format!("{ASIDE}/{name}"), "was set aside; remove it when you have looked at it");
        }
        Ok(())
    }
}
