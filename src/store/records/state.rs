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

use crate::store::NodeTime;

/// The version of the layout that this program writes. host-local's directory counts as 0.
pub const VERSION: u32 = 1;

/// One page of memory: a write within it is whole or not at all when a process ends.
const PAGE_BYTES: usize = 4096;

/// What the page says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StatePage {
    pub(crate) version: u32,
    /// Whether everything derived agrees with the records in this boot.
    pub(crate) reconciled: bool,
    /// When this boot first looked into the store.
    pub(crate) first_opened_at: NodeTime,
    /// The address given out last, by range set.
    #[serde(default)]
    pub(crate) cursors: BTreeMap<usize, IpAddr>,
    /// When the directory was last changed by us. Another time means that another program changed it.
    pub(crate) directory: DirectoryTime,
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
    /// Whether all names are ones that a record may have: whatever wrote the page, nothing else is touched.
    fn stays_inside(&self) -> bool {
        let placed = self.place.iter().map(|place| &place.name);
        placed.chain(self.remove.iter().map(|removal| &removal.name)).all(|name| {
            let entry = [crate::store::ATTACHMENTS, crate::store::CLAIMANTS]
                .iter()
                .find_map(|folder| name.strip_prefix(folder)?.strip_prefix('/'));
            match entry {
                Some(entry) => !entry.contains('/') && entry != "." && entry != "..",
                None => crate::store::files::address_of(name).is_some(),
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

/// What a look at the page found.
pub(crate) enum ParsedPage {
    /// A page of this version.
    StatePage(StatePage),
    /// A page of a version that this program does not know.
    Newer(u32),
    /// No page, or one that cannot be read: to be rebuilt.
    Nothing,
}

pub(crate) fn parse(bytes: &[u8]) -> ParsedPage {
    #[derive(Deserialize)]
    struct VersionOnly {
        version: u32,
    }
    match serde_json::from_slice::<VersionOnly>(bytes) {
        Ok(VersionOnly { version }) if version > VERSION => ParsedPage::Newer(version),
        Ok(_) => match serde_json::from_slice::<StatePage>(bytes) {
            Ok(state) if state.change.as_ref().is_none_or(PendingChange::stays_inside) => {
                ParsedPage::StatePage(state)
            }
            _ => ParsedPage::Nothing,
        },
        Err(_) => ParsedPage::Nothing,
    }
}

pub(crate) fn read(path: &Path) -> io::Result<Option<(File, Vec<u8>)>> {
    match crate::store::open_plain(path, true) {
        Ok(file) => {
            let bytes = crate::store::first_bytes(&file, PAGE_BYTES)?;
            Ok(Some((file, bytes)))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// What the page says, read without the lock.
pub(crate) fn read_unlocked(path: &Path) -> io::Result<ParsedPage> {
    match crate::store::open_plain(path, false) {
        Ok(file) => Ok(parse(&crate::store::first_bytes(&file, PAGE_BYTES)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(ParsedPage::Nothing),
        Err(error) => Err(error),
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
            change: Some(PendingChange { remove: vec![removal], ..PendingChange::default() }),
        };
        page(&state).unwrap()
    }

    #[test]
    fn a_page_whose_change_names_other_files_is_not_trusted() {
        for name in ["10.1.0.2", "fd00::2", ".sticky/attachments/c,eth0", ".sticky/claimants/ns,p,eth0"] {
            assert!(matches!(parse(&with_name(name)), ParsedPage::StatePage(_)), "{name}");
        }
        for name in ["../x", "/etc/passwd", "lock", ".sticky/attachments/../../x", ".sticky/claimants/..", ""]
        {
            assert!(matches!(parse(&with_name(name)), ParsedPage::Nothing), "{name}");
        }
    }

    #[test]
    fn a_page_is_always_a_page_long_and_reads_back() {
        let bytes = with_name("10.1.0.2");
        assert_eq!(bytes.len(), PAGE_BYTES);
        assert!(matches!(parse(&bytes), ParsedPage::StatePage(StatePage { reconciled: true, .. })));
        assert!(matches!(parse(&bytes[..100]), ParsedPage::Nothing));
        assert!(matches!(parse(b"{\"version\": 7}"), ParsedPage::Newer(7)));
    }
}
