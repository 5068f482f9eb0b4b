//! Leader election on a Lease: one of several replicas works, the others wait. Must never be what safety rests on: every write
//! has a precondition of its own, and two leaders at once only get in each other's way.
//!
//! [`Candidate`] decides from what was read and a time of this machine's own that is handed in; times written by other
//! machines are never compared. [`Seat`] carries it out, each write with the resourceVersion that was read.

use std::future::Future;
use std::path::Path;
use std::time::Duration;

use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, ObjectMeta, PostParams};
use thiserror::Error;
use tokio::time::Instant;

use crate::cluster::api::client::{ApiError, Connection};

/// The times of an election.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terms {
    /// How long a lease that nobody renews is respected.
    pub lease_duration: Duration,
    /// How long a leader that cannot renew goes on; shorter, so that it has stopped before another begins.
    pub renew_deadline: Duration,
    /// Between two looks or renewals.
    pub retry_period: Duration,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            lease_duration: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry_period: Duration::from_secs(2),
        }
    }
}

/// Times that contradict each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum BadTerms {
    /// A leader would go on after another has begun.
    #[error("the renew deadline {renew:?} must be shorter than the lease duration {lease:?}")]
    RenewTooLong {
        /// The renew deadline.
        renew: Duration,
        /// The lease's duration.
        lease: Duration,
    },
    /// A leader would have one try only.
    #[error(
        "the retry period {retry:?} must be more than zero and shorter than the renew deadline {renew:?}"
    )]
    RetryTooLong {
        /// The retry period.
        retry: Duration,
        /// The renew deadline.
        renew: Duration,
    },
    /// The Lease object counts in seconds.
    #[error("the lease duration {0:?} must be at least one second")]
    TooShort(Duration),
}

impl Terms {
    /// Checks that the times fit each other.
    ///
    /// # Errors
    /// Names both times that do not.
    pub fn check(self) -> Result<Self, BadTerms> {
        let Self { lease_duration: lease, renew_deadline: renew, retry_period: retry } = self;
        if lease < Duration::from_secs(1) {
            return Err(BadTerms::TooShort(lease));
        }
        if renew >= lease {
            return Err(BadTerms::RenewTooLong { renew, lease });
        }
        if retry.is_zero() || retry >= renew {
            return Err(BadTerms::RetryTooLong { retry, renew });
        }
        Ok(self)
    }
}

/// A Lease as it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    /// Who holds it; nobody, if it was given back.
    pub holder: Option<String>,
    /// The state that it was read in: uid and resourceVersion.
    pub version: String,
    /// For how long its holder asks to be respected.
    pub duration: Duration,
}

/// What to write next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Move {
    /// There is no Lease: create it, which fails if somebody else does.
    Create,
    /// Take it over.
    Take,
    /// Renew one's own.
    Renew,
    /// Somebody else holds it.
    Wait,
}

/// One replica's view of the election. Times are since any fixed point of this machine.
#[derive(Debug)]
pub struct Candidate {
    me: String,
    terms: Terms,
    /// The state of the Lease that was last seen, and when it was first seen so.
    observed: Option<(String, Duration)>,
    renewed: Option<Duration>,
}

impl Candidate {
    /// A candidate that has seen nothing yet.
    #[must_use]
    pub fn new(me: impl Into<String>, terms: Terms) -> Self {
        Self { me: me.into(), terms, observed: None, renewed: None }
    }

    /// Decides on a fresh read.
    pub fn next(&mut self, seen: Option<&Seen>, now: Duration) -> Move {
        let Some(seen) = seen else { return Move::Create };
        let since = match &self.observed {
            Some((version, since)) if *version == seen.version => *since,
            _ => {
                self.observed = Some((seen.version.clone(), now));
                now
            }
        };
        match seen.holder.as_deref() {
            // Also a lease that this very name held in an earlier life: names are unique to a process.
            Some(holder) if holder == self.me => Move::Renew,
            None | Some("") => Move::Take,
            // Its own word counts, but never less than ours: a leader of shorter times must not be overtaken early.
            Some(_) if now.saturating_sub(since) >= seen.duration.max(self.terms.lease_duration) => {
                Move::Take
            }
            Some(_) => Move::Wait,
        }
    }

    /// The write succeeded; `sent` is when it was sent, for the server may have taken its time.
    pub fn wrote(&mut self, sent: Duration) {
        self.renewed = Some(sent);
    }

    /// Somebody else holds the Lease.
    pub fn lost(&mut self) {
        self.renewed = None;
    }

    /// Whether this replica may work now.
    #[must_use]
    pub fn leads(&self, now: Duration) -> bool {
        self.leads_until().is_some_and(|until| now < until)
    }

    /// When the right to work ends unless it is renewed.
    #[must_use]
    pub fn leads_until(&self) -> Option<Duration> {
        self.renewed.map(|renewed| renewed + self.terms.renew_deadline)
    }
}

/// Where the election takes place, and who stands for it.
pub struct Seat {
    api: Connection,
    namespace: String,
    name: String,
    me: String,
    terms: Terms,
}

/// A time of leadership that has begun.
pub struct Term {
    candidate: Candidate,
    started: Instant,
}

/// How a time of leadership ended.
#[derive(Debug, Error)]
pub enum Ended {
    /// The lease could not be renewed in time, or another took it.
    #[error("the lease {lease} is lost: {why}; this process must end")]
    Lost {
        /// Namespace and name.
        lease: String,
        /// What happened.
        why: String,
    },
}

impl Seat {
    /// A seat at the Lease `namespace/name`. `me` must be unique to this process.
    #[must_use]
    pub fn new(client: kube::Client, namespace: &str, name: &str, me: &str, terms: Terms) -> Self {
        let api = Connection::with_client(client, Path::new("the controller's"), terms.retry_period);
        Self { api, namespace: namespace.into(), name: name.into(), me: me.into(), terms }
    }

    fn leases(&self) -> Api<Lease> {
        Api::namespaced(self.api.client(), &self.namespace)
    }

    /// Waits until this replica leads, then does `work` until it ends by itself or the lease is lost. The lease is given back when
    /// `work` ends by itself.
    ///
    /// # Errors
    /// [`Ended::Lost`]: whatever `work` was doing was dropped in the middle.
    pub async fn lead<T>(&mut self, work: impl Future<Output = T>) -> Result<T, Ended> {
        let term = self.win().await;
        self.hold(term, work).await
    }

    /// Waits until this replica leads. Whoever stops waiting calls [`Seat::give_back`]: the last write may have won.
    pub async fn win(&mut self) -> Term {
        let started = Instant::now();
        let mut candidate = Candidate::new(&self.me, self.terms);
        while !self.attempt(&mut candidate, started).await {
            tokio::time::sleep(self.terms.retry_period).await;
        }
        tracing::info!(lease = %self.lease(), me = self.me, "leading");
        Term { candidate, started }
    }

    /// Does `work` until it ends by itself or the lease is lost. The lease is given back when `work` ends by itself.
    ///
    /// # Errors
    /// [`Ended::Lost`]: whatever `work` was doing was dropped in the middle.
    pub async fn hold<T>(&mut self, mut term: Term, work: impl Future<Output = T>) -> Result<T, Ended> {
        let outcome = tokio::select! {
            // Looked at first: work that is always busy must not keep the process from seeing that its time is over.
            biased;
            why = self.renew(&mut term.candidate, term.started) => Err(Ended::Lost { lease: self.lease(), why }),
            done = work => Ok(done),
        };
        if outcome.is_ok() {
            self.give_back().await;
        }
        outcome
    }

    fn lease(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }

    /// Renews for as long as it can; tells why it cannot any more.
    async fn renew(&mut self, candidate: &mut Candidate, started: Instant) -> String {
        loop {
            let until = started + candidate.leads_until().unwrap_or_default();
            tokio::select! {
                // A renewal that hangs must not outlive the right to work.
                () = tokio::time::sleep_until(until) => return "it could not be renewed in time".to_owned(),
                renewed = async {
                    tokio::time::sleep(self.terms.retry_period).await;
                    self.attempt(candidate, started).await
                } => if !renewed && candidate.leads_until().is_none() {
                    return "another replica holds it".to_owned();
                }
            }
        }
    }

    /// One look and at most one write. Whether the lease is this replica's now, by this very write.
    async fn attempt(&mut self, candidate: &mut Candidate, started: Instant) -> bool {
        self.api.restart_time();
        let leases = self.leases();
        let what = format!("get Lease {}", self.lease());
        let read = match self.api.once(&what, leases.get_opt(&self.name)).await {
            Ok(read) => read,
            Err(error) => {
                tracing::warn!(lease = %self.lease(), %error, "cannot look at the lease");
                return false;
            }
        };
        let now = started.elapsed();
        let next = candidate.next(read.as_ref().map(seen).as_ref(), now);
        let written = match (next, &read) {
            (Move::Wait, _) => {
                candidate.lost();
                return false;
            }
            (Move::Create, _) | (_, None) => {
                let lease = self.written(None);
                let what = format!("create Lease {}", self.lease());
                self.api.once(&what, leases.create(&PostParams::default(), &lease)).await
            }
            (Move::Take | Move::Renew, Some(read)) => {
                let lease = self.written(Some(read));
                let what = format!("replace Lease {}", self.lease());
                // The object carries the resourceVersion that was read: the server refuses any other.
                self.api.once(&what, leases.replace(&self.name, &PostParams::default(), &lease)).await
            }
        };
        match written {
            Ok(_) => {
                candidate.wrote(now);
                true
            }
            Err(ApiError::Refused { code: 409, .. }) => false,
            Err(error) => {
                tracing::warn!(lease = %self.lease(), %error, "cannot write the lease");
                false
            }
        }
    }

    fn written(&self, read: Option<&Lease>) -> Lease {
        let now = MicroTime(Timestamp::now());
        let before = read.and_then(|read| read.spec.clone()).unwrap_or_default();
        let renews = before.holder_identity.as_deref() == Some(&self.me);
        let seconds = i32::try_from(self.terms.lease_duration.as_secs()).unwrap_or(i32::MAX);
        Lease {
            metadata: match read {
                Some(read) => read.metadata.clone(),
                None => ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() },
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(self.me.clone()),
                lease_duration_seconds: Some(seconds),
                acquire_time: if renews { before.acquire_time } else { Some(now.clone()) },
                renew_time: Some(now),
                lease_transitions: Some(
                    before.lease_transitions.unwrap_or_default().saturating_add(i32::from(!renews)),
                ),
                ..before
            }),
        }
    }

    /// Gives the lease back, so that another need not wait for it to run out. Best effort.
    pub async fn give_back(&mut self) {
        self.api.restart_time();
        let leases = self.leases();
        let what = format!("get Lease {}", self.lease());
        let Ok(Some(mut lease)) = self.api.once(&what, leases.get_opt(&self.name)).await else { return };
        let Some(spec) = lease.spec.as_mut().filter(|spec| spec.holder_identity.as_deref() == Some(&self.me))
        else {
            return;
        };
        spec.holder_identity = Some(String::new());
        let what = format!("give Lease {} back", self.lease());
        match self.api.once(&what, leases.replace(&self.name, &PostParams::default(), &lease)).await {
            Ok(_) => tracing::info!(lease = %self.lease(), me = self.me, "gave the lease back"),
            Err(error) => tracing::warn!(lease = %self.lease(), %error, "cannot give the lease back"),
        }
    }
}

fn seen(lease: &Lease) -> Seen {
    let spec = lease.spec.clone().unwrap_or_default();
    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
    let version = format!(
        "{} {}",
        lease.metadata.uid.as_deref().unwrap_or_default(),
        lease.metadata.resource_version.as_deref().unwrap_or_default()
    );
    Seen { holder: spec.holder_identity, version, duration: Duration::from_secs(seconds.unwrap_or_default()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn held(by: &str, version: &str) -> Seen {
        Seen { holder: Some(by.into()), version: version.into(), duration: at(15) }
    }

    #[test]
    fn a_lease_is_taken_only_after_it_stood_unchanged_before_our_own_eyes() {
        let mut me = Candidate::new("me", Terms::default());
        assert_eq!(me.next(None, at(0)), Move::Create);
        // However old it may be by its own clock: we have just begun to look.
        assert_eq!(me.next(Some(&held("other", "1")), at(1000)), Move::Wait);
        assert_eq!(me.next(Some(&held("other", "1")), at(1014)), Move::Wait);
        assert_eq!(me.next(Some(&held("other", "2")), at(1015)), Move::Wait, "it was renewed");
        assert_eq!(me.next(Some(&held("other", "2")), at(1029)), Move::Wait);
        assert_eq!(me.next(Some(&held("other", "2")), at(1030)), Move::Take);
    }

    #[test]
    fn a_lease_that_was_given_back_is_taken_at_once_and_ones_own_is_renewed() {
        let mut me = Candidate::new("me", Terms::default());
        assert_eq!(me.next(Some(&held("", "1")), at(0)), Move::Take);
        assert_eq!(me.next(Some(&Seen { holder: None, ..held("", "1") }), at(0)), Move::Take);
        assert_eq!(me.next(Some(&held("me", "2")), at(100)), Move::Renew);
    }

    #[test]
    fn a_leader_that_cannot_renew_stops_before_anyone_may_follow() {
        let terms = Terms::default();
        let mut me = Candidate::new("me", terms);
        me.wrote(at(100));
        assert!(me.leads(at(109)));
        assert!(!me.leads(at(110)));
        me.lost();
        assert!(!me.leads(at(100)));
    }

    #[test]
    fn times_that_contradict_each_other_are_refused_by_both_names() {
        let with = |lease, renew, retry| {
            Terms { lease_duration: at(lease), renew_deadline: at(renew), retry_period: at(retry) }.check()
        };
        assert!(with(15, 10, 2).is_ok());
        assert!(with(10, 10, 2).unwrap_err().to_string().contains("renew deadline 10s"));
        assert!(with(15, 10, 10).unwrap_err().to_string().contains("retry period 10s"));
        assert!(with(15, 10, 0).is_err() && with(0, 0, 0).is_err());
    }

    proptest! {
        /// Two candidates with clocks of their own, looks at any time, writes that may be lost: never two leaders.
        #[test]
        fn two_candidates_never_lead_at_once(steps in proptest::collection::vec((0u8..2, 1u64..9, prop::bool::ANY), 1..200)) {
            let terms = Terms::default();
            let skew = [at(0), at(5_000)];
            let mut both = [Candidate::new("a", terms), Candidate::new("b", terms)];
            let mut lease: Option<Seen> = None;
            let (mut now, mut version) = (at(0), 0);
            for (who, pause, arrives) in steps {
                now += at(pause);
                let who = usize::from(who);
                let local = now + skew[who];
                let next = both[who].next(lease.as_ref(), local);
                if next == Move::Wait {
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
                prop_assert!(!(both[0].leads(now + skew[0]) && both[1].leads(now + skew[1])));
            }
        }
    }
}
