//! Releases addresses whose workload is gone. The proof is `policy::recycle`'s: two live looks, far enough
//! apart, with the StickyIP unchanged. Must never release on one look, on the index alone, or faster than the
//! operator allows.

pub mod conditions;
pub mod owners;
pub mod workloads;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;
use tokio::sync::OnceCell;

use crate::alloc::join;
use crate::cluster::events;
use crate::cluster::objects::sticky_ip::RELEASE_BLOCKED;
use crate::cluster::objects::{ClaimantKind, StickyIP, WorkloadRef};
use crate::cluster::writer::apply::Applied;
use crate::cluster::writer::write::{Precondition, Write};
use crate::controller::duties::{record_event, record_warning};
use crate::controller::duty::{Duty, RoundResult, run_duty_with};
use crate::controller::index::objects::{attached_pod_uid, sticky_key_of};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::queue::{Key, TokenBucket};
use crate::controller::{context::Context, flags::ControllerSettings};
use crate::policy::lifetime::recycle::{
    Absence, KeepReason, Kept, PodLookup, Proof, Recycle as Decision, ReleaseReason, WorkloadLookup, decide,
};
use crate::policy::lifetime::retention::Keep;
use crate::policy::selection::facts::TimePoint;
use crate::runtime::locked;
use conditions::{PendingRelease, outdated, write_conditions};
use owners::{OwnerRecords, may_return};
use workloads::{Inboxes, Workloads};

/// How many are looked at side by side: the API server answers in milliseconds, and each takes a few
/// requests. More than the repair and the events that follow have: releases in numbers come first.
const CONCURRENCY: usize = 32;
/// For how long one look at a workload is the proof for its other addresses too: less than a look may take to
/// come back.
const PROOF_MAX_AGE: Duration = Duration::from_millis(100);
/// The longest time to the next look after looks that failed; it doubles, starting at one second.
const MAX_LOOKUP_BACKOFF: Duration = Duration::from_secs(600);
/// An event is sent after this many failures: an API server that was away for a moment is no news.
const FAILURES_BEFORE_EVENT: u32 = 3;
/// The longest time to the next look at an address whose time runs.
const MAX_RECHECK: Duration = Duration::from_secs(3600);
/// While pods of a workload that is gone are still there.
const RETRY_WHILE_PODS_REMAIN: Duration = Duration::from_secs(5);

/// The duty's memory: first looks. Lost with the process at no harm, the proof starts again.
pub struct Recycle<'a> {
    workloads: &'a Workloads,
    proof: Proof,
    unattached: Unattached,
    absences: BTreeMap<String, Absence>,
    doubts: BTreeMap<String, u32>,
    bucket: Mutex<TokenBucket>,
}

/// Runs recycling and the record of owners, and the watches of workloads that wake both.
pub(crate) async fn run_recycling(context: &Context) {
    let workloads = Workloads::default();
    let (inbox, owners_inbox) = (context.inbox(Recycle::TRIGGERS), context.inbox(OwnerRecords::TRIGGERS));
    let duty = Recycle::new(&context.settings, &workloads);
    let inboxes = Inboxes { recycle: &inbox, owners: &owners_inbox };
    let owners = OwnerRecords { workloads: &workloads };
    tokio::join!(
        workloads.watch(context, inboxes),
        run_duty_with(duty, context, &inbox),
        run_duty_with(owners, context, &owners_inbox)
    );
}

/// The StickyIPs among what is due that may be released, by the index.
fn releasable(index: &ClusterIndex, due: &[Key]) -> Vec<(String, StickyIP)> {
    let named = due.iter().filter(|key| match key.kind {
        Kind::StickyIP => true,
        // The end of a pod whose StickyIP bears its name.
        Kind::Pod => index.pods.get(&key.name).is_none(),
        _ => false,
    });
    let names: BTreeSet<&String> = named.map(|key| &key.name).collect();
    let known = names.into_iter().filter_map(|name| Some((name, index.stickies.get(name)?)));
    let found = known.filter(|(name, sticky)| may_be_released(index, name, sticky));
    found.map(|(name, sticky)| (name.clone(), sticky.clone())).collect()
}

fn may_be_released(index: &ClusterIndex, name: &str, sticky: &StickyIP) -> bool {
    attached_pod_uid(sticky).is_none()
        && sticky.metadata.deletion_timestamp.is_none()
        && sticky.spec.retention.keep != Keep::Forever
        // Its pod is there: nothing to look at until that is gone.
        && !(sticky.spec.claimant.kind == ClaimantKind::Pod && index.pods.contains(name))
}

/// `left` is when this process saw its pod detach from it.
fn kept(sticky: &StickyIP, left: Option<TimePoint>) -> Kept {
    let last_seen = sticky.status.as_ref().and_then(|status| status.last_seen.as_ref());
    // One that was never attached counts from its making.
    let written = last_seen.or(sticky.metadata.creation_timestamp.as_ref());
    Kept {
        uid: sticky.metadata.uid.clone().unwrap_or_default(),
        resource_version: sticky.metadata.resource_version.clone().unwrap_or_default(),
        attached: attached_pod_uid(sticky).is_some(),
        workload_uid: sticky.spec.workload.uid.clone(),
        ordinal: sticky.spec.claimant.ordinal,
        retention: sticky.spec.retention,
        last_seen: left.or(written.map(|time| TimePoint(time.0.as_second()))),
    }
}

/// The unattached StickyIPs, each with the time at which this process saw that begin. A time that a node has
/// written is by that node's clock, which may be wrong by hours: it counts only if no controller was looking.
#[derive(Debug, Default)]
struct Unattached {
    since: BTreeMap<String, Option<TimePoint>>,
    looked: bool,
}

impl Unattached {
    fn update(&mut self, index: &ClusterIndex, due: &[Key], now: TimePoint) {
        for key in due.iter().filter(|key| key.kind == Kind::StickyIP) {
            match index.stickies.get(&key.name) {
                Some(sticky) if attached_pod_uid(sticky).is_none() => {
                    // What is so at the first look may have been so for long.
                    let began = self.looked.then_some(now);
                    self.since.entry(key.name.clone()).or_insert(began);
                }
                _ => drop(self.since.remove(&key.name)),
            }
        }
        self.looked = true;
    }

    fn since(&self, name: &str) -> Option<TimePoint> {
        self.since.get(name).copied().flatten()
    }
}

enum LookupResult {
    Kept {
        again: Option<Duration>,
        waits: Option<PendingRelease>,
    },
    Doubt(String),
    First(Absence),
    /// It is released, has changed, or is gone: the watch shows that.
    Over,
    Failed,
}

impl<'a> Recycle<'a> {
    pub(crate) fn new(settings: &ControllerSettings, workloads: &'a Workloads) -> Self {
        Self {
            workloads,
            proof: settings.proof(),
            unattached: Unattached::default(),
            absences: BTreeMap::new(),
            doubts: BTreeMap::new(),
            bucket: Mutex::new(TokenBucket::new(settings.recycle_rate, settings.recycle_rate.div_ceil(10))),
        }
    }

    /// Waits for a token; a metric shows how many wait.
    async fn token(&self, context: &Context) {
        let waiting = &context.metrics.releases_waiting;
        waiting.inc();
        loop {
            let taken = locked(&self.bucket).take(context.elapsed());
            let Err(pause) = taken else { break };
            tokio::time::sleep(pause).await;
        }
        waiting.dec();
    }

    async fn look(&self, context: &Context, sticky: &StickyIP, round: &SharedLookups) -> LookupResult {
        let key = sticky_key_of(sticky);
        let name = &key.to_string();
        let kept = kept(sticky, self.unattached.since(name));
        let before = self.absences.get(name);
        let may_prove = |absence: &Absence| {
            absence.resource_version == kept.resource_version
                && context.now().seconds_since(absence.first_look) >= self.proof.gap_seconds
        };
        let proves = before.is_some_and(may_prove);
        if proves {
            // Before the look, so that nothing waits between the proof and the write.
            self.token(context).await;
        }
        // Not while it waits for a token: a slow rate would put everything else off for as long.
        let _urgent = context.start_urgent_work();
        let spec = &sticky.spec;
        // A pod of another name never asks for this address, whatever owner lives.
        let kept_for = self.proof.owner_grace_seconds > 0 && may_return(sticky);
        let owners = if kept_for { spec.owners.as_slice() } else { &[] };
        let looking = (key.namespace.clone(), spec.workload.clone(), owners.to_vec(), proves);
        let inherit = self.proof.inherit;
        let look = || self.workloads.look_up(context, &key.namespace, &spec.workload, owners, inherit);
        let workload = round.shared(looking, context.elapsed()).get_or_init(look).await.clone();
        self.workloads.watch_kind_of(&spec.workload);
        // They are being collected, or were orphaned.
        let is_gone = workload == WorkloadLookup::Absent;
        if is_gone && context.index().has_pods_of(&key.namespace, &spec.workload) {
            return LookupResult::Kept { again: Some(RETRY_WHILE_PODS_REMAIN), waits: None };
        }
        let pod = match spec.claimant.kind {
            // The first look proves nothing, and the watch shows that the pod is gone.
            _ if !proves => PodLookup::Absent,
            ClaimantKind::Pod => look_at_pod(context, &key.namespace, &key.name).await,
            // A slot or a virtual machine is not of one pod: the pod that has it is attached to it.
            ClaimantKind::Slot | ClaimantKind::VirtualMachine => PodLookup::Absent,
        };
        match decide(&kept, &workload, pod, before, context.now(), self.proof) {
            Decision::Keep(reason) => keep(reason, &spec.workload, context.now()),
            Decision::CheckAgain(absence) => LookupResult::First(absence),
            // The time came while it looked, by a look that proves nothing.
            Decision::Release { .. } if !proves => {
                before.cloned().map_or(LookupResult::Failed, LookupResult::First)
            }
            Decision::Release { uid, resource_version, reason } => {
                let write = Write::DeleteSticky { key, at: Precondition { uid, resource_version } };
                match context.writer.api_writer().apply(&write, None, "").await {
                    Ok(applied) => {
                        if matches!(applied, Applied::Deleted) {
                            released(context, sticky, reason).await;
                        }
                        LookupResult::Over
                    }
                    Err(error) => {
                        tracing::warn!(sticky = name, %error, "cannot release an address; trying again");
                        LookupResult::Failed
                    }
                }
            }
        }
    }

    /// How long to wait after another lookup that failed; an event reports it if it lasts.
    async fn lookup_failed(&mut self, context: &Context, sticky: &StickyIP, why: &str) -> Duration {
        let name = sticky_key_of(sticky).to_string();
        let times = self.doubts.entry(name.clone()).or_default();
        *times = times.saturating_add(1);
        let pause = Duration::from_secs(1u64 << (*times - 1).min(10)).min(MAX_LOOKUP_BACKOFF);
        tracing::warn!(sticky = name, why, "cannot look up the workload of an address; the address is kept");
        if *times >= FAILURES_BEFORE_EVENT {
            let message = format!("the address is kept, because its workload cannot be looked up: {why}");
            record_warning(context, events::sticky_ip(sticky), RELEASE_BLOCKED, message).await;
            write_conditions(context, sticky, Some(&PendingRelease::Doubt { why: why.to_owned() })).await;
        }
        pause
    }
}

fn keep(reason: KeepReason, workload: &WorkloadRef, now: TimePoint) -> LookupResult {
    let waits = PendingRelease::of(&reason, workload, now);
    let again = match reason {
        KeepReason::Doubt { why } => return LookupResult::Doubt(why),
        KeepReason::TtlRunning { seconds_left } | KeepReason::OwnerExists { seconds_left, .. } => {
            Some(Duration::from_secs(seconds_left.max(1)).min(MAX_RECHECK))
        }
        // A watch shows when any of these ends.
        KeepReason::Attached | KeepReason::PodExists | KeepReason::Forever | KeepReason::WorkloadWantsIt => {
            None
        }
    };
    LookupResult::Kept { again, waits }
}

async fn look_at_pod(context: &Context, namespace: &str, name: &str) -> PodLookup {
    let pods: Api<Pod> = Api::namespaced(context.writer.client(), namespace);
    let what = format!("get Pod {namespace}/{name}");
    match context.writer.connection().read(&what, || pods.get_metadata_opt(name)).await {
        Ok(Some(_)) => PodLookup::Present,
        Ok(None) => PodLookup::Absent,
        Err(_) => PodLookup::Unknown,
    }
}

async fn released(context: &Context, sticky: &StickyIP, reason: ReleaseReason) {
    let (label, why) = match reason {
        ReleaseReason::WorkloadGone => ("WorkloadGone", "its workload is gone"),
        ReleaseReason::WorkloadReplaced => {
            ("WorkloadReplaced", "another workload has its workload's name now")
        }
        ReleaseReason::ScaledDown => ("ScaledDown", "its workload was scaled down below it"),
        ReleaseReason::TtlOver => ("TtlOver", "its TTL is over"),
    };
    context.metrics.released.inc([label]);
    let addresses = join(&sticky.spec.addresses);
    let WorkloadRef { kind, name: workload, .. } = &sticky.spec.workload;
    let quarantine = &context.settings.quarantine;
    tracing::info!(sticky = %sticky_key_of(sticky), addresses, kind, workload, why, "released an address");
    let message = format!(
        "{addresses} released: {why} ({kind} {workload}); quarantined for {quarantine} before another \
         claimant may have it"
    );
    record_event(context, events::sticky_ip(sticky), "Released", message).await;
}

type SharedLookup = Arc<OnceCell<WorkloadLookup>>;
/// Namespace, workload, what is above it, and whether the look proves.
type LookupKey = (String, WorkloadRef, Vec<WorkloadRef>, bool);

/// One live look per workload and round, however many of its addresses are looked at. First and proving looks
/// are never the same, and one that proves is soon too old.
#[derive(Default)]
struct SharedLookups {
    /// Each with the time at which it began.
    looks: Mutex<BTreeMap<LookupKey, (Duration, SharedLookup)>>,
}

impl SharedLookups {
    fn shared(&self, looking: LookupKey, now: Duration) -> SharedLookup {
        let mut looks = locked(&self.looks);
        let proves = looking.3;
        let (began, look) = looks.entry(looking).or_insert_with(|| (now, SharedLookup::default()));
        if proves && now.saturating_sub(*began) >= PROOF_MAX_AGE {
            (*began, *look) = (now, SharedLookup::default());
        }
        look.clone()
    }
}

impl Duty for Recycle<'_> {
    const NAME: &'static str = "recycling";
    const TRIGGERS: &'static [Kind] = &[Kind::StickyIP, Kind::Pod];

    async fn round(&mut self, context: &Context, due: Vec<Key>) -> RoundResult {
        let (unused, outdated) = {
            let index = context.index();
            self.unattached.update(&index, &due, context.now());
            self.doubts.retain(|name, _| index.stickies.get(name).is_some());
            let is_unattached = |sticky: &StickyIP| attached_pod_uid(sticky).is_none();
            self.absences.retain(|name, _| index.stickies.get(name).is_some_and(is_unattached));
            (releasable(&index, &due), outdated(&index, &due, may_be_released))
        };
        for sticky in &outdated {
            write_conditions(context, sticky, None).await;
        }
        let (this, round) = (&*self, &SharedLookups::default());
        let looks = unused
            .iter()
            .map(|(name, sticky)| async move { (name, sticky, this.look(context, sticky, round).await) });
        let looked: Vec<_> = futures_util::stream::iter(looks).buffer_unordered(CONCURRENCY).collect().await;
        let mut done = RoundResult::default();
        for (name, sticky, looked) in looked {
            let key = Key::new(Kind::StickyIP, name.clone());
            if !matches!(looked, LookupResult::Doubt(_)) {
                self.doubts.remove(name);
            }
            match looked {
                LookupResult::Doubt(why) => {
                    self.absences.remove(name);
                    done.retry(key, self.lookup_failed(context, sticky, &why).await);
                }
                LookupResult::First(absence) => {
                    let since = context.now().seconds_since(absence.first_look);
                    self.absences.insert(name.clone(), absence);
                    let left = self.proof.gap_seconds.saturating_sub(since);
                    done.again.push((key, Duration::from_secs(left)));
                }
                LookupResult::Kept { again, waits } => {
                    self.absences.remove(name);
                    write_conditions(context, sticky, waits.as_ref()).await;
                    done.again.extend(again.map(|after| (key, after)));
                }
                LookupResult::Over => drop(self.absences.remove(name)),
                LookupResult::Failed => done.retry(key, Duration::from_secs(1)),
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::index::fixture::{pod, sticky};
    use crate::runtime::cache::CacheEvent;

    fn names(index: &ClusterIndex, due: &[Key]) -> Vec<String> {
        releasable(index, due).into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn only_released_addresses_are_checked() {
        let mut index = ClusterIndex::default();
        index.stickies.apply(CacheEvent::Applied(sticky("free", "10.0.0.1", None)));
        index.stickies.apply(CacheEvent::Applied(sticky("held", "10.0.0.2", Some("n1"))));
        let (name, mut forever) = sticky("forever", "10.0.0.3", None);
        forever.spec.retention.keep = Keep::Forever;
        index.stickies.apply(CacheEvent::Applied((name, forever)));
        let all = ["db/free", "db/held", "db/forever", "db/unknown"];
        let due: Vec<Key> = all.iter().map(|name| Key::new(Kind::StickyIP, *name)).collect();
        assert_eq!(names(&index, &due), ["db/free"]);
        index.apply_pod(CacheEvent::Applied(pod("free", "10.0.0.1", None)));
        assert!(names(&index, &due).is_empty(), "its pod is there");
        index.apply_pod(CacheEvent::Deleted("db/free".into()));
        assert_eq!(
            names(&index, &[Key::new(Kind::Pod, "db/free")]),
            ["db/free"],
            "the end of its pod wakes it"
        );
    }

    #[test]
    fn an_address_counts_as_left_from_when_it_was_seen_whatever_its_nodes_clock_says() {
        let (mut index, mut unattached) = (ClusterIndex::default(), Unattached::default());
        let written = |name: &str, node: Option<&str>| {
            let (name, mut sticky) = sticky(name, "10.0.0.1", node);
            let status = sticky.status.get_or_insert_default();
            // Two hours behind.
            status.last_seen =
                Some(serde_json::from_value(serde_json::json!("1970-01-01T00:00:00Z")).unwrap());
            CacheEvent::Applied((name, sticky))
        };
        let due = |name: &str| [Key::new(Kind::StickyIP, format!("db/{name}"))];
        let since = |index: &ClusterIndex, unattached: &Unattached, name: &str| {
            let name = format!("db/{name}");
            kept(index.stickies.get(&name).unwrap(), unattached.since(&name)).last_seen
        };
        index.stickies.apply(written("old", None));
        index.stickies.apply(written("new", Some("n1")));
        unattached.update(&index, &[due("old"), due("new")].concat(), TimePoint(7_200));
        assert_eq!(
            since(&index, &unattached, "old"),
            Some(TimePoint(0)),
            "no controller saw when it was left"
        );
        index.stickies.apply(written("new", None));
        unattached.update(&index, &due("new"), TimePoint(7_300));
        unattached.update(&index, &due("new"), TimePoint(7_400));
        assert_eq!(since(&index, &unattached, "new"), Some(TimePoint(7_300)));
        index.stickies.apply(written("new", Some("n1")));
        unattached.update(&index, &due("new"), TimePoint(7_500));
        index.stickies.apply(written("new", None));
        unattached.update(&index, &due("new"), TimePoint(7_600));
        assert_eq!(since(&index, &unattached, "new"), Some(TimePoint(7_600)));
    }

    #[test]
    fn a_check_that_proves_is_never_the_first_one_and_not_old() {
        let round = SharedLookups::default();
        let look = |namespace: &str, proves, milliseconds| {
            let looking = (namespace.to_owned(), WorkloadRef::default(), Vec::new(), proves);
            round.shared(looking, Duration::from_millis(milliseconds))
        };
        let first = look("db", false, 0);
        assert!(Arc::ptr_eq(&first, &look("db", false, 5_000)));
        let proof = look("db", true, 0);
        assert!(!Arc::ptr_eq(&first, &proof) && Arc::ptr_eq(&proof, &look("db", true, 99)));
        let later = look("db", true, 100);
        assert!(!Arc::ptr_eq(&proof, &later) && Arc::ptr_eq(&later, &look("db", true, 199)));
        assert!(!Arc::ptr_eq(&later, &look("other", true, 199)));
    }
}
