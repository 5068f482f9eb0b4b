//! Sends one write with exactly its precondition. Must never decide anything, and never write without the
//! precondition that the write names.

use std::future::Future;
use std::net::IpAddr;
use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::{Value, json};

use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::objects::cilium_patch::NodePatch;
use crate::cluster::objects::sticky_ip::retention_set;
use crate::cluster::objects::{
    AddressClaim, AddressClaimSpec, ClaimName, ClaimPhase, StickyIP, StickyIPSpec, StickyIPStatus,
    StickyPhase, labels,
};
use crate::cluster::writer::status::{attached_status, conflict_status, left_behind, now};
use crate::cluster::writer::write::{Precondition, Write};
use crate::names::StickyKey;
use crate::policy::lifetime::retention::Retention;

pub(crate) const FIELD_MANAGER: &str = "sticky-ipam";

/// The longest reason that a claim takes.
const LONGEST_REASON: usize = 1024;

/// A write to the API server on its way.
#[derive(Debug, Clone, Copy)]
pub enum SentWrite<'a> {
    Protocol(&'a Write),
    Node(&'a NodePatch),
    /// One to a pod of this name: what it asks of Cilium.
    Pod(&'a str),
    /// An event of this name: nothing depends on it.
    Event(&'a str),
    /// Any other, as its request is called in messages.
    Other(&'a str),
}

impl<'a> SentWrite<'a> {
    pub fn description(self) -> &'a str {
        match self {
            Self::Protocol(write) => write.word(),
            Self::Node(_) => "patch CiliumNode",
            Self::Pod(_) => "patch Pod",
            Self::Event(_) => "create Event",
            Self::Other(what) => what,
        }
    }
}

/// Observes every write of plugin, agent and controller, by number from 1. Tests stop a process there.
pub trait WriteObserver: Send + Sync {
    /// The write is about to be sent.
    fn before(&self, _number: usize, _write: SentWrite<'_>) {}
    /// The write was sent, whatever came of it.
    fn after(&self, _number: usize, _write: SentWrite<'_>) {}
}

#[derive(Debug, Clone, Copy, Default)]
pub struct NoObserver;

impl WriteObserver for NoObserver {}

#[derive(Debug)]
pub enum Applied {
    /// A StickyIP was written; this is its new state.
    Sticky(Box<StickyIP>),
    /// A claim was written; this is its new state.
    Claim(Box<AddressClaim>),
    /// The object is gone, or going.
    Deleted,
    /// The precondition did not hold. Read again.
    Conflict,
}

/// What came of a write, or why that is not known.
type Outcome = Result<Applied, ApiError>;

/// Sends writes, one at a time.
pub struct ApiWriter<'a> {
    api: Connection,
    observer: &'a dyn WriteObserver,
    count: usize,
    /// Numbers the writes of several writers in one sequence.
    sequence: Option<&'a AtomicUsize>,
}

impl<'a> ApiWriter<'a> {
    pub fn new(api: Connection, observer: &'a dyn WriteObserver) -> Self {
        Self { api, observer, count: 0, sequence: None }
    }

    /// One of several writers with one observer, which sees their writes numbered by this sequence.
    pub fn in_sequence(api: Connection, observer: &'a dyn WriteObserver, sequence: &'a AtomicUsize) -> Self {
        Self { api, observer, count: 0, sequence: Some(sequence) }
    }

    pub fn count(&self) -> usize {
        self.count
    }

    pub fn api(&self) -> &Connection {
        &self.api
    }

    pub fn api_mut(&mut self) -> &mut Connection {
        &mut self.api
    }

    /// Sends one write. `known` is the StickyIP as it was read, for the part of its status that grows; `pod`
    /// is the name of the pod that is attached.
    /// Errors: the request to the API server failed. If [`ApiError::leaves_doubt`], it may have been applied.
    pub async fn apply(&mut self, write: &Write, known: Option<&StickyIP>, pod: &str) -> Outcome {
        if let Some((sticky_ref, uid)) = write.must_be_gone()
            && self.is_there(sticky_ref, uid).await?
        {
            return Ok(Applied::Conflict);
        }
        let number = self.before(SentWrite::Protocol(write));
        let sent = self.send(write, known, pod).await;
        self.observer.after(number, SentWrite::Protocol(write));
        match sent {
            // Exists already, or changed; gone; or against the validation of its phases: a conflict.
            Err(ApiError::Refused { code: 404 | 409 | 410 | 412, .. }) => Ok(Applied::Conflict),
            other => other,
        }
    }

    /// Sends a write of another kind, observed.
    pub async fn observed<T>(
        &mut self,
        write: SentWrite<'_>,
        request: impl Future<Output = Result<T, ApiError>>,
    ) -> Result<T, ApiError> {
        let number = self.before(write);
        let sent = request.await;
        self.observer.after(number, write);
        sent
    }

    fn before(&mut self, write: SentWrite<'_>) -> usize {
        self.count += 1;
        let number = self.sequence.map_or(self.count, |sequence| sequence.fetch_add(1, Ordering::SeqCst) + 1);
        self.observer.before(number, write);
        number
    }

    /// Whether the StickyIP with this uid exists, by a live read.
    async fn is_there(&self, sticky_ref: &StickyKey, uid: &str) -> Result<bool, ApiError> {
        let api: Api<StickyIP> = Api::namespaced(self.api.client(), &sticky_ref.namespace);
        let what = format!("get StickyIP {sticky_ref}");
        match self.api.read(&what, || api.get_metadata(&sticky_ref.name)).await {
            Ok(found) => Ok(found.metadata.uid.as_deref() == Some(uid)),
            Err(error) if error.says_gone(&sticky_ref.name) => Ok(false),
            Err(error) => Err(error),
        }
    }

    async fn send(&self, write: &Write, known: Option<&StickyIP>, pod: &str) -> Outcome {
        match write {
            Write::CreateClaim { address, sticky_ref, phase, sticky_uid, origin, pod } => {
                let (home, block) = origin.home_and_block();
                let spec = AddressClaimSpec {
                    address: *address,
                    phase: *phase,
                    sticky_ref: sticky_ref.clone(),
                    sticky_uid: sticky_uid.clone(),
                    home_node: home.map(str::to_owned),
                    block: block.map(|block| block.to_string()),
                    reason: None,
                    pod: pod.clone(),
                    released: None,
                    in_use_by: None,
                };
                let mut claim = AddressClaim::new(&ClaimName::of(*address).to_string(), spec);
                if let Some(block) = block {
                    let label = (labels::BLOCK.to_owned(), labels::block_value(block));
                    claim.metadata.labels = Some([label].into());
                }
                let what = format!("create AddressClaim {address}");
                let made = self.api.once(&what, self.claims().create(&post_params(), &claim)).await?;
                Ok(Applied::Claim(Box::new(made)))
            }
            Write::AnswerClaim { address, at, refused } => {
                let spec = match refused {
                    None => json!({"phase": ClaimPhase::Granted}),
                    Some(reason) => {
                        let reason = &reason[..reason.floor_char_boundary(LONGEST_REASON)];
                        json!({"phase": ClaimPhase::Refused, "reason": reason})
                    }
                };
                self.patch_claim(*address, at, spec).await
            }
            Write::SealClaim { address, at, sticky_uid } => {
                let spec = json!({"phase": ClaimPhase::Bound, "stickyUid": sticky_uid, "released": null});
                self.patch_claim(*address, at, spec).await
            }
            Write::QuarantineClaim { address, at, released, .. } => {
                let mut spec = json!({"phase": ClaimPhase::Quarantined});
                if *released {
                    spec["released"] = true.into();
                }
                self.patch_claim(*address, at, spec).await
            }
            Write::ClearPod { address, at } => self.patch_claim(*address, at, json!({"pod": null})).await,
            Write::ReportUse { address, at, in_use_by } => {
                let by = in_use_by.as_ref().map(|by| &by[..by.floor_char_boundary(LONGEST_REASON)]);
                self.patch_claim(*address, at, json!({"inUseBy": by})).await
            }
            Write::DeleteClaim { address, at } => {
                let name = ClaimName::of(*address).to_string();
                let what = format!("delete AddressClaim {address}");
                self.api.once(&what, self.claims().delete(&name, &at.delete_params())).await?;
                Ok(Applied::Deleted)
            }
            Write::CreateSticky { key, addresses, claimant, workload, retention } => {
                let spec = StickyIPSpec {
                    addresses: addresses.clone(),
                    claimant: *claimant,
                    workload: workload.clone(),
                    owners: Vec::new(),
                    retention: *retention,
                };
                let mut object = StickyIP::new(&key.name, spec);
                if *retention != Retention::default() {
                    // Without it the controller would take the retention as set by hand and not change it.
                    object.metadata.annotations = Some(retention_set(*retention));
                }
                let what = format!("create StickyIP {key}");
                let made = self.api.once(&what, self.stickies(key).create(&post_params(), &object)).await?;
                Ok(Applied::Sticky(Box::new(made)))
            }
            Write::DeleteSticky { key, at } => {
                let what = format!("delete StickyIP {key}");
                self.api.once(&what, self.stickies(key).delete(&key.name, &at.delete_params())).await?;
                Ok(Applied::Deleted)
            }
            Write::Attach { key, at, attached, takeover } => {
                let Some(known) = read_at(known, at) else { return Ok(Applied::Conflict) };
                let status = known.status.clone().unwrap_or_default();
                self.put_status(key, known, attached_status(status, attached, *takeover, pod, now())).await
            }
            Write::Detach { key, at, proof } => {
                // A merge patch removes a field by null.
                let mut status =
                    json!({"attachment": null, "phase": StickyPhase::Retained, "lastSeen": Time(now())});
                if let Some(proof) = proof {
                    let Some(known) = status_at(known, at) else { return Ok(Applied::Conflict) };
                    status["handovers"] = json!(left_behind(known, *proof, now()).handovers);
                }
                self.patch_status(key, at, &status).await
            }
            Write::RecordMac { key, at, mac } => self.patch_status(key, at, &json!({"mac": mac})).await,
            Write::MarkConflict { key, at, address, held_by } => {
                let Some(status) = status_at(known, at) else { return Ok(Applied::Conflict) };
                let generation = known.and_then(|known| known.metadata.generation);
                let status = conflict_status(status, generation, key, *address, held_by, now());
                self.patch_status(key, at, &status).await
            }
        }
    }

    async fn patch_claim(&self, address: IpAddr, at: &Precondition, spec: Value) -> Outcome {
        let name = ClaimName::of(address).to_string();
        let mut metadata = at.metadata();
        // Only we write claims, and recording the owner of each field would be a quarter of the write
        // (docs/decisions/0024).
        metadata["managedFields"] = json!([{}]);
        let patch = Patch::Merge(json!({"metadata": metadata, "spec": spec}));
        let what = format!("patch AddressClaim {address}");
        let made = self.api.once(&what, self.claims().patch(&name, &patch_params(), &patch)).await?;
        Ok(Applied::Claim(Box::new(made)))
    }

    /// Writes the whole status of an object, if it is still as it was read. Cheaper for the server than a
    /// patch, and every start of a pod waits for it (docs/decisions/0024).
    async fn put_status(&self, key: &StickyKey, known: &StickyIP, status: StickyIPStatus) -> Outcome {
        // By this path the server takes the status alone. All else is there as it was read, with uid and
        // resourceVersion: before 1.36, what a body lacks of the metadata would lose its owner.
        let mut object = StickyIP { status: Some(status), ..known.clone() };
        object.metadata.managed_fields = None;
        let (what, api) = (format!("update the status of StickyIP {key}"), self.stickies(key));
        let made = self.api.once(&what, api.replace_status(&key.name, &post_params(), &object)).await?;
        Ok(Applied::Sticky(Box::new(made)))
    }

    async fn patch_status(&self, key: &StickyKey, at: &Precondition, status: &Value) -> Outcome {
        let patch = Patch::Merge(json!({"metadata": at.metadata(), "status": status}));
        let (what, api) = (format!("patch the status of StickyIP {key}"), self.stickies(key));
        let made = self.api.once(&what, api.patch_status(&key.name, &patch_params(), &patch)).await?;
        Ok(Applied::Sticky(Box::new(made)))
    }

    fn claims(&self) -> Api<AddressClaim> {
        Api::all(self.api.client())
    }

    fn stickies(&self, key: &StickyKey) -> Api<StickyIP> {
        Api::namespaced(self.api.client(), &key.namespace)
    }
}

/// Every creation of ours names its writer.
pub(crate) fn post_params() -> PostParams {
    PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() }
}

/// Every patch of ours names its writer.
pub(crate) fn patch_params() -> PatchParams {
    PatchParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PatchParams::default() }
}

/// The object, if it is in the state that the write requires.
fn read_at<'a>(known: Option<&'a StickyIP>, at: &Precondition) -> Option<&'a StickyIP> {
    known.filter(|known| {
        known.metadata.resource_version.as_deref() == Some(&at.resource_version)
            && known.metadata.uid.as_deref() == Some(&at.uid)
    })
}

fn status_at(known: Option<&StickyIP>, at: &Precondition) -> Option<StickyIPStatus> {
    Some(read_at(known, at)?.status.clone().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_that_grew_is_not_written_over() {
        let mut known = StickyIP::new(
            "db-0",
            StickyIPSpec {
                addresses: vec!["10.0.0.1".parse().unwrap()],
                claimant: crate::cluster::objects::ClaimantRef {
                    kind: crate::cluster::objects::ClaimantKind::Pod,
                    ordinal: None,
                },
                workload: Default::default(),
                owners: Vec::new(),
                retention: Retention::default(),
            },
        );
        known.metadata.uid = Some("u1".into());
        known.metadata.resource_version = Some("7".into());
        let at = |version: &str| Precondition { uid: "u1".into(), resource_version: version.into() };
        assert!(status_at(Some(&known), &at("7")).is_some());
        assert!(status_at(Some(&known), &at("8")).is_none());
        assert!(status_at(None, &at("7")).is_none());
    }
}
