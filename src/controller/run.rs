//! The controller's life: win the Lease, watch, do the duties, release the Lease. Must never go on working
//! after the Lease is lost: the process ends, and a new one takes part in the election.

use std::ffi::OsString;
use std::fmt::Debug;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, future::LocalBoxFuture, stream::FuturesUnordered};
use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::{Api, Resource, core::PartialObjectMeta, runtime::watcher};
use serde::de::DeserializeOwned;

use crate::cluster::events::{self, NewEvent};
use crate::cluster::objects::cilium::{CiliumEndpoint, CiliumNode};
use crate::cluster::objects::lenient::{Skipped, readable};
use crate::cluster::{api::lease::LeaderElection, writer::apply::NoObserver};
use crate::controller::duties::{
    adoption, dead_nodes, drift, duplicates, endpoints, gauges, node_blocks, recycling, repair, retention,
};
use crate::controller::flags::{LoadedSettings, reread};
use crate::controller::index::objects::{
    IndexedCiliumNode, IndexedEndpoint, namespace_annotations_of, read_ours,
};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::{context::Context, duty::run_duty, metrics::ControllerMetrics, writer::Writer};
use crate::runtime::http::{HttpServer, Readiness};
use crate::runtime::watch::{WatchProblem, feed, watch};
use crate::runtime::{cache::CacheEvent, client::connect, exit::ExitError, signals::ShutdownSignal};

const CONFIG_POLL: Duration = Duration::from_secs(5);

/// Runs until SIGTERM or SIGINT.
/// Errors: the process ends with a status: 1 if the lease was lost, 2 if it could not start.
pub async fn run(loaded: LoadedSettings, arguments: Vec<OsString>) -> Result<(), ExitError> {
    let settings = loaded.line.settings.clone();
    for remark in settings.remarks() {
        tracing::warn!("{remark}");
    }
    let mut shutdown = ShutdownSignal::listen()?;
    let metrics = Arc::new(ControllerMetrics::default());
    metrics.config_valid.set(1);
    let ready = Readiness::default();
    let counts = metrics.clone();
    let page = Arc::new(move || counts.page());
    let tls = settings.server.certificate().map_err(ExitError::refused)?;
    let bound = HttpServer::bind(settings.server.metrics_address, tls, page, ready.clone()).await;
    let pages = bound.map_err(ExitError::refused)?;
    if let Ok(address) = pages.address() {
        tracing::info!(%address, "serving /metrics, /healthz and /readyz");
    }
    tokio::spawn(pages.serve());
    let counts = metrics.clone();
    let count = move |method: &str| counts.requests.inc([method]);
    let connected = connect(settings.client.kubeconfig.as_deref(), count).await;
    let (client, _) = connected.map_err(ExitError::refused)?;
    let writer = Writer::new(client, settings.client.origin().to_owned(), Box::new(NoObserver));
    let context = Context::new(writer, settings.clone(), metrics.clone(), ready.clone());
    let (stop, mut stopped) = tokio::sync::watch::channel(false);
    let (file, counts) = (loaded.file, metrics.clone());
    tokio::spawn(async move {
        tokio::select! {
            () = shutdown.received() => {}
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
    // A replica that waits to lead is as ready as it can be.
    ready.yes();
    let (namespace, id) = (&settings.leader_election_namespace, &settings.leader_election_id);
    let (client, times) = (context.writer.client(), settings.lease_times());
    let mut election = LeaderElection::new(client, namespace, id, &identity(), times);
    let term = tokio::select! {
        term = election.win() => Some(term),
        _ = stopped.wait_for(|stopped| *stopped) => None,
    };
    let Some(term) = term else {
        election.release().await;
        return Ok(());
    };
    let held = election.hold(term, work).await;
    metrics.leader.set(0);
    held.map_err(|lost| ExitError::failed(lost.to_string()))
}

/// Whether the kinds of sticky-ipam must be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OurKinds {
    /// Nothing is done before they are.
    Required,
    /// A cluster without them has none of their objects.
    Optional,
}

/// Watches alone, until dropped.
pub(crate) async fn watches_until_dropped(context: &Context, ours: OurKinds) {
    let mut all: FuturesUnordered<Task<'_>> = watches(context, ours).into_iter().collect();
    while all.next().await.is_some() {}
}

/// Watches and does all duties, until dropped.
pub async fn work(context: &Context) {
    let mut all: FuturesUnordered<Task<'_>> = watches(context, OurKinds::Required).into_iter().collect();
    all.push(Box::pin(context.event_recorder.run(&context.writer, || context.has_urgent_work())));
    all.push(Box::pin(async {
        context.wait_until_listed().await;
        tracing::info!("every kind is listed; starting the duties");
        let mut duties: FuturesUnordered<Task<'_>> = duties(context).into_iter().collect();
        // Recycling counts twice: it records owners, too.
        context.start_initial_sync(duties.len() + 1);
        while duties.next().await.is_some() {}
    }));
    // Each is polled only when it is woken, and is on the heap: together they are large.
    while all.next().await.is_some() {}
}

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
    if context.settings.adopt_running {
        duties.push(Box::pin(run_duty(adoption::PodAdoption::new(&context.settings), context)));
    }
    duties
}

fn watches(context: &Context, ours: OurKinds) -> Vec<Task<'_>> {
    let namespace = |object: PartialObjectMeta<Namespace>| Ok(namespace_annotations_of(object.metadata));
    let cilium_node = |object| readable::<CiliumNode>(object).map(IndexedCiliumNode::from);
    let endpoint = |object| readable::<CiliumEndpoint>(object).map(IndexedEndpoint::from);
    vec![
        watched(context, ours, Kind::Pod, |pod: Pod| Ok(pod.into()), ClusterIndex::apply_pod),
        watched(
            context,
            ours,
            Kind::Node,
            |node: Node| Ok(node.into()),
            |index, event| index.nodes.apply(event),
        ),
        watched(context, ours, Kind::Namespace, namespace, |index, event| index.namespaces.apply(event)),
        watched(context, ours, Kind::StickyIP, read_ours, |index, event| index.stickies.apply(event)),
        watched(context, ours, Kind::AddressClaim, read_ours, |index, event| index.claims.apply(event)),
        watched(context, ours, Kind::IPPool, read_ours, |index, event| index.pools.apply(event)),
        watched(context, ours, Kind::CiliumNode, cilium_node, |index, event| index.cilium_nodes.apply(event)),
        watched(context, ours, Kind::CiliumEndpoint, endpoint, |index, event| index.endpoints.apply(event)),
    ]
}

/// Puts what a watch brings into the index; the keys that changed.
type Apply<T> = fn(&mut ClusterIndex, CacheEvent<(String, T)>) -> Vec<String>;

fn watched<'a, O, T>(
    context: &'a Context,
    ours: OurKinds,
    kind: Kind,
    read: fn(O) -> Result<T, Skipped>,
    apply: Apply<T>,
) -> Task<'a>
where
    O: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
    T: Send + 'static,
{
    let changes = watch(Api::all(context.writer.client()), watcher::Config::default(), read);
    Box::pin(feed(changes, move |event| context.apply(kind, event, apply), report(context, ours, kind)))
}

/// Reports what goes wrong with the watch of a kind: in the log, as an event, on /readyz, and as a stale
/// cache.
fn report(context: &Context, ours: OurKinds, kind: Kind) -> impl FnMut(WatchProblem) {
    // A kind that was listed once does not make the process unready: no later event would make it ready
    // again.
    let not_ready = move |reason: String| {
        if context.index().missing().contains(&kind) {
            context.ready.no(reason);
        }
    };
    move |problem| match problem {
        WatchProblem::Unreadable(skipped) => {
            context.metrics.skipped.inc([&format!("{kind:?}")]);
            tracing::warn!("{skipped}");
            let (about, message) = (events::skipped(&skipped), skipped.to_string());
            let event = NewEvent { about, reason: "Unreadable", message, warning: true };
            context.event_recorder.record_later(event);
        }
        WatchProblem::UnknownKind(reason) => {
            tracing::warn!(?kind, reason, "the API server does not know this kind; trying again in a minute");
            // A cluster without Cilium's kinds has none of its objects. Ours may only not be served now.
            let none = CacheEvent::<()>::ListComplete;
            match kind {
                Kind::CiliumNode => {
                    context.apply(kind, none, |index, _| index.cilium_nodes.apply_empty_list())
                }
                Kind::CiliumEndpoint => {
                    context.apply(kind, none, |index, _| index.endpoints.apply_empty_list())
                }
                Kind::StickyIP if ours == OurKinds::Optional => {
                    context.apply(kind, none, |index, _| empty(|event| index.stickies.apply(event)))
                }
                Kind::AddressClaim if ours == OurKinds::Optional => {
                    context.apply(kind, none, |index, _| index.claims.apply_empty_list())
                }
                Kind::IPPool if ours == OurKinds::Optional => {
                    context.apply(kind, none, |index, _| empty(|event| index.pools.apply(event)))
                }
                _ => not_ready(format!(
                    "the API server does not know the kind {kind:?}; install packaging/crds"
                )),
            }
        }
        WatchProblem::Forbidden(reason) => {
            tracing::error!(?kind, reason, "not allowed to watch; allow it by a role");
            context.index().freshness.mark_stale(kind, context.elapsed());
            not_ready(format!("not allowed to watch {kind:?}: {reason}; allow it by a role"));
        }
        WatchProblem::Unauthorized(reason) | WatchProblem::Disconnected(reason) => {
            tracing::warn!(?kind, reason, "the watch failed; listing again");
            context.index().freshness.mark_stale(kind, context.elapsed());
        }
    }
}

/// A cache of no objects, as after an empty list.
fn empty<T>(mut apply: impl FnMut(CacheEvent<(String, T)>) -> Vec<String>) -> Vec<String> {
    apply(CacheEvent::ListStarted);
    apply(CacheEvent::ListComplete)
}

/// Returns when the settings file has changed and is accepted: the next process starts with it.
async fn file_changes(arguments: &[OsString], file: Option<&(PathBuf, String)>, metrics: &ControllerMetrics) {
    let Some((path, before)) = file else { return std::future::pending().await };
    let file = path.display();
    let mut reported = None;
    loop {
        tokio::time::sleep(CONFIG_POLL).await;
        match reread(arguments, path, before) {
            None => {
                metrics.config_valid.set(1);
                reported = None;
            }
            Some(Ok(())) => {
                tracing::info!(%file, "the settings file has changed; shutting down, to start again with it");
                return;
            }
            Some(Err(error)) => {
                metrics.config_valid.set(0);
                if reported.as_ref() != Some(&error) {
                    tracing::error!(
                        %file,
                        %error,
                        "the settings file has changed and is not accepted; keeping the old settings"
                    );
                }
                reported = Some(error);
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
    async fn a_kind_that_the_server_does_not_know_is_synced_and_has_no_objects() {
        let settings = load(&["sticky-ipam-controller".into()]).unwrap().line.settings;
        let writer = Writer::new(Canned::new().client(), "canned".into(), Box::new(NoObserver));
        let context = Context::new(writer, settings, Arc::default(), Readiness::default());
        for kind in [Kind::CiliumEndpoint, Kind::CiliumNode] {
            // Every list begins with this, also one that is answered with 404.
            context.index().freshness.observe_event(kind, &CacheEvent::<()>::ListStarted);
            assert!(context.index().freshness.is_stale(kind, Duration::ZERO));
            report(&context, OurKinds::Required, kind)(WatchProblem::UnknownKind(String::new()));
            assert!(!context.index().freshness.is_stale(kind, Duration::ZERO), "{kind:?}");
            assert!(!context.index().missing().contains(&kind), "{kind:?}");
        }
    }
}
