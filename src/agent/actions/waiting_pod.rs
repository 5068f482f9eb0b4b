//! What is asked of a pod that waits for its ADD.

use std::collections::BTreeMap;
use std::future::Future;

use super::context::ActionContext;
use super::outcome::{ActionError, ActionOutcome};
use crate::agent::index::NodePod;
use crate::agent::snapshot::uid_of;
use crate::cluster::api::client::ApiError;
use crate::cluster::protocol::sticky_identity::{self, Stickiness, StickyIdentityError};
use crate::names::PodIdentity;
use crate::store::{Disk, Store};

/// The pod that the watch shows under this name, if it has this uid.
pub(super) fn find<'a, D: Disk + Clone>(
    context: &ActionContext<'a, D>,
    pod: &str,
    uid: &str,
) -> Option<&'a NodePod> {
    context.index.pods.get(pod).filter(|found| found.runtime_uid == uid)
}

/// That there is none.
pub(super) fn replaced() -> ActionOutcome {
    ActionOutcome::NotNeeded("the pod is gone, or has another uid".into())
}

/// Whether the pod is sticky.
pub(super) async fn judge<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    seen: &NodePod,
    namespace: impl Future<Output = Result<BTreeMap<String, String>, ApiError>>,
) -> Result<Stickiness, StickyIdentityError> {
    sticky_identity::judge(&context.settings.selection.rules(), seen.facts.clone(), namespace).await
}

/// Whether the store knows a sandbox of the pod.
pub(super) fn has_record<D: Disk + Clone>(store: &Store<D>, seen: &NodePod) -> Result<bool, ActionError> {
    let mut records = store.address_files()?.into_iter().filter_map(|found| found.record);
    Ok(records
        .any(|record| record.is_attached(store.now()) && uid_of(&record) == Some(seen.runtime_uid.as_str())))
}

/// The pod, by the uid that the runtime knows.
pub(super) fn identity(seen: &NodePod) -> Result<PodIdentity, ActionError> {
    let (facts, uid) = (&seen.facts, &seen.runtime_uid);
    PodIdentity::new(&facts.namespace, &facts.name, Some(uid))
        .map_err(|error| ActionError::Name(error.to_string()))
}
