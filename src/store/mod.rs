//! The node's store: who has which address of a network, in files that a person can read.
//!
//! One directory a network, as host-local has it, under the same lock. A file named after each address is the
//! record and the only truth; what lies under `.sticky` is derived from the records (indexes as further names of
//! the same files, bitmaps, the page `state`) and is made anew whenever it cannot be trusted. So no verb walks the
//! directory, and nothing that is lost there loses an address.
//!
//! Must never: give an address out twice, trust a torn file, follow a link out of the data directory, or answer
//! before what it answered is on stable storage.

mod claimant_lock;
pub mod cluster;
mod disk;
mod error;
mod lock;
mod moment;
mod open;
pub mod records;

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use claimant_lock::ClaimantLock;
pub use cluster::decision::{Decision, PreparedSticky, Withdrawn};
pub use cluster::draft::Draft;
pub use cluster::pending_update::{PendingUpdate, Told};
pub use disk::{Disk, RealDisk};
pub use error::StoreError;
pub use moment::NodeTime;
pub use records::import::{ImportAction, ImportStep};
pub use records::list::{AddressFile, IndexEntry};
pub use records::record::{Claimant, Keep, Phase, Record, StickyBinding};
pub use records::state::VERSION;
pub use records::verify::VerifyFinding;

use nix::fcntl::OFlag;

use crate::names::{Attachment, NetworkName};
use lock::StoreLock;
use records::bitmaps::Bitmaps;
use records::state::StatePage;

/// The folder of what is derived from the records.
pub(crate) const DERIVED: &str = ".sticky";
const ATTACHMENTS: &str = ".sticky/attachments";
const CLAIMANTS: &str = ".sticky/claimants";
const BITMAPS: &str = ".sticky/used";
const ASIDE: &str = ".sticky/aside";
const STATE: &str = ".sticky/state";

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
    /// The store of `network` below `data_dir`. Nothing is touched yet. `patience` is how long to wait for the lock.
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

    /// Whether something lies where the record of this attachment would. A look without the lock: what it is, the lock's holder reads.
    pub fn has_record(&self, attachment: &Attachment) -> bool {
        self.path(&records::record::attachment_index_path(attachment)).symlink_metadata().is_ok()
    }

    /// The record behind a name of the directory; none where there is no such name or no record of ours in it.
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

/// Opens a file of ours, whatever somebody put in its place: a link is not followed, a pipe is not waited for.
fn open_plain(path: &Path, write: bool) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW).bits())
        .open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a plain file; remove it, it is made anew"))
}

/// No more than the first `most` bytes of an open file: ours are never longer.
fn first_bytes(file: &File, most: usize) -> io::Result<Vec<u8>> {
    use std::io::Read as _;
    let mut bytes = Vec::with_capacity(most);
    file.take(most as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A file's bytes and inode. What is no plain file has no bytes.
fn read_file(path: &Path) -> io::Result<(Vec<u8>, u64)> {
    use std::io::Read as _;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW).bits())
        .open(path)?;
    let meta = file.metadata()?;
    let mut bytes = Vec::new();
    if meta.is_file() {
        bytes.reserve(512);
        file.take(MAX_RECORD_BYTES).read_to_end(&mut bytes)?;
    }
    Ok((bytes, meta.ino()))
}

fn no_plain_file(error: &io::Error) -> bool {
    use nix::errno::Errno;
    matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ELOOP | Errno::ENXIO))
}

/// No record of ours comes near this; whatever is larger is not one.
const MAX_RECORD_BYTES: u64 = 64 * 1024;

#[allow(clippy::large_enum_variant, reason = "one at a time, never in a list")]
enum Read {
    Nothing,
    Ours(StoredRecord),
    Other { bytes: Vec<u8>, inode: u64 },
}

impl<D: Disk> LockedStore<'_, D> {
    /// What this attachment has.
    ///
    /// # Errors
    /// The disk fails.
    pub fn find_by_attachment(
        &mut self,
        attachment: &Attachment,
    ) -> Result<Option<StoredRecord>, StoreError> {
        let name = records::record::attachment_index_path(attachment);
        let found = self.follow_entry(&name)?;
        Ok(found.filter(|stored| stored.record.attachment == *attachment))
    }

    /// What is kept for this claimant, or what it has.
    ///
    /// # Errors
    /// The disk fails.
    pub fn find_by_claimant(&mut self, claimant: &Claimant) -> Result<Option<StoredRecord>, StoreError> {
        let name = claimant.index_path();
        let found = self.follow_entry(&name)?;
        Ok(found.filter(|stored| stored.record.claimant().as_ref() == Some(claimant)))
    }

    /// Who has this address. A file that is no record is set aside, and the address is free.
    ///
    /// # Errors
    /// The disk fails.
    pub fn at(&mut self, address: IpAddr) -> Result<Option<StoredRecord>, StoreError> {
        self.inspect_address(address)
    }

    /// The next free address of this range set, going round from the one given out last.
    ///
    /// # Errors
    /// The disk fails.
    pub fn next_free(
        &mut self,
        index: usize,
        set: &crate::alloc::RangeSet,
    ) -> Result<Option<IpAddr>, StoreError> {
        let after = self.state.cursors.get(&index).copied();
        crate::alloc::next_free(set, after, |group| self.occupied.bitmap(self.store, group))
    }

    /// Goes on behind `address` when range set `index` is next asked for a free one. Kept with the next change.
    pub fn set_cursor(&mut self, index: usize, address: IpAddr) {
        self.state.cursors.insert(index, address);
    }

    /// When this boot first looked into the store.
    pub fn first_opened_at(&self) -> &NodeTime {
        &self.state.first_opened_at
    }

    /// Everything kept for pods that are not there, oldest first. Reads one record a claimant: for exhaustion only.
    ///
    /// # Errors
    /// The disk fails.
    pub fn kept(&mut self) -> Result<Vec<StoredRecord>, StoreError> {
        let mut kept = Vec::new();
        for (entry, _) in records::list::names(&self.store.path(CLAIMANTS))? {
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

    /// The record behind an entry of [`Store::attachments_except`] or [`Store::claimants`], if it is still the one that was listed.
    ///
    /// # Errors
    /// The disk fails.
    pub fn find_by_entry(&mut self, entry: &IndexEntry) -> Result<Option<StoredRecord>, StoreError> {
        let found = self.follow_entry(&format!("{}/{}", entry.folder, entry.name))?;
        Ok(found.filter(|stored| stored.inode == entry.inode))
    }

    /// Has a record that is there already synced by the next commit.
    ///
    /// # Errors
    /// The record cannot be opened.
    pub fn sync_existing(&mut self, stored: &StoredRecord) -> Result<(), StoreError> {
        for address in &stored.record.addresses {
            let path = self.store.path(&address.to_string());
            self.unsynced.push(File::open(&path).map_err(|source| StoreError::io("open", &path, source))?);
        }
        self.names_changed = true;
        Ok(())
    }

    /// Gives the lock back and returns when all changes are on stable storage.
    ///
    /// # Errors
    /// The disk does not take it: the changes are made, but a loss of power may undo them.
    pub fn commit(self) -> Result<(), StoreError> {
        let Self { store, lock, unsynced, names_changed, .. } = self;
        // Others need not wait for the disk: what they may see early is answered to nobody before it is safe.
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

    /// The record behind an index entry, with those of its addresses that it still stands under: somebody may have
    /// taken one away by hand, and another pod may have it. An entry without any is removed.
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

/// The inode behind a name, without following links; none where there is no such name.
fn inode_of(path: &Path) -> Result<Option<u64>, StoreError> {
    match fs::symlink_metadata(path) {
        Ok(meta) => Ok(Some(meta.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StoreError::io("look at", path, source)),
    }
}
