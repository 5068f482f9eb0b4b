//! No address is with two live pods: looked at all the time, on what the index has counted anyway. Must never take the address
//! away from either: which of two is right is for a person to say, and a living pod's network is not cut on a watch's word.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use prometheus_client::metrics::gauge::Gauge;

use crate::cluster::api::events;
use crate::cluster::api::events::Told;
use crate::cluster::objects::ClaimName;
use crate::controller::context::{Done, Duty, World};
use crate::controller::duties::dead_nodes::is_dead;
use crate::controller::index::{Index, Kind, attached_uid};
use crate::controller::metrics::Metrics;
use crate::controller::queue::Key;
use crate::policy::selection::facts::Moment;

/// How long two pods may show one address before it is told, in seconds. A pod's network is down before kubelet says that the pod
/// has ended, which it says with its next sync, at most ten seconds later; and a watch that broke off needs a few to come back.
pub const PATIENCE: u64 = 30;
/// The word for machines.
pub const REASON: &str = "AddressWithTwoPods";

/// A live pod that shows an address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Bearer {
    /// Its namespace and name.
    name: String,
    uid: String,
    node: String,
}

/// An address with more than one.
#[derive(Debug)]
struct Double {
    bearers: BTreeSet<Bearer>,
    since: Moment,
    /// It stands for long enough, and was logged with these.
    logged: bool,
}

/// The duty's memory. Lost with the process at no harm: everything takes longer then.
pub struct Doubles {
    patience: u64,
    seen: BTreeMap<IpAddr, Double>,
    now: Gauge,
}

impl Doubles {
    /// The duty with this patience, in seconds.
    #[must_use]
    pub fn new(patience: u64, metrics: &Metrics) -> Self {
        let now = Gauge::default();
        metrics.register("doubled_addresses", "Addresses that more than one live pod shows now", now.clone());
        Self { patience, seen: BTreeMap::new(), now }
    }

    /// Takes in what stands now. The addresses that have more than one pod for long enough, and whether that is new.
    fn look(&mut self, found: BTreeMap<IpAddr, BTreeSet<Bearer>>, now: Moment) -> Vec<(IpAddr, bool)> {
        for (address, over) in self.seen.iter().filter(|(address, _)| !found.contains_key(address)) {
            if over.logged {
                tracing::info!(%address, "is with one live pod again, or with none");
            }
        }
        self.seen.retain(|address, _| found.contains_key(address));
        let mut told = Vec::new();
        for (address, bearers) in found {
            let double = self.seen.entry(address).or_insert_with(|| Double {
                bearers: bearers.clone(),
                since: now,
                logged: false,
            });
            if double.bearers != bearers {
                // Two of those that were there are still at odds; else these have their own time.
                if double.bearers.intersection(&bearers).nth(1).is_none() {
                    double.since = now;
                }
                double.bearers = bearers;
                double.logged = false;
            }
            if now.seconds_since(double.since) >= self.patience {
                told.push((address, !std::mem::replace(&mut double.logged, true)));
            }
        }
        told
    }
}

impl Duty for Doubles {
    const NAME: &'static str = "doubles";
    /// Nothing: the index counts with every pod that changes, and a look at an empty set costs nothing.
    const WAKES: &'static [Kind] = &[];
    const TICK: Option<Duration> = Some(Duration::from_secs(1));

    async fn round(&mut self, world: &World, _: Vec<Key>) -> Done {
        let found = doubled(&world.index());
        let stand = self.look(found, world.now());
        self.now.set(i64::try_from(stand.len()).unwrap_or(i64::MAX));
        for (address, is_new) in stand {
            let Some(double) = self.seen.get(&address) else { continue };
            let message = told(&world.index(), address, &double.bearers);
            if is_new {
                tracing::error!(%address, "{message}");
            }
            // Told once; again only if it could not be told.
            for bearer in &double.bearers {
                let Some((namespace, name)) = bearer.name.split_once('/') else { continue };
                let about = events::pod(namespace, name, &bearer.uid);
                world.tell(Told { about, reason: REASON, message: message.clone(), warning: true }).await;
            }
        }
        Done::default()
    }
}

/// The addresses that more than one live pod shows. A pod whose node is proved dead is not live, whatever it shows until it is collected.
fn doubled(index: &Index) -> BTreeMap<IpAddr, BTreeSet<Bearer>> {
    let bearers = |address: &IpAddr| -> BTreeSet<Bearer> {
        let live = index.live_with(address).filter(|(_, pod)| !is_dead(index, &pod.node));
        live.map(|(name, pod)| Bearer {
            name: name.clone(),
            uid: pod.facts.uid.clone(),
            node: pod.node.clone(),
        })
        .collect()
    };
    let all = index.doubled().iter().map(|address| (*address, bearers(address)));
    all.filter(|(_, bearers)| bearers.len() > 1).collect()
}

/// A sentence for people: who, and what to do.
fn told(index: &Index, address: IpAddr, bearers: &BTreeSet<Bearer>) -> String {
    let names: Vec<String> =
        bearers.iter().map(|bearer| format!("{} on node {}", bearer.name, bearer.node)).collect();
    let kept = index.claims.get(&ClaimName::of(address).to_string()).and_then(|claim| {
        let holder = claim.spec.holder.to_string();
        let uid = attached_uid(index.stickies.get(&holder)?)?;
        Some((bearers.iter().find(|bearer| bearer.uid == uid)?, holder))
    });
    let next = match kept {
        Some((rightful, holder)) => format!(
            "StickyIP {holder} keeps it for {}: delete every other of them, and it comes up with another address",
            rightful.name
        ),
        None => {
            "no StickyIP keeps it for any of them: delete all but one, and they come up with other addresses"
                .to_owned()
        }
    };
    format!(
        "address {address} is with {} live pods, {}, so that traffic reaches either; {next}; then look at the logs of \
         Cilium and of the sticky-ipam agent on these nodes",
        bearers.len(),
        names.join(" and ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::index::fixture::{pod, sticky};
    use crate::runtime::cache::Told as Event;
    use serde_json::json;

    fn bearers(names: &[&str]) -> BTreeSet<Bearer> {
        let bearer =
            |name: &&str| Bearer { name: format!("db/{name}"), uid: format!("u-{name}"), node: "n".into() };
        names.iter().map(bearer).collect()
    }

    #[test]
    fn an_address_is_told_once_it_has_stood_and_never_again_until_it_is_over() {
        let address: IpAddr = "10.0.0.1".parse().unwrap();
        let mut duty = Doubles::new(30, &Metrics::default());
        let mut at = |seconds: i64, names: &[&str]| -> Vec<bool> {
            let found = (names.len() > 1).then(|| (address, bearers(names))).into_iter().collect();
            duty.look(found, Moment(seconds)).into_iter().map(|(_, is_new)| is_new).collect()
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
        assert_eq!(at(65, &["c", "d"]), nothing, "it begins anew");
    }

    #[test]
    fn both_pods_are_named_and_which_of_them_the_binding_is_for() {
        let mut index = Index::default();
        let node = |name: &str| {
            let node = json!({"metadata": {"name": name, "uid": name}});
            let node: k8s_openapi::api::core::v1::Node = serde_json::from_value(node).unwrap();
            Event::Here((name.to_owned(), node.into()))
        };
        index.nodes.take(node("n1"));
        let (name, mut other) = pod("b", "10.0.0.1", None);
        other.node = "n2".into();
        index.take_pod(Event::Here(pod("a", "10.0.0.1", None)));
        index.take_pod(Event::Here((name, other)));
        assert!(doubled(&index).is_empty(), "n2 is gone, and with it what ran there");
        index.nodes.take(node("n2"));
        let found = doubled(&index);
        let (address, of_it) = found.iter().next().unwrap();
        let message = told(&index, *address, of_it);
        assert!(
            message.contains("10.0.0.1 is with 2 live pods, db/a on node n1 and db/b on node n2"),
            "{message}"
        );
        assert!(message.contains("no StickyIP keeps it"), "{message}");
        index.stickies.take(Event::Here(sticky("a", "10.0.0.1", Some("n1"))));
        let claim = json!({"metadata": {"name": "10.0.0.1"}, "spec": {"address": "10.0.0.1", "phase": "Bound",
            "stickyUid": "s", "holder": {"namespace": "db", "name": "a"}}});
        index.claims.take(Event::Here(("10.0.0.1".into(), serde_json::from_value(claim).unwrap())));
        let message = told(&index, *address, of_it);
        assert!(message.contains("StickyIP db/a keeps it for db/a: delete every other"), "{message}");
        assert!(message.len() < 1024, "an event takes no more");
    }
}
