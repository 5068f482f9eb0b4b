//! The cluster's part of the verbs: who is sticky, attach and detach through the API server, and what happens when it is
//! away. Must never give a sticky pod another address than its own, unless the operator allowed it.

use std::future::Future;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Api, ListParams};

use super::ground::Here;
use super::{Scene, Story, attachment};
use crate::cluster::claims::carry::Carrier;
use crate::cluster::claims::step::Refusal;
use crate::cluster::claims::walk::{self, Detached, WalkError, Walker};
use crate::cluster::client::{ApiError, Connection};
use crate::cluster::objects::{ClaimantKind, ClaimantRef, Holder, StickyIP, WorkloadRef};
use crate::cluster::pod;
use crate::cni::{Attachment, ClusterConf, CniError, OnUnavailable, PodIdentity, Request, code};
use crate::policy::claimant::{Claimant, Slot, choose_slot, slot_name, slot_number};
use crate::policy::facts::PodFacts;
use crate::policy::handover::Attached;
use crate::policy::pin::pin_of;
use crate::policy::sticky::Reason;
use crate::store::{self, Binding, Disk, Note, Phase, Record, Told};

/// How often a pod of a Deployment chooses another slot because somebody was faster.
const MOST_SLOTS: usize = 16;

/// Why the cluster's part of an ADD did not come to an end.
enum Why {
    /// The runtime gets this.
    Told(CniError),
    /// The API server could not be asked; nothing was written yet.
    Unasked(ApiError),
    /// The API server went away in the middle.
    Doubt(ApiError),
}

impl From<CniError> for Why {
    fn from(error: CniError) -> Self {
        Self::Told(error)
    }
}

/// The addresses of a sticky pod by range set; none if the pod is not sticky, or is to be served by this node alone.
pub(super) fn add<D: Disk>(
    request: &Request,
    scene: &Scene<'_, D>,
    conf: &ClusterConf,
    pod: &PodIdentity,
    wanted: &[Option<IpAddr>],
    story: &mut Story<'_>,
) -> Result<Option<Vec<IpAddr>>, CniError> {
    let attachment = attachment(request)?;
    {
        let mut locked = scene.store.lock()?;
        if let Some(held) = locked.of_attachment(attachment)? {
            if held.record.binding.is_none() {
                return Ok(None);
            }
            locked.sync_again(&held)?;
            locked.commit()?;
            story.tell(&held.record.addresses, "this container has it already");
            return Ok(Some(held.record.addresses));
        }
    }
    let itself = store::Claimant::new(pod, &attachment.interface);
    let _turn = scene.store.turn(&itself, scene.sticky.lock_timeout)?;
    let asked = block_on(ask(request, scene, conf, pod, wanted, story))?;
    let (unasked, error) = match asked {
        Ok(answer) => return Ok(answer),
        Err(Why::Told(error)) => return Err(error),
        Err(Why::Unasked(error)) => (true, error),
        Err(Why::Doubt(error)) => (false, error),
    };
    if let Some(addresses) = from_record(request, scene, pod, attachment)? {
        tracing::warn!(%error, "the API server was of no help; the pod has what this node remembers of it");
        story.tell(&addresses, "remembered, the API server is away");
        return Ok(Some(addresses));
    }
    match conf.on_unavailable {
        OnUnavailable::Allocate if unasked => {
            tracing::warn!(%error, "the API server was of no help; the pod gets an address that it does not keep");
            Ok(None)
        }
        // In doubt the runtime's DEL comes first and takes back what may stand.
        _ => Err(CniError::try_again(error.to_string())),
    }
}

fn block_on<T>(work: impl Future<Output = T>) -> Result<T, CniError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    match runtime {
        Ok(runtime) => Ok(runtime.block_on(work)),
        Err(error) => Err(CniError::io(format!("cannot wait for the API server: {error}"))),
    }
}

async fn ask<D: Disk>(
    request: &Request,
    scene: &Scene<'_, D>,
    conf: &ClusterConf,
    pod: &PodIdentity,
    wanted: &[Option<IpAddr>],
    story: &mut Story<'_>,
) -> Result<Option<Vec<IpAddr>>, Why> {
    let api = Connection::open(&conf.kubeconfig, conf.timeout).await.map_err(Why::Unasked)?;
    let mut carrier = Carrier::new(api, story.witness);
    let itself = Holder { namespace: pod.namespace().to_owned(), name: pod.name().to_owned() };
    let pods: Api<Pod> = Api::namespaced(carrier.api().client(), pod.namespace());
    let what = format!("get Pod {pod}");
    let (found, sticky) = tokio::try_join!(
        carrier.api().read(&what, || pods.get_opt(pod.name())),
        walk::read_sticky(&carrier, &itself),
    )
    .map_err(Why::Unasked)?;
    let found = the_pod_that_is_meant(found, pod, &conf.node)?;
    let facts = match judge(&carrier, conf, &found).await? {
        Ok(facts) => facts,
        Err(reason) => {
            tracing::debug!(%pod, %reason, "the pod is not sticky");
            return Ok(None);
        }
    };
    if let Some(address) = wanted.iter().flatten().next() {
        return Err(CniError::new(
            code::REQUEST_REFUSED,
            format!("{address} is requested for the sticky pod {pod}; ask for it by the annotation sticky-ipam.io/ips"),
        )
        .into());
    }
    let attachment = attachment(request)?;
    let claimant = Claimant::of(&facts);
    let refused = |error: crate::policy::PolicyError| CniError::new(code::REQUEST_REFUSED, error.to_string());
    // The uid that the runtime knows is the one that later DELs and other nodes can compare.
    let uid = pod.uid().unwrap_or(&facts.uid).to_owned();
    let asker = Attached {
        node: conf.node.clone(),
        pod_uid: facts.uid.clone(),
        container_id: attachment.container.as_str().to_owned(),
    };
    for _ in 0..MOST_SLOTS {
        let (key, reference, read) = match claimant.fixed_name() {
            Some(name) if name == itself.name => {
                (itself.clone(), reference(&claimant, None), Some(sticky.clone()))
            }
            Some(name) => {
                (Holder { name: name.to_owned(), ..itself.clone() }, reference(&claimant, None), None)
            }
            None => {
                let slot = choose(&carrier, &claimant, &facts).await?;
                let name = slot_name(&claimant.workload().name, slot);
                (Holder { name, ..itself.clone() }, reference(&claimant, Some(slot)), None)
            }
        };
        let pin = pin_of(&facts, reference.ordinal).map_err(refused)?;
        let workload = claimant.workload();
        let walker = Walker {
            asker: asker.clone(),
            pod: pod.name().to_owned(),
            key: key.clone(),
            claimant: reference,
            workload: WorkloadRef {
                api_version: workload.api_version.clone(),
                kind: workload.kind.clone(),
                name: workload.name.clone(),
                uid: workload.uid.clone(),
            },
            pinned: pin.map(|pin| pin.addresses).unwrap_or_default(),
            patience: scene.sticky.wait_for_old_pod,
        };
        let named = PodIdentity::new(pod.namespace(), pod.name(), Some(&uid))?;
        let node = conf.node.as_str();
        let mut here = Here { request, scene, node, attachment, key, pod: named, reserved: Vec::new() };
        match walker.walk(&mut carrier, &mut here, read).await {
            Ok(addresses) => {
                let addresses = here.settle(&addresses)?;
                story.tell(&addresses, format!("bound by StickyIP {}", walker.key));
                return Ok(Some(addresses));
            }
            // Another pod was faster on this slot.
            Err(WalkError::Refused(Refusal::Handover { .. })) if claimant.fixed_name().is_none() => {
                carrier.api_mut().restart_time();
                unreserve(&carrier, &here).await?;
            }
            Err(WalkError::Api(error)) if carrier.count() == 0 => return Err(Why::Unasked(error)),
            Err(WalkError::Api(error)) => return Err(Why::Doubt(error)),
            Err(error) => {
                if matches!(error, WalkError::Refused(_) | WalkError::Waited { .. }) {
                    carrier.api_mut().restart_time();
                    unreserve(&carrier, &here).await?;
                }
                return Err(Why::Told(to_cni(&error)));
            }
        }
    }
    Err(CniError::try_again(format!("others took every slot that {pod} chose")).into())
}

/// Lets go of what was reserved for a walk that was refused, if nobody claims it. The StickyIP that this walk made may have been
/// attached by a faster pod of another node: then the address lives there, and this node, its home, must keep it from others.
async fn unreserve<D: Disk>(carrier: &Carrier<'_>, here: &Here<'_, D>) -> Result<(), CniError> {
    match walk::is_any_claimed(carrier, &here.reserved).await {
        Ok(false) => Ok(here.unreserve()?),
        Ok(true) => Ok(()),
        Err(error) => {
            tracing::warn!(%error, "cannot tell whether an address is claimed; it stays reserved");
            Ok(())
        }
    }
}

/// Refuses a pod that does not exist, is another one, or runs elsewhere: names in CNI_ARGS prove nothing.
fn the_pod_that_is_meant(found: Option<Pod>, pod: &PodIdentity, node: &str) -> Result<Pod, CniError> {
    let Some(found) = found else {
        return Err(CniError::try_again(format!("pod {pod} does not exist in the API server")));
    };
    if let Some(uid) = pod.uid().filter(|uid| !pod::is_meant(&found, uid)) {
        let there = found.metadata.uid.as_deref().unwrap_or_default();
        let message = format!("pod {pod} has the uid {there} in the API server, not {uid} as in CNI_ARGS");
        return Err(CniError::try_again(message));
    }
    match found.spec.as_ref().and_then(|spec| spec.node_name.as_deref()) {
        Some(bound) if bound == node => Ok(found),
        bound => Err(CniError::invalid_environment(format!(
            "CNI_ARGS: pod {pod} is bound to node {:?}, and this is node {node:?}; is sticky.cluster.node right?",
            bound.unwrap_or_default()
        ))),
    }
}

/// The facts of a sticky pod, or why it is none. The namespace is looked up only where its word counts.
async fn judge(
    carrier: &Carrier<'_>,
    conf: &ClusterConf,
    found: &Pod,
) -> Result<Result<PodFacts, Reason>, Why> {
    let refused = |error: crate::policy::PolicyError| {
        Why::Told(CniError::new(code::REQUEST_REFUSED, error.to_string()))
    };
    let mut facts = pod::facts(found, Default::default());
    let mut verdict = conf.rules.judge(&facts).map_err(refused)?;
    if matches!(verdict.reason, Reason::NothingAsksForIt | Reason::Selected) {
        let namespaces: Api<Namespace> = Api::all(carrier.api().client());
        let what = format!("get Namespace {}", facts.namespace);
        let read = carrier.api().read(&what, || namespaces.get_metadata_opt(&facts.namespace)).await;
        let annotations = read.map_err(Why::Unasked)?.and_then(|found| found.metadata.annotations);
        facts.namespace_annotations = annotations.unwrap_or_default();
        verdict = conf.rules.judge(&facts).map_err(refused)?;
    }
    Ok(if verdict.sticky { Ok(facts) } else { Err(verdict.reason) })
}

fn reference(claimant: &Claimant, slot: Option<u32>) -> ClaimantRef {
    match claimant {
        Claimant::Pod { ordinal, .. } => ClaimantRef { kind: ClaimantKind::Pod, ordinal: *ordinal },
        Claimant::Slot { .. } => ClaimantRef { kind: ClaimantKind::Slot, ordinal: slot },
        Claimant::VirtualMachine { .. } => ClaimantRef { kind: ClaimantKind::VirtualMachine, ordinal: None },
    }
}

/// The slot of a pod of a Deployment.
async fn choose(carrier: &Carrier<'_>, claimant: &Claimant, facts: &PodFacts) -> Result<u32, Why> {
    let api: Api<StickyIP> = Api::namespaced(carrier.api().client(), &facts.namespace);
    let every = ListParams::default();
    let listed = carrier.api().read("list StickyIPs", || api.list(&every)).await.map_err(Why::Unasked)?;
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

fn to_cni(error: &WalkError) -> CniError {
    let message = error.to_string();
    match error {
        WalkError::Refused(Refusal::Handover { .. } | Refusal::Conflict { .. }) => {
            CniError::try_again(message)
        }
        WalkError::Refused(_) | WalkError::HeldHere { .. } => CniError::new(code::REQUEST_REFUSED, message),
        WalkError::Exhausted { .. } => CniError::new(code::EXHAUSTED, message),
        WalkError::Ground(_) => CniError::io(message),
        WalkError::Api(_)
        | WalkError::Waited { .. }
        | WalkError::Outrun { .. }
        | WalkError::Unsound { .. } => CniError::try_again(message),
    }
}

/// What this node remembers of this very pod, for its new sandbox. Of this very pod only: a pod of the same name and
/// another uid may have come after one that lives elsewhere (docs/decisions/0013).
fn from_record<D: Disk>(
    request: &Request,
    scene: &Scene<'_, D>,
    pod: &PodIdentity,
    attachment: &Attachment,
) -> Result<Option<Vec<IpAddr>>, CniError> {
    let Some(uid) = pod.uid() else { return Ok(None) };
    let entries = scene.store.claimants()?;
    let mut locked = scene.store.lock()?;
    for entry in &entries {
        let Some(stored) = locked.of_entry(entry)? else { continue };
        let record = &stored.record;
        let its_own = record.pod.as_ref().is_some_and(|known| {
            known.uid() == Some(uid) && known.name() == pod.name() && known.namespace() == pod.namespace()
        });
        // One that was only reserved was never attached, so it proves nothing.
        let was_attached = |binding: &Binding| !binding.container.is_empty();
        let binding = record.binding.clone().filter(|binding| its_own && was_attached(binding));
        let Some(binding) = binding else { continue };
        if record.attachment.interface != attachment.interface {
            continue;
        }
        let renewed = Record {
            attachment: attachment.clone(),
            phase: Phase::Attached,
            netns: request.netns.clone(),
            since: scene.store.now().clone(),
            ..record.clone()
        };
        locked.put(&renewed, Some(&stored))?;
        let note = Note {
            what: Told::Attached,
            container: attachment.container.as_str().to_owned(),
            interface: attachment.interface.as_str().to_owned(),
            namespace: Some(binding.namespace),
            name: Some(binding.name),
            known_as: Some(binding.container),
            uid: Some(uid.to_owned()),
            at: scene.store.now().clone(),
        };
        locked.leave_note(attachment, &note)?;
        locked.commit()?;
        return Ok(Some(renewed.addresses));
    }
    Ok(None)
}

/// Detaches a sandbox. Without a binding it is searched among the node's.
pub(super) fn detach(
    conf: &ClusterConf,
    attachment: &Attachment,
    binding: Option<&Binding>,
    story: &mut Story<'_>,
) -> Result<(), String> {
    let container = attachment.container.as_str();
    let witness = story.witness;
    let work = async {
        let api = Connection::open(&conf.kubeconfig, conf.timeout).await?;
        let mut carrier = Carrier::new(api, witness);
        let key = binding.map(|b| Holder { namespace: b.namespace.clone(), name: b.name.clone() });
        let detached = walk::detach(&mut carrier, &conf.node, key.as_ref(), container).await?;
        // The sandbox took its pod's older one's place while the API server was away.
        match binding.filter(|binding| detached == Detached::NotAttached && binding.container != container) {
            Some(binding) => walk::detach(&mut carrier, &conf.node, key.as_ref(), &binding.container).await,
            None => Ok(detached),
        }
    };
    let detached: Result<Detached, ApiError> = block_on(work).map_err(|error| error.to_string())?;
    if let Detached::Now(key) = detached.map_err(|error| error.to_string())? {
        tracing::info!(container, %key, "detached");
    }
    Ok(())
}

/// Whether the API server still says that this sandbox has the address. One that cannot be asked says nothing.
pub(super) fn check(conf: &ClusterConf, binding: &Binding, attachment: &Attachment) -> Result<(), CniError> {
    let key = Holder { namespace: binding.namespace.clone(), name: binding.name.clone() };
    let read = block_on(async {
        let api = Connection::open(&conf.kubeconfig, conf.timeout).await?;
        walk::read_sticky(&Carrier::new(api, &crate::cluster::claims::carry::Nobody), &key).await
    })?;
    let object = match read {
        Ok(object) => object,
        Err(error) => {
            tracing::warn!(%error, "cannot check the binding");
            return Ok(());
        }
    };
    let status = object.as_ref().and_then(|object| object.status.as_ref());
    let holder = status.and_then(|status| status.attachment.as_ref()).map(|held| held.container_id.as_str());
    let ours = [attachment.container.as_str(), &binding.container];
    match holder {
        Some(holder) if ours.contains(&holder) => Ok(()),
        Some(holder) => Err(CniError::new(
            code::CHECK_FAILED,
            format!("StickyIP {key} is attached to container {holder}"),
        )),
        None => Err(CniError::new(code::CHECK_FAILED, format!("StickyIP {key} is attached to nobody"))),
    }
}

/// Whether an ADD of a sticky pod could succeed, as far as a look at the node tells.
pub(super) fn is_ready(conf: &ClusterConf) -> Result<(), CniError> {
    match std::fs::File::open(&conf.kubeconfig) {
        Err(error) if conf.on_unavailable == OnUnavailable::Fail => Err(CniError::not_available(format!(
            "cannot read the kubeconfig {}: {error}; the agent of this node writes it",
            conf.kubeconfig.display()
        ))),
        _ => Ok(()),
    }
}
