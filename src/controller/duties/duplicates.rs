//! Reports addresses that two live pods show. The index counts them with every change. Must never take the
//! address away from either pod: a program cannot know which of two is right, and a watch is no proof against
//! a living pod.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use crate::cluster::events;
use crate::cluster::objects::ClaimName;
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::objects::{IndexedPod, attached_pod_uid};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::{context::Context, duties::record_warning, metrics::ControllerMetrics, queue::Key};
use crate::policy::selection::facts::TimePoint;
use crate::runtime::metrics::Gauge;

/// How long two pods may show one address before it is reported, in seconds. A pod's network is down before
/// kubelet reports that the pod has ended, with its next sync at most ten seconds later; and a broken watch
/// needs a few more.
pub const GRACE_SECONDS: u64 = 30;
pub const REASON: &str = "DuplicateAddress";

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct PodWithAddress {
    name: String,
    uid: String,
    node: String,
}

#[derive(Debug)]
struct Duplicate {
    pods: BTreeSet<PodWithAddress>,
    since: TimePoint,
    /// It lasted long enough, and was logged with these pods.
    logged: bool,
}

/// The duty's memory. Lost with the process at no harm: everything takes longer then.
pub struct Duplicates {
    patience: u64,
    seen: BTreeMap<IpAddr, Duplicate>,
    now: Gauge,
}

impl Duplicates {
    /// `patience` is in seconds.
    pub fn new(patience: u64, metrics: &ControllerMetrics) -> Self {
        Self { patience, seen: BTreeMap::new(), now: metrics.duplicate_addresses.clone() }
    }

    /// Takes in what is found now. The addresses that have had more than one pod for long enough, and whether
    /// that is new.
    fn look(
        &mut self,
        found: BTreeMap<IpAddr, BTreeSet<PodWithAddress>>,
        now: TimePoint,
    ) -> Vec<(IpAddr, bool)> {
        for (address, over) in self.seen.extract_if(.., |address, _| !found.contains_key(address)) {
            if over.logged {
                tracing::info!(%address, "the address is with one live pod again, or with none");
            }
        }
        let mut lasting = Vec::new();
        for (address, pods) in found {
            let new = || Duplicate { pods: pods.clone(), since: now, logged: false };
            let duplicate = self.seen.entry(address).or_insert_with(new);
            if duplicate.pods != pods {
                // Two of those that were there are still at odds; else these have their own time.
                if duplicate.pods.intersection(&pods).nth(1).is_none() {
                    duplicate.since = now;
                }
                duplicate.pods = pods;
                duplicate.logged = false;
            }
            if now.seconds_since(duplicate.since) >= self.patience {
                lasting.push((address, !std::mem::replace(&mut duplicate.logged, true)));
            }
        }
        lasting
    }
}

impl Duty for Duplicates {
    const NAME: &'static str = "duplicates";
    /// Nothing: the index counts with every pod that changes, and a look at an empty set costs nothing.
    const TRIGGERS: &'static [Kind] = &[];
    const TICK: Option<Duration> = Some(Duration::from_secs(1));

    async fn round(&mut self, context: &Context, _: Vec<Key>) -> RoundResult {
        let found = duplicates(&context.index());
        let lasting = self.look(found, context.now());
        self.now.set(i64::try_from(lasting.len()).unwrap_or(i64::MAX));
        for (address, is_new) in lasting {
            let Some(duplicate) = self.seen.get(&address) else { continue };
            let message = describe(&context.index(), address, &duplicate.pods);
            if is_new {
                tracing::error!(%address, "{message}");
            }
            // Sent once; again only if it could not be sent.
            for pod in &duplicate.pods {
                let Some((namespace, name)) = pod.name.split_once('/') else { continue };
                let about = events::pod(namespace, name, &pod.uid);
                record_warning(context, about, REASON, message.clone()).await;
            }
        }
        RoundResult::default()
    }
}

/// The addresses that more than one live pod shows. A pod whose node is proved dead is not live, whatever it
/// shows until it is collected.
fn duplicates(index: &ClusterIndex) -> BTreeMap<IpAddr, BTreeSet<PodWithAddress>> {
    let named = |(name, pod): (&String, &IndexedPod)| {
        let (uid, node) = (pod.facts.uid.clone(), pod.node.clone());
        PodWithAddress { name: name.clone(), uid, node }
    };
    let pods = |address: &IpAddr| -> BTreeSet<PodWithAddress> {
        let live = index.live_pods_with(address).filter(|(_, pod)| !index.is_dead_node(&pod.node));
        live.map(named).collect()
    };
    let all = index.duplicates().iter().map(|address| (*address, pods(address)));
    all.filter(|(_, pods)| pods.len() > 1).collect()
}

fn describe(index: &ClusterIndex, address: IpAddr, pods: &BTreeSet<PodWithAddress>) -> String {
    let names: Vec<String> = pods.iter().map(|pod| format!("{} on node {}", pod.name, pod.node)).collect();
    let kept = index.claims.get(&ClaimName::of(address).to_string()).and_then(|claim| {
        let sticky = claim.spec.sticky_ref.to_string();
        let uid = attached_pod_uid(index.stickies.get(&sticky)?)?;
        Some((pods.iter().find(|pod| pod.uid == uid)?, sticky))
    });
    let next = match kept {
        Some((bound, sticky)) => format!(
            "StickyIP {sticky} keeps it for {}: delete every other pod, and it starts with another address",
            bound.name
        ),
        None => "no StickyIP keeps it for any of them: delete all pods but one, and they start with other \
                 addresses"
            .to_owned(),
    };
    format!(
        "address {address} is with {} live pods, {}, so that traffic reaches either; {next}; then read the \
         logs of cilium-agent and of the sticky-ipam agent on these nodes",
        pods.len(),
        names.join(" and ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::index::fixture::{pod, sticky};
    use crate::runtime::cache::CacheEvent;
    use serde_json::json;

    fn pods(names: &[&str]) -> BTreeSet<PodWithAddress> {
        let pod = |name: &&str| PodWithAddress {
            name: format!("db/{name}"),
            uid: format!("u-{name}"),
            node: "n".into(),
        };
        names.iter().map(pod).collect()
    }

    #[test]
    fn an_address_is_reported_after_the_debounce_and_not_again_until_it_is_over() {
        let address: IpAddr = "10.0.0.1".parse().unwrap();
        let mut duty = Duplicates::new(30, &ControllerMetrics::default());
        let mut at = |seconds: i64, names: &[&str]| -> Vec<bool> {
            let found = (names.len() > 1).then(|| (address, pods(names))).into_iter().collect();
            duty.look(found, TimePoint(seconds)).into_iter().map(|(_, is_new)| is_new).collect()
        };
        let (nothing, new, known): ([bool; 0], _, _) = ([], [true], [false]);
        assert_eq!(at(0, &["a", "b"]), nothing);
        assert_eq!(at(29, &["a", "b"]), nothing, "an old pod may be on its way out");
        assert_eq!(at(30, &["a", "b"]), new);
        assert_eq!(at(31, &["a", "b"]), known);
        assert_eq!(at(32, &["a", "b", "c"]), new, "a third one joined");
        assert_eq!(at(33, &["c", "d"]), nothing, "these have just met");
        assert_eq!(at(63, &["c", "d"]), new);
        assert_eq!(at(64, &["c"]), nothing, "it is over");
        assert_eq!(at(65, &["c", "d"]), nothing, "it begins again");
    }

    #[test]
    fn both_pods_are_named_and_which_of_them_the_binding_is_for() {
        let mut index = ClusterIndex::default();
        let node = |name: &str| {
            let node = json!({"metadata": {"name": name, "uid": name}});
            let node: k8s_openapi::api::core::v1::Node = serde_json::from_value(node).unwrap();
            CacheEvent::Applied((name.to_owned(), node.into()))
        };
        index.nodes.apply(node("n1"));
        let (name, mut other) = pod("b", "10.0.0.1", None);
        other.node = "n2".into();
        index.apply_pod(CacheEvent::Applied(pod("a", "10.0.0.1", None)));
        index.apply_pod(CacheEvent::Applied((name, other)));
        assert!(duplicates(&index).is_empty(), "n2 is gone, and with it what ran there");
        index.nodes.apply(node("n2"));
        let found = duplicates(&index);
        let (address, of_it) = found.iter().next().unwrap();
        let message = describe(&index, *address, of_it);
        assert!(
            message.contains("10.0.0.1 is with 2 live pods, db/a on node n1 and db/b on node n2"),
            "{message}"
        );
        assert!(message.contains("no StickyIP keeps it"), "{message}");
        index.stickies.apply(CacheEvent::Applied(sticky("a", "10.0.0.1", Some("n1"))));
        let claim = json!({"metadata": {"name": "10.0.0.1"}, "spec": {"address": "10.0.0.1", "phase": "Bound",
            "stickyUid": "s", "stickyRef": {"namespace": "db", "name": "a"}}});
        index.claims.apply(CacheEvent::Applied(("10.0.0.1".into(), serde_json::from_value(claim).unwrap())));
        let message = describe(&index, *address, of_it);
        assert!(message.contains("StickyIP db/a keeps it for db/a: delete every other"), "{message}");
        assert!(message.len() < 1024, "an event takes no more");
    }
}
