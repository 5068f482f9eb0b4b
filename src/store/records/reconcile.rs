//! Making what is derived agree with the records: after a reboot, in a directory of host-local's, after a
//! crash, and when another program changed the directory. No verb reads the whole directory otherwise.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::alloc::{Bitmap, Group, position};
use crate::store::error::cannot;
use crate::store::files::{self, address_of};
use crate::store::records::bitmaps;
use crate::store::{ASIDE, ATTACHMENTS, CLAIMANTS, DETACHED_SNAPSHOTS, DRAFTS};
use crate::store::{Disk, LockedStore, Read, Record, RecordState, Result, StoredRecord, inode_of};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReconcileDepth {
    /// Every record, and all indexes rebuilt: the first open of a boot.
    Everything,
    /// The names, and only the records of those that are new.
    NewNames,
}

impl<D: Disk> LockedStore<'_, D> {
    pub(crate) fn reconcile(&mut self, depth: ReconcileDepth) -> Result<()> {
        match depth {
            ReconcileDepth::NewNames => self.finish_change()?,
            ReconcileDepth::Everything => {
                self.state.change = None;
                self.clear_indexes()?;
            }
        }
        let mut taken: BTreeMap<Group, Bitmap> = BTreeMap::new();
        let mut outdated = Vec::new();
        for (name, _) in files::names(&self.store.root)? {
            let Some(address) = address_of(&name) else { continue };
            let known = depth == ReconcileDepth::NewNames && self.occupied.is_marked(self.store, address)?;
            if known || self.index_file(address, depth, &mut outdated)? {
                taken.entry(Group::of(address)).or_default().set(position(address), true);
            }
        }
        for group in bitmaps::groups(self.store)? {
            taken.entry(group).or_default();
        }
        for (group, bitmap) in taken {
            let before = self.occupied.bitmap(self.store, group)?.unwrap_or_default();
            // Not by a change of ours, which the bitmap follows: what was claimed may be gone with it.
            if before.taken().any(|at| !bitmap.get(at)) {
                self.state.seeded = None;
            }
            for at in before.taken().chain(bitmap.taken()) {
                self.occupied.mark(self.store, group.address(at), bitmap.get(at))?;
            }
        }
        outdated.iter().try_for_each(|old| self.replace_outdated(old))?;
        self.state.reconciled = true;
        self.write_page()
    }

    /// The record of an address. A file that is not known yet gets its entries in the indexes; one that is no
    /// record is set aside, and the address is free.
    pub fn find_by_address(&mut self, address: IpAddr) -> Result<Option<StoredRecord>> {
        let name = address.to_string();
        if let Read::Ours(stored) = self.store.read(&name)?
            && stored.record.addresses.contains(&address)
        {
            // Where the bit was lost, the search would return this address again and again.
            self.occupied.mark(self.store, address, true)?;
            return Ok(Some(stored));
        }
        let mut outdated = Vec::new();
        let taken = self.index_file(address, ReconcileDepth::NewNames, &mut outdated)?;
        self.occupied.mark(self.store, address, taken)?;
        outdated.iter().try_for_each(|old| self.replace_outdated(old))?;
        match self.store.read(&name)? {
            Read::Ours(stored) if taken => Ok(Some(stored)),
            _ => Ok(None),
        }
    }

    /// Whether the file of this address holds it; makes its index entries if it does.
    /// Adds to `outdated` what a later record of the same claimant contradicts, and what lacks a name.
    fn index_file(
        &mut self,
        address: IpAddr,
        depth: ReconcileDepth,
        outdated: &mut Vec<StoredRecord>,
    ) -> Result<bool> {
        let name = address.to_string();
        match self.store.read(&name)? {
            Read::Nothing => Ok(false),
            Read::Ours(stored) if !stored.record.addresses.contains(&address) => {
                self.set_aside("", &name, "it lists other addresses").map(|()| false)
            }
            Read::Ours(stored) => {
                let gone = stored.record.retention.is_none() && !stored.record.is_attached(&self.store.now);
                if gone && depth == ReconcileDepth::Everything {
                    let holder = stored.record.holder();
                    tracing::info!(%address, holder, "released: from before the reboot");
                    self.names_changed = true;
                    self.remove(&self.store.path(&name))?;
                    return Ok(false);
                }
                self.index(&name, &stored, outdated)?;
                if depth == ReconcileDepth::Everything && !self.has_all_names(&stored)? {
                    outdated.push(stored);
                }
                Ok(true)
            }
            Read::Other { bytes, inode } => {
                if let Some(record) = Record::from_host_local(&bytes, address, &self.store.now) {
                    return self.take_over(record, inode).map(|()| true);
                }
                let why = if bytes.is_empty() { "it is empty" } else { "it is no record" };
                self.set_aside("", &name, why).map(|()| false)
            }
        }
    }

    /// Gives a record its entries in the indexes, where it has none.
    fn index(&mut self, name: &str, stored: &StoredRecord, outdated: &mut Vec<StoredRecord>) -> Result<()> {
        let record = &stored.record;
        for entry in record.index_paths(&self.store.now) {
            let path = self.store.path(&entry);
            match self.store.read(&entry)? {
                Read::Nothing => {}
                Read::Ours(other) if other.inode == stored.inode => continue,
                // Two records of one claimant: a change that lost power half way. The later one counts.
                Read::Ours(other) if other.record.since.wall() >= record.since.wall() => {
                    outdated.push(stored.clone());
                    continue;
                }
                Read::Ours(other) => {
                    outdated.push(other);
                    self.remove(&path)?;
                }
                Read::Other { .. } => self.remove(&path)?,
            }
            let file = self.store.path(name);
            self.store.disk.link(&file, &path).map_err(cannot("make the index entry", &path))?;
        }
        Ok(())
    }

    fn has_all_names(&self, stored: &StoredRecord) -> Result<bool> {
        Ok(self.store.standing(stored)? == stored.record.addresses)
    }

    /// Finishes a change that lost power half way: the claimant's later record takes the place of this one,
    /// and the names that it lacks, where no other record has them.
    fn replace_outdated(&mut self, old: &StoredRecord) -> Result<()> {
        let Some(claimant) = old.record.claimant() else { return Ok(()) };
        let Read::Ours(later) = self.store.read(&claimant.index_path())? else { return Ok(()) };
        if later.inode == old.inode && self.has_all_names(&later)? {
            return Ok(());
        }
        let mut record = later.record.clone();
        record.addresses.clear();
        for address in &later.record.addresses {
            let there = self.store.inode(&address.to_string())?;
            if there.is_none_or(|inode| inode == later.inode || inode == old.inode) {
                record.addresses.push(*address);
            }
        }
        if record.addresses.is_empty() {
            return Ok(());
        }
        if !record.is_attached(&self.store.now) && record.state == RecordState::Attached {
            // Its container is from before the boot, and must not get an entry among the attachments.
            let since = self.state.first_opened_at.clone();
            record = Record { state: RecordState::Kept, since, netns: None, ..record };
        }
        self.put_replacing(&record, &[&later, old])
    }

    /// Makes a record of host-local's ours, joined with the other family's of the same attachment.
    fn take_over(&mut self, mut record: Record, inode: u64) -> Result<()> {
        let known = self.find_by_attachment(&record.attachment)?;
        let is_host_local = StoredRecord { record: record.clone(), inode };
        let Some(known) = known else { return self.put_replacing(&record, &[&is_host_local]) };
        let mut addresses = known.record.addresses.clone();
        addresses.extend(record.addresses.iter().filter(|ip| !known.record.addresses.contains(ip)));
        record = Record { addresses, state: RecordState::Attached, ..known.record.clone() };
        // Both files become one record; host-local's is replaced first, ours follows.
        self.put_replacing(&record, &[&is_host_local, &known])
    }

    /// Sets a file aside that is not what it should be: kept for inspection, where it blocks nothing.
    pub(crate) fn set_aside(&mut self, folder: &str, name: &str, why: &str) -> Result<()> {
        let aside = self.store.path(ASIDE);
        if inode_of(&aside)?.is_none() {
            self.store.make_dir(&aside)?;
        }
        let from = self.store.path(folder).join(name);
        let mut to = aside.join(format!("{name}.{}", self.store.now.wall()));
        let mut number = 1;
        while inode_of(&to)?.is_some() {
            number += 1;
            to = aside.join(format!("{name}.{}.{number}", self.store.now.wall()));
        }
        tracing::warn!(file = %from.display(), to = %to.display(), reason = why, "set a file aside");
        self.names_changed = true;
        self.store.disk.rename(&from, &to).map_err(cannot("set aside", &from))
    }

    fn clear_indexes(&mut self) -> Result<()> {
        // The writers of drafts have ended, and the snapshots are of an earlier boot.
        for folder in [ATTACHMENTS, CLAIMANTS, DRAFTS, DETACHED_SNAPSHOTS] {
            let folder = self.store.path(folder);
            for (entry, _) in files::names(&folder)? {
                self.remove(&folder.join(entry))?;
            }
        }
        self.remove_leftovers()
    }
}
