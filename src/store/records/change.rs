//! Changing who has what: written down first, then done, then crossed out. If a process
//! ends in between, the next one finishes the change before anything else.
//!
//! A record is one file with several names: its addresses and its entries in the indexes. Placing the name of
//! an address is the act that decides: it fails if the name is there.

use std::fs::File;
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::store::error::cannot;
use crate::store::records::record::attachment_index_path;
use crate::store::records::state::{
    self, DirectoryTime, NamePlacement, NameRemoval, PendingChange, StatePage,
};
use crate::store::{Disk, LockedStore, Read, Record, Result, STATE, StoreError, StoredRecord, inode_of};

/// The new record before it has its names.
const NEW: &str = ".sticky/new";
/// A further name of the new record, on its way over an old one.
const SWAP: &str = ".sticky/swap";

impl<D: Disk> LockedStore<'_, D> {
    /// Puts a record in place, instead of `replacing` if there is one. Addresses that only the old one has
    /// are free afterwards.
    /// Errors: [`StoreError::Taken`] when an address turns out to be taken; nothing is changed then. Or the
    /// disk fails: the change is undone, or finished by the next process that opens the store.
    pub fn put(&mut self, record: &Record, replacing: Option<&StoredRecord>) -> Result<()> {
        self.put_replacing(record, replacing.as_slice())
    }

    /// Puts a record in place, as [`LockedStore::put`] does, and has it take over from those in `given_up` in
    /// the same change: they lose their addresses if the record gets its own, and not otherwise.
    pub(crate) fn put_reclaiming(
        &mut self,
        record: &Record,
        replacing: Option<&StoredRecord>,
        given_up: &[StoredRecord],
    ) -> Result<()> {
        let mut olds: Vec<&StoredRecord> = replacing.into_iter().chain(given_up).collect();
        let fewest = olds.len() - given_up.len();
        // With very long names the change may not fit into the page: the last ones are released first, alone.
        while olds.len() > fewest && !self.fits(record, &olds)? {
            if let Some(old) = olds.pop() {
                self.release(old)?;
            }
        }
        self.put_replacing(record, &olds)
    }

    fn fits(&mut self, record: &Record, olds: &[&StoredRecord]) -> Result<bool> {
        let change = PendingChange { inode: Some(u64::MAX), ..self.plan(record, olds)? };
        Ok(state::page(&StatePage { change: Some(change), ..self.state.clone() }).is_ok())
    }

    pub(crate) fn put_replacing(&mut self, record: &Record, olds: &[&StoredRecord]) -> Result<()> {
        let change = self.plan(record, olds)?;
        self.put_by(record, olds, change)
    }

    /// Puts a record under those names of an older one that it has itself. The older one keeps its others.
    pub(crate) fn put_over_shared_names(&mut self, record: &Record, old: &StoredRecord) -> Result<()> {
        let change = PendingChange { remove: Vec::new(), ..self.plan(record, &[old])? };
        self.put_by(record, &[old], change)
    }

    fn put_by(&mut self, record: &Record, olds: &[&StoredRecord], mut change: PendingChange) -> Result<()> {
        let (file, is_synced) = self.create_new(record)?;
        let path = self.store.path(NEW);
        change.inode = Some(file.metadata().map_err(cannot("look at", &path))?.ino());
        if is_synced {
            // A draft, which is whole on the disk.
        } else if olds.is_empty() {
            self.unsynced.push(file);
        } else if record.retention.is_some() || olds.iter().any(|old| old.record.retention.is_some()) {
            // A record that lasts must be whole on the disk before it takes an older one's name.
            self.store.disk.sync(&file).map_err(cannot("sync", &path))?;
        }
        // What is left is host-local's and becomes ours: a loss of power may tear it, and frees it anyway.
        self.renew_mark(record, olds, &change)?;
        self.execute(change)
    }

    /// The names that a record is to have, and those that are to go.
    fn plan(&mut self, record: &Record, olds: &[&StoredRecord]) -> Result<PendingChange> {
        let mut change = PendingChange::default();
        for address in &record.addresses {
            let replaces = self.old_inode(*address, record, olds)?;
            change.place.push(NamePlacement { name: address.to_string(), replaces });
        }
        // New names first: where one of them is taken, nothing old was touched yet.
        change.place.sort_by_key(|place| place.replaces.is_some());
        for name in record.index_paths(&self.store.now) {
            let replaces = self.store.inode(&name)?;
            change.place.push(NamePlacement { name, replaces });
        }
        let gone = olds.iter().flat_map(|old| names_of(old));
        change.remove =
            gone.filter(|gone| change.place.iter().all(|place| place.name != gone.name)).collect();
        Ok(change)
    }

    /// Releases the addresses of a record, and forgets it.
    /// Errors: the disk fails; the next process that opens the store finishes the change.
    pub(crate) fn release(&mut self, stored: &StoredRecord) -> Result<()> {
        self.execute(PendingChange { remove: names_of(stored), ..PendingChange::default() })?;
        match stored.record.claimant().filter(|_| stored.record.binding.is_some()) {
            Some(claimant) => self.remove_detached_snapshot(&claimant),
            None => Ok(()),
        }
    }

    /// Finishes what a process that ended left undone.
    pub(crate) fn finish_change(&mut self) -> Result<()> {
        let Some(mut change) = self.state.change.clone() else { return Ok(()) };
        self.remove_if_there(&self.store.path(SWAP))?;
        // host-local may have come first and taken an address that was free already, and the file system may
        // have given its file the inode of the one that is gone. What we remove is always a record of ours.
        let mut ours = Vec::new();
        for removal in change.remove {
            if !matches!(self.store.read(&removal.name)?, Read::Other { .. }) {
                ours.push(removal);
            }
        }
        change.remove = ours;
        match self.complete(&change) {
            // Undone: its verb has ended.
            Err(StoreError::Taken(_)) => Ok(()),
            outcome => outcome,
        }
    }

    /// Writes the page with the directory as it is now.
    pub(crate) fn write_page(&mut self) -> Result<()> {
        let (path, root) = (self.store.path(STATE), &self.store.root);
        self.state.directory = DirectoryTime::of(root).map_err(cannot("look at", root))?;
        let page = state::page(&self.state);
        page.and_then(|page| self.store.disk.write_at(&self.page, 0, &page)).map_err(cannot("write", &path))
    }

    /// The inode of what has the name of an address and may be replaced by `record`: the old record itself,
    /// or another one of the same claimant. Nothing: the address is free.
    fn old_inode(&mut self, address: IpAddr, record: &Record, olds: &[&StoredRecord]) -> Result<Option<u64>> {
        let name = address.to_string();
        let inode = self.store.inode(&name)?;
        if inode.is_none_or(|inode| olds.iter().any(|old| old.inode == inode)) {
            return Ok(inode);
        }
        match self.store.read(&name)? {
            Read::Ours(other)
                if record.claimant().is_some() && other.record.claimant() == record.claimant() =>
            {
                Ok(Some(other.inode))
            }
            _ => match self.find_by_address(address)? {
                Some(_) => Err(StoreError::Taken(address)),
                None => Ok(None),
            },
        }
    }

    /// The file of the new record, and whether it is on the disk.
    fn create_new(&mut self, record: &Record) -> Result<(File, bool)> {
        let path = self.store.path(NEW);
        let failed = cannot("write", &path);
        let bytes = record.to_bytes().map_err(&failed)?;
        if let Some(draft) = self.draft.take() {
            // A draft that was removed, or that is of another record by now, cannot be used.
            if draft.bytes == bytes && self.store.disk.rename(&draft.path, &path).is_ok() {
                return Ok((draft.file, true));
            }
            self.remove_if_there(&draft.path)?;
        }
        // One that is there has no other name: its process ended before it wrote its change down.
        Ok((self.store.create_replacing(&path, &bytes).map_err(failed)?, false))
    }

    fn execute(&mut self, change: PendingChange) -> Result<()> {
        self.state.change = Some(change.clone());
        if let Err(error) = self.write_page() {
            self.state.change = None;
            return Err(error);
        }
        self.complete(&change)
    }

    fn complete(&mut self, change: &PendingChange) -> Result<()> {
        self.names_changed = true;
        // Where this fails, the page still has the change, and the next process tries again.
        let outcome = match self.place_all_names(change) {
            Ok(is_placed) => {
                for removal in change.remove.iter().filter(|_| is_placed) {
                    self.remove_if_same(removal)?;
                }
                Ok(())
            }
            // An old name is replaced already, and the old record with it: there is no way back.
            Err(error @ StoreError::Io { .. }) if self.has_replaced(change)? => return Err(error),
            Err(error) => {
                self.undo_placement(change)?;
                Err(error)
            }
        };
        for name in change.names() {
            if let Ok(address) = name.parse() {
                let taken = self.store.inode(name)?.is_some();
                self.occupied.mark(self.store, address, taken)?;
            }
        }
        self.state.change = None;
        self.write_page()?;
        outcome
    }

    /// Gives the new record its names. The last one is the file itself, so that nothing is left over. Answers
    /// whether it has them: not so if a process took the change back and ended before it crossed it out.
    fn place_all_names(&self, change: &PendingChange) -> Result<bool> {
        let new = self.store.path(NEW);
        let Some((last, others)) = change.place.split_last() else { return Ok(true) };
        let Some(inode) = inode_of(&new)?.filter(|inode| Some(*inode) == change.inode) else {
            return Ok(self.store.inode(&last.name)? == change.inode);
        };
        for place in others {
            self.place(place, inode, &new)?;
        }
        let path = self.store.path(&last.name);
        let there = inode_of(&path)?;
        if there == Some(inode) {
            return self.remove(&new).map(|()| true);
        }
        if there.is_some() && there != last.replaces {
            return Err(occupied(last));
        }
        self.store.disk.rename(&new, &path).map_err(cannot("place", &path))?;
        Ok(true)
    }

    fn has_replaced(&self, change: &PendingChange) -> Result<bool> {
        for place in change.place.iter().filter(|place| place.replaces.is_some()) {
            if self.store.inode(&place.name)? == change.inode {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn place(&self, place: &NamePlacement, inode: u64, new: &Path) -> Result<()> {
        let path = self.store.path(&place.name);
        match inode_of(&path)? {
            Some(there) if there == inode => Ok(()),
            None => match self.store.disk.link(new, &path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Err(occupied(place)),
                linked => linked.map_err(cannot("place", &path)),
            },
            there if there == place.replaces => {
                let (disk, swap) = (&self.store.disk, self.store.path(SWAP));
                self.remove_if_there(&swap)?;
                disk.link(new, &swap).and_then(|()| disk.rename(&swap, &path)).map_err(cannot("place", &path))
            }
            Some(_) => Err(occupied(place)),
        }
    }

    /// Takes the new record's names away again, as far as they replaced nothing.
    fn undo_placement(&self, change: &PendingChange) -> Result<()> {
        let Some(inode) = change.inode else { return Ok(()) };
        for place in change.place.iter().filter(|place| place.replaces.is_none()) {
            self.remove_if_same(&NameRemoval { name: place.name.clone(), inode })?;
        }
        self.remove_leftovers()
    }

    fn remove_if_same(&self, removal: &NameRemoval) -> Result<()> {
        let path = self.store.path(&removal.name);
        if inode_of(&path)? == Some(removal.inode) { self.remove(&path) } else { Ok(()) }
    }

    /// Removes what a process that ended may have left, where the records alone are trusted.
    pub(crate) fn remove_leftovers(&self) -> Result<()> {
        self.remove_if_there(&self.store.path(SWAP))?;
        self.remove_if_there(&self.store.path(NEW))
    }

    pub(crate) fn remove_if_there(&self, path: &Path) -> Result<()> {
        if inode_of(path)?.is_some() { self.remove(path) } else { Ok(()) }
    }

    pub(crate) fn remove(&self, path: &Path) -> Result<()> {
        self.store.disk.remove(path).map_err(cannot("remove", path))
    }
}

fn occupied(place: &NamePlacement) -> StoreError {
    match place.name.parse() {
        Ok(address) => StoreError::Taken(address),
        Err(_) => cannot("place", Path::new(&place.name))(io::ErrorKind::AlreadyExists.into()),
    }
}

fn names_of(stored: &StoredRecord) -> Vec<NameRemoval> {
    let record = &stored.record;
    let claimant = record.claimant().map(|claimant| claimant.index_path());
    let attachment = attachment_index_path(&record.attachment);
    let names = record.addresses.iter().map(ToString::to_string).chain(claimant).chain([attachment]);
    names.map(|name| NameRemoval { name, inode: stored.inode }).collect()
}
