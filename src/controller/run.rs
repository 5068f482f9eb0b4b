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
use crate::cluster::api::lease::Seat;
use crate::cluster::cilium::objects::{CiliumEndpoint, CiliumNode};
use crate::cluster::objects::{AddressClaim, IPPool, StickyIP};
use crate::controller::Failure;
use crate::controller::context::{World, keep};
use crate::controller::duties::{
    adoption, dead_nodes, drift, duplicates, endpoints, gauges, node_blocks, recycling, repair, retention,
};
use crate::controller::flags::{Loaded, Settings, reread};
use crate::controller::index::{
    CiliumNodeSeen, EndpointSeen, Index, Kind, NodeSeen, PodSeen, namespace_seen, trimmed,
};
use crate::controller::metrics::{Metrics, What};
use crate::controller::writer::{Hands, Overseer, Unwatched};
use crate::runtime::cache::Told as Change;
use crate::runtime::client::{IN_CLUSTER, client};
use crate::runtime::http::{Pages, Ready};
use crate::runtime::signals::End;
use crate::runtime::watch::{Trouble, feed, feed_trimmed};

/// How often the settings file is looked at.
const FILE_LOOK: Duration = Duration::from_secs(5);

/// Runs until told to end.
///
/// # Errors
/// The process ends with a status: 1 if the lease was lost, 2 if it could not start.
pub async fn run(loaded: Loaded, arguments: Vec<OsString>) -> Result<(), Failure> {
    let settings = loaded.line.settings.clone();
    for remark in settings.remarks() {
        tracing::warn!("{remark}");
    }
    let mut end =
        End::listen().map_err(|error| Failure::start(format!("cannot listen for signals: {error}")))?;
    let metrics = Arc::new(Metrics::default());
    let ready = Ready::default();
    let counts = metrics.clone();
    let tls = settings.tls().map_err(|error| Failure::start(format!("error: {error}")))?;
    let pages =
        Pages::bind(settings.metrics_address, tls, Arc::new(move || counts.page()), ready.clone()).await;
    let pages = pages.map_err(|error| Failure::start(format!("error: {error}")))?;
    if let Ok(address) = pages.address() {
        tracing::info!(%address, "serving /metrics, /healthz and /readyz");
    }
    tokio::spawn(pages.serve());
    let counts = metrics.clone();
    let count = move |method: &str| Metrics::count(&counts.requests, method);
    let client = client(settings.kubeconfig.as_deref(), count).await;
    let client = client.map_err(|error| Failure::start(error.to_string()))?;
    let world = world(client, settings.clone(), metrics.clone(), ready.clone(), Box::new(Unwatched));
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
            () = work(&world) => {}
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
    let mut seat = Seat::new(world.hands.client(), namespace, id, &name, settings.terms());
    let term = tokio::select! {
        term = seat.win() => Some(term),
        _ = stopped.wait_for(|stopped| *stopped) => None,
    };
    let Some(term) = term else {
        seat.give_back().await;
        return Ok(());
    };
    let held = seat.hold(term, work).await;
    metrics.leader.set(0);
    held.map_err(|lost| Failure { text: lost.to_string(), status: 1 })
}

/// A world for these hands.
#[must_use]
pub fn world(
    client: kube::Client,
    settings: Settings,
    metrics: Arc<Metrics>,
    ready: Ready,
    overseer: Box<dyn Overseer>,
) -> World {
    let from = settings.kubeconfig.clone().unwrap_or_else(|| IN_CLUSTER.into());
    World::new(Hands::new(client, from, overseer), settings, metrics, ready)
}

/// Watches and does all duties, until dropped.
pub async fn work(world: &World) {
    let mut all: FuturesUnordered<Part<'_>> = watches(world).into_iter().collect();
    all.push(Box::pin(world.keep_telling()));
    all.push(Box::pin(async {
        world.listed().await;
        tracing::info!("everything is listed; at work");
        let mut duties: FuturesUnordered<Part<'_>> = duties(world).into_iter().collect();
        // Recycling is two: it looks after owners too.
        world.begin(duties.len() + 1);
        while duties.next().await.is_some() {}
    }));
    // Each is polled only when it is woken, and lies on the heap: together they are large.
    while all.next().await.is_some() {}
}

/// A part of the work that goes on until it is dropped.
type Part<'a> = LocalBoxFuture<'a, ()>;

fn duties(world: &World) -> Vec<Part<'_>> {
    let mut duties: Vec<Part<'_>> = vec![
        Box::pin(keep(gauges::Tally::default(), world)),
        Box::pin(keep(repair::Repair::new(&world.settings), world)),
        Box::pin(keep(duplicates::Doubles::new(duplicates::PATIENCE, &world.metrics), world)),
        Box::pin(recycling::keep_recycling(world)),
        Box::pin(keep(dead_nodes::Remove::default(), world)),
        Box::pin(keep(retention::Retain::default(), world)),
        Box::pin(keep(drift::Audit::new(&world.metrics), world)),
        Box::pin(keep(endpoints::Endpoints::for_world(world), world)),
    ];
    if let Some(blocks) = node_blocks::Blocks::for_world(world) {
        duties.push(Box::pin(keep(blocks, world)));
    }
    if world.settings.mark {
        duties.push(Box::pin(keep(adoption::Mark::new(&world.settings), world)));
    }
    duties
}

/// What feeds the index.
fn watches(world: &World) -> Vec<Part<'_>> {
    let client = || world.hands.client();
    let calm = watcher::Config::default;
    macro_rules! theirs {
        ($object:ty, $field:ident, $kind:expr, $trim:expr) => {
            Box::pin(feed_trimmed(
                Api::<$object>::all(client()),
                calm(),
                $trim,
                move |told| world.hear($kind, told, |index, told| index.$field.take(told)),
                trouble(world, $kind),
            ))
        };
    }
    macro_rules! ours {
        ($object:ty, $field:ident, $kind:expr, $trim:expr) => {
            Box::pin(feed::<$object>(
                Api::<DeserializeGuard<$object>>::all(client()),
                calm(),
                move |told| world.hear($kind, map(told, $trim), |index, told| index.$field.take(told)),
                trouble(world, $kind),
            ))
        };
    }
    let namespace = |object: PartialObjectMeta<Namespace>| namespace_seen(object.metadata);
    vec![
        Box::pin(feed_trimmed(
            Api::<Pod>::all(client()),
            calm(),
            PodSeen::from,
            move |told| world.hear(Kind::Pod, told, Index::take_pod),
            trouble(world, Kind::Pod),
        )),
        theirs!(Node, nodes, Kind::Node, NodeSeen::from),
        theirs!(PartialObjectMeta<Namespace>, namespaces, Kind::Namespace, namespace),
        ours!(StickyIP, stickies, Kind::StickyIP, trimmed),
        ours!(AddressClaim, claims, Kind::AddressClaim, trimmed),
        ours!(IPPool, pools, Kind::IPPool, trimmed),
        ours!(CiliumNode, cilium_nodes, Kind::CiliumNode, CiliumNodeSeen::from),
        ours!(CiliumEndpoint, endpoints, Kind::CiliumEndpoint, EndpointSeen::from),
    ]
}

fn map<A, B>(told: Change<(String, A)>, trim: impl Fn(A) -> B) -> Change<(String, B)> {
    match told {
        Change::Listing => Change::Listing,
        Change::Listed((name, object)) => Change::Listed((name, trim(object))),
        Change::Complete => Change::Complete,
        Change::Here((name, object)) => Change::Here((name, trim(object))),
        Change::Gone(name) => Change::Gone(name),
        Change::Broken(name) => Change::Broken(name),
    }
}

fn trouble(world: &World, kind: Kind) -> impl FnMut(Trouble<'_>) {
    // Whoever has listed a kind once is ready: nobody says so again when a later watch gets through.
    let not_ready = move |why: String| {
        if world.index().missing().contains(&kind) {
            world.ready.no(why);
        }
    };
    move |trouble| match trouble {
        Trouble::Skipped(skipped) => {
            world.metrics.skipped.get_or_create(&What { what: format!("{kind:?}") }).inc();
            tracing::warn!("{skipped}");
            let (about, message) = (events::skipped(skipped), skipped.to_string());
            world.tell_later(Told { about, reason: "Unreadable", message, warning: true });
        }
        Trouble::NoSuchKind => {
            tracing::warn!(?kind, "the API server does not know this kind; looking again in a minute");
            // A cluster without Cilium's kinds has none of its objects. Ours may only not be served right now.
            let none = Change::<()>::Complete;
            match kind {
                Kind::CiliumNode => world.hear(kind, none, |index, _| index.cilium_nodes.take_nothing()),
                Kind::CiliumEndpoint => world.hear(kind, none, |index, _| index.endpoints.take_nothing()),
                _ => {
                    not_ready(format!(
                        "the API server does not know the kind {kind:?}; install packaging/crds"
                    ));
                }
            }
        }
        Trouble::Forbidden(why) => {
            tracing::error!(?kind, why, "not allowed to watch; grant it by a role");
            world.index().falls_silent(kind, world.elapsed());
            not_ready(format!("not allowed to watch {kind:?}: {why}; grant it by a role"));
        }
        Trouble::Broken(error) => {
            tracing::warn!(?kind, %error, "the watch broke off; listing anew");
            world.index().falls_silent(kind, world.elapsed());
        }
    }
}

/// Returns when the settings file has changed and is accepted: the next process starts with it.
async fn file_changes(
    arguments: &[OsString],
    file: Option<&(std::path::PathBuf, String)>,
    metrics: &Metrics,
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
        let world =
            world(Canned::new().client(), settings, Arc::default(), Ready::default(), Box::new(Unwatched));
        for kind in [Kind::CiliumEndpoint, Kind::CiliumNode] {
            // Every list begins with this, also one that is answered with 404.
            world.index().hears(kind, &Change::<()>::Listing);
            assert!(world.index().is_silent(kind, Duration::ZERO));
            trouble(&world, kind)(Trouble::NoSuchKind);
            assert!(!world.index().is_silent(kind, Duration::ZERO), "{kind:?}");
            assert!(!world.index().missing().contains(&kind), "{kind:?}");
        }
    }
}
