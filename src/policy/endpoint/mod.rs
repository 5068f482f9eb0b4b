//! The keeper of CiliumEndpoints: what a pod's endpoint lacks, and when it is time to do something about it.
//!
//! Times are those at which this process saw something first, handed in; a restart loses them and everything takes longer.
//! Must never touch an endpoint whose pod may still need it: only one that is being deleted, for longer than the operator's patience,
//! or one that says nothing true of its pod.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::policy::selection::facts::TimePoint;

/// Between two tries of something that should have worked at once, in seconds.
pub const RETRY_SECONDS: u64 = 60;
/// Between two removals of a wrong endpoint of one pod, in seconds: whoever writes it wrong again needs a person, not a fight.
pub const REPLACE_INTERVAL_SECONDS: u64 = 3600;

/// How long is long enough, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointTimeouts {
    /// A running pod without an endpoint is nudged after this, and again after each such time.
    pub missing: u64,
    /// The most nudges of one pod: whatever does not help three times helps a fourth time neither.
    pub nudges: u32,
    /// An endpoint that is being deleted is freed after this, and again after [`RETRY_SECONDS`] if that did not help.
    pub terminating: u64,
    /// A disagreement is told after this: objects are written one after the other.
    pub disagreeing: u64,
    /// An endpoint with none of its sticky pod's addresses is removed after this: it was told before, and Cilium, which looks at its
    /// endpoints every ten seconds, has not corrected it.
    pub wrong: u64,
}

impl Default for EndpointTimeouts {
    fn default() -> Self {
        Self { missing: 30, nudges: 3, terminating: 30 * 60, disagreeing: 30, wrong: 120 }
    }
}

impl EndpointTimeouts {
    /// How long a name is seen in this state before something is done for the next time; none if never again.
    fn due(&self, state: &EndpointState, done: u32) -> Option<u64> {
        match state {
            EndpointState::Missing { .. } => {
                (done < self.nudges).then(|| self.missing.saturating_mul(u64::from(done) + 1))
            }
            EndpointState::Terminating { .. } => {
                Some(self.terminating.saturating_add(RETRY_SECONDS * u64::from(done)))
            }
            EndpointState::LeftOver { .. } => {
                Some(self.disagreeing.saturating_add(RETRY_SECONDS * u64::from(done)))
            }
            EndpointState::Disagreeing(_) => (done == 0).then_some(self.disagreeing),
            EndpointState::Wrong { .. } => Some(self.wrong),
        }
    }
}

/// A pod's endpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndpointFacts {
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

impl EndpointFacts {
    fn is_left_over(&self, pod: &str) -> bool {
        !self.deleting && self.made_for.as_deref().is_some_and(|uid| uid != pod)
    }
}

/// What is said of one name by the pod, its endpoint, its binding and its node's pool.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EndpointView {
    /// The pod's uid; none if there is no pod of this name.
    pub pod: Option<String>,
    /// It runs, on the pod network.
    pub running: bool,
    /// The addresses that the pod shows.
    pub pod_addresses: BTreeSet<IpAddr>,
    /// The endpoint, if there is one.
    pub endpoint: Option<EndpointFacts>,
    /// The addresses of the StickyIP that is attached to this pod; none if it is not sticky.
    pub bound: Option<BTreeSet<IpAddr>>,
    /// The addresses that the node's pool keeps for this pod; none if the mode has no pool.
    pub pooled: Option<BTreeSet<IpAddr>>,
}

impl EndpointView {
    /// Whether the endpoint says nothing true of its pod, and the pod is proved right by its binding. One that shares an address with
    /// the pod still carries that one's traffic; of a pod that is not sticky, or has another address than its binding, nobody
    /// can say from here who is right.
    fn is_wrong(&self) -> bool {
        let Some(endpoint) = self.endpoint.as_ref().filter(|endpoint| !endpoint.deleting) else {
            return false;
        };
        let is_its_own = self.pod.is_some() && endpoint.made_for == self.pod;
        let has_its_own =
            |bound: &BTreeSet<IpAddr>| !bound.is_empty() && bound.is_subset(&self.pod_addresses);
        self.running
            && is_its_own
            && !endpoint.addresses.is_empty()
            && endpoint.addresses.is_disjoint(&self.pod_addresses)
            && self.bound.as_ref().is_some_and(has_its_own)
    }
}

/// What to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EndpointAction {
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
    /// Delete an endpoint that has none of the addresses of its sticky pod, which has its own: Cilium makes it anew.
    Replace {
        /// The endpoint's uid, the precondition.
        uid: String,
        /// The pod's uid; both must be as they were seen.
        pod: String,
        /// The pod's addresses; they must be as they were seen.
        addresses: BTreeSet<IpAddr>,
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
        /// The endpoint is removed if it stays so; else it is for a person.
        removed: bool,
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
enum EndpointState {
    Missing {
        uid: String,
    },
    Terminating {
        uid: String,
    },
    LeftOver {
        uid: String,
    },
    /// By the pod: an endpoint that is written wrong again is no new thing.
    Wrong {
        pod: String,
    },
    Disagreeing(Disagreement),
}

/// The keeper's memory, by namespace and name.
#[derive(Debug, Default)]
pub struct EndpointTracker {
    patience: EndpointTimeouts,
    seen: BTreeMap<String, BTreeMap<EndpointState, (TimePoint, u32)>>,
    /// Whose wrong endpoint was removed: the pod's uid, and when. For as long as that pod is there.
    replaced: BTreeMap<String, (String, TimePoint)>,
}

impl EndpointTracker {
    /// A keeper with this patience.
    #[must_use]
    pub fn new(patience: EndpointTimeouts) -> Self {
        Self { patience, seen: BTreeMap::new(), replaced: BTreeMap::new() }
    }

    /// Looks at one name and tells what to do now. What was done is told back by [`EndpointTracker::done`], and not repeated before its time.
    pub fn look(&mut self, name: &str, said: &EndpointView, now: TimePoint) -> Vec<EndpointAction> {
        let states = states(said);
        if self.replaced.get(name).is_some_and(|(pod, _)| Some(pod) != said.pod.as_ref()) {
            self.replaced.remove(name);
        }
        let mut before = self.seen.remove(name).unwrap_or_default();
        let mut actions = Vec::new();
        let mut kept = BTreeMap::new();
        for state in states {
            let (since, done) = before.remove(&state).unwrap_or((now, 0));
            if self.due_in(name, &state, (since, done), now) == Some(0) {
                actions.push(match &state {
                    EndpointState::Missing { uid } => {
                        EndpointAction::Nudge { uid: uid.clone(), number: done + 1 }
                    }
                    EndpointState::Terminating { uid } => EndpointAction::Free { uid: uid.clone() },
                    EndpointState::LeftOver { uid } => EndpointAction::Remove { uid: uid.clone() },
                    EndpointState::Wrong { pod } => EndpointAction::Replace {
                        uid: said.endpoint.as_ref().map(|endpoint| endpoint.uid.clone()).unwrap_or_default(),
                        pod: pod.clone(),
                        addresses: said.pod_addresses.clone(),
                    },
                    EndpointState::Disagreeing(what) => EndpointAction::Tell(what.clone()),
                });
            }
            kept.insert(state, (since, done));
        }
        if !kept.is_empty() {
            self.seen.insert(name.to_owned(), kept);
        }
        actions
    }

    /// A deed was carried out. One that came to nothing does not count: it is due again.
    pub fn done(&mut self, name: &str, action: &EndpointAction, now: TimePoint) {
        if let EndpointAction::Replace { pod, .. } = action {
            self.replaced.insert(name.to_owned(), (pod.clone(), now));
        }
        let state = match action.clone() {
            EndpointAction::Nudge { uid, .. } => EndpointState::Missing { uid },
            EndpointAction::Free { uid } => EndpointState::Terminating { uid },
            EndpointAction::Remove { uid } => EndpointState::LeftOver { uid },
            EndpointAction::Replace { pod, .. } => EndpointState::Wrong { pod },
            EndpointAction::Tell(what) => EndpointState::Disagreeing(what),
        };
        if let Some((_, done)) = self.seen.get_mut(name).and_then(|states| states.get_mut(&state)) {
            *done += 1;
        }
    }

    /// How many seconds until this name must be looked at again, whatever happens; none if nothing is awaited.
    #[must_use]
    pub fn next_look(&self, name: &str, now: TimePoint) -> Option<u64> {
        let states = self.seen.get(name)?.iter();
        states.filter_map(|(state, seen)| self.due_in(name, state, *seen, now)).min()
    }

    /// How many seconds until something is to be done about a state that is seen since then, after so many times; none if never.
    fn due_in(
        &self,
        name: &str,
        state: &EndpointState,
        (since, done): (TimePoint, u32),
        now: TimePoint,
    ) -> Option<u64> {
        let wait = self.patience.due(state, done)?.saturating_sub(now.seconds_since(since));
        let last = self.replaced.get(name).filter(|_| matches!(state, EndpointState::Wrong { .. }));
        let rest = last.map_or(0, |(_, at)| REPLACE_INTERVAL_SECONDS.saturating_sub(now.seconds_since(*at)));
        Some(wait.max(rest))
    }
}

fn states(said: &EndpointView) -> Vec<EndpointState> {
    let mut states = Vec::new();
    match (&said.endpoint, &said.pod) {
        (Some(endpoint), _) if endpoint.deleting && endpoint.held => {
            states.push(EndpointState::Terminating { uid: endpoint.uid.clone() });
        }
        (Some(endpoint), Some(uid)) if said.running && endpoint.is_left_over(uid) => {
            // Whatever it says is of another pod.
            return vec![EndpointState::LeftOver { uid: endpoint.uid.clone() }];
        }
        (None, Some(uid)) if said.running => states.push(EndpointState::Missing { uid: uid.clone() }),
        _ => {}
    }
    if !said.running || said.pod_addresses.is_empty() {
        return states;
    }
    let removed = said.is_wrong();
    if let (true, Some(pod)) = (removed, &said.pod) {
        states.push(EndpointState::Wrong { pod: pod.clone() });
    }
    let mut disagree = |what| states.push(EndpointState::Disagreeing(what));
    if let Some(endpoint) = said.endpoint.as_ref().filter(|endpoint| !endpoint.deleting)
        && !endpoint.addresses.is_empty()
        && endpoint.addresses != said.pod_addresses
    {
        disagree(Disagreement::EndpointAndPod {
            endpoint: endpoint.addresses.clone(),
            pod: said.pod_addresses.clone(),
            removed,
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
mod tests;
