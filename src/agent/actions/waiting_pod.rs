//! What is asked of a pod that waits for its ADD.

use std::collections::BTreeMap;
use std::future::Future;

use super::context::ActionContext;
use super::outcome::{ActionError, Performed, not_needed};
use crate::agent::{index::NodePod, snapshot::uid_of};
use crate::cluster::api::client::ApiError;
use crate::cluster::protocol::sticky_identity::{self, Stickiness, StickyIdentityError};
use crate::names::PodIdentity;
use crate::store::{Disk, Store};

impl<'a, D: Disk + Clone> ActionContext<'a, D> {
    /// The annotations of a namespace. Of many pods that wait, only the first costs a request.
    pub(super) async fn namespace(&self, name: &str) -> Result<BTreeMap<String, String>, ApiError> {
        if let Some(known) = self.namespaces.get(name) {
            return Ok(known);
        }
        let annotations = sticky_identity::of_namespace(&self.connection(), name).await?;
        self.namespaces.keep(name, &annotations);
        Ok(annotations)
    }

    /// The pod that the watch shows under this name, if it has this uid.
    pub(super) fn waiting_pod(&self, pod: &str, uid: &str) -> Option<&'a NodePod> {
        self.index.pods.get(pod).filter(|found| found.runtime_uid == uid)
    }

    pub(super) async fn judge(
        &self,
        seen: &NodePod,
        namespace: impl Future<Output = Result<BTreeMap<String, String>, ApiError>>,
    ) -> Result<Stickiness, StickyIdentityError> {
        sticky_identity::judge(&self.settings.selection.rules(), seen.facts.clone(), namespace).await
    }
}

pub(super) fn replaced() -> Performed {
    not_needed("the pod is gone, or has another uid")
}

/// Whether the store knows a sandbox of the pod.
pub(super) fn has_record<D: Disk>(store: &Store<D>, seen: &NodePod) -> Performed<bool> {
    let mut records = store.address_files()?.into_iter().filter_map(|found| found.record);
    Ok(records.any(|record| record.is_attached(store.now()) && uid_of(&record) == Some(&seen.runtime_uid)))
}

/// The pod, by the uid that the runtime knows.
pub(super) fn identity(seen: &NodePod) -> Performed<PodIdentity> {
    let facts = &seen.facts;
    PodIdentity::new(&facts.namespace, &facts.name, Some(&seen.runtime_uid))
        .map_err(|error| ActionError::Name(error.to_string()))
}
