//! The thin shell: one write at a time, each with its precondition, each past a witness and a count. Must never decide
//! anything, and never write without saying what must not have changed.

use std::future::Future;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kube::api::{Api, DeleteParams, Patch, Preconditions};
use serde_json::{Value, json};

use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::objects::StickyIP;
use crate::cluster::protocol::apply::{ApiWriter, SentWrite, WriteObserver, patch_params};
use crate::cluster::protocol::write::Precondition;
use crate::controller::index::objects::sticky_key_of;

/// How long the API server may take over one request.
const API_TIMEOUT: Duration = Duration::from_secs(15);

/// Told of every write. Tests end the controller there.
pub trait Overseer: Send + Sync {
    /// The write is about to be sent.
    fn before(&self, what: &str) {
        let _ = what;
    }
    /// The write was sent, whatever came of it.
    fn after(&self, what: &str) {
        let _ = what;
    }
}

/// Watches nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Unwatched;

impl Overseer for Unwatched {}

/// The controller's hands.
pub struct Writer {
    client: kube::Client,
    kubeconfig: PathBuf,
    overseer: Box<dyn Overseer>,
    count: AtomicUsize,
}

impl Writer {
    /// Writer that work with this client; `kubeconfig` is where it came from, for messages.
    #[must_use]
    pub fn new(client: kube::Client, kubeconfig: PathBuf, overseer: Box<dyn Overseer>) -> Self {
        Self { client, kubeconfig, overseer, count: AtomicUsize::new(0) }
    }

    /// The client, for reads.
    #[must_use]
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// A connection whose time starts now; its `read` is how live looks are taken.
    #[must_use]
    pub fn connection(&self) -> Connection {
        Connection::with_client(self.client(), &self.kubeconfig, API_TIMEOUT)
    }

    /// A carrier for the writes of the claim protocol, each counted here.
    #[must_use]
    pub fn api_writer(&self) -> ApiWriter<'_> {
        ApiWriter::new(self.connection(), self)
    }

    /// How many writes were sent.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Sends one write of another kind. None if the world has moved on: gone, changed, or there already.
    ///
    /// # Errors
    /// The server is of no help; if [`ApiError::leaves_doubt`], the write may have happened.
    pub async fn write<T>(
        &self,
        what: &str,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<Option<T>, ApiError> {
        self.about_to(what);
        let sent = self.connection().once(what, request).await;
        self.overseer.after(what);
        match sent {
            Ok(written) => Ok(Some(written)),
            Err(ApiError::Refused { code: 404 | 409 | 410 | 412, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A merge patch on exactly this state of an object.
    ///
    /// # Errors
    /// As [`Writer::write`].
    pub async fn patch<K>(
        &self,
        what: &str,
        api: &Api<K>,
        name: &str,
        at: &Precondition,
        mut patch: Value,
    ) -> Result<Option<K>, ApiError>
    where
        K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
    {
        patch["metadata"]["uid"] = json!(at.uid);
        patch["metadata"]["resourceVersion"] = json!(at.resource_version);
        let params = patch_params();
        self.write(what, api.patch(name, &params, &Patch::Merge(patch))).await
    }

    /// A merge patch of one part on exactly this state of a StickyIP.
    ///
    /// # Errors
    /// As [`Writer::write`].
    pub async fn patch_sticky(
        &self,
        part: &str,
        sticky: &StickyIP,
        patch: Value,
    ) -> Result<Option<StickyIP>, ApiError> {
        let key = sticky_key_of(sticky);
        let api: Api<StickyIP> = Api::namespaced(self.client(), &key.namespace);
        let what = format!("patch {part} of StickyIP {key}");
        self.patch(&what, &api, &key.name, &Precondition::of(sticky), patch).await
    }

    /// Deletes exactly this state of an object.
    ///
    /// # Errors
    /// As [`Writer::write`].
    pub async fn delete<K>(
        &self,
        what: &str,
        api: &Api<K>,
        name: &str,
        at: &Precondition,
    ) -> Result<bool, ApiError>
    where
        K: Clone + serde::de::DeserializeOwned + std::fmt::Debug,
    {
        let preconditions =
            Preconditions { uid: Some(at.uid.clone()), resource_version: Some(at.resource_version.clone()) };
        let params = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        Ok(self.write(what, api.delete(name, &params)).await?.is_some())
    }

    fn about_to(&self, what: &str) {
        self.count.fetch_add(1, Ordering::SeqCst);
        self.overseer.before(what);
    }
}

/// The writes of the claim protocol are counted with the others.
impl WriteObserver for Writer {
    fn before(&self, _: usize, write: SentWrite<'_>) {
        self.about_to(word(write));
    }
    fn after(&self, _: usize, write: SentWrite<'_>) {
        self.overseer.after(word(write));
    }
}

fn word(write: SentWrite<'_>) -> &'static str {
    match write {
        SentWrite::Protocol(write) => write.word(),
        SentWrite::Node(_) => "patch CiliumNode",
        SentWrite::Pod(_) => "patch Pod",
        SentWrite::Event(_) => "create Event",
    }
}
