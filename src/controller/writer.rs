//! Sends the controller's writes, each with its precondition, observed and counted. Must never decide
//! anything, and never write without saying what must not have changed.

use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kube::api::{Api, Patch};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::writer::apply::{ApiWriter, SentWrite, WriteObserver, patch_params};
use crate::cluster::{objects::StickyIP, writer::write::Precondition};
use crate::controller::index::objects::sticky_key_of;

/// How long the API server may take over one request.
const API_TIMEOUT: Duration = Duration::from_secs(15);

pub struct Writer {
    client: kube::Client,
    kubeconfig: PathBuf,
    observer: Box<dyn WriteObserver>,
    count: AtomicUsize,
}

impl Writer {
    /// `kubeconfig` is where the client came from, for messages.
    pub fn new(client: kube::Client, kubeconfig: PathBuf, observer: Box<dyn WriteObserver>) -> Self {
        Self { client, kubeconfig, observer, count: AtomicUsize::new(0) }
    }

    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// A connection whose time starts now, for live reads.
    pub fn connection(&self) -> Connection {
        Connection::with_client(self.client(), &self.kubeconfig, API_TIMEOUT)
    }

    /// A writer of the claim protocol, whose writes are counted here.
    pub fn api_writer(&self) -> ApiWriter<'_> {
        ApiWriter::in_sequence(self.connection(), &*self.observer, &self.count)
    }

    pub fn count(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }

    /// Sends one write of another kind. None on a conflict: the object is gone, changed, or exists already.
    /// Errors: the request to the API server failed. If [`ApiError::leaves_doubt`], it may have been applied.
    pub async fn write<T>(
        &self,
        what: &str,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<Option<T>, ApiError> {
        let number = self.count.fetch_add(1, Ordering::SeqCst) + 1;
        self.observer.before(number, SentWrite::Other(what));
        let sent = self.connection().once(what, request).await;
        self.observer.after(number, SentWrite::Other(what));
        match sent {
            Ok(written) => Ok(Some(written)),
            Err(ApiError::Refused { code: 404 | 409 | 410 | 412, .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A merge patch on exactly this state of an object.
    pub async fn patch<K: Clone + DeserializeOwned + Debug>(
        &self,
        what: &str,
        api: &Api<K>,
        name: &str,
        at: &Precondition,
        mut patch: Value,
    ) -> Result<Option<K>, ApiError> {
        patch["metadata"]["uid"] = json!(at.uid);
        patch["metadata"]["resourceVersion"] = json!(at.resource_version);
        self.write(what, api.patch(name, &patch_params(), &Patch::Merge(patch))).await
    }

    /// A merge patch of one part on exactly this state of a StickyIP.
    pub(crate) async fn patch_sticky(
        &self,
        part: &str,
        sticky: &StickyIP,
        patch: Value,
    ) -> Result<Option<StickyIP>, ApiError> {
        let key = sticky_key_of(sticky);
        let api = Api::namespaced(self.client(), &key.namespace);
        let what = format!("patch {part} of StickyIP {key}");
        self.patch(&what, &api, &key.name, &Precondition::of(sticky), patch).await
    }

    /// Deletes exactly this state of an object.
    pub async fn delete<K: Clone + DeserializeOwned + Debug>(
        &self,
        what: &str,
        api: &Api<K>,
        name: &str,
        at: &Precondition,
    ) -> Result<bool, ApiError> {
        Ok(self.write(what, api.delete(name, &at.delete_params())).await?.is_some())
    }
}
