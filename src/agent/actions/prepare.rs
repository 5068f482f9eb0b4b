//! Deciding about a pod before its ADD comes, and taking the decision back when it will not come. Must never hold a
//! pod's turn while waiting for another, and never leave a decision in place whose StickyIP is attached to somebody
//! else.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

use crate::agent::actions::addresses::NodeAddresses;
use crate::agent::actions::{ActionContext, ActionError, ActionOutcome, interface, list, sandbox};
use crate::agent::index::NodePod;
use crate::agent::metrics::AgentMetrics;
use crate::agent::plan::uid_of;
use crate::cluster::api::cached;
use crate::cluster::api::client::ApiError;
use crate::cluster::api::events;
use crate::cluster::cilium::pool;
use crate::cluster::cilium::pool::Publication;
use crate::cluster::cilium::socket;
use crate::cluster::cilium::socket::EndpointAnswer;
use crate::cluster::objects::{StickyIP, StickyKey};
use crate::cluster::pod;
use crate::cluster::protocol::apply::ApiWriter;
use crate::cluster::protocol::bind;
use crate::cluster::protocol::bind::{BindError, Binder, ClaimsByAddress, StickyRead};
use crate::cluster::protocol::step::Refusal;
use crate::cluster::protocol::sticky_identity;
use crate::cni::PodIdentity;
use crate::policy::handover::{Attached, OldPod};
use crate::policy::lifetime::retention::asked_by;
use crate::policy::selection::claimant::Claimant;
use crate::policy::selection::facts::PodFacts;
use crate::policy::selection::pin::pin_of;
use crate::policy::selection::rules::StickyReason;
use crate::policy::selection::slot::{MAX_SLOT_TRIES, slot_name};
use crate::store;
use crate::store::{ClaimantLock, Decision, Disk, PreparedSticky, Store, Withdrawn};

/// What the API server remembers of the StickyIP that a pod will have: nobody has it, and its claims are sealed to it.
struct CachedBinding {
    /// The annotations of the namespace.
    namespace: BTreeMap<String, String>,
    sticky: StickyIP,
    claims: ClaimsByAddress,
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Decides about a pod, attaches its StickyIP if it is sticky, and leaves the decision for its ADD.
    pub(crate) async fn prepare(&self, seen: &NodePod) -> Result<ActionOutcome, ActionError> {
        let identity = identity(seen)?;
        let store = self.store()?;
        let itself = store::Claimant::new(&identity, &interface()?);
        let Some(_claimant_lock) = self.try_claimant_lock(&store, &itself)? else {
            return Ok(ActionOutcome::Postponed("an ADD of this pod is on its way".into()));
        };
        if self.is_decided(&store, seen)? {
            return Ok(ActionOutcome::NotNeeded("its ADD came first".into()));
        }
        let cached = self.read_cached_binding(&store, &itself, seen).await?;
        let by_memory = match &cached {
            // A "no" is looked up live.
            Some(cached) => self.judge(seen, async { Ok(cached.namespace.clone()) }).await.ok(),
            None => None,
        };
        let (sticky, facts, reason) = match by_memory.filter(|(sticky, ..)| *sticky) {
            Some(judged) => judged,
            None => {
                let api = self.connection();
                match self.judge(seen, sticky_identity::of_namespace(&api, &seen.facts.namespace)).await {
                    Ok(judged) => judged,
                    // The ADD tells the pod; a wish that is mended is a new event.
                    Err(sticky_identity::StickyIdentityError::Policy(error)) => {
                        return Ok(ActionOutcome::Postponed(error.to_string()));
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        };
        if !sticky {
            self.decide(&store, &identity, None, &reason.to_string())?;
            AgentMetrics::count(&self.metrics.prepared, "plain");
            return Ok(ActionOutcome::Done(format!("the pod is not sticky: {reason}")));
        }
        let seen = NodePod { facts, ..seen.clone() };
        let by_memory = cached.as_ref().map(|cached| (cached.namespace.clone(), cached.sticky.clone()));
        // Beside the walk, which waits for the API server most of the time.
        let keeping = async {
            match &by_memory {
                Some((namespace, sticky)) => self.keeps_by_memory(&seen.facts, namespace, sticky).await,
                None => Ok(None),
            }
        };
        // Boxed: a walk is large.
        let attaching = Box::pin(self.bind_for_pod(&store, &seen, &identity, cached));
        let (attached, keeps) = tokio::join!(attaching, keeping);
        match attached? {
            Ok((prepared, object, pool_lock)) => {
                let addresses = list(&prepared.addresses);
                self.ask_for_mac(&seen.facts, keeps?, &object).await?;
                self.decide(&store, &identity, Some(prepared), &reason.to_string())?;
                drop(pool_lock);
                AgentMetrics::count(&self.metrics.prepared, "sticky");
                events::emit_move_events(&mut self.api_writer(), None, &object, &seen.facts).await;
                Ok(ActionOutcome::Done(format!("the pod will have {addresses}: {reason}")))
            }
            Err(why) => Ok(ActionOutcome::Postponed(why)),
        }
    }

    async fn judge(
        &self,
        seen: &NodePod,
        namespace: impl Future<Output = Result<BTreeMap<String, String>, ApiError>>,
    ) -> Result<(bool, PodFacts, StickyReason), sticky_identity::StickyIdentityError> {
        sticky_identity::judge(&self.settings.selection.rules(), seen.facts.clone(), namespace).await
    }

    /// What the API server remembers of a pod whose name this node has kept addresses for: mostly it is the next one of a
    /// sticky pod, and everything is as it was left. The kubelet calls ADD a few milliseconds after the pod was bound, so what can
    /// be asked at once is. None if it is otherwise; then everything is read live.
    async fn read_cached_binding(
        &self,
        store: &Store<D>,
        itself: &store::Claimant,
        seen: &NodePod,
    ) -> Result<Option<CachedBinding>, ActionError> {
        let kept = store.lock()?.find_by_claimant(itself)?;
        let addresses: BTreeSet<IpAddr> =
            kept.map(|kept| kept.record.addresses).unwrap_or_default().into_iter().collect();
        if addresses.is_empty() {
            return Ok(None);
        }
        let api = self.connection();
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

    fn is_decided(&self, store: &Store<D>, seen: &NodePod) -> Result<bool, ActionError> {
        let mut locked = store.lock()?;
        if locked.prepared(&seen.runtime_uid, &interface()?)?.is_some() {
            return Ok(true);
        }
        drop(locked);
        Self::has_record(store, seen)
    }

    /// Whether the store knows a living sandbox of the pod.
    fn has_record(store: &Store<D>, seen: &NodePod) -> Result<bool, ActionError> {
        let mut looks = store.walk()?.into_iter().filter_map(|look| look.record);
        Ok(looks.any(|record| {
            record.is_attached(store.now()) && uid_of(&record) == Some(seen.runtime_uid.as_str())
        }))
    }

    fn decide(
        &self,
        store: &Store<D>,
        pod: &PodIdentity,
        sticky: Option<PreparedSticky>,
        reason: &str,
    ) -> Result<(), ActionError> {
        let decision = Decision::about(pod, sticky, reason, store.now().clone())
            .ok_or_else(|| ActionError::Name(format!("pod {pod} has no uid")))?;
        Ok(store.lock()?.prepare(&decision)?)
    }

    /// Walks the pod's way to its address, and has the turn at its pool keys then; the reason if it must wait.
    async fn bind_for_pod(
        &self,
        store: &Store<D>,
        seen: &NodePod,
        identity: &PodIdentity,
        cached: Option<CachedBinding>,
    ) -> Result<Result<(PreparedSticky, StickyIP, ClaimantLock), String>, ActionError> {
        let mut api_writer = self.api_writer();
        let facts = &seen.facts;
        let claimant = Claimant::of(facts);
        let attachment_id = Decision::attachment_id(&seen.runtime_uid);
        let attachment = sandbox(&attachment_id)?;
        let asker = Attached {
            node: self.settings.node.clone(),
            pod_uid: facts.uid.clone(),
            container_id: attachment_id.clone(),
        };
        let cached = cached.filter(|_| claimant.fixed_name() == Some(facts.name.as_str()));
        let reads_node = self.settings.mode.publishes_pool_entries();
        // Where a StickyIP is there already, the node's blocks decide nothing.
        let known = self.index.cilium_node().filter(|_| reads_node && cached.is_some()).cloned();
        let may_reserve = known.is_none();
        let node = match reads_node && may_reserve {
            true => match pool::read_node(api_writer.api(), &self.settings.node).await? {
                Some(node) => Some(node),
                None => return Ok(Err(format!("there is no CiliumNode {} yet", self.settings.node))),
            },
            false => known,
        };
        let mut cached = cached.map(|CachedBinding { sticky, claims, .. }| (sticky, claims));
        let owner = format!("{}/{}", facts.namespace, facts.name);
        let sets = self.node_ranges(node.as_ref());
        if sets.is_empty() {
            let cure = self.settings.mode.how_to_get_ranges();
            return Ok(Err(format!(
                "the own addresses of node {} are not known: {cure}",
                self.settings.node
            )));
        }
        for _ in 0..MAX_SLOT_TRIES {
            let slot = match claimant.fixed_name() {
                Some(_) => None,
                None => Some(sticky_identity::choose(api_writer.api(), &claimant, facts).await?),
            };
            let name = match (claimant.fixed_name(), slot) {
                (Some(name), _) => name.to_owned(),
                (None, slot) => slot_name(&claimant.workload().name, slot.unwrap_or_default()),
            };
            let key = StickyKey { namespace: facts.namespace.clone(), name };
            let reference = sticky_identity::reference(&claimant, slot);
            let pinned = match pin_of(facts, reference.ordinal) {
                Ok(pin) => pin.map(|pin| pin.addresses).unwrap_or_default(),
                Err(error) => return Ok(Err(error.to_string())),
            };
            let walker = Binder {
                asker: asker.clone(),
                pod: facts.name.clone(),
                key: key.clone(),
                claimant: reference,
                workload: sticky_identity::workload(&claimant),
                retention: asked_by(facts),
                pinned,
                patience: Duration::ZERO,
            };
            let netns_is_there = |path: &std::path::Path| self.may_exist(path);
            let mut here = NodeAddresses {
                store,
                node: &self.settings.node,
                key: key.clone(),
                pod: identity.clone(),
                attachment: attachment.clone(),
                sets: &sets,
                barred: may_reserve
                    .then(|| node.as_ref().map(|node| node.barred_to(&owner)).unwrap_or_default()),
                netns_is_there: &netns_is_there,
                reserved: Vec::new(),
            };
            // Until the decision is in place: no DEL on this node hides or detaches between our attachment and what rests on it.
            let Some(pool_lock) = self.pool_lock(store, &key)? else {
                return Ok(Err("others are at its pool keys".into()));
            };
            let read = cached.take().map_or(StickyRead::NotRead, |(sticky, claims)| {
                StickyRead::found(sticky).with_claims(Some(claims))
            });
            match walker.bind(&mut api_writer, &mut here, read).await {
                Ok(object) => {
                    let addresses = object.spec.addresses.clone();
                    let resource = pool::resource(&key.namespace, &walker.workload);
                    let (owner, resource_shown) = (owner.clone(), resource.clone());
                    let shown = Publication { addresses: addresses.clone(), owner, resource: resource_shown };
                    if !self.options.shape.is_silent_about(&addresses) {
                        // What was seen before the turn says nothing of key and route, which a DEL may have taken out since: both are put,
                        // and a route only if nobody wrote the list since.
                        let seen = node.clone().map(|node| pool::without(node, &addresses));
                        pool::publish(
                            &mut api_writer,
                            &self.settings.node,
                            &self.options.shape,
                            &shown,
                            seen,
                        )
                        .await?;
                    }
                    let StickyKey { namespace, name } = key;
                    let prepared = PreparedSticky { namespace, name, addresses, resource, attachment_id };
                    return Ok(Ok((prepared, object, pool_lock)));
                }
                // Another pod was faster on this slot.
                Err(BindError::Refused(Refusal::Handover { .. })) if slot.is_some() => {
                    api_writer.api_mut().restart_time();
                    unreserve(&api_writer, &here).await?;
                }
                Err(BindError::Api(error)) => return Err(error.into()),
                Err(error) => {
                    if matches!(error, BindError::Refused(_) | BindError::Waited { .. }) {
                        api_writer.api_mut().restart_time();
                        unreserve(&api_writer, &here).await?;
                    }
                    return Ok(Err(error.to_string()));
                }
            }
        }
        Ok(Err("others took every slot that it chose".into()))
    }

    /// A live look whether a StickyIP is attached to this node under this container id.
    async fn is_attached(
        &self,
        api_writer: &ApiWriter<'_>,
        key: &StickyKey,
        attachment_id: &str,
    ) -> Result<bool, ActionError> {
        let found = bind::read_sticky(api_writer, key).await?;
        let attachment = found.and_then(|found| found.status?.attachment);
        Ok(attachment.is_some_and(|attachment| {
            attachment.node == self.settings.node && attachment.container_id == attachment_id
        }))
    }

    /// Takes back a decision whose pod will not come, that is from before a reboot, or whose StickyIP is not attached for it
    /// any more: a person may have deleted it.
    pub(crate) async fn withdraw(&self, uid: &str) -> Result<ActionOutcome, ActionError> {
        let store = self.store()?;
        let Some(decision) = store.decisions()?.into_iter().find(|decision| decision.uid == uid) else {
            return Ok(ActionOutcome::NotNeeded("there is no such decision any more".into()));
        };
        let of_this_boot = decision.at.boot() == store.now().boot();
        let Some(sticky) = decision.sticky.clone() else {
            if of_this_boot && self.pod_exists(&decision.namespace, &decision.pod, uid).await? {
                return Ok(ActionOutcome::Postponed("the pod still exists".into()));
            }
            store.lock()?.remove_decision(uid)?;
            self.metrics.withdrawn.inc();
            return Ok(ActionOutcome::Done(format!("pod {}/{} is gone", decision.namespace, decision.pod)));
        };
        let pod = decision.pod().ok_or_else(|| ActionError::Name(format!("{uid:?} is no pod's uid")))?;
        let Some(_claimant_lock) =
            self.try_claimant_lock(&store, &store::Claimant::new(&pod, &interface()?))?
        else {
            return Ok(ActionOutcome::Postponed("an ADD of this pod is on its way".into()));
        };
        let key = StickyKey { namespace: sticky.namespace.clone(), name: sticky.name.clone() };
        if of_this_boot
            && self.is_expected(&decision).await?
            && self.is_attached(&self.api_writer(), &key, &sticky.attachment_id).await?
        {
            return Ok(ActionOutcome::Postponed("the pod may still come".into()));
        }
        // Whoever ends between the file and the detach leaves an attachment without a sandbox, which is found as a leak.
        let withdrawn = store.lock()?.withdraw(uid, &interface()?)?;
        match withdrawn {
            Withdrawn::Unused(_) => {
                let detached = self.detach_containers(&store, &key, &[&sticky.attachment_id]).await?;
                self.metrics.withdrawn.inc();
                Ok(match detached {
                    ActionOutcome::Done(_) => ActionOutcome::Done(format!(
                        "pod {pod} will not come; {} is free for its next one",
                        list(&sticky.addresses)
                    )),
                    ActionOutcome::NotNeeded(why) => {
                        ActionOutcome::Done(format!("it rested on nothing: {why}"))
                    }
                    other => other,
                })
            }
            Withdrawn::InUse => Ok(ActionOutcome::Done("a sandbox has it; its DEL detaches".into())),
            Withdrawn::Nothing => Ok(ActionOutcome::NotNeeded("its sandbox has come and gone".into())),
        }
    }

    /// Takes back the decision that a pod is not sticky if it is by now, or if its wish cannot be followed: pod, namespace or rules may
    /// have changed before its ADD came. Then it is prepared as any other.
    pub(crate) async fn reevaluate(&self, seen: &NodePod) -> Result<ActionOutcome, ActionError> {
        let (identity, store) = (identity(seen)?, self.store()?);
        let Some(_claimant_lock) =
            self.try_claimant_lock(&store, &store::Claimant::new(&identity, &interface()?))?
        else {
            return Ok(ActionOutcome::Postponed("an ADD of this pod is on its way".into()));
        };
        let uid = &seen.runtime_uid;
        if !store.decisions()?.iter().any(|decision| decision.uid == *uid && decision.sticky.is_none()) {
            return Ok(ActionOutcome::NotNeeded("there is no such decision any more".into()));
        }
        if self.has_sandbox(&store, seen).await? {
            return Ok(ActionOutcome::Postponed("its ADD came first".into()));
        }
        let api = self.connection();
        let namespace = sticky_identity::of_namespace(&api, &seen.facts.namespace);
        let why = match self.judge(seen, namespace).await {
            Ok((false, _, reason)) => {
                return Ok(ActionOutcome::Postponed(format!("the pod is still not sticky: {reason}")));
            }
            Ok((true, _, reason)) => reason.to_string(),
            Err(sticky_identity::StickyIdentityError::Policy(error)) => error.to_string(),
            Err(error) => return Err(error.into()),
        };
        store.lock()?.remove_decision_durably(uid)?;
        self.metrics.withdrawn.inc();
        Ok(ActionOutcome::Done(format!("the pod is not what it was: {why}")))
    }

    /// Whether a sandbox of a pod that is not sticky is there. Where Cilium picks the addresses it leaves no record, and Cilium knows.
    async fn has_sandbox(&self, store: &Store<D>, seen: &NodePod) -> Result<bool, ActionError> {
        if self.settings.mode.cilium_picks_the_address() {
            let (namespace, name) = (seen.facts.namespace.clone(), seen.facts.name.clone());
            let subject = format!("pod {namespace}/{name}");
            let asked = move |socket: &std::path::Path| socket::endpoint_of_pod(socket, &namespace, &name);
            return Ok(matches!(self.ask_cilium(&subject, asked).await?, EndpointAnswer::There(_)));
        }
        Self::has_record(store, seen)
    }

    /// A live look whether the pod of a decision exists, and has neither ended nor been told to.
    async fn is_expected(&self, decision: &Decision) -> Result<bool, ActionError> {
        let api = self.connection();
        let Decision { namespace, pod: name, .. } = decision;
        let pods: Api<Pod> = Api::namespaced(api.client(), namespace);
        let found = api.read(&format!("get Pod {namespace}/{name}"), || pods.get_opt(name)).await?;
        Ok(pod::old_pod(found.as_ref(), &decision.uid) == OldPod::Running)
    }

    /// A live look whether the pod that the runtime knows by this uid exists.
    pub(crate) async fn pod_exists(
        &self,
        namespace: &str,
        name: &str,
        uid: &str,
    ) -> Result<bool, ActionError> {
        let api = self.connection();
        let pods: Api<Pod> = Api::namespaced(api.client(), namespace);
        let found = api.read(&format!("get Pod {namespace}/{name}"), || pods.get_opt(name)).await?;
        Ok(found.is_some_and(|found| pod::is_meant(&found, uid)))
    }
}

/// Lets go of what was reserved for a walk that was refused, if nobody claims it: a pod of another node may have been faster with the
/// StickyIP that this walk made, and then this node, its home, must keep the address from others.
async fn unreserve<D: Disk>(
    api_writer: &ApiWriter<'_>,
    here: &NodeAddresses<'_, D>,
) -> Result<(), ActionError> {
    if !bind::is_any_claimed(api_writer, &here.reserved).await? {
        here.unreserve()?;
    }
    Ok(())
}

fn identity(seen: &NodePod) -> Result<PodIdentity, ActionError> {
    let (facts, uid) = (&seen.facts, &seen.runtime_uid);
    PodIdentity::new(&facts.namespace, &facts.name, Some(uid))
        .map_err(|error| ActionError::Name(error.to_string()))
}
