//! The controller's life: win the lease, watch, do the duties, give the lease back. Must never go on working after the lease is
//! lost: the process ends, and a fresh one stands for election.

use std::ffi::OsString;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::Api;
use kube::core::{DeserializeGuard, PartialObjectMeta};
use kube::runtime::watcher;

use crate::cluster::api::events;
use crate::cluster::api::events::Told;
use crate::cluster::api::lease::LeaderElection;
use crate::cluster::cilium::objects::{CiliumEndpoint, CiliumNode};
use crate::cluster::objects::{AddressClaim, IPPool, StickyIP};
use crate::controller::ExitError;
use crate::controller::context::Context;
use crate::controller::duties::{
    adoption, dead_nodes, drift, duplicates, endpoints, gauges, node_blocks, recycling, repair, retention,
};
use crate::controller::duty::run_duty;
use crate::controller::flags::{ControllerSettings, Loaded, reread};
use crate::controller::index::objects::{
    IndexedCiliumNode, IndexedEndpoint, IndexedNode, IndexedPod, namespace_annotations_of,
    without_managed_fields,
};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::metrics::{ControllerMetrics, What};
use crate::controller::writer::{Overseer, Unwatched, Writer};
use crate::runtime::cache::CacheEvent;
use crate::runtime::client::{IN_CLUSTER, client};
use crate::runtime::http::{HttpServer, Readiness};
use crate::runtime::signals::ShutdownSignal;
use crate::runtime::watch::{WatchProblem, feed, feed_trimmed};

/// How often the settings file is looked at.
const FILE_LOOK: Duration = Duration::from_secs(5);

/// Runs until told to end.
///
/// # Errors
/// The process ends with a status: 1 if the lease was lost, 2 if it could not start.
pub async fn run(loaded: Loaded, arguments: Vec<OsString>) -> Result<(), ExitError> {
    let settings = loaded.line.settings.clone();
    for remark in settings.remarks() {
        tracing::warn!("{remark}");
    }
    let mut end = ShutdownSignal::listen()
        .map_err(|error| ExitError::start(format!("cannot listen for signals: {error}")))?;
    let metrics = Arc::new(ControllerMetrics::default());
    let ready = Readiness::default();
    let counts = metrics.clone();
    let tls = settings.tls().map_err(|error| ExitError::start(format!("error: {error}")))?;
    let pages =
        HttpServer::bind(settings.metrics_address, tls, Arc::new(move || counts.page()), ready.clone()).await;
    let pages = pages.map_err(|error| ExitError::start(format!("error: {error}")))?;
    if let Ok(address) = pages.address() {
        tracing::info!(%address, "serving /metrics, /healthz and /readyz");
    }
    tokio::spawn(pages.serve());
    let counts = metrics.clone();
    let count = move |method: &str| ControllerMetrics::count(&counts.requests, method);
    let client = client(settings.kubeconfig.as_deref(), count).await;
    let client = client.map_err(|error| ExitError::start(error.to_string()))?;
    let context = context(client, settings.clone(), metrics.clone(), ready.clone(), Box::new(Unwatched));
    let (stop, mut stopped) = tokio::sync::watch::channel(false);
    let (file, counts) = (loaded.file, metrics.clone());
    tokio::spawn(async move {
        tokio::select! {
            () = end.told() => {}
            () = file_changes(&arguments, file.as_ref(), &counts) => {}
        }
        let _ = stop.send(true);
    });
    let mut work_stopped = stopped.clone();
    let work = async {
        metrics.leader.set(1);
        tokio::select! {
            () = work(&context) => {}
            _ = work_stopped.wait_for(|stopped| *stopped) => {}
        }
    };
    if !settings.enable_leader_election {
        work.await;
        return Ok(());
    }
    // Whoever waits to lead is as ready as it can be.
    ready.yes();
    let name = identity();
    let (namespace, id) = (&settings.leader_election_namespace, &settings.leader_election_id);
    let mut election =
        LeaderElection::new(context.writer.client(), namespace, id, &name, settings.lease_times());
    let term = tokio::select! {
        term = election.win() => Some(term),
        _ = stopped.wait_for(|stopped| *stopped) => None,
    };
    let Some(term) = term else {
        election.give_back().await;
        return Ok(());
    };
    let held = election.hold(term, work).await;
    metrics.leader.set(0);
    held.map_err(|lost| ExitError { text: lost.to_string(), status: 1 })
}

/// A world for these hands.
#[must_use]
pub fn context(
    client: kube::Client,
    settings: ControllerSettings,
    metrics: Arc<ControllerMetrics>,
    ready: Readiness,
    overseer: Box<dyn Overseer>,
) -> Context {
    let from = settings.kubeconfig.clone().unwrap_or_else(|| IN_CLUSTER.into());
    Context::new(Writer::new(client, from, overseer), settings, metrics, ready)
}

/// Watches and does all duties, until dropped.
pub async fn work(context: &Context) {
    let mut all: FuturesUnordered<Task<'_>> = watches(context).into_iter().collect();
    all.push(Box::pin(context.run_events()));
    all.push(Box::pin(async {
        context.wait_until_listed().await;
        tracing::info!("everything is listed; at work");
        let mut duties: FuturesUnordered<Task<'_>> = duties(context).into_iter().collect();
        // Recycling is two: it looks after owners too.
        context.start_initial_sync(duties.len() + 1);
        while duties.next().await.is_some() {}
    }));
    // Each is polled only when it is woken, and lies on the heap: together they are large.
    while all.next().await.is_some() {}
}

/// A part of the work that goes on until it is dropped.
type Task<'a> = LocalBoxFuture<'a, ()>;

fn duties(context: &Context) -> Vec<Task<'_>> {
    let mut duties: Vec<Task<'_>> = vec![
        Box::pin(run_duty(gauges::Gauges::default(), context)),
        Box::pin(run_duty(repair::Repair::new(&context.settings), context)),
        Box::pin(run_duty(duplicates::Duplicates::new(duplicates::GRACE_SECONDS, &context.metrics), context)),
        Box::pin(recycling::run_recycling(context)),
        Box::pin(run_duty(dead_nodes::DeadNodes::default(), context)),
        Box::pin(run_duty(retention::RetentionSync::default(), context)),
        Box::pin(run_duty(drift::DriftAudit::new(&context.metrics), context)),
        Box::pin(run_duty(endpoints::Endpoints::from_context(context), context)),
    ];
    if let Some(blocks) = node_blocks::NodeBlocks::from_context(context) {
        duties.push(Box::pin(run_duty(blocks, context)));
    }
    if context.settings.mark {
        duties.push(Box::pin(run_duty(adoption::PodAdoption::new(&context.settings), context)));
    }
    duties
}

/// What feeds the index.
fn watches(context: &Context) -> Vec<Task<'_>> {
    let client = || context.writer.client();
    let calm = watcher::Config::default;
    macro_rules! theirs {
        ($object:ty, $field:ident, $kind:expr, $trim:expr) => {
            Box::pin(feed_trimmed(
                Api::<$object>::all(client()),
                calm(),
                $trim,
                move |told| context.apply($kind, told, |index, told| index.$field.apply(told)),
                trouble(context, $kind),
            ))
        };
    }
    macro_rules! ours {
        ($object:ty, $field:ident, $kind:expr, $trim:expr) => {
            Box::pin(feed::<$object>(
                Api::<DeserializeGuard<$object>>::all(client()),
                calm(),
                move |told| context.apply($kind, map(told, $trim), |index, told| index.$field.apply(told)),
                trouble(context, $kind),
            ))
        };
    }
    let namespace = |object: PartialObjectMeta<Namespace>| namespace_annotations_of(object.metadata);
    vec![
        Box::pin(feed_trimmed(
            Api::<Pod>::all(client()),
            calm(),
            IndexedPod::from,
            move |told| context.apply(Kind::Pod, told, ClusterIndex::apply_pod),
            trouble(context, Kind::Pod),
        )),
        theirs!(Node, nodes, Kind::Node, IndexedNode::from),
        theirs!(PartialObjectMeta<Namespace>, namespaces, Kind::Namespace, namespace),
        ours!(StickyIP, stickies, Kind::StickyIP, without_managed_fields),
        ours!(AddressClaim, claims, Kind::AddressClaim, without_managed_fields),
        ours!(IPPool, pools, Kind::IPPool, without_managed_fields),
        ours!(CiliumNode, cilium_nodes, Kind::CiliumNode, IndexedCiliumNode::from),
        ours!(CiliumEndpoint, endpoints, Kind::CiliumEndpoint, IndexedEndpoint::from),
    ]
}

fn map<A, B>(told: CacheEvent<(String, A)>, trim: impl Fn(A) -> B) -> CacheEvent<(String, B)> {
    match told {
        CacheEvent::ListStarted => CacheEvent::ListStarted,
        CacheEvent::Listed((name, object)) => CacheEvent::Listed((name, trim(object))),
        CacheEvent::ListComplete => CacheEvent::ListComplete,
        CacheEvent::Applied((name, object)) => CacheEvent::Applied((name, trim(object))),
        CacheEvent::Deleted(name) => CacheEvent::Deleted(name),
        CacheEvent::Unreadable(name) => CacheEvent::Unreadable(name),
    }
}

fn trouble(context: &Context, kind: Kind) -> impl FnMut(WatchProblem<'_>) {
    // Whoever has listed a kind once is ready: nobody says so again when a later watch gets through.
    let not_ready = move |why: String| {
        if context.index().missing().contains(&kind) {
            context.ready.no(why);
        }
    };
    move |trouble| match trouble {
        WatchProblem::Skipped(skipped) => {
            context.metrics.skipped.get_or_create(&What { what: format!("{kind:?}") }).inc();
            tracing::warn!("{skipped}");
            let (about, message) = (events::skipped(skipped), skipped.to_string());
            context.record_event_later(Told { about, reason: "Unreadable", message, warning: true });
        }
        WatchProblem::NoSuchKind => {
            tracing::warn!(?kind, "the API server does not know this kind; looking again in a minute");
            // A cluster without Cilium's kinds has none of its objects. Ours may only not be served right now.
            let none = CacheEvent::<()>::ListComplete;
            match kind {
                Kind::CiliumNode => {
                    context.apply(kind, none, |index, _| index.cilium_nodes.apply_empty_list())
                }
                Kind::CiliumEndpoint => {
                    context.apply(kind, none, |index, _| index.endpoints.apply_empty_list())
                }
                _ => {
                    not_ready(format!(
                        "the API server does not know the kind {kind:?}; install packaging/crds"
                    ));
                }
            }
        }
        WatchProblem::Forbidden(why) => {
            tracing::error!(?kind, why, "not allowed to watch; grant it by a role");
            context.index().mark_stale(kind, context.elapsed());
            not_ready(format!("not allowed to watch {kind:?}: {why}; grant it by a role"));
        }
        WatchProblem::Broken(error) => {
            tracing::warn!(?kind, %error, "the watch broke off; listing anew");
            context.index().mark_stale(kind, context.elapsed());
        }
    }
}

/// Returns when the settings file has changed and is accepted: the next process starts with it.
async fn file_changes(
    arguments: &[OsString],
    file: Option<&(std::path::PathBuf, String)>,
    metrics: &ControllerMetrics,
) {
    let Some((path, before)) = file else { return std::future::pending().await };
    let mut told = None;
    loop {
        tokio::time::sleep(FILE_LOOK).await;
        match reread(arguments, path, before) {
            None => {
                metrics.config_valid.set(1);
                told = None;
            }
            Some(Ok(())) => {
                tracing::info!(file = %path.display(), "the settings file has changed; ending, to start with it");
                return;
            }
            Some(Err(refused)) => {
                metrics.config_valid.set(0);
                if told.as_ref() != Some(&refused) {
                    tracing::error!(file = %path.display(), %refused, "the settings file has changed and is refused; going on with the old settings");
                }
                told = Some(refused);
            }
        }
    }
}

/// A name that no other process has.
fn identity() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let (host, random) = (read("/proc/sys/kernel/hostname"), read("/proc/sys/kernel/random/uuid"));
    format!("{}_{}", host.trim(), random.trim())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::api::canned::Canned;
    use crate::controller::flags::load;

    #[tokio::test]
    async fn a_kind_that_the_server_does_not_know_is_heard_and_has_no_objects() {
        let settings = load(&["sticky-ipam-controller".into()]).unwrap().line.settings;
        let context = context(
            Canned::new().client(),
            settings,
            Arc::default(),
            Readiness::default(),
            Box::new(Unwatched),
        );
        for kind in [Kind::CiliumEndpoint, Kind::CiliumNode] {
            // Every list begins with this, also one that is answered with 404.
            context.index().observe_event(kind, &CacheEvent::<()>::ListStarted);
            assert!(context.index().is_stale(kind, Duration::ZERO));
            trouble(&context, kind)(WatchProblem::NoSuchKind);
            assert!(!context.index().is_stale(kind, Duration::ZERO), "{kind:?}");
            assert!(!context.index().missing().contains(&kind), "{kind:?}");
        }
    }
}
