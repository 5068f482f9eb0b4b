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

use crate::agent::flags::Settings;
use crate::agent::index::Index;
use crate::agent::metrics::Metrics;
use crate::agent::plan::{Action, Terms};
use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::cilium::pool::ProjectionError;
use crate::cluster::cilium::socket;
use crate::cluster::cilium::socket::{About, Endpoint};
use crate::cluster::objects::Holder;
use crate::cluster::protocol::apply::{Carrier, Witness};
use crate::cluster::protocol::bind::WalkError;
use crate::cluster::protocol::detach::LeaveError;
use crate::cluster::protocol::sticky_identity::ErrandError;
use crate::cni::{Attachment, ContainerId, IfName};
use crate::runtime::client::IN_CLUSTER;
use crate::store::{Claimant, Disk, Moment, Store, StoreError, Turn};

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
pub enum ActError {
    /// The node's store.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The API server.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// A pod's way to its address.
    #[error(transparent)]
    Walk(#[from] WalkError),
    /// What a pod asks for.
    #[error(transparent)]
    Errand(#[from] ErrandError),
    /// The node's CiliumNode.
    #[error(transparent)]
    Projection(#[from] ProjectionError),
    /// The way out.
    #[error(transparent)]
    Leave(#[from] LeaveError),
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

impl ActError {
    /// The API server's part in it.
    #[must_use]
    pub fn api(&self) -> Option<&ApiError> {
        match self {
            Self::Api(error)
            | Self::Walk(WalkError::Api(error))
            | Self::Errand(ErrandError::Api(error))
            | Self::Projection(ProjectionError::Api(error))
            | Self::Leave(LeaveError::Api(error) | LeaveError::Projection(ProjectionError::Api(error))) => {
                Some(error)
            }
            _ => None,
        }
    }
}

/// What came of an action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// It is done, and why.
    Done(String),
    /// Nothing was to be done: the world has moved on.
    Needless(String),
    /// Not now: somebody else is at it, or has to go first.
    Later(String),
    /// A person must look.
    Odd(String),
}

/// Everything an action works with.
pub struct Hands<'a, D: Disk + Clone> {
    /// What the operator has set.
    pub settings: &'a Settings,
    /// The same, as decisions need it.
    pub terms: &'a Terms,
    /// What the watches have told.
    pub index: &'a Index,
    /// The way to the API server.
    pub client: kube::Client,
    /// The way to the disk.
    pub disk: D,
    /// Who is told of every write to the API server.
    pub witness: &'a dyn Witness,
    /// What is counted.
    pub metrics: &'a Metrics,
}

impl<D: Disk + Clone> Hands<'_, D> {
    /// Carries an action out.
    ///
    /// # Errors
    /// Why it did not come to its end.
    pub async fn carry_out(&self, action: &Action) -> Result<Outcome, ActError> {
        match action {
            Action::Tell { name, note } => self.tell(name, note).await,
            Action::Prepare { pod, uid } => match self.index.pods.get(pod) {
                Some(seen) if seen.runtime_uid == *uid => self.prepare(seen).await,
                _ => Ok(Outcome::Needless("the pod is another one by now".into())),
            },
            Action::Withdraw { uid } => self.withdraw(uid).await,
            Action::Rejudge { pod, uid, .. } => match self.index.pods.get(pod) {
                Some(seen) if seen.runtime_uid == *uid => self.rejudge(seen).await,
                _ => Ok(Outcome::Needless("the pod is another one by now".into())),
            },
            Action::Answer { address, .. } => self.answer(*address).await,
            Action::Forget { address } => self.forget_pod(*address).await,
            Action::Show { key } => self.show(key).await,
            Action::Hide { address } => self.hide(*address).await,
            Action::Unsign => self.unsign().await,
            Action::Attach { key, attachment } => self.attach(key, attachment).await,
            Action::Detach { key, container } => self.detach(key, container).await,
            Action::Mac { key } => self.record_mac(key).await,
            Action::End { record } => self.end(record).await,
            Action::Free { record } => self.free(record).await,
            Action::Mark { addresses } => self.mark(addresses),
            Action::Offer => self.offer().await,
        }
    }

    /// The node's store, now.
    pub(super) fn store(&self) -> Result<Store<D>, StoreError> {
        open_store(self.settings, self.disk.clone())
    }

    pub(super) fn connection(&self) -> Connection {
        let file = self.settings.kubeconfig.clone().unwrap_or_else(|| IN_CLUSTER.into());
        Connection::with_client(self.client.clone(), &file, API_TIMEOUT)
    }

    pub(super) fn carrier(&self) -> Carrier<'_> {
        Carrier::new(self.connection(), self.witness)
    }

    /// The turn at a pod, if nobody has it.
    pub(super) fn try_turn(&self, store: &Store<D>, claimant: &Claimant) -> Result<Option<Turn>, StoreError> {
        // The turns lie in the store's own folder, which a first lock makes.
        drop(store.lock()?);
        match store.turn(claimant, Duration::ZERO) {
            Ok(turn) => Ok(Some(turn)),
            Err(StoreError::Locked { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The turn at what the CiliumNode shows of a StickyIP; none if others take long.
    pub(super) fn pool_turn(&self, store: &Store<D>, key: &Holder) -> Result<Option<Turn>, ActError> {
        drop(store.lock()?);
        match store.pool_turn(&bound(key)?, POOL_PATIENCE) {
            Ok(turn) => Ok(Some(turn)),
            Err(StoreError::Locked { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether a path of the node is there, or nobody can tell.
    pub(super) fn may_be_there(&self, path: &Path) -> bool {
        self.settings.on_host(path).try_exists().unwrap_or(true)
    }
}

/// The node's store, now.
///
/// # Errors
/// The boot id cannot be read.
pub fn open_store<D: Disk>(settings: &Settings, disk: D) -> Result<Store<D>, StoreError> {
    let now = Moment::now(Path::new(BOOT_ID))?;
    let data_dir = settings.on_host(&settings.data_dir);
    Ok(Store::new(disk, &data_dir, &settings.network, now, LOCK_PATIENCE))
}

pub(super) fn interface() -> Result<IfName, ActError> {
    IfName::new(INTERFACE).map_err(ActError::Name)
}

/// The claimant whose addresses a StickyIP binds.
pub(super) fn bound(key: &Holder) -> Result<Claimant, ActError> {
    Ok(Claimant::bound(&key.namespace, &key.name, &interface()?))
}

pub(super) fn sandbox(container: &str) -> Result<Attachment, ActError> {
    let container = ContainerId::new(container).map_err(ActError::Name)?;
    Ok(Attachment { container, interface: interface()? })
}

pub(super) fn list(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

impl<D: Disk + Clone> Hands<'_, D> {
    /// That Cilium on this node has to let go of one of these addresses first, if it has an endpoint with it. Only where Cilium
    /// picks addresses: elsewhere the store knows.
    pub(super) async fn waits_for_cilium(&self, addresses: &[IpAddr]) -> Result<Option<Outcome>, ActError> {
        for address in addresses.iter().filter(|_| self.terms.shape.pool) {
            if self.endpoint_of(*address).await?.is_some() {
                return Ok(Some(Outcome::Later(format!("Cilium still has an endpoint with {address}"))));
            }
        }
        Ok(None)
    }

    /// What Cilium on this node says of the endpoint with this address.
    pub(super) async fn endpoint_of(&self, address: IpAddr) -> Result<Option<About>, ActError> {
        let asked = move |socket: &Path| socket::endpoint(socket, address);
        match self.ask_cilium(&address.to_string(), asked).await? {
            Endpoint::There(answer) => Ok(Some(About::parse(&answer))),
            Endpoint::Absent => Ok(None),
        }
    }

    /// Asks Cilium on this node over its socket.
    pub(super) async fn ask_cilium<T: Send + 'static>(
        &self,
        subject: &str,
        question: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Result<T, ActError> {
        let path = self.settings.on_host(&self.settings.cilium_socket);
        let socket = path.clone();
        // Cilium may hang, and nobody else shall wait for it.
        let asked = tokio::task::spawn_blocking(move || question(&socket)).await;
        asked.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(|error| ActError::Cilium {
            subject: subject.to_owned(),
            why: format!("{}: {error}", path.display()),
        })
    }
}
