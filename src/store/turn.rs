//! One ADD at a time for a claimant on this node, while it asks the cluster: between the attachment in the API server and
//! the record in the store no second pod of the same name may come and find no record.

use std::path::PathBuf;
use std::time::Duration;

use super::lock::Lock;
use super::{Claimant, Disk, Store, StoreError};

const TURNS: &str = ".sticky/turns";

/// A claimant's turn. Its file goes with it; a process that ends without leaves an empty file that the next one takes.
#[derive(Debug)]
pub struct Turn {
    path: PathBuf,
    _lock: Lock,
}

impl Drop for Turn {
    fn drop(&mut self) {
        // Removed while it is held: whoever waits sees that its file is gone and opens the next one.
        let _ = std::fs::remove_file(&self.path);
    }
}

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
        let folder = self.path(TURNS);
        self.make_dir(&folder)?;
        let path = folder.join(name);
        Ok(Turn { _lock: Lock::acquire(&path, patience)?, path })
    }
}
