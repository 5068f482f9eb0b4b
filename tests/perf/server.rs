//! The plugin with an API server, against whereabouts on the same one.

use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use k8s_openapi::api::rbac::v1::PolicyRule;
use kube::api::{Api, PostParams};
use serde_json::json;
use sticky_ipam::cluster::objects::StickyIP;
use sticky_ipam::names::{AttachmentId, NetworkName, PodIdentity};
use sticky_ipam::store::{Decision, NodeTime, PreparedSticky, RealDisk, Store};
use tempfile::TempDir;

use super::local::{compared, progress};
use super::measure::{Call, Times};
use super::report::Row;
use crate::support::api_server::access::Access;
use crate::support::api_server::case::Case;
use crate::support::api_server::{ApiServer, Whereabouts};

/// What the table is about.
pub const ABOUT: &str = "\
    Wall-clock time of a whole run of the plugin as the runtime calls it, median (99th percentile) in\n\
    milliseconds, against an idle etcd, which has every write on the disk, and kube-apiserver on the\n\
    loopback. Both use service-account tokens. A bound pod is one whose StickyIP exists; whereabouts\n\
    gives any free address. Each binary is on the disk as its own installer writes it: sticky-ipam's in\n\
    pieces of 2 MiB by the agent, whereabouts' by cp. sticky-ipam writes its line to the log, as the\n\
    shipped conflists have it; whereabouts logs nothing. ADDs run in blocks, eleven of one plugin and\n\
    then eleven of the other, and the first of each block does not count: the server may still work for\n\
    the other's last DEL. The limit is on those. The row below is for ADDs that start on an idle server;\n\
    there the ratio is higher.";

const ROUNDS: usize = 200;
/// So many of one plugin, then of the other: a machine that becomes slower does so for both, and what a
/// server still does for one is not in the other's time.
const BLOCK: usize = 10;
/// A machine that has come to rest takes longer to get going, and that is in the time of whoever comes first.
const REST: Duration = Duration::from_millis(50);
const AFTER_REST: usize = 50;
const AT_ONCE: usize = 50;
const AT_ONCE_ROUNDS: usize = 5;

/// A node with our plugin.
struct Node<'a> {
    plugin: &'a Path,
    name: String,
    data: TempDir,
}

/// A pod as the runtime names it.
#[derive(Clone)]
struct Pod {
    namespace: String,
    name: String,
    uid: String,
}

impl Node<'_> {
    /// The configuration, with the cluster's part if there are credentials.
    fn config(&self, kubeconfig: Option<&Path>) -> String {
        // The level is the default: a line a verb.
        let mut sticky = json!({"logFile": self.data.path().join("log")});
        if let Some(kubeconfig) = kubeconfig {
            sticky["cluster"] = json!({
                "kubeconfig": kubeconfig, "node": self.name, "timeout": "60s",
                "selector": {"matchLabels": {"sticky": "yes"}},
            });
        }
        let ipam = json!({"type": "sticky-ipam", "subnet": "10.200.0.0/16", "dataDir": self.data.path(), "sticky": sticky});
        json!({"cniVersion": "1.0.0", "name": "net", "type": "cilium-cni", "ipam": ipam}).to_string()
    }

    fn run(&self, verb: &str, pod: &Pod, container: &str, config: &str) -> Duration {
        let Pod { namespace, name, uid } = pod;
        let args =
            format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_UID={uid}");
        Call { plugin: self.plugin, verb, container, config, args: &args }.run()
    }

    fn store(&self) -> Store {
        let now = NodeTime::now("/proc/sys/kernel/random/boot_id".as_ref()).unwrap();
        Store::new(
            RealDisk,
            self.data.path(),
            &NetworkName::new("net").unwrap(),
            now,
            Duration::from_secs(10),
        )
    }

    /// What the agent leaves for a pod that it has attached.
    fn prepare(&self, pod: &Pod, sticky: &StickyIP) {
        let prepared = PreparedSticky {
            namespace: pod.namespace.clone(),
            name: pod.name.clone(),
            addresses: sticky.spec.addresses.clone(),
            resource: format!("{}/Pod/{}", pod.namespace, pod.name),
            attachment_id: AttachmentId::Prepared(pod.uid.clone()),
        };
        let identity = PodIdentity::new(&pod.namespace, &pod.name, Some(&pod.uid)).unwrap();
        let store = self.store();
        let decision = Decision::about(&identity, Some(prepared), "bench", store.now().clone()).unwrap();
        let mut locked = store.lock().unwrap();
        locked.put_decision(&decision).unwrap();
        locked.commit().unwrap();
    }
}

/// All rows, in the order of the figures.
pub fn rows(plugins: &Plugins) -> Vec<Row> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(measured(plugins))
}

/// The plugins under test.
pub struct Plugins {
    pub ours: PathBuf,
    pub whereabouts: PathBuf,
}

/// whereabouts with the credentials of its service account.
struct Peer<'a> {
    program: &'a Path,
    access: Access,
}

impl Peer<'_> {
    fn with(&self, range: &str) -> Whereabouts {
        Whereabouts::of(self.program.to_owned(), &self.access, range.parse().unwrap())
    }
}

async fn measured(plugins: &Plugins) -> Vec<Row> {
    progress("an API server");
    let server = ApiServer::start_durable().await;
    server.install_our_kinds().await;
    server.install_cilium_kinds().await;
    server.install_whereabouts_kinds().await;
    let case = server.case().await;
    let node = Node { plugin: &plugins.ours, name: case.unique("node"), data: tempfile::tempdir().unwrap() };
    let access = case.agent(&node.name).await;
    cilium_node(&case, &node.name).await;
    let access_of_peer = case.service_account("whereabouts", whereabouts_rules()).await;
    let peer = Peer { program: &plugins.whereabouts, access: access_of_peer };

    let config = node.config(Some(&access.kubeconfig()));
    let mut rows = bound(&case, &node, &config, &peer).await;
    rows.push(prepared(&case, &node, &access).await);
    rows.extend(at_once(&case, &node, &config, &peer).await);
    rows
}

async fn cilium_node(case: &Case<'_>, name: &str) {
    use kube::core::{ApiResource, DynamicObject, GroupVersionKind};
    let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("cilium.io", "v2", "CiliumNode"));
    let node = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name},
                      "spec": {"ipam": {"podCIDRs": ["10.200.0.0/16"]}}});
    let api: Api<DynamicObject> = Api::all_with(case.client(), &resource);
    api.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
}

fn whereabouts_rules() -> Vec<PolicyRule> {
    let all = |group: &str, resources: &[&str]| PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(resources.iter().map(|&resource| resource.to_owned()).collect()),
        verbs: vec!["*".to_owned()],
        ..PolicyRule::default()
    };
    vec![
        all("whereabouts.cni.cncf.io", &["*"]),
        all("coordination.k8s.io", &["leases"]),
        all("", &["pods", "nodes"]),
    ]
}

async fn sticky_pod(case: &Case<'_>, name: &str, node: &str) -> Pod {
    let made = case.pod(name, &[("sticky", "yes")], Some(node)).await;
    Pod { namespace: case.namespace().to_owned(), name: name.to_owned(), uid: made.metadata.uid.unwrap() }
}

async fn bound(case: &Case<'_>, node: &Node<'_>, config: &str, peer: &Peer<'_>) -> Vec<Row> {
    progress("ADD of a bound pod by the API server, and whereabouts' ADD");
    let whereabouts = peer.with("10.210.0.0/16");
    let pod = sticky_pod(case, "db-0", &node.name).await;
    let (mut theirs, mut ours, mut dels) = (Times::default(), Times::default(), Times::default());
    // The first one binds.
    node.run("ADD", &pod, "first", config);
    node.run("DEL", &pod, "first", config);
    for block in 0..ROUNDS / BLOCK {
        for round in 0..=BLOCK {
            let container = format!("bound-{block}-{round}");
            let started = Instant::now();
            whereabouts.add("peer", &container).unwrap();
            let took = started.elapsed();
            whereabouts.del("peer", &container).unwrap();
            // The server may still have been at work for the other's last.
            if round > 0 {
                theirs.push(took);
            }
        }
        for round in 0..=BLOCK {
            let container = format!("bound-{block}-{round}");
            let (add, del) =
                (node.run("ADD", &pod, &container, config), node.run("DEL", &pod, &container, config));
            if round > 0 {
                ours.push(add);
                dels.push(del);
            }
        }
    }
    // A node that remembers nothing of the StickyIP reads before it attaches.
    let mut unknown = Times::default();
    for round in 0..=AFTER_REST {
        let container = format!("unknown-{round}");
        let _ = std::fs::remove_dir_all(node.data.path().join("net/.sticky/detached"));
        let took = node.run("ADD", &pod, &container, config);
        node.run("DEL", &pod, &container, config);
        if round > 0 {
            unknown.push(took);
        }
    }
    let (mut their_first, mut our_first) = (Times::default(), Times::default());
    for round in 0..AFTER_REST {
        let container = format!("rested-{round}");
        sleep(REST);
        let started = Instant::now();
        whereabouts.add("peer", &container).unwrap();
        their_first.push(started.elapsed());
        whereabouts.del("peer", &container).unwrap();
        sleep(REST);
        our_first.push(node.run("ADD", &pod, &container, config));
        node.run("DEL", &pod, &container, config);
    }
    let idle = compared("the same, each after 50 ms of idle time", &their_first, &our_first, None);
    let mut row = compared("ADD of a bound pod by the API server", &theirs, &ours, Some(0.25));
    row.bar = "≤ 12 ms, ≤ 0.25×".into();
    row.met = Some(ours.median() <= 12.0 && row.met == Some(true));
    let del = super::local::plain(
        "DEL of it (detaches)",
        format!("{:.2} ({:.2}), n={}", dels.median(), dels.p99(), dels.count()),
    );
    let unknown = super::local::plain(
        "ADD of a bound pod without a snapshot on the node (reads, then attaches)",
        format!("{:.2} ({:.2}), n={}", unknown.median(), unknown.p99(), unknown.count()),
    );
    vec![row, idle, unknown, del]
}

async fn prepared(case: &Case<'_>, node: &Node<'_>, access: &Access) -> Row {
    progress("ADD with a prepared decision, and the local ADD");
    let proxy = case.proxy();
    let config = node.config(Some(&access.through(&proxy).kubeconfig()));
    let alone = Node { plugin: node.plugin, name: node.name.clone(), data: tempfile::tempdir().unwrap() };
    let local = alone.config(None);
    let pod = sticky_pod(case, "db-1", &node.name).await;
    node.run("ADD", &pod, "first", &config);
    node.run("DEL", &pod, "first", &config);
    let stickies: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    let sticky = stickies.get("db-1").await.unwrap();
    let (mut theirs, mut ours) = (Times::default(), Times::default());
    let mut calls = 0;
    for round in 0..ROUNDS {
        let container = format!("sandbox-{round}");
        // A pod is prepared once: the next one has another uid.
        let pod = Pod { uid: format!("{round:08}-0000-0000-0000-000000000000"), ..pod.clone() };
        theirs.push(alone.run("ADD", &pod, &container, &local));
        alone.run("DEL", &pod, &container, &local);
        node.prepare(&pod, &sticky);
        let before = proxy.connections();
        ours.push(node.run("ADD", &pod, &container, &config));
        calls += proxy.connections() - before;
        node.run("DEL", &pod, &container, &config);
    }
    let told = |times: &Times| format!("{:.2} ({:.2}), n={}", times.median(), times.p99(), times.count());
    let ratio = ours.median() / theirs.median();
    Row {
        work: "ADD with a prepared decision, against our ADD without a cluster".into(),
        peer: "–".into(),
        ours: format!("{} to {}; {calls} API calls", told(&ours), told(&theirs)),
        ratio: Some(ratio),
        bar: "0 API calls, ≤ 1.3×".into(),
        met: Some(calls == 0 && ratio <= 1.3),
    }
}

async fn at_once(case: &Case<'_>, node: &Node<'_>, config: &str, peer: &Peer<'_>) -> Vec<Row> {
    progress("50 ADDs at once");
    let mut pods = Vec::new();
    for number in 0..AT_ONCE {
        pods.push(sticky_pod(case, &format!("many-{number}"), &node.name).await);
    }
    let (mut theirs, mut fresh, mut ours) = (Times::default(), Times::default(), Times::default());
    let mut failed = 0;
    for round in 0..=AT_ONCE_ROUNDS {
        // A range of its own each round: what failed must not be in the way of the next.
        let whereabouts = peer.with(&format!("10.{}.0.0/16", 211 + round));
        let started = Instant::now();
        failed += all(&pods, |number, _| {
            whereabouts.add(&format!("peer-{number}"), &format!("peer-{round}-{number}")).is_ok()
        });
        theirs.push(started.elapsed());
        all(&pods, |number, _| {
            whereabouts.del(&format!("peer-{number}"), &format!("peer-{round}-{number}")).is_ok()
        });
        let started = Instant::now();
        all(&pods, |number, pod| !node.run("ADD", pod, &format!("many-{round}-{number}"), config).is_zero());
        let took = started.elapsed();
        all(&pods, |number, pod| !node.run("DEL", pod, &format!("many-{round}-{number}"), config).is_zero());
        // The first time they are bound.
        if round == 0 { &mut fresh } else { &mut ours }.push(took);
    }
    let mut row = compared("50 ADDs of bound pods at once, to the last", &theirs, &ours, Some(0.1));
    row.peer = format!("{}, {failed} failed", row.peer);
    row.ours = format!("{}, 0 failed", row.ours);
    row.bar = "≤ 0.1×, none failed".into();
    let mut first = compared(
        "50 ADDs of new pods at once, to the last (claim, StickyIP, seal, attach)",
        &theirs,
        &fresh,
        None,
    );
    first.peer = row.peer.clone();
    vec![row, first]
}

/// Does something for each pod at once; how often it failed.
fn all(pods: &[Pod], work: impl Fn(usize, &Pod) -> bool + Sync) -> usize {
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            pods.iter().enumerate().map(|(number, pod)| scope.spawn(move || work(number, pod))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).filter(|done| !done).count()
    })
}
