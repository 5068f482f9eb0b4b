//! Leader election on a Lease: one of several replicas works, the others wait. Must never be what safety
//! depends on: every write has its own precondition, and two leaders at once only cause conflicts.
//!
//! [`ElectionCandidate`] decides from what was read and a time of this machine's own that is handed in; times
//! written by other machines are never compared. [`LeaderElection`] sends the writes, each with the
//! resourceVersion that was read.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams, ResourceExt};
use thiserror::Error;
use tokio::time::Instant;

use crate::cluster::api::client::{ApiError, Connection};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseTimes {
    /// How long a lease that is not renewed stays valid.
    pub lease_duration: Duration,
    /// How long a leader that cannot renew goes on; shorter, so that it has stopped before another begins.
    pub renew_deadline: Duration,
    /// Between two reads or renewals.
    pub retry_period: Duration,
}

impl Default for LeaseTimes {
    fn default() -> Self {
        Self {
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadLeaseTimes {
    /// A leader would go on after another has begun.
    #[error("the renew deadline {renew:?} must be shorter than the lease duration {lease:?}")]
    RenewTooLong { renew: Duration, lease: Duration },
    /// A leader would have one try only.
    #[error(
        "the retry period {retry:?} must be more than zero and shorter than the renew deadline {renew:?}"
    )]
    RetryTooLong { retry: Duration, renew: Duration },
    /// The Lease object counts in seconds.
    #[error("the lease duration {0:?} must be at least one second")]
    TooShort(Duration),
}

impl LeaseTimes {
    /// Errors: two times do not fit each other.
    pub fn check(self) -> Result<Self, BadLeaseTimes> {
        let Self { lease_duration: lease, renew_deadline: renew, retry_period: retry } = self;
        if lease < Duration::from_secs(1) {
            return Err(BadLeaseTimes::TooShort(lease));
        }
        if renew >= lease {
            return Err(BadLeaseTimes::RenewTooLong { renew, lease });
        }
        if retry.is_zero() || retry >= renew {
            return Err(BadLeaseTimes::RetryTooLong { retry, renew });
        }
        Ok(self)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LeaseState {
    /// Who holds it; empty if it was released.
    pub holder: Option<String>,
    /// The state that it was read in: uid and resourceVersion.
    pub version: String,
    pub duration: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseAction {
    /// There is no Lease: create it, which fails if another replica does.
    Create,
    Take,
    Renew,
    Wait,
}

/// One replica's view of the election. Times are since any fixed point of this machine.
#[derive(Debug)]
pub(crate) struct ElectionCandidate {
    me: String,
    lease_times: LeaseTimes,
    /// The state of the Lease that was last seen, and when it was first seen so.
    observed: Option<(String, Duration)>,
    renewed: Option<Duration>,
}

impl ElectionCandidate {
    pub(crate) fn new(me: impl Into<String>, lease_times: LeaseTimes) -> Self {
        Self { me: me.into(), lease_times, observed: None, renewed: None }
    }

    pub(crate) fn next(&mut self, seen: Option<&LeaseState>, now: Duration) -> LeaseAction {
        let Some(seen) = seen else { return LeaseAction::Create };
        let since = match &self.observed {
            Some((version, since)) if *version == seen.version => *since,
            _ => {
                self.observed = Some((seen.version.clone(), now));
                now
            }
        };
        match seen.holder.as_deref() {
            // Names are unique per process, so a lease with this name is our own.
            Some(holder) if holder == self.me => LeaseAction::Renew,
            None | Some("") => LeaseAction::Take,
            // Its own duration counts, but never less than ours: a leader with shorter times must not be
            // overtaken early.
            Some(_) if now.saturating_sub(since) >= seen.duration.max(self.lease_times.lease_duration) => {
                LeaseAction::Take
            }
            Some(_) => LeaseAction::Wait,
        }
    }

    /// The write succeeded; `sent` is when it was sent, for the server may have taken its time.
    pub(crate) fn wrote(&mut self, sent: Duration) {
        self.renewed = Some(sent);
    }

    pub(crate) fn lost(&mut self) {
        self.renewed = None;
    }

    /// When the right to work ends unless it is renewed.
    pub(crate) fn leader_until(&self) -> Option<Duration> {
        self.renewed.map(|renewed| renewed + self.lease_times.renew_deadline)
    }
}

pub struct LeaderElection {
    api: Connection,
    namespace: String,
    name: String,
    me: String,
    lease_times: LeaseTimes,
}

pub struct Leadership {
    candidate: ElectionCandidate,
    started: Instant,
}

#[derive(Debug, Error)]
pub enum LeaseLost {
    /// The lease could not be renewed in time, or another took it.
    #[error("the lease {lease} is lost: {why}; this process must end")]
    Lost { lease: String, why: String },
}

impl LeaderElection {
    /// A seat at the Lease `namespace/name`. `me` must be unique to this process.
    pub fn new(client: kube::Client, namespace: &str, name: &str, me: &str, lease_times: LeaseTimes) -> Self {
        let api = Connection::with_client(client, Path::new("the controller's"), lease_times.retry_period);
        Self { api, namespace: namespace.into(), name: name.into(), me: me.into(), lease_times }
    }

    fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.api.client(), &self.namespace)
    }

    /// Waits until this replica leads. A caller that stops waiting calls [`LeaderElection::release`]: the
    /// last write may have won.
    pub async fn win(&mut self) -> Leadership {
        let candidate = ElectionCandidate::new(&self.me, self.lease_times);
        let mut term = Leadership { candidate, started: Instant::now() };
        while !self.attempt(&mut term).await {
            tokio::time::sleep(self.lease_times.retry_period).await;
        }
        tracing::info!(lease = %self.lease(), me = self.me, "leading");
        term
    }

    /// Does `work` until it ends by itself, and then releases the lease, or until the lease is lost.
    /// Errors: [`LeaseLost::Lost`]: whatever `work` was doing was dropped in the middle.
    pub async fn hold<T>(
        &mut self,
        mut term: Leadership,
        work: impl Future<Output = T>,
    ) -> Result<T, LeaseLost> {
        let outcome = tokio::select! {
            // Looked at first: work that is always busy must not keep the process from seeing that its time
            // is over.
            biased;
            why = self.renew(&mut term) => Err(LeaseLost::Lost { lease: self.lease(), why }),
            done = work => Ok(done),
        };
        if outcome.is_ok() {
            self.release().await;
        }
        outcome
    }

    fn lease(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Renews as long as possible; returns why it failed.
    async fn renew(&mut self, term: &mut Leadership) -> String {
        loop {
            let until = term.started + term.candidate.leader_until().unwrap_or_default();
            tokio::select! {
                // A renewal that hangs must not outlive the right to work.
                () = tokio::time::sleep_until(until) => return "it could not be renewed in time".to_owned(),
                renewed = async {
                    tokio::time::sleep(self.lease_times.retry_period).await;
                    self.attempt(term).await
                } => if !renewed && term.candidate.leader_until().is_none() {
                    return "another replica holds it".to_owned();
                }
            }
        }
    }

    /// One read and at most one write. Returns whether this write made the lease this replica's.
    async fn attempt(&mut self, Leadership { candidate, started }: &mut Leadership) -> bool {
        self.api.restart_time();
        let (leases, lease, params) = (self.leases(), self.lease(), PostParams::default());
        let read = self.api.once(&format!("get Lease {lease}"), leases.get_opt(&self.name)).await;
        let read = read.inspect_err(|error| tracing::warn!(%lease, %error, "cannot read the lease"));
        let Ok(read) = read else { return false };
        let now = started.elapsed();
        let next = candidate.next(read.as_ref().map(seen).as_ref(), now);
        let wanted = self.written(read.as_ref());
        let written = match (next, &read) {
            (LeaseAction::Wait, _) => {
                candidate.lost();
                return false;
            }
            (LeaseAction::Create, _) | (_, None) => {
                self.api.once(&format!("create Lease {lease}"), leases.create(&params, &wanted)).await
            }
            (LeaseAction::Take | LeaseAction::Renew, Some(_)) => {
                // The object carries the resourceVersion that was read: the server refuses any other.
                let sent = leases.replace(&self.name, &params, &wanted);
                self.api.once(&format!("replace Lease {lease}"), sent).await
            }
        };
        match &written {
            Ok(_) => candidate.wrote(now),
            Err(ApiError::Refused { code: 409, .. }) => {}
            Err(error) => tracing::warn!(%lease, %error, "cannot write the lease"),
        }
        written.is_ok()
    }

    fn written(&self, read: Option<&Lease>) -> Lease {
        let now = MicroTime(Timestamp::now());
        let before = read.and_then(|read| read.spec.clone()).unwrap_or_default();
        let renews = before.holder_identity.as_deref() == Some(&self.me);
        let transitions = before.lease_transitions.unwrap_or_default().saturating_add(i32::from(!renews));
        let seconds = i32::try_from(self.lease_times.lease_duration.as_secs()).unwrap_or(i32::MAX);
        let new = || ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
        Lease {
            metadata: read.map_or_else(new, |read| read.metadata.clone()),
            spec: Some(LeaseSpec {
                holder_identity: Some(self.me.clone()),
                lease_duration_seconds: Some(seconds),
                acquire_time: if renews { before.acquire_time } else { Some(now.clone()) },
                renew_time: Some(now),
                lease_transitions: Some(transitions),
                ..before
            }),
        }
    }

    /// Gives the lease back, so that another need not wait for it to run out. Best effort.
    pub async fn release(&mut self) {
        self.api.restart_time();
        let (leases, lease) = (self.leases(), self.lease());
        let read = self.api.once(&format!("get Lease {lease}"), leases.get_opt(&self.name)).await;
        let Ok(Some(mut object)) = read else { return };
        let is_own = |spec: &&mut LeaseSpec| spec.holder_identity.as_deref() == Some(&self.me);
        let Some(spec) = object.spec.as_mut().filter(is_own) else { return };
        spec.holder_identity = Some(String::new());
        let what = format!("release Lease {lease}");
        match self.api.once(&what, leases.replace(&self.name, &PostParams::default(), &object)).await {
            Ok(_) => tracing::info!(%lease, me = self.me, "gave the lease back"),
            Err(error) => tracing::warn!(%lease, %error, "cannot release the lease"),
        }
    }
}

fn seen(lease: &Lease) -> LeaseState {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    let (uid, version) = (lease.uid().unwrap_or_default(), lease.resource_version().unwrap_or_default());
    let duration = Duration::from_secs(seconds.unwrap_or_default());
    LeaseState { holder: spec.holder_identity, version: format!("{uid} {version}"), duration }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl ElectionCandidate {
        fn is_leader(&self, now: Duration) -> bool {
            self.leader_until().is_some_and(|until| now < until)
        }
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn held(by: &str, version: &str) -> LeaseState {
        LeaseState { holder: Some(by.into()), version: version.into(), duration: at(15) }
    }

    #[test]
    fn a_lease_is_taken_only_after_it_stood_unchanged_before_our_own_eyes() {
        let mut me = ElectionCandidate::new("me", LeaseTimes::default());
        assert_eq!(me.next(None, at(0)), LeaseAction::Create);
        // However old it may be by its own clock: we have just begun to look.
        assert_eq!(me.next(Some(&held("other", "1")), at(1000)), LeaseAction::Wait);
        assert_eq!(me.next(Some(&held("other", "1")), at(1014)), LeaseAction::Wait);
        assert_eq!(me.next(Some(&held("other", "2")), at(1015)), LeaseAction::Wait, "it was renewed");
        assert_eq!(me.next(Some(&held("other", "2")), at(1029)), LeaseAction::Wait);
        assert_eq!(me.next(Some(&held("other", "2")), at(1030)), LeaseAction::Take);
    }

    #[test]
    fn a_released_lease_is_taken_at_once_and_ones_own_is_renewed() {
        let mut me = ElectionCandidate::new("me", LeaseTimes::default());
        assert_eq!(me.next(Some(&held("", "1")), at(0)), LeaseAction::Take);
        assert_eq!(me.next(Some(&LeaseState { holder: None, ..held("", "1") }), at(0)), LeaseAction::Take);
        assert_eq!(me.next(Some(&held("me", "2")), at(100)), LeaseAction::Renew);
    }

    #[test]
    fn a_leader_that_cannot_renew_stops_before_anyone_may_follow() {
        let lease_times = LeaseTimes::default();
        let mut me = ElectionCandidate::new("me", lease_times);
        me.wrote(at(100));
        assert!(me.is_leader(at(109)));
        assert!(!me.is_leader(at(110)));
        me.lost();
        assert!(!me.is_leader(at(100)));
    }

    #[test]
    fn times_that_contradict_each_other_are_refused_by_both_names() {
        let with = |lease, renew, retry| {
            LeaseTimes { lease_duration: at(lease), renew_deadline: at(renew), retry_period: at(retry) }
                .check()
        };
        assert!(with(15, 10, 2).is_ok());
        assert!(with(10, 10, 2).unwrap_err().to_string().contains("renew deadline 10s"));
        assert!(with(15, 10, 10).unwrap_err().to_string().contains("retry period 10s"));
        assert!(with(15, 10, 0).is_err() && with(0, 0, 0).is_err());
    }

    proptest! {
        /// Two candidates with clocks of their own, looks at any time, writes that may be lost: never two
        /// leaders.
        #[test]
        fn two_candidates_never_lead_at_once(steps in proptest::collection::vec((0u8..2, 1u64..9, prop::bool::ANY), 1..200)) {
            let lease_times = LeaseTimes::default();
            let skew = [at(0), at(5_000)];
            let mut both = [ElectionCandidate::new("a", lease_times), ElectionCandidate::new("b", lease_times)];
            let mut lease: Option<LeaseState> = None;
            let (mut now, mut version) = (at(0), 0);
            for (who, pause, arrives) in steps {
                now += at(pause);
                let who = usize::from(who);
                let local = now + skew[who];
                let next = both[who].next(lease.as_ref(), local);
                if next == LeaseAction::Wait {
                    both[who].lost();
                } else {
                    version += 1;
                    let name = ["a", "b"][who];
                    lease = Some(held(name, &version.to_string()));
                    // The answer may be lost: then it holds the lease and does not know.
                    if arrives {
                        both[who].wrote(local);
                    }
                }
                prop_assert!(!(both[0].is_leader(now + skew[0]) && both[1].is_leader(now + skew[1])));
            }
        }
    }
}
