//! An agent for tests: stepped by hand with a time of the test's own, ended at any write to the API server or
//! the disk, or let loose with its watches.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::api_server::proxy::Proxy;
use super::api_server::{ApiServer, Weather, free_address};
use super::node::{sandbox, stickies};
use clap::Parser;
use ipnet::Ipv4Net;
use serde_json::json;
use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpStream};
use sticky_ipam::agent;
use sticky_ipam::agent::flags::{AgentCommandLine, AgentSettings};
use sticky_ipam::agent::index::NodeIndex;
use sticky_ipam::agent::reconciler::{Reconciler, StepReport};
use sticky_ipam::agent::watch::{self, IndexUpdate};
use sticky_ipam::cluster::writer::apply::NoObserver;
use sticky_ipam::store::RealDisk;
use tokio::sync::oneshot;

use super::api_server::access::Access;
use super::api_server::case::Case;
use super::crash::{Counted, ENDED, EndsAt};
use super::node::TestNode;

/// Longer than anything must look wrong before it is.
const LATER: Duration = Duration::from_secs(20);

/// The settings of a node's agent.
pub fn settings(node: &TestNode, kubeconfig: &Path, mode: &str, more: &[&str]) -> AgentSettings {
    let folder = node.folder();
    let conf = folder.join("conf");
    std::fs::create_dir_all(&conf).unwrap();
    if mode != "crd" {
        let list = json!({"cniVersion": "1.0.0", "name": "net", "plugins": [
            {"type": "cilium-cni", "ipam": {"type": "sticky-ipam", "ranges": node.ranges()}}]});
        std::fs::write(conf.join("03-sticky-ipam.conflist"), list.to_string()).unwrap();
    }
    let text = |path: &Path| path.to_str().unwrap().to_owned();
    let mut arguments = vec!["sticky-ipam-agent".to_owned()];
    let picked = json!({"matchLabels": {"sticky": "yes"}}).to_string();
    for (flag, value) in [
        ("--node", node.name.clone()),
        ("--mode", mode.to_owned()),
        ("--kubeconfig", text(kubeconfig)),
        ("--network", "net".to_owned()),
        ("--data-dir", text(folder)),
        ("--cni-conf-dir", text(&conf)),
        ("--cilium-socket", text(&folder.join("cilium.sock"))),
        ("--label-selector", picked),
        ("--metrics-address", "127.0.0.1:0".to_owned()),
        ("--tick-seconds", "1".to_owned()),
    ] {
        // What the test says itself takes the place of this.
        if !more.contains(&flag) {
            arguments.extend([flag.to_owned(), value]);
        }
    }
    arguments.extend(more.iter().map(|&word| word.to_owned()));
    AgentCommandLine::try_parse_from(arguments).unwrap().settings
}

/// An agent that the test steps.
pub struct Stepped {
    settings: Arc<AgentSettings>,
    reconciler: Reconciler<RealDisk>,
    client: kube::Client,
    node: String,
    now: Duration,
}

impl Stepped {
    pub async fn new(case: &Case<'_>, node: &TestNode, mode: &str, more: &[&str]) -> Self {
        Self::by(&case.agent(&node.name).await, node, mode, more).await
    }

    pub async fn by(access: &Access, node: &TestNode, mode: &str, more: &[&str]) -> Self {
        let settings = Arc::new(settings(node, &access.kubeconfig(), mode, more));
        Self {
            reconciler: Reconciler::new(settings.clone(), Arc::default(), RealDisk, Arc::new(NoObserver)),
            settings,
            client: access.client().await,
            node: node.name.clone(),
            now: Duration::ZERO,
        }
    }

    /// The same agent after a restart: it remembers nothing.
    pub fn anew(&self) -> Self {
        let reconciler =
            Reconciler::new(self.settings.clone(), Arc::default(), RealDisk, Arc::new(NoObserver));
        Self {
            reconciler,
            settings: self.settings.clone(),
            client: self.client.clone(),
            node: self.node.clone(),
            now: Duration::ZERO,
        }
    }

    /// Reads everything anew, as a watch that has just listed, and takes a step.
    pub async fn step(&mut self) -> StepReport {
        self.reconciler.index = list(&self.client, &self.node).await;
        self.step_blind().await
    }

    /// Takes a step on what was read before.
    pub async fn step_blind(&mut self) -> StepReport {
        self.now += Duration::from_millis(10);
        self.reconciler.step(&self.client, self.now).await.unwrap()
    }

    /// Lets time go by.
    pub fn later(&mut self) {
        self.now += LATER;
        self.reconciler.forget_all_pauses();
    }

    /// Steps with time in between until nothing is done any more.
    pub async fn settle(&mut self) {
        let mut quiet = 0;
        for _ in 0..40 {
            let step = self.step().await;
            quiet = if step.done == 0 { quiet + 1 } else { 0 };
            if quiet == 2 {
                return;
            }
            self.later();
        }
        panic!("the agent does not come to rest");
    }
}

/// Everything that the watches of an agent list, read now.
async fn list(client: &kube::Client, node: &str) -> NodeIndex {
    let (out, mut updates) = tokio::sync::mpsc::channel(64);
    let _watches = watch::start(client, node, &out);
    let mut index = NodeIndex::default();
    while !index.is_synced() {
        match updates.recv().await.expect("the watches go on") {
            IndexUpdate::Failed { watch, reason, .. } => panic!("no list of {watch}: {reason}"),
            update => index.apply(update),
        }
    }
    index
}

/// Runs `steps` looks of an agent, `LATER` apart, and ends it before or after its n-th write. Answers whether
/// it ended there.
pub async fn ends_at(
    settings: &AgentSettings,
    access: &Access,
    steps: usize,
    number: usize,
    after: bool,
) -> bool {
    let (settings, access) = (Arc::new(settings.clone()), access.clone());
    let ends = EndsAt::new(number, after);
    let ran = tokio::task::spawn_blocking(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let client = access.client().await;
            let node = settings.node.clone();
            let mut reconciler = Reconciler::new(settings, Arc::default(), Counted(ends.clone()), ends);
            let mut now = Duration::from_secs(1);
            for _ in 0..steps {
                reconciler.index = list(&client, &node).await;
                reconciler.forget_all_pauses();
                reconciler.step(&client, now).await.unwrap();
                now += LATER;
            }
        });
    });
    match ran.await {
        Ok(()) => false,
        Err(ended) => {
            let panic = ended.into_panic();
            match panic.downcast_ref::<&str>() {
                Some(&ENDED) => true,
                _ => std::panic::resume_unwind(panic),
            }
        }
    }
}

/// An agent with its watches, on a thread of its own. It ends when this is dropped.
pub struct Loose {
    end: Option<oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Loose {
    pub fn start(settings: AgentSettings) -> Self {
        let (end, ended) = oneshot::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let told = async {
                let _ = ended.await;
            };
            runtime.block_on(agent::run(settings, told)).unwrap();
        });
        Self { end: Some(end), thread: Some(thread) }
    }
}

impl Drop for Loose {
    fn drop(&mut self) {
        drop(self.end.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

pub async fn case() -> Case<'static> {
    let server = ApiServer::shared().await;
    server.install_our_kinds().await;
    server.install_cilium_kinds().await;
    server.case().await
}

pub fn parts(case: &Case<'_>) -> [Ipv4Net; 4] {
    case.range().subnets(26).unwrap().collect::<Vec<_>>().try_into().unwrap()
}

/// Who is attached to the only StickyIP.
pub async fn attached(case: &Case<'_>) -> Option<String> {
    let only = stickies(case).await.remove(0);
    only.status.and_then(|status| status.attachment).map(|attachment| attachment.attachment_id.to_string())
}

/// The node's plugin finds no API server.
pub fn cut_off(case: &Case<'_>, node: &mut TestNode) -> Proxy {
    let proxy = case.proxy();
    proxy.set(Weather::Reset);
    node.by(&case.nobody().through(&proxy));
    node.timeout("2s");
    proxy
}

/// ADDs of pods that are not sticky until the node has no address left.
pub async fn fill(case: &Case<'_>, node: &TestNode, names: &str) -> Vec<IpAddr> {
    let mut given = Vec::new();
    for number in 0.. {
        let pod = sandbox(&case.pod(&format!("{names}-{number}"), &[], Some(&node.name)).await);
        match node.add(&pod).await {
            Ok(address) => given.push(address),
            Err(_) => break,
        }
    }
    given
}

pub fn page(address: SocketAddr, path: &str) -> Option<String> {
    let mut stream = TcpStream::connect(address).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    Some(text)
}

pub async fn is_ready(address: SocketAddr) -> bool {
    let asked = tokio::task::spawn_blocking(move || page(address, "/readyz")).await.unwrap();
    asked.is_some_and(|text| text.starts_with("HTTP/1.1 200"))
}

pub fn loose(node: &TestNode, access: &Access, mode: &str) -> (AgentSettings, SocketAddr) {
    let address = free_address();
    let settings = settings(node, &access.kubeconfig(), mode, &["--metrics-address", &address.to_string()]);
    (settings, address)
}

pub fn decided(node: &TestNode, uid: &str) -> bool {
    node.store().decisions().unwrap().iter().any(|decision| decision.uid == uid)
}
