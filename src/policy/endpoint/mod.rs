//! Tracks CiliumEndpoints: what is wrong with a pod's endpoint, and when to act.
//!
//! Times are those at which this process saw something first; the caller passes the clock. A restart loses
//! them and everything takes longer. Must never touch an endpoint that its pod may still need: only one whose
//! deletion takes longer than the operator's timeout, or one that has none of its pod's addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::policy::selection::facts::TimePoint;

/// Seconds between two tries of something that should have worked at once.
pub(crate) const RETRY_SECONDS: u64 = 60;
/// Seconds between two removals of a wrong endpoint of one pod: if it is written wrong again, it needs manual
/// action.
pub(crate) const REPLACE_INTERVAL_SECONDS: u64 = 3600;

/// Timeouts, in seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EndpointTimeouts {
    /// A running pod without an endpoint is nudged after this, and again each time it passes.
    pub missing: u64,
    /// The maximum number of nudges per pod: if three do not help, a fourth does not either.
    pub nudges: u32,
    /// The finalizers of an endpoint that is being deleted are removed after this, and again after
    /// [`RETRY_SECONDS`].
    pub terminating: u64,
    /// A disagreement is reported after this: objects are written one after the other.
    pub disagreeing: u64,
    /// An endpoint with none of its sticky pod's addresses is removed after this: it was reported before, and
    /// Cilium, which checks its endpoints every ten seconds, has not corrected it.
    pub wrong: u64,
}

impl Default for EndpointTimeouts {
    fn default() -> Self {
        Self { missing: 30, nudges: 3, terminating: 30 * 60, disagreeing: 30, wrong: 120 }
    }
}

impl EndpointTimeouts {
    /// After how many seconds in this state the next action is due; none if there is no further action.
    fn due(&self, state: &EndpointState, done: u32) -> Option<u64> {
        let again_and_again = |first: u64| Some(first.saturating_add(RETRY_SECONDS * u64::from(done)));
        match state {
            EndpointState::Missing { .. } => {
                (done < self.nudges).then(|| self.missing.saturating_mul(u64::from(done) + 1))
            }
            EndpointState::Terminating { .. } => again_and_again(self.terminating),
            EndpointState::LeftOver { .. } => again_and_again(self.disagreeing),
            EndpointState::Disagreeing(_) => (done == 0).then_some(self.disagreeing),
            EndpointState::Wrong { .. } => Some(self.wrong),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EndpointFacts {
    /// Its uid, the precondition of every write.
    pub uid: String,
    pub deleting: bool,
    /// It has finalizers.
    pub held: bool,
    /// The uid of the pod that it was created for, if it says so.
    pub made_for: Option<String>,
    pub addresses: BTreeSet<IpAddr>,
}

impl EndpointFacts {
    fn is_left_over(&self, pod: &str) -> bool {
        !self.deleting && self.made_for.as_deref().is_some_and(|uid| uid != pod)
    }
}

/// What pod, endpoint, StickyIP and the node's pool say about one pod name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct EndpointView {
    /// The pod's uid; none if there is no pod of this name.
    pub pod: Option<String>,
    /// It is running, on the pod network.
    pub running: bool,
    pub pod_addresses: BTreeSet<IpAddr>,
    pub endpoint: Option<EndpointFacts>,
    /// The addresses of the StickyIP that is attached to this pod; none if it is not sticky.
    pub bound: Option<BTreeSet<IpAddr>>,
    /// The addresses that the node's pool keeps for this pod; none if the mode has no pool.
    pub pooled: Option<BTreeSet<IpAddr>>,
}

impl EndpointView {
    /// Whether the endpoint has none of its pod's addresses, while the pod agrees with its StickyIP. An
    /// endpoint that shares an address with the pod still carries traffic of that address. If a pod is not
    /// sticky, or disagrees with its StickyIP, it cannot be decided here which side is right.
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

/// What to do. The uids, `uid` of the endpoint (of the pod for a nudge) and `pod`, are preconditions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EndpointAction {
    /// Put a label on the pod, so that Cilium processes it again.
    Nudge { uid: String, number: u32 },
    /// Remove the finalizers of an endpoint whose deletion does not end.
    RemoveFinalizers { uid: String },
    /// Delete an endpoint that was created for an earlier pod of the name: Cilium creates one for the running
    /// pod.
    Remove { uid: String },
    /// Delete an endpoint that has none of the addresses of its sticky pod, if those are still as they were
    /// read: Cilium creates it again.
    Replace { uid: String, pod: String, addresses: BTreeSet<IpAddr> },
    /// Report that two sources disagree.
    Report(Disagreement),
}

/// Which sources disagree. `removed`: the endpoint is removed if it stays so; otherwise it needs manual
/// action.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Disagreement {
    EndpointAndPod { endpoint: BTreeSet<IpAddr>, pod: BTreeSet<IpAddr>, removed: bool },
    PodAndBinding { pod: BTreeSet<IpAddr>, bound: BTreeSet<IpAddr> },
    PoolAndBinding { pooled: BTreeSet<IpAddr>, bound: BTreeSet<IpAddr> },
}

impl Disagreement {
    /// The reason of the event and the value of the metric's label.
    pub(crate) fn reason(&self) -> &'static str {
        match self {
            Self::EndpointAndPod { .. } => "EndpointDisagreesWithPod",
            Self::PodAndBinding { .. } => "PodDisagreesWithStickyIP",
            Self::PoolAndBinding { .. } => "PoolLacksStickyIP",
        }
    }
}

/// `Wrong` is by the pod: an endpoint that is written wrong again is the same problem.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum EndpointState {
    Missing { uid: String },
    Terminating { uid: String },
    LeftOver { uid: String },
    Wrong { pod: String },
    Disagreeing(Disagreement),
}

/// What was seen and done so far, by namespace and name of the pod.
#[derive(Debug, Default)]
pub(crate) struct EndpointTracker {
    patience: EndpointTimeouts,
    seen: BTreeMap<String, BTreeMap<EndpointState, (TimePoint, u32)>>,
    /// Whose wrong endpoint was removed: the pod's uid, and when. Kept as long as that pod exists.
    replaced: BTreeMap<String, (String, TimePoint)>,
}

impl EndpointTracker {
    pub(crate) fn new(patience: EndpointTimeouts) -> Self {
        Self { patience, ..Self::default() }
    }

    /// Looks at one name and returns what to do now. The caller reports what it did by
    /// [`EndpointTracker::done`]; it is not repeated before it is due again.
    pub(crate) fn look(&mut self, name: &str, view: &EndpointView, now: TimePoint) -> Vec<EndpointAction> {
        if self.replaced.get(name).is_some_and(|(pod, _)| Some(pod) != view.pod.as_ref()) {
            self.replaced.remove(name);
        }
        let mut before = self.seen.remove(name).unwrap_or_default();
        let mut actions = Vec::new();
        let mut kept = BTreeMap::new();
        for state in states(view) {
            let (since, done) = before.remove(&state).unwrap_or((now, 0));
            if self.due_in(name, &state, (since, done), now) == Some(0) {
                actions.push(match &state {
                    EndpointState::Missing { uid } => {
                        EndpointAction::Nudge { uid: uid.clone(), number: done + 1 }
                    }
                    EndpointState::Terminating { uid } => {
                        EndpointAction::RemoveFinalizers { uid: uid.clone() }
                    }
                    EndpointState::LeftOver { uid } => EndpointAction::Remove { uid: uid.clone() },
                    EndpointState::Wrong { pod } => EndpointAction::Replace {
                        uid: view.endpoint.as_ref().map(|endpoint| endpoint.uid.clone()).unwrap_or_default(),
                        pod: pod.clone(),
                        addresses: view.pod_addresses.clone(),
                    },
                    EndpointState::Disagreeing(what) => EndpointAction::Report(what.clone()),
                });
            }
            kept.insert(state, (since, done));
        }
        if !kept.is_empty() {
            self.seen.insert(name.to_owned(), kept);
        }
        actions
    }

    /// An action succeeded. A failed one is not reported: it is due again.
    pub(crate) fn done(&mut self, name: &str, action: &EndpointAction, now: TimePoint) {
        if let EndpointAction::Replace { pod, .. } = action {
            self.replaced.insert(name.to_owned(), (pod.clone(), now));
        }
        let state = match action.clone() {
            EndpointAction::Nudge { uid, .. } => EndpointState::Missing { uid },
            EndpointAction::RemoveFinalizers { uid } => EndpointState::Terminating { uid },
            EndpointAction::Remove { uid } => EndpointState::LeftOver { uid },
            EndpointAction::Replace { pod, .. } => EndpointState::Wrong { pod },
            EndpointAction::Report(what) => EndpointState::Disagreeing(what),
        };
        if let Some((_, done)) = self.seen.get_mut(name).and_then(|states| states.get_mut(&state)) {
            *done += 1;
        }
    }

    /// How many seconds until this name must be looked at again, even if nothing changes.
    pub(crate) fn next_look(&self, name: &str, now: TimePoint) -> Option<u64> {
        let states = self.seen.get(name)?.iter();
        states.filter_map(|(state, seen)| self.due_in(name, state, *seen, now)).min()
    }

    /// How many seconds until the next action for this state is due; none if there is none.
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

fn states(view: &EndpointView) -> Vec<EndpointState> {
    let mut states = Vec::new();
    match (&view.endpoint, &view.pod) {
        (Some(endpoint), _) if endpoint.deleting && endpoint.held => {
            states.push(EndpointState::Terminating { uid: endpoint.uid.clone() });
        }
        (Some(endpoint), Some(uid)) if view.running && endpoint.is_left_over(uid) => {
            // It describes another pod.
            return vec![EndpointState::LeftOver { uid: endpoint.uid.clone() }];
        }
        (None, Some(uid)) if view.running => states.push(EndpointState::Missing { uid: uid.clone() }),
        _ => {}
    }
    if !view.running || view.pod_addresses.is_empty() {
        return states;
    }
    let removed = view.is_wrong();
    states.extend(view.pod.clone().filter(|_| removed).map(|pod| EndpointState::Wrong { pod }));
    let mut disagree = |what| states.push(EndpointState::Disagreeing(what));
    if let Some(endpoint) = view.endpoint.as_ref().filter(|endpoint| !endpoint.deleting)
        && !endpoint.addresses.is_empty()
        && endpoint.addresses != view.pod_addresses
    {
        disagree(Disagreement::EndpointAndPod {
            endpoint: endpoint.addresses.clone(),
            pod: view.pod_addresses.clone(),
            removed,
        });
    }
    if let Some(bound) = &view.bound {
        // A pod may have an address of another family that is not sticky.
        if !bound.is_subset(&view.pod_addresses) {
            disagree(Disagreement::PodAndBinding { pod: view.pod_addresses.clone(), bound: bound.clone() });
        }
        if let Some(pooled) = view.pooled.as_ref().filter(|pooled| !bound.is_subset(pooled)) {
            disagree(Disagreement::PoolAndBinding { pooled: pooled.clone(), bound: bound.clone() });
        }
    }
    states
}

#[cfg(test)]
mod tests;
