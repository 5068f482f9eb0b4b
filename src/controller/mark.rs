//! Marking: a sticky pod that came up without the plugin gets a binding from the addresses it shows. The claim on an address of
//! a node's block is asked of that node, whose agent grants it only if that very pod has the address.
//!
//! Must never take an attachment from a sandbox that the plugin attached, and never bind an address that the pod does not show.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use futures_util::StreamExt;
use ipnet::IpNet;

use super::index::{Index, Kind, PodSeen, attached_uid};
use super::queue::Key;
use super::settings::Settings;
use super::world::{Done, Duty, World};
use crate::alloc::range::Family;
use crate::cluster::claims::propose::Offer;
use crate::cluster::claims::step::Candidate;
use crate::cluster::claims::view::Origin;
use crate::cluster::claims::walk::{Ground, WalkError, Walker};
use crate::cluster::claims::{ADOPTED, adopted, errand};
use crate::cluster::events::{self, Told};
use crate::cluster::objects::{ClaimName, Holder};
use crate::policy::PolicyError;
use crate::policy::claimant::{Claimant, slot_name};
use crate::policy::facts::PodFacts;
use crate::policy::handover::{Attached, OldPod, OldSandbox};
use crate::policy::sticky::Rules;

/// How many pods are marked side by side: each is four writes, one after the other.
const SIDE_BY_SIDE: usize = 32;
/// While a home node has not answered; its answer wakes the duty too.
const WHILE_ASKED: Duration = Duration::from_secs(30);
/// After a refusal: a person, or the end of another pod, may change it.
const AFTER_REFUSAL: Duration = Duration::from_secs(300);
/// After something that failed.
const AFTER_FAILURE: Duration = Duration::from_secs(5);

/// The duty's memory: for whom a home node has been asked. Lost with the process at no harm.
pub struct Mark {
    rules: Rules,
    ipv6: bool,
    asked: BTreeMap<String, String>,
}

/// A pod that has yet to be marked.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Unmarked {
    facts: PodFacts,
    node: String,
    addresses: Vec<IpAddr>,
    /// The node's blocks.
    blocks: Vec<IpNet>,
}

impl Mark {
    /// A duty that has seen nothing yet.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        Self { rules: settings.rules(), ipv6: settings.enable_static_pod_ipv6, asked: BTreeMap::new() }
    }

    /// The pods that a change concerns.
    fn concerned(&self, index: &Index, due: &[Key]) -> BTreeSet<String> {
        let mut pods = BTreeSet::new();
        for key in due {
            match key.kind {
                Kind::Pod => {
                    pods.insert(key.name.clone());
                }
                Kind::Namespace => {
                    let first = format!("{}/", key.name);
                    let of_it = index.pods.from(&first).take_while(|(name, _)| name.starts_with(&first));
                    pods.extend(of_it.map(|(name, _)| name.clone()));
                }
                Kind::AddressClaim => {
                    let holder = index.claims.get(&key.name).map(|claim| claim.spec.holder.to_string());
                    pods.extend(holder.and_then(|holder| self.asked.get(&holder).cloned()));
                }
                Kind::StickyIP => pods.extend(self.asked.get(&key.name).cloned()),
                _ => {}
            }
        }
        pods
    }

    /// Whether a pod is to be marked.
    ///
    /// # Errors
    /// What it asks for cannot be followed.
    fn unmarked(&self, index: &Index, pod: &PodSeen) -> Result<Option<Unmarked>, PolicyError> {
        let lives = pod.running && !pod.deleting && !pod.ended && !pod.node.is_empty();
        if !lives || pod.facts.host_network || pod.addresses.is_empty() {
            return Ok(None);
        }
        let facts = index.facts(pod);
        if !self.rules.judge(&facts)?.sticky {
            return Ok(None);
        }
        let marked =
            index.sticky_of(pod).is_some_and(|sticky| attached_uid(sticky) == Some(facts.uid.as_str()));
        if marked {
            return Ok(None);
        }
        let of_family = |address: &&IpAddr| address.is_ipv4() || self.ipv6;
        let addresses: Vec<IpAddr> = pod.addresses.iter().filter(of_family).copied().collect();
        let blocks =
            index.cilium_nodes.get(&pod.node).map(|node| node.blocks().collect()).unwrap_or_default();
        Ok((!addresses.is_empty()).then(|| Unmarked { facts, node: pod.node.clone(), addresses, blocks }))
    }
}

/// The ground under a pod that runs already: its addresses are asked of its node.
struct ItsNode<'a>(&'a Unmarked);

impl Ground for ItsNode<'_> {
    fn node(&self) -> &str {
        &self.0.node
    }
    fn families(&self) -> Vec<Family> {
        self.0.addresses.iter().map(|address| Family::of(*address)).collect()
    }
    fn is_own(&self, address: IpAddr) -> bool {
        self.0.blocks.iter().any(|block| block.contains(&address))
    }
    fn old_sandbox(&mut self, _: &str, _: OldPod) -> Result<OldSandbox, WalkError> {
        Ok(OldSandbox::MayLive)
    }
    fn reserve_any(&mut self, _: Family, _: &BTreeSet<IpAddr>) -> Result<Option<Candidate>, WalkError> {
        Ok(None)
    }
    fn reserve_this(&mut self, address: IpAddr) -> Result<Origin, WalkError> {
        let block = self.0.blocks.iter().find(|block| block.contains(&address));
        // Also where it is of no block: its node knows whether the pod has it.
        let block = block.copied().unwrap_or_else(|| IpNet::from(address));
        Ok(Origin::ForeignBlock { home: self.0.node.clone(), block })
    }
}

/// What came of one pod.
enum Marked {
    Yes,
    /// Its home node has been asked about this StickyIP.
    Asked(Holder),
    Refused,
    Failed,
}

async fn mark(world: &World, pod: &Unmarked) -> Marked {
    let facts = &pod.facts;
    let claimant = Claimant::of(facts);
    let mut carrier = world.hands.carrier();
    let (name, slot) = match claimant.fixed_name() {
        Some(name) => (name.to_owned(), None),
        None => match errand::choose(carrier.api(), &claimant, facts).await {
            Ok(slot) => (slot_name(&claimant.workload().name, slot), Some(slot)),
            Err(error) => return failed(pod, &error),
        },
    };
    let key = Holder { namespace: facts.namespace.clone(), name };
    let walker = Walker {
        asker: Attached {
            node: pod.node.clone(),
            pod_uid: facts.uid.clone(),
            container_id: adopted(&facts.uid),
        },
        pod: facts.name.clone(),
        key: key.clone(),
        claimant: errand::reference(&claimant, slot),
        workload: errand::workload(&claimant),
        pinned: pod.addresses.clone(),
        patience: Duration::ZERO,
    };
    let unknown = unknown(&world.index(), &key, &pod.addresses);
    match walker.adopt(&mut carrier, &mut ItsNode(pod), unknown).await {
        Ok(sticky) => {
            let ours = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
            if ours.is_some_and(|ours| ours.container_id.starts_with(ADOPTED)) {
                world.metrics.marked.inc();
                tracing::info!(sticky = %key, addresses = ?sticky.spec.addresses, pod = facts.name, "marked a running pod");
                let message =
                    format!("bound to {} from the address it runs with", list(&sticky.spec.addresses));
                tell(world, facts, "Marked", message, false).await;
            }
            Marked::Yes
        }
        Err(WalkError::Waited { what, .. }) => {
            tracing::debug!(sticky = %key, what, "waiting");
            Marked::Asked(key)
        }
        Err(WalkError::Refused(why)) => {
            tracing::warn!(sticky = %key, pod = facts.name, %why, "cannot mark a running pod");
            tell(
                world,
                facts,
                "NotMarked",
                format!("it keeps {} only until it ends: {why}", list(&pod.addresses)),
                true,
            )
            .await;
            Marked::Refused
        }
        Err(error) => failed(pod, &error),
    }
}

/// What there is to offer if nothing stands of this StickyIP and of these addresses, as far as the watches have told.
fn unknown(index: &Index, key: &Holder, addresses: &[IpAddr]) -> Option<Offer> {
    let claimed = |address: &IpAddr| index.claims.is_there(&ClaimName::of(*address).to_string());
    let stands = index.stickies.is_there(&key.to_string()) || addresses.iter().any(claimed);
    (!stands)
        .then(|| Offer::of_pools_alone(index.pools.values().cloned().collect(), index.blocks_with(addresses)))
}

fn failed(pod: &Unmarked, error: &dyn std::error::Error) -> Marked {
    tracing::warn!(namespace = pod.facts.namespace, pod = pod.facts.name, %error, "cannot mark a running pod; trying again");
    Marked::Failed
}

async fn tell(world: &World, facts: &PodFacts, reason: &'static str, message: String, warning: bool) {
    let about = events::pod(&facts.namespace, &facts.name, &facts.uid);
    world.tell(Told { about, reason, message, warning }).await;
}

fn list(addresses: &[IpAddr]) -> String {
    addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

impl Duty for Mark {
    const NAME: &'static str = "mark";
    const WAKES: &'static [Kind] = &[Kind::Pod, Kind::Namespace, Kind::AddressClaim, Kind::StickyIP];

    async fn round(&mut self, world: &World, due: Vec<Key>) -> Done {
        let (mut todo, mut bad) = (Vec::new(), Vec::new());
        {
            let index = world.index();
            for name in self.concerned(&index, &due) {
                let Some(pod) = index.pods.get(&name) else { continue };
                match self.unmarked(&index, pod) {
                    Ok(None) => {}
                    Ok(Some(pod)) => todo.push((name, pod)),
                    Err(why) => bad.push((pod.facts.clone(), why)),
                }
            }
        }
        for (facts, why) in bad {
            tell(world, &facts, "BadAnnotation", format!("whether it is sticky cannot be told: {why}"), true)
                .await;
        }
        // Pods of one workload choose their slots one after the other, or all would choose the same.
        let mut groups: BTreeMap<String, Vec<(String, Unmarked)>> = BTreeMap::new();
        for (name, pod) in todo {
            let claimant = Claimant::of(&pod.facts);
            let group = match claimant.fixed_name() {
                Some(_) => name.clone(),
                None => format!("{}/{}", pod.facts.namespace, claimant.workload().name),
            };
            groups.entry(group).or_default().push((name, pod));
        }
        let marking = groups.into_values().map(|pods| async move {
            let mut marked = Vec::new();
            for (name, pod) in pods {
                marked.push((name, mark(world, &pod).await));
            }
            marked
        });
        let _hurry = world.hurry();
        let marked: Vec<Vec<(String, Marked)>> =
            futures_util::stream::iter(marking).buffer_unordered(SIDE_BY_SIDE).collect().await;
        let mut done = Done::default();
        for (name, marked) in marked.into_iter().flatten() {
            let key = Key::new(Kind::Pod, name.clone());
            match marked {
                Marked::Yes => self.asked.retain(|_, pod| *pod != name),
                Marked::Asked(holder) => {
                    self.asked.insert(holder.to_string(), name);
                    done.again.push((key, WHILE_ASKED));
                }
                Marked::Refused => done.again.push((key, AFTER_REFUSAL)),
                Marked::Failed => {
                    done.failures += 1;
                    done.again.push((key, AFTER_FAILURE));
                }
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::super::index::fixture::{pod, sticky};
    use super::*;
    use crate::policy::selector::Selector;
    use crate::process::known::Told as Event;

    fn marker() -> Mark {
        let selector = Selector::parse(r#"{"matchLabels":{"app":"db"}}"#).ok();
        Mark { rules: Rules { selector, ..Rules::default() }, ipv6: false, asked: BTreeMap::new() }
    }

    #[test]
    fn a_running_sticky_pod_without_a_binding_is_marked_and_nothing_else() {
        let mut index = Index::default();
        let (_, seen) = pod("mysql-0", "10.0.0.1", Some(("StatefulSet", "mysql")));
        let asks = |index: &Index, seen: &PodSeen| marker().unmarked(index, seen).unwrap().is_some();
        assert!(asks(&index, &seen));
        for change in [
            |seen: &mut PodSeen| seen.running = false,
            |seen: &mut PodSeen| seen.deleting = true,
            |seen: &mut PodSeen| seen.ended = true,
            |seen: &mut PodSeen| seen.facts.host_network = true,
            |seen: &mut PodSeen| seen.addresses.clear(),
            |seen: &mut PodSeen| seen.node.clear(),
            |seen: &mut PodSeen| seen.facts.labels.clear(),
            |seen: &mut PodSeen| seen.addresses = vec!["fd00::1".parse().unwrap()],
        ] {
            let mut other = seen.clone();
            change(&mut other);
            assert!(!asks(&index, &other), "{other:?}");
        }
        index.stickies.take(Event::Here(sticky("mysql-0", "10.0.0.1", None)));
        assert!(asks(&index, &seen), "it is not attached to it");
        index.stickies.take(Event::Here(sticky("mysql-0", "10.0.0.1", Some("n1"))));
        assert!(!asks(&index, &seen));
    }

    #[test]
    fn nothing_is_taken_for_unknown_that_a_watch_has_told_of() {
        let mut index = Index::default();
        let key = Holder { namespace: "db".into(), name: "mysql-0".into() };
        let addresses = ["10.0.0.1".parse().unwrap()];
        assert!(unknown(&index, &key, &addresses).is_some());
        index.claims.take(Event::Broken("10.0.0.1".into()));
        assert!(unknown(&index, &key, &addresses).is_none(), "somebody has claimed the address");
        index.claims.take(Event::Gone("10.0.0.1".into()));
        index.stickies.take(Event::Here(sticky("mysql-0", "10.0.0.9", None)));
        assert!(unknown(&index, &key, &addresses).is_none(), "the name is taken");
    }

    #[test]
    fn a_namespaces_word_wakes_its_pods_and_an_answer_the_pod_that_asked() {
        let mut index = Index::default();
        index.take_pod(Event::Here(pod("a", "10.0.0.1", None)));
        let mut marker = marker();
        let woken = |marker: &Mark, kind, name: &str| {
            marker.concerned(&index, &[Key::new(kind, name)]).into_iter().collect::<Vec<_>>()
        };
        assert_eq!(woken(&marker, Kind::Namespace, "db"), ["db/a"]);
        assert!(woken(&marker, Kind::Namespace, "d").is_empty());
        assert!(woken(&marker, Kind::StickyIP, "db/web-0").is_empty());
        marker.asked.insert("db/web-0".into(), "db/a".into());
        assert_eq!(woken(&marker, Kind::StickyIP, "db/web-0"), ["db/a"]);
    }
}
