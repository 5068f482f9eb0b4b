//! Looking at a store without its lock: for STATUS, for GC's list, and for people. Changes nothing.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use nix::unistd::{AccessFlags, access};

use crate::alloc::RangeSet;
use crate::names::Attachment;
use crate::store::files::{address_of, names};
use crate::store::records::state;
use crate::store::records::state::ParsedPage;
use crate::store::records::{bitmaps, record};
use crate::store::{ATTACHMENTS, CLAIMANTS, Disk, Read, Record, STATE, Store, StoreError, VERSION};

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
    /// Whether it is host-local's.
    pub is_host_local: bool,
}

impl<D: Disk> Store<D> {
    /// The attachments that are not among `valid`, as they are now. Reads names only.
    pub(crate) fn attachments_except(&self, valid: &[Attachment]) -> Result<Vec<IndexEntry>, StoreError> {
        let valid = record::attachment_file_names(valid);
        self.entries(ATTACHMENTS, |name| !valid.contains(name))
    }

    /// Everything that is kept for a claimant or that it has.
    pub fn claimants(&self) -> Result<Vec<IndexEntry>, StoreError> {
        self.entries(CLAIMANTS, |_| true)
    }

    fn entries(
        &self,
        folder: &'static str,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<Vec<IndexEntry>, StoreError> {
        let names = names(&self.path(folder))?.into_iter();
        Ok(names
            .filter(|(name, _)| wanted(name))
            .map(|(name, inode)| IndexEntry { folder, name, inode })
            .collect())
    }

    /// Whether an ADD could use the store, as far as can be seen without the lock: it is of a known version
    /// and can be written.
    pub(crate) fn check_usable(&self) -> Result<(), StoreError> {
        if !self.is_there()? {
            let there = self.root.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
            if !there.is_dir() {
                return Err(StoreError::io("use", there, io::Error::from(io::ErrorKind::NotADirectory)));
            }
            return writable(there);
        }
        writable(&self.root)?;
        let page = self.path(STATE);
        match state::read_unlocked(&page).map_err(|source| StoreError::io("read", &page, source))? {
            ParsedPage::Newer(found) => {
                Err(StoreError::NewerVersion { path: self.root.clone(), found, known: VERSION })
            }
            ParsedPage::StatePage(_) | ParsedPage::Nothing => Ok(()),
        }
    }

    /// How many addresses of `set` are free, counted no further than `enough`. Only as true as the bitmaps
    /// are: in a directory that this boot has not put in order, everything counts as free.
    pub(crate) fn count_free(&self, set: &RangeSet, enough: u128) -> Result<u128, StoreError> {
        let reconciled = match state::read_unlocked(&self.path(STATE)) {
            Ok(ParsedPage::StatePage(state)) => {
                state.reconciled && state.first_opened_at.boot() == self.now.boot()
            }
            _ => false,
        };
        crate::alloc::count_free(set, enough, |group| {
            if reconciled { bitmaps::read_unlocked(self, group) } else { Ok(None) }
        })
    }

    /// Every file of the directory that has an address as its name, sorted by address. Reads the whole
    /// directory: for people and the agent.
    pub fn address_files(&self) -> Result<Vec<AddressFile>, StoreError> {
        let mut found = Vec::new();
        for (name, _) in names(&self.root)? {
            let Some(address) = address_of(&name) else { continue };
            let (record, is_host_local) = match self.read(&name)? {
                Read::Nothing => continue,
                Read::Ours(stored) => (Some(stored.record), false),
                Read::Other { bytes, .. } => {
                    let record = Record::from_host_local(&bytes, address, &self.now);
                    let is_host_local = record.is_some();
                    (record, is_host_local)
                }
            };
            found.push(AddressFile { address, path: self.path(&name), record, is_host_local });
        }
        found.sort_by_key(|look| look.address);
        Ok(found)
    }
}

fn writable(path: &Path) -> Result<(), StoreError> {
    access(path, AccessFlags::W_OK | AccessFlags::X_OK)
        .map_err(|errno| StoreError::io("write to", path, errno.into()))
}
