//! Opening a network's directory: made if need be, locked, of a known version, and in order.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::store::error::cannot;
use crate::store::files::if_there;
use crate::store::lock::StoreLock;
use crate::store::records::bitmaps::Bitmaps;
use crate::store::records::reconcile::ReconcileDepth;
use crate::store::records::state::{DirectoryTime, StatePage};
use crate::store::{ATTACHMENTS, BITMAPS, CLAIMANTS, DERIVED, STATE};
use crate::store::{Disk, LockedStore, Result, Store, StoreError, VERSION};

/// host-local numbers its cursors by range set; more sets than this are not looked for.
const MAX_CURSORS: usize = 16;

impl<D: Disk> Store<D> {
    /// Locks the store, and makes it if it is not there.
    /// Errors: the lock is not to be had in time, the disk fails, or the store is of a newer version.
    pub fn lock(&self) -> Result<LockedStore<'_, D>> {
        if !self.is_there()? {
            self.make()?;
        }
        self.locked()
    }

    /// Locks the store if it is there, and makes nothing.
    pub(crate) fn lock_existing(&self) -> Result<Option<LockedStore<'_, D>>> {
        if self.is_there()? { self.locked().map(Some) } else { Ok(None) }
    }

    /// Whether the network's directory is there, and no link leads out of the tree.
    pub(super) fn is_there(&self) -> Result<bool> {
        for path in [&self.data_dir, &self.root] {
            match if_there(fs::symlink_metadata(path)).map_err(cannot("look at", path))? {
                None => return Ok(false),
                Some(meta) if meta.is_symlink() => stays_inside(path)?,
                Some(meta) if !meta.is_dir() => {
                    return Err(cannot("use", path)(io::ErrorKind::NotADirectory.into()));
                }
                Some(_) => {}
            }
        }
        Ok(true)
    }

    /// Makes the missing directories. [`Store::create_derived`] has them synced before anything is put in.
    fn make(&self) -> Result<()> {
        let mut missing: Vec<&Path> = Vec::new();
        for path in self.root.ancestors() {
            if if_there(fs::metadata(path)).map_err(cannot("look at", path))?.is_some() {
                break;
            }
            missing.push(path);
        }
        missing.into_iter().rev().try_for_each(|path| self.make_dir(path))
    }

    pub(super) fn make_dir(&self, path: &Path) -> Result<()> {
        match self.disk.make_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            made => made.map_err(cannot("make the directory", path)),
        }
    }

    fn locked(&self) -> Result<LockedStore<'_, D>> {
        for name in [DERIVED, ATTACHMENTS, CLAIMANTS, BITMAPS] {
            let folder = self.path(name);
            if fs::symlink_metadata(&folder).is_ok_and(|meta| meta.is_symlink()) {
                stays_inside(&folder)?;
            }
        }
        let lock = StoreLock::acquire(&self.path("lock"), self.timeout)?;
        let changed = || DirectoryTime::of(&self.root).map_err(cannot("look at", &self.root));
        let (page, found) = self.page(true)?;
        let known = found.filter(|state| {
            state.reconciled && state.first_opened_at.boot() == self.now.boot() && self.has_folders()
        });
        let page = match page {
            Some(page) if known.is_some() || self.has_folders() => page,
            page => self.create_derived(page)?,
        };
        let (state, depth) = match known {
            Some(state) => {
                let is_outdated = state.change.is_some() || state.directory != changed()?;
                (state, is_outdated.then_some(ReconcileDepth::NewNames))
            }
            None => {
                let state = StatePage {
                    version: VERSION,
                    // Until everything was looked at: who comes after a crash starts again.
                    reconciled: false,
                    first_opened_at: self.now.clone(),
                    cursors: self.host_local_cursors(),
                    directory: changed()?,
                    seeded: None,
                    change: None,
                };
                (state, Some(ReconcileDepth::Everything))
            }
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
    fn create_derived(&self, page: Option<File>) -> Result<File> {
        let device = |path: &Path| fs::metadata(path).map(|meta| meta.dev()).ok();
        let own = device(&self.root);
        for above in self.root.ancestors().skip(1).take_while(|above| device(above) == own) {
            self.sync_dir(above)?;
        }
        for name in [DERIVED, ATTACHMENTS, CLAIMANTS, BITMAPS] {
            self.make_dir(&self.path(name))?;
        }
        let path = self.path(STATE);
        page.map_or_else(|| self.disk.create(&path, b"").map_err(cannot("make", &path)), Ok)
    }

    /// Whether the folders of what is derived are all there; one that was removed is made again.
    fn has_folders(&self) -> bool {
        [ATTACHMENTS, CLAIMANTS, BITMAPS].iter().all(|name| self.path(name).is_dir())
    }

    /// Where host-local would go on, if this was its directory.
    pub(super) fn host_local_cursors(&self) -> BTreeMap<usize, IpAddr> {
        let read = |index: usize| {
            let text = fs::read_to_string(self.path(&format!("last_reserved_ip.{index}"))).ok()?;
            Some((index, text.trim().parse().ok()?))
        };
        (0..MAX_CURSORS).map_while(read).collect()
    }

    pub(super) fn sync_dir(&self, path: &Path) -> Result<()> {
        File::open(path).and_then(|dir| self.disk.sync(&dir)).map_err(cannot("sync", path))
    }
}

/// Refuses a link that leads out of the directory it lies in.
fn stays_inside(link: &Path) -> Result<()> {
    let resolve = |path: &Path| fs::canonicalize(path).map_err(cannot("follow the link", path));
    let target = resolve(link)?;
    let tree = resolve(link.parent().unwrap_or(Path::new("/")))?;
    if target.starts_with(&tree) && target != tree {
        Ok(())
    } else {
        Err(StoreError::Escapes { path: link.to_owned(), target, tree })
    }
}
