//! From a watch to an index. Must never end over one object that cannot be read, nor over a server that is away: it waits
//! longer and longer, and begins with a new list.

use std::fmt::Debug;
use std::time::Duration;

use futures_util::StreamExt;
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::cluster::objects::lenient::{Skipped, Validate, readable};
use crate::runtime::cache::CacheEvent;

/// How often a kind that the server does not know is asked for again: its definition may be installed later.
const UNKNOWN_KIND: Duration = Duration::from_secs(60);
/// Objects a page of a list: what is read before it is trimmed.
const PAGE: u32 = 500;

/// What happens to a watch.
#[derive(Debug)]
pub enum WatchProblem<'a> {
    /// An object cannot be read.
    Skipped(&'a Skipped),
    /// The server does not know the kind. Nothing is told of its objects: that it is not served now does not mean that there
    /// are none.
    NoSuchKind,
    /// The server refuses to list or watch it; the words name verb and resource.
    Forbidden(&'a str),
    /// The server is away, or the history was lost; a new try follows.
    Broken(&'a dyn std::error::Error),
}

/// The name under which an object is kept.
pub fn name_of(object: &impl ResourceExt) -> String {
    let name = object.name_any();
    match object.namespace() {
        Some(namespace) => format!("{namespace}/{name}"),
        None => name,
    }
}

/// Tells of every change of a kind of ours or of Cilium's, for as long as it is polled.
pub async fn feed<K>(
    api: Api<DeserializeGuard<K>>,
    config: watcher::Config,
    mut tell: impl FnMut(CacheEvent<(String, K)>),
    mut trouble: impl FnMut(WatchProblem<'_>),
) where
    K: Resource<DynamicType = ()> + Validate + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let watched = kube::runtime::watcher(api, config.page_size(PAGE)).default_backoff();
    let mut watched = std::pin::pin!(watched);
    while let Some(event) = watched.next().await {
        let mut read = |object: DeserializeGuard<K>| {
            let name = name_of(&object);
            readable(object).map(|object| (name.clone(), object)).map_err(|skipped| {
                trouble(WatchProblem::Skipped(&skipped));
                name
            })
        };
        match event {
            Ok(Event::Init) => tell(CacheEvent::ListStarted),
            Ok(Event::InitApply(object)) => match read(object) {
                Ok(object) => tell(CacheEvent::Listed(object)),
                Err(name) => tell(CacheEvent::Unreadable(name)),
            },
            Ok(Event::InitDone) => tell(CacheEvent::ListComplete),
            Ok(Event::Apply(object)) => match read(object) {
                Ok(object) => tell(CacheEvent::Applied(object)),
                Err(name) => tell(CacheEvent::Unreadable(name)),
            },
            Ok(Event::Delete(object)) => tell(CacheEvent::Deleted(name_of(&object))),
            Err(error) => fallen(&error, &mut trouble).await,
        }
    }
}

/// The same for kinds of Kubernetes itself, trimmed at the door: `trim` keeps what is needed of each.
pub async fn feed_trimmed<K, T>(
    api: Api<K>,
    config: watcher::Config,
    trim: impl Fn(K) -> T,
    mut tell: impl FnMut(CacheEvent<(String, T)>),
    mut trouble: impl FnMut(WatchProblem<'_>),
) where
    K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
{
    let watched = kube::runtime::watcher(api, config.page_size(PAGE)).default_backoff();
    let mut watched = std::pin::pin!(watched);
    while let Some(event) = watched.next().await {
        match event {
            Ok(Event::Init) => tell(CacheEvent::ListStarted),
            Ok(Event::InitApply(object)) => tell(CacheEvent::Listed((name_of(&object), trim(object)))),
            Ok(Event::InitDone) => tell(CacheEvent::ListComplete),
            Ok(Event::Apply(object)) => tell(CacheEvent::Applied((name_of(&object), trim(object)))),
            Ok(Event::Delete(object)) => tell(CacheEvent::Deleted(name_of(&object))),
            Err(error) => fallen(&error, &mut trouble).await,
        }
    }
}

async fn fallen(error: &watcher::Error, trouble: &mut impl FnMut(WatchProblem<'_>)) {
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => Some(status),
        watcher::Error::WatchError(status) => Some(status),
        _ => None,
    };
    match status {
        Some(status) if status.code == 404 => {
            trouble(WatchProblem::NoSuchKind);
            tokio::time::sleep(UNKNOWN_KIND).await;
        }
        Some(status) if status.code == 403 => trouble(WatchProblem::Forbidden(&status.message)),
        _ => trouble(WatchProblem::Broken(error)),
    }
}
