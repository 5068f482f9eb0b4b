//! Adoption: a sticky pod that started without the plugin gets a binding for the addresses it shows. The home
//! node of an address is asked for its claim, and its agent grants it only if that very pod has the address.
//!
//! Must never take an attachment from a sandbox that the plugin attached, and never bind an address that the
//! pod does not show.

pub(crate) mod slots;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use futures_util::StreamExt;
use ipnet::IpNet;
use k8s_openapi::api::core::v1::ObjectReference;

use crate::alloc::join;
use crate::alloc::range::Family;
use crate::cluster::events;
use crate::cluster::objects::{ClaimName, ClaimPhase, StickyIP};
use crate::cluster::protocol::bind::{BindError, Binder, LocalNode};
use crate::cluster::protocol::step::{Candidate, Refusal};
use crate::cluster::protocol::{candidates::CandidateSources, sticky_identity};
use crate::cluster::view::Origin;
use crate::controller::duties::{record_event, record_warning};
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::objects::{IndexedPod, attached_pod_uid};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::{context::Context, flags::ControllerSettings, queue::Key};
use crate::names::{AttachmentId, StickyKey};
use crate::policy::PolicyError;
use crate::policy::handover::{Attached, OldPod, OldSandbox};
use crate::policy::lifetime::retention::asked_by;
use crate::policy::selection::slot::{MAX_SLOT_TRIES, slot_name};
use crate::policy::selection::{claimant::Claimant, facts::PodFacts, rules::Rules};
use slots::UsedSlots;

/// How many pods are adopted at the same time: each takes three writes or more, one after the other.
const CONCURRENCY: usize = 32;
/// While a home node has not answered; its answer wakes the duty too.
const RETRY_WHILE_WAITING: Duration = Duration::from_secs(30);
/// A home node that has not answered at the third look is reported.
const UNANSWERED_AFTER: Duration = Duration::from_secs(2 * RETRY_WHILE_WAITING.as_secs());
/// After a refusal: a person, or the end of another pod, may change it.
const RETRY_AFTER_REFUSAL: Duration = Duration::from_secs(300);
const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(5);

/// The duty's memory. Lost with the process at no harm: the claims say the same a little later.
pub(crate) struct PodAdoption {
    rules: Rules,
    ipv6: bool,
    /// The StickyIPs about which a home node has been asked, and for which pod.
    asked: BTreeMap<String, String>,
    /// Since when these pods have waited for the answer, by name: the uid, and the time since the start.
    waiting: BTreeMap<String, (String, Duration)>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct UnadoptedPod {
    facts: PodFacts,
    node: String,
    addresses: Vec<IpAddr>,
    blocks: Vec<IpNet>,
}

impl PodAdoption {
    pub(crate) fn new(settings: &ControllerSettings) -> Self {
        let (rules, ipv6) = (settings.selection.rules(), settings.enable_static_pod_ipv6);
        Self { rules, ipv6, asked: BTreeMap::new(), waiting: BTreeMap::new() }
    }

    /// Forgets that these pods wait for an answer.
    fn forget(&mut self, pods: &BTreeSet<&str>) {
        self.asked.retain(|_, pod| !pods.contains(pod.as_str()));
        self.waiting.retain(|pod, _| !pods.contains(pod.as_str()));
    }

    /// Whether a pod, which waits for its node's answer, has waited long.
    fn has_waited_long(&mut self, pod: &str, uid: &str, now: Duration) -> bool {
        let (known, since) = self.waiting.entry(pod.to_owned()).or_insert_with(|| (uid.to_owned(), now));
        if known != uid {
            (*known, *since) = (uid.to_owned(), now);
        }
        now.saturating_sub(*since) >= UNANSWERED_AFTER
    }

    fn concerned(&self, index: &ClusterIndex, due: &[Key]) -> BTreeSet<String> {
        let mut pods = BTreeSet::new();
        for key in due {
            match key.kind {
                Kind::Pod => pods.extend([key.name.clone()]),
                Kind::Namespace => {
                    let prefix = format!("{}/", key.name);
                    pods.extend(index.pods.with_prefix(&prefix).map(|(name, _)| name.clone()));
                }
                Kind::AddressClaim => {
                    let Some(claim) = index.claims.get(&key.name).map(|claim| &claim.spec) else { continue };
                    let StickyKey { namespace, .. } = &claim.sticky_ref;
                    pods.extend(self.asked.get(&claim.sticky_ref.to_string()).cloned());
                    pods.extend(claim.pod.as_ref().map(|pod| format!("{namespace}/{}", pod.name)));
                }
                Kind::StickyIP => pods.extend(self.asked.get(&key.name).cloned()),
                _ => {}
            }
        }
        pods
    }

    /// Whether a pod must be adopted.
    /// Errors: what it asks for cannot be followed.
    fn unadopted(&self, index: &ClusterIndex, pod: &IndexedPod) -> Result<Option<UnadoptedPod>, PolicyError> {
        let lives = pod.running && !pod.deleting && !pod.ended && !pod.node.is_empty();
        if !lives || pod.facts.host_network || pod.addresses.is_empty() {
            return Ok(None);
        }
        let facts = index.facts(pod);
        let is_attached = |sticky: &StickyIP| attached_pod_uid(sticky) == Some(facts.uid.as_str());
        if !self.rules.judge(&facts)?.sticky || index.sticky_of(pod).is_some_and(is_attached) {
            return Ok(None);
        }
        let of_family = |address: &&IpAddr| address.is_ipv4() || self.ipv6;
        let addresses: Vec<IpAddr> = pod.addresses.iter().filter(of_family).copied().collect();
        let blocks = index.cilium_nodes.get(&pod.node).into_iter().flat_map(|node| node.blocks()).collect();
        Ok((!addresses.is_empty()).then(|| UnadoptedPod { facts, node: pod.node.clone(), addresses, blocks }))
    }
}

/// The node of a pod that runs already: it is asked for the claims of the pod's addresses.
struct RunningPodNode<'a>(&'a UnadoptedPod);

impl LocalNode for RunningPodNode<'_> {
    fn node(&self) -> &str {
        &self.0.node
    }
    fn families(&self) -> Result<Vec<Family>, BindError> {
        Ok(self.0.addresses.iter().map(|address| Family::of(*address)).collect())
    }
    fn is_own(&self, address: IpAddr) -> bool {
        self.0.blocks.iter().any(|block| block.contains(&address))
    }
    fn old_sandbox(&mut self, _: &AttachmentId, _: OldPod) -> Result<OldSandbox, BindError> {
        Ok(OldSandbox::MayLive)
    }
    fn reserve_any(&mut self, _: Family, _: &BTreeSet<IpAddr>) -> Result<Option<Candidate>, BindError> {
        Ok(None)
    }
    fn reserve_this(&mut self, address: IpAddr) -> Result<Origin, BindError> {
        let block = self.0.blocks.iter().find(|block| block.contains(&address));
        // Also where it is of no block: its node knows whether the pod has it.
        let block = block.copied().unwrap_or_else(|| IpNet::from(address));
        Ok(Origin::ForeignBlock { home: self.0.node.clone(), block })
    }
}

#[derive(Clone)]
enum AdoptionResult {
    Adopted,
    /// Its home node has been asked about this StickyIP.
    WaitingForNode(StickyKey),
    Refused,
    Failed,
}

/// Adopts a pod under its own name, or under a slot that is not used, which is used then.
async fn adopt(context: &Context, name: &str, pod: &UnadoptedPod, used: &mut UsedSlots) -> AdoptionResult {
    let facts = &pod.facts;
    let claimant = Claimant::of(facts);
    let named = |name: String| StickyKey { namespace: facts.namespace.clone(), name };
    if let Some(name) = claimant.fixed_name() {
        let key = named(name.to_owned());
        let bound = bind(context, pod, &claimant, &key, None).await;
        return report(context, pod, key, bound).await;
    }
    let (workload, addresses) = (&claimant.workload().name, &pod.addresses);
    let mut claimed = slots::claimed(&context.index(), &claimant, facts, addresses);
    let mut tries = 1;
    loop {
        let is_guess = claimed.is_none() && tries == 1;
        let avoid = used.for_others_than(name);
        let slot = match claimed.take() {
            Some(slot) => slot,
            // By the index, which costs no request. If that is out of date, the slot turns out to be another
            // pod's, and the next choice is by a live read.
            None if is_guess => {
                let (index, prefix) = (context.index(), format!("{}/{workload}-", facts.namespace));
                let slots = index.stickies.with_prefix(&prefix).map(|(_, sticky)| sticky);
                sticky_identity::slot_of_running(slots, &claimant, facts, addresses, &avoid)
            }
            None => {
                let api = context.writer.connection();
                let choice = sticky_identity::choose_for_running(&api, &claimant, facts, addresses, &avoid);
                match choice.await {
                    Ok(slot) => slot,
                    Err(error) => return failed(pod, &error),
                }
            }
        };
        let key = named(slot_name(workload, slot));
        used.add(slot);
        let bound = bind(context, pod, &claimant, &key, Some(slot)).await;
        // Another claimant has it by now, and what was claimed for this one is undone. A guess may also have
        // missed the pod's own slot, which has its address.
        let lost = match &bound {
            Err(BindError::Refused(Refusal::PinDiffers { .. } | Refusal::NameTaken { .. })) => true,
            Err(BindError::Refused(Refusal::HeldByAnother { .. })) => is_guess,
            _ => false,
        };
        if !lost || tries == MAX_SLOT_TRIES {
            return report(context, pod, key, bound).await;
        }
        tries += 1;
    }
}

async fn bind(
    context: &Context,
    pod: &UnadoptedPod,
    claimant: &Claimant,
    key: &StickyKey,
    slot: Option<u32>,
) -> Result<StickyIP, BindError> {
    let facts = &pod.facts;
    let binder = Binder {
        asker: Attached {
            node: pod.node.clone(),
            pod_uid: facts.uid.clone(),
            attachment_id: AttachmentId::Adopted(facts.uid.clone()),
        },
        pod: facts.name.clone(),
        key: key.clone(),
        claimant: sticky_identity::reference(claimant, slot),
        workload: sticky_identity::workload(claimant),
        retention: asked_by(facts),
        pinned: pod.addresses.clone(),
        patience: Duration::ZERO,
    };
    let unclaimed = unclaimed(&context.index(), key, &pod.addresses);
    binder.adopt(&mut context.writer.api_writer(), &mut RunningPodNode(pod), unclaimed).await
}

async fn report(
    context: &Context,
    pod: &UnadoptedPod,
    key: StickyKey,
    bound: Result<StickyIP, BindError>,
) -> AdoptionResult {
    let facts = &pod.facts;
    match bound {
        Ok(sticky) => {
            let ours = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
            if ours.is_some_and(|ours| ours.attachment_id.is_adopted()) {
                let addresses = join(&sticky.spec.addresses);
                context.metrics.adopted_pods.inc();
                tracing::info!(sticky = %key, addresses, pod = facts.name, "adopted a running pod");
                let message = format!("adopted with its address {addresses}; it keeps it over restarts");
                record_event(context, reference(facts), "Adopted", message).await;
            }
            AdoptionResult::Adopted
        }
        Err(BindError::Waited { what, .. }) => {
            tracing::debug!(sticky = %key, what, "waiting");
            AdoptionResult::WaitingForNode(key)
        }
        Err(BindError::Refused(why)) => {
            tracing::warn!(sticky = %key, pod = facts.name, %why, "cannot adopt a running pod");
            let addresses = join(&pod.addresses);
            let message = format!("not adopted, so it keeps {addresses} only until it ends: {why}");
            record_warning(context, reference(facts), "AdoptionFailed", message).await;
            AdoptionResult::Refused
        }
        Err(error) => failed(pod, &error),
    }
}

/// The candidate sources if the index has neither this StickyIP nor a claim on these addresses.
fn unclaimed(index: &ClusterIndex, key: &StickyKey, addresses: &[IpAddr]) -> Option<CandidateSources> {
    let is_claimed = |address: &IpAddr| index.claims.contains(&ClaimName::of(*address).to_string());
    let is_known = index.stickies.contains(&key.to_string()) || addresses.iter().any(is_claimed);
    let pools = || index.pools.values().cloned().collect();
    (!is_known).then(|| CandidateSources::of_pools_alone(pools(), index.blocks_with(addresses)))
}

/// Whether a claim on one of its addresses, which names this pod, still waits for its home node.
fn is_unanswered(index: &ClusterIndex, pod: &UnadoptedPod) -> bool {
    let names = pod.addresses.iter().map(|address| ClaimName::of(*address).to_string());
    names.filter_map(|name| index.claims.get(&name)).any(|claim| {
        claim.spec.phase == ClaimPhase::Requested
            && claim.spec.pod.as_ref().is_some_and(|named| named.uid == pod.facts.uid)
    })
}

fn failed(pod: &UnadoptedPod, error: &dyn std::error::Error) -> AdoptionResult {
    tracing::warn!(
        namespace = pod.facts.namespace, pod = pod.facts.name, %error,
        "cannot adopt a running pod; trying again"
    );
    AdoptionResult::Failed
}

fn reference(facts: &PodFacts) -> ObjectReference {
    events::pod(&facts.namespace, &facts.name, &facts.uid)
}

impl Duty for PodAdoption {
    const NAME: &'static str = "adoption";
    const TRIGGERS: &'static [Kind] = &[Kind::Pod, Kind::Namespace, Kind::AddressClaim, Kind::StickyIP];

    async fn round(&mut self, context: &Context, due: Vec<Key>) -> RoundResult {
        let (mut todo, mut bad, mut over) = (Vec::new(), Vec::new(), BTreeSet::new());
        {
            let index = context.index();
            for name in self.concerned(&index, &due) {
                let pod = index.pods.get(&name);
                match pod.map(|pod| self.unadopted(&index, pod)).transpose() {
                    Ok(Some(Some(pod))) => {
                        todo.push((name, pod));
                        continue;
                    }
                    Ok(_) => {}
                    Err(why) => bad.extend(pod.map(|pod| (reference(&pod.facts), why))),
                }
                over.insert(name);
            }
        }
        self.forget(&over.iter().map(String::as_str).collect());
        for (about, why) in bad {
            let message = format!("its annotations cannot be read, so it is not adopted: {why}");
            record_warning(context, about, "InvalidAnnotation", message).await;
        }
        // Pods of one workload choose their slots one after the other, or all would choose the same.
        let mut groups: BTreeMap<String, Vec<(String, UnadoptedPod)>> = BTreeMap::new();
        let mut workloads = BTreeSet::new();
        for (name, pod) in todo {
            let claimant = Claimant::of(&pod.facts);
            let group = match claimant.fixed_name() {
                Some(_) => name.clone(),
                None => format!("{}/{}", pod.facts.namespace, claimant.workload().name),
            };
            if claimant.fixed_name().is_none() {
                workloads.insert(group.clone());
            }
            groups.entry(group).or_default().push((name, pod));
        }
        let mut used = slots::used(&context.index(), &self.asked, &workloads);
        let groups = groups.into_iter().map(|(group, pods)| (used.remove(&group).unwrap_or_default(), pods));
        let adoptions = groups.map(|(mut used, pods)| async move {
            let mut results = Vec::new();
            for (name, pod) in pods {
                let result = adopt(context, &name, &pod, &mut used).await;
                results.push((name, pod, result));
            }
            results
        });
        let _urgent = context.start_urgent_work();
        let results: Vec<Vec<(String, UnadoptedPod, AdoptionResult)>> =
            futures_util::stream::iter(adoptions).buffer_unordered(CONCURRENCY).collect().await;
        let results = results.concat();
        let named = |applies: fn(&AdoptionResult) -> bool| -> BTreeSet<&str> {
            results.iter().filter(|(.., result)| applies(result)).map(|(name, ..)| name.as_str()).collect()
        };
        self.forget(&named(|result| matches!(result, AdoptionResult::Adopted | AdoptionResult::Refused)));
        // Under another slot than before, maybe.
        let waiting = named(|result| matches!(result, AdoptionResult::WaitingForNode(_)));
        self.asked.retain(|_, pod| !waiting.contains(pod.as_str()));
        let mut done = RoundResult::default();
        for (name, pod, result) in &results {
            let key = Key::new(Kind::Pod, name.clone());
            match result {
                AdoptionResult::Adopted => {}
                AdoptionResult::WaitingForNode(sticky) => {
                    let is_late = self.has_waited_long(name, &pod.facts.uid, context.elapsed());
                    if is_late && is_unanswered(&context.index(), pod) {
                        let UnadoptedPod { facts, node, .. } = pod;
                        let message = format!(
                            "not adopted yet: node {node} has not answered; check that its sticky-ipam agent \
                             runs"
                        );
                        record_warning(context, reference(facts), "AdoptionFailed", message).await;
                    }
                    self.asked.insert(sticky.to_string(), name.clone());
                    done.again.push((key, RETRY_WHILE_WAITING));
                }
                AdoptionResult::Refused => done.again.push((key, RETRY_AFTER_REFUSAL)),
                AdoptionResult::Failed => done.retry(key, RETRY_AFTER_FAILURE),
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::index::fixture::{pod, sticky};
    use crate::policy::selection::selector::Selector;
    use crate::runtime::cache::CacheEvent;

    fn adoption() -> PodAdoption {
        let selector = Selector::parse(r#"{"matchLabels":{"app":"db"}}"#).ok();
        PodAdoption {
            rules: Rules { selector, ..Rules::default() },
            ipv6: false,
            asked: BTreeMap::new(),
            waiting: BTreeMap::new(),
        }
    }

    #[test]
    fn a_running_sticky_pod_without_a_binding_is_adopted_and_nothing_else() {
        let mut index = ClusterIndex::default();
        let (_, seen) = pod("mysql-0", "10.0.0.1", Some(("StatefulSet", "mysql")));
        let asks =
            |index: &ClusterIndex, seen: &IndexedPod| adoption().unadopted(index, seen).unwrap().is_some();
        assert!(asks(&index, &seen));
        for change in [
            |seen: &mut IndexedPod| seen.running = false,
            |seen: &mut IndexedPod| seen.deleting = true,
            |seen: &mut IndexedPod| seen.ended = true,
            |seen: &mut IndexedPod| seen.facts.host_network = true,
            |seen: &mut IndexedPod| seen.addresses.clear(),
            |seen: &mut IndexedPod| seen.node.clear(),
            |seen: &mut IndexedPod| seen.facts.labels.clear(),
            |seen: &mut IndexedPod| seen.addresses = vec!["fd00::1".parse().unwrap()],
        ] {
            let mut other = seen.clone();
            change(&mut other);
            assert!(!asks(&index, &other), "{other:?}");
        }
        index.stickies.apply(CacheEvent::Applied(sticky("mysql-0", "10.0.0.1", None)));
        assert!(asks(&index, &seen), "it is not attached to it");
        index.stickies.apply(CacheEvent::Applied(sticky("mysql-0", "10.0.0.1", Some("n1"))));
        assert!(!asks(&index, &seen));
    }

    #[test]
    fn nothing_is_taken_for_unknown_that_a_watch_has_shown() {
        let mut index = ClusterIndex::default();
        let key = StickyKey { namespace: "db".into(), name: "mysql-0".into() };
        let addresses = ["10.0.0.1".parse().unwrap()];
        assert!(unclaimed(&index, &key, &addresses).is_some());
        index.claims.apply(CacheEvent::Unreadable("10.0.0.1".into()));
        assert!(unclaimed(&index, &key, &addresses).is_none(), "the address is claimed");
        index.claims.apply(CacheEvent::Deleted("10.0.0.1".into()));
        index.stickies.apply(CacheEvent::Applied(sticky("mysql-0", "10.0.0.9", None)));
        assert!(unclaimed(&index, &key, &addresses).is_none(), "the name is taken");
    }

    #[test]
    fn a_namespace_change_queues_its_pods_and_an_answer_the_pod_that_asked() {
        let mut index = ClusterIndex::default();
        index.apply_pod(CacheEvent::Applied(pod("a", "10.0.0.1", None)));
        let mut adoption = adoption();
        let woken = |adoption: &PodAdoption, kind, name: &str| {
            adoption.concerned(&index, &[Key::new(kind, name)]).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(woken(&adoption, Kind::Namespace, "db"), ["db/a"]);
        assert!(woken(&adoption, Kind::Namespace, "d").is_empty());
        assert!(woken(&adoption, Kind::StickyIP, "db/web-0").is_empty());
        adoption.asked.insert("db/web-0".into(), "db/a".into());
        assert_eq!(woken(&adoption, Kind::StickyIP, "db/web-0"), ["db/a"]);
    }

    #[test]
    fn a_node_does_not_answer_if_the_same_pod_has_waited_for_it_over_three_checks() {
        let mut adoption = adoption();
        assert!(!adoption.has_waited_long("db/a", "1", Duration::from_secs(7)));
        assert!(!adoption.has_waited_long("db/a", "1", Duration::from_secs(7) + RETRY_WHILE_WAITING));
        assert!(adoption.has_waited_long("db/a", "1", Duration::from_secs(7) + 2 * RETRY_WHILE_WAITING));
        assert!(!adoption.has_waited_long("db/a", "2", Duration::from_secs(999)), "another pod of that name");
        adoption.asked.insert("db/web-0".into(), "db/a".into());
        adoption.forget(&["db/a"].into());
        assert!(adoption.asked.is_empty() && adoption.waiting.is_empty());
    }

    #[test]
    fn only_a_request_for_this_very_pod_is_unanswered() {
        let (_, seen) = pod("a", "10.0.0.1", None);
        let pod = adoption().unadopted(&ClusterIndex::default(), &seen).unwrap().unwrap();
        let unanswered = |phase: &str, uid: &str| {
            let claim = serde_json::json!({"metadata": {"name": "10.0.0.1"}, "spec": {"address": "10.0.0.1", "phase": phase,
                "homeNode": "n1", "stickyRef": {"namespace": "db", "name": "a"}, "pod": {"name": "a", "uid": uid}}});
            let mut index = ClusterIndex::default();
            index
                .claims
                .apply(CacheEvent::Applied(("10.0.0.1".into(), serde_json::from_value(claim).unwrap())));
            is_unanswered(&index, &pod)
        };
        assert!(unanswered("Requested", "uid-a"));
        assert!(!unanswered("Requested", "another") && !unanswered("Granted", "uid-a"));
    }
}
