//! Everything that an action works with.

use std::path::Path;
use std::time::Duration;

use super::namespaces::NamespaceReads;
use super::outcome::{ActionError, Performed, postponed};
use crate::agent::plan::PlanOptions;
use crate::agent::{flags::AgentSettings, index::NodeIndex, metrics::AgentMetrics};
use crate::alloc::RangeSet;
use crate::cluster::api::client::Connection;
use crate::cluster::cilium::pool::home_blocks;
use crate::cluster::objects::cilium::CiliumNode;
use crate::cluster::writer::apply::{ApiWriter, WriteObserver};
use crate::names::{Attachment, AttachmentId, IfName, PodIdentity, StickyKey};
use crate::store::{ClaimantKey, ClaimantLock, Disk, NodeTime, Store, StoreError};

/// How long the API server may take over one action.
const API_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the store's lock: every process that has it needs a fraction of this.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// How long to wait for a pool lock: a process that has it sends one or two requests.
const POOL_PATIENCE: Duration = Duration::from_secs(1);
/// The interface on which a pod has its address.
const INTERFACE: &str = "eth0";

pub struct ActionContext<'a, D: Disk + Clone> {
    pub settings: &'a AgentSettings,
    /// The settings as decisions need them.
    pub options: &'a PlanOptions,
    pub index: &'a NodeIndex,
    pub client: kube::Client,
    pub disk: D,
    /// Observes every write to the API server.
    pub observer: &'a dyn WriteObserver,
    pub metrics: &'a AgentMetrics,
    /// What was read of namespaces in this step.
    pub namespaces: &'a NamespaceReads,
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    pub(super) fn store(&self) -> Result<Store<D>, StoreError> {
        open_store(self.settings, self.disk.clone())
    }

    pub(super) fn connection(&self) -> Connection {
        Connection::with_client(self.client.clone(), self.settings.client.origin(), API_TIMEOUT)
    }

    pub(super) fn api_writer(&self) -> ApiWriter<'_> {
        ApiWriter::new(self.connection(), self.observer)
    }

    /// The claimant lock, without waiting for it.
    pub(super) fn claimant_lock(&self, store: &Store<D>, claimant: &ClaimantKey) -> Performed<ClaimantLock> {
        // The locks are in the store's own folder, which the first lock of the store makes.
        drop(store.lock()?);
        match store.claimant_lock(claimant, Duration::ZERO) {
            Err(StoreError::LockTimeout { .. }) => postponed("an ADD of this pod is running"),
            lock => Ok(lock?),
        }
    }

    /// Whether a path of the node is there; what cannot be looked at may be.
    pub(super) fn may_exist(&self, path: &Path) -> bool {
        self.settings.on_host(path).try_exists().unwrap_or(true)
    }

    /// The node's own addresses: those of its configuration, else of its blocks.
    pub(super) fn node_ranges(&self, node: Option<&CiliumNode>) -> Vec<RangeSet> {
        if !self.options.ranges.is_empty() {
            return self.options.ranges.clone();
        }
        RangeSet::over(&node.map(home_blocks).unwrap_or_default())
    }
}

/// The pool lock of a claimant; none if another process takes long.
pub(super) fn try_pool_lock<D: Disk>(
    store: &Store<D>,
    claimant: &ClaimantKey,
) -> Result<Option<ClaimantLock>, StoreError> {
    drop(store.lock()?);
    match store.pool_lock(claimant, POOL_PATIENCE) {
        Err(StoreError::LockTimeout { .. }) => Ok(None),
        lock => lock.map(Some),
    }
}

/// The node's store, now.
pub(crate) fn open_store<D: Disk>(settings: &AgentSettings, disk: D) -> Result<Store<D>, StoreError> {
    let now = NodeTime::now(&settings.boot_id_path())?;
    let data_dir = settings.on_host(&settings.data_dir);
    Ok(Store::new(disk, &data_dir, &settings.network, now, LOCK_PATIENCE))
}

pub(super) fn interface() -> Performed<IfName> {
    IfName::new(INTERFACE).map_err(ActionError::Name)
}

/// The claimant whose addresses a StickyIP binds.
pub(super) fn bound(key: &StickyKey) -> Performed<ClaimantKey> {
    Ok(ClaimantKey::of_sticky(key, &interface()?))
}

/// The claimant that a pod is by its own name.
pub(super) fn own_claimant(pod: &PodIdentity) -> Performed<ClaimantKey> {
    Ok(ClaimantKey::of_pod(pod, &interface()?))
}

pub(super) fn sandbox(id: &AttachmentId) -> Performed<Attachment> {
    let container = id.container().map_err(ActionError::Name)?;
    Ok(Attachment { container, interface: interface()? })
}
