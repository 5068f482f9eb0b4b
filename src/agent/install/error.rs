//! Why something could not be installed or removed. The host then has what it had before.

use std::io;
use std::path::{Path, PathBuf};

use thiserror::Error;

use crate::cni::CniError;

#[derive(Debug, Error)]
pub enum InstallError {
    #[error(
        "cannot {what} {}: {source}; is the host's folder mounted into the agent, and writable?",
        path.display()
    )]
    Io { what: &'static str, path: PathBuf, source: io::Error },
    /// The template (a file, or the built-in one) cannot become this node's conflist.
    #[error("{from}: {field}: {why}; the conflist that is installed stays")]
    Template { from: String, field: String, why: String },
    #[error("{from}: the plugin would refuse it: {error}; the conflist that is installed stays")]
    Refused { from: String, error: CniError },
    #[error(
        "node {node} has no home block yet: spec.ipam.podCIDRs of its CiliumNode is empty; fill it, or write \
         ranges into a conflist and name that with --conflist"
    )]
    NoBlocks { node: String },
    /// It comes by itself; until then the runtime has no network, and starts no pod that would fail.
    #[error("the conflist is not installed before Cilium runs on this node: {why}")]
    CiliumAwaited { why: String },
    /// The conflist would send pods to a plugin that cannot work with this Cilium.
    #[error("the conflist is not installed: {why}")]
    CiliumMode { why: String },
    #[error("--plugin {}: {why}", path.display())]
    Plugin { path: PathBuf, why: String },
    #[error("cannot get a token of service account {account} for node {node}: {why}")]
    Token { account: String, node: String, why: String },
    /// The agent's own access to the API server cannot be written into the plugin's kubeconfig.
    #[error("cannot write the plugin's kubeconfig: {why}")]
    ApiServerAccess { why: String },
    #[error("cannot read whether pods of this node still need the plugin: {0}; only the conflist is removed")]
    Store(#[from] crate::store::StoreError),
}

impl InstallError {
    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { what, path, source }
    }
}
