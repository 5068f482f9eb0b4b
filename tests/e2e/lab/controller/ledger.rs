//! What became of StickyIPs and claims, change by change, as the API server tells it: nothing between two
//! looks is missed.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use kube::core::Resource;
use serde::de::DeserializeOwned;
use sticky_ipam::cluster::objects::{AddressClaim, StickyIP};
use tokio::task::JoinHandle;

use crate::support::lab::api::ApiServer;

/// The longest that the API server keeps a watch open at once.
const WATCH_SECONDS: u32 = 290;

/// One life of an object, from its uid: the phases it went through, and whether it ended.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Life {
    pub name: String,
    pub phases: Vec<String>,
    pub ended: bool,
}

/// By uid.
pub type Lives = BTreeMap<String, Life>;

/// The watches, while they run. They start from what stands.
pub struct Ledger {
    pub stickies: Arc<Mutex<Lives>>,
    pub claims: Arc<Mutex<Lives>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Ledger {
    pub fn open(api: &ApiServer, namespace: &str) -> Self {
        let (stickies, claims) = (Arc::default(), Arc::default());
        let all: Api<AddressClaim> = Api::all(api.client());
        let own: Api<StickyIP> = Api::namespaced(api.client(), namespace);
        let tasks = vec![
            api.spawn(follow(own, Arc::clone(&stickies), |_| "there".to_owned())),
            api.spawn(follow(all, Arc::clone(&claims), |claim| format!("{:?}", claim.spec.phase))),
        ];
        Self { stickies, claims, tasks }
    }

    pub fn of(lives: &Arc<Mutex<Lives>>) -> Vec<Life> {
        lives.lock().expect("no watch panicked").values().cloned().collect()
    }

    /// Ends the watches; they must have gone on until now.
    pub fn close(self) -> (Vec<Life>, Vec<Life>) {
        for task in &self.tasks {
            assert!(!task.is_finished(), "a watch of the ledger ended early: something may have been missed");
            task.abort();
        }
        (Self::of(&self.stickies), Self::of(&self.claims))
    }
}

async fn follow<K>(api: Api<K>, lives: Arc<Mutex<Lives>>, phase: fn(&K) -> String)
where
    K: Resource + Clone + DeserializeOwned + std::fmt::Debug + Send + 'static,
{
    let stands = api.list(&ListParams::default()).await.expect("the administrator may look");
    let revision = stands.metadata.resource_version.clone().expect("a list has one");
    let note = |object: &K, ended: bool| {
        let meta = object.meta();
        let (uid, name) = (meta.uid.clone().unwrap_or_default(), meta.name.clone().unwrap_or_default());
        let mut lives = lives.lock().expect("no watch panicked");
        let life = lives.entry(uid).or_insert_with(|| Life { name, ..Life::default() });
        let now = phase(object);
        if life.phases.last() != Some(&now) {
            life.phases.push(now);
        }
        life.ended |= ended;
    };
    stands.items.iter().for_each(|object| note(object, false));
    let params = WatchParams::default().timeout(WATCH_SECONDS);
    let mut events = api.watch(&params, &revision).await.expect("a watch").boxed();
    while let Some(event) = events.next().await {
        let (object, ended) = match event.expect("an event that can be read") {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => (object, false),
            WatchEvent::Deleted(object) => (object, true),
            WatchEvent::Bookmark(_) => continue,
            WatchEvent::Error(why) => panic!("{why:?}"),
        };
        note(&object, ended);
    }
}
