//! The node's store: which pod has which address of a network, in files that a person can read.
//!
//! One directory per network, as host-local has it, under the same lock. A file named after each address is
//! the record and the only truth; what lies under `.sticky` is derived from the records (indexes as further
//! names of the same files, bitmaps, the page `state`) and is rebuilt whenever it cannot be trusted. So no
//! verb reads the whole directory, and nothing that is lost there loses an address.
//!
//! Must never: give an address out twice, trust a torn file, follow a link out of the data directory, or
//! answer before what it answered is on stable storage.

mod claimant_lock;
pub mod cluster;
mod disk;
mod error;
mod files;
mod lock;
mod moment;
mod open;
pub mod records;

use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) use claimant_lock::ClaimantLock;
pub use cluster::decision::{Decision, PreparedSticky, Withdrawn};
pub(crate) use cluster::draft::Draft;
pub use cluster::pending_update::{PendingUpdate, PendingUpdateKind};
pub use disk::{Disk, RealDisk};
pub use error::{Result, StoreError};
pub use moment::NodeTime;
pub(crate) use records::import::{ImportAction, ImportStep};
pub(crate) use records::list::{AddressFile, IndexEntry};
pub use records::record::{ClaimantKey, Record, RecordState, StickyBinding};
pub use records::state::VERSION;
pub(crate) use records::verify::VerifyFinding;

use crate::alloc::{self, RangeSet};
use crate::names::{Attachment, NetworkName};
use error::cannot;
use files::{inode_of, read_file};
use lock::StoreLock;
use records::bitmaps::Bitmaps;
use records::state::StatePage;

/// The folder of what is derived from the records.
pub(crate) const DERIVED: &str = ".sticky";
const ATTACHMENTS: &str = ".sticky/attachments";
const CLAIMANTS: &str = ".sticky/claimants";
const BITMAPS: &str = ".sticky/bitmaps";
const ASIDE: &str = ".sticky/aside";
const STATE: &str = ".sticky/state";
const KNOWN_BLOCKS: &str = ".sticky/blocks";
const SEEDED: &str = ".sticky/seeded";
const DRAFTS: &str = ".sticky/drafts";
const DETACHED_SNAPSHOTS: &str = ".sticky/detached";

/// A network's directory, not locked.
#[derive(Debug)]
pub struct Store<D: Disk = RealDisk> {
    disk: D,
    data_dir: PathBuf,
    root: PathBuf,
    now: NodeTime,
    timeout: Duration,
}

/// A record as it was found, with the inode that makes sure later that it is still the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredRecord {
    pub record: Record,
    inode: u64,
}

/// A network's directory under its lock: what is read stays true until this is dropped or committed.
///
/// Records are found and free addresses given out here, and records changed in `records/change.rs`; the files
/// of `cluster` have the methods for reservations, decisions, pending updates, drafts and snapshots.
#[derive(Debug)]
pub struct LockedStore<'a, D: Disk = RealDisk> {
    store: &'a Store<D>,
    lock: StoreLock,
    state: StatePage,
    page: File,
    occupied: Bitmaps,
    unsynced: Vec<File>,
    names_changed: bool,
    draft: Option<Draft>,
}

impl<D: Disk> Store<D> {
    /// Nothing is touched yet. `timeout` is how long to wait for the lock.
    pub fn new(disk: D, data_dir: &Path, network: &NetworkName, now: NodeTime, timeout: Duration) -> Self {
        let root = data_dir.join(network.as_str());
        Self { disk, data_dir: data_dir.to_owned(), root, now, timeout }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn now(&self) -> &NodeTime {
        &self.now
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// The inode behind a name of the directory; none where there is no such name.
    fn inode(&self, name: &str) -> Result<Option<u64>> {
        inode_of(&self.path(name))
    }

    /// Those of a record's addresses whose names still lead to it.
    fn standing(&self, stored: &StoredRecord) -> Result<Vec<IpAddr>> {
        let mut standing = Vec::new();
        for address in &stored.record.addresses {
            if self.inode(&address.to_string())? == Some(stored.inode) {
                standing.push(*address);
            }
        }
        Ok(standing)
    }

    /// Whether something lies where this record would. Only a read under the lock shows what it is.
    pub(crate) fn has_record(&self, attachment: &Attachment) -> bool {
        self.path(&records::record::attachment_index_path(attachment)).symlink_metadata().is_ok()
    }

    /// What is behind a name of the directory.
    fn read(&self, name: &str) -> Result<Read> {
        let Some((bytes, inode)) = read_file("read", &self.path(name))? else { return Ok(Read::Nothing) };
        Ok(match Record::from_bytes(&bytes) {
            Some(record) => Read::Ours(StoredRecord { record, inode }),
            None => Read::Other { bytes, inode },
        })
    }
}

#[allow(clippy::large_enum_variant, reason = "one at a time, never in a list")]
enum Read {
    Nothing,
    Ours(StoredRecord),
    Other { bytes: Vec<u8>, inode: u64 },
}

impl<D: Disk> LockedStore<'_, D> {
    pub fn find_by_attachment(&mut self, attachment: &Attachment) -> Result<Option<StoredRecord>> {
        let found = self.follow_entry(&records::record::attachment_index_path(attachment))?;
        Ok(found.filter(|stored| stored.record.attachment == *attachment))
    }

    /// What is kept for this claimant, or what it has.
    pub fn find_by_claimant(&mut self, claimant: &ClaimantKey) -> Result<Option<StoredRecord>> {
        let found = self.follow_entry(&claimant.index_path())?;
        Ok(found.filter(|stored| stored.record.claimant().as_ref() == Some(claimant)))
    }

    /// The next free address of this range set, going round from the one given out last.
    pub(crate) fn next_free(&mut self, index: usize, set: &RangeSet) -> Result<Option<IpAddr>> {
        let after = self.state.cursors.get(&index).copied();
        alloc::next_free(set, after, |group| self.occupied.bitmap(self.store, group))
    }

    /// The next search in range set `index` goes on behind `address`. Kept with the next change.
    pub(crate) fn set_cursor(&mut self, index: usize, address: IpAddr) {
        self.state.cursors.insert(index, address);
    }

    /// When this boot first looked into the store.
    pub(crate) fn first_opened_at(&self) -> &NodeTime {
        &self.state.first_opened_at
    }

    /// All that is kept and not attached, oldest first. Reads one record per claimant: for exhaustion only.
    pub(crate) fn kept_records(&mut self) -> Result<Vec<StoredRecord>> {
        let mut kept = Vec::new();
        for (entry, _) in files::names(&self.store.path(CLAIMANTS))? {
            if let Some(stored) = self.follow_entry(&format!("{CLAIMANTS}/{entry}"))?
                && !stored.record.is_attached(&self.store.now)
            {
                kept.push(stored);
            }
        }
        let age = |stored: &StoredRecord| self.store.now.since(&stored.record.since);
        kept.sort_by_key(|stored| std::cmp::Reverse(age(stored)));
        Ok(kept)
    }

    /// The record behind an entry, if it is still the one that was listed.
    pub(crate) fn find_by_entry(&mut self, entry: &IndexEntry) -> Result<Option<StoredRecord>> {
        let found = self.follow_entry(&format!("{}/{}", entry.folder, entry.name))?;
        Ok(found.filter(|stored| stored.inode == entry.inode))
    }

    /// Has a record that is there already synced by the next commit.
    pub(crate) fn sync_existing(&mut self, stored: &StoredRecord) -> Result<()> {
        for address in &stored.record.addresses {
            let path = self.store.path(&address.to_string());
            self.unsynced.push(File::open(&path).map_err(cannot("open", &path))?);
        }
        self.names_changed = true;
        Ok(())
    }

    /// Releases the lock and returns when all changes are on stable storage.
    /// Errors: the disk does not take it: the changes are made, but a loss of power may undo them.
    pub fn commit(self) -> Result<()> {
        let Self { store, lock, unsynced, names_changed, .. } = self;
        // Others need not wait for the disk: what they see early, no verb answers before it is on the disk.
        drop(lock);
        for file in &unsynced {
            store.disk.sync(file).map_err(cannot("sync a record in", &store.root))?;
        }
        if names_changed { store.sync_dir(&store.root) } else { Ok(()) }
    }

    /// The record behind an index entry, with those of its addresses whose names it still has: one may have
    /// been removed by hand, and another pod may have it. An entry without any is removed.
    fn follow_entry(&mut self, name: &str) -> Result<Option<StoredRecord>> {
        match self.store.read(name)? {
            Read::Nothing => return Ok(None),
            Read::Other { .. } => {}
            Read::Ours(mut stored) => {
                stored.record.addresses = self.store.standing(&stored)?;
                if !stored.record.addresses.is_empty() {
                    return Ok(Some(stored));
                }
            }
        }
        self.remove(&self.store.path(name))?;
        Ok(None)
    }
}
