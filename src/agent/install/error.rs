//! Why something could not be installed or removed. The host then has what it had before.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::cni::CniError;

/// What went wrong, on which file or object, and what to do.
#[derive(Debug, Error)]
pub enum InstallError {
    /// A file of the host cannot be read or written.
    #[error(
        "cannot {what} {}: {source}; is the host's folder mounted into the agent, and writable?",
        path.display()
    )]
    Io {
        /// What was tried.
        what: &'static str,
        /// On which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The template cannot become this node's conflist.
    #[error("{from}: {field}: {why}; the conflist that is installed stays")]
    Template {
        /// The file, or the built-in one.
        from: String,
        field: String,
        /// Its value, and what would be right.
        why: String,
    },
    /// The plugin would not follow the conflist.
    #[error("{from}: the plugin would refuse it: {error}; the conflist that is installed stays")]
    Refused {
        /// The file, or the built-in one.
        from: String,
        /// The plugin's answer.
        error: CniError,
    },
    /// The node has no addresses yet.
    #[error(
        "node {node} has no home block yet: spec.ipam.podCIDRs of its CiliumNode is empty; fill it, or write \
         ranges into a conflist and name that with --conflist"
    )]
    NoBlocks { node: String },
    /// The plugin's binary cannot be installed.
    #[error("--plugin {}: {why}", path.display())]
    Plugin {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// There is no token for the plugin.
    #[error("cannot get a token of service account {account} for node {node}: {why}")]
    Token {
        /// `namespace/name`.
        account: String,
        node: String,
        /// The reason and the cure.
        why: String,
    },
    /// The agent's own access to the API server cannot be written into the plugin's kubeconfig.
    #[error("cannot write the plugin's kubeconfig: {why}")]
    ApiServerAccess {
        /// What is missing.
        why: String,
    },
    /// The store cannot be read.
    #[error("cannot read whether pods of this node still need the plugin: {0}; only the conflist is removed")]
    Store(#[from] crate::store::StoreError),
}

impl InstallError {
    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}
