//! Workloads of any kind, found by discovery: live looks at one, and a watch of the kinds whose end would free an address.
//!
//! Must never take a kind that the server does not serve, or an answer that does not name the object, for its absence.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use kube::api::{Api, DynamicObject};
use kube::core::PartialObjectMeta;
use kube::discovery::{ApiResource, Scope};
use kube::runtime::watcher;
use serde_json::Value;
use tokio::sync::mpsc;

use super::index::Kind;
use super::queue::Key;
use super::world::{Inbox, World};
use crate::cluster::objects::WorkloadRef;
use crate::policy::recycle::WorkloadLook;
use crate::process::known::Known;
use crate::process::watch::{Trouble, feed_trimmed};

/// Group and kind: versions come and go.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct GroupKind {
    group: String,
    kind: String,
}

impl GroupKind {
    fn of(workload: &WorkloadRef) -> Self {
        let group = workload.api_version.split_once('/').map_or("", |(group, _)| group);
        Self { group: group.to_owned(), kind: workload.kind.clone() }
    }
}

#[derive(Debug, Clone)]
struct Served {
    resource: ApiResource,
    namespaced: bool,
}

/// What is known of kinds, and which are watched.
pub struct Workloads {
    served: Mutex<BTreeMap<GroupKind, Served>>,
    watched: Mutex<BTreeSet<GroupKind>>,
    to_watch: mpsc::UnboundedSender<(GroupKind, Served)>,
    asked: Mutex<Option<mpsc::UnboundedReceiver<(GroupKind, Served)>>>,
}

impl Default for Workloads {
    fn default() -> Self {
        let (to_watch, asked) = mpsc::unbounded_channel();
        Self { served: Mutex::default(), watched: Mutex::default(), to_watch, asked: Mutex::new(Some(asked)) }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Workloads {
    /// A live look.
    pub async fn look(&self, world: &World, namespace: &str, workload: &WorkloadRef) -> WorkloadLook {
        match self.try_look(world, namespace, workload).await {
            Ok(look) => look,
            Err(why) => WorkloadLook::Unknown { why },
        }
    }

    async fn try_look(
        &self,
        world: &World,
        namespace: &str,
        workload: &WorkloadRef,
    ) -> Result<WorkloadLook, String> {
        let kind = GroupKind::of(workload);
        let served = self.served(world, &kind).await?;
        let client = world.hands.client();
        let api: Api<DynamicObject> = if served.namespaced {
            Api::namespaced_with(client, namespace, &served.resource)
        } else {
            Api::all_with(client, &served.resource)
        };
        let what = format!("get {} {namespace}/{}", workload.kind, workload.name);
        match world.hands.connection().read(&what, || api.get(&workload.name)).await {
            Ok(object) => Ok(WorkloadLook::Present {
                uid: object.metadata.uid.clone().unwrap_or_default(),
                ordinals: ordinals(&object.data),
            }),
            Err(error) if error.says_gone(&workload.name) => Ok(WorkloadLook::Absent),
            Err(error) => {
                // The kind may be served elsewhere by now.
                locked(&self.served).remove(&kind);
                Err(error.to_string())
            }
        }
    }

    /// Where a kind is served, by discovery; asked once, and again after a look went wrong.
    async fn served(&self, world: &World, kind: &GroupKind) -> Result<Served, String> {
        if let Some(served) = locked(&self.served).get(kind) {
            return Ok(served.clone());
        }
        let client = world.hands.client();
        let unknown = || {
            let of = if kind.group.is_empty() { "the core group" } else { &kind.group };
            format!(
                "the API server knows no kind {} of {of}; install its definition, or release the address by hand",
                kind.kind
            )
        };
        let group = kube::discovery::group(&client, &kind.group).await.map_err(|error| match error {
            kube::Error::Discovery(_) => unknown(),
            kube::Error::Api(status) if status.code == 404 => unknown(),
            other => format!("cannot discover the kinds of {}: {other}", kind.group),
        })?;
        let found = group.recommended_kind(&kind.kind).ok_or_else(unknown)?;
        let served = Served { resource: found.0, namespaced: found.1.scope == Scope::Namespaced };
        locked(&self.served).insert(kind.clone(), served.clone());
        Ok(served)
    }

    /// Has the workload's kind watched from now on, so that its end is seen without asking.
    pub fn keep_an_eye_on(&self, workload: &WorkloadRef) {
        let kind = GroupKind::of(workload);
        // Pods are watched anyway.
        if kind.group.is_empty() && kind.kind == "Pod" {
            return;
        }
        let served = locked(&self.served).get(&kind).cloned();
        if let Some(served) = served
            && locked(&self.watched).insert(kind.clone())
        {
            let _ = self.to_watch.send((kind, served));
        }
    }

    /// Watches what is asked for, and puts the StickyIPs of a workload that changed into the inbox. Until dropped.
    pub async fn watch(&self, world: &World, inbox: &Inbox) {
        let Some(mut asked) = locked(&self.asked).take() else { return };
        let mut watches = FuturesUnordered::new();
        loop {
            tokio::select! {
                next = asked.recv() => match next {
                    Some((kind, served)) => watches.push(watch_kind(world, inbox, kind, served)),
                    None => return,
                },
                Some(()) = watches.next(), if !watches.is_empty() => {}
            }
        }
    }
}

/// Only the metadata is watched: an object's generation tells that its spec is another one.
async fn watch_kind(world: &World, inbox: &Inbox, kind: GroupKind, served: Served) {
    let api: Api<PartialObjectMeta<DynamicObject>> = Api::all_with(world.hands.client(), &served.resource);
    let mut known: Known<(String, Option<i64>)> = Known::default();
    let trim = |object: PartialObjectMeta<DynamicObject>| {
        (object.metadata.uid.unwrap_or_default(), object.metadata.generation)
    };
    let tell = |told| {
        let changed = known.take(told);
        if !changed.is_empty() {
            wake(world, inbox, &kind, &changed.into_iter().collect());
        }
    };
    let trouble = |trouble: Trouble<'_>| tracing::warn!(?kind, ?trouble, "the watch of workloads");
    feed_trimmed(api, watcher::Config::default(), trim, tell, trouble).await;
}

fn wake(world: &World, inbox: &Inbox, kind: &GroupKind, names: &BTreeSet<String>) {
    let now: Duration = world.elapsed();
    let index = world.index();
    for (name, sticky) in index.stickies.iter() {
        let workload = &sticky.spec.workload;
        let namespace = sticky.metadata.namespace.as_deref().unwrap_or_default();
        let of_it = GroupKind::of(workload) == *kind
            && (names.contains(&format!("{namespace}/{}", workload.name)) || names.contains(&workload.name));
        if of_it {
            inbox.put(Key::new(Kind::StickyIP, name.clone()), now);
        }
    }
}

/// The ordinals or slots that a workload asks for, where it has a number of replicas.
fn ordinals(object: &Value) -> Option<(u32, u32)> {
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
    let spec = object.get("spec")?;
    let count = number(spec.get("replicas")?)?;
    let first = spec.pointer("/ordinals/start").and_then(number).unwrap_or(0);
    Some((first, count))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn replicas_and_their_start_are_read_from_any_kind() {
        assert_eq!(ordinals(&json!({"spec": {"replicas": 3}})), Some((0, 3)));
        assert_eq!(ordinals(&json!({"spec": {"replicas": 3, "ordinals": {"start": 5}}})), Some((5, 3)));
        assert_eq!(ordinals(&json!({"spec": {"replicas": "3"}})), None);
        assert_eq!(ordinals(&json!({"spec": {"selector": {}}})), None);
        assert_eq!(ordinals(&json!({})), None);
    }
}
