//! `Prepare`: a decision about a pod before its ADD comes.
//!
//! Must never hold a claimant lock while it waits for another, and never leave a decision in place whose
//! StickyIP is attached to another sandbox.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use kube::api::Api;

use super::context::{ActionContext, interface, sandbox, try_pool_lock};
use super::keep_mac::{self, MacKeeping};
use super::outcome::{ActionError, ActionOutcome};
use super::waiting_pod;
use crate::agent::index::NodePod;
use crate::cluster::api::cached;
use crate::cluster::api::events;
use crate::cluster::cilium::pool::{self, Publication};
use crate::cluster::objects::StickyIP;
use crate::cluster::protocol::bind::{ClaimsByAddress, StickyRead};
use crate::cluster::protocol::sticky_identity::{self, Stickiness, StickyIdentityError};
use crate::names::{AttachmentId, PodIdentity, StickyKey};
use crate::node::addresses::{AddressSource, ThisNode};
use crate::node::bind::{BindPodError, PodToBind};
use crate::node::list;
use crate::policy::selection::claimant::Claimant;
use crate::store::{self, ClaimantLock, Decision, Disk, PreparedSticky, Store};

/// What the API server's cache has of the StickyIP that a pod will have: it is attached to no sandbox, and
/// its claims are sealed to it.
struct CachedBinding {
    /// The annotations of the namespace.
    namespace: BTreeMap<String, String>,
    sticky: StickyIP,
    claims: ClaimsByAddress,
}

/// What came of binding a pod before its ADD.
enum PreparedBinding {
    Attached(Box<AttachedForAdd>),
    /// It has to wait, and why.
    NotYet(String),
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
) -> Result<ActionOutcome, ActionError> {
    let Some(seen) = waiting_pod::find(context, pod, uid) else { return Ok(waiting_pod::replaced()) };
    let identity = waiting_pod::identity(seen)?;
    let store = context.store()?;
    let own_claimant = store::ClaimantKey::of_pod(&identity, &interface()?);
    let Some(_claimant_lock) = context.try_claimant_lock(&store, &own_claimant)? else {
        return Ok(ActionOutcome::Postponed("an ADD of this pod is running".into()));
    };
    if is_decided(&store, seen)? {
        return Ok(ActionOutcome::NotNeeded("its ADD came first".into()));
    }
    let cached = read_cached_binding(context, &store, &own_claimant, seen).await?;
    let by_cache = match &cached {
        Some(cached) => waiting_pod::judge(context, seen, async { Ok(cached.namespace.clone()) }).await.ok(),
        None => None,
    };
    let judged = match by_cache {
        Some(sticky @ Stickiness::Sticky { .. }) => sticky,
        // That a pod is not sticky is never taken from the cache.
        _ => {
            let api = context.connection();
            match waiting_pod::judge(
                context,
                seen,
                sticky_identity::of_namespace(&api, &seen.facts.namespace),
            )
            .await
            {
                Ok(judged) => judged,
                // The ADD reports it; an annotation that is corrected is a new event of the watch.
                Err(StickyIdentityError::Policy(error)) => {
                    return Ok(ActionOutcome::Postponed(error.to_string()));
                }
                Err(error) => return Err(error.into()),
            }
        }
    };
    let (facts, reason) = match judged {
        Stickiness::Sticky { facts, reason } => (facts, reason),
        Stickiness::NotSticky { reason } => {
            decide(&store, &identity, None, &reason.to_string())?;
            context.metrics.prepared.inc(["plain"]);
            return Ok(ActionOutcome::Done(format!("the pod is not sticky: {reason}")));
        }
    };
    let seen = NodePod { facts, ..seen.clone() };
    let by_cache = cached.as_ref().map(|cached| (cached.namespace.clone(), cached.sticky.clone()));
    // Beside the binding, which waits for the API server most of the time.
    let keeping = async {
        match &by_cache {
            Some((namespace, sticky)) => {
                keep_mac::keeps_by_cache(context, &seen.facts, namespace, sticky).await
            }
            None => Ok(MacKeeping::NotRead),
        }
    };
    // Boxed: the future of a binding is large.
    let attaching = Box::pin(bind_for_pod(context, &store, &seen, &identity, cached));
    let (attached, keeping) = tokio::join!(attaching, keeping);
    let AttachedForAdd { prepared, sticky, pool_lock } = match attached? {
        PreparedBinding::Attached(attached) => *attached,
        PreparedBinding::NotYet(reason) => return Ok(ActionOutcome::Postponed(reason)),
    };
    let addresses = list(&prepared.addresses);
    keep_mac::ask_for_mac(context, &seen.facts, keeping?, &sticky).await?;
    decide(&store, &identity, Some(prepared), &reason.to_string())?;
    drop(pool_lock);
    context.metrics.prepared.inc(["sticky"]);
    events::emit_move_events(&mut context.api_writer(), None, &sticky, &seen.facts).await;
    Ok(ActionOutcome::Done(format!("the pod will have {addresses}: {reason}")))
}

/// What the API server's cache has of a pod whose name this node keeps addresses for: mostly it is the next
/// pod of a sticky one, and everything is as the last one left it. The kubelet calls ADD a few milliseconds
/// after the pod was bound, so these reads are sent at once. None if it is otherwise; then everything is read
/// live.
async fn read_cached_binding<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    store: &Store<D>,
    own_claimant: &store::ClaimantKey,
    seen: &NodePod,
) -> Result<Option<CachedBinding>, ActionError> {
    let kept = store.lock()?.find_by_claimant(own_claimant)?;
    let addresses: BTreeSet<IpAddr> =
        kept.map(|kept| kept.record.addresses).unwrap_or_default().into_iter().collect();
    if addresses.is_empty() {
        return Ok(None);
    }
    let api = context.connection();
    let stickies: Api<StickyIP> = Api::namespaced(api.client(), &seen.facts.namespace);
    let what = format!("get StickyIP {}/{}", seen.facts.namespace, seen.facts.name);
    let (namespace, sticky, claims) = tokio::join!(
        cached::annotations(&api, &seen.facts.namespace),
        cached::object(&api, &what, &stickies, &seen.facts.name),
        cached::claims(&api, &addresses),
    );
    let sticky = sticky?.filter(cached::is_free);
    let found = sticky.zip(claims).filter(|(sticky, claims)| cached::are_all(claims, sticky));
    let (Some((sticky, claims)), Ok(namespace)) = (found, namespace) else { return Ok(None) };
    Ok(Some(CachedBinding { namespace, sticky, claims }))
}

fn is_decided<D: Disk + Clone>(store: &Store<D>, seen: &NodePod) -> Result<bool, ActionError> {
    let mut locked = store.lock()?;
    if locked.find_decision(&seen.runtime_uid, &interface()?)?.is_some() {
        return Ok(true);
    }
    drop(locked);
    waiting_pod::has_record(store, seen)
}

/// Writes the decision about a pod.
fn decide<D: Disk + Clone>(
    store: &Store<D>,
    pod: &PodIdentity,
    sticky: Option<PreparedSticky>,
    reason: &str,
) -> Result<(), ActionError> {
    let decision = Decision::about(pod, sticky, reason, store.now().clone())
        .ok_or_else(|| ActionError::Name(format!("pod {pod} has no uid")))?;
    Ok(store.lock()?.put_decision(&decision)?)
}

/// Attaches the pod's StickyIP and publishes it. The claimant's pool lock is held from before the first write
/// until the decision is in place: no DEL on this node unpublishes or detaches in between.
async fn bind_for_pod<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    store: &Store<D>,
    seen: &NodePod,
    identity: &PodIdentity,
    cached: Option<CachedBinding>,
) -> Result<PreparedBinding, ActionError> {
    let mut api_writer = context.api_writer();
    let (facts, mode) = (&seen.facts, context.options.shape.mode);
    let attachment_id = AttachmentId::Prepared(seen.runtime_uid.clone());
    let attachment = sandbox(&attachment_id)?;
    let has_own_name = Claimant::of(facts).fixed_name() == Some(facts.name.as_str());
    let cached = cached.filter(|_| has_own_name);
    // Where a StickyIP exists already, the blocks of the node decide nothing, and the watched CiliumNode is
    // enough.
    let watched =
        context.index.cilium_node().filter(|_| mode.publishes_pool_entries() && cached.is_some()).cloned();
    let may_reserve = watched.is_none();
    let node = match mode.publishes_pool_entries() && may_reserve {
        true => match pool::read_node(api_writer.api(), &context.settings.node).await? {
            Some(node) => Some(node),
            None => {
                let reason = format!("CiliumNode {} does not exist yet", context.settings.node);
                return Ok(PreparedBinding::NotYet(reason));
            }
        },
        false => watched,
    };
    let owner = format!("{}/{}", facts.namespace, facts.name);
    let sets = context.node_ranges(node.as_ref());
    if sets.is_empty() {
        let (name, how) = (&context.settings.node, mode.how_to_get_ranges());
        return Ok(PreparedBinding::NotYet(format!("node {name} has no addresses for pods: {how}")));
    }
    let barred = may_reserve.then(|| node.as_ref().map(|node| node.barred_to(&owner)).unwrap_or_default());
    let source = AddressSource { sets, barred, publish: context.options.shape.clone() };
    let own = cached.map_or(StickyRead::NotRead, |cached| {
        StickyRead::found(cached.sticky).with_claims(Some(cached.claims))
    });
    let may_exist = |path: &Path| context.may_exist(path);
    let this_node = ThisNode {
        name: &context.settings.node,
        store,
        netns_may_exist: &may_exist,
        on_attaching: &|_, _| {},
    };
    // The agent never waits for a pod: it tries again.
    let pod = PodToBind { facts, identity, attachment: &attachment, patience: Duration::ZERO };
    let interface = interface()?;
    let pool_lock = |key: &StickyKey| try_pool_lock(store, &store::ClaimantKey::of_sticky(key, &interface));
    let bound = match pod.bind(&mut api_writer, this_node, &source, own, pool_lock).await {
        Ok(bound) => bound,
        Err(BindPodError::Api(error)) => return Err(error.into()),
        Err(BindPodError::Store(error)) => return Err(error.into()),
        Err(error) => return Ok(PreparedBinding::NotYet(error.to_string())),
    };
    let addresses = bound.sticky.spec.addresses.clone();
    let resource = pool::resource(&bound.key.namespace, &bound.sticky.spec.workload);
    if !source.publish.is_silent_about(&addresses) {
        let publication = Publication { addresses: addresses.clone(), owner, resource: resource.clone() };
        // What was read before the pool lock says nothing of entry and route, which a DEL may have removed
        // since: both are written, and a route only by the resourceVersion that was read.
        let read = node.map(|node| pool::without(node, &addresses));
        pool::publish(&mut api_writer, &context.settings.node, &source.publish, &publication, read).await?;
    }
    let StickyKey { namespace, name } = bound.key;
    let prepared = PreparedSticky { namespace, name, addresses, resource, attachment_id };
    let attached = AttachedForAdd { prepared, sticky: bound.sticky, pool_lock: bound.lock };
    Ok(PreparedBinding::Attached(Box::new(attached)))
}
