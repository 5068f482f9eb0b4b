//! What the API server tells of bindings and claims, each with the time at which it came.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use futures_util::StreamExt;
use kube::api::{Api, ListParams, WatchEvent};
use serde::Deserialize;
use serde::de::{DeserializeOwned, IgnoredAny};
use sticky_ipam::cluster::objects::{AddressClaim, StickyIP};
use sticky_ipam::names::StickyKey;
use tokio::sync::oneshot;

use crate::support::api_server::access::Access;

/// When something came, by the StickyIP's namespace and name.
type Times = BTreeMap<String, Instant>;

/// What was told since the watch began.
#[derive(Default)]
pub struct Told {
    /// A claim was made: the address is decided.
    pub decided: Times,
    /// The StickyIP is attached to its pod.
    pub bound: Times,
    /// The StickyIP is gone.
    pub gone: Times,
    /// Its claim rests.
    pub resting: Times,
}

/// The watch, on a thread of its own: whoever measures may be busy.
pub struct Watch {
    told: Arc<Mutex<Told>>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Returns when it watches.
    pub fn start(access: &Access) -> Self {
        let told: Arc<Mutex<Told>> = Arc::default();
        let (stop, stopped) = oneshot::channel();
        let (ready, begun) = std::sync::mpsc::channel();
        let (of_stickies, of_claims, access) = (told.clone(), told.clone(), access.clone());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let client = access.client().await;
                let from = (
                    now(&Api::<StickyIP>::all(client.clone())).await,
                    now(&Api::<AddressClaim>::all(client.clone())).await,
                );
                ready.send(()).expect("somebody waits");
                tokio::select! {
                    _ = stopped => {}
                    () = follow(&client, "stickyips", from.0, |event| sticky(&mut of_stickies.lock().unwrap(), event)) => {}
                    () = follow(&client, "addressclaims", from.1, |event| claim(&mut of_claims.lock().unwrap(), event)) => {}
                }
            });
        });
        begun.recv().expect("the watch begins");
        Self { told, stop: Some(stop), thread: Some(thread) }
    }

    /// What was told.
    pub fn look<T>(&self, look: impl FnOnce(&Told) -> T) -> T {
        look(&self.told.lock().unwrap())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The version of the world of a kind.
async fn now<K: Clone + DeserializeOwned + std::fmt::Debug>(api: &Api<K>) -> String {
    let listed = api.list_metadata(&ListParams::default().limit(1)).await.expect("a list");
    listed.metadata.resource_version.expect("a list has one")
}

/// As much of an object as is needed: the bench must not take the processor from what it measures.
#[derive(Clone, Deserialize)]
struct Seen {
    metadata: Metadata,
    #[serde(default)]
    spec: Spec,
    #[serde(default)]
    status: Status,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    name: String,
    #[serde(default)]
    namespace: String,
    resource_version: String,
}

#[derive(Clone, Default, Deserialize)]
struct Spec {
    #[serde(rename = "stickyRef")]
    sticky_ref: Option<StickyKey>,
    phase: Option<String>,
}

#[derive(Clone, Default, Deserialize)]
struct Status {
    attachment: Option<IgnoredAny>,
}

async fn follow(
    client: &kube::Client,
    kind: &str,
    mut from: String,
    mut take: impl FnMut(&WatchEvent<Seen>),
) {
    loop {
        let path = format!("/apis/sticky-ipam.io/v1alpha1/{kind}?watch=true&resourceVersion={from}");
        let request = http::Request::get(path).body(Vec::new()).expect("a request");
        let events = client.request_events::<Seen>(request).await.expect("a watch");
        let mut events = std::pin::pin!(events);
        while let Some(Ok(event)) = events.next().await {
            take(&event);
            if let WatchEvent::Added(object) | WatchEvent::Modified(object) | WatchEvent::Deleted(object) =
                event
            {
                from = object.metadata.resource_version;
            }
        }
    }
}

fn sticky(told: &mut Told, event: &WatchEvent<Seen>) {
    let now = Instant::now();
    let name = |object: &Seen| format!("{}/{}", object.metadata.namespace, object.metadata.name);
    match event {
        WatchEvent::Added(object) | WatchEvent::Modified(object) if object.status.attachment.is_some() => {
            told.bound.entry(name(object)).or_insert(now);
        }
        WatchEvent::Deleted(object) => drop(told.gone.insert(name(object), now)),
        _ => {}
    }
}

fn claim(told: &mut Told, event: &WatchEvent<Seen>) {
    let now = Instant::now();
    let holder = |object: &Seen| object.spec.sticky_ref.as_ref().expect("every claim has one").to_string();
    match event {
        WatchEvent::Added(object) => {
            told.decided.entry(holder(object)).or_insert(now);
        }
        WatchEvent::Modified(object) if object.spec.phase.as_deref() == Some("Quarantined") => {
            told.resting.entry(holder(object)).or_insert(now);
        }
        _ => {}
    }
}
