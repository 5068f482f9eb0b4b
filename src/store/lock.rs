//! The lock of a network's directory: flock(2) on the file `lock`, as host-local does, with a deadline.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use nix::fcntl::OFlag;

use crate::store::error::cannot;
use crate::store::{Result, StoreError, inode_of};

/// The first pause between two tries. A holder needs about a tenth of a millisecond.
const MIN_BACKOFF: Duration = Duration::from_micros(100);
/// The longest pause: what a waiter may lose when the holder was slow.
const MAX_BACKOFF: Duration = Duration::from_millis(4);

/// A held lock. The kernel releases it when this is dropped or the process ends, however it ends.
#[derive(Debug)]
pub(super) struct StoreLock(#[allow(dead_code, reason = "held for its drop")] File);

impl StoreLock {
    /// Waits for the lock until `timeout` has passed.
    pub(super) fn acquire(path: &Path, timeout: Duration) -> Result<Self> {
        let started = Instant::now();
        let mut pause = MIN_BACKOFF;
        let mut file = open(path)?;
        loop {
            match file.try_lock() {
                Ok(()) if is_same_file(&file, path) => return Ok(Self(file)),
                // The directory was made again while this process waited: its lock is another file now.
                Ok(()) => file = open(path)?,
                Err(TryLockError::WouldBlock) if started.elapsed() >= timeout => {
                    let locks = fs::read_to_string("/proc/locks").ok().zip(file.metadata().ok());
                    let holder =
                        locks.and_then(|(locks, meta)| lock_owner_in(&locks, meta.dev(), meta.ino()));
                    return Err(StoreError::LockTimeout { path: path.to_owned(), holder, timeout });
                }
                Err(TryLockError::WouldBlock) => {
                    std::thread::sleep(pause.min(timeout.saturating_sub(started.elapsed())));
                    pause = (pause * 3 / 2).min(MAX_BACKOFF);
                }
                Err(TryLockError::Error(source)) => return Err(cannot("lock", path)(source)),
            }
        }
    }

    /// The same if the file is there. A directory without it was never used; making it would be a change.
    pub(super) fn acquire_existing(path: &Path, timeout: Duration) -> Result<Option<Self>> {
        inode_of(path)?.map(|_| Self::acquire(path, timeout)).transpose()
    }
}

/// Opens the file of a lock, and makes it if it is not there. A pipe in its place is not waited for.
pub(super) fn open(path: &Path) -> Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .custom_flags((OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK).bits())
        .open(path)
        .map_err(cannot("open the lock", path))
}

pub(super) fn is_same_file(file: &File, path: &Path) -> bool {
    let of = |meta: io::Result<fs::Metadata>| meta.ok().map(|meta| (meta.ino(), meta.dev()));
    let held = of(file.metadata());
    held.is_some() && held == of(fs::metadata(path))
}

/// The process that holds the flock on this inode, from the text of /proc/locks. Lines of waiters (`->`) do
/// not count; a holder in another pid namespace shows as 0.
fn lock_owner_in(locks: &str, dev: u64, ino: u64) -> Option<u32> {
    let (major, minor) = (nix::sys::stat::major(dev), nix::sys::stat::minor(dev));
    let key = format!("{major:02x}:{minor:02x}:{ino}");
    locks.lines().find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields.as_slice() {
            [_, "FLOCK", _, _, pid, file, ..] if *file == key => pid.parse().ok().filter(|pid| *pid != 0),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_holder_is_found_by_inode_and_waiters_do_not_count() {
        let locks = "1: POSIX  ADVISORY  WRITE 10 08:01:77 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 42 08:01:77 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 43 08:01:77 0 EOF\n";
        let dev = nix::sys::stat::makedev(8, 1);
        assert_eq!(lock_owner_in(locks, dev, 77), Some(42));
        assert_eq!(lock_owner_in(locks, dev, 78), None);
    }

    #[test]
    fn a_holder_of_another_pid_namespace_is_unknown() {
        let locks = "2: FLOCK  ADVISORY  WRITE 0 08:01:77 0 EOF\n";
        assert_eq!(lock_owner_in(locks, nix::sys::stat::makedev(8, 1), 77), None);
    }

    #[test]
    fn a_held_lock_is_reported_with_its_holder_and_a_dropped_one_is_free() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let held = StoreLock::acquire(&path, Duration::ZERO).unwrap();
        match StoreLock::acquire(&path, Duration::from_millis(5)) {
            Err(StoreError::LockTimeout { holder, .. }) => assert_eq!(holder, Some(std::process::id())),
            other => panic!("{other:?}"),
        }
        drop(held);
        StoreLock::acquire(&path, Duration::ZERO).unwrap();
    }
}
