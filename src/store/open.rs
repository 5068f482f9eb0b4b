//! Opening a network's directory: made if need be, locked, of a known version, and in order.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::store::lock::StoreLock;
use crate::store::records::bitmaps::Bitmaps;
use crate::store::records::reconcile::ReconcileDepth;
use crate::store::records::state;
use crate::store::records::state::{DirectoryTime, ParsedPage, StatePage};
use crate::store::{
    ATTACHMENTS, BITMAPS, CLAIMANTS, DERIVED, Disk, LockedStore, STATE, Store, StoreError, VERSION,
};

impl<D: Disk> Store<D> {
    /// Locks the store, and makes it if it is not there.
    /// Errors: the lock is not to be had in time, the disk fails, or the store is of a newer version.
    pub fn lock(&self) -> Result<LockedStore<'_, D>, StoreError> {
        if !self.is_there()? {
            self.make()?;
        }
        self.locked()
    }

    /// Locks the store if it is there, and makes nothing.
    pub(crate) fn lock_existing(&self) -> Result<Option<LockedStore<'_, D>>, StoreError> {
        if self.is_there()? { self.locked().map(Some) } else { Ok(None) }
    }

    /// Whether the network's directory is there, and no link leads out of the tree.
    pub(super) fn is_there(&self) -> Result<bool, StoreError> {
        for path in [&self.data_dir, &self.root] {
            match fs::symlink_metadata(path) {
                Ok(meta) if meta.is_symlink() => stays_inside(path)?,
                Ok(meta) if !meta.is_dir() => {
                    let source = io::Error::from(io::ErrorKind::NotADirectory);
                    return Err(StoreError::io("use", path, source));
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
                Err(source) => return Err(StoreError::io("look at", path, source)),
            }
        }
        Ok(true)
    }

    /// Makes the directories that are missing. [`Store::create_derived`] has them synced before anything is
    /// put in.
    fn make(&self) -> Result<(), StoreError> {
        let mut missing: Vec<&Path> = Vec::new();
        for path in self.root.ancestors() {
            match fs::metadata(path) {
                Ok(_) => break,
                Err(error) if error.kind() == io::ErrorKind::NotFound => missing.push(path),
                Err(source) => return Err(StoreError::io("look at", path, source)),
            }
        }
        for path in missing.iter().rev() {
            self.make_dir(path)?;
        }
        Ok(())
    }

    pub(super) fn make_dir(&self, path: &Path) -> Result<(), StoreError> {
        match self.disk.make_dir(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(StoreError::io("make the directory", path, error))
            }
            _ => Ok(()),
        }
    }

    fn locked(&self) -> Result<LockedStore<'_, D>, StoreError> {
        for name in [DERIVED, ATTACHMENTS, CLAIMANTS, BITMAPS] {
            let folder = self.path(name);
            if fs::symlink_metadata(&folder).is_ok_and(|meta| meta.is_symlink()) {
                stays_inside(&folder)?;
            }
        }
        let lock = StoreLock::acquire(&self.path("lock"), self.timeout)?;
        let path = self.path(STATE);
        let read = state::read(&path).map_err(|source| StoreError::io("read", &path, source))?;
        let changed =
            || DirectoryTime::of(&self.root).map_err(|source| StoreError::io("look at", &self.root, source));
        let (page, found) = match read {
            Some((page, bytes)) => (Some(page), state::parse(&bytes)),
            None => (None, ParsedPage::Nothing),
        };
        let known = match found {
            ParsedPage::Newer(found) => {
                return Err(StoreError::NewerVersion { path: self.root.clone(), found, known: VERSION });
            }
            ParsedPage::StatePage(state)
                if state.reconciled
                    && state.first_opened_at.boot() == self.now.boot()
                    && self.has_folders() =>
            {
                Some(state)
            }
            ParsedPage::StatePage(_) | ParsedPage::Nothing => None,
        };
        let depth = match &known {
            None => Some(ReconcileDepth::Everything),
            Some(state) if state.change.is_some() || state.directory != changed()? => {
                Some(ReconcileDepth::NewNames)
            }
            Some(_) => None,
        };
        let page = match page {
            Some(page) if known.is_some() || self.has_folders() => page,
            page => self.create_derived(page)?,
        };
        let state = match known {
            Some(state) => state,
            None => StatePage {
                version: VERSION,
                // Until everything was looked at: who comes after a crash starts again.
                reconciled: false,
                first_opened_at: self.now.clone(),
                cursors: self.host_local_cursors(),
                directory: changed()?,
                change: None,
            },
        };
        let mut locked = LockedStore {
            store: self,
            lock,
            state,
            page,
            occupied: Bitmaps::default(),
            unsynced: Vec::new(),
            names_changed: false,
            draft: None,
        };
        if let Some(depth) = depth {
            locked.reconcile(depth)?;
        }
        Ok(locked)
    }

    /// The folder of what is derived, and its page, empty. The directories above are synced first: a record
    /// that is answered for must not be lost with its directory.
    fn create_derived(&self, page: Option<File>) -> Result<File, StoreError> {
        let device = |path: &Path| fs::metadata(path).map(|meta| meta.dev()).ok();
        let own = device(&self.root);
        for above in self.root.ancestors().skip(1).take_while(|above| device(above) == own) {
            sync_dir(&self.disk, above)?;
        }
        for name in [DERIVED, ATTACHMENTS, CLAIMANTS, BITMAPS] {
            self.make_dir(&self.path(name))?;
        }
        let path = self.path(STATE);
        match page {
            Some(page) => Ok(page),
            None => self.disk.create(&path, b"").map_err(|source| StoreError::io("make", &path, source)),
        }
    }

    /// Whether the folders of what is derived are all there; one that was removed is made again.
    fn has_folders(&self) -> bool {
        [ATTACHMENTS, CLAIMANTS, BITMAPS].iter().all(|name| self.path(name).is_dir())
    }

    /// Where host-local would go on, if this was its directory.
    pub(super) fn host_local_cursors(&self) -> BTreeMap<usize, std::net::IpAddr> {
        let read = |index: usize| {
            let text = fs::read_to_string(self.path(&format!("last_reserved_ip.{index}"))).ok()?;
            Some((index, text.trim().parse().ok()?))
        };
        (0..MAX_CURSORS).map_while(read).collect()
    }
}

/// host-local numbers its cursors by range set; more sets than this are not looked for.
const MAX_CURSORS: usize = 16;

pub(super) fn sync_dir<D: Disk>(disk: &D, path: &Path) -> Result<(), StoreError> {
    File::open(path).and_then(|dir| disk.sync(&dir)).map_err(|source| StoreError::io("sync", path, source))
}

/// Refuses a link that leads out of the directory it lies in.
fn stays_inside(link: &Path) -> Result<(), StoreError> {
    let resolve = |path: &Path| {
        fs::canonicalize(path).map_err(|source| StoreError::io("follow the link", path, source))
    };
    let target = resolve(link)?;
    let tree: PathBuf = resolve(link.parent().unwrap_or(Path::new("/")))?;
    if target.starts_with(&tree) && target != tree {
        Ok(())
    } else {
        Err(StoreError::Escapes { path: link.to_owned(), target, tree })
    }
}
