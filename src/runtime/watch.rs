//! From a watch to a cache, for every kind and both programs. Must never end because of one object that
//! cannot be read, nor because the API server is unavailable: the watch backs off and starts with a new list.

use std::fmt::Debug;
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use kube::core::DeserializeGuard;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event};
use kube::{Api, Resource, ResourceExt};
use serde::de::DeserializeOwned;
use thiserror::Error;

use super::cache::CacheEvent;
use crate::cluster::objects::lenient::{Skipped, Validate, readable};

/// How often [`feed`] asks again for a kind that the server does not know: its definition may be installed
/// later.
const UNKNOWN_KIND_RETRY: Duration = Duration::from_secs(60);
/// Objects per page of a list: what is in memory before it is trimmed.
const PAGE_SIZE: u32 = 500;

/// What went wrong with a watch. Another try follows by itself.
#[derive(Debug, Error)]
pub(crate) enum WatchProblem {
    /// An object cannot be read. A [`CacheEvent::Unreadable`] follows.
    #[error("{0}")]
    Unreadable(Skipped),
    /// The server does not know the kind. Nothing follows about its objects: that it is not served now does
    /// not mean that there are none.
    #[error("{0}")]
    UnknownKind(String),
    /// The server does not allow to list or watch it; the message names verb and resource.
    #[error("{0}")]
    Forbidden(String),
    #[error("{0}")]
    Unauthorized(String),
    /// The server is unavailable, or no longer has the history.
    #[error("{0}")]
    Disconnected(String),
}

/// A change of one kind of object, by name, or why there is none.
pub(crate) type Watched<T> = Result<CacheEvent<(String, T)>, WatchProblem>;

/// The name under which an object is cached.
pub(crate) fn name_of(object: &impl ResourceExt) -> String {
    match object.namespace() {
        Some(namespace) => format!("{namespace}/{}", object.name_any()),
        None => object.name_any(),
    }
}

/// Every change of a kind whose objects may be unreadable: ours, Cilium's, and Kubernetes' own where one bad
/// object must not stop a node. `trim` keeps what is needed of each.
pub(crate) fn watch_readable<K, T>(
    api: Api<DeserializeGuard<K>>,
    config: watcher::Config,
    trim: impl Fn(K) -> T + Send,
) -> impl Stream<Item = Watched<T>> + Send
where
    K: Resource<DynamicType = ()> + Validate + Clone + DeserializeOwned + Debug + Send + 'static,
    T: Send,
{
    watch(api, config, move |object| readable(object).map(&trim))
}

/// How an object of a list, or one that changed, becomes an event of the cache.
type Wrap<T> = fn((String, T)) -> CacheEvent<(String, T)>;

/// Every change of a kind. `read` reads an object, and keeps what is needed of it.
pub(crate) fn watch<O, T>(
    api: Api<O>,
    config: watcher::Config,
    read: impl Fn(O) -> Result<T, Skipped> + Send,
) -> impl Stream<Item = Watched<T>> + Send
where
    O: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    T: Send,
{
    let events = kube::runtime::watcher(api, config.page_size(PAGE_SIZE)).default_backoff();
    events.flat_map(move |event| {
        let read = |object: O, wrap: Wrap<T>| {
            let name = name_of(&object);
            match read(object) {
                Ok(object) => vec![Ok(wrap((name, object)))],
                Err(skipped) => {
                    vec![Err(WatchProblem::Unreadable(skipped)), Ok(CacheEvent::Unreadable(name))]
                }
            }
        };
        stream::iter(match event {
            Ok(Event::Init) => vec![Ok(CacheEvent::ListStarted)],
            Ok(Event::InitApply(object)) => read(object, CacheEvent::Listed),
            Ok(Event::InitDone) => vec![Ok(CacheEvent::ListComplete)],
            Ok(Event::Apply(object)) => read(object, CacheEvent::Applied),
            Ok(Event::Delete(object)) => vec![Ok(CacheEvent::Deleted(name_of(&object)))],
            Err(error) => vec![Err(problem(&error))],
        })
    })
}

/// Hands every change to `apply` and every problem to `report`, for as long as it is polled.
pub(crate) async fn feed<T>(
    watched: impl Stream<Item = Watched<T>>,
    mut apply: impl FnMut(CacheEvent<(String, T)>),
    mut report: impl FnMut(WatchProblem),
) {
    let mut watched = std::pin::pin!(watched);
    while let Some(next) = watched.next().await {
        match next {
            Ok(event) => apply(event),
            Err(problem) => {
                let is_unknown = matches!(problem, WatchProblem::UnknownKind(_));
                report(problem);
                if is_unknown {
                    tokio::time::sleep(UNKNOWN_KIND_RETRY).await;
                }
            }
        }
    }
}

/// The message of the server, not its whole answer, which is long and repeats it.
pub(crate) fn problem(error: &watcher::Error) -> WatchProblem {
    let status = match error {
        watcher::Error::InitialListFailed(inner)
        | watcher::Error::WatchStartFailed(inner)
        | watcher::Error::WatchFailed(inner) => match inner {
            kube::Error::Api(status) => status,
            kube::Error::Auth(_) => return WatchProblem::Unauthorized(error.to_string()),
            _ => return WatchProblem::Disconnected(error.to_string()),
        },
        watcher::Error::WatchError(status) => status,
        watcher::Error::NoResourceVersion => return WatchProblem::Disconnected(error.to_string()),
    };
    let message = format!("the API server answered {}: {}", status.code, status.message);
    match status.code {
        401 => WatchProblem::Unauthorized(message),
        403 => WatchProblem::Forbidden(message),
        404 => WatchProblem::UnknownKind(message),
        _ => WatchProblem::Disconnected(message),
    }
}
