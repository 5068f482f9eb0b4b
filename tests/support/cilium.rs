//! Cilium for tests of `crd` mode: an agent that gives addresses out of the live CiliumNode's pool as the
//! real one does (the owner's key, else any key that nobody owns), its socket, and a `cilium-cni` that asks
//! it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::node::stickies;
use kube::api::{Api, ListParams, PostParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::cilium::pool::single_routes;
use sticky_ipam::cluster::objects::cilium::{CiliumNode, PoolEntry};
use sticky_ipam::cluster::writer::apply::{SentWrite, WriteObserver};
use sticky_ipam::cluster::writer::write::Write;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, UnixListener};

use super::api_server::case::Case;
use super::api_server::comes_true;
use super::node::TestNode;

/// A deadline, not a measure: `cilium-cni` needs milliseconds.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

/// What happened, in its order.
pub type Diary = Arc<Mutex<Vec<String>>>;

/// Whose answers it gives. Read in Cilium's sources: `pkg/endpoint/api.go` and `pkg/endpoint/id/id.go`
/// (what an endpoint says, how it is looked up), `pkg/ipam/crd.go` (texts of errors).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum CiliumRelease {
    V1_17,
    V1_18,
    #[default]
    V1_19,
    V1_20,
}

impl CiliumRelease {
    pub const ALL: [Self; 4] = [Self::V1_17, Self::V1_18, Self::V1_19, Self::V1_20];
    /// Each way to answer that differs from another in what concerns us.
    pub const DIFFERENT: [Self; 3] = [Self::V1_17, Self::V1_19, Self::V1_20];

    /// As its status has it.
    pub fn version(self) -> &'static str {
        match self {
            Self::V1_17 => "1.17.18 (v1.17.18-5b1b3ba4)",
            Self::V1_18 => "1.18.3 (v1.18.3-c1601689)",
            Self::V1_19 => "1.19.5 (v1.19.5-a9a12a1c)",
            Self::V1_20 => "1.20.1 (v1.20.1-7d68cfb3)",
        }
    }

    /// What cilium-cni says if no address of the pool is free.
    pub fn pool_is_empty(self) -> String {
        let reason = match self {
            Self::V1_17 | Self::V1_18 => "No more IPs available",
            Self::V1_19 | Self::V1_20 => {
                "no IPs currently available on the node, allocation will be retried once IPs are added to \
                 CiliumNode spec.ipam.pool"
            }
        };
        format!(
            "unable to allocate IP via local cilium agent: [POST /ipam][502] postIpamFailure \"{reason}\""
        )
    }

    fn names_pods(self) -> bool {
        self < Self::V1_20
    }
}

/// Cilium on one node.
pub struct FakeCilium {
    pub bin: PathBuf,
    pub socket: PathBuf,
    state: Arc<State>,
}

struct State {
    node: String,
    release: Mutex<CiliumRelease>,
    /// Its IPAM mode.
    ipam: Mutex<String>,
    case: String,
    nodes: Api<CiliumNode>,
    /// Address by container.
    endpoints: Mutex<BTreeMap<String, IpAddr>>,
    /// `namespace/pod` and MAC by container.
    about: Mutex<BTreeMap<String, (String, String)>>,
    pods: kube::Client,
    /// How many ADDs do not see the owner yet.
    blind: Mutex<usize>,
    /// The pool as it was when the watch was held back.
    held_back: Mutex<Option<BTreeMap<String, PoolEntry>>>,
    /// What was taken over the socket and not given back.
    taken: Mutex<BTreeSet<IpAddr>>,
    /// How often the socket was asked.
    asked: Mutex<usize>,
    /// Whether a DEL only queues what it is to delete.
    queues: Mutex<bool>,
    /// An ADD goes on when it has this.
    gate: Arc<tokio::sync::Mutex<()>>,
    diary: Diary,
}

/// Creates a node's CiliumNode, of this test.
pub async fn cilium_node(case: &Case<'_>, name: &str, pod_cidrs: &[String], pool: Value) {
    case.install_cilium_kinds().await;
    let nodes: Api<CiliumNode> = Api::all(case.client());
    let node = json!({"metadata": {"name": name, "labels": {"case": case.namespace()}},
                      "spec": {"ipam": {"podCIDRs": pod_cidrs, "pool": pool}}});
    nodes.create(&PostParams::default(), &serde_json::from_value(node).unwrap()).await.unwrap();
}

/// The test's CiliumNodes.
pub async fn cilium_nodes(case: &Case<'_>) -> Vec<CiliumNode> {
    of_case(&Api::all(case.client()), case.namespace()).await
}

/// An address of a node's pool that nobody owns and no endpoint has.
pub async fn anybodys(case: &Case<'_>, node: &TestNode) -> IpAddr {
    let used: Vec<IpAddr> = node.cilium().endpoints().into_values().collect();
    let nodes: Api<CiliumNode> = Api::all(case.client());
    let pool = nodes.get(&node.name).await.unwrap().spec.ipam.pool;
    let unowned = pool.into_iter().filter(|(_, entry)| entry.owner.is_empty());
    let mut free = unowned.map(|(key, _)| key.parse().unwrap()).filter(|address| !used.contains(address));
    free.next().unwrap()
}

async fn of_case(nodes: &Api<CiliumNode>, case: &str) -> Vec<CiliumNode> {
    nodes.list(&ListParams::default().labels(&format!("case={case}"))).await.unwrap().items
}

/// No address stands in two nodes' pools, or is routed to two of them by itself.
pub fn assert_in_one_pool(nodes: &[CiliumNode]) {
    let mut seen: BTreeMap<String, String> = BTreeMap::new();
    for node in nodes {
        let name = node.metadata.name.clone().unwrap();
        let routes = node.spec.ipam.pod_cidrs.iter().filter(|cidr| cidr.ends_with("/32")).cloned();
        for what in node.spec.ipam.pool.keys().cloned().chain(routes) {
            if let Some(other) = seen.insert(what.clone(), name.clone()) {
                panic!("{what} is with {other} and {name}");
            }
        }
    }
}

/// What the pools show for `namespace/pod`: node and address.
pub fn owned(nodes: &[CiliumNode], owner: &str) -> Vec<(String, IpAddr)> {
    let of_node = |node: &CiliumNode| {
        let name = node.metadata.name.clone().unwrap();
        let keys = node.spec.ipam.pool.iter().filter(|(_, entry)| entry.owner == owner);
        keys.map(|(key, _)| (name.clone(), key.parse().unwrap())).collect::<Vec<_>>()
    };
    nodes.iter().flat_map(of_node).collect()
}

/// Whether a process without a command line is a child of ours that has not ended: for a moment, one that was
/// just started has none.
fn is_child_at_work(process: &Path) -> bool {
    let stat = std::fs::read_to_string(process.join("stat")).unwrap_or_default();
    let Some((_, behind_name)) = stat.rsplit_once(')') else { return false };
    let mut fields = behind_name.split_whitespace();
    let (state, parent) = (fields.next(), fields.next());
    state != Some("Z") && parent == Some(std::process::id().to_string().as_str())
}

impl FakeCilium {
    /// Cilium on this node, with a folder of its own. It runs on the test's runtime.
    pub async fn start(case: &Case<'_>, node: &str, folder: &Path) -> Self {
        let state = Arc::new(State {
            node: node.to_owned(),
            release: Mutex::default(),
            ipam: Mutex::new("crd".into()),
            case: case.namespace().to_owned(),
            nodes: Api::all(case.client()),
            endpoints: Mutex::default(),
            about: Mutex::default(),
            pods: case.client(),
            blind: Mutex::default(),
            held_back: Mutex::default(),
            taken: Mutex::default(),
            asked: Mutex::default(),
            queues: Mutex::default(),
            gate: Arc::default(),
            diary: Diary::default(),
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(serve_cni(listener, state.clone()));
        let socket = folder.join("cilium.sock");
        tokio::spawn(serve_socket(UnixListener::bind(&socket).unwrap(), state.clone()));
        let bin = folder.join("bin");
        std::fs::create_dir(&bin).unwrap();
        let script = format!(
            "#!/bin/bash\ncat >/dev/null\nargs=\";$CNI_ARGS;\"\nns=${{args#*;K8S_POD_NAMESPACE=}} \
             pod=${{args#*;K8S_POD_NAME=}}\nexec 3<>/dev/tcp/127.0.0.1/{port}\n\
             echo \"$CNI_COMMAND $CNI_CONTAINERID ${{ns%%;*}}/${{pod%%;*}}\" >&3\nread -r status <&3\n\
             cat <&3\nexit \"$status\"\n"
        );
        let program = bin.join("cilium-cni");
        std::fs::write(&program, script).unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        Self { bin, socket, state }
    }

    /// Waits until no `cilium-cni` of this node is at work. One whose caller has ended goes on by itself.
    pub async fn wait_for_its_plugin(&self) {
        let program = self.bin.join("cilium-cni").display().to_string();
        let runs = |process: &Path| {
            let line = std::fs::read(process.join("cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(&program)
                || (line.is_empty() && is_child_at_work(process))
        };
        let all_ended = comes_true(ENDS_WITHIN, || async {
            !std::fs::read_dir("/proc").unwrap().flatten().any(|process| runs(&process.path()))
        });
        assert!(all_ended.await, "{program} does not end");
    }

    /// Answers as this release from now on.
    pub fn be_release(&self, release: CiliumRelease) {
        *self.state.release.lock().unwrap() = release;
    }

    /// Says from now on that it runs in this IPAM mode.
    pub fn be_in_mode(&self, ipam: &str) {
        ipam.clone_into(&mut self.state.ipam.lock().unwrap());
    }

    /// Writes into the CiliumNode which addresses are used, as the real agent does every 15 seconds: between
    /// two calls of this the status is as old as a test wants it.
    pub async fn write_status(&self) {
        let used = self.endpoints();
        let owners = self.state.about.lock().unwrap().clone();
        let owner =
            |container: &String| owners.get(container).map(|(owner, _)| owner.clone()).unwrap_or_default();
        let used: serde_json::Map<String, Value> = used
            .iter()
            .map(|(container, address)| (address.to_string(), json!({"owner": owner(container)})))
            .collect();
        // Whole, as the real one: what is not used any more goes.
        let mut node = self.state.nodes.get(&self.state.node).await.unwrap();
        node.status = serde_json::from_value(json!({"ipam": {"used": used}})).unwrap();
        self.state.nodes.replace_status(&self.state.node, &PostParams::default(), &node).await.unwrap();
    }

    /// A DEL succeeds from now on and deletes nothing: cilium-cni queues it while the agent is away.
    pub fn queue_deletes(&self) {
        *self.state.queues.lock().unwrap() = true;
    }

    /// The next ADDs do not see any owner.
    pub fn be_blind(&self, times: usize) {
        *self.state.blind.lock().unwrap() = times;
    }

    /// ADDs wait, and say so in the diary, until this is dropped.
    pub async fn hold_adds(&self) -> tokio::sync::OwnedMutexGuard<()> {
        self.state.gate.clone().lock_owned().await
    }

    /// The agent hears nothing more of its CiliumNode.
    pub async fn hold_back(&self) {
        let pool = self.state.pool().await;
        *self.state.held_back.lock().unwrap() = Some(pool);
    }

    /// The agent hears of its CiliumNode again, and of what it missed.
    pub fn catch_up(&self) {
        *self.state.held_back.lock().unwrap() = None;
    }

    /// What was taken over the socket and not given back.
    pub fn taken(&self) -> BTreeSet<IpAddr> {
        self.state.taken.lock().unwrap().clone()
    }

    /// An endpoint of another sandbox.
    pub fn put_endpoint(&self, container: &str, address: IpAddr) {
        self.state.endpoints.lock().unwrap().insert(container.to_owned(), address);
    }

    /// An endpoint of a pod that came up without the plugin.
    pub fn put_endpoint_of(&self, container: &str, address: IpAddr, owner: &str) {
        self.state.about.lock().unwrap().insert(container.to_owned(), (owner.to_owned(), new_mac()));
        self.put_endpoint(container, address);
    }

    /// The MAC of a sandbox's endpoint.
    pub fn mac(&self, container: &str) -> String {
        self.state.about.lock().unwrap()[container].1.clone()
    }

    pub fn end_endpoint(&self, container: &str) {
        self.state.endpoints.lock().unwrap().remove(container);
    }

    pub fn endpoints(&self) -> BTreeMap<String, IpAddr> {
        self.state.endpoints.lock().unwrap().clone()
    }

    /// How often the socket was asked.
    pub fn asked(&self) -> usize {
        *self.state.asked.lock().unwrap()
    }

    pub fn diary(&self) -> Diary {
        self.state.diary.clone()
    }
}

/// Another MAC every time, as Cilium makes them.
fn new_mac() -> String {
    static MACS: AtomicU32 = AtomicU32::new(1);
    let [a, b, c, d] = MACS.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    format!("0a:00:{a:02x}:{b:02x}:{c:02x}:{d:02x}")
}

async fn serve_cni(listener: TcpListener, state: Arc<State>) {
    while let Ok((stream, _)) = listener.accept().await {
        let mut stream = BufReader::new(stream);
        let mut line = String::new();
        stream.read_line(&mut line).await.unwrap();
        let words: Vec<&str> = line.split_whitespace().collect();
        let (status, answer) = match words[0] {
            "ADD" => match state.add(words[1], words[2]).await {
                Ok(address) => {
                    (0, json!({"cniVersion": "1.0.0", "ips": [{"address": format!("{address}/32")}]}))
                }
                Err(why) => (1, json!({"cniVersion": "1.0.0", "code": 999, "msg": why})),
            },
            "DEL" => {
                state.look().await;
                state.diary.lock().unwrap().push("cilium DEL".into());
                if !*state.queues.lock().unwrap() {
                    state.endpoints.lock().unwrap().remove(words[1]);
                }
                (0, Value::Null)
            }
            _ => (0, Value::Null),
        };
        let text = if answer.is_null() { String::new() } else { answer.to_string() };
        let _ = stream.write_all(format!("{status}\n{text}").as_bytes()).await;
    }
}

impl State {
    /// As Cilium's crd allocator: the owner's key without asking whether it is free, else one that nobody
    /// owns.
    async fn add(&self, container: &str, owner: &str) -> Result<IpAddr, String> {
        if self.gate.try_lock().is_err() {
            self.diary.lock().unwrap().push("cilium ADD waits".into());
            drop(self.gate.lock().await);
        }
        let pool = self.pool().await;
        let asked = self.asked_mac(owner).await;
        self.diary.lock().unwrap().push("cilium ADD".into());
        let blind = std::mem::replace(&mut *self.blind.lock().unwrap(), 0);
        *self.blind.lock().unwrap() = blind.saturating_sub(1);
        let mut endpoints = self.endpoints.lock().unwrap();
        let own = pool.iter().find(|(_, entry)| blind == 0 && entry.owner == owner);
        let address: IpAddr = match own {
            Some((key, _)) => key.parse().unwrap(),
            None => pool
                .iter()
                .filter(|(_, entry)| entry.owner.is_empty())
                .map(|(key, _)| key.parse().unwrap())
                .find(|address| !endpoints.values().any(|used| used == address))
                .ok_or_else(|| self.release.lock().unwrap().pool_is_empty())?,
        };
        if endpoints.iter().any(|(other, used)| other != container && *used == address) {
            return Err(format!("IP {address} is already in use"));
        }
        endpoints.insert(container.to_owned(), address);
        let about = (owner.to_owned(), asked.unwrap_or_else(new_mac));
        self.about.lock().unwrap().insert(container.to_owned(), about);
        Ok(address)
    }

    /// The pool as the agent knows it.
    async fn pool(&self) -> BTreeMap<String, PoolEntry> {
        let nodes = self.look().await;
        if let Some(held_back) = self.held_back.lock().unwrap().clone() {
            return held_back;
        }
        let own = nodes.into_iter().find(|node| node.metadata.name.as_deref() == Some(&self.node));
        own.unwrap().spec.ipam.pool
    }

    /// As Cilium answers `/v1/ipam/ADDRESS`: without a look at the key's owner.
    async fn take_or_give_back(&self, method: &str, address: IpAddr) -> String {
        if method == "DELETE" {
            self.taken.lock().unwrap().remove(&address);
            return "HTTP/1.0 200 OK\r\n\r\n".to_owned();
        }
        let pool = self.pool().await;
        let used = self.endpoints.lock().unwrap().values().any(|used| *used == address);
        let oh = |why: &str| format!("HTTP/1.0 500 Internal Server Error\r\n\r\n\"{why}\"");
        if used || self.taken.lock().unwrap().contains(&address) {
            return oh("IP already in use");
        }
        if !pool.contains_key(&address.to_string()) {
            return oh(&format!("IP {address} is not available"));
        }
        self.taken.lock().unwrap().insert(address);
        "HTTP/1.0 200 OK\r\n\r\n".to_owned()
    }

    /// The MAC that the pod's annotation asks for.
    async fn asked_mac(&self, owner: &str) -> Option<String> {
        let (namespace, name) = owner.split_once('/')?;
        let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(self.pods.clone(), namespace);
        let pod = pods.get_opt(name).await.ok()??;
        pod.metadata.annotations?.get("cni.cilium.io/mac-address").cloned()
    }

    /// Whenever Cilium is called, whatever else is going on, an address is in one pool.
    async fn look(&self) -> Vec<CiliumNode> {
        let nodes = of_case(&self.nodes, &self.case).await;
        assert_in_one_pool(&nodes);
        nodes
    }
}

async fn serve_socket(listener: UnixListener, state: Arc<State>) {
    while let Ok((mut stream, _)) = listener.accept().await {
        let mut asked = [0; 1024];
        let length = stream.read(&mut asked).await.unwrap();
        let line = String::from_utf8_lossy(&asked[..length]).into_owned();
        let mut words = line.split_whitespace();
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        *state.asked.lock().unwrap() += 1;
        let answer = if path.starts_with("/v1/ipam/") {
            let address = path.rsplit('/').next().unwrap().split('?').next().unwrap().parse().unwrap();
            state.take_or_give_back(method, address).await
        } else {
            state.answer(path)
        };
        let _ = stream.write_all(answer.as_bytes()).await;
    }
}

impl State {
    /// Its answer to `GET path`.
    fn answer(&self, path: &str) -> String {
        let release = *self.release.lock().unwrap();
        let ok = |body: &Value| format!("HTTP/1.0 200 OK\r\n\r\n{body}");
        if path == "/v1/healthz" {
            let routing = json!({"inter-host-routing-mode": "Tunnel", "tunnel-protocol": "vxlan"});
            return ok(&json!({"cilium": {"state": "Ok", "msg": release.version()}, "routing": routing,
                "cni-chaining": {"mode": "none"}}));
        }
        if path == "/v1/config" {
            let ipam = self.ipam.lock().unwrap().clone();
            let map = json!({"EnableIPv4": true, "EnableIPv6": false});
            return ok(&json!({"status": {"ipam-mode": ipam, "daemonConfigurationMap": map}}));
        }
        let (kind, id) = path.rsplit('/').next().unwrap().split_once(':').unwrap();
        let id = id.replace("%2F", "/");
        let held = self.endpoints.lock().unwrap().clone();
        let about = self.about.lock().unwrap().clone();
        let owner_of = |container: &str| about.get(container).map(|(owner, _)| owner.clone());
        let found = match kind {
            "ipv4" | "ipv6" => held.iter().find(|(_, used)| used.to_string() == id),
            "cep-name" => held.iter().find(|(container, _)| owner_of(container).as_ref() == Some(&id)),
            "pod-name" if release.names_pods() => {
                held.iter().find(|(container, _)| owner_of(container).as_ref() == Some(&id))
            }
            other => {
                return format!(
                    "HTTP/1.0 400 Bad Request\r\n\r\n\"unknown endpoint ID prefix \\\"{other}\\\"\""
                );
            }
        };
        let Some((container, address)) = found else { return "HTTP/1.0 404 Not Found\r\n\r\n".into() };
        let (owner, mac) = about.get(container).cloned().unwrap_or_default();
        let (namespace, pod) = owner.split_once('/').unwrap_or_default();
        let attachment = format!("{container}:eth0");
        let identifiers = match release.names_pods() {
            true => json!({"cni-attachment-id": attachment, "container-id": container, "pod-name": owner,
                "k8s-namespace": namespace, "k8s-pod-name": pod}),
            false => json!({"cni-attachment-id": attachment}),
        };
        let family = if address.is_ipv4() { "ipv4" } else { "ipv6" };
        let networking = json!({"addressing": [{family: address}], "mac": mac});
        ok(&json!({"id": 7, "status": {"external-identifiers": identifiers, "networking": networking}}))
    }
}

/// Writes every write to the API server into the diary.
pub struct Scribe(pub Diary);

impl WriteObserver for Scribe {
    fn after(&self, _: usize, write: SentWrite<'_>) {
        let told = match write {
            SentWrite::Protocol(Write::Attach { .. }) => "attach".to_owned(),
            SentWrite::Protocol(Write::Detach { .. }) => "detach".to_owned(),
            SentWrite::Protocol(_) => "claim".to_owned(),
            SentWrite::Node(patch) => {
                let keys = patch.pool.iter().map(|(key, entry)| match entry {
                    Some(entry) => format!("+{key}={},{}", entry.owner, entry.resource),
                    None => format!("-{key}"),
                });
                keys.collect::<Vec<_>>().join(" ")
            }
            SentWrite::Pod(_) => "pod".to_owned(),
            SentWrite::Event(_) => "event".to_owned(),
            SentWrite::Other(what) => what.to_owned(),
        };
        self.0.lock().unwrap().push(told);
    }
}

/// No address is in two pools; what the pools and routes show is attached there, and all of that is shown
/// where Cilium picks.
pub async fn assert_shown(case: &Case<'_>, cilium_picks: bool) {
    let nodes = cilium_nodes(case).await;
    assert_in_one_pool(&nodes);
    let mut attached = BTreeSet::new();
    for sticky in stickies(case).await {
        let Some(at) = sticky.status.and_then(|status| status.attachment) else { continue };
        let owner = format!("{}/{}", case.namespace(), at.pod_name);
        attached.extend(sticky.spec.addresses.iter().map(|ip| (at.node.clone(), *ip, owner.clone())));
    }
    for node in &nodes {
        let name = node.metadata.name.clone().unwrap();
        for (key, entry) in node.spec.ipam.pool.iter().filter(|(_, entry)| !entry.owner.is_empty()) {
            let shown = (name.clone(), key.parse().unwrap(), entry.owner.clone());
            assert!(attached.contains(&shown), "{shown:?} is shown and not attached");
        }
        for address in single_routes(node) {
            let there = attached.iter().any(|(at, ip, _)| *at == name && *ip == address);
            assert!(there, "{address} is routed to {name} and not attached there");
        }
    }
    if cilium_picks {
        for (node, address, owner) in &attached {
            let shown = owned(&nodes, owner);
            assert_eq!(shown, [(node.clone(), *address)], "{owner}");
        }
    }
}
