//! What a pod's walk starts from: whether the pod is sticky, under which name, and with which pin. Must never decide
//! by anything but the pod, its namespace and the operator's rules.

use std::collections::BTreeMap;
use std::future::Future;

use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, ListParams};

use crate::cluster::client::{ApiError, Connection};
use crate::cluster::objects::{ClaimantKind, ClaimantRef, StickyIP, WorkloadRef};
use crate::policy::PolicyError;
use crate::policy::claimant::{Claimant, Slot, choose_slot, slot_number};
use crate::policy::facts::PodFacts;
use crate::policy::sticky::{Reason, Rules};

/// Why an errand cannot begin.
#[derive(Debug, thiserror::Error)]
pub enum ErrandError {
    /// What the pod or its namespace asks for cannot be followed.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The server was of no help.
    #[error(transparent)]
    Api(#[from] ApiError),
}

/// The facts of a sticky pod, and why it is one or none. The namespace is asked for only where its word counts.
///
/// # Errors
/// See [`ErrandError`].
pub async fn judge(
    rules: &Rules,
    mut facts: PodFacts,
    namespace: impl Future<Output = Result<BTreeMap<String, String>, ApiError>>,
) -> Result<(bool, PodFacts, Reason), ErrandError> {
    let mut verdict = rules.judge(&facts)?;
    if matches!(verdict.reason, Reason::NothingAsksForIt | Reason::Selected) {
        facts.namespace_annotations = namespace.await?;
        verdict = rules.judge(&facts)?;
    }
    Ok((verdict.sticky, facts, verdict.reason))
}

/// The annotations of a namespace.
///
/// # Errors
/// The server is of no help.
pub async fn of_namespace(api: &Connection, name: &str) -> Result<BTreeMap<String, String>, ApiError> {
    let namespaces: Api<Namespace> = Api::all(api.client());
    let what = format!("get Namespace {name}");
    let read = api.read(&what, || namespaces.get_metadata_opt(name)).await?;
    Ok(read.and_then(|found| found.metadata.annotations).unwrap_or_default())
}

/// How a StickyIP names its claimant.
#[must_use]
pub fn reference(claimant: &Claimant, slot: Option<u32>) -> ClaimantRef {
    match claimant {
        Claimant::Pod { ordinal, .. } => ClaimantRef { kind: ClaimantKind::Pod, ordinal: *ordinal },
        Claimant::Slot { .. } => ClaimantRef { kind: ClaimantKind::Slot, ordinal: slot },
        Claimant::VirtualMachine { .. } => ClaimantRef { kind: ClaimantKind::VirtualMachine, ordinal: None },
    }
}

/// How a StickyIP names its workload.
#[must_use]
pub fn workload(claimant: &Claimant) -> WorkloadRef {
    claimant.workload().into()
}

/// The slot of a pod of a Deployment.
///
/// # Errors
/// The server is of no help.
pub async fn choose(api: &Connection, claimant: &Claimant, facts: &PodFacts) -> Result<u32, ApiError> {
    let stickies: Api<StickyIP> = Api::namespaced(api.client(), &facts.namespace);
    let every = ListParams::default();
    let listed = api.read("list StickyIPs", || stickies.list(&every)).await?;
    let workload = &claimant.workload().name;
    let slots: Vec<Slot<'_>> = listed
        .items
        .iter()
        .filter_map(|object| {
            let number = slot_number(workload, object.metadata.name.as_deref()?)?;
            let attachment = object.status.as_ref().and_then(|status| status.attachment.as_ref());
            // A name that another workload has is held by it for good.
            let foreign =
                object.spec.claimant.kind != ClaimantKind::Slot || object.spec.workload.name != *workload;
            let held_by = attachment.map(|attachment| attachment.pod_uid.as_str());
            Some(Slot { number, held_by: if foreign { Some("") } else { held_by } })
        })
        .collect();
    Ok(choose_slot(&slots, &facts.uid))
}
