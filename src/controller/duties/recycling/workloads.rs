//! Workloads of any kind and their owners, found by discovery: live lookups, and a watch of their kinds'
//! metadata, which shows their end and their owners.
//!
//! Must never take a kind that the server does not serve, or an answer that does not name the object, for its
//! absence.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Mutex;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use kube::api::{Api, DynamicObject};
use kube::core::PartialObjectMeta;
use kube::discovery::{ApiResource, Scope};
use kube::runtime::watcher;
use serde_json::Value;
use thiserror::Error;
use tokio::sync::Notify;

use crate::cluster::objects::{StickyIP, WorkloadRef};
use crate::cluster::pod;
use crate::controller::queue::{Inbox, Key};
use crate::controller::{context::Context, index::Kind};
use crate::policy::lifetime::owners::{OwnerLookup, above};
use crate::policy::lifetime::recycle::WorkloadLookup;
use crate::policy::selection::facts::Owner;
use crate::runtime::cache::Cache;
use crate::runtime::locked;
use crate::runtime::watch::{WatchProblem, feed, watch};

/// After how long a kind that the server did not know is asked for again; it doubles up to the longest. Its
/// definition may be installed later. That becomes one discovery per ten minutes.
const REDISCOVER_AFTER: Duration = Duration::from_secs(1);
const MAX_REDISCOVER_AFTER: Duration = Duration::from_secs(600);
/// For a discovery: without an end one hung server would keep every address that waits for its look.
const DISCOVERY_TIMEOUT: Duration = Duration::from_secs(15);

/// Group and kind: versions come and go.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct GroupKind {
    group: String,
    kind: String,
}

impl fmt::Display for GroupKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let group = if self.group.is_empty() { "the core group" } else { &self.group };
        write!(f, "{} of {group}", self.kind)
    }
}

impl GroupKind {
    fn of(workload: &WorkloadRef) -> Self {
        let group = workload.api_version.split_once('/').map_or("", |(group, _)| group);
        Self { group: group.to_owned(), kind: workload.kind.clone() }
    }

    fn of_owner(owner: &Owner) -> Self {
        Self { group: owner.group().to_owned(), kind: owner.kind.clone() }
    }

    /// What is of this kind: the workload of a StickyIP, and what made that.
    fn objects<'a>(&self, sticky: &'a StickyIP) -> impl Iterator<Item = &'a WorkloadRef> {
        let all = std::iter::once(&sticky.spec.workload).chain(&sticky.spec.owners);
        all.filter(|object| Self::of(object) == *self)
    }

    /// Pods and Nodes are watched anyway, and nothing above them counts.
    fn is_watched_elsewhere(&self) -> bool {
        self.group.is_empty() && (self.kind == "Pod" || self.kind == "Node")
    }
}

#[derive(Debug, Clone)]
struct ServedKind {
    resource: ApiResource,
    namespaced: bool,
}

/// What a watch shows of one object: its uid, its generation (another one means another spec), and its owner.
#[derive(Debug, Clone, PartialEq, Eq)]
struct WorkloadMeta {
    uid: String,
    generation: Option<i64>,
    owner: Option<Owner>,
}

impl From<PartialObjectMeta<DynamicObject>> for WorkloadMeta {
    fn from(object: PartialObjectMeta<DynamicObject>) -> Self {
        Self {
            owner: pod::controlling_owner(&object.metadata),
            generation: object.metadata.generation,
            uid: object.metadata.uid.unwrap_or_default(),
        }
    }
}

#[derive(Default)]
struct KindCache {
    known: Cache<WorkloadMeta>,
    hidden: bool,
}

/// Why it is not known where a kind is served.
#[derive(Debug, Error)]
enum DiscoveryError {
    #[error(
        "the API server serves no kind {0}; install its CustomResourceDefinition, or delete the StickyIP"
    )]
    Unknown(GroupKind),
    /// The server did not say.
    #[error("cannot discover the kinds of {group}: {why}")]
    Failed { group: String, why: String },
}

/// Kinds that the server did not know, each with the time at which it is asked for again, and how long was
/// waited for that. The caller passes the time in.
#[derive(Default)]
struct UnknownKinds(BTreeMap<GroupKind, (Duration, Duration)>);

impl UnknownKinds {
    fn put_off(&mut self, kind: &GroupKind, now: Duration) {
        let pause =
            self.0.get(kind).map_or(REDISCOVER_AFTER, |(_, before)| (*before * 2).min(MAX_REDISCOVER_AFTER));
        self.0.insert(kind.clone(), (now + pause, pause));
    }

    fn next(&self) -> Option<(GroupKind, Duration)> {
        self.0.iter().min_by_key(|(_, (at, _))| *at).map(|(kind, (at, _))| (kind.clone(), *at))
    }
}

/// What is known of kinds, and which are watched.
#[derive(Default)]
pub struct Workloads {
    served: Mutex<BTreeMap<GroupKind, ServedKind>>,
    unknown: Mutex<UnknownKinds>,
    another_unknown: Notify,
    seen: Mutex<BTreeMap<GroupKind, KindCache>>,
    watched: Mutex<BTreeSet<GroupKind>>,
    to_watch: Mutex<Vec<(GroupKind, ServedKind)>>,
    another_to_watch: Notify,
}

impl Workloads {
    /// A live look at a workload, and if it is gone at its owners, nearest first. With `inherit` one of the
    /// same name counts for an owner.
    pub(crate) async fn look_up(
        &self,
        context: &Context,
        namespace: &str,
        workload: &WorkloadRef,
        owners: &[WorkloadRef],
        inherit: bool,
    ) -> WorkloadLookup {
        let look = self.look(context, namespace, workload).await;
        if look != WorkloadLookup::Absent {
            return look;
        }
        for owner in owners {
            match self.look(context, namespace, owner).await {
                WorkloadLookup::Present { uid, .. } if inherit || uid == owner.uid => {
                    return WorkloadLookup::Owned { by: format!("{} {}", owner.kind, owner.name) };
                }
                WorkloadLookup::Unknown { why } => return WorkloadLookup::OwnerUnknown { why },
                _ => {}
            }
        }
        WorkloadLookup::Absent
    }

    async fn look(&self, context: &Context, namespace: &str, workload: &WorkloadRef) -> WorkloadLookup {
        let kind = GroupKind::of(workload);
        let served = match self.served(context, &kind).await {
            Ok(served) => served,
            Err(error) => return WorkloadLookup::Unknown { why: error.to_string() },
        };
        let client = context.writer.client();
        let api: Api<DynamicObject> = if served.namespaced {
            Api::namespaced_with(client, namespace, &served.resource)
        } else {
            Api::all_with(client, &served.resource)
        };
        let what = format!("get {} {namespace}/{}", workload.kind, workload.name);
        match context.writer.connection().read(&what, || api.get(&workload.name)).await {
            Ok(object) => WorkloadLookup::Present {
                ordinals: ordinals(&object.data),
                uid: object.metadata.uid.unwrap_or_default(),
            },
            Err(error) if error.says_gone(&workload.name) => WorkloadLookup::Absent,
            Err(error) => {
                // The kind may be served elsewhere by now.
                locked(&self.served).remove(&kind);
                WorkloadLookup::Unknown { why: error.to_string() }
            }
        }
    }

    /// Where a kind is served, by discovery; asked once, and again after a look went wrong. One that the
    /// server did not know is not asked for here again: see [`Workloads::rediscover`].
    async fn served(&self, context: &Context, kind: &GroupKind) -> Result<ServedKind, DiscoveryError> {
        if let Some(served) = locked(&self.served).get(kind) {
            return Ok(served.clone());
        }
        if locked(&self.unknown).0.contains_key(kind) {
            return Err(DiscoveryError::Unknown(kind.clone()));
        }
        let discovered = self.discover(context, kind).await;
        if matches!(discovered, Err(DiscoveryError::Unknown(_))) {
            locked(&self.unknown).put_off(kind, context.elapsed());
            self.another_unknown.notify_one();
        }
        discovered
    }

    async fn discover(&self, context: &Context, kind: &GroupKind) -> Result<ServedKind, DiscoveryError> {
        let client = context.writer.client();
        let unknown = || DiscoveryError::Unknown(kind.clone());
        let failed = |why| DiscoveryError::Failed { group: kind.group.clone(), why };
        let late = |_| failed(format!("no answer within {} s", DISCOVERY_TIMEOUT.as_secs()));
        let asked = tokio::time::timeout(DISCOVERY_TIMEOUT, kube::discovery::group(&client, &kind.group));
        let group = asked.await.map_err(late)?.map_err(|error| match error {
            kube::Error::Discovery(_) => unknown(),
            kube::Error::Api(status) if status.code == 404 => unknown(),
            other => failed(other.to_string()),
        })?;
        let found = group.recommended_kind(&kind.kind).ok_or_else(unknown)?;
        let served = ServedKind { resource: found.0, namespaced: found.1.scope == Scope::Namespaced };
        locked(&self.served).insert(kind.clone(), served.clone());
        Ok(served)
    }

    /// Has the workload's kind watched from now on, so that its end is seen without asking.
    pub(crate) fn watch_kind_of(&self, workload: &WorkloadRef) {
        let kind = GroupKind::of(workload);
        let served = locked(&self.served).get(&kind).cloned();
        if let Some(served) = served {
            self.watch_once(kind, served);
        }
    }

    fn watch_once(&self, kind: GroupKind, served: ServedKind) {
        if !kind.is_watched_elsewhere() && locked(&self.watched).insert(kind.clone()) {
            locked(&self.to_watch).push((kind, served));
            self.another_to_watch.notify_one();
        }
    }

    /// The owners above a workload, as the watches know them; none if the workload is not there.
    /// Errors: the object whose kind is to be watched first.
    pub fn owners(&self, namespace: &str, workload: &Owner) -> Result<Option<Vec<Owner>>, Owner> {
        let seen = locked(&self.seen);
        let mut unlisted = None;
        let chain = above(workload, |asked| {
            let link = link(&seen, namespace, asked);
            if link == OwnerLookup::Unlisted {
                unlisted = Some(asked.clone());
            }
            link
        });
        unlisted.map_or(Ok(chain), Err)
    }

    /// Has the kind of this object watched. False if the server could not be asked.
    pub(crate) async fn start_watching(&self, context: &Context, object: &Owner) -> bool {
        let kind = GroupKind::of_owner(object);
        match self.served(context, &kind).await {
            Ok(served) => self.watch_once(kind, served),
            Err(error @ DiscoveryError::Unknown(_)) => {
                let why = error.to_string();
                tracing::warn!(why, "cannot read an owner's kind; the chain of owners ends there");
                locked(&self.seen).entry(kind).or_default().hidden = true;
            }
            Err(error @ DiscoveryError::Failed { .. }) => {
                tracing::warn!(why = error.to_string(), "cannot read a chain of owners; trying again");
                return false;
            }
        }
        true
    }

    pub(crate) fn is_hidden(&self, object: &Owner) -> bool {
        locked(&self.seen).get(&GroupKind::of_owner(object)).is_some_and(|seen_kind| seen_kind.hidden)
    }

    /// Watches what is asked for, and puts the StickyIPs of what changed into the inboxes. Until dropped.
    pub async fn watch(&self, context: &Context, inboxes: Inboxes<'_>) {
        let mut watches = FuturesUnordered::new();
        let mut rediscovery = std::pin::pin!(self.rediscover(context));
        loop {
            tokio::select! {
                () = &mut rediscovery => return,
                () = self.another_to_watch.notified() => {
                    let asked = std::mem::take(&mut *locked(&self.to_watch));
                    for (kind, served) in asked {
                        watches.push(self.watch_kind(context, inboxes, kind, served));
                    }
                }
                Some(()) = watches.next(), if !watches.is_empty() => {}
            }
        }
    }

    /// Asks for kinds that the server did not know, later and later, for as long as a StickyIP is of one. One
    /// that it knows by now is watched like any other. Until dropped.
    async fn rediscover(&self, context: &Context) {
        loop {
            let next = locked(&self.unknown).next();
            let Some((kind, at)) = next else {
                self.another_unknown.notified().await;
                continue;
            };
            tokio::select! {
                () = tokio::time::sleep(at.saturating_sub(context.elapsed())) => {}
                () = self.another_unknown.notified() => continue,
            }
            if !context.index().stickies.values().any(|sticky| kind.objects(sticky).next().is_some()) {
                // The next StickyIP of this kind asks again.
                locked(&self.unknown).0.remove(&kind);
                locked(&self.seen).remove(&kind);
                continue;
            }
            match self.discover(context, &kind).await {
                Ok(served) => {
                    tracing::info!(%kind, "the API server serves this kind now");
                    locked(&self.unknown).0.remove(&kind);
                    locked(&self.seen).entry(kind.clone()).or_default().hidden = false;
                    self.watch_once(kind, served);
                }
                Err(_) => locked(&self.unknown).put_off(&kind, context.elapsed()),
            }
        }
    }

    /// Only the metadata is watched.
    async fn watch_kind(&self, context: &Context, inboxes: Inboxes<'_>, kind: GroupKind, served: ServedKind) {
        let api: Api<PartialObjectMeta<DynamicObject>> =
            Api::all_with(context.writer.client(), &served.resource);
        // A kind that can be seen now, or not any more, may be a link of any chain.
        let may_be_a_link = |_: &StickyIP| true;
        let on_event = |event| {
            let (changed, first) = {
                let mut seen = locked(&self.seen);
                let seen_kind = seen.entry(kind.clone()).or_default();
                let before = seen_kind.known.is_synced() && !seen_kind.hidden;
                let changed = seen_kind.known.apply(event);
                seen_kind.hidden &= !seen_kind.known.is_synced();
                (changed, !before && seen_kind.known.is_synced())
            };
            if !changed.is_empty() {
                let changed: BTreeSet<String> = changed.into_iter().collect();
                wake(context, &[inboxes.recycle, inboxes.owners], |sticky| {
                    let namespace = sticky.metadata.namespace.as_deref().unwrap_or_default();
                    kind.objects(sticky).any(|object| {
                        changed.contains(&format!("{namespace}/{}", object.name))
                            || changed.contains(&object.name)
                    })
                });
            }
            if first {
                wake(context, &[inboxes.owners], may_be_a_link);
                // One that went after it was looked at and before this list is in no list, and no watch event
                // shows it.
                wake(context, &[inboxes.recycle], |sticky| kind.objects(sticky).next().is_some());
            }
        };
        let mut reported = None;
        let report = |problem: WatchProblem| {
            // The watch retries: one log line per cause is enough.
            let reason = problem.to_string();
            if reported.as_ref() != Some(&reason) {
                let GroupKind { group, kind } = &kind;
                tracing::warn!(group, kind, reason, "cannot watch workloads; trying again");
            }
            reported = Some(reason);
            let hides = matches!(problem, WatchProblem::Forbidden(_) | WatchProblem::UnknownKind(_));
            let was_hidden = hides && {
                let mut seen = locked(&self.seen);
                let seen_kind = seen.entry(kind.clone()).or_default();
                std::mem::replace(&mut seen_kind.hidden, !seen_kind.known.is_synced())
            };
            if hides && !was_hidden {
                wake(context, &[inboxes.owners], may_be_a_link);
            }
        };
        let watched = watch(api, watcher::Config::default(), |object| Ok(WorkloadMeta::from(object)));
        feed(watched, on_event, report).await;
    }
}

#[derive(Clone, Copy)]
pub struct Inboxes<'a> {
    pub recycle: &'a Inbox,
    pub owners: &'a Inbox,
}

fn link(seen: &BTreeMap<GroupKind, KindCache>, namespace: &str, asked: &Owner) -> OwnerLookup {
    let kind = GroupKind::of_owner(asked);
    if kind.is_watched_elsewhere() {
        return OwnerLookup::Hidden;
    }
    let Some(seen_kind) = seen.get(&kind) else { return OwnerLookup::Unlisted };
    let namespaced = seen_kind.known.get(&format!("{namespace}/{}", asked.name));
    match namespaced.or(seen_kind.known.get(&asked.name)) {
        Some(seen) => OwnerLookup::There { uid: seen.uid.clone(), owner: seen.owner.clone() },
        None if seen_kind.hidden => OwnerLookup::Hidden,
        None if seen_kind.known.is_synced() => OwnerLookup::Absent,
        None => OwnerLookup::Unlisted,
    }
}

fn wake(context: &Context, inboxes: &[&Inbox], concerned: impl Fn(&StickyIP) -> bool) {
    let now = context.elapsed();
    for (name, _) in context.index().stickies.iter().filter(|(_, sticky)| concerned(sticky)) {
        for inbox in inboxes {
            inbox.put(Key::new(Kind::StickyIP, name.clone()), now);
        }
    }
}

/// The ordinals or slots that a workload asks for, where it has a number of replicas.
fn ordinals(object: &Value) -> Option<(u32, u32)> {
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
    let count = number(object.pointer("/spec/replicas")?)?;
    Some((object.pointer("/spec/ordinals/start").and_then(number).unwrap_or(0), count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_kind_that_stays_unknown_is_asked_for_ever_more_rarely_and_never_given_up() {
        let (mut unknown, mut now, mut asked) = (UnknownKinds::default(), Duration::ZERO, 0);
        let kind = |kind: &str| GroupKind { group: "test.example".into(), kind: kind.into() };
        unknown.put_off(&kind("Fleet"), now);
        while now < Duration::from_secs(86400) {
            (_, now) = unknown.next().unwrap();
            unknown.put_off(&kind("Fleet"), now);
            asked += 1;
        }
        assert!((144..160).contains(&asked), "{asked} times a day");
        unknown.put_off(&kind("Flotilla"), now);
        assert_eq!(unknown.next(), Some((kind("Flotilla"), now + REDISCOVER_AFTER)), "each has its own time");
    }

    #[test]
    fn replicas_and_their_start_are_read_from_any_kind() {
        assert_eq!(ordinals(&json!({"spec": {"replicas": 3}})), Some((0, 3)));
        assert_eq!(ordinals(&json!({"spec": {"replicas": 3, "ordinals": {"start": 5}}})), Some((5, 3)));
        assert_eq!(ordinals(&json!({"spec": {"replicas": "3"}})), None);
        assert_eq!(ordinals(&json!({"spec": {"selector": {}}})), None);
        assert_eq!(ordinals(&json!({})), None);
    }
}
