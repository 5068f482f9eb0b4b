//! What can go wrong with the store: what was tried, on which path, why, and what to do.

use std::io;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

/// Why the store could not do what was asked.
#[derive(Debug, Error)]
pub enum StoreError {
    /// The disk refused.
    #[error("cannot {what} {}: {source}{}", path.display(), advice(source))]
    Io {
        /// What was tried.
        what: &'static str,
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
    /// Another process held the lock for too long.
    #[error(
        "the lock {} is held by {} for more than {timeout:?}; end that process if it hangs, or raise \
         sticky.lockTimeout",
        path.display(),
        holder.map_or_else(|| "an unknown process".to_owned(), |pid| format!("process {pid}"))
    )]
    LockTimeout {
        /// The lock file.
        path: PathBuf,
        /// The process that holds it, where it can be known.
        holder: Option<u32>,
        /// How long was waited.
        timeout: Duration,
    },
    /// A newer program wrote the store.
    #[error(
        "the store {} has version {found}, this program knows versions up to {known}; upgrade sticky-ipam on \
         this node",
        path.display()
    )]
    NewerVersion {
        /// The network's directory.
        path: PathBuf,
        /// The version found.
        found: u32,
        /// The newest version known.
        known: u32,
    },
    /// A symbolic link leads out of the tree.
    #[error(
        "{} is a symbolic link to {}, which is outside of {}; name the real directory in ipam.dataDir",
        path.display(),
        target.display(),
        tree.display()
    )]
    Escapes {
        /// The link.
        path: PathBuf,
        /// Where it leads.
        target: PathBuf,
        /// The tree it should stay in.
        tree: PathBuf,
    },
    /// The address turned out to be taken.
    #[error("the address {0} is taken")]
    Taken(IpAddr),
}

impl StoreError {
    pub(super) fn io(what: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { what, path: path.to_owned(), source }
    }
}

/// What to do about the usual causes.
fn advice(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "; free some space (or inodes) on that file system, the runtime tries again"
        }
        io::ErrorKind::ReadOnlyFilesystem => "; mount that file system read-write",
        io::ErrorKind::PermissionDenied => {
            "; the runtime must run the plugin with write access to ipam.dataDir"
        }
        io::ErrorKind::NotADirectory => "; ipam.dataDir must name a directory",
        _ => "",
    }
}
