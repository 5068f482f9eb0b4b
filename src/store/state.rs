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

use super::Moment;

/// The version of the layout that this program writes. host-local's directory counts as 0.
pub const VERSION: u32 = 1;

/// One page of memory: a write within it is whole or not at all when a process ends.
const PAGE: usize = 4096;

/// What the page says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) version: u32,
    /// Whether everything derived was brought into step with the records in this boot.
    pub(super) in_order: bool,
    /// When this boot first looked into the store.
    pub(super) first_look: Moment,
    /// The address given out last, by range set.
    #[serde(default)]
    pub(super) cursors: BTreeMap<usize, IpAddr>,
    /// When the directory was last changed by us. Another time means that somebody else was here.
    pub(super) directory: Changed,
    /// The change that is under way, for the next one who comes if this one does not end it.
    #[serde(default)]
    pub(super) change: Option<Change>,
}

/// The time at which a directory last changed, as the file system tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Changed(i64, i64);

impl Changed {
    pub(super) fn of(directory: &Path) -> io::Result<Self> {
        let meta = fs::metadata(directory)?;
        Ok(Self(meta.mtime(), meta.mtime_nsec()))
    }
}

/// A change of names: those in `place` shall be the new record, those in `remove` shall be gone.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Change {
    pub(super) place: Vec<Place>,
    pub(super) remove: Vec<Removal>,
}

/// A name, relative to the network's directory, that shall be the new record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Place {
    pub(super) name: String,
    /// The inode that may be replaced; any other one belongs to somebody else.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) replaces: Option<u64>,
}

/// A name that shall be gone, if it is still this inode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Removal {
    pub(super) name: String,
    pub(super) inode: u64,
}

/// What a look at the page found.
pub(super) enum Found {
    /// A page of this version.
    State(State),
    /// A page of a version that this program does not know.
    Newer(u32),
    /// No page, or one that cannot be read: to be made anew.
    Nothing,
}

pub(super) fn parse(bytes: &[u8]) -> Found {
    #[derive(Deserialize)]
    struct VersionOnly {
        version: u32,
    }
    match serde_json::from_slice::<VersionOnly>(bytes) {
        Ok(VersionOnly { version }) if version > VERSION => Found::Newer(version),
        Ok(_) => serde_json::from_slice(bytes).map_or(Found::Nothing, Found::State),
        Err(_) => Found::Nothing,
    }
}

pub(super) fn read(path: &Path) -> io::Result<Option<(File, Vec<u8>)>> {
    use std::io::Read;
    let mut file = match fs::OpenOptions::new().read(true).write(true).open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut bytes = Vec::with_capacity(PAGE);
    file.read_to_end(&mut bytes)?;
    Ok(Some((file, bytes)))
}

/// The page's bytes: padded with spaces, so that a shorter text leaves nothing of a longer one.
pub(super) fn page(state: &State) -> io::Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec(state)?;
    if bytes.len() >= PAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the change does not fit into one page"));
    }
    bytes.resize(PAGE - 1, b' ');
    bytes.push(b'\n');
    Ok(bytes)
}
