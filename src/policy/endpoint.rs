//! The keeper of CiliumEndpoints: what a pod's endpoint lacks, and when it is time to do something about it.
//!
//! Times are those at which this process saw something first, handed in; a restart loses them and everything takes longer.
//! Must never touch an endpoint whose pod may still need it: only one that is being deleted, for longer than the operator's patience.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::facts::Moment;

/// Between two tries of something that should have worked at once, in seconds.
pub const AGAIN: u64 = 60;

/// How long is long enough, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Patience {
    /// A running pod without an endpoint is nudged after this, and again after each such time.
    pub missing: u64,
    /// The most nudges of one pod: whatever does not help three times helps a fourth time neither.
    pub nudges: u32,
    /// An endpoint that is being deleted is freed after this, and again after [`AGAIN`] if that did not help.
    pub terminating: u64,
    /// A disagreement is told after this: objects are written one after the other.
    pub disagreeing: u64,
}

impl Default for Patience {
    fn default() -> Self {
        Self { missing: 30, nudges: 3, terminating: 30 * 60, disagreeing: 30 }
    }
}

impl Patience {
    /// How long a name is seen in this state before something is done for the next time; none if never again.
    fn due(&self, state: &State, done: u32) -> Option<u64> {
        match state {
            State::Missing { .. } => {
                (done < self.nudges).then(|| self.missing.saturating_mul(u64::from(done) + 1))
            }
            State::Terminating { .. } => Some(self.terminating.saturating_add(AGAIN * u64::from(done))),
            State::LeftOver { .. } => Some(self.disagreeing.saturating_add(AGAIN * u64::from(done))),
            State::Disagreeing(_) => (done == 0).then_some(self.disagreeing),
        }
    }
}

/// A pod's endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Endpoint {
    /// Its uid, the precondition of every write.
    pub uid: String,
    /// It is being deleted.
    pub deleting: bool,
    /// Something holds the deletion up.
    pub held: bool,
    /// The uid of the pod that it was made for; none if it does not say.
    pub made_for: Option<String>,
    /// Its addresses.
    pub addresses: BTreeSet<IpAddr>,
}

impl Endpoint {
    fn is_left_over(&self, pod: &str) -> bool {
        !self.deleting && self.made_for.as_deref().is_some_and(|uid| uid != pod)
    }
}

/// What is said of one name by the pod, its endpoint, its binding and its node's pool.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Said {
    /// The pod's uid; none if there is no pod of this name.
    pub pod: Option<String>,
    /// It runs, on the pod network.
    pub running: bool,
    /// The addresses that the pod shows.
    pub pod_addresses: BTreeSet<IpAddr>,
    /// The endpoint, if there is one.
    pub endpoint: Option<Endpoint>,
    /// The addresses of the StickyIP that is attached to this pod; none if it is not sticky.
    pub bound: Option<BTreeSet<IpAddr>>,
    /// The addresses that the node's pool keeps for this pod; none if the mode has no pool.
    pub pooled: Option<BTreeSet<IpAddr>>,
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Deed {
    /// Put a label on the pod, so that Cilium looks at it again.
    Nudge {
        /// The pod's uid, the precondition.
        uid: String,
        /// The how manieth.
        number: u32,
    },
    /// Take the finalizers off an endpoint whose deletion does not end.
    Free {
        /// The endpoint's uid, the precondition.
        uid: String,
    },
    /// Delete an endpoint that was made for an earlier pod of the name: Cilium makes the running pod's own in its place.
    Remove {
        /// The endpoint's uid, the precondition.
        uid: String,
    },
    /// Tell that two disagree.
    Tell(Disagreement),
}

/// Who disagrees.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Disagreement {
    /// The endpoint has other addresses than the pod.
    EndpointAndPod {
        /// The endpoint's.
        endpoint: BTreeSet<IpAddr>,
        /// The pod's.
        pod: BTreeSet<IpAddr>,
    },
    /// The pod has other addresses than its StickyIP.
    PodAndBinding {
        /// The pod's.
        pod: BTreeSet<IpAddr>,
        /// The StickyIP's.
        bound: BTreeSet<IpAddr>,
    },
    /// The node's pool lacks a sticky pod's address.
    PoolAndBinding {
        /// The pool's.
        pooled: BTreeSet<IpAddr>,
        /// The StickyIP's.
        bound: BTreeSet<IpAddr>,
    },
}

impl Disagreement {
    /// A word for a metric's label and an event's reason.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::EndpointAndPod { .. } => "EndpointDisagreesWithPod",
            Self::PodAndBinding { .. } => "PodDisagreesWithStickyIP",
            Self::PoolAndBinding { .. } => "PoolLacksStickyIP",
        }
    }
}

/// What a name was seen with, and since when.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Missing { uid: String },
    Terminating { uid: String },
    LeftOver { uid: String },
    Disagreeing(Disagreement),
}

/// The keeper's memory, by namespace and name.
#[derive(Debug, Default)]
pub struct Keeper {
    patience: Patience,
    seen: BTreeMap<String, BTreeMap<State, (Moment, u32)>>,
}

impl Keeper {
    /// A keeper with this patience.
    #[must_use]
    pub fn new(patience: Patience) -> Self {
        Self { patience, seen: BTreeMap::new() }
    }

    /// Looks at one name and tells what to do now. Asked again later, it does not repeat itself before its time.
    pub fn look(&mut self, name: &str, said: &Said, now: Moment) -> Vec<Deed> {
        let states = states(said);
        let mut before = self.seen.remove(name).unwrap_or_default();
        let mut deeds = Vec::new();
        let mut kept = BTreeMap::new();
        for state in states {
            let (since, done) = before.remove(&state).unwrap_or((now, 0));
            let waited = now.seconds_since(since);
            let due = self.patience.due(&state, done).is_some_and(|due| waited >= due);
            if due {
                deeds.push(match &state {
                    State::Missing { uid } => Deed::Nudge { uid: uid.clone(), number: done + 1 },
                    State::Terminating { uid } => Deed::Free { uid: uid.clone() },
                    State::LeftOver { uid } => Deed::Remove { uid: uid.clone() },
                    State::Disagreeing(what) => Deed::Tell(what.clone()),
                });
            }
            kept.insert(state, (since, done + u32::from(due)));
        }
        if !kept.is_empty() {
            self.seen.insert(name.to_owned(), kept);
        }
        deeds
    }

    /// How many seconds until this name must be looked at again, whatever happens; none if nothing is awaited.
    #[must_use]
    pub fn next_look(&self, name: &str, now: Moment) -> Option<u64> {
        let times = self.seen.get(name)?.iter().filter_map(|(state, (since, done))| {
            let due = self.patience.due(state, *done)?;
            Some(due.saturating_sub(now.seconds_since(*since)))
        });
        times.min()
    }
}

fn states(said: &Said) -> Vec<State> {
    let mut states = Vec::new();
    match (&said.endpoint, &said.pod) {
        (Some(endpoint), _) if endpoint.deleting && endpoint.held => {
            states.push(State::Terminating { uid: endpoint.uid.clone() });
        }
        (Some(endpoint), Some(uid)) if said.running && endpoint.is_left_over(uid) => {
            // Whatever it says is of another pod.
            return vec![State::LeftOver { uid: endpoint.uid.clone() }];
        }
        (None, Some(uid)) if said.running => states.push(State::Missing { uid: uid.clone() }),
        _ => {}
    }
    if !said.running || said.pod_addresses.is_empty() {
        return states;
    }
    let mut disagree = |what| states.push(State::Disagreeing(what));
    if let Some(endpoint) = said.endpoint.as_ref().filter(|endpoint| !endpoint.deleting)
        && !endpoint.addresses.is_empty()
        && endpoint.addresses != said.pod_addresses
    {
        disagree(Disagreement::EndpointAndPod {
            endpoint: endpoint.addresses.clone(),
            pod: said.pod_addresses.clone(),
        });
    }
    if let Some(bound) = &said.bound {
        // A pod may have an address of another family that nobody keeps.
        if !bound.is_subset(&said.pod_addresses) {
            disagree(Disagreement::PodAndBinding { pod: said.pod_addresses.clone(), bound: bound.clone() });
        }
        if let Some(pooled) = said.pooled.as_ref().filter(|pooled| !bound.is_subset(pooled)) {
            disagree(Disagreement::PoolAndBinding { pooled: pooled.clone(), bound: bound.clone() });
        }
    }
    states
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(texts: &[&str]) -> BTreeSet<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn running() -> Said {
        Said { pod: Some("p".into()), running: true, pod_addresses: set(&["10.0.0.1"]), ..Said::default() }
    }

    fn endpoint(addresses: &[&str]) -> Option<Endpoint> {
        Some(Endpoint {
            uid: "e".into(),
            deleting: false,
            held: true,
            made_for: None,
            addresses: set(addresses),
        })
    }

    #[test]
    fn a_running_pod_without_an_endpoint_is_nudged_a_few_times_with_pauses() {
        let mut keeper = Keeper::new(Patience::default());
        let mut at = |time| keeper.look("db/a", &running(), Moment(time)).len();
        assert_eq!(
            [at(0), at(29), at(30), at(31), at(59), at(60), at(90), at(500)],
            [0, 0, 1, 0, 0, 1, 1, 0]
        );
        assert_eq!(keeper.next_look("db/a", Moment(500)), None);
        let there = Said { endpoint: endpoint(&["10.0.0.1"]), ..running() };
        assert_eq!(keeper.look("db/a", &there, Moment(501)), []);
        assert!(keeper.seen.is_empty(), "what is well is not remembered");
        // Another pod of the name starts anew.
        let another = Said { pod: Some("q".into()), ..running() };
        assert_eq!(keeper.look("db/a", &another, Moment(600)), []);
        assert_eq!(keeper.next_look("db/a", Moment(610)), Some(20));
    }

    #[test]
    fn an_endpoint_whose_deletion_hangs_is_freed_by_its_uid_after_the_operators_time() {
        let mut keeper = Keeper::new(Patience { terminating: 1800, ..Patience::default() });
        let hanging = |uid: &str| Said {
            endpoint: Some(Endpoint { uid: uid.into(), deleting: true, ..endpoint(&[]).unwrap() }),
            ..Said::default()
        };
        assert_eq!(keeper.look("db/a", &hanging("e"), Moment(0)), []);
        assert_eq!(keeper.look("db/a", &hanging("e"), Moment(1799)), []);
        assert_eq!(keeper.look("db/a", &hanging("e"), Moment(1800)), [Deed::Free { uid: "e".into() }]);
        // It may not have worked: again, but not at once.
        assert_eq!(keeper.next_look("db/a", Moment(1801)), Some(59));
        assert_eq!(keeper.look("db/a", &hanging("e"), Moment(1859)), []);
        assert_eq!(keeper.look("db/a", &hanging("e"), Moment(1860)).len(), 1);
        assert_eq!(keeper.look("db/a", &hanging("f"), Moment(1862)), [], "another one has its own time");
        // Nothing holds it: it goes by itself.
        let mut going = hanging("g");
        going.endpoint.as_mut().unwrap().held = false;
        assert_eq!(keeper.look("db/b", &going, Moment(0)), []);
        assert_eq!(keeper.look("db/b", &going, Moment(9999)), []);
    }

    #[test]
    fn an_endpoint_of_an_earlier_pod_of_the_name_is_removed_and_nothing_it_says_is_told() {
        let mut keeper = Keeper::new(Patience::default());
        let made_for = |pod: &str| {
            let mut said = Said { endpoint: endpoint(&["10.0.0.2"]), ..running() };
            said.endpoint.as_mut().unwrap().made_for = Some(pod.into());
            said
        };
        assert_eq!(keeper.look("db/a", &made_for("old"), Moment(0)), []);
        assert_eq!(keeper.look("db/a", &made_for("old"), Moment(30)), [Deed::Remove { uid: "e".into() }]);
        assert_eq!(keeper.look("db/a", &made_for("old"), Moment(31)), []);
        assert_eq!(keeper.look("db/a", &made_for("p"), Moment(32)), [], "its own, which disagrees since now");
        let gone = Said { pod: None, running: false, ..made_for("old") };
        assert_eq!(
            keeper.look("db/b", &gone, Moment(99)),
            [],
            "Cilium's operator collects those without a pod"
        );
        assert_eq!(keeper.look("db/b", &gone, Moment(999)), []);
    }

    #[test]
    fn each_disagreement_is_told_once_after_a_while_and_again_when_it_changes() {
        let mut keeper = Keeper::new(Patience::default());
        let wrong = |text: &str| Said { endpoint: endpoint(&[text]), ..running() };
        assert_eq!(keeper.look("db/a", &wrong("10.0.0.2"), Moment(0)), []);
        let told = keeper.look("db/a", &wrong("10.0.0.2"), Moment(30));
        assert!(
            matches!(&told[..], [Deed::Tell(what)] if what.reason() == "EndpointDisagreesWithPod"),
            "{told:?}"
        );
        assert_eq!(keeper.look("db/a", &wrong("10.0.0.2"), Moment(99)), []);
        assert_eq!(keeper.look("db/a", &wrong("10.0.0.3"), Moment(100)), []);
        assert_eq!(keeper.look("db/a", &wrong("10.0.0.3"), Moment(130)).len(), 1);
    }

    #[test]
    fn a_sticky_pod_with_a_foreign_address_or_without_its_key_is_told() {
        let reasons = |said: &Said| -> Vec<&'static str> {
            let mut keeper = Keeper::new(Patience { disagreeing: 0, missing: 999, ..Patience::default() });
            let told = keeper.look("db/a", said, Moment(0));
            told.iter()
                .filter_map(|deed| if let Deed::Tell(what) = deed { Some(what.reason()) } else { None })
                .collect()
        };
        let bound = |text: &str, pooled: &[&str]| Said {
            bound: Some(set(&[text])),
            pooled: Some(set(pooled)),
            ..running()
        };
        assert_eq!(reasons(&bound("10.0.0.1", &["10.0.0.1"])), [""; 0]);
        assert_eq!(reasons(&bound("10.0.0.9", &["10.0.0.9"])), ["PodDisagreesWithStickyIP"]);
        assert_eq!(reasons(&bound("10.0.0.1", &[])), ["PoolLacksStickyIP"]);
        // A second family that nobody keeps, and a pod that shows nothing yet.
        let mut dual = bound("10.0.0.1", &["10.0.0.1"]);
        dual.pod_addresses = set(&["10.0.0.1", "fd00::1"]);
        assert_eq!(reasons(&dual), [""; 0]);
        let mut young = bound("10.0.0.9", &[]);
        young.pod_addresses.clear();
        assert_eq!(reasons(&young), [""; 0]);
    }
}
