//! Repairs CiliumEndpoints: nudges Cilium for a pod without one, removes finalizers that hold up a deletion,
//! deletes one of an earlier pod or with none of its sticky pod's addresses, and reports every other
//! disagreement. Must never write by the index alone: each object is read live, and written only as it was
//! read. Must never count or report what was not written.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::api::Api;
use kube::core::PartialObjectMeta;
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::alloc::join;
use crate::cluster::api::client::ApiError;
use crate::cluster::events::{self, NewEvent};
use crate::cluster::objects::cilium::CiliumEndpoint;
use crate::cluster::writer::write::Precondition;
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::objects::{IndexedEndpoint, IndexedPod, attached_pod_uid, made_for};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::queue::{Key, TokenBucket};
use crate::controller::{context::Context, writer::Writer};
use crate::policy::endpoint::{
    Disagreement, EndpointAction, EndpointFacts, EndpointTimeouts, EndpointTracker, EndpointView,
};
use crate::policy::mode::CiliumMode;

/// The label that nudges. It counts to three and begins again: each value is another identity for Cilium,
/// which is what makes it look at the pod, and there should be few of them.
pub const NUDGED: &str = "sticky-ipam.io/nudged";
const VALUES: u32 = 3;
/// Writes per second, and burst. If all endpoints of a cluster are missing, the cause is elsewhere.
const RATE: (u32, u32) = (10, 20);
/// Before a step that came to nothing is tried again.
const RETRY: Duration = Duration::from_secs(5);

pub struct Endpoints {
    tracker: EndpointTracker,
    patience: EndpointTimeouts,
    pools: bool,
    bucket: TokenBucket,
}

impl Endpoints {
    /// `mode` says whether pools are to be compared.
    pub fn new(patience: EndpointTimeouts, mode: CiliumMode) -> Self {
        let (tracker, bucket) = (EndpointTracker::new(patience), TokenBucket::new(RATE.0, RATE.1));
        Self { tracker, patience, pools: mode.publishes_pool_entries(), bucket }
    }

    pub fn from_context(context: &Context) -> Self {
        let terminating = context.settings.cep_termination_timeout.seconds();
        let patience = EndpointTimeouts { terminating, ..EndpointTimeouts::default() };
        Self::new(patience, context.settings.cilium_ipam)
    }

    /// Applies an action, and reports it if it was done. Whether it was.
    async fn apply(&self, context: &Context, name: &str, action: &EndpointAction) -> Result<bool, ApiError> {
        let Some((namespace, pod)) = name.split_once('/') else { return Ok(false) };
        let at = EndpointWriter { writer: &context.writer, namespace, name: pod };
        let (label, about, reason, message) = match action {
            EndpointAction::Nudge { uid, number } => {
                let Some(about) = at.nudge(uid).await? else { return Ok(false) };
                let message = format!(
                    "it runs without a CiliumEndpoint: label {NUDGED} was written, so that Cilium looks at \
                     it again (attempt {number} of {}); if that does not help, read the log of cilium-agent \
                     on its node, or delete the pod",
                    self.patience.nudges
                );
                ("nudged", about, "EndpointMissing", message)
            }
            EndpointAction::RemoveFinalizers { uid } => {
                let Some(about) = at.remove_finalizers(uid).await? else { return Ok(false) };
                let after = self.patience.terminating;
                let message = format!("its deletion took more than {after} s: its finalizers were removed");
                ("finalizers_removed", about, "EndpointFinalizersRemoved", message)
            }
            EndpointAction::Remove { uid } => {
                let Some(about) = at.remove(uid).await? else { return Ok(false) };
                let message = "it was made for an earlier pod of this name and was removed".to_owned();
                ("removed", about, "StaleEndpointRemoved", message)
            }
            EndpointAction::Replace { uid, pod: pod_uid, addresses } => {
                let Some(had) = at.replace(uid, pod_uid, addresses).await? else { return Ok(false) };
                let message = format!(
                    "its CiliumEndpoint had {}, and the pod has {} as its StickyIP says: the CiliumEndpoint \
                     was deleted, and Cilium creates it again when it looks at the pod",
                    list(&had),
                    list(addresses)
                );
                tracing::warn!(pod = name, "{message}");
                ("replaced", events::pod(namespace, pod, pod_uid), "EndpointReplaced", message)
            }
            EndpointAction::Report(what) => {
                let message = message(what);
                tracing::warn!(pod = name, reason = what.reason(), "{message}");
                let uid = context.index().pods.get(name).map(|pod| pod.facts.uid.clone()).unwrap_or_default();
                ("", events::pod(namespace, pod, &uid), what.reason(), message)
            }
        };
        match action {
            EndpointAction::Report(_) => context.metrics.endpoint_disagreements.inc([reason]),
            _ => context.metrics.endpoint_actions.inc([label]),
        }
        // What only cleans up after Cilium is no warning.
        let warning =
            !matches!(action, EndpointAction::RemoveFinalizers { .. } | EndpointAction::Remove { .. });
        context.record_event(NewEvent { about, reason, message, warning }).await;
        Ok(true)
    }
}

impl Duty for Endpoints {
    const NAME: &'static str = "endpoints";
    const TRIGGERS: &'static [Kind] = &[Kind::Pod, Kind::CiliumEndpoint];
    const BATCH_DELAY: Duration = Duration::from_secs(1);
    /// Bindings and pools change without waking it; a look costs no request.
    const TICK: Option<Duration> = Some(Duration::from_secs(60));

    async fn round(&mut self, context: &Context, due: Vec<Key>) -> RoundResult {
        let names: BTreeSet<String> = due.into_iter().map(|key| key.name).collect();
        let mut done = RoundResult::default();
        if !context.index().missing().is_empty() {
            done.again.extend(names.into_iter().map(|name| (Key::new(Kind::Pod, name), RETRY)));
            return done;
        }
        for name in names {
            let now = context.now();
            let view = endpoint_view(&context.index(), &name, self.pools);
            let actions = self.tracker.look(&name, &view, now);
            let mut all_done = true;
            for action in actions {
                while let Err(wait) = self.bucket.take(context.elapsed()) {
                    tokio::time::sleep(wait).await;
                }
                match self.apply(context, &name, &action).await {
                    Ok(true) => self.tracker.done(&name, &action, now),
                    // An object has changed: its next watch event counts.
                    Ok(false) => all_done = false,
                    Err(error) => {
                        tracing::warn!(pod = name, %error, "cannot repair the CiliumEndpoint; trying again");
                        done.failures += 1;
                        all_done = false;
                    }
                }
            }
            let next = self.tracker.next_look(&name, now).map(Duration::from_secs);
            if let Some(after) = if all_done { next } else { Some(RETRY) } {
                // A second more: times are whole seconds, and a look too early would only come again.
                done.again.push((Key::new(Kind::Pod, name), after + Duration::from_secs(1)));
            }
        }
        done
    }

    async fn full_round(&mut self, context: &Context, mut due: Vec<Key>) -> RoundResult {
        // What is due may be gone by now, and is in no list then: it is looked at to be forgotten.
        due.extend(context.index().pods.iter().map(|(name, _)| Key::new(Kind::Pod, name)));
        due.extend(context.index().endpoints.iter().map(|(name, _)| Key::new(Kind::CiliumEndpoint, name)));
        self.round(context, due).await
    }
}

pub(crate) fn endpoint_view(index: &ClusterIndex, name: &str, pools: bool) -> EndpointView {
    let endpoint = index.endpoints.get(name).cloned().map(|seen| {
        let IndexedEndpoint { uid, deleting, held, made_for, addresses } = seen;
        EndpointFacts { uid, deleting, held, made_for, addresses }
    });
    // If no pod has an endpoint, Cilium makes none, or does not run.
    let kept = |node: &str| !index.endpoints.is_empty() && index.cilium_nodes.get(node).is_some();
    let pod = index.pods.get(name).filter(|pod| pod.is_live() && kept(&pod.node));
    let Some(pod) = pod else { return EndpointView { endpoint, ..EndpointView::default() } };
    let bound =
        index.sticky_of(pod).filter(|sticky| attached_pod_uid(sticky) == Some(pod.facts.uid.as_str()));
    let pooled = || -> Option<BTreeSet<IpAddr>> {
        let node = index.cilium_nodes.get(&pod.node)?;
        let owned = node.owned.iter().filter(|(_, entry)| entry.owner == name);
        Some(owned.map(|(address, _)| *address).collect())
    };
    EndpointView {
        pod: Some(pod.facts.uid.clone()),
        running: pod.running && !pod.deleting,
        pod_addresses: pod.addresses.iter().copied().collect(),
        endpoint,
        bound: bound.map(|sticky| sticky.spec.addresses.iter().copied().collect()),
        pooled: pools.then(pooled).flatten(),
    }
}

fn list(addresses: &BTreeSet<IpAddr>) -> String {
    if addresses.is_empty() { "nothing".to_owned() } else { join(&Vec::from_iter(addresses)) }
}

fn message(what: &Disagreement) -> String {
    match what {
        Disagreement::EndpointAndPod { endpoint, pod, removed } => format!(
            "its CiliumEndpoint has {}, the pod shows {}; other nodes may send its traffic elsewhere: {}",
            list(endpoint),
            list(pod),
            if *removed {
                "if it stays so, the controller deletes the CiliumEndpoint, and Cilium creates it again"
            } else {
                "see which is right; if it is the pod, delete the CiliumEndpoint, and Cilium creates it \
                 again; else delete the pod"
            }
        ),
        Disagreement::PodAndBinding { pod, bound } => format!(
            "the pod shows {}, its StickyIP keeps {}: it started without the plugin, or the StickyIP was \
             changed; delete the pod, and it starts with its own address",
            list(pod),
            list(bound)
        ),
        Disagreement::PoolAndBinding { pooled, bound } => format!(
            "its node's CiliumNode pool keeps {} for it, its StickyIP {}: the pod loses its network when \
             Cilium's agent restarts; read the log of the sticky-ipam agent on that node, which publishes \
             the pool entry",
            list(pooled),
            list(bound)
        ),
    }
}

trait Named:
    Resource<DynamicType = (), Scope = NamespaceResourceScope> + Clone + DeserializeOwned + Debug
{
}

impl Named for Pod {}
impl Named for CiliumEndpoint {}

/// Writes to the pod and the CiliumEndpoint of one name, each after a live read. None: nothing was written;
/// else what was, as an event names it.
struct EndpointWriter<'a> {
    writer: &'a Writer,
    namespace: &'a str,
    name: &'a str,
}

impl EndpointWriter<'_> {
    /// Writes the label on the pod with this uid, if it has no endpoint.
    async fn nudge(&self, uid: &str) -> Result<Option<ObjectReference>, ApiError> {
        let Some(pod) = self.live::<Pod>(uid).await? else { return Ok(None) };
        if self.read::<CiliumEndpoint>().await?.is_some() {
            return Ok(None);
        }
        let before = pod.labels().get(NUDGED).and_then(|text| text.parse::<u32>().ok()).unwrap_or(0);
        self.patch(&pod, json!({"metadata": {"labels": {NUDGED: (before % VALUES + 1).to_string()}}})).await
    }

    /// Takes the finalizers off the endpoint with this uid, if it is being deleted.
    async fn remove_finalizers(&self, uid: &str) -> Result<Option<ObjectReference>, ApiError> {
        match self.live::<CiliumEndpoint>(uid).await? {
            Some(endpoint) if endpoint.metadata.deletion_timestamp.is_some() => {
                self.patch(&endpoint, json!({"metadata": {"finalizers": null}})).await
            }
            _ => Ok(None),
        }
    }

    /// Deletes the endpoint with this uid if it was made for another pod of this name.
    async fn remove(&self, uid: &str) -> Result<Option<ObjectReference>, ApiError> {
        let Some(endpoint) = self.live::<CiliumEndpoint>(uid).await? else { return Ok(None) };
        let pod = self.read::<Pod>().await?.and_then(|pod| pod.metadata.uid);
        match (made_for(&endpoint.metadata), pod) {
            (Some(made_for), Some(uid)) if made_for != uid => {
                let deleted = self.delete(&Precondition::of(&endpoint)).await?;
                Ok(deleted.then(|| reference(&endpoint)))
            }
            // Without a pod it is for Cilium's operator to collect; without an owner it is not known.
            _ => Ok(None),
        }
    }

    /// Deletes the endpoint with this uid if it, and the pod with this uid, still have no address in common,
    /// and the pod's are these. The addresses that it had, if it did.
    async fn replace(
        &self,
        uid: &str,
        pod_uid: &str,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<Option<BTreeSet<IpAddr>>, ApiError> {
        let (endpoints, what) = (self.api::<CiliumEndpoint>(), self.what::<CiliumEndpoint>("get"));
        let found = self.writer.connection().read(&what, || endpoints.get_opt(self.name)).await?;
        let Some(endpoint) = found else { return Ok(None) };
        let at = Precondition::of(&endpoint);
        let seen = IndexedEndpoint::from(endpoint);
        let (pods, what) = (self.api::<Pod>(), self.what::<Pod>("get"));
        let pod = self.writer.connection().read(&what, || pods.get_opt(self.name)).await?;
        let is_as_seen = |pod: IndexedPod| {
            let shown: BTreeSet<IpAddr> = pod.addresses.iter().copied().collect();
            pod.facts.uid == pod_uid && pod.running && !pod.deleting && shown == *addresses
        };
        let is_wrong = seen.uid == uid
            && !seen.deleting
            && seen.made_for.as_deref() == Some(pod_uid)
            && !seen.addresses.is_empty()
            && seen.addresses.is_disjoint(addresses);
        if !is_wrong || !pod.map(IndexedPod::from).is_some_and(is_as_seen) {
            return Ok(None);
        }
        Ok(self.delete(&at).await?.then_some(seen.addresses))
    }

    fn api<K: Named>(&self) -> Api<K> {
        Api::namespaced(self.writer.client(), self.namespace)
    }

    fn what<K: Named>(&self, verb: &str) -> String {
        format!("{verb} {} {}/{}", K::kind(&()), self.namespace, self.name)
    }

    /// The metadata of the pod or endpoint of this name, live.
    async fn read<K: Named>(&self) -> Result<Option<PartialObjectMeta<K>>, ApiError> {
        let api = self.api::<K>();
        self.writer.connection().read(&self.what::<K>("get"), || api.get_metadata_opt(self.name)).await
    }

    /// The same, if it has this uid.
    async fn live<K: Named>(&self, uid: &str) -> Result<Option<PartialObjectMeta<K>>, ApiError> {
        Ok(self.read::<K>().await?.filter(|found| found.metadata.uid.as_deref() == Some(uid)))
    }

    async fn patch<K: Named>(
        &self,
        read: &PartialObjectMeta<K>,
        patch: Value,
    ) -> Result<Option<ObjectReference>, ApiError> {
        let (what, at) = (self.what::<K>("patch"), Precondition::of(read));
        let written = self.writer.patch(&what, &self.api::<K>(), self.name, &at, patch).await?;
        Ok(written.map(|_| reference(read)))
    }

    async fn delete(&self, endpoint: &Precondition) -> Result<bool, ApiError> {
        let (what, endpoints) = (self.what::<CiliumEndpoint>("delete"), self.api::<CiliumEndpoint>());
        self.writer.delete(&what, &endpoints, self.name, endpoint).await
    }
}

/// An object as an event names it: an event is about every version of it.
fn reference<K: Resource<DynamicType = ()>>(object: &K) -> ObjectReference {
    ObjectReference { resource_version: None, ..object.object_ref(&()) }
}
