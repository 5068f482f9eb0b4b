//! `Prepare`: a decision about a pod before its ADD comes.
//!
//! Must never hold a claimant lock while it waits for another, and never leave a decision in place whose
//! StickyIP is attached to another sandbox.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use kube::api::Api;

use super::context::try_pool_lock;
use super::keep_mac::MacKeeping;
use super::{
    ActionContext, ActionError, Performed, done, interface, not_needed, own_claimant, postponed, sandbox,
    waiting_pod,
};
use crate::agent::index::NodePod;
use crate::cluster::api::cached;
use crate::cluster::cilium::pool::{self, Publication};
use crate::cluster::events;
use crate::cluster::objects::StickyIP;
use crate::cluster::protocol::bind::{ClaimsByAddress, StickyRead};
use crate::cluster::protocol::sticky_identity::{Stickiness, StickyIdentityError};
use crate::names::{AttachmentId, PodIdentity, StickyKey};
use crate::node::addresses::{AddressSource, ThisNode};
use crate::node::bind::{BindPodError, PodToBind};
use crate::node::list;
use crate::policy::selection::claimant::Claimant;
use crate::store::{ClaimantKey, ClaimantLock, Decision, Disk, PreparedSticky, Store};

/// What the API server's cache has of the StickyIP that a pod will have: it is attached to no sandbox, and
/// its claims are sealed to it.
struct CachedBinding {
    /// Those of the pod's namespace.
    annotations: BTreeMap<String, String>,
    sticky: StickyIP,
    claims: ClaimsByAddress,
}

/// A StickyIP that is attached and published for a pod's ADD.
struct AttachedForAdd {
    prepared: PreparedSticky,
    sticky: StickyIP,
    /// Held until the decision is in place.
    pool_lock: ClaimantLock,
}

/// Decides about a pod, attaches its StickyIP if it is sticky, and writes the decision for its ADD.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    pod: &str,
    uid: &str,
) -> Performed {
    let Some(seen) = context.waiting_pod(pod, uid) else { return waiting_pod::replaced() };
    let identity = waiting_pod::identity(seen)?;
    let store = context.store()?;
    let own_claimant = own_claimant(&identity)?;
    let _claimant_lock = context.claimant_lock(&store, &own_claimant)?;
    if is_decided(&store, seen)? {
        return not_needed("its ADD came first");
    }
    let cached = context.read_cached_binding(&store, &own_claimant, seen).await?;
    let by_cache = match &cached {
        Some(cached) => context.judge(seen, async { Ok(cached.annotations.clone()) }).await.ok(),
        None => None,
    };
    let judged = match by_cache {
        Some(sticky @ Stickiness::Sticky { .. }) => sticky,
        // That a pod is not sticky is never taken from the cache.
        _ => {
            match context.judge(seen, context.namespace(&seen.facts.namespace)).await {
                // The ADD reports it; an annotation that is corrected is a new event of the watch.
                Err(StickyIdentityError::Policy(error)) => return postponed(error.to_string()),
                judged => judged?,
            }
        }
    };
    let (facts, reason) = match judged {
        Stickiness::Sticky { facts, reason } => (facts, reason),
        Stickiness::NotSticky { reason } => {
            decide(&store, &identity, None, &reason.to_string())?;
            context.metrics.prepared.inc(["plain"]);
            return done(format!("the pod is not sticky: {reason}"));
        }
    };
    let seen = NodePod { facts, ..seen.clone() };
    let by_cache = cached.as_ref().map(|cached| (cached.annotations.clone(), cached.sticky.clone()));
    // Beside the binding, which waits for the API server most of the time.
    let keeping = async {
        match &by_cache {
            Some((namespace, sticky)) => context.keeps_by_cache(&seen.facts, namespace, sticky).await,
            None => Ok(MacKeeping::NotRead),
        }
    };
    // Boxed: the future of a binding is large.
    let attaching = Box::pin(context.bind_for_pod(&store, &seen, &identity, cached));
    let (attached, keeping) = tokio::join!(attaching, keeping);
    let AttachedForAdd { prepared, sticky, pool_lock } = attached?;
    let addresses = list(&prepared.addresses);
    context.ask_for_mac(&seen.facts, keeping?, &sticky).await?;
    decide(&store, &identity, Some(prepared), &reason.to_string())?;
    drop(pool_lock);
    context.metrics.prepared.inc(["sticky"]);
    events::emit_move_events(&mut context.api_writer(), None, &sticky, &seen.facts).await;
    done(format!("the pod will have {addresses}: {reason}"))
}

fn is_decided<D: Disk>(store: &Store<D>, seen: &NodePod) -> Performed<bool> {
    let decision = store.lock()?.find_decision(&seen.runtime_uid, &interface()?)?;
    Ok(decision.is_some() || waiting_pod::has_record(store, seen)?)
}

pub(super) fn decide<D: Disk>(
    store: &Store<D>,
    pod: &PodIdentity,
    sticky: Option<PreparedSticky>,
    reason: &str,
) -> Performed<()> {
    let decision = Decision::about(pod, sticky, reason, store.now().clone())
        .ok_or_else(|| ActionError::Name(format!("pod {pod} has no uid")))?;
    Ok(store.lock()?.put_decision(&decision)?)
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// What the API server's cache has of a pod whose name this node keeps addresses for: mostly it is the
    /// next pod of a sticky one, and everything is as the last one left it. The kubelet calls ADD a few
    /// milliseconds after the pod was bound, so these reads are sent at once. None if it is otherwise; then
    /// everything is read live.
    async fn read_cached_binding(
        &self,
        store: &Store<D>,
        own_claimant: &ClaimantKey,
        seen: &NodePod,
    ) -> Performed<Option<CachedBinding>> {
        let kept = store.lock()?.find_by_claimant(own_claimant)?;
        let addresses: BTreeSet<IpAddr> = kept.into_iter().flat_map(|kept| kept.record.addresses).collect();
        if addresses.is_empty() {
            return Ok(None);
        }
        let api = self.connection();
        let stickies: Api<StickyIP> = Api::namespaced(api.client(), &seen.facts.namespace);
        let what = format!("get StickyIP {}/{}", seen.facts.namespace, seen.facts.name);
        let (annotations, sticky, claims) = tokio::join!(
            cached::annotations(&api, &seen.facts.namespace),
            cached::object(&api, &what, &stickies, &seen.facts.name),
            cached::claims(&api, &addresses),
        );
        let sticky = sticky?.filter(cached::is_free);
        let found = sticky.zip(claims).filter(|(sticky, claims)| cached::are_all(claims, sticky));
        let (Some((sticky, claims)), Ok(annotations)) = (found, annotations) else { return Ok(None) };
        Ok(Some(CachedBinding { annotations, sticky, claims }))
    }

    /// Attaches the pod's StickyIP and publishes it. The claimant's pool lock is held from before the first
    /// write until the decision is in place: no DEL on this node unpublishes or detaches in between.
    async fn bind_for_pod(
        &self,
        store: &Store<D>,
        seen: &NodePod,
        identity: &PodIdentity,
        cached: Option<CachedBinding>,
    ) -> Performed<AttachedForAdd> {
        let mut api_writer = self.api_writer();
        let (facts, mode, name) = (&seen.facts, self.options.shape.mode, &self.settings.node);
        let attachment_id = AttachmentId::Prepared(seen.runtime_uid.clone());
        let attachment = sandbox(&attachment_id)?;
        let has_own_name = Claimant::of(facts).fixed_name() == Some(facts.name.as_str());
        let cached = cached.filter(|_| has_own_name);
        let publishes = mode.publishes_pool_entries();
        // Where a StickyIP exists already, the blocks of the node decide nothing, and the watched CiliumNode
        // is enough.
        let watched = self.index.cilium_node().filter(|_| publishes && cached.is_some()).cloned();
        let may_reserve = watched.is_none();
        let node = match publishes && may_reserve {
            true => match pool::read_node(api_writer.api(), name).await? {
                None => return postponed(format!("CiliumNode {name} does not exist yet")),
                node => node,
            },
            false => watched,
        };
        let owner = format!("{}/{}", facts.namespace, facts.name);
        let sets = self.node_ranges(node.as_ref());
        if sets.is_empty() {
            let how = mode.how_to_get_ranges();
            return postponed(format!("node {name} has no addresses for pods: {how}"));
        }
        let barred =
            may_reserve.then(|| node.as_ref().map(|node| node.barred_to(&owner)).unwrap_or_default());
        let source = AddressSource { sets, barred, publish: self.options.shape.clone() };
        let own = cached.map_or(StickyRead::NotRead, |cached| {
            StickyRead::found(cached.sticky).with_claims(Some(cached.claims))
        });
        let may_exist = |path: &Path| self.may_exist(path);
        let this_node = ThisNode { name, store, netns_may_exist: &may_exist, on_attaching: &|_, _| {} };
        // The agent never waits for a pod: it tries again.
        let pod = PodToBind { facts, identity, attachment: &attachment, patience: Duration::ZERO };
        let interface = interface()?;
        let pool_lock = |key: &StickyKey| try_pool_lock(store, &ClaimantKey::of_sticky(key, &interface));
        let bound = match pod.bind(&mut api_writer, this_node, &source, own, pool_lock).await {
            Ok(bound) => bound,
            Err(BindPodError::Api(error)) => return Err(error.into()),
            Err(BindPodError::Store(error)) => return Err(error.into()),
            Err(error) => return postponed(error.to_string()),
        };
        let addresses = bound.sticky.spec.addresses.clone();
        let resource = pool::resource(&bound.key.namespace, &bound.sticky.spec.workload);
        if !source.publish.is_silent_about(&addresses) {
            let publication = Publication { addresses: addresses.clone(), owner, resource: resource.clone() };
            // What was read before the pool lock says nothing of entry and route, which a DEL may have
            // removed since: both are written, and a route only by the resourceVersion that was read.
            let read = node.map(|node| pool::without(node, &addresses));
            pool::publish(&mut api_writer, name, &source.publish, &publication, read).await?;
        }
        let StickyKey { namespace, name } = bound.key;
        let prepared = PreparedSticky { namespace, name, addresses, resource, attachment_id };
        Ok(AttachedForAdd { prepared, sticky: bound.sticky, pool_lock: bound.lock })
    }
}
