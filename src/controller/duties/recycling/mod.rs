//! Letting go of addresses whose workload is gone. The proof is `policy::recycle`'s: two live looks, far enough apart, with the
//! StickyIP unchanged. Must never let go on one look, on the index alone, or faster than the operator allows.

pub mod conditions;
pub mod owners;
pub mod workloads;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;
use tokio::sync::OnceCell;

use crate::cluster::api::events;
use crate::cluster::api::events::Told;
use crate::cluster::objects::sticky_ip::KEPT_IN_DOUBT;
use crate::cluster::objects::{ClaimantKind, StickyIP, WorkloadRef};
use crate::cluster::protocol::apply::Carried;
use crate::cluster::protocol::write::{Unchanged, Write};
use crate::controller::context::{Done, Duty, World, keep_from};
use crate::controller::flags::Settings;
use crate::controller::index::{Index, Kind, attached_uid, key_of};
use crate::controller::metrics::Metrics;
use crate::controller::queue::{Bucket, Key};
use crate::policy::lifetime::recycle::{
    Absence, KeepReason, Kept, PodLook, Proof, Recycle as Decision, ReleaseReason, WorkloadLook, decide,
};
use crate::policy::lifetime::retention::Keep;
use crate::policy::selection::facts::Moment;
use conditions::{Waits, settle, stale};
use owners::{Owners, may_come_again};
use workloads::{Inboxes, Workloads};

/// How many are looked at side by side: the API server answers in milliseconds, and each takes a few requests. More than the
/// repair and the events that follow have: what is let go in numbers is let go first.
const SIDE_BY_SIDE: usize = 32;
/// For how long one look at a workload is the proof for its other addresses too: less than a look may take to come back.
const PROOF_AGE: Duration = Duration::from_millis(100);
/// The longest time to the next look after looks that failed; it doubles from a second on.
const LONGEST_DOUBT: Duration = Duration::from_secs(600);
/// A doubt is told after so many: a server that was away for a moment is no news.
const DOUBTS_TOLD: u32 = 3;
/// The longest time to the next look at an address whose time runs.
const LONGEST_SLEEP: Duration = Duration::from_secs(3600);
/// While pods of a workload that is gone are still there.
const WHILE_PODS_REMAIN: Duration = Duration::from_secs(5);

/// The duty's memory: first looks. Lost with the process at no harm, the proof begins anew.
pub struct Recycle<'a> {
    workloads: &'a Workloads,
    proof: Proof,
    unattached: Unattached,
    absences: BTreeMap<String, Absence>,
    doubts: BTreeMap<String, u32>,
    bucket: Mutex<Bucket>,
}

/// Runs the duty, and the watches of workloads that wake it.
pub async fn keep_recycling(world: &World) {
    let workloads = Workloads::default();
    let (inbox, owners_inbox) = (world.inbox(Recycle::WAKES), world.inbox(Owners::WAKES));
    let duty = Recycle::new(&world.settings, &workloads);
    let inboxes = Inboxes { recycle: &inbox, owners: &owners_inbox };
    let owners = Owners::new(&workloads);
    tokio::join!(
        workloads.watch(world, inboxes),
        keep_from(duty, world, &inbox),
        keep_from(owners, world, &owners_inbox)
    );
}

/// The StickyIPs among what is due that may be let go, as the index has them.
fn suspects(index: &Index, due: &[Key]) -> Vec<(String, StickyIP)> {
    let named = due.iter().filter_map(|key| match key.kind {
        Kind::StickyIP => Some(key.name.clone()),
        // The end of a pod whose StickyIP bears its name.
        Kind::Pod if index.pods.get(&key.name).is_none() => Some(key.name.clone()),
        _ => None,
    });
    let mut names: Vec<String> = named.collect();
    names.sort();
    names.dedup();
    let of = |name: String| index.stickies.get(&name).map(|sticky| (name, sticky.clone()));
    names.into_iter().filter_map(of).filter(|(name, sticky)| is_suspect(index, name, sticky)).collect()
}

fn is_suspect(index: &Index, name: &str, sticky: &StickyIP) -> bool {
    attached_uid(sticky).is_none()
        && sticky.metadata.deletion_timestamp.is_none()
        && sticky.spec.retention.keep != Keep::Forever
        // Its pod is there: nothing to look at until that is gone.
        && !(sticky.spec.claimant.kind == ClaimantKind::Pod && index.pods.is_there(name))
}

/// `left` is when this process saw its pod let go of it.
fn kept(sticky: &StickyIP, left: Option<Moment>) -> Kept {
    let status = sticky.status.as_ref();
    Kept {
        uid: sticky.metadata.uid.clone().unwrap_or_default(),
        resource_version: sticky.metadata.resource_version.clone().unwrap_or_default(),
        attached: attached_uid(sticky).is_some(),
        workload_uid: sticky.spec.workload.uid.clone(),
        ordinal: sticky.spec.claimant.ordinal,
        retention: sticky.spec.retention,
        last_seen: left.or_else(|| {
            status
                .and_then(|status| status.last_seen.as_ref())
                // One that was never attached counts from its making.
                .or(sticky.metadata.creation_timestamp.as_ref())
                .map(|time| Moment(time.0.as_second()))
        }),
    }
}

/// The StickyIPs that nobody has, each with the time at which this process saw that begin. A time that a node has written is by that
/// node's clock, which may be wrong by hours: it counts only where nobody looked.
#[derive(Debug, Default)]
struct Unattached {
    since: BTreeMap<String, Option<Moment>>,
    looked: bool,
}

impl Unattached {
    fn look(&mut self, index: &Index, due: &[Key], now: Moment) {
        for key in due.iter().filter(|key| key.kind == Kind::StickyIP) {
            match index.stickies.get(&key.name) {
                Some(sticky) if attached_uid(sticky).is_none() => {
                    // What is so at the first look may have been so for long.
                    let began = self.looked.then_some(now);
                    self.since.entry(key.name.clone()).or_insert(began);
                }
                _ => drop(self.since.remove(&key.name)),
            }
        }
        self.looked = true;
    }

    fn left(&self, name: &str) -> Option<Moment> {
        self.since.get(name).copied().flatten()
    }
}

/// What came of one look.
enum Looked {
    Kept { again: Option<Duration>, waits: Option<Waits> },
    Doubt(String),
    First(Absence),
    Overtaken,
    Released,
    Failed,
}

impl<'a> Recycle<'a> {
    /// A duty that has seen nothing yet.
    #[must_use]
    pub fn new(settings: &Settings, workloads: &'a Workloads) -> Self {
        Self {
            workloads,
            proof: settings.proof(),
            unattached: Unattached::default(),
            absences: BTreeMap::new(),
            doubts: BTreeMap::new(),
            bucket: Mutex::new(Bucket::new(settings.recycle_rate, settings.recycle_rate.div_ceil(10))),
        }
    }

    /// Waits for a token; how many wait is shown.
    async fn token(&self, world: &World) {
        let waiting = &world.metrics.recycle_waiting;
        waiting.inc();
        loop {
            let taken = self.bucket.lock().unwrap_or_else(PoisonError::into_inner).take(world.elapsed());
            match taken {
                Ok(()) => break,
                Err(pause) => tokio::time::sleep(pause).await,
            }
        }
        waiting.dec();
    }

    async fn look(&self, world: &World, name: &str, sticky: &StickyIP, round: &Round) -> Looked {
        let kept = kept(sticky, self.unattached.left(name));
        let before = self.absences.get(name);
        let proves = before.is_some_and(|absence| {
            absence.resource_version == kept.resource_version
                && world.now().seconds_since(absence.first_look) >= self.proof.gap_seconds
        });
        if proves {
            // Before the look, so that nothing has to wait between the proof and the deed.
            self.token(world).await;
        }
        // Not while it waits for a token: a slow rate would put everything else off for as long.
        let _hurry = world.hurry();
        let key = key_of(sticky);
        let workload = round.look(self, world, &key.namespace, sticky, proves).await;
        self.workloads.keep_an_eye_on(&sticky.spec.workload);
        // They are being collected, or were orphaned.
        if workload == WorkloadLook::Absent
            && world.index().has_pods_of(&key.namespace, &sticky.spec.workload)
        {
            return Looked::Kept { again: Some(WHILE_PODS_REMAIN), waits: None };
        }
        let pod = match sticky.spec.claimant.kind {
            // The first look proves nothing, and the watch has told that the pod is gone.
            _ if !proves => PodLook::Absent,
            ClaimantKind::Pod => look_at_pod(world, &key.namespace, &key.name).await,
            // A slot or a machine is not of one pod: whoever has it is attached to it.
            ClaimantKind::Slot | ClaimantKind::VirtualMachine => PodLook::Absent,
        };
        match decide(&kept, &workload, pod, before, world.now(), self.proof) {
            Decision::Keep(reason) => keep(reason, &sticky.spec.workload, world.now()),
            Decision::LookAgain(absence) => Looked::First(absence),
            // The time came while it looked, by a look that proves nothing.
            Decision::Release { .. } if !proves => {
                before.map_or(Looked::Failed, |absence| Looked::First(absence.clone()))
            }
            Decision::Release { uid, resource_version, reason } => {
                let write = Write::DeleteSticky { key, at: Unchanged { uid, resource_version } };
                match world.hands.carrier().carry(&write, None, "").await {
                    Ok(Carried::Deleted) => {
                        released(world, sticky, reason).await;
                        Looked::Released
                    }
                    Ok(_) => Looked::Overtaken,
                    Err(error) => {
                        tracing::warn!(sticky = name, %error, "cannot let go; trying again");
                        Looked::Failed
                    }
                }
            }
        }
    }

    /// How long to wait after another look that failed; the doubt is told if it stays.
    async fn doubt(&mut self, world: &World, name: &str, sticky: &StickyIP, why: &str) -> Duration {
        let times = self.doubts.entry(name.to_owned()).or_default();
        *times = times.saturating_add(1);
        let pause = Duration::from_secs(1u64 << (*times - 1).min(10)).min(LONGEST_DOUBT);
        tracing::warn!(sticky = name, why, "in doubt whether an address may be let go; keeping it");
        if *times >= DOUBTS_TOLD {
            let message = format!("the address is kept, because its workload cannot be looked at: {why}");
            let about = events::sticky_ip(sticky);
            world.tell(Told { about, reason: KEPT_IN_DOUBT, message, warning: true }).await;
            settle(world, sticky, Some(&Waits::Doubt { why: why.to_owned() })).await;
        }
        pause
    }
}

fn keep(reason: KeepReason, workload: &WorkloadRef, now: Moment) -> Looked {
    let waits = Waits::of(&reason, workload, now);
    match reason {
        KeepReason::TtlRunning { seconds_left } | KeepReason::OwnerLives { seconds_left, .. } => {
            Looked::Kept { again: Some(Duration::from_secs(seconds_left.max(1)).min(LONGEST_SLEEP)), waits }
        }
        KeepReason::Doubt { why } => Looked::Doubt(why),
        // A watch tells when any of these ends.
        KeepReason::Attached | KeepReason::PodExists | KeepReason::Forever | KeepReason::WorkloadWantsIt => {
            Looked::Kept { again: None, waits }
        }
    }
}

async fn look_at_pod(world: &World, namespace: &str, name: &str) -> PodLook {
    let pods: Api<Pod> = Api::namespaced(world.hands.client(), namespace);
    let what = format!("get Pod {namespace}/{name}");
    match world.hands.connection().read(&what, || pods.get_metadata_opt(name)).await {
        Ok(Some(_)) => PodLook::Present,
        Ok(None) => PodLook::Absent,
        Err(_) => PodLook::Unknown,
    }
}

async fn released(world: &World, sticky: &StickyIP, reason: ReleaseReason) {
    let (word, why) = match reason {
        ReleaseReason::WorkloadGone => ("WorkloadGone", "its workload is gone"),
        ReleaseReason::WorkloadReplaced => {
            ("WorkloadReplaced", "another workload has taken its workload's name")
        }
        ReleaseReason::ScaledDown => ("ScaledDown", "its workload was scaled below it"),
        ReleaseReason::TtlOver => ("TtlOver", "its time is over"),
    };
    Metrics::count(&world.metrics.recycled, word);
    let addresses: Vec<String> = sticky.spec.addresses.iter().map(ToString::to_string).collect();
    let (addresses, workload) = (addresses.join(", "), &sticky.spec.workload);
    tracing::info!(sticky = %key_of(sticky), addresses, kind = workload.kind, workload = workload.name, why, "let go");
    world
        .tell(Told {
            about: events::sticky_ip(sticky),
            reason: "Released",
            message: format!(
                "{addresses} let go: {why} ({} {}); it rests for {} before another may have it",
                workload.kind, workload.name, world.settings.quarantine
            ),
            warning: false,
        })
        .await;
}

type SharedLook = Arc<OnceCell<WorkloadLook>>;
/// Namespace, workload, what is above it, and whether the look proves.
type Looking = (String, WorkloadRef, Vec<WorkloadRef>, bool);

/// One live look a workload and round, however many of its addresses are looked at. First and proving looks are never the
/// same, and one that proves is soon too old.
#[derive(Default)]
struct Round {
    /// Each with the time at which it began.
    looks: Mutex<BTreeMap<Looking, (Duration, SharedLook)>>,
}

impl Round {
    async fn look(
        &self,
        duty: &Recycle<'_>,
        world: &World,
        namespace: &str,
        sticky: &StickyIP,
        proves: bool,
    ) -> WorkloadLook {
        let workload = &sticky.spec.workload;
        // Nobody comes again for another name, whoever lives.
        let kept_for = duty.proof.owner_grace_seconds > 0 && may_come_again(sticky);
        let owners = if kept_for { sticky.spec.owners.as_slice() } else { &[] };
        let looking = (namespace.to_owned(), workload.clone(), owners.to_vec(), proves);
        let shared = self.shared(looking, world.elapsed());
        let look = || duty.workloads.look_up(world, namespace, workload, owners, duty.proof.inherit);
        shared.get_or_init(look).await.clone()
    }

    /// The look to share at this time since the start.
    fn shared(&self, looking: Looking, now: Duration) -> SharedLook {
        let mut looks = self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        let proves = looking.3;
        let (began, look) = looks.entry(looking).or_insert_with(|| (now, SharedLook::default()));
        if proves && now.saturating_sub(*began) >= PROOF_AGE {
            (*began, *look) = (now, SharedLook::default());
        }
        look.clone()
    }
}

impl Duty for Recycle<'_> {
    const NAME: &'static str = "recycle";
    const WAKES: &'static [Kind] = &[Kind::StickyIP, Kind::Pod];

    async fn round(&mut self, world: &World, due: Vec<Key>) -> Done {
        let (suspects, settled) = {
            let index = world.index();
            self.unattached.look(&index, &due, world.now());
            self.doubts.retain(|name, _| index.stickies.get(name).is_some());
            self.absences.retain(|name, _| {
                index.stickies.get(name).is_some_and(|sticky| attached_uid(sticky).is_none())
            });
            (suspects(&index, &due), stale(&index, &due, is_suspect))
        };
        for sticky in &settled {
            settle(world, sticky, None).await;
        }
        let mut done = Done::default();
        let round = Round::default();
        let this = &*self;
        let (round, world) = (&round, world);
        let looks = suspects
            .iter()
            .map(|(name, sticky)| async move { (name, sticky, this.look(world, name, sticky, round).await) });
        let looked: Vec<_> = futures_util::stream::iter(looks).buffer_unordered(SIDE_BY_SIDE).collect().await;
        let gap = Duration::from_secs(self.proof.gap_seconds);
        for (name, sticky, looked) in looked {
            let key = Key::new(Kind::StickyIP, name.clone());
            if !matches!(looked, Looked::Doubt(_)) {
                self.doubts.remove(name);
            }
            match looked {
                Looked::Doubt(why) => {
                    self.absences.remove(name);
                    done.failures += 1;
                    let pause = self.doubt(world, name, sticky, &why).await;
                    done.again.push((key, pause));
                }
                Looked::First(absence) => {
                    let again = gap
                        .saturating_sub(Duration::from_secs(world.now().seconds_since(absence.first_look)));
                    self.absences.insert(name.clone(), absence);
                    done.again.push((key, again));
                }
                Looked::Kept { again, waits } => {
                    self.absences.remove(name);
                    settle(world, sticky, waits.as_ref()).await;
                    done.again.extend(again.map(|after| (key, after)));
                }
                // Somebody wrote it: the watch tells of that.
                Looked::Overtaken => {
                    self.absences.remove(name);
                }
                Looked::Released => {
                    self.absences.remove(name);
                }
                Looked::Failed => {
                    done.failures += 1;
                    done.again.push((key, Duration::from_secs(1)));
                }
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::index::fixture::{pod, sticky};
    use crate::runtime::cache::Told as Event;

    fn names(index: &Index, due: &[Key]) -> Vec<String> {
        suspects(index, due).into_iter().map(|(name, _)| name).collect()
    }

    #[test]
    fn only_what_nobody_holds_is_looked_at() {
        let mut index = Index::default();
        index.stickies.take(Event::Here(sticky("free", "10.0.0.1", None)));
        index.stickies.take(Event::Here(sticky("held", "10.0.0.2", Some("n1"))));
        let (name, mut forever) = sticky("forever", "10.0.0.3", None);
        forever.spec.retention.keep = Keep::Forever;
        index.stickies.take(Event::Here((name, forever)));
        let all = ["db/free", "db/held", "db/forever", "db/unknown"];
        let due: Vec<Key> = all.iter().map(|name| Key::new(Kind::StickyIP, *name)).collect();
        assert_eq!(names(&index, &due), ["db/free"]);
        index.take_pod(Event::Here(pod("free", "10.0.0.1", None)));
        assert!(names(&index, &due).is_empty(), "its pod is there");
        index.take_pod(Event::Gone("db/free".into()));
        assert_eq!(
            names(&index, &[Key::new(Kind::Pod, "db/free")]),
            ["db/free"],
            "the end of its pod wakes it"
        );
    }

    #[test]
    fn an_address_that_was_seen_to_be_left_counts_from_then_whatever_its_node_takes_for_the_time() {
        let (mut index, mut unattached) = (Index::default(), Unattached::default());
        let written = |name: &str, node: Option<&str>| {
            let (name, mut sticky) = sticky(name, "10.0.0.1", node);
            let status = sticky.status.get_or_insert_default();
            // Two hours behind.
            status.last_seen =
                Some(serde_json::from_value(serde_json::json!("1970-01-01T00:00:00Z")).unwrap());
            Event::Here((name, sticky))
        };
        let due = |name: &str| [Key::new(Kind::StickyIP, format!("db/{name}"))];
        let since = |index: &Index, unattached: &Unattached, name: &str| {
            let name = format!("db/{name}");
            kept(index.stickies.get(&name).unwrap(), unattached.left(&name)).last_seen
        };
        index.stickies.take(written("old", None));
        index.stickies.take(written("new", Some("n1")));
        unattached.look(&index, &[due("old"), due("new")].concat(), Moment(7_200));
        assert_eq!(since(&index, &unattached, "old"), Some(Moment(0)), "nobody saw when it was left");
        index.stickies.take(written("new", None));
        unattached.look(&index, &due("new"), Moment(7_300));
        unattached.look(&index, &due("new"), Moment(7_400));
        assert_eq!(since(&index, &unattached, "new"), Some(Moment(7_300)));
        index.stickies.take(written("new", Some("n1")));
        unattached.look(&index, &due("new"), Moment(7_500));
        index.stickies.take(written("new", None));
        unattached.look(&index, &due("new"), Moment(7_600));
        assert_eq!(since(&index, &unattached, "new"), Some(Moment(7_600)));
    }

    #[test]
    fn a_look_that_proves_is_never_the_first_one_and_not_old() {
        let round = Round::default();
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
