//! Putting a file onto the host: at every instant its name is the old file or the new one, for every process
//! that reads or runs it.
//!
//! Must never write into a file that is there: a plugin that runs keeps its inode to the end of its ADD.

use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use nix::unistd::{getegid, geteuid};

use crate::agent::install::error::InstallError;

/// Unfinished files have this name. Runtimes skip it: it has none of their endings.
const UNFINISHED: &str = ".sticky-ipam.new.";
/// An unfinished file of this age is not written any more.
const ABANDONED: Duration = Duration::from_secs(600);
/// Files are compared in pieces of this size: the plugin need not fit into the agent's memory.
const PIECE: usize = 64 * 1024;
/// Files are copied in pieces of this size. What is written in large pieces is in large pieces in the page
/// cache, and a program that is started from it has fewer page faults: a twentieth of the time of an ADD by
/// the API server. The kernel keeps no larger ones.
const COPIED: usize = 2 * 1024 * 1024;

static WRITTEN: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Clone, Copy)]
pub(super) enum Content<'a> {
    Bytes(&'a [u8]),
    CopyOf(&'a Path),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileChange {
    Unchanged,
    Created,
    /// It was another, or had other rights.
    Replaced,
}

/// Enough of a file to see that it was not changed: no program can set the time of its last change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fingerprint {
    file: (u64, u64),
    size: u64,
    changed: (i64, i64),
}

impl Fingerprint {
    fn of(meta: &Metadata) -> Self {
        Self { file: (meta.dev(), meta.ino()), size: meta.size(), changed: (meta.ctime(), meta.ctime_nsec()) }
    }
}

/// Makes sure that `path` is a plain file of ours with this content and mode. `seen` is what it looked like
/// when its content was last compared; a file that still looks so is not read again.
pub(super) fn ensure(
    path: &Path,
    content: Content<'_>,
    mode: u32,
    seen: &mut Option<Fingerprint>,
) -> Result<FileChange, InstallError> {
    let meta = metadata(path)?;
    if let Some(meta) = &meta {
        let now = Fingerprint::of(meta);
        if seen.as_ref() == Some(&now) {
            return Ok(FileChange::Unchanged);
        }
        if is_right(meta, mode) && holds(path, content)? {
            *seen = Some(now);
            return Ok(FileChange::Unchanged);
        }
    }
    put(path, content, mode)?;
    *seen = metadata(path)?.as_ref().map(Fingerprint::of);
    Ok(if meta.is_some() { FileChange::Replaced } else { FileChange::Created })
}

/// The file itself, not what a link leads to.
pub(super) fn metadata(path: &Path) -> Result<Option<Metadata>, InstallError> {
    match fs::symlink_metadata(path) {
        Ok(meta) => Ok(Some(meta)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(InstallError::io("read the metadata of", path)(source)),
    }
}

fn is_right(meta: &Metadata, mode: u32) -> bool {
    meta.is_file()
        && meta.mode() & 0o7777 == mode
        && (meta.uid(), meta.gid()) == (geteuid().as_raw(), getegid().as_raw())
}

fn holds(path: &Path, content: Content<'_>) -> Result<bool, InstallError> {
    let same = match content {
        Content::Bytes(bytes) => fs::read(path).map(|found| found == bytes),
        Content::CopyOf(from) => {
            let source = open(from)?;
            File::open(path).and_then(|file| same_bytes(source, file))
        }
    };
    same.map_err(InstallError::io("read", path))
}

fn open(from: &Path) -> Result<File, InstallError> {
    File::open(from).map_err(InstallError::io("read", from))
}

fn same_bytes(mut one: File, mut other: File) -> io::Result<bool> {
    if one.metadata()?.len() != other.metadata()?.len() {
        return Ok(false);
    }
    loop {
        let (left, right) = (next_piece(&mut one, PIECE)?, next_piece(&mut other, PIECE)?);
        if left != right || left.is_empty() {
            return Ok(left == right);
        }
    }
}

/// The next bytes of a file, as many as this if it has so many.
fn next_piece(file: &mut File, size: usize) -> io::Result<Vec<u8>> {
    let mut piece = Vec::with_capacity(size);
    file.take(size as u64).read_to_end(&mut piece)?;
    Ok(piece)
}

/// Copies a file as programs are installed.
/// Errors: one of the two cannot be read or written.
pub fn copy(from: &mut File, to: &mut File) -> io::Result<()> {
    loop {
        let piece = next_piece(from, COPIED)?;
        if piece.is_empty() {
            return Ok(());
        }
        to.write_all(&piece)?;
    }
}

fn put(path: &Path, content: Content<'_>, mode: u32) -> Result<(), InstallError> {
    let folder = folder_of(path);
    fs::create_dir_all(folder).map_err(InstallError::io("make the folder", folder))?;
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    #[expect(clippy::disallowed_methods, reason = "part of a file name that no other container chooses")]
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    // The agent has the same pid in every container, so a pid alone is not unique.
    let name = format!("{UNFINISHED}{}.{number}.{}", std::process::id(), since.as_nanos());
    let unfinished = Unfinished(folder.join(name));
    unfinished.write(content, mode)?;
    fs::rename(&unfinished.0, path).map_err(InstallError::io("put in place", path))?;
    sync_folder(folder)
}

/// Removes a file if it exists. Returns whether it did.
pub(super) fn remove(path: &Path) -> Result<bool, InstallError> {
    match fs::remove_file(path) {
        Ok(()) => sync_folder(folder_of(path)).map(|()| true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(source) => Err(InstallError::io("remove", path)(source)),
    }
}

/// Makes a folder that no other user may read, or removes the rights of others from an existing one.
pub(super) fn private_folder(folder: &Path) -> Result<(), InstallError> {
    let failed = |source| InstallError::io("make the folder", folder)(source);
    if let Some(above) = folder.parent() {
        fs::create_dir_all(above).map_err(failed)?;
    }
    match DirBuilder::new().mode(0o700).create(folder) {
        Ok(()) => sync_folder(folder_of(folder)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let meta = fs::symlink_metadata(folder).map_err(failed)?;
            if meta.is_dir() && meta.mode() & 0o7777 != 0o700 {
                fs::set_permissions(folder, fs::Permissions::from_mode(0o700)).map_err(failed)?;
            }
            Ok(())
        }
        Err(source) => Err(failed(source)),
    }
}

/// Removes what a killed agent left half written in a folder.
pub(super) fn sweep(folder: &Path, now: SystemTime) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let unfinished = entry.file_name().to_string_lossy().starts_with(UNFINISHED);
        let written = entry.metadata().and_then(|meta| meta.modified());
        let age = written.ok().and_then(|written| now.duration_since(written).ok());
        if unfinished && age.is_some_and(|age| age >= ABANDONED) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

fn sync_folder(folder: &Path) -> Result<(), InstallError> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(InstallError::io("sync", folder))
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// A file that is removed unless it was renamed.
struct Unfinished(PathBuf);

impl Unfinished {
    fn write(&self, content: Content<'_>, mode: u32) -> Result<(), InstallError> {
        let failed = |source| InstallError::io("write", &self.0)(source);
        // Private until it is whole, so that a secret is never readable for an instant.
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&self.0);
        let mut file = file.map_err(failed)?;
        match content {
            Content::Bytes(bytes) => file.write_all(bytes).map_err(failed)?,
            Content::CopyOf(from) => copy(&mut open(from)?, &mut file).map_err(failed)?,
        }
        fchown(&file, Some(geteuid().as_raw()), Some(getegid().as_raw())).map_err(failed)?;
        file.set_permissions(fs::Permissions::from_mode(mode)).map_err(failed)?;
        file.sync_all().map_err(failed)
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}
