//! What binding a pod starts from: whether the pod is sticky, and under which name. Must never decide by
//! anything but the pod, its namespace and the operator's rules.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, ListParams};

use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::objects::{ClaimantKind, ClaimantRef, StickyIP, WorkloadRef};
use crate::policy::selection::rules::{Rules, StickyReason};
use crate::policy::selection::slot::{Slot, choose_slot, slot_number};
use crate::policy::{PolicyError, selection::claimant::Claimant, selection::facts::PodFacts};

#[derive(Debug, thiserror::Error)]
pub enum StickyIdentityError {
    #[error(transparent)]
    Policy(#[from] PolicyError),
    #[error(transparent)]
    Api(#[from] ApiError),
}

/// Whether a pod is sticky. Its facts have the annotations of its namespace if those were read.
#[derive(Debug, Clone)]
pub enum Stickiness {
    Sticky { facts: PodFacts, reason: StickyReason },
    NotSticky { reason: StickyReason },
}

/// Whether a pod is sticky. The namespace is read only if its annotation matters.
pub async fn judge(
    rules: &Rules,
    mut facts: PodFacts,
    namespace: impl Future<Output = Result<BTreeMap<String, String>, ApiError>>,
) -> Result<Stickiness, StickyIdentityError> {
    let mut verdict = rules.judge(&facts)?;
    if matches!(verdict.reason, StickyReason::NothingAsksForIt | StickyReason::Selected) {
        facts.namespace_annotations = namespace.await?;
        verdict = rules.judge(&facts)?;
    }
    let reason = verdict.reason;
    Ok(if verdict.sticky { Stickiness::Sticky { facts, reason } } else { Stickiness::NotSticky { reason } })
}

pub(crate) async fn of_namespace(api: &Connection, name: &str) -> Result<BTreeMap<String, String>, ApiError> {
    let namespaces: Api<Namespace> = Api::all(api.client());
    let what = format!("get Namespace {name}");
    let read = api.read(&what, || namespaces.get_metadata_opt(name)).await?;
    Ok(read.and_then(|found| found.metadata.annotations).unwrap_or_default())
}

/// How a StickyIP names its claimant.
pub fn reference(claimant: &Claimant, slot: Option<u32>) -> ClaimantRef {
    match claimant {
        Claimant::Pod { ordinal, .. } => ClaimantRef { kind: ClaimantKind::Pod, ordinal: *ordinal },
        Claimant::Slot { .. } => ClaimantRef { kind: ClaimantKind::Slot, ordinal: slot },
        Claimant::VirtualMachine { .. } => ClaimantRef { kind: ClaimantKind::VirtualMachine, ordinal: None },
    }
}

pub fn workload(claimant: &Claimant) -> WorkloadRef {
    claimant.workload().into()
}

/// The slot of a pod of a Deployment.
pub async fn choose(api: &Connection, claimant: &Claimant, facts: &PodFacts) -> Result<u32, ApiError> {
    let listed = stickies(api, facts).await?;
    let slots: Vec<Slot<'_>> = of_workload(listed.iter(), claimant).map(|(_, slot)| slot).collect();
    Ok(choose_slot(&slots, &facts.uid))
}

/// As [`slot_of_running`], by a live read.
pub(crate) async fn choose_for_running(
    api: &Connection,
    claimant: &Claimant,
    facts: &PodFacts,
    addresses: &[IpAddr],
    avoid: &BTreeSet<u32>,
) -> Result<u32, ApiError> {
    Ok(slot_of_running(stickies(api, facts).await?.iter(), claimant, facts, addresses, avoid))
}

async fn stickies(api: &Connection, facts: &PodFacts) -> Result<Vec<StickyIP>, ApiError> {
    let stickies: Api<StickyIP> = Api::namespaced(api.client(), &facts.namespace);
    let every = ListParams::default();
    Ok(api.read("list StickyIPs", || stickies.list(&every)).await?.items)
}

/// The slots of a workload, each with its number.
fn of_workload<'a>(
    listed: impl Iterator<Item = &'a StickyIP>,
    claimant: &'a Claimant,
) -> impl Iterator<Item = (&'a StickyIP, Slot<'a>)> {
    let workload = &claimant.workload().name;
    listed.filter_map(move |object| {
        let number = slot_number(workload, object.metadata.name.as_deref()?)?;
        let attachment = object.status.as_ref().and_then(|status| status.attachment.as_ref());
        // A name that belongs to another workload is never free.
        let foreign =
            object.spec.claimant.kind != ClaimantKind::Slot || object.spec.workload.name != *workload;
        let held_by = attachment.map(|attachment| attachment.pod_uid.as_str());
        Some((object, Slot { number, held_by: if foreign { Some("") } else { held_by } }))
    })
}

/// The slot of a running pod with these addresses, among these StickyIPs: a free one that has the addresses,
/// else one that does not exist. Never one of the numbers to avoid, and never one with other addresses.
pub(crate) fn slot_of_running<'a>(
    listed: impl Iterator<Item = &'a StickyIP>,
    claimant: &'a Claimant,
    facts: &PodFacts,
    addresses: &[IpAddr],
    avoid: &BTreeSet<u32>,
) -> u32 {
    let (mut slots, mut fitting) = (Vec::new(), None::<u32>);
    for (object, slot) in of_workload(listed, claimant) {
        let fits = addresses.iter().all(|address| object.spec.addresses.contains(address));
        if slot.held_by.is_none() && fits {
            fitting = Some(fitting.map_or(slot.number, |before| before.min(slot.number)));
        }
        // One with other addresses is not free for a pod that has its own already.
        slots.push(Slot { held_by: slot.held_by.or((!fits).then_some("")), ..slot });
    }
    if let Some(fitting) = fitting.filter(|_| slots.iter().all(|slot| slot.held_by != Some(&facts.uid))) {
        return fitting;
    }
    slots.extend(avoid.iter().map(|&number| Slot { number, held_by: Some("") }));
    choose_slot(&slots, &facts.uid)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::selection::facts::fixture::pod;
    use serde_json::json;

    fn slot(name: &str, address: &str, held_by: Option<&str>) -> StickyIP {
        let attachment = held_by.map(|uid| {
            json!({"node": "n1", "podName": "p", "podUid": uid, "attachmentId": "c", "since": "2026-01-01T00:00:00Z"})
        });
        let object = json!({"metadata": {"name": name, "namespace": "db"}, "spec": {"addresses": [address],
            "claimant": {"kind": "Slot"}, "workload": {"apiVersion": "t/v1", "kind": "Fleet", "name": "web"}},
            "status": {"attachment": attachment}});
        serde_json::from_value(object).unwrap()
    }

    #[test]
    fn a_running_pod_gets_a_slot_that_stands_for_its_address_or_for_none() {
        let facts = pod("web-x").owned_by("t/v1", "Fleet", "web");
        let claimant = Claimant::of(&facts);
        let chosen = |listed: &[StickyIP], avoid: &[u32]| {
            let (addresses, avoid) = (["10.0.0.1".parse().unwrap()], avoid.iter().copied().collect());
            slot_of_running(listed.iter(), &claimant, &facts, &addresses, &avoid)
        };
        assert_eq!(chosen(&[], &[]), 0);
        assert_eq!(chosen(&[], &[0, 1, 3]), 2);
        let other = slot("web-0", "10.0.0.9", None);
        assert_eq!(chosen(std::slice::from_ref(&other), &[]), 1, "kept with another address");
        let all = [other.clone(), slot("web-3", "10.0.0.1", None)];
        assert_eq!(chosen(&all, &[3]), 3, "made for its address, and its claim names it");
        let all = [other.clone(), slot("web-3", "10.0.0.1", Some("another"))];
        assert_eq!(chosen(&all, &[]), 1);
        let all = [other, slot("web-3", "10.0.0.1", None), slot("web-4", "10.0.0.8", Some(&facts.uid))];
        assert_eq!(chosen(&all, &[]), 4, "it holds one");
    }
}
