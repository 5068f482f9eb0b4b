//! What can go wrong with the store: what was tried, on which path, why, and what to do.

use std::io::{self, ErrorKind};
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use thiserror::Error;

/// Why the store could not do what was asked.
#[derive(Debug, Error)]
pub enum StoreError {
    #[error("cannot {what} {}: {source}{}", path.display(), advice(source))]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    /// Another process held the lock for too long; which one, where it can be known.
    #[error(
        "the lock {} is held by {} for more than {timeout:?}; end that process if it hangs, or raise \
         sticky.lockTimeout",
        path.display(),
        holder.map_or_else(|| "an unknown process".to_owned(), |pid| format!("process {pid}"))
    )]
    LockTimeout { path: PathBuf, holder: Option<u32>, timeout: Duration },
    /// A newer program wrote the store.
    #[error(
        "the store {} has version {found}, this program knows versions up to {known}; upgrade sticky-ipam on \
         this node",
        path.display()
    )]
    NewerVersion { path: PathBuf, found: u32, known: u32 },
    /// A symbolic link leads out of the tree that it should stay in.
    #[error(
        "{} is a symbolic link to {}, which is outside of {}; name the real directory in ipam.dataDir",
        path.display(),
        target.display(),
        tree.display()
    )]
    Escapes { path: PathBuf, target: PathBuf, tree: PathBuf },
    /// The address turned out to be taken.
    #[error("the address {0} is taken")]
    Taken(IpAddr),
}

pub type Result<T, E = StoreError> = std::result::Result<T, E>;

/// The disk refused this on that path: for `map_err`.
pub(super) fn cannot(what: &'static str, path: &Path) -> impl Fn(io::Error) -> StoreError {
    move |source| StoreError::Io { what, path: path.to_owned(), source }
}

/// What to do about the usual causes.
fn advice(source: &io::Error) -> &'static str {
    match source.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "; free some space (or inodes) on that file system, the runtime tries again"
        }
        ErrorKind::ReadOnlyFilesystem => "; mount that file system read-write",
        ErrorKind::PermissionDenied => "; the runtime must run the plugin with write access to ipam.dataDir",
        ErrorKind::NotADirectory => "; ipam.dataDir must name a directory",
        _ => "",
    }
}
