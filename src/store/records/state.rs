//! The page `.sticky/state`: which version and boot the store is of, where the search for free addresses goes
//! on, and the change that is under way.
//!
//! It is one page, rewritten in place: within a boot a process that ends leaves the old page or the new one.
//! After a loss of power it may be anything, and is rebuilt from the records, which alone are the truth.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::store::error::cannot;
use crate::store::files::{address_of, first_bytes, if_there, open_plain};
use crate::store::{ATTACHMENTS, CLAIMANTS, Disk, NodeTime, Result, STATE, Store, StoreError};

/// The version of the layout that this program writes. host-local's directory counts as 0.
pub const VERSION: u32 = 1;

/// One page of memory: a write within it is whole or not at all when a process ends.
const PAGE_BYTES: usize = 4096;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StatePage {
    pub(crate) version: u32,
    /// Whether everything derived agrees with the records in this boot.
    pub(crate) reconciled: bool,
    /// By this boot.
    pub(crate) first_opened_at: NodeTime,
    /// The address given out last, by range set.
    #[serde(default)]
    pub(crate) cursors: BTreeMap<usize, IpAddr>,
    /// When the directory was last changed by us. Another time means that another program changed it.
    pub(crate) directory: DirectoryTime,
    /// The mark that all claims on this node's addresses are reserved here, if that is so in this boot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) seeded: Option<SeedMark>,
    /// The change that is under way, for the next one who comes if this one does not end it.
    #[serde(default)]
    pub(crate) change: Option<PendingChange>,
}

/// The time at which a directory last changed, as the file system has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DirectoryTime(i64, i64);

impl DirectoryTime {
    pub(crate) fn of(directory: &Path) -> io::Result<Self> {
        let meta = fs::metadata(directory)?;
        Ok(Self(meta.mtime(), meta.mtime_nsec()))
    }
}

/// The file of the mark that all claims are reserved, as the kernel has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SeedMark {
    inode: u64,
    changed: (i64, i64),
}

impl SeedMark {
    pub(crate) fn of(path: &Path) -> io::Result<Option<Self>> {
        let meta = if_there(fs::symlink_metadata(path))?;
        Ok(meta.map(|meta| Self { inode: meta.ino(), changed: (meta.ctime(), meta.ctime_nsec()) }))
    }
}

/// A change of names: those in `place` become the new record, those in `remove` are removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PendingChange {
    /// The new record's inode, to distinguish a change that was done from one that was undone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inode: Option<u64>,
    pub(crate) place: Vec<NamePlacement>,
    pub(crate) remove: Vec<NameRemoval>,
}

impl PendingChange {
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let placed = self.place.iter().map(|place| place.name.as_str());
        placed.chain(self.remove.iter().map(|removal| removal.name.as_str()))
    }

    /// Whether all names are ones that a record may have: whatever wrote the page, nothing else is touched.
    fn stays_inside(&self) -> bool {
        self.names().all(|name| {
            let mut folders = [ATTACHMENTS, CLAIMANTS].into_iter();
            match folders.find_map(|folder| name.strip_prefix(folder)?.strip_prefix('/')) {
                Some(entry) => !entry.contains('/') && entry != "." && entry != "..",
                None => address_of(name).is_some(),
            }
        })
    }
}

/// A name, relative to the network's directory, that becomes the new record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NamePlacement {
    pub(crate) name: String,
    /// The inode that may be replaced; any other one is not ours to replace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) replaces: Option<u64>,
}

/// A name to remove, if it still has this inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NameRemoval {
    pub(crate) name: String,
    pub(crate) inode: u64,
}

impl<D: Disk> Store<D> {
    /// The open page, if there is one, and what it says. Errors: it cannot be read, or is of a newer version.
    pub(crate) fn page(&self, write: bool) -> Result<(Option<File>, Option<StatePage>)> {
        let path = self.path(STATE);
        let read = || {
            let Some(file) = if_there(open_plain(&path, write))? else { return Ok((None, Vec::new())) };
            let bytes = first_bytes(&file, PAGE_BYTES)?;
            Ok((Some(file), bytes))
        };
        let (file, bytes) = read().map_err(cannot("read", &path))?;
        Ok((file, self.parse_page(&bytes)?))
    }

    pub(crate) fn parse_page(&self, bytes: &[u8]) -> Result<Option<StatePage>> {
        let newer = |found| StoreError::NewerVersion { path: self.root.clone(), found, known: VERSION };
        parse(bytes).map_err(newer)
    }
}

/// What a page says; none: it is to be rebuilt. Errors: the version, if this program does not know it.
fn parse(bytes: &[u8]) -> Result<Option<StatePage>, u32> {
    #[derive(Deserialize)]
    struct VersionOnly {
        version: u32,
    }
    match serde_json::from_slice(bytes) {
        Ok(VersionOnly { version }) if version > VERSION => Err(version),
        _ => {
            let stays_inside =
                |state: &StatePage| state.change.as_ref().is_none_or(PendingChange::stays_inside);
            Ok(serde_json::from_slice(bytes).ok().filter(stays_inside))
        }
    }
}

/// The page's bytes: padded with spaces, so that a shorter text leaves nothing of a longer one.
pub(crate) fn page(state: &StatePage) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(state)?;
    if bytes.len() >= PAGE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the change does not fit into one page"));
    }
    bytes.resize(PAGE_BYTES - 1, b' ');
    bytes.push(b'\n');
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_name(name: &str) -> Vec<u8> {
        let now = NodeTime::new(1_700_000_000, 1, "boot");
        let removal = NameRemoval { name: name.to_owned(), inode: 1 };
        let state = StatePage {
            version: VERSION,
            reconciled: true,
            first_opened_at: now,
            cursors: BTreeMap::new(),
            directory: DirectoryTime(1, 2),
            seeded: None,
            change: Some(PendingChange { remove: vec![removal], ..PendingChange::default() }),
        };
        page(&state).unwrap()
    }

    #[test]
    fn a_page_whose_change_names_other_files_is_not_trusted() {
        for name in ["10.1.0.2", "fd00::2", ".sticky/attachments/c,eth0", ".sticky/claimants/ns,p,eth0"] {
            assert!(matches!(parse(&with_name(name)), Ok(Some(_))), "{name}");
        }
        for name in ["../x", "/etc/passwd", "lock", ".sticky/attachments/../../x", ".sticky/claimants/..", ""]
        {
            assert!(matches!(parse(&with_name(name)), Ok(None)), "{name}");
        }
    }

    #[test]
    fn a_page_is_always_a_page_long_and_reads_back() {
        let bytes = with_name("10.1.0.2");
        assert_eq!(bytes.len(), PAGE_BYTES);
        assert!(matches!(parse(&bytes), Ok(Some(StatePage { reconciled: true, .. }))));
        assert!(matches!(parse(&bytes[..100]), Ok(None)));
        assert!(matches!(parse(b"{\"version\": 7}"), Err(7)));
    }
}
