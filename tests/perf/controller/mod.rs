//! The controller with ten thousand bindings: what it costs, and how soon it acts.

mod load;
mod observed;
mod replica;
mod writer;

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use ipnet::IpNet;
use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::json;
use sticky_ipam::cluster::objects::cilium::CiliumNode;

use self::load::{LABEL, for_all};
use self::observed::{Told, Watch};
use self::replica::Replica;
use self::writer::Hand;
use super::local::progress;
use super::measure::Times;
use super::report::Row;
use crate::support::api_server::ApiServer;
use crate::support::api_server::access::Access;
use crate::support::api_server::case::Case;

/// What the table is about.
pub const ABOUT: &str = "\
    One controller as it is shipped, with the shipped roles, an etcd, which has every write on the disk,\n\
    and a kube-apiserver on the loopback, all on this machine. 10,000 pods run on 100 nodes, each with\n\
    its binding; 2,000 more bindings are kept for a workload without pods. Times are taken by a separate\n\
    watch, median (99th percentile) in milliseconds. `--proof-gap=0s`, so that a measured time includes\n\
    no waiting; `--recycle-rate=5000`. There are no CiliumEndpoints.";

/// Bindings with a pod that runs.
const BINDINGS: usize = 10_000;
/// Bindings of a workload that is there and has no pods; it is deleted in the end.
const RETAINED: usize = 2_000;
/// Workloads with one binding each, deleted one by one.
const SINGLE: usize = 40;
/// Pods that begin to run one by one.
const EVENTS: usize = 200;
/// Pods that become sticky at once.
const MANY: usize = 1_000;
/// Nodes that come at once, and pools of 256 blocks each.
const NODES: usize = 1_100;
const POOLS: usize = 5;
/// How long the controller is left alone.
const IDLE: Duration = Duration::from_secs(60);
/// No request within this time: it has come to rest.
const REST: Duration = Duration::from_secs(4);
/// The range of the Sticky pool.
const STICKY: &str = "12.0.0.0/16";
const STICKY_FIRST: u32 = 0x0c00_0000;
/// The namespace that becomes sticky as a whole.
const MANY_NAMESPACE: &str = "many";

/// All rows, in the order of the figures.
pub fn rows(program: &Path) -> Vec<Row> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    progress("an API server");
    let server = runtime.block_on(async {
        let server = ApiServer::start_durable().await;
        server.install_our_kinds().await;
        server.install_cilium_kinds().await;
        server
    });
    let case = runtime.block_on(server.case());
    let stage = Stage { runtime: &runtime, server: &server, admin: case.admin(), case };
    let loading = stage.spent();
    stage.load();
    loading.tell(&stage, None);
    let kubeconfig = runtime.block_on(stage.case.controller()).kubeconfig();
    let mut rows = Vec::new();
    progress("starting the controller");
    let (started, before) = (Instant::now(), stage.spent());
    let mut replica = Replica::start(program, &kubeconfig, stage.case.namespace(), &flags(&stage.case));
    let in_step = replica.in_step();
    let whole = started.elapsed().as_secs_f64();
    before.tell(&stage, Some(&replica));
    rows.push(row(
        "from the arrival of the lists to initial sync, with 12,000 bindings",
        format!("{in_step:.2} s"),
        "< 1 s",
        in_step < 1.0,
    ));
    rows.push(plain(
        "from the start of the process to initial sync (lists 36,000 objects)",
        format!("{whole:.1} s"),
    ));
    rows.extend(stage.idle(&mut replica));
    let watch = Watch::start(&stage.admin);
    let parts: [Part<'_>; 5] = [Stage::events, Stage::many, Stage::single, Stage::recycling, Stage::nodes];
    for part in parts {
        let before = stage.spent_with(&replica);
        rows.extend(part(&stage, &mut replica, &watch));
        before.tell(&stage, Some(&replica));
    }
    println!("{}", replica.rounds());
    let (now, most) = (replica.memory("VmRSS"), replica.memory("VmHWM"));
    rows.push(plain("resident memory after all of this; at most", format!("{now:.0} MB; {most:.0} MB")));
    println!("the controller warned {} times", replica.warnings());
    rows
}

fn flags(case: &Case<'_>) -> Vec<String> {
    let selector = json!({"matchLabels": {LABEL: "yes"}});
    [
        format!("--label-selector={selector}"),
        "--proof-gap=0s".to_owned(),
        "--recycle-rate=5000".to_owned(),
        // Blocks come from the pools of the bench alone.
        "--cluster-pool-ipv4-cidr=".to_owned(),
        format!("--block-namespace={}", case.block_namespace()),
    ]
    .into()
}

fn row(work: &str, ours: String, bar: &str, met: bool) -> Row {
    Row { work: work.to_owned(), peer: String::new(), ours, ratio: None, bar: bar.to_owned(), met: Some(met) }
}

fn plain(work: &str, ours: String) -> Row {
    Row { work: work.to_owned(), peer: String::new(), ours, ratio: None, bar: "–".to_owned(), met: None }
}

fn told(times: &Times) -> String {
    format!("{:.1} ({:.1}), n={}", times.median(), times.p99(), times.count())
}

/// An address of the Sticky pool.
fn sticky_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::from_bits(STICKY_FIRST + u32::try_from(number).expect("not so many"))
}

/// Where the Sticky pool's addresses of each part begin.
const OF_EVENTS: usize = 1;
const OF_MANY: usize = 5_000;
const OF_RETAINED: usize = 10_000;
const OF_SINGLE: usize = 20_000;

/// A part of the bench, on a controller that runs.
type Part<'a> = fn(&Stage<'a>, &mut Replica, &Watch) -> Vec<Row>;

/// Processor time at a moment, in seconds: etcd's and the API server's, the controller's, and the bench's
/// own.
struct Spent {
    at: Instant,
    server: f64,
    bench: f64,
    controller: f64,
    requests: Vec<(&'static str, f64)>,
}

/// The sorts of requests that are told.
const SORTS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];

impl Spent {
    /// Says what was spent since then: on a machine that is not quiet this tells more than the clock.
    fn tell(&self, stage: &Stage<'_>, replica: Option<&Replica>) {
        let (now, controller) = (stage.spent(), replica.map_or(0.0, Replica::processor));
        let (wall, server) = (now.at.duration_since(self.at).as_secs_f64(), now.server - self.server);
        let (controller, bench) = (controller - self.controller, now.bench - self.bench);
        let sent = replica.into_iter().flat_map(|replica| {
            self.requests.iter().map(|(sort, before)| format!(", {sort} {}", replica.requests(sort) - before))
        });
        let sent = sent.collect::<String>();
        println!(
            "  {wall:.1} s; processor: controller {controller:.2} s, API server and etcd {server:.2} s, the \
             bench {bench:.2} s{sent}"
        );
    }
}

struct Stage<'a> {
    server: &'a ApiServer,
    runtime: &'a tokio::runtime::Runtime,
    case: Case<'a>,
    admin: Access,
}

impl Stage<'_> {
    fn spent(&self) -> Spent {
        let server = self.server.pids().iter().map(|pid| replica::processor(*pid)).sum();
        let bench = replica::processor(std::process::id());
        Spent { at: Instant::now(), server, bench, controller: 0.0, requests: Vec::new() }
    }

    fn spent_with(&self, replica: &Replica) -> Spent {
        let requests = SORTS.map(|sort| (sort, replica.requests(sort))).to_vec();
        Spent { controller: replica.processor(), requests, ..self.spent() }
    }

    /// Everything that is there before the controller.
    fn load(&self) {
        progress("10,000 pods with their bindings, and 2,000 bindings without pods");
        let (namespace, admin) = (self.case.namespace(), &self.admin);
        let mut hand = Hand::of(admin);
        load::pool(&mut hand, "sticky", "Sticky", &[STICKY.to_owned()]);
        load::namespace(&mut hand, MANY_NAMESPACE);
        hand.create("/api/v1/nodes", &json!({"metadata": {"name": "marking"}}));
        load::stateful_set(&mut hand, namespace, "kept", RETAINED);
        for_all(admin, 0..load::old_nodes(BINDINGS), load::old_node);
        for_all(admin, 0..BINDINGS, |hand, number| load::bound(hand, namespace, number));
        for_all(admin, 0..RETAINED, |hand, number| {
            load::retained(hand, namespace, "kept", number, sticky_address(OF_RETAINED + number), STICKY)
        });
        for_all(admin, 0..SINGLE, |hand, number| {
            let set = format!("single{number}");
            load::stateful_set(hand, namespace, &set, 1);
            load::retained(hand, namespace, &set, 0, sticky_address(OF_SINGLE + number), STICKY);
        });
        for_all(admin, 0..EVENTS, |hand, number| {
            let name = format!("event-{number}");
            load::pod(hand, namespace, &name, "marking", "event", json!({LABEL: "yes"}));
        });
        for_all(admin, 0..MANY, |hand, number| {
            let name = format!("many-{number}");
            load::pod(hand, MANY_NAMESPACE, &name, "marking", "many", json!({"app": "many"}));
            load::run(hand, MANY_NAMESPACE, &name, sticky_address(OF_MANY + number));
        });
    }

    /// Writes that the API server has counted, whoever sent them, but for leases.
    fn counted_writes(&self) -> f64 {
        let request = http::Request::get("/metrics").body(Vec::new()).expect("a request");
        let page = self.runtime.block_on(self.case.client().request_text(request)).expect("its metrics");
        let writes = page.lines().filter(|line| {
            line.starts_with("apiserver_request_total{")
                && ["POST", "PUT", "PATCH", "DELETE"]
                    .iter()
                    .any(|verb| line.contains(&format!("verb=\"{verb}\"")))
                && !line.contains("resource=\"leases\"")
        });
        writes.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
    }

    /// What it costs to be there.
    fn idle(&self, replica: &mut Replica) -> Vec<Row> {
        progress("leaving it alone");
        let asked = |replica: &Replica| replica.writes() + replica.requests("GET");
        let mut last = (asked(replica), Instant::now());
        replica.until("rest", |replica| {
            let now = asked(replica);
            if now != last.0 {
                last = (now, Instant::now());
            }
            last.1.elapsed() >= REST
        });
        let memory = replica.memory("VmRSS");
        let most = replica.memory("VmHWM");
        let before = (replica.writes(), self.counted_writes(), replica.requests("GET"), replica.processor());
        thread::sleep(IDLE);
        let writes = replica.writes() - before.0;
        let counted = self.counted_writes() - before.1;
        let minutely = (replica.requests("GET") - before.2) / IDLE.as_secs_f64() * 60.0;
        let processor = (replica.processor() - before.3) / IDLE.as_secs_f64() * 100.0;
        vec![
            row(
                "resident memory with 12,000 bindings and 11,200 pods (at most, while it started)",
                format!("{memory:.0} MB ({most:.0} MB)"),
                "< 100 MB",
                memory < 100.0,
            ),
            row(
                "writes per idle minute (those that the API server counted)",
                format!("{writes:.0} ({counted:.0})"),
                "none",
                writes == 0.0 && counted == 0.0,
            ),
            row(
                "requests per idle minute, without watches and the lease",
                format!("{minutely:.1}"),
                "≤ 2",
                minutely <= 2.0,
            ),
            plain("processor when idle", format!("{processor:.2} % of a core")),
        ]
    }

    /// From a pod that begins to run to its binding, one at a time.
    fn events(&self, replica: &mut Replica, watch: &Watch) -> Vec<Row> {
        progress("pods that begin to run, one by one");
        let namespace = self.case.namespace();
        let mut hand = Hand::of(&self.admin);
        let (mut decided, mut bound) = (Times::default(), Times::default());
        for number in 0..EVENTS {
            let (name, key) = (format!("event-{number}"), format!("{namespace}/event-{number}"));
            let started = Instant::now();
            load::run(&mut hand, namespace, &name, sticky_address(OF_EVENTS + number));
            // Two watches: either may be behind.
            let is_told = |told: &Told| told.bound.contains_key(&key) && told.decided.contains_key(&key);
            replica.until("its binding", |_| watch.look(is_told));
            let times = watch.look(|told| (told.decided[&key], told.bound[&key]));
            decided.push(times.0.saturating_duration_since(started));
            bound.push(times.1.saturating_duration_since(started));
        }
        println!("  the longest: decided {:?} ms, bound {:?} ms", decided.longest(6), bound.longest(6));
        vec![
            row(
                "from a pod's first status with an address to its claim",
                told(&decided),
                "99 of 100 < 50 ms",
                decided.p99() < 50.0,
            ),
            row(
                "from there to the binding, attached (StickyIP, sealed claim, attachment)",
                told(&bound),
                "99 of 100 < 100 ms",
                bound.p99() < 100.0,
            ),
        ]
    }

    /// A namespace of a thousand pods becomes sticky.
    fn many(&self, replica: &mut Replica, watch: &Watch) -> Vec<Row> {
        progress("a namespace of 1,000 pods becomes sticky");
        let namespaces: Api<Namespace> = Api::all(self.case.client());
        let sticky = Patch::Merge(json!({"metadata": {"annotations": {"sticky-ipam.io/sticky": "true"}}}));
        let params = PatchParams::default();
        let before = (replica.writes(), replica.requests("GET"));
        let started = Instant::now();
        self.runtime.block_on(namespaces.patch(MANY_NAMESPACE, &params, &sticky)).expect("it can be patched");
        let of_it = |told: &Told| {
            let first = format!("{MANY_NAMESPACE}/");
            told.bound
                .iter()
                .filter(|(name, _)| name.starts_with(&first))
                .map(|(_, at)| *at)
                .collect::<Vec<_>>()
        };
        replica.until("all bindings", |_| watch.look(|told| of_it(told).len()) == MANY);
        let last = watch.look(|told| of_it(told).into_iter().max()).expect("a thousand of them");
        let took = last.duration_since(started).as_secs_f64();
        // Events come after the bindings; a few may have come already.
        let a_pod = |requests: f64| requests / MANY as f64;
        let writes = a_pod(replica.writes() - before.0);
        let reads = a_pod(replica.requests("GET") - before.1);
        vec![
            row(
                "1,000 running pods adopted, from the namespace's annotation to the last binding",
                format!("{took:.2} s"),
                "< 5 s",
                took < 5.0,
            ),
            row(
                "requests for that, per pod: writes; reads",
                format!("{writes:.2}; {reads:.2}"),
                "3 writes, no read",
                writes < 3.5 && reads < 0.5,
            ),
        ]
    }

    fn delete_set(&self, name: &str) {
        let sets: Api<StatefulSet> = Api::namespaced(self.case.client(), self.case.namespace());
        self.runtime.block_on(sets.delete(name, &DeleteParams::default())).expect("it can be deleted");
    }

    /// Workloads with one address go, one by one.
    fn single(&self, replica: &mut Replica, watch: &Watch) -> Vec<Row> {
        progress("workloads with one address go, one by one");
        let namespace = self.case.namespace();
        let mut single = Times::default();
        for number in 0..SINGLE {
            let key = format!("{namespace}/single{number}-0");
            let started = Instant::now();
            self.delete_set(&format!("single{number}"));
            replica.until("its end", |_| watch.look(|told| told.resting.contains_key(&key)));
            let at = watch.look(|told| told.resting[&key]);
            single.push(at.saturating_duration_since(started));
        }
        vec![row(
            "from the deletion of a workload to the quarantine of its address (two checks)",
            told(&single),
            "99 of 100 < 1 s",
            single.p99() < 1000.0,
        )]
    }

    /// A workload with many addresses goes.
    fn recycling(&self, replica: &mut Replica, watch: &Watch) -> Vec<Row> {
        progress("a workload with 2,000 addresses goes");
        let namespace = self.case.namespace();
        let before = (replica.requests("DELETE"), replica.requests("PATCH"));
        let started = Instant::now();
        self.delete_set("kept");
        let first = format!("{namespace}/kept-");
        let count =
            |times: &BTreeMap<String, Instant>| times.keys().filter(|name| name.starts_with(&first)).count();
        let over = |told: &Told| count(&told.resting) == RETAINED && count(&told.gone) == RETAINED;
        replica.until("the end of all", |_| watch.look(over));
        let last = |times: &BTreeMap<String, Instant>| {
            let of_it = times.iter().filter(|(name, _)| name.starts_with(&first));
            of_it.map(|(_, at)| *at).max().expect("all of them")
        };
        let (gone, rest) = watch.look(|told| (last(&told.gone), last(&told.resting)));
        let rate = |at: Instant| RETAINED as f64 / at.duration_since(started).as_secs_f64();
        let written = (replica.requests("DELETE") - before.0, replica.requests("PATCH") - before.1);
        let each = |writes: f64| writes / RETAINED as f64;
        vec![
            row(
                "addresses released per second, for a workload with 2,000 (to the last quarantine)",
                format!("{:.0} ({:.0})", rate(gone), rate(rest)),
                "≥ 500",
                rate(gone) >= 500.0,
            ),
            row(
                "writes for that: a StickyIP; a claim",
                format!("{:.2}; {:.2}", each(written.0), each(written.1)),
                "≤ 1 each",
                each(written.0) <= 1.0 && each(written.1) <= 1.0,
            ),
        ]
    }

    /// More than a thousand nodes come, and get blocks.
    fn nodes(&self, replica: &mut Replica, _: &Watch) -> Vec<Row> {
        progress("1,100 nodes come");
        for_all(&self.admin, 0..NODES, load::new_node);
        let pools: Vec<(String, String)> =
            (0..POOLS).map(|number| (format!("pool-{number}"), format!("13.{number}.0.0/16"))).collect();
        let started = Instant::now();
        let mut hand = Hand::of(&self.admin);
        for (name, range) in &pools {
            load::pool(&mut hand, name, "NodeBlocks", std::slice::from_ref(range));
        }
        replica.until("all blocks", |replica| {
            let given = replica.metric("block_actions_total{action=\"assigned\"}").unwrap_or_default();
            given >= NODES as f64
        });
        // What was given is held; the nodes are written after that.
        let nodes: Api<CiliumNode> = Api::all(self.case.client());
        let mut ranges: Vec<IpNet> = Vec::new();
        replica.until("all nodes", |_| {
            let listed = self.runtime.block_on(nodes.list(&ListParams::default())).expect("a list");
            let all = listed.items.iter().filter(|node| node.name_any().starts_with("new-"));
            let with = all.filter(|node| !node.spec.ipam.pod_cidrs.is_empty()).count();
            ranges = listed
                .items
                .iter()
                .flat_map(|node| &node.spec.ipam.pod_cidrs)
                .map(|text| text.parse().unwrap())
                .collect();
            with == NODES
        });
        let took = started.elapsed().as_secs_f64();
        ranges.sort();
        let overlap = ranges.windows(2).filter(|pair| pair[0].contains(&pair[1])).count();
        vec![row(
            "1,100 new nodes with a block each, of 5 pools of 256 blocks; overlaps",
            format!("{took:.1} s; {overlap}"),
            "all, none overlapping",
            overlap == 0,
        )]
    }
}
