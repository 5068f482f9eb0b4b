//! Looking at a store without its lock: for STATUS, for GC's list, and for people. Changes nothing.

use std::collections::HashSet;
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use crate::alloc::RangeSet;
use crate::names::Attachment;
use crate::store::error::cannot;
use crate::store::files::{address_of, names};
use crate::store::records::bitmaps;
use crate::store::records::record::attachment_file_name;
use crate::store::records::state::StatePage;
use crate::store::{ATTACHMENTS, CLAIMANTS, Disk, NodeTime, Read, Record, Result, Store};

/// A name in an index, with the inode that it had when it was listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    pub(crate) folder: &'static str,
    pub(crate) name: String,
    pub(crate) inode: u64,
}

/// One file of a network's directory that bears an address's name.
#[derive(Debug)]
pub struct AddressFile {
    pub address: IpAddr,
    pub path: PathBuf,
    /// What it says; none where it is no record of ours or host-local's.
    pub record: Option<Record>,
    pub is_host_local: bool,
}

impl<D: Disk> Store<D> {
    /// The attachments that are not among `valid`, as they are now. Reads names only.
    pub(crate) fn attachments_except(&self, valid: &[Attachment]) -> Result<Vec<IndexEntry>> {
        let valid: HashSet<String> = valid.iter().map(attachment_file_name).collect();
        self.entries(ATTACHMENTS, |name| !valid.contains(name))
    }

    /// Everything that is kept for a claimant or that it has.
    pub fn claimants(&self) -> Result<Vec<IndexEntry>> {
        self.entries(CLAIMANTS, |_| true)
    }

    fn entries(&self, folder: &'static str, wanted: impl Fn(&str) -> bool) -> Result<Vec<IndexEntry>> {
        let names = names(&self.path(folder))?.into_iter().filter(|(name, _)| wanted(name));
        Ok(names.map(|(name, inode)| IndexEntry { folder, name, inode }).collect())
    }

    /// Whether an ADD could use the store, as far as can be seen without the lock: version and permissions.
    pub(crate) fn check_usable(&self) -> Result<()> {
        if !self.is_there()? {
            let there = self.root.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
            if !there.is_dir() {
                return Err(cannot("use", there)(io::ErrorKind::NotADirectory.into()));
            }
            return writable(there);
        }
        writable(&self.root)?;
        self.page(false).map(drop)
    }

    /// How many addresses of `set` are free, counted no further than `enough`. Only as true as the bitmaps
    /// are: in a directory that this boot has not put in order, everything counts as free.
    pub(crate) fn count_free(&self, set: &RangeSet, enough: u128) -> Result<u128> {
        let is_reconciled = self.page_of_this_boot().is_some_and(|state| state.reconciled);
        crate::alloc::count_free(set, enough, |group| {
            if is_reconciled { bitmaps::read_unlocked(self, group) } else { Ok(None) }
        })
    }

    /// When this boot first looked into the store; none if it has not, or if the page cannot be read.
    pub(crate) fn first_opened(&self) -> Option<NodeTime> {
        self.page_of_this_boot().map(|state| state.first_opened_at)
    }

    pub(crate) fn page_of_this_boot(&self) -> Option<StatePage> {
        let (_, state) = self.page(false).ok()?;
        state.filter(|state| state.first_opened_at.boot() == self.now.boot())
    }

    /// Every file that has an address as its name, sorted. Reads the whole directory: not for verbs.
    pub fn address_files(&self) -> Result<Vec<AddressFile>> {
        let mut found = Vec::new();
        for (name, _) in names(&self.root)? {
            let Some(address) = address_of(&name) else { continue };
            let (record, is_foreign) = match self.read(&name)? {
                Read::Nothing => continue,
                Read::Ours(stored) => (Some(stored.record), false),
                Read::Other { bytes, .. } => (Record::from_host_local(&bytes, address, &self.now), true),
            };
            let is_host_local = is_foreign && record.is_some();
            found.push(AddressFile { address, path: self.path(&name), record, is_host_local });
        }
        found.sort_by_key(|look| look.address);
        Ok(found)
    }
}

fn writable(path: &Path) -> Result<()> {
    access(path, AccessFlags::W_OK | AccessFlags::X_OK)
        .map_err(|errno| cannot("write to", path)(errno.into()))
}
