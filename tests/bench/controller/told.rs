//! What the API server tells of bindings and claims, each with the time at which it came.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use futures_util::StreamExt;
use kube::ResourceExt;
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use serde::de::DeserializeOwned;
use sticky_ipam::cluster::objects::{AddressClaim, ClaimPhase, StickyIP};
use tokio::sync::oneshot;

use super::super::bench::access::Access;

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
                let (stickies, claims): (Api<StickyIP>, Api<AddressClaim>) =
                    (Api::all(client.clone()), Api::all(client));
                let from = (now(&stickies).await, now(&claims).await);
                ready.send(()).expect("somebody waits");
                tokio::select! {
                    _ = stopped => {}
                    () = follow(&stickies, from.0, |event| sticky(&mut of_stickies.lock().unwrap(), event)) => {}
                    () = follow(&claims, from.1, |event| claim(&mut of_claims.lock().unwrap(), event)) => {}
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

async fn follow<K>(api: &Api<K>, mut from: String, mut take: impl FnMut(&WatchEvent<K>))
where
    K: kube::Resource + Clone + DeserializeOwned + std::fmt::Debug + 'static,
{
    loop {
        let events = api.watch(&WatchParams::default(), &from).await.expect("a watch");
        let mut events = std::pin::pin!(events);
        while let Some(Ok(event)) = events.next().await {
            take(&event);
            if let WatchEvent::Added(object) | WatchEvent::Modified(object) | WatchEvent::Deleted(object) =
                &event
            {
                from = object.resource_version().expect("every object has one");
            }
        }
    }
}

fn sticky(told: &mut Told, event: &WatchEvent<StickyIP>) {
    let now = Instant::now();
    let name =
        |object: &StickyIP| format!("{}/{}", object.namespace().unwrap_or_default(), object.name_any());
    match event {
        WatchEvent::Added(object) | WatchEvent::Modified(object)
            if object.status.as_ref().is_some_and(|status| status.attachment.is_some()) =>
        {
            told.bound.entry(name(object)).or_insert(now);
        }
        WatchEvent::Deleted(object) => drop(told.gone.insert(name(object), now)),
        _ => {}
    }
}

fn claim(told: &mut Told, event: &WatchEvent<AddressClaim>) {
    let now = Instant::now();
    match event {
        WatchEvent::Added(object) => {
            told.decided.entry(object.spec.holder.to_string()).or_insert(now);
        }
        WatchEvent::Modified(object) if object.spec.phase == ClaimPhase::Resting => {
            told.resting.entry(object.spec.holder.to_string()).or_insert(now);
        }
        _ => {}
    }
}
