//! The thin shell: carries out one action at a time, after a live look or under the store's lock. Every write to the API
//! server goes past a witness, every write of a file through the [`Disk`], so that a test can end the agent at each.
//!
//! Must never act on what the watches told alone, and never wait for a pod.

pub(crate) mod addresses;
pub(crate) mod adopt;
pub(crate) mod leaks;
pub(crate) mod mac;
pub(crate) mod pending_updates;
pub(crate) mod prepare;
pub(crate) mod refill;
pub(crate) mod release_blocks;
use std::io;
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use thiserror::Error;

use crate::agent::flags::AgentSettings;
use crate::agent::index::NodeIndex;
use crate::agent::metrics::AgentMetrics;
use crate::agent::plan::{Action, PlanOptions};
use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::cilium::pool::PublishError;
use crate::cluster::cilium::socket;
use crate::cluster::cilium::socket::{EndpointAnswer, EndpointInfo};
use crate::cluster::objects::StickyKey;
use crate::cluster::protocol::apply::{ApiWriter, WriteObserver};
use crate::cluster::protocol::bind::BindError;
use crate::cluster::protocol::detach::DetachError;
use crate::cluster::protocol::sticky_identity::StickyIdentityError;
use crate::cni::{Attachment, ContainerId, IfName};
use crate::store::{Claimant, ClaimantLock, Disk, NodeTime, Store, StoreError};

/// How long the API server may take over one action.
const API_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the store's lock: whoever holds it needs a fraction of this.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
/// How long to wait for the turn at a claimant's pool keys: holders send one or two requests.
const POOL_PATIENCE: Duration = Duration::from_secs(1);
/// Where the kernel tells which boot this is.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The interface that a pod has its address on.
pub(super) const INTERFACE: &str = "eth0";

/// Why an action did not come to its end. It is planned again as long as its cause stands.
#[derive(Debug, Error)]
pub enum ActionError {
    /// The node's store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The API server.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// A pod's way to its address.
    #[error(transparent)]
    Walk(#[from] BindError),
    /// What a pod asks for.
    #[error(transparent)]
    Errand(#[from] StickyIdentityError),
    /// The node's CiliumNode.
    #[error(transparent)]
    Projection(#[from] PublishError),
    /// The way out.
    #[error(transparent)]
    Leave(#[from] DetachError),
    /// Cilium's socket.
    #[error("cannot ask Cilium about {subject}: {why}; is Cilium's agent running on this node?")]
    Cilium {
        /// The address, or the pod.
        subject: String,
        /// What happened.
        why: String,
    },
    /// A name that came from elsewhere is none.
    #[error("{0}")]
    Name(String),
}

impl ActionError {
    /// The API server's part in it.
    #[must_use]
    pub fn api(&self) -> Option<&ApiError> {
        match self {
            Self::Api(error)
            | Self::Walk(BindError::Api(error))
            | Self::Errand(StickyIdentityError::Api(error))
            | Self::Projection(PublishError::Api(error))
            | Self::Leave(DetachError::Api(error) | DetachError::Projection(PublishError::Api(error))) => {
                Some(error)
            }
            _ => None,
        }
    }
}

/// What came of an action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ActionOutcome {
    /// It is done, and why.
    Done(String),
    /// Nothing was to be done: the world has moved on.
    NotNeeded(String),
    /// Not now: somebody else is at it, or has to go first.
    Postponed(String),
    /// A person must look.
    NeedsAttention(String),
}

/// Everything an action works with.
pub struct ActionContext<'a, D: Disk + Clone> {
    /// What the operator has set.
    pub settings: &'a AgentSettings,
    /// The same, as decisions need it.
    pub options: &'a PlanOptions,
    /// What the watches have told.
    pub index: &'a NodeIndex,
    /// The way to the API server.
    pub client: kube::Client,
    /// The way to the disk.
    pub disk: D,
    /// Who is told of every write to the API server.
    pub observer: &'a dyn WriteObserver,
    /// What is counted.
    pub metrics: &'a AgentMetrics,
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Carries an action out.
    ///
    /// # Errors
    /// Why it did not come to its end.
    pub async fn perform(&self, action: &Action) -> Result<ActionOutcome, ActionError> {
        match action {
            Action::SendUpdate { name, note } => self.send_update(name, note).await,
            Action::Prepare { pod, uid } => match self.index.pods.get(pod) {
                Some(seen) if seen.runtime_uid == *uid => self.prepare(seen).await,
                _ => Ok(ActionOutcome::NotNeeded("the pod is another one by now".into())),
            },
            Action::Withdraw { uid } => self.withdraw(uid).await,
            Action::Reevaluate { pod, uid, .. } => match self.index.pods.get(pod) {
                Some(seen) if seen.runtime_uid == *uid => self.reevaluate(seen).await,
                _ => Ok(ActionOutcome::NotNeeded("the pod is another one by now".into())),
            },
            Action::Grant { address, .. } => self.answer(*address).await,
            Action::FinishAdoption { address } => self.finish_adoption(*address).await,
            Action::Publish { key } => self.publish(key).await,
            Action::Unpublish { address } => self.unpublish(*address).await,
            Action::RemoveBarriers => self.remove_barriers().await,
            Action::Attach { key, attachment } => self.attach(key, attachment).await,
            Action::Detach { key, container } => self.detach(key, container).await,
            Action::RecordMac { key } => self.record_mac(key).await,
            Action::EndAttachment { record } => self.end_attachment(record).await,
            Action::ReleaseRecord { record } => self.free(record).await,
            Action::RecordUnowned { addresses } => self.record_unowned(addresses),
            Action::Refill => self.refill().await,
        }
    }

    /// The node's store, now.
    pub(super) fn store(&self) -> Result<Store<D>, StoreError> {
        open_store(self.settings, self.disk.clone())
    }

    pub(super) fn connection(&self) -> Connection {
        Connection::with_client(self.client.clone(), self.settings.client.origin(), API_TIMEOUT)
    }

    pub(super) fn api_writer(&self) -> ApiWriter<'_> {
        ApiWriter::new(self.connection(), self.observer)
    }

    /// The turn at a pod, if nobody has it.
    pub(super) fn try_claimant_lock(
        &self,
        store: &Store<D>,
        claimant: &Claimant,
    ) -> Result<Option<ClaimantLock>, StoreError> {
        // The turns lie in the store's own folder, which a first lock makes.
        drop(store.lock()?);
        match store.claimant_lock(claimant, Duration::ZERO) {
            Ok(claimant_lock) => Ok(Some(claimant_lock)),
            Err(StoreError::LockTimeout { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The turn at what the CiliumNode shows of a StickyIP; none if others take long.
    pub(super) fn pool_lock(
        &self,
        store: &Store<D>,
        key: &StickyKey,
    ) -> Result<Option<ClaimantLock>, ActionError> {
        drop(store.lock()?);
        match store.pool_lock(&bound(key)?, POOL_PATIENCE) {
            Ok(claimant_lock) => Ok(Some(claimant_lock)),
            Err(StoreError::LockTimeout { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a path of the node is there, or nobody can tell.
    pub(super) fn may_exist(&self, path: &Path) -> bool {
        self.settings.on_host(path).try_exists().unwrap_or(true)
    }
}

/// The node's store, now.
///
/// # Errors
/// The boot id cannot be read.
pub fn open_store<D: Disk>(settings: &AgentSettings, disk: D) -> Result<Store<D>, StoreError> {
    let now = NodeTime::now(Path::new(BOOT_ID))?;
    let data_dir = settings.on_host(&settings.data_dir);
    Ok(Store::new(disk, &data_dir, &settings.network, now, LOCK_PATIENCE))
}

pub(super) fn interface() -> Result<IfName, ActionError> {
    IfName::new(INTERFACE).map_err(ActionError::Name)
}

/// The claimant whose addresses a StickyIP binds.
pub(super) fn bound(key: &StickyKey) -> Result<Claimant, ActionError> {
    Ok(Claimant::bound(&key.namespace, &key.name, &interface()?))
}

pub(super) fn sandbox(container: &str) -> Result<Attachment, ActionError> {
    let container = ContainerId::new(container).map_err(ActionError::Name)?;
    Ok(Attachment { container, interface: interface()? })
}

pub(super) fn list(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// That Cilium on this node has to let go of one of these addresses first, if it has an endpoint with it. Only where Cilium
    /// picks addresses: elsewhere the store knows.
    pub(super) async fn postponed_by_cilium(
        &self,
        addresses: &[IpAddr],
    ) -> Result<Option<ActionOutcome>, ActionError> {
        for address in addresses.iter().filter(|_| self.settings.mode.cilium_picks_the_address()) {
            if self.endpoint_of(*address).await?.is_some() {
                return Ok(Some(ActionOutcome::Postponed(format!(
                    "Cilium still has an endpoint with {address}"
                ))));
            }
        }
        Ok(None)
    }

    /// What Cilium on this node says of the endpoint with this address.
    pub(super) async fn endpoint_of(&self, address: IpAddr) -> Result<Option<EndpointInfo>, ActionError> {
        let asked = move |socket: &Path| socket::endpoint(socket, address);
        match self.ask_cilium(&address.to_string(), asked).await? {
            EndpointAnswer::There(answer) => Ok(Some(EndpointInfo::parse(&answer))),
            EndpointAnswer::Absent => Ok(None),
        }
    }

    /// Asks Cilium on this node over its socket.
    pub(super) async fn ask_cilium<T: Send + 'static>(
        &self,
        subject: &str,
        question: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T, ActionError> {
        let path = self.settings.on_host(&self.settings.cilium_socket);
        let socket = path.clone();
        // Cilium may hang, and nobody else shall wait for it.
        let asked = tokio::task::spawn_blocking(move || question(&socket)).await;
        asked.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(|error| ActionError::Cilium {
            subject: subject.to_owned(),
            why: format!("{}: {error}", path.display()),
        })
    }
}
