//! Repairs CiliumEndpoints: nudges Cilium for a pod without one, removes finalizers that hold up a deletion,
//! deletes one of an earlier pod or with none of its sticky pod's addresses, and reports every other
//! disagreement. Must never write by the index alone: each object is read live, and written only as it was
//! read. Must never count or report what was not written.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{ObjectReference, Pod};
use kube::ResourceExt;
use kube::api::Api;
use serde_json::json;

use crate::cluster::api::client::ApiError;
use crate::cluster::api::events;
use crate::cluster::api::events::NewEvent;
use crate::cluster::cilium::objects::CiliumEndpoint;
use crate::cluster::protocol::write::Precondition;
use crate::controller::context::Context;
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::objects::{IndexedEndpoint, IndexedPod, attached_pod_uid, made_for};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::metrics::ControllerMetrics;
use crate::controller::queue::{Key, TokenBucket};
use crate::controller::writer::Writer;
use crate::policy::endpoint::{
    Disagreement, EndpointAction, EndpointFacts, EndpointTimeouts, EndpointTracker, EndpointView,
};
use crate::policy::mode::CiliumMode;
use crate::runtime::metrics::{Counter, Labelled};

/// The label that nudges. It counts to three and begins again: each value is another identity for Cilium,
/// which is what makes it look at the pod, and there should be few of them.
pub const NUDGED: &str = "sticky-ipam.io/nudged";
/// How many values the label has.
const VALUES: u32 = 3;
/// Writes per second, and burst. If all endpoints of a cluster are missing, the cause is elsewhere.
const RATE: (u32, u32) = (10, 20);
/// Before a step that came to nothing is tried again.
const RETRY: Duration = Duration::from_secs(5);

/// The duty.
pub struct Endpoints {
    tracker: EndpointTracker,
    patience: EndpointTimeouts,
    pools: bool,
    bucket: TokenBucket,
    actions: Labelled<Counter, 1>,
    disagreements: Labelled<Counter, 1>,
}

impl Endpoints {
    /// The duty with this patience; `mode` says whether pools are to be compared.
    pub fn new(patience: EndpointTimeouts, mode: CiliumMode, metrics: &ControllerMetrics) -> Self {
        Self {
            tracker: EndpointTracker::new(patience),
            patience,
            pools: mode.publishes_pool_entries(),
            bucket: TokenBucket::new(RATE.0, RATE.1),
            actions: metrics.endpoint_actions.clone(),
            disagreements: metrics.endpoint_disagreements.clone(),
        }
    }

    /// The duty as it is set.
    pub fn from_context(context: &Context) -> Self {
        let terminating = context.settings.cep_termination_timeout.seconds();
        Self::new(
            EndpointTimeouts { terminating, ..EndpointTimeouts::default() },
            context.settings.cilium_ipam,
            &context.metrics,
        )
    }

    /// Looks at these names, and does what is to be done about them now.
    async fn look(&mut self, context: &Context, names: BTreeSet<String>) -> RoundResult {
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

    /// Applies an action, and reports it if it was done. Whether it was.
    async fn apply(&self, context: &Context, name: &str, action: &EndpointAction) -> Result<bool, ApiError> {
        let Some((namespace, pod)) = name.split_once('/') else { return Ok(false) };
        let at = EndpointWriter { writer: &context.writer, namespace, name: pod };
        let (label, about, reason, message) = match action {
            EndpointAction::Nudge { uid, number } => {
                if !at.nudge(uid).await? {
                    return Ok(false);
                }
                let message = format!(
                    "it runs without a CiliumEndpoint: label {NUDGED} was written, so that Cilium looks at \
                     it again \
                     (attempt {number} of {}); if that does not help, read the log of cilium-agent on its node, or \
                     delete the pod",
                    self.patience.nudges
                );
                ("nudged", events::pod(namespace, pod, uid), "EndpointMissing", message)
            }
            EndpointAction::RemoveFinalizers { uid } => {
                if !at.remove_finalizers(uid).await? {
                    return Ok(false);
                }
                let message = format!(
                    "its deletion took more than {} s: its finalizers were removed",
                    self.patience.terminating
                );
                ("finalizers_removed", at.endpoint(uid), "EndpointFinalizersRemoved", message)
            }
            EndpointAction::Remove { uid } => {
                if !at.remove(uid).await? {
                    return Ok(false);
                }
                let message = "it was made for an earlier pod of this name and was removed".to_owned();
                ("removed", at.endpoint(uid), "StaleEndpointRemoved", message)
            }
            EndpointAction::Replace { uid, pod: pod_uid, addresses } => {
                let Some(had) = at.replace(uid, pod_uid, addresses).await? else { return Ok(false) };
                let message = format!(
                    "its CiliumEndpoint had {}, and the pod has {} as its StickyIP says: the CiliumEndpoint \
                     was \
                     deleted, and Cilium creates it again when it looks at the pod",
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
            EndpointAction::Report(_) => self.disagreements.inc([reason]),
            _ => self.actions.inc([label]),
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
        self.look(context, due.into_iter().map(|key| key.name).collect()).await
    }

    async fn full_round(&mut self, context: &Context, due: Vec<Key>) -> RoundResult {
        // What is due may be gone by now, and is in no list then: it is looked at to be forgotten.
        let mut names: BTreeSet<String> = due.into_iter().map(|key| key.name).collect();
        names.extend(context.index().pods.iter().map(|(name, _)| name.clone()));
        names.extend(context.index().endpoints.iter().map(|(name, _)| name.clone()));
        self.look(context, names).await
    }
}

/// What the index shows of one name.
pub(crate) fn endpoint_view(index: &ClusterIndex, name: &str, pools: bool) -> EndpointView {
    let endpoint = index.endpoints.get(name).map(|seen| EndpointFacts {
        uid: seen.uid.clone(),
        deleting: seen.deleting,
        held: seen.held,
        made_for: seen.made_for.clone(),
        addresses: seen.addresses.clone(),
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
    let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    if texts.is_empty() { "nothing".to_owned() } else { texts.join(", ") }
}

/// A sentence for people.
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
             changed; delete \
             the pod, and it starts with its own address",
            list(pod),
            list(bound)
        ),
        Disagreement::PoolAndBinding { pooled, bound } => format!(
            "its node's CiliumNode pool keeps {} for it, its StickyIP {}: the pod loses its network when \
             Cilium's agent \
             restarts; read the log of the sticky-ipam agent on that node, which publishes the pool entry",
            list(pooled),
            list(bound)
        ),
    }
}

/// Writes to the pod and the CiliumEndpoint of one name, each after a live read.
struct EndpointWriter<'a> {
    writer: &'a Writer,
    namespace: &'a str,
    name: &'a str,
}

impl EndpointWriter<'_> {
    /// Writes the label on the pod with this uid. Whether it did.
    async fn nudge(&self, uid: &str) -> Result<bool, ApiError> {
        let api: Api<Pod> = Api::namespaced(self.writer.client(), self.namespace);
        let what = format!("get Pod {}/{}", self.namespace, self.name);
        let found = self.writer.connection().read(&what, || api.get_metadata_opt(self.name)).await?;
        let Some(pod) = found.filter(|pod| pod.metadata.uid.as_deref() == Some(uid)) else {
            return Ok(false);
        };
        let endpoints = self.endpoints();
        let what = format!("get CiliumEndpoint {}/{}", self.namespace, self.name);
        if self.writer.connection().read(&what, || endpoints.get_metadata_opt(self.name)).await?.is_some() {
            return Ok(false);
        }
        let before = pod.labels().get(NUDGED).and_then(|text| text.parse::<u32>().ok()).unwrap_or(0);
        let patch = json!({"metadata": {"labels": {NUDGED: (before % VALUES + 1).to_string()}}});
        let what = format!("patch Pod {}/{}", self.namespace, self.name);
        Ok(self.writer.patch(&what, &api, self.name, &Precondition::of(&pod), patch).await?.is_some())
    }

    /// Takes the finalizers off the endpoint with this uid, if it is being deleted. Whether it did.
    async fn remove_finalizers(&self, uid: &str) -> Result<bool, ApiError> {
        let Some(endpoint) =
            self.live(uid).await?.filter(|found| found.metadata.deletion_timestamp.is_some())
        else {
            return Ok(false);
        };
        let patch = json!({"metadata": {"finalizers": null}});
        let what = format!("patch CiliumEndpoint {}/{}", self.namespace, self.name);
        let at = Precondition::of(&endpoint);
        Ok(self.writer.patch(&what, &self.endpoints(), self.name, &at, patch).await?.is_some())
    }

    /// Deletes the endpoint with this uid if it was made for another pod of this name. Whether it did.
    async fn remove(&self, uid: &str) -> Result<bool, ApiError> {
        let Some(endpoint) = self.live(uid).await? else { return Ok(false) };
        let pods: Api<Pod> = Api::namespaced(self.writer.client(), self.namespace);
        let what = format!("get Pod {}/{}", self.namespace, self.name);
        let pod = self.writer.connection().read(&what, || pods.get_metadata_opt(self.name)).await?;
        let left_over = match (made_for(&endpoint.metadata), pod.and_then(|pod| pod.metadata.uid)) {
            (Some(made_for), Some(uid)) => made_for != uid,
            // Without a pod it is for Cilium's operator to collect; without an owner it is not known.
            _ => false,
        };
        if !left_over {
            return Ok(false);
        }
        let what = format!("delete CiliumEndpoint {}/{}", self.namespace, self.name);
        self.writer.delete(&what, &self.endpoints(), self.name, &Precondition::of(&endpoint)).await
    }

    /// Deletes the endpoint with this uid if it, and the pod with this uid, still have no address in common,
    /// and the pod's are these. The addresses that it had, if it did.
    async fn replace(
        &self,
        uid: &str,
        pod_uid: &str,
        addresses: &BTreeSet<IpAddr>,
    ) -> Result<Option<BTreeSet<IpAddr>>, ApiError> {
        let pods: Api<Pod> = Api::namespaced(self.writer.client(), self.namespace);
        let endpoints = self.endpoints();
        let what = format!("get CiliumEndpoint {}/{}", self.namespace, self.name);
        let Some(endpoint) = self.writer.connection().read(&what, || endpoints.get_opt(self.name)).await?
        else {
            return Ok(None);
        };
        let at = Precondition::of(&endpoint);
        let seen = IndexedEndpoint::from(endpoint);
        let what = format!("get Pod {}/{}", self.namespace, self.name);
        let pod =
            self.writer.connection().read(&what, || pods.get_opt(self.name)).await?.map(IndexedPod::from);
        let is_as_seen = |pod: &IndexedPod| {
            let shown: BTreeSet<IpAddr> = pod.addresses.iter().copied().collect();
            pod.facts.uid == pod_uid && pod.running && !pod.deleting && shown == *addresses
        };
        let is_wrong = seen.uid == uid
            && !seen.deleting
            && seen.made_for.as_deref() == Some(pod_uid)
            && !seen.addresses.is_empty()
            && seen.addresses.is_disjoint(addresses);
        if !is_wrong || !pod.as_ref().is_some_and(is_as_seen) {
            return Ok(None);
        }
        let what = format!("delete CiliumEndpoint {}/{}", self.namespace, self.name);
        let deleted = self.writer.delete(&what, &endpoints, self.name, &at).await?;
        Ok(deleted.then_some(seen.addresses))
    }

    fn endpoints(&self) -> Api<CiliumEndpoint> {
        Api::namespaced(self.writer.client(), self.namespace)
    }

    async fn live(
        &self,
        uid: &str,
    ) -> Result<Option<kube::core::PartialObjectMeta<CiliumEndpoint>>, ApiError> {
        let api = self.endpoints();
        let what = format!("get CiliumEndpoint {}/{}", self.namespace, self.name);
        let found = self.writer.connection().read(&what, || api.get_metadata_opt(self.name)).await?;
        Ok(found.filter(|found| found.metadata.uid.as_deref() == Some(uid)))
    }

    fn endpoint(&self, uid: &str) -> ObjectReference {
        ObjectReference {
            api_version: Some("cilium.io/v2".into()),
            kind: Some("CiliumEndpoint".into()),
            namespace: Some(self.namespace.into()),
            name: Some(self.name.into()),
            uid: Some(uid.into()),
            ..ObjectReference::default()
        }
    }
}
