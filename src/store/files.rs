//! Reading files and directories of the store. A link is not followed and a pipe is not waited for, whatever
//! was put in a file's place. Must never change anything: changes go through [`super::disk`].

use std::fs::{self, File, OpenOptions};
use std::io;
use std::net::IpAddr;
use std::os::unix::fs::{DirEntryExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::OFlag;

use super::error::StoreError;

/// Opens a file of ours; what is no plain file is an error.
pub(super) fn open_plain(path: &Path, write: bool) -> io::Result<File> {
    let file = OpenOptions::new()
        .read(true)
        .write(write)
        .custom_flags((OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW).bits())
        .open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a plain file; remove it, it is made again"))
}

/// No more than the first `most` bytes of an open file: ours are never longer.
pub(super) fn first_bytes(file: &File, most: usize) -> io::Result<Vec<u8>> {
    use std::io::Read as _;
    let mut bytes = Vec::with_capacity(most);
    file.take(most as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A file's bytes and inode. What is no plain file has no bytes.
pub(super) fn read_file(path: &Path) -> io::Result<(Vec<u8>, u64)> {
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

pub(super) fn no_plain_file(error: &io::Error) -> bool {
    use nix::errno::Errno;
    matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ELOOP | Errno::ENXIO))
}

/// No record of ours comes near this; what is larger is not one.
const MAX_RECORD_BYTES: u64 = 64 * 1024;

/// The inode behind a name, without following links; none where there is no such name.
pub(super) fn inode_of(path: &Path) -> Result<Option<u64>, StoreError> {
    match fs::symlink_metadata(path) {
        Ok(meta) => Ok(Some(meta.ino())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(StoreError::io("look at", path, source)),
    }
}

/// The names in a directory with their inodes; none where there is no such directory.
pub(super) fn names(directory: &Path) -> Result<Vec<(String, u64)>, StoreError> {
    let failed = |source| StoreError::io("list", directory, source);
    let entries = match fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(source) => return Err(failed(source)),
    };
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let inode = entry.ino();
        if let Ok(name) = entry.file_name().into_string() {
            names.push((name, inode));
        }
    }
    Ok(names)
}

/// The address that a file's name is, in the only spelling that we write.
pub(super) fn address_of(name: &str) -> Option<IpAddr> {
    name.parse().ok().filter(|address: &IpAddr| address.to_string() == name)
}
