//! One ADD at a time for a claimant on this node, while it asks the cluster: between the attachment in the API server and
//! the record in the store no second pod of the same name may come and find no record.
//!
//! A turn is one byte of one file, locked by fcntl(2): making and removing a file for each would cost every ADD an inode.

use std::fs::File;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use sha2::{Digest, Sha256};

use crate::store::lock::{is_still_there, open};
use crate::store::{Claimant, Disk, Store, StoreError};

const TURNS: &str = ".sticky/turns.lock";
/// Between two tries: few wait for a turn, and a pod's start does.
const PAUSE: Duration = Duration::from_micros(500);

/// A claimant's turn. The kernel lets go of it when this is dropped or the process ends, however it ends.
#[derive(Debug)]
pub struct Turn(#[allow(dead_code, reason = "held for its drop")] File);

impl<D: Disk> Store<D> {
    /// Waits for the claimant's turn. The store must have been locked once, so that it is there.
    ///
    /// # Errors
    /// Another ADD of this claimant takes longer than `patience`, or the disk fails.
    pub fn turn(&self, claimant: &Claimant, patience: Duration) -> Result<Turn, StoreError> {
        self.turn_named(&claimant.entry(), patience)
    }

    /// Waits for the turn to show or hide the claimant's addresses on this node's CiliumNode. Short: nobody waits for
    /// another pod while it has it.
    ///
    /// # Errors
    /// As [`Store::turn`].
    pub fn pool_turn(&self, claimant: &Claimant, patience: Duration) -> Result<Turn, StoreError> {
        self.turn_named(&format!("{},pool", claimant.entry()), patience)
    }

    fn turn_named(&self, name: &str, patience: Duration) -> Result<Turn, StoreError> {
        let (path, started) = (self.path(TURNS), Instant::now());
        let mut file = open(&path)?;
        loop {
            match fcntl(&file, FcntlArg::F_OFD_SETLK(&byte_of(name))) {
                // The directory was made anew while this process waited: its turns are in another file now.
                Ok(_) if !is_still_there(&file, &path) => file = open(&path)?,
                Ok(_) => return Ok(Turn(file)),
                Err(Errno::EAGAIN | Errno::EACCES) => {
                    if started.elapsed() >= patience {
                        // Whose turn it is tells more than the file that all of them share.
                        let path = PathBuf::from(format!("{} ({name})", path.display()));
                        return Err(StoreError::Locked { path, holder: None, patience });
                    }
                    std::thread::sleep(PAUSE.min(patience.saturating_sub(started.elapsed())));
                }
                Err(Errno::EINTR) => {}
                Err(error) => return Err(StoreError::io("lock", &path, error.into())),
            }
        }
    }
}

/// The byte that stands for a name: far beyond the file's end, which takes no room. Two names with the same one would only wait for each
/// other.
fn byte_of(name: &str) -> libc::flock {
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
    use crate::cni::{IfName, NetworkName};
    use crate::store::{Moment, RealDisk};

    #[test]
    fn a_turn_is_one_holders_and_other_claimants_have_their_own() {
        let dir = tempfile::tempdir().unwrap();
        let (network, now) = (NetworkName::new("net").unwrap(), Moment::new(1, 1, "a"));
        let store = Store::new(RealDisk, dir.path(), &network, now, Duration::ZERO);
        drop(store.lock().unwrap());
        let claimant = |name: &str| Claimant::bound("db", name, &IfName::new("eth0").unwrap());
        let held = store.turn(&claimant("db-0"), Duration::ZERO).unwrap();
        let refused = store.turn(&claimant("db-0"), Duration::from_millis(5)).unwrap_err().to_string();
        assert!(refused.contains("db-0"), "{refused}");
        let _other = store.turn(&claimant("db-1"), Duration::ZERO).unwrap();
        let _pool = store.pool_turn(&claimant("db-0"), Duration::ZERO).unwrap();
        drop(held);
        store.turn(&claimant("db-0"), Duration::ZERO).unwrap();
        assert!(store.verify().unwrap().is_empty());
        // Made anew behind the holder's back, it is another file: a turn there is a turn.
        let _held = store.turn(&claimant("db-2"), Duration::ZERO).unwrap();
        std::fs::remove_dir_all(store.path(crate::store::DERIVED)).unwrap();
        drop(store.lock().unwrap());
        store.turn(&claimant("db-2"), Duration::ZERO).unwrap();
    }
}
