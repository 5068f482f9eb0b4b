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
use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) use claimant_lock::ClaimantLock;
pub use cluster::decision::{Decision, PreparedSticky, Withdrawn};
pub(crate) use cluster::draft::Draft;
pub use cluster::pending_update::{PendingUpdate, PendingUpdateKind};
pub use disk::{Disk, RealDisk};
pub use error::StoreError;
pub use moment::NodeTime;
pub(crate) use records::import::{ImportAction, ImportStep};
pub(crate) use records::list::{AddressFile, IndexEntry};
pub use records::record::{ClaimantKey, Record, RecordState, StickyBinding};
pub use records::state::VERSION;
pub(crate) use records::verify::VerifyFinding;

use crate::names::{Attachment, NetworkName};
use files::{first_bytes, inode_of, no_plain_file, open_plain, read_file};
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
    /// What the record says.
    pub record: Record,
    inode: u64,
}

/// A network's directory under its lock: what is read stays true until this is dropped or committed.
///
/// Its methods by subject:
/// - records: `find_by_*`, `kept_records`, `put`, `put_reclaiming`, `release`, `keep_addresses`
/// - free addresses: `next_free`, `set_cursor`
/// - reservations (`cluster/reservation.rs`): `reserve`, `renew`, `mark_superseded`
/// - prepared decisions (`cluster/decision.rs`): `put_`, `find_`, `use_`, `withdraw_` and `remove_decision`,
///   `awaits_add`, `clear_attachment`
/// - pending updates (`cluster/pending_update.rs`): `put_`, `clear_` and `remove_pending_update`,
///   `pending_update_of`
/// - drafts and snapshots (`cluster/draft.rs`, `cluster/detached_snapshot.rs`)
/// - durability: `sync_existing`, `commit`
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
    /// The store of `network` below `data_dir`. Nothing is touched yet. `timeout` is how long to wait for the
    /// lock.
    pub fn new(disk: D, data_dir: &Path, network: &NetworkName, now: NodeTime, timeout: Duration) -> Self {
        let root = data_dir.join(network.as_str());
        Self { disk, data_dir: data_dir.to_owned(), root, now, timeout }
    }

    /// The network's directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The moment that this store takes for now.
    pub fn now(&self) -> &NodeTime {
        &self.now
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// Whether something lies where the record of this attachment would. Without the lock: only a read under
    /// the lock shows what it is.
    pub(crate) fn has_record(&self, attachment: &Attachment) -> bool {
        self.path(&records::record::attachment_index_path(attachment)).symlink_metadata().is_ok()
    }

    /// The record behind a name of the directory; none where there is no such name or no record of ours in
    /// it.
    fn read(&self, name: &str) -> Result<Read, StoreError> {
        let path = self.path(name);
        match read_file(&path) {
            // A link or a socket is no record, wherever it leads.
            Err(error) if no_plain_file(&error) => Ok(match inode_of(&path)? {
                Some(inode) => Read::Other { bytes: Vec::new(), inode },
                None => Read::Nothing,
            }),
            Ok((bytes, inode)) => Ok(match Record::from_bytes(&bytes) {
                Some(record) => Read::Ours(StoredRecord { record, inode }),
                None => Read::Other { bytes, inode },
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Read::Nothing),
            Err(source) => Err(StoreError::io("read", &path, source)),
        }
    }
}

#[allow(clippy::large_enum_variant, reason = "one at a time, never in a list")]
enum Read {
    Nothing,
    Ours(StoredRecord),
    Other { bytes: Vec<u8>, inode: u64 },
}

impl<D: Disk> LockedStore<'_, D> {
    pub fn find_by_attachment(
        &mut self,
        attachment: &Attachment,
    ) -> Result<Option<StoredRecord>, StoreError> {
        let name = records::record::attachment_index_path(attachment);
        let found = self.follow_entry(&name)?;
        Ok(found.filter(|stored| stored.record.attachment == *attachment))
    }

    /// What is kept for this claimant, or what it has.
    pub fn find_by_claimant(&mut self, claimant: &ClaimantKey) -> Result<Option<StoredRecord>, StoreError> {
        let name = claimant.index_path();
        let found = self.follow_entry(&name)?;
        Ok(found.filter(|stored| stored.record.claimant().as_ref() == Some(claimant)))
    }

    /// The next free address of this range set, going round from the one given out last.
    pub(crate) fn next_free(
        &mut self,
        index: usize,
        set: &crate::alloc::RangeSet,
    ) -> Result<Option<IpAddr>, StoreError> {
        let after = self.state.cursors.get(&index).copied();
        crate::alloc::next_free(set, after, |group| self.occupied.bitmap(self.store, group))
    }

    /// Goes on behind `address` when range set `index` is next asked for a free one. Kept with the next
    /// change.
    pub(crate) fn set_cursor(&mut self, index: usize, address: IpAddr) {
        self.state.cursors.insert(index, address);
    }

    /// When this boot first looked into the store.
    pub(crate) fn first_opened_at(&self) -> &NodeTime {
        &self.state.first_opened_at
    }

    /// All records that are kept and not attached, oldest first. Reads one record per claimant: for
    /// exhaustion only.
    pub(crate) fn kept_records(&mut self) -> Result<Vec<StoredRecord>, StoreError> {
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

    /// The record behind an entry of [`Store::attachments_except`] or [`Store::claimants`], if it is still
    /// the one that was listed.
    pub(crate) fn find_by_entry(&mut self, entry: &IndexEntry) -> Result<Option<StoredRecord>, StoreError> {
        let found = self.follow_entry(&format!("{}/{}", entry.folder, entry.name))?;
        Ok(found.filter(|stored| stored.inode == entry.inode))
    }

    /// Has a record that is there already synced by the next commit.
    /// Errors: the record cannot be opened.
    pub(crate) fn sync_existing(&mut self, stored: &StoredRecord) -> Result<(), StoreError> {
        for address in &stored.record.addresses {
            let path = self.store.path(&address.to_string());
            self.unsynced.push(File::open(&path).map_err(|source| StoreError::io("open", &path, source))?);
        }
        self.names_changed = true;
        Ok(())
    }

    /// Releases the lock and returns when all changes are on stable storage.
    /// Errors: the disk does not take it: the changes are made, but a loss of power may undo them.
    pub fn commit(self) -> Result<(), StoreError> {
        let Self { store, lock, unsynced, names_changed, .. } = self;
        // Others need not wait for the disk: what they see early, no verb answers before it is on the disk.
        drop(lock);
        for file in &unsynced {
            store
                .disk
                .sync(file)
                .map_err(|source| StoreError::io("sync a record in", &store.root, source))?;
        }
        if names_changed {
            open::sync_dir(&store.disk, &store.root)?;
        }
        Ok(())
    }

    /// The record behind an index entry, with those of its addresses whose names it still has: one may have
    /// been removed by hand, and another pod may have it. An entry without any is removed.
    fn follow_entry(&mut self, name: &str) -> Result<Option<StoredRecord>, StoreError> {
        let (inode, stored) = match self.store.read(name)? {
            Read::Nothing => return Ok(None),
            Read::Ours(stored) => (stored.inode, Some(stored)),
            Read::Other { inode, .. } => (inode, None),
        };
        if let Some(mut stored) = stored {
            let mut standing = Vec::new();
            for address in &stored.record.addresses {
                if inode_of(&self.store.path(&address.to_string()))? == Some(inode) {
                    standing.push(*address);
                }
            }
            if !standing.is_empty() {
                stored.record.addresses = standing;
                return Ok(Some(stored));
            }
        }
        let path = self.store.path(name);
        self.store.disk.remove(&path).map_err(|source| StoreError::io("remove", &path, source))?;
        Ok(None)
    }
}
