//! Pods on the lab: how long they take to start, to come back and to be reached, and what the agent costs.

use std::thread;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, PostParams};
use kube::runtime::wait::{Condition, await_condition};
use serde_json::{Value, json};

use super::local::{compared, progress};
use super::measure::Times;
use super::report::Row;
use crate::support::lab::Mode;
use crate::support::lab::api::named;
use crate::support::lab::reach;
use crate::support::lab::stage::Stage;
use crate::support::lab::workloads::{plain, pod, probed_spec, spec, stateful_set, sticky};

/// What the table is about.
pub const ABOUT: &str = "\
    Pods on the lab (docs/lab.md) in `crd` mode with vxlan, median (99th percentile) in milliseconds. For\n\
    stock Cilium the node's configuration is replaced from pod to pod by that of cilium-cni alone.";

const NAMESPACE: &str = "bench";
const STARTS: usize = 120;
const RECREATES: usize = 8;
const MOVES: usize = 6;
/// How long the agents are left alone, to see what they cost: all that they do now and then comes once in
/// this time.
const IDLE: Duration = Duration::from_secs(300);
/// Sorts before ours: the runtime takes the first.
const STOCK: &str = "/etc/cni/net.d/00-stock.conflist";

/// All rows, in the order of the figures.
pub fn rows() -> Vec<Row> {
    let stage = Stage::of(Mode::Crd);
    stage.lab.namespace(NAMESPACE);
    reach::start_clients(&stage, NAMESPACE);
    let mut rows = vec![starts(&stage), recreates(&stage), moves(&stage)];
    rows.extend(agent(&stage));
    stage.lab.delete_namespace(NAMESPACE);
    rows
}

fn is_ready() -> impl Condition<Pod> {
    |pod: Option<&Pod>| {
        let conditions = pod.and_then(|pod| pod.status.as_ref()?.conditions.as_ref());
        conditions.into_iter().flatten().any(|one| one.type_ == "Ready" && one.status == "True")
    }
}

/// A new pod under a name, with the wanted state of its own.
fn is_other(uid: String, wanted: impl Condition<Pod>) -> impl Condition<Pod> {
    move |pod: Option<&Pod>| {
        pod.is_some_and(|pod| pod.metadata.uid.as_deref() != Some(&uid)) && wanted.matches_object(pod)
    }
}

fn runs(pod: Option<&Pod>) -> bool {
    pod.and_then(|pod| pod.status.as_ref()?.phase.as_deref()) == Some("Running")
}

/// From the creation of a pod that is bound to a node until it is Ready, as a watch tells; then it is
/// deleted.
fn start(stage: &Stage, name: &str, labels: Value) -> Duration {
    let mut bound = spec(None);
    bound["nodeName"] = "node-1".into();
    let object: Pod = serde_json::from_value(pod(NAMESPACE, name, labels, json!({}), bound)).expect("a pod");
    let pods: Api<Pod> = Api::namespaced(stage.api.client(), NAMESPACE);
    let awaited = name.to_owned();
    let took = stage.api.run(async move {
        let started = Instant::now();
        pods.create(&PostParams::default(), &object).await.expect("it can be created");
        await_condition(pods.clone(), &awaited, is_ready()).await.expect("a watch");
        let took = started.elapsed();
        pods.delete(&awaited, &DeleteParams::default()).await.expect("it can be deleted");
        took
    });
    stage.api.gone(NAMESPACE, name);
    took
}

fn starts(stage: &Stage) -> Row {
    progress("pods with us and with stock Cilium, turn by turn");
    let stock =
        r#"{"cniVersion":"1.0.0","name":"stock","plugins":[{"type":"cilium-cni","enable-debug":false}]}"#;
    let (mut theirs, mut ours) = (Times::default(), Times::default());
    for round in 0..=STARTS {
        // Who is first changes from round to round: the second of a pair starts while the end of the first
        // one still keeps the machine busy.
        for stock_is_next in if round % 2 == 0 { [true, false] } else { [false, true] } {
            // The runtime sees the folder change at once.
            let (change, name, labels) = if stock_is_next {
                (format!("echo '{stock}' >{STOCK}"), format!("stock-{round}"), plain("stock"))
            } else {
                (format!("rm -f {STOCK}"), "sticky-0".into(), sticky("sticky"))
            };
            stage.lab.must(&["on", "node-1", "sh", "-c", &change]);
            let took = start(stage, &name, labels);
            // The first ones fill caches.
            if round > 0 {
                if stock_is_next { &mut theirs } else { &mut ours }.push(took);
            }
        }
    }
    compared("pod start, bound to Ready (ours: a sticky pod)", &theirs, &ours, Some(1.02))
}

fn told(times: &Times) -> String {
    format!("{:.0} ({:.0}), n={}", times.median(), times.p99(), times.count())
}

fn recreates(stage: &Stage) -> Row {
    progress("recreating a pod without grace");
    stage.api.create(stateful_set(NAMESPACE, "hasty", 1, spec(None)));
    let mut times = Times::default();
    for _ in 0..RECREATES {
        let old = stage.api.ready(NAMESPACE, "hasty-0");
        let pods: Api<Pod> = Api::namespaced(stage.api.client(), NAMESPACE);
        times.push(stage.api.run(async move {
            let started = Instant::now();
            let now = DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
            pods.delete("hasty-0", &now).await.expect("it can be deleted");
            await_condition(pods, "hasty-0", is_other(old.uid, runs)).await.expect("a watch");
            started.elapsed()
        }));
    }
    Row {
        work: "recreate of a sticky pod with grace period 0, delete to Running".into(),
        peer: "–".into(),
        ours: told(&times),
        ratio: None,
        bar: "≤ 4 s".into(),
        met: Some(times.median() <= 4000.0),
    }
}

fn moves(stage: &Stage) -> Row {
    progress("planned moves");
    stage.api.create(stateful_set(NAMESPACE, "moved", 1, probed_spec()));
    let mut times = Times::default();
    for _ in 0..MOVES {
        let old = stage.api.ready(NAMESPACE, "moved-0");
        let node = named("v1", "Node", "", &old.node);
        stage.api.patch(node.clone(), json!({"spec": {"unschedulable": true}}));
        let pods: Api<Pod> = Api::namespaced(stage.api.client(), NAMESPACE);
        let uid = old.uid.clone();
        let ready = stage.api.run(async move {
            pods.delete("moved-0", &DeleteParams::default()).await.expect("it can be deleted");
            await_condition(pods, "moved-0", is_other(uid, is_ready())).await.expect("a watch");
            Instant::now()
        });
        // kubelet's probes reached it already: it is Ready.
        let reached = reach::times(stage, NAMESPACE, &reach::everyone(), old.address(), ready);
        stage.api.patch(node, json!({"spec": {"unschedulable": null}}));
        let slowest =
            reached.into_iter().map(|(who, time)| time.unwrap_or_else(|why| panic!("{who:?}: {why}"))).max();
        times.push(slowest.expect("four of them"));
    }
    Row {
        work: "reached by pods and hosts of both nodes after a planned move, from Ready".into(),
        peer: "–".into(),
        ours: told(&times),
        ratio: None,
        bar: "≤ 1 s".into(),
        met: Some(times.median() <= 1000.0),
    }
}

/// The agent's resident memory in MB, and the processor time that it has used, in seconds.
fn cost(stage: &Stage) -> (f64, f64) {
    // Its exit status tells whether all runs.
    let status = stage.lab.attempt(&["status"]).unwrap_or_else(|output| output);
    let line = status.lines().find(|line| line.starts_with("sticky-agent@node-1")).expect("the agent runs");
    let pid = line.split_whitespace().skip_while(|word| *word != "pid").nth(1).expect("a pid");
    let read = |file: &str| std::fs::read_to_string(format!("/proc/{pid}/{file}")).expect("the agent runs");
    let memory = read("status");
    let memory = memory.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("its memory");
    let memory: f64 = memory.trim().trim_end_matches(" kB").parse().expect("a number");
    let stat = read("stat");
    let fields: Vec<&str> = stat.rsplit_once(") ").expect("a stat").1.split(' ').collect();
    let ticks: f64 = [11, 12].iter().map(|at| fields[*at].parse::<f64>().expect("ticks")).sum();
    // USER_HZ is 100 on every architecture that Cilium runs on.
    (memory / 1024.0, ticks / 100.0)
}

/// Requests that the agent has made.
fn requests(stage: &Stage) -> f64 {
    let page = stage.lab.must(&["on", "node-1", "curl", "-sf", "http://127.0.0.1:9977/metrics"]);
    let lines = page.lines().filter(|line| line.starts_with("sticky_ipam_agent_api_requests_total"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

fn agent(stage: &Stage) -> Vec<Row> {
    progress("leaving the agents alone");
    let (before, asked) = (cost(stage), requests(stage));
    thread::sleep(IDLE);
    let (after, asked) = (cost(stage), requests(stage) - asked);
    let processor = (after.1 - before.1) / IDLE.as_secs_f64() * 100.0;
    let minutely = asked / IDLE.as_secs_f64() * 60.0;
    let row = |work: &str, ours: String, bar: &str, met: bool| Row {
        work: work.to_owned(),
        peer: "–".into(),
        ours,
        ratio: None,
        bar: bar.to_owned(),
        met: Some(met),
    };
    vec![
        row("agent: resident memory", format!("{:.1} MB", after.0), "< 30 MB", after.0 < 30.0),
        row("agent: processor when idle", format!("{processor:.2} % of a core"), "< 1 %", processor < 1.0),
        row("agent: requests per minute when idle", format!("{minutely:.1}"), "≤ 2", minutely <= 2.0),
    ]
}
