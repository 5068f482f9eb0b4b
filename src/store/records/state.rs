//! The page `.sticky/state`: which version and boot the store is of, where the search for free addresses goes on,
//! and the change that is under way.
//!
//! It is one page, rewritten in place: within a boot a process that ends leaves the old page or the new one. After
//! a loss of power it may be anything, and is made anew from the records, which alone are the truth.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::store::Moment;

/// The version of the layout that this program writes. host-local's directory counts as 0.
pub const VERSION: u32 = 1;

/// One page of memory: a write within it is whole or not at all when a process ends.
const PAGE: usize = 4096;

/// What the page says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) version: u32,
    /// Whether everything derived was brought into step with the records in this boot.
    pub(crate) in_order: bool,
    /// When this boot first looked into the store.
    pub(crate) first_look: Moment,
    /// The address given out last, by range set.
    #[serde(default)]
    pub(crate) cursors: BTreeMap<usize, IpAddr>,
    /// When the directory was last changed by us. Another time means that somebody else was here.
    pub(crate) directory: Changed,
    /// The change that is under way, for the next one who comes if this one does not end it.
    #[serde(default)]
    pub(crate) change: Option<Change>,
}

/// The time at which a directory last changed, as the file system tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Changed(i64, i64);

impl Changed {
    pub(crate) fn of(directory: &Path) -> io::Result<Self> {
        let meta = fs::metadata(directory)?;
        Ok(Self(meta.mtime(), meta.mtime_nsec()))
    }
}

/// A change of names: those in `place` shall be the new record, those in `remove` shall be gone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Change {
    /// The new record's inode, to tell a change that was done from one that was taken back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) inode: Option<u64>,
    pub(crate) place: Vec<Place>,
    pub(crate) remove: Vec<Removal>,
}

impl Change {
    /// Whether all names are ones that a record may have: whatever wrote the page, nothing else is touched.
    fn stays_inside(&self) -> bool {
        let placed = self.place.iter().map(|place| &place.name);
        placed.chain(self.remove.iter().map(|removal| &removal.name)).all(|name| {
            let entry = [crate::store::ATTACHMENTS, crate::store::CLAIMANTS]
                .iter()
                .find_map(|folder| name.strip_prefix(folder)?.strip_prefix('/'));
            match entry {
                Some(entry) => !entry.contains('/') && entry != "." && entry != "..",
                None => crate::store::records::reconcile::address_of(name).is_some(),
            }
        })
    }
}

/// A name, relative to the network's directory, that shall be the new record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) name: String,
    /// The inode that may be replaced; any other one belongs to somebody else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) replaces: Option<u64>,
}

/// A name that shall be gone, if it is still this inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Removal {
    pub(crate) name: String,
    pub(crate) inode: u64,
}

/// What a look at the page found.
pub(crate) enum Found {
    /// A page of this version.
    State(State),
    /// A page of a version that this program does not know.
    Newer(u32),
    /// No page, or one that cannot be read: to be made anew.
    Nothing,
}

pub(crate) fn parse(bytes: &[u8]) -> Found {
    #[derive(Deserialize)]
    struct VersionOnly {
        version: u32,
    }
    match serde_json::from_slice::<VersionOnly>(bytes) {
        Ok(VersionOnly { version }) if version > VERSION => Found::Newer(version),
        Ok(_) => match serde_json::from_slice::<State>(bytes) {
            Ok(state) if state.change.as_ref().is_none_or(Change::stays_inside) => Found::State(state),
            _ => Found::Nothing,
        },
        Err(_) => Found::Nothing,
    }
}

pub(crate) fn read(path: &Path) -> io::Result<Option<(File, Vec<u8>)>> {
    match crate::store::open_plain(path, true) {
        Ok(file) => {
            let bytes = crate::store::first_bytes(&file, PAGE)?;
            Ok(Some((file, bytes)))
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// What the page says to somebody who does not have the lock and changes nothing.
pub(crate) fn glance(path: &Path) -> io::Result<Found> {
    match crate::store::open_plain(path, false) {
        Ok(file) => Ok(parse(&crate::store::first_bytes(&file, PAGE)?)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Found::Nothing),
        Err(error) => Err(error),
    }
}

/// The page's bytes: padded with spaces, so that a shorter text leaves nothing of a longer one.
pub(crate) fn page(state: &State) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(state)?;
    if bytes.len() >= PAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the change does not fit into one page"));
    }
    bytes.resize(PAGE - 1, b' ');
    bytes.push(b'\n');
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_name(name: &str) -> Vec<u8> {
        let now = Moment::new(1_700_000_000, 1, "boot");
        let removal = Removal { name: name.to_owned(), inode: 1 };
        let state = State {
            version: VERSION,
            in_order: true,
            first_look: now,
            cursors: BTreeMap::new(),
            directory: Changed(1, 2),
            change: Some(Change { remove: vec![removal], ..Change::default() }),
        };
        page(&state).unwrap()
    }

    #[test]
    fn a_page_whose_change_names_other_files_is_not_trusted() {
        for name in ["10.1.0.2", "fd00::2", ".sticky/attachments/c,eth0", ".sticky/claimants/ns,p,eth0"] {
            assert!(matches!(parse(&with_name(name)), Found::State(_)), "{name}");
        }
        for name in ["../x", "/etc/passwd", "lock", ".sticky/attachments/../../x", ".sticky/claimants/..", ""]
        {
            assert!(matches!(parse(&with_name(name)), Found::Nothing), "{name}");
        }
    }

    #[test]
    fn a_page_is_always_a_page_long_and_reads_back() {
        let bytes = with_name("10.1.0.2");
        assert_eq!(bytes.len(), PAGE);
        assert!(matches!(parse(&bytes), Found::State(State { in_order: true, .. })));
        assert!(matches!(parse(&bytes[..100]), Found::Nothing));
        assert!(matches!(parse(b"{\"version\": 7}"), Found::Newer(7)));
    }
}
