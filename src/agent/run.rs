//! The agent's loop: connect, watch, reconcile on every event and tick, reconnect when the credentials were
//! refused. Must never end because the API server is away.

use std::collections::BTreeMap;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use kube::runtime::watcher::DefaultBackoff;
use thiserror::Error;
use tokio::sync::{mpsc, watch as channel};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};

use crate::agent::cilium::{self, CiliumState};
use crate::agent::index::{CacheEvent, NodeIndex};
use crate::agent::install::{InstallError, Installer, bypass};
use crate::agent::watch::{self, IndexUpdate};
use crate::agent::{flags::AgentSettings, host_routes, metrics::AgentMetrics, reconciler::Reconciler};
use crate::cluster::api::client::Connection;
use crate::cluster::cilium::pool;
use crate::cluster::events::{self, NewEvent};
use crate::cluster::objects::lenient::Skipped;
use crate::cluster::writer::apply::{ApiWriter, NoObserver};
use crate::runtime;
use crate::runtime::http::{HttpServer, HttpServerError, Readiness};
use crate::runtime::{client::ClientError, signals::ShutdownSignal};
use crate::store::RealDisk;

/// How many updates may wait during a step; then the watches wait, too.
const MAX_UPDATES: usize = 512;
/// Events come in groups: a step waits this long for the rest of one.
const EVENT_GROUPING: Duration = Duration::from_millis(2);
/// The same for what nothing waits for: that a pod runs, or has ended. While many pods start, every one of
/// them changes several times, and a step reads the whole store.
const POD_GROUPING: Duration = Duration::from_millis(100);
/// A watch that keeps failing for one reason is logged this often: it tries every second, and would hide
/// other logs.
const REPEAT_LOG: Duration = Duration::from_secs(60);

/// The watches that failed and have not listed since: why, and when it was logged.
type FailedWatches = BTreeMap<&'static str, (String, Instant)>;

#[derive(Debug, Error)]
pub enum AgentError {
    #[error(transparent)]
    HttpServer(#[from] HttpServerError),
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Install(#[from] InstallError),
}

/// Returns when the process is asked to end.
pub(super) async fn shutdown() {
    match ShutdownSignal::listen() {
        Ok(mut signal) => signal.received().await,
        // Then only the kernel ends it.
        Err(_) => std::future::pending().await,
    }
}

/// The client of the API server, with every request counted.
async fn connect(
    settings: &AgentSettings,
    metrics: &Arc<AgentMetrics>,
) -> Result<(kube::Client, kube::Config), ClientError> {
    let counted = metrics.clone();
    let count = move |method: &str| counted.requests.inc([method]);
    runtime::client::connect(settings.client.kubeconfig.as_deref(), count).await
}

pub(super) async fn install_once(settings: &AgentSettings) -> Result<(), AgentError> {
    let (client, config) = connect(settings, &Arc::default()).await?;
    let api = Connection::with_client(client.clone(), settings.client.origin(), Duration::from_secs(10));
    let node = pool::read_node(&api, &settings.node).await.ok().flatten();
    let blocks = node.as_ref().map(pool::home_blocks).unwrap_or_default();
    let mut installer = Installer::new(settings.install(), client, &config)?;
    Ok(installer.install_once(&blocks).await?)
}

/// Runs until `end` comes.
/// Errors: it cannot start: a flag is wrong. Later errors are logged, counted, and tried again.
pub async fn run(settings: AgentSettings, end: impl Future<Output = ()>) -> Result<(), AgentError> {
    let (settings, metrics) = (Arc::new(settings), Arc::new(AgentMetrics::default()));
    let ready = Readiness::default();
    let address = settings.server.metrics_address;
    let counts = metrics.clone();
    let tls = settings.server.certificate().map_err(HttpServerError::from)?;
    let pages = HttpServer::bind(address, tls, Arc::new(move || counts.page()), ready.clone()).await?;
    // Credentials that cannot be read at the start are an error in the flags; later the agent waits for them.
    connect(&settings, &metrics).await?;
    let mut tasks = JoinSet::new();
    tasks.spawn(pages.serve());
    tracing::info!(node = settings.node, mode = %settings.mode, %address, "the agent starts");
    let (blocks_out, blocks) = channel::channel(Vec::new());
    let (cilium_out, cilium) = channel::channel(CiliumState::default());
    let socket = settings.on_host(&settings.cilium_socket);
    tasks.spawn(cilium::watch(socket, settings.mode, metrics.clone(), cilium_out));
    let sessions = async {
        let mut pauses = DefaultBackoff::default();
        loop {
            let begun = Instant::now();
            let reason = session(&settings, &metrics, &ready, (&blocks_out, &blocks), &cilium).await;
            if begun.elapsed() > Duration::from_secs(60) {
                pauses = DefaultBackoff::default();
            }
            let pause = pauses.next().unwrap_or(Duration::from_secs(30));
            tracing::warn!(reason, ?pause, "reconnecting");
            tokio::time::sleep(pause).await;
        }
    };
    tokio::select! {
        () = end => {}
        () = sessions => {}
    }
    tracing::info!(node = settings.node, "the agent ends");
    Ok(())
}

/// Runs with one connection; returns the reason why it ended.
async fn session(
    settings: &Arc<AgentSettings>,
    metrics: &Arc<AgentMetrics>,
    ready: &Readiness,
    (blocks_out, blocks): (&channel::Sender<Vec<IpNet>>, &channel::Receiver<Vec<IpNet>>),
    cilium: &channel::Receiver<CiliumState>,
) -> String {
    let not_ready = |reason: String| {
        ready.set(vec![reason.clone()]);
        reason
    };
    let (client, config) = match connect(settings, metrics).await {
        Ok(connected) => connected,
        Err(error) => return not_ready(error.to_string()),
    };
    // Before the first readiness. It takes no longer than two questions may.
    drop(cilium.clone().wait_for(|state| state.asked).await);
    let mut tasks = JoinSet::new();
    let installed = match Installer::new(settings.install(), client.clone(), &config) {
        Ok(installer) => {
            let state = installer.state();
            tasks.spawn(installer.run(blocks.clone(), std::future::pending()));
            state
        }
        Err(error) => {
            tracing::error!(%error, "cannot install; trying again");
            return not_ready(error.to_string());
        }
    };
    let (bypass_out, bypass_in) = channel::channel(None);
    let bypass_file = settings.install().bypass_path();
    tasks.spawn(bypass::run(bypass_file, bypass_in, metrics.clone(), std::future::pending()));
    let (routed_out, routed) = channel::channel(Vec::new());
    if settings.host_routes && settings.mode.needs_host_routes() {
        tasks.spawn(host_routes::keep(routed));
    }
    let (out, mut updates) = mpsc::channel(MAX_UPDATES);
    let _watches = watch::start(&client, &settings.node, &out);
    let mut reconciler = Reconciler::new(settings.clone(), metrics.clone(), RealDisk, Arc::new(NoObserver));
    let mut ticks = tokio::time::interval(Duration::from_secs(settings.tick_seconds));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let started = Instant::now();
    let (mut skipped, mut broken) = (Vec::new(), FailedWatches::new());
    // Ready once: if the API server is away later, the node's pods start all the same.
    let mut stepped = false;
    loop {
        // When the next step is due.
        let mut due = tokio::select! {
            _ = ticks.tick() => Instant::now(),
            update = updates.recv() => {
                let Some(update) = update else { return "the watches ended".into() };
                let due = Instant::now() + grouping(&reconciler.index, &update);
                if let Some(reason) = apply(&mut reconciler, metrics, update, &mut skipped, &mut broken) {
                    return reason;
                }
                due
            }
        };
        // The channel is empty when the time is over, or everything in it is applied first.
        while let Some(update) = next_until(&mut updates, due).await {
            due = due.min(Instant::now() + grouping(&reconciler.index, &update));
            if let Some(reason) = apply(&mut reconciler, metrics, update, &mut skipped, &mut broken) {
                return reason;
            }
        }
        for skipped in skipped.drain(..) {
            report_skipped(&client, settings, &skipped).await;
        }
        let asked = reconciler.index.bypass();
        bypass_out.send_if_modified(|known| std::mem::replace(known, asked) != asked);
        let seen = reconciler.index.blocks();
        blocks_out.send_if_modified(|known| {
            let changed = *known != seen && reconciler.index.node.is_synced();
            if changed {
                known.clone_from(&seen);
            }
            changed
        });
        if reconciler.index.node.is_synced() {
            let seen = reconciler.index.routed();
            routed_out.send_if_modified(|known| {
                let changed = *known != seen;
                *known = seen;
                changed
            });
        }
        match reconciler.step(&client, started.elapsed()).await {
            Ok(step) if step.unauthorized => return "the API server does not accept the credentials".into(),
            Ok(step) => {
                stepped |= reconciler.index.is_synced() && step.failed == 0;
                let mut problems = installed.borrow().problems();
                problems.extend(cilium.borrow().problem(settings.mode));
                if !reconciler.index.is_synced() {
                    problems.push("the API server has not listed this node's objects yet".into());
                    let broken = broken.iter();
                    problems
                        .extend(broken.map(|(watch, (reason, _))| format!("no watch of {watch}: {reason}")));
                } else if !stepped {
                    problems.push("no step has succeeded yet; see the log".into());
                }
                ready.set(problems);
            }
            Err(error) => {
                metrics.errors.inc(["read_store"]);
                tracing::error!(%error, "cannot read the node's store");
                ready.set(vec![error.to_string()]);
            }
        }
    }
}

/// How long the step for an update may wait for others. Not for a pod that is new or has changed before its
/// ADD, which comes next.
fn grouping(index: &NodeIndex, update: &IndexUpdate) -> Duration {
    match update {
        IndexUpdate::Pod(CacheEvent::Applied((name, pod))) => {
            let known = index.pods.get(name);
            let is_new = known.is_none_or(|known| {
                known.runtime_uid != pod.runtime_uid || known.facts != pod.facts || !known.is_waiting
            });
            if pod.is_waiting && !pod.is_ending && is_new { Duration::ZERO } else { POD_GROUPING }
        }
        _ => EVENT_GROUPING,
    }
}

/// The next update, if one comes before this time or waits already.
async fn next_until(updates: &mut mpsc::Receiver<IndexUpdate>, due: Instant) -> Option<IndexUpdate> {
    match updates.try_recv() {
        Ok(update) => Some(update),
        Err(_) => tokio::time::timeout_at(due, updates.recv()).await.ok().flatten(),
    }
}

/// Applies an update; a reason if the session must end.
fn apply(
    reconciler: &mut Reconciler<RealDisk>,
    metrics: &AgentMetrics,
    update: IndexUpdate,
    skipped: &mut Vec<Skipped>,
    broken: &mut FailedWatches,
) -> Option<String> {
    if let Some(watch) = update.completes()
        && broken.remove(watch).is_some()
    {
        tracing::info!(watch, "the watch works again");
    }
    match &update {
        IndexUpdate::Skipped(object) => {
            metrics.skipped.inc();
            let Skipped { kind, name, why, .. } = object;
            tracing::warn!(kind, object = name, reason = why, "skipped an object that cannot be read");
            skipped.push(object.clone());
        }
        IndexUpdate::Failed { watch, reason, unauthorized } => {
            metrics.errors.inc(["watch"]);
            let logged =
                broken.get(watch).is_some_and(|(last, at)| last == reason && at.elapsed() < REPEAT_LOG);
            if logged {
                tracing::debug!(watch, reason, "a watch failed; listing again");
            } else {
                tracing::warn!(watch, reason, "a watch failed; listing again");
                broken.insert(watch, (reason.clone(), Instant::now()));
            }
            if *unauthorized {
                return Some(format!(
                    "the API server does not accept the credentials for a watch of {watch}"
                ));
            }
        }
        // A new list after a while without the server: everything that waits is tried at once.
        IndexUpdate::Pod(CacheEvent::ListComplete) => reconciler.forget_all_pauses(),
        _ => {}
    }
    reconciler.index.apply(update);
    None
}

/// Reports an object that was skipped as an event on it. The same event sent again is shown once.
async fn report_skipped(client: &kube::Client, settings: &AgentSettings, skipped: &Skipped) {
    let (about, message) = (events::skipped(skipped), skipped.to_string());
    let event = NewEvent { about, reason: "Unreadable", message, warning: true };
    let api = Connection::with_client(client.clone(), settings.client.origin(), Duration::from_secs(1));
    events::send(&mut ApiWriter::new(api, &NoObserver), &event).await;
}
