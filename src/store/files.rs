//! Reading files and directories of the store. A link is not followed and a pipe is not waited for, whatever
//! was put in a file's place. Must never change anything: changes go through [`super::disk`].

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _};
use std::net::IpAddr;
use std::os::unix::fs::{DirEntryExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::error::{Result, cannot};

/// No record of ours comes near this; what is larger is not one.
const MAX_RECORD_BYTES: u64 = 64 * 1024;

/// None where nothing of that name is there.
pub(super) fn if_there<T>(outcome: io::Result<T>) -> io::Result<Option<T>> {
    match outcome {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        outcome => outcome.map(Some),
    }
}

fn open(path: &Path, write: bool) -> io::Result<File> {
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOFOLLOW;
    OpenOptions::new().read(true).write(write).custom_flags(flags.bits()).open(path)
}

/// Opens a file of ours; what is no plain file is an error.
pub(super) fn open_plain(path: &Path, write: bool) -> io::Result<File> {
    let file = open(path, write)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a plain file; remove it, it is made again"))
}

/// No more than the first `most` bytes of an open file: ours are never longer.
pub(super) fn first_bytes(file: &File, most: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::with_capacity(most);
    file.take(most as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A file's bytes and inode; none where there is no such name. What is no plain file has no bytes: a link or
/// a socket, which cannot be opened, is nothing of ours, wherever it leads. `what` is for the error.
pub(super) fn read_file(what: &'static str, path: &Path) -> Result<Option<(Vec<u8>, u64)>> {
    let read = || {
        let file = open(path, false)?;
        let meta = file.metadata()?;
        let mut bytes = Vec::new();
        if meta.is_file() {
            bytes.reserve(512);
            file.take(MAX_RECORD_BYTES).read_to_end(&mut bytes)?;
        }
        Ok((bytes, meta.ino()))
    };
    let is_unopenable = |error: &io::Error| {
        matches!(error.raw_os_error().map(Errno::from_raw), Some(Errno::ELOOP | Errno::ENXIO))
    };
    match read() {
        Err(error) if is_unopenable(&error) => Ok(inode_of(path)?.map(|inode| (Vec::new(), inode))),
        outcome => if_there(outcome).map_err(cannot(what, path)),
    }
}

/// The inode behind a name, without following links; none where there is no such name.
pub(super) fn inode_of(path: &Path) -> Result<Option<u64>> {
    let meta = if_there(fs::symlink_metadata(path)).map_err(cannot("look at", path))?;
    Ok(meta.map(|meta| meta.ino()))
}

/// The names in a directory with their inodes; none where there is no such directory.
pub(super) fn names(directory: &Path) -> Result<Vec<(String, u64)>> {
    let failed = cannot("list", directory);
    let mut names = Vec::new();
    for entry in if_there(fs::read_dir(directory)).map_err(&failed)?.into_iter().flatten() {
        let entry = entry.map_err(&failed)?;
        let inode = entry.ino();
        names.extend(entry.file_name().into_string().ok().map(|name| (name, inode)));
    }
    Ok(names)
}

/// The address that a file's name is, in the only spelling that we write.
pub(super) fn address_of(name: &str) -> Option<IpAddr> {
    name.parse().ok().filter(|address: &IpAddr| address.to_string() == name)
}
