//! Every change that the store makes to the disk goes through this narrow door, so that a test can end the
//! process, fill the disk or lose the power at each of them. Reading needs no door: it changes nothing.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;

/// What the store does to the disk. Seven verbs, each of which may be the last.
pub trait Disk {
    /// Makes one directory. An existing one is an error.
    fn make_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes a new file with these bytes. An existing one is an error.
    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<File>;
    /// Writes bytes into an open file, at an offset.
    fn write_at(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Gives a file a second name. An existing name is an error.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Renames a file, over an existing one.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file's name.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Returns when the file or directory is on stable storage.
    fn sync(&self, file: &File) -> io::Result<()>;
}

/// The disk itself.
#[derive(Clone, Copy, Debug, Default)]
pub struct RealDisk;

impl Disk for RealDisk {
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        DirBuilder::new().mode(0o755).create(path)
    }

    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<File> {
        let mut file = OpenOptions::new().write(true).read(true).create_new(true).mode(0o644).open(path)?;
        file.write_all(bytes)?;
        Ok(file)
    }

    fn write_at(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
        file.write_all_at(bytes, offset)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }
}
