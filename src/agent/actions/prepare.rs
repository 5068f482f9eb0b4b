//! Deciding about a pod before its ADD comes, and taking the decision back when it will not come. Must never hold a
//! pod's turn while waiting for another, and never leave a decision in place whose StickyIP is attached to somebody
//! else.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

use crate::agent::actions::addresses::Here;
use crate::agent::actions::{ActError, Hands, Outcome, interface, list, sandbox};
use crate::agent::index::PodSeen;
use crate::agent::metrics::Metrics;
use crate::agent::plan::uid_of;
use crate::cluster::api::cached;
use crate::cluster::api::client::ApiError;
use crate::cluster::api::events;
use crate::cluster::cilium::pool;
use crate::cluster::cilium::pool::Shown;
use crate::cluster::cilium::socket;
use crate::cluster::cilium::socket::Endpoint;
use crate::cluster::objects::{Holder, StickyIP};
use crate::cluster::pod;
use crate::cluster::protocol::apply::Carrier;
use crate::cluster::protocol::bind;
use crate::cluster::protocol::bind::{Claims, WalkError, Walker};
use crate::cluster::protocol::step::Refusal;
use crate::cluster::protocol::sticky_identity;
use crate::cni::PodIdentity;
use crate::policy::handover::{Attached, OldPod};
use crate::policy::lifetime::retention::asked_by;
use crate::policy::selection::claimant::{Claimant, slot_name};
use crate::policy::selection::facts::PodFacts;
use crate::policy::selection::pin::pin_of;
use crate::policy::selection::rules::Reason;
use crate::store;
use crate::store::{Decision, Disk, Prepared, Store, Turn, Withdrawn};

/// How often a pod of a Deployment chooses another slot because somebody was faster.
const MOST_SLOTS: usize = 4;

/// What the API server remembers of the StickyIP that a pod will have: nobody has it, and its claims are sealed to it.
struct Foreseen {
    /// The annotations of the namespace.
    namespace: BTreeMap<String, String>,
    sticky: StickyIP,
    claims: Claims,
}

impl<D: Disk + Clone> Hands<'_, D> {
    /// Decides about a pod, attaches its StickyIP if it is sticky, and leaves the decision for its ADD.
    pub(crate) async fn prepare(&self, seen: &PodSeen) -> Result<Outcome, ActError> {
        let identity = identity(seen)?;
        let store = self.store()?;
        let itself = store::Claimant::new(&identity, &interface()?);
        let Some(_turn) = self.try_turn(&store, &itself)? else {
            return Ok(Outcome::Later("an ADD of this pod is on its way".into()));
        };
        if self.is_decided(&store, seen)? {
            return Ok(Outcome::Needless("its ADD came first".into()));
        }
        let foreseen = self.foresee(&store, &itself, seen).await?;
        let by_memory = match &foreseen {
            // A "no" is looked up live.
            Some(foreseen) => self.judge(seen, async { Ok(foreseen.namespace.clone()) }).await.ok(),
            None => None,
        };
        let (sticky, facts, reason) = match by_memory.filter(|(sticky, ..)| *sticky) {
            Some(judged) => judged,
            None => {
                let api = self.connection();
                match self.judge(seen, sticky_identity::of_namespace(&api, &seen.facts.namespace)).await {
                    Ok(judged) => judged,
                    // The ADD tells the pod; a wish that is mended is a new event.
                    Err(sticky_identity::ErrandError::Policy(error)) => {
                        return Ok(Outcome::Later(error.to_string()));
                    }
                    Err(error) => return Err(error.into()),
                }
            }
        };
        if !sticky {
            self.decide(&store, &identity, None, &reason.to_string())?;
            Metrics::count(&self.metrics.prepared, "plain");
            return Ok(Outcome::Done(format!("the pod is not sticky: {reason}")));
        }
        let seen = PodSeen { facts, ..seen.clone() };
        let by_memory =
            foreseen.as_ref().map(|foreseen| (foreseen.namespace.clone(), foreseen.sticky.clone()));
        // Beside the walk, which waits for the API server most of the time.
        let keeping = async {
            match &by_memory {
                Some((namespace, sticky)) => self.keeps_by_memory(&seen.facts, namespace, sticky).await,
                None => Ok(None),
            }
        };
        // Boxed: a walk is large.
        let attaching = Box::pin(self.attach_for(&store, &seen, &identity, foreseen));
        let (attached, keeps) = tokio::join!(attaching, keeping);
        match attached? {
            Ok((prepared, object, turn)) => {
                let addresses = list(&prepared.addresses);
                self.ask_for_mac(&seen.facts, keeps?, &object).await?;
                self.decide(&store, &identity, Some(prepared), &reason.to_string())?;
                drop(turn);
                Metrics::count(&self.metrics.prepared, "sticky");
                events::tell_of_the_move(&mut self.carrier(), None, &object, &seen.facts).await;
                Ok(Outcome::Done(format!("the pod will have {addresses}: {reason}")))
            }
            Err(why) => Ok(Outcome::Later(why)),
        }
    }

    async fn judge(
        &self,
        seen: &PodSeen,
        namespace: impl Future<Output = Result<BTreeMap<String, String>, ApiError>>,
    ) -> Result<(bool, PodFacts, Reason), sticky_identity::ErrandError> {
        sticky_identity::judge(&self.settings.rules(), seen.facts.clone(), namespace).await
    }

    /// What the API server remembers of a pod whose name this node has kept addresses for: mostly it is the next one of a
    /// sticky pod, and everything is as it was left. The kubelet calls ADD a few milliseconds after the pod was bound, so what can
    /// be asked at once is. None if it is otherwise; then everything is read live.
    async fn foresee(
        &self,
        store: &Store<D>,
        itself: &store::Claimant,
        seen: &PodSeen,
    ) -> Result<Option<Foreseen>, ActError> {
        let kept = store.lock()?.of_claimant(itself)?;
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
        Ok(Some(Foreseen { namespace, sticky, claims }))
    }

    fn is_decided(&self, store: &Store<D>, seen: &PodSeen) -> Result<bool, ActError> {
        let mut locked = store.lock()?;
        if locked.prepared(&seen.runtime_uid, &interface()?)?.is_some() {
            return Ok(true);
        }
        drop(locked);
        Self::has_record(store, seen)
    }

    /// Whether the store knows a living sandbox of the pod.
    fn has_record(store: &Store<D>, seen: &PodSeen) -> Result<bool, ActError> {
        let mut looks = store.walk()?.into_iter().filter_map(|look| look.record);
        Ok(looks.any(|record| {
            record.is_attached(store.now()) && uid_of(&record) == Some(seen.runtime_uid.as_str())
        }))
    }

    fn decide(
        &self,
        store: &Store<D>,
        pod: &PodIdentity,
        sticky: Option<Prepared>,
        reason: &str,
    ) -> Result<(), ActError> {
        let decision = Decision::about(pod, sticky, reason, store.now().clone())
            .ok_or_else(|| ActError::Name(format!("pod {pod} has no uid")))?;
        Ok(store.lock()?.prepare(&decision)?)
    }

    /// Walks the pod's way to its address, and has the turn at its pool keys then; the reason if it must wait.
    async fn attach_for(
        &self,
        store: &Store<D>,
        seen: &PodSeen,
        identity: &PodIdentity,
        foreseen: Option<Foreseen>,
    ) -> Result<Result<(Prepared, StickyIP, Turn), String>, ActError> {
        let mut carrier = self.carrier();
        let facts = &seen.facts;
        let claimant = Claimant::of(facts);
        let known_as = Decision::known_as(&seen.runtime_uid);
        let attachment = sandbox(&known_as)?;
        let asker = Attached {
            node: self.settings.node.clone(),
            pod_uid: facts.uid.clone(),
            container_id: known_as.clone(),
        };
        let foreseen = foreseen.filter(|_| claimant.fixed_name() == Some(facts.name.as_str()));
        // Where a StickyIP is there already, the node's blocks decide nothing.
        let known = self.index.cilium_node().filter(|_| self.terms.shape.pool && foreseen.is_some()).cloned();
        let may_reserve = known.is_none();
        let node = match self.terms.shape.pool && may_reserve {
            true => match pool::read_node(carrier.api(), &self.settings.node).await? {
                Some(node) => Some(node),
                None => return Ok(Err(format!("there is no CiliumNode {} yet", self.settings.node))),
            },
            false => known,
        };
        let mut foreseen = foreseen.map(|Foreseen { sticky, claims, .. }| (sticky, claims));
        let owner = format!("{}/{}", facts.namespace, facts.name);
        let sets = self.own_sets(node.as_ref());
        if sets.is_empty() {
            let cure = match self.terms.shape.pool {
                true => "spec.ipam.podCIDRs of its CiliumNode is empty; fill it",
                false => "the installed conflist has no ranges",
            };
            return Ok(Err(format!(
                "the own addresses of node {} are not known: {cure}",
                self.settings.node
            )));
        }
        for _ in 0..MOST_SLOTS {
            let slot = match claimant.fixed_name() {
                Some(_) => None,
                None => Some(sticky_identity::choose(carrier.api(), &claimant, facts).await?),
            };
            let name = match (claimant.fixed_name(), slot) {
                (Some(name), _) => name.to_owned(),
                (None, slot) => slot_name(&claimant.workload().name, slot.unwrap_or_default()),
            };
            let key = Holder { namespace: facts.namespace.clone(), name };
            let reference = sticky_identity::reference(&claimant, slot);
            let pinned = match pin_of(facts, reference.ordinal) {
                Ok(pin) => pin.map(|pin| pin.addresses).unwrap_or_default(),
                Err(error) => return Ok(Err(error.to_string())),
            };
            let walker = Walker {
                asker: asker.clone(),
                pod: facts.name.clone(),
                key: key.clone(),
                claimant: reference,
                workload: sticky_identity::workload(&claimant),
                retention: asked_by(facts),
                pinned,
                patience: Duration::ZERO,
            };
            let netns_is_there = |path: &std::path::Path| self.may_be_there(path);
            let mut here = Here {
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
            let Some(turn) = self.pool_turn(store, &key)? else {
                return Ok(Err("others are at its pool keys".into()));
            };
            let (sticky, claims) = foreseen.take().map(|(sticky, claims)| (Some(sticky), claims)).unzip();
            match walker.walk_to(&mut carrier, &mut here, sticky, claims).await {
                Ok(object) => {
                    let addresses = object.spec.addresses.clone();
                    let resource = pool::resource(&key.namespace, &walker.workload);
                    let (owner, resource_shown) = (owner.clone(), resource.clone());
                    let shown = Shown { addresses: addresses.clone(), owner, resource: resource_shown };
                    if !self.terms.shape.is_silent_about(&addresses) {
                        // What was seen before the turn says nothing of key and route, which a DEL may have taken out since: both are put,
                        // and a route only if nobody wrote the list since.
                        let seen = node.clone().map(|node| pool::without(node, &addresses));
                        pool::put(&mut carrier, &self.settings.node, &self.terms.shape, &shown, seen).await?;
                    }
                    let Holder { namespace, name } = key;
                    let prepared = Prepared { namespace, name, addresses, resource, known_as };
                    return Ok(Ok((prepared, object, turn)));
                }
                // Another pod was faster on this slot.
                Err(WalkError::Refused(Refusal::Handover { .. })) if slot.is_some() => {
                    carrier.api_mut().restart_time();
                    unreserve(&carrier, &here).await?;
                }
                Err(WalkError::Api(error)) => return Err(error.into()),
                Err(error) => {
                    if matches!(error, WalkError::Refused(_) | WalkError::Waited { .. }) {
                        carrier.api_mut().restart_time();
                        unreserve(&carrier, &here).await?;
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
        carrier: &Carrier<'_>,
        key: &Holder,
        known_as: &str,
    ) -> Result<bool, ActError> {
        let found = bind::read_sticky(carrier, key).await?;
        let attachment = found.and_then(|found| found.status?.attachment);
        Ok(attachment.is_some_and(|attachment| {
            attachment.node == self.settings.node && attachment.container_id == known_as
        }))
    }

    /// Takes back a decision whose pod will not come, that is from before a reboot, or whose StickyIP is not attached for it
    /// any more: a person may have deleted it.
    pub(crate) async fn withdraw(&self, uid: &str) -> Result<Outcome, ActError> {
        let store = self.store()?;
        let Some(decision) = store.decisions()?.into_iter().find(|decision| decision.uid == uid) else {
            return Ok(Outcome::Needless("there is no such decision any more".into()));
        };
        let of_this_boot = decision.at.boot() == store.now().boot();
        let Some(sticky) = decision.sticky.clone() else {
            if of_this_boot && self.pod_exists(&decision.namespace, &decision.pod, uid).await? {
                return Ok(Outcome::Later("the pod still exists".into()));
            }
            store.lock()?.forget_prepared(uid)?;
            self.metrics.withdrawn.inc();
            return Ok(Outcome::Done(format!("pod {}/{} is gone", decision.namespace, decision.pod)));
        };
        let pod = decision.pod().ok_or_else(|| ActError::Name(format!("{uid:?} is no pod's uid")))?;
        let Some(_turn) = self.try_turn(&store, &store::Claimant::new(&pod, &interface()?))? else {
            return Ok(Outcome::Later("an ADD of this pod is on its way".into()));
        };
        let key = Holder { namespace: sticky.namespace.clone(), name: sticky.name.clone() };
        if of_this_boot
            && self.is_expected(&decision).await?
            && self.is_attached(&self.carrier(), &key, &sticky.known_as).await?
        {
            return Ok(Outcome::Later("the pod may still come".into()));
        }
        // Whoever ends between the file and the detach leaves an attachment without a sandbox, which is found as a leak.
        let withdrawn = store.lock()?.withdraw(uid, &interface()?)?;
        match withdrawn {
            Withdrawn::Unused(_) => {
                let detached = self.let_go(&store, &key, &[&sticky.known_as]).await?;
                self.metrics.withdrawn.inc();
                Ok(match detached {
                    Outcome::Done(_) => Outcome::Done(format!(
                        "pod {pod} will not come; {} is free for its next one",
                        list(&sticky.addresses)
                    )),
                    Outcome::Needless(why) => Outcome::Done(format!("it rested on nothing: {why}")),
                    other => other,
                })
            }
            Withdrawn::InUse => Ok(Outcome::Done("a sandbox has it; its DEL detaches".into())),
            Withdrawn::Nothing => Ok(Outcome::Needless("its sandbox has come and gone".into())),
        }
    }

    /// Takes back the decision that a pod is not sticky if it is by now, or if its wish cannot be followed: pod, namespace or rules may
    /// have changed before its ADD came. Then it is prepared as any other.
    pub(crate) async fn rejudge(&self, seen: &PodSeen) -> Result<Outcome, ActError> {
        let (identity, store) = (identity(seen)?, self.store()?);
        let Some(_turn) = self.try_turn(&store, &store::Claimant::new(&identity, &interface()?))? else {
            return Ok(Outcome::Later("an ADD of this pod is on its way".into()));
        };
        let uid = &seen.runtime_uid;
        if !store.decisions()?.iter().any(|decision| decision.uid == *uid && decision.sticky.is_none()) {
            return Ok(Outcome::Needless("there is no such decision any more".into()));
        }
        if self.has_sandbox(&store, seen).await? {
            return Ok(Outcome::Later("its ADD came first".into()));
        }
        let api = self.connection();
        let namespace = sticky_identity::of_namespace(&api, &seen.facts.namespace);
        let why = match self.judge(seen, namespace).await {
            Ok((false, _, reason)) => {
                return Ok(Outcome::Later(format!("the pod is still not sticky: {reason}")));
            }
            Ok((true, _, reason)) => reason.to_string(),
            Err(sticky_identity::ErrandError::Policy(error)) => error.to_string(),
            Err(error) => return Err(error.into()),
        };
        store.lock()?.revoke_prepared(uid)?;
        self.metrics.withdrawn.inc();
        Ok(Outcome::Done(format!("the pod is not what it was: {why}")))
    }

    /// Whether a sandbox of a pod that is not sticky is there. Where Cilium picks the addresses it leaves no record, and Cilium knows.
    async fn has_sandbox(&self, store: &Store<D>, seen: &PodSeen) -> Result<bool, ActError> {
        if self.terms.shape.pool {
            let (namespace, name) = (seen.facts.namespace.clone(), seen.facts.name.clone());
            let subject = format!("pod {namespace}/{name}");
            let asked = move |socket: &std::path::Path| socket::endpoint_of_pod(socket, &namespace, &name);
            return Ok(matches!(self.ask_cilium(&subject, asked).await?, Endpoint::There(_)));
        }
        Self::has_record(store, seen)
    }

    /// A live look whether the pod of a decision exists, and has neither ended nor been told to.
    async fn is_expected(&self, decision: &Decision) -> Result<bool, ActError> {
        let api = self.connection();
        let Decision { namespace, pod: name, .. } = decision;
        let pods: Api<Pod> = Api::namespaced(api.client(), namespace);
        let found = api.read(&format!("get Pod {namespace}/{name}"), || pods.get_opt(name)).await?;
        Ok(pod::old_pod(found.as_ref(), &decision.uid) == OldPod::Running)
    }

    /// A live look whether the pod that the runtime knows by this uid exists.
    pub(crate) async fn pod_exists(&self, namespace: &str, name: &str, uid: &str) -> Result<bool, ActError> {
        let api = self.connection();
        let pods: Api<Pod> = Api::namespaced(api.client(), namespace);
        let found = api.read(&format!("get Pod {namespace}/{name}"), || pods.get_opt(name)).await?;
        Ok(found.is_some_and(|found| pod::is_meant(&found, uid)))
    }
}

/// Lets go of what was reserved for a walk that was refused, if nobody claims it: a pod of another node may have been faster with the
/// StickyIP that this walk made, and then this node, its home, must keep the address from others.
async fn unreserve<D: Disk>(carrier: &Carrier<'_>, here: &Here<'_, D>) -> Result<(), ActError> {
    if !bind::is_any_claimed(carrier, &here.reserved).await? {
        here.unreserve()?;
    }
    Ok(())
}

fn identity(seen: &PodSeen) -> Result<PodIdentity, ActError> {
    let (facts, uid) = (&seen.facts, &seen.runtime_uid);
    PodIdentity::new(&facts.namespace, &facts.name, Some(uid))
        .map_err(|error| ActError::Name(error.to_string()))
}
