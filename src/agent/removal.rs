//! `uninstall --watch`: removes everything from the host, then ends what the node's sandboxes leave, until
//! it is stopped. On containerd no DEL comes to the plugin once its conflist is gone, so this is how the
//! addresses of pods that end after that are released and detached.
//!
//! Must never begin anything: no pod is prepared, no claim granted, no pool filled.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::api::Api;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::agent::flags::AgentSettings;
use crate::agent::install::{self, DelConflist, Removed};
use crate::agent::metrics::AgentMetrics;
use crate::agent::reconciler::Reconciler;
use crate::agent::watch::{self, IndexUpdate};
use crate::cluster::writer::apply::NoObserver;
use crate::runtime;
use crate::store::RealDisk;

/// Between two looks at the host.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// Between two tries to reach the API server. The host is looked at meanwhile.
const RECONNECT_EVERY: Duration = Duration::from_secs(15);
const MAX_UPDATES: usize = 512;
/// How long the API server may take to say which runtime the node has.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Runs until `end` comes. What fails is logged and tried again.
pub async fn run(settings: AgentSettings, force: bool, end: impl Future<Output = ()>) {
    let settings = Arc::new(settings);
    let mut host = Host { force, ..Host::default() };
    let work = async {
        loop {
            host.look(&settings);
            session(&settings, &mut host).await;
            tokio::time::sleep(LOOK_EVERY.min(RECONNECT_EVERY)).await;
        }
    };
    tokio::select! {
        () = end => {}
        () = work => {}
    }
}

/// What is known of the host.
#[derive(Default)]
struct Host {
    force: bool,
    del: DelConflist,
    reported: String,
    was_removed: bool,
}

impl Host {
    /// Removes what is there, and prints what has changed.
    fn look(&mut self, settings: &AgentSettings) {
        let installed = settings.install();
        let report = match install::uninstall(&installed, self.force, self.del) {
            Ok(done) => {
                let comes_back = self.was_removed && done.removed.contains(&installed.conflist_path());
                if comes_back {
                    tracing::warn!(
                        "the conflist was put there again; delete the DaemonSet sticky-ipam-agent first"
                    );
                }
                self.was_removed = true;
                summary(&done, settings)
            }
            Err(error) => error.to_string(),
        };
        if report != self.reported {
            for line in report.lines() {
                tracing::info!(node = settings.node, "{line}");
            }
            self.reported = report;
        }
    }
}

/// What a look came to, in lines.
fn summary(done: &Removed, settings: &AgentSettings) -> String {
    let mut text = done.to_string();
    if done.kept.is_empty() {
        let node = &settings.node;
        text = text.replace("nothing of ours is installed\n", "");
        text += &format!("finished: nothing of sticky-ipam is installed on node {node}\n");
        if done.attached > 0 {
            let records = install::attached(&settings.install()).unwrap_or_default();
            for record in records {
                let addresses = crate::node::list(&record.addresses);
                text += &format!("still recorded: {addresses} of {}, which runs\n", record.holder());
            }
        }
    }
    text
}

/// One connection to the API server, for as long as it works.
async fn session(settings: &Arc<AgentSettings>, host: &mut Host) {
    let metrics = Arc::new(AgentMetrics::default());
    let connected = runtime::client::connect(settings.client.kubeconfig.as_deref(), |_: &str| {}).await;
    let client = match connected {
        Ok((client, _)) => client,
        Err(error) => return tracing::warn!(%error, "no way to the API server; trying again"),
    };
    match del_conflist(&client, &settings.node).await {
        Ok(del) => host.del = del,
        Err(why) => return tracing::warn!(reason = why, "cannot read the Node; trying again"),
    }
    host.look(settings);
    let (out, mut updates) = mpsc::channel(MAX_UPDATES);
    let _watches = watch::start(&client, &settings.node, &out);
    let observer = Arc::new(NoObserver);
    let mut reconciler = Reconciler::new(settings.clone(), metrics, RealDisk, observer).only_ending();
    let mut looks = tokio::time::interval(LOOK_EVERY);
    let started = Instant::now();
    loop {
        tokio::select! {
            _ = looks.tick() => {}
            update = updates.recv() => match update {
                None => return,
                Some(IndexUpdate::Failed { watch, reason, unauthorized }) => {
                    tracing::warn!(watch, reason, "a watch failed; listing again");
                    if unauthorized {
                        return;
                    }
                }
                Some(update) => {
                    reconciler.index.apply(update);
                    continue;
                }
            }
        }
        host.look(settings);
        if let Err(error) = reconciler.step(&client, started.elapsed()).await {
            tracing::error!(%error, "cannot read the node's store");
        }
    }
}

/// Which conflist the node's runtime uses for DEL.
async fn del_conflist(client: &kube::Client, node: &str) -> Result<DelConflist, String> {
    let nodes: Api<Node> = Api::all(client.clone());
    let read = tokio::time::timeout(TIMEOUT, nodes.get(node)).await;
    let read = read.map_err(|_| format!("the API server did not answer within {TIMEOUT:?}"))?;
    let found = read.map_err(|error| error.to_string())?;
    let info = found.status.and_then(|status| status.node_info);
    let version = info.map(|info| info.container_runtime_version).unwrap_or_default();
    Ok(DelConflist::of_runtime(&version))
}
