//! One ADD at a time for a claimant on this node, while it asks the cluster: between the attachment in the
//! API server and the record in the store no second pod of the same name may come and find no record.
//!
//! A lock is one byte of one file, locked by fcntl(2): a file for each would cost every ADD an inode.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use sha2::{Digest, Sha256};

use crate::store::error::cannot;
use crate::store::lock::{is_same_file, open};
use crate::store::{ClaimantKey, Disk, Result, Store, StoreError};

const CLAIMANT_LOCKS: &str = ".sticky/claimants.lock";
/// Between two tries: few wait, and a pod's start does.
const RETRY_INTERVAL: Duration = Duration::from_micros(500);

/// The lock of a claimant. The kernel releases it when this is dropped or the process ends, however it ends.
#[derive(Debug)]
pub struct ClaimantLock(#[allow(dead_code, reason = "held for its drop")] File);

impl<D: Disk> Store<D> {
    /// Waits for the claimant's lock. The store must have been locked once, so that it is there.
    /// Errors: another ADD of this claimant takes longer than `timeout`, or the disk fails.
    pub fn claimant_lock(&self, claimant: &ClaimantKey, timeout: Duration) -> Result<ClaimantLock> {
        self.lock_named(&claimant.entry(), timeout)
    }

    /// Waits for the lock under which the claimant's addresses are published or unpublished on this node's
    /// CiliumNode. It is held for a short time: never while waiting for another pod.
    pub fn pool_lock(&self, claimant: &ClaimantKey, timeout: Duration) -> Result<ClaimantLock> {
        self.lock_named(&format!("{},pool", claimant.entry()), timeout)
    }

    fn lock_named(&self, name: &str, timeout: Duration) -> Result<ClaimantLock> {
        let (path, started) = (self.path(CLAIMANT_LOCKS), Instant::now());
        let mut file = open(&path)?;
        loop {
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&lock_range(name))) {
                // The directory was made again while this process waited: its locks are in another file now.
                Ok(_) if !is_same_file(&file, &path) => file = open(&path)?,
                Ok(_) => return Ok(ClaimantLock(file)),
                Err(Errno::EAGAIN | Errno::EACCES) if started.elapsed() >= timeout => {
                    // The name says more than the file that all of them share.
                    let path = PathBuf::from(format!("{} ({name})", path.display()));
                    return Err(StoreError::LockTimeout { path, holder: None, timeout });
                }
                Err(Errno::EAGAIN | Errno::EACCES) => {
                    std::thread::sleep(RETRY_INTERVAL.min(timeout.saturating_sub(started.elapsed())));
                }
                Err(Errno::EINTR) => {}
                Err(error) => return Err(cannot("lock", &path)(error.into())),
            }
        }
    }
}

/// The byte of a name, far beyond the file's end. Two names with the same byte only wait for each other.
fn lock_range(name: &str) -> libc::flock {
    let mut first = [0; 8];
    first.copy_from_slice(&Sha256::digest(name.as_bytes())[..8]);
    libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        // Neither the sign nor the last byte that there can be.
        l_start: (u64::from_be_bytes(first) >> 2) as libc::off_t,
        l_len: 1,
        l_pid: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{IfName, NetworkName};
    use crate::store::{NodeTime, RealDisk};

    #[test]
    fn a_claimant_lock_has_one_holder_and_other_claimants_have_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let (network, now) = (NetworkName::new("net").unwrap(), NodeTime::new(1, 1, "a"));
        let store = Store::new(RealDisk, dir.path(), &network, now, Duration::ZERO);
        drop(store.lock().unwrap());
        let claimant = |name: &str| ClaimantKey::new("db", name, &IfName::new("eth0").unwrap());
        let held = store.claimant_lock(&claimant("db-0"), Duration::ZERO).unwrap();
        let refused =
            store.claimant_lock(&claimant("db-0"), Duration::from_millis(5)).unwrap_err().to_string();
        assert!(refused.contains("db-0"), "{refused}");
        let _other = store.claimant_lock(&claimant("db-1"), Duration::ZERO).unwrap();
        let _pool = store.pool_lock(&claimant("db-0"), Duration::ZERO).unwrap();
        drop(held);
        store.claimant_lock(&claimant("db-0"), Duration::ZERO).unwrap();
        assert!(store.verify().unwrap().is_empty());
        // Made again while it is held, it is another file: a lock there is a lock.
        let _held = store.claimant_lock(&claimant("db-2"), Duration::ZERO).unwrap();
        std::fs::remove_dir_all(store.path(crate::store::DERIVED)).unwrap();
        drop(store.lock().unwrap());
        store.claimant_lock(&claimant("db-2"), Duration::ZERO).unwrap();
    }
}
