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

/// Cilium on one node.
pub struct FakeCilium {
    pub bin: PathBuf,
    pub socket: PathBuf,
    state: Arc<State>,
}

struct State {
    node: String,
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
            case: case.namespace().to_owned(),
            nodes: Api::all(case.client()),
            endpoints: Mutex::default(),
            about: Mutex::default(),
            pods: case.client(),
            blind: Mutex::default(),
            held_back: Mutex::default(),
            taken: Mutex::default(),
            asked: Mutex::default(),
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
                state.endpoints.lock().unwrap().remove(words[1]);
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
                .ok_or("No more IPs available")?,
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
        let last = path.rsplit('/').next().unwrap();
        *state.asked.lock().unwrap() += 1;
        if path.starts_with("/v1/ipam/") {
            let address = last.split('?').next().unwrap().parse().unwrap();
            let answer = state.take_or_give_back(method, address).await;
            let _ = stream.write_all(answer.as_bytes()).await;
            continue;
        }
        if let Some(pod) = last.strip_prefix("pod-name:").map(|pod| pod.replace("%2F", "/")) {
            let held = state.endpoints.lock().unwrap().clone();
            let about = state.about.lock().unwrap().clone();
            let there = held.keys().any(|id| about.get(id).is_some_and(|(owner, _)| *owner == pod));
            let answer = if there { "HTTP/1.0 200 OK\r\n\r\n{}" } else { "HTTP/1.0 404 Not Found\r\n\r\n" };
            let _ = stream.write_all(answer.as_bytes()).await;
            continue;
        }
        let address: IpAddr = last.split_once(':').unwrap().1.parse().unwrap();
        let held = state.endpoints.lock().unwrap().clone();
        let answer = match held.iter().find(|(_, used)| **used == address) {
            Some((container, _)) => {
                let (owner, mac) = state.about.lock().unwrap().get(container).cloned().unwrap_or_default();
                let (namespace, pod) = owner.split_once('/').unwrap_or_default();
                let who = json!({"container-id": container, "k8s-namespace": namespace, "k8s-pod-name": pod});
                let about =
                    json!({"id": 7, "status": {"external-identifiers": who, "networking": {"mac": mac}}});
                format!("HTTP/1.0 200 OK\r\n\r\n{about}")
            }
            None => "HTTP/1.0 404 Not Found\r\n\r\n".to_owned(),
        };
        let _ = stream.write_all(answer.as_bytes()).await;
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
