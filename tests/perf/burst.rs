//! Many ordinary pods at once on one node, with us and with stock Cilium in `cluster-pool`: a drain, a
//! scale-up, a node that joins. Each side has the lab for itself, in turn.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use futures_util::{StreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::{Value, json};

use super::local::progress;
use super::report::Row;
use crate::support::lab::api::{ApiServer, named};
use crate::support::lab::workloads::{plain, pod, spec};
use crate::support::lab::{Flavour, FreeMachine, Lab, Mode, folder};

/// What the table is about.
pub const ABOUT: &str = "\
    Ordinary pods on the lab (docs/lab.md) with vxlan, ours in `crd` mode, the peer without us in\n\
    `cluster-pool`. All pods of a row are created at once, bound to the node. The time is from the first\n\
    creation to the last pod Running, mean over the rounds; both sides take turns, each with a lab of its\n\
    own. A failed sandbox is one that the kubelet reports in its log. Writes are those of the `spec` of the\n\
    node's CiliumNode, which every cilium-agent of a cluster watches.";

/// Pods at once on a node that has run pods before; the same node has all of them, in this order.
const BURSTS: [usize; 2] = [60, 110];
/// Pods at once on a node that has just joined.
const ON_NEW_NODE: usize = 100;
const NODE: &str = "node-1";
const NEW_NODE: &str = "node-3";
/// How often each side has its turn.
const ROUNDS: usize = 2;
/// Creations that are sent without waiting for the answers to earlier ones.
const CREATIONS: usize = 20;
/// Between two looks at the pods.
const GLANCE: Duration = Duration::from_millis(250);
/// How long a burst may take at all. With the failures that this is about it takes minutes.
const PATIENCE: Duration = Duration::from_secs(900);

/// What one burst came to.
#[derive(Clone, Copy, Default)]
struct Burst {
    took: Duration,
    failed: usize,
    writes: u64,
}

/// The bursts of one side, a list of rounds per burst.
#[derive(Default)]
struct Side(Vec<Vec<Burst>>);

impl Side {
    fn push(&mut self, at: usize, burst: Burst) {
        if self.0.len() <= at {
            self.0.resize_with(at + 1, Vec::new);
        }
        self.0[at].push(burst);
    }

    fn seconds(&self, at: usize) -> f64 {
        let all = self.0[at].iter().map(|burst| burst.took.as_secs_f64());
        all.sum::<f64>() / self.0[at].len() as f64
    }

    fn failed(&self, at: usize) -> usize {
        self.0[at].iter().map(|burst| burst.failed).sum()
    }

    fn told(&self, at: usize) -> String {
        let writes: u64 = self.0[at].iter().map(|burst| burst.writes).sum();
        let rounds = self.0[at].len();
        let writes = writes as f64 / rounds as f64;
        let failed = self.failed(at);
        format!("{:.1} s, {failed} failed, {writes:.1} writes, n={rounds}", self.seconds(at))
    }
}

/// All rows, in the order of the bursts.
pub fn rows() -> Vec<Row> {
    let flavours = [Flavour::ClusterPool, Flavour::Ours(Mode::Crd)];
    let mut sides = [Side::default(), Side::default()];
    for round in 0..ROUNDS {
        // Who comes first alternates: what the machine does beside this hits both.
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        for side in order {
            // A lab without pods, images in no cache, and no node that joined.
            drop(FreeMachine::take());
            let lab = Lab::of(flavours[side]);
            let api = ApiServer::connect();
            for (at, count) in BURSTS.into_iter().enumerate() {
                sides[side].push(at, burst(&lab, &api, NODE, count));
            }
            lab.must(&["add-node", NEW_NODE]);
            sides[side].push(BURSTS.len(), burst(&lab, &api, NEW_NODE, ON_NEW_NODE));
        }
    }
    drop(FreeMachine::take());
    let [theirs, ours] = sides;
    let places = [(BURSTS[0], "a node"), (BURSTS[1], "a node"), (ON_NEW_NODE, "a node that has just joined")];
    let row = |(at, (count, place)): (usize, (usize, &str))| {
        let ratio = ours.seconds(at) / theirs.seconds(at);
        Row {
            work: format!("{count} ordinary pods at once on {place}, to the last Running"),
            peer: theirs.told(at),
            ours: ours.told(at),
            ratio: Some(ratio),
            bar: "≤ 1.1×, no more failed sandboxes".into(),
            met: Some(ratio <= 1.1 && ours.failed(at) <= theirs.failed(at)),
        }
    };
    places.into_iter().enumerate().map(row).collect()
}

/// Creates the pods, waits until all of them run, and removes them.
fn burst(lab: &Lab, api: &ApiServer, node: &str, count: usize) -> Burst {
    let namespace = format!("burst-{node}-{count}");
    lab.namespace(&namespace);
    let (failed, writes) = (failed_sandboxes(node), writes_of(api, node));
    let pods: Api<Pod> = Api::namespaced(api.client(), &namespace);
    let objects: Vec<Pod> = (0..count)
        .map(|number| {
            let mut bound = spec(None);
            bound["nodeName"] = node.into();
            let object = pod(&namespace, &format!("web-{number}"), plain("web"), json!({}), bound);
            serde_json::from_value(object).expect("a pod")
        })
        .collect();
    let took = api.run(async move {
        let started = Instant::now();
        let creations = stream::iter(objects).map(|object| {
            let pods = pods.clone();
            async move { pods.create(&PostParams::default(), &object).await.expect("it can be created") }
        });
        creations.buffer_unordered(CREATIONS).for_each(|_| async {}).await;
        loop {
            let seen =
                pods.list(&ListParams::default().match_any()).await.expect("the administrator may look");
            let running = seen.items.iter().filter(|pod| runs(pod)).count();
            if running == count {
                return started.elapsed();
            }
            assert!(started.elapsed() < PATIENCE, "{running} of {count} pods run after {PATIENCE:?}");
            tokio::time::sleep(GLANCE).await;
        }
    });
    let burst =
        Burst { took, failed: failed_sandboxes(node) - failed, writes: writes_of(api, node) - writes };
    progress(&format!(
        "{count} pods on {node}: {:.1} s, {} failed sandboxes, {} writes",
        burst.took.as_secs_f64(),
        burst.failed,
        burst.writes
    ));
    remove(api, &namespace);
    burst
}

fn runs(pod: &Pod) -> bool {
    pod.status.as_ref().and_then(|status| status.phase.as_deref()) == Some("Running")
}

/// Deletes every pod of a namespace, and waits until none is left.
fn remove(api: &ApiServer, namespace: &str) {
    let pods: Api<Pod> = Api::namespaced(api.client(), namespace);
    api.run(async move {
        let everything = ListParams::default();
        pods.delete_collection(&DeleteParams::default(), &everything).await.expect("they can be deleted");
        let started = Instant::now();
        while !pods.list(&everything).await.expect("the administrator may look").items.is_empty() {
            assert!(started.elapsed() < PATIENCE, "the pods do not end");
            tokio::time::sleep(GLANCE).await;
        }
    });
    // Sandboxes are removed after their pods: the next burst must not share the machine with that.
    thread::sleep(Duration::from_secs(5));
}

/// Sandboxes that could not be started, as the node's kubelet says.
fn failed_sandboxes(node: &str) -> usize {
    let log = fs::read_to_string(folder().join(format!("log/kubelet@{node}.log"))).expect("kubelet's log");
    log.lines().filter(|line| line.contains("RunPodSandbox from runtime service failed")).count()
}

/// How often the `spec` of the node's CiliumNode was written.
fn writes_of(api: &ApiServer, node: &str) -> u64 {
    let found = api.get(named("cilium.io/v2", "CiliumNode", "", node));
    found.as_ref().and_then(|node: &Value| node["metadata"]["generation"].as_u64()).unwrap_or_default()
}
