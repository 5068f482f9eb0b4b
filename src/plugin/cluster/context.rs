//! What the parts of a cluster ADD share: who is added, what this node knows of the pod, and why an ADD
//! fails.

use std::collections::BTreeSet;
use std::future::Future;
use std::net::IpAddr;
use std::pin::Pin;

use crate::cluster::api::client::{ApiError, Connection};
use crate::cni::{ClusterConf, CniError};
use crate::names::{Attachment, PodIdentity};
use crate::node::addresses::{NodeAddresses, ThisNode, may_exist};
use crate::plugin::VerbContext;
use crate::store::Disk;

/// Why the cluster's part of an ADD did not finish.
pub(crate) enum AddError {
    Rejected(CniError),
    /// The API server was not reached; nothing was written.
    Unreachable(ApiError),
    /// The API server was lost after a write that may have happened.
    WriteInDoubt(ApiError),
}

impl From<CniError> for AddError {
    fn from(error: CniError) -> Self {
        Self::Rejected(error)
    }
}

pub(crate) struct AddContext<'a, D: Disk> {
    pub(crate) verb: &'a VerbContext<'a, D>,
    pub(crate) conf: &'a ClusterConf,
    pub(crate) pod: &'a PodIdentity,
    pub(crate) attachment: &'a Attachment,
}

impl<D: Disk> AddContext<'_, D> {
    /// This node; `on_attaching` is called while a write that attaches is on its way.
    pub(crate) fn node<'a>(
        &'a self,
        on_attaching: &'a dyn Fn(&NodeAddresses<'_, D>, &[IpAddr]),
    ) -> ThisNode<'a, D> {
        ThisNode { name: &self.conf.node, store: &self.verb.store, netns_may_exist: &may_exist, on_attaching }
    }
}

/// What this node last knew of a pod that is sticky; most likely it is still so.
#[derive(Default)]
pub(crate) struct LastKnown {
    pub(crate) addresses: BTreeSet<IpAddr>,
    /// Its StickyIP as this node's DEL left it.
    pub(crate) detached_snapshot: Option<Vec<u8>>,
    /// A record of this node binds the claimant of the pod's own name to a StickyIP.
    pub(crate) is_sticky: bool,
}

/// Waits for the API server, in this one thread.
pub(crate) fn block_on<T, E: From<CniError>>(work: impl Future<Output = Result<T, E>>) -> Result<T, E> {
    let mut outcome = None;
    // The runtime is in the program once, and not once per kind of work.
    let waited = drive(Box::pin(async { outcome = Some(work.await) }));
    match (waited, outcome) {
        (Ok(()), Some(outcome)) => outcome,
        (Err(error), _) => Err(CniError::io(format!("cannot wait for the API server: {error}")).into()),
        (Ok(()), None) => Err(CniError::internal("the work ended early").into()),
    }
}

fn drive(work: Pin<Box<dyn Future<Output = ()> + '_>>) -> std::io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(work);
    Ok(())
}

/// Connects to the API server, and returns while the handshake is on its way: the store can be read
/// meanwhile.
pub(crate) async fn start_connecting(conf: &ClusterConf) -> Result<Connection, ApiError> {
    let connection = Connection::open(&conf.kubeconfig, conf.timeout).await?;
    // The connection, then the first message of the handshake. One that takes longer continues with the first
    // request.
    for _ in 0..2 {
        tokio::task::yield_now().await;
    }
    Ok(connection)
}
