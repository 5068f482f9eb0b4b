//! Why something could not be installed or removed. What stands on the host then is what stood there before.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::cni::CniError;

/// What went wrong, on which file or object, and what to do.
#[derive(Debug, Error)]
pub enum InstallError {
    /// The host's disk says no.
    #[error("cannot {what} {}: {source}; is the host's folder mounted into the agent, and writable?", path.display())]
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
        /// The field.
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
        "node {node} has no home block yet: spec.ipam.podCIDRs of its CiliumNode is empty; fill it, or write ranges into \
         a conflist and name that with --conflist"
    )]
    NoBlocks {
        /// The node.
        node: String,
    },
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
        /// The node.
        node: String,
        /// The reason and the cure.
        why: String,
    },
    /// The agent's own way to the API server cannot be written down for the plugin.
    #[error("cannot write the plugin's kubeconfig: {why}")]
    ApiServerAccess {
        /// What is missing.
        why: String,
    },
    /// The store cannot be looked at.
    #[error(
        "cannot tell whether pods of this node still need the plugin: {0}; nothing but the conflist is removed"
    )]
    Store(#[from] crate::store::StoreError),
}

impl InstallError {
    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}
