//! A node for tests: a store of its own, its credentials, and the plugin's verbs as a runtime would call
//! them.
//!
//! Verbs run in this process on a thread of their own, so that a witness can end them at any write.

use std::ffi::OsString;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ipnet::{Ipv4Net, Ipv6Net};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::cluster::objects::{AddressClaim, ClaimPhase, IPPool, StickyIP};
use sticky_ipam::cluster::writer::apply::{NoObserver, WriteObserver};
use sticky_ipam::names::{IfName, PodIdentity};
use sticky_ipam::plugin;
use sticky_ipam::store::{ClaimantKey, Disk, NodeTime, PendingUpdate, RealDisk, Store};

use super::api_server::access::Access;
use super::api_server::case::Case;
use super::cilium::{FakeCilium, cilium_node};
use super::crash::ENDED;
pub use super::crash::{EndAt, ended_by_the_witness};

/// One node.
pub struct TestNode {
    pub name: String,
    dir: tempfile::TempDir,
    kubeconfig: PathBuf,
    range: Ipv4Net,
    timeout: &'static str,
    patience: &'static str,
    on_unavailable: &'static str,
    also: Option<Ipv6Net>,
    clock: Option<&'static str>,
    boot_id_file: Option<PathBuf>,
    excluded: &'static [&'static str],
    /// In `crd` mode.
    pub cilium: Option<FakeCilium>,
}

/// A sandbox of a pod.
#[derive(Clone, Debug)]
pub struct Sandbox {
    pub pod: String,
    pub uid: String,
    pub namespace: String,
    pub container: String,
}

static CONTAINERS: AtomicUsize = AtomicUsize::new(0);

/// A new sandbox for a pod.
pub fn sandbox(pod: &Pod) -> Sandbox {
    Sandbox {
        pod: pod.metadata.name.clone().unwrap(),
        uid: pod.metadata.uid.clone().unwrap(),
        namespace: pod.metadata.namespace.clone().unwrap(),
        container: format!("container-{}", CONTAINERS.fetch_add(1, Ordering::Relaxed)),
    }
}

impl TestNode {
    /// A node that exists, is Ready, and whose pods get addresses of `range`.
    pub async fn ready(case: &Case<'_>, name: &str, range: Ipv4Net) -> Self {
        let name = case.unique(name);
        let access = case.plugin(&name).await;
        set_ready(case, &name, true).await;
        let nodes: Api<Node> = Api::all(case.client());
        let label = json!({"metadata": {"labels": {"case": case.namespace()}}});
        nodes.patch(&name, &PatchParams::default(), &Patch::Merge(label)).await.unwrap();
        cilium_node(case, &name, &[range.to_string()], json!({})).await;
        Self::with(name, &access, range)
    }

    /// A node in `crd` mode. Cilium may give the last two addresses of the range to anybody.
    pub async fn ready_crd(case: &Case<'_>, name: &str, range: Ipv4Net) -> Self {
        let mut node = Self::ready(case, name, range).await;
        let nodes: Api<CiliumNode> = Api::all(case.client());
        let offered: serde_json::Map<String, Value> = range
            .hosts()
            .collect::<Vec<_>>()
            .iter()
            .rev()
            .take(2)
            .map(|ip| (ip.to_string(), json!({})))
            .collect();
        let pool = json!({"spec": {"ipam": {"pool": offered}}});
        nodes.patch(&node.name, &PatchParams::default(), &Patch::Merge(pool)).await.unwrap();
        node.cilium = Some(FakeCilium::start(case, &node.name, node.dir.path()).await);
        node
    }

    pub fn cilium(&self) -> &FakeCilium {
        self.cilium.as_ref().unwrap()
    }

    pub fn with(name: String, access: &Access, range: Ipv4Net) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self {
            name,
            dir,
            kubeconfig: access.kubeconfig(),
            range,
            timeout: "20s",
            patience: "0s",
            on_unavailable: "fail",
            also: None,
            clock: None,
            boot_id_file: None,
            excluded: &[],
            cilium: None,
        }
    }

    /// With other credentials, or by another way.
    pub fn by(&mut self, access: &Access) {
        self.kubeconfig = access.kubeconfig();
    }

    pub fn kubeconfig(&self) -> PathBuf {
        self.kubeconfig.clone()
    }

    pub fn by_file(&mut self, kubeconfig: PathBuf) {
        self.kubeconfig = kubeconfig;
    }

    pub fn timeout(&mut self, timeout: &'static str) {
        self.timeout = timeout;
    }

    pub fn patience(&mut self, patience: &'static str) {
        self.patience = patience;
    }

    pub fn on_unavailable(&mut self, word: &'static str) {
        self.on_unavailable = word;
    }

    /// Its pods have an address of this range, too.
    pub fn also(&mut self, range: Ipv6Net) {
        self.also = Some(range);
    }

    /// Pods whose label dbbranch starts with one of these are never sticky.
    pub fn exclude(&mut self, prefixes: &'static [&'static str]) {
        self.excluded = prefixes;
    }

    /// Its clock is off by this much, as faketime writes it.
    pub fn clock(&mut self, off: &'static str) {
        self.clock = Some(off);
    }

    /// Its plugin reads the boot id from this file, as where nodes are containers.
    pub fn boots_by(&mut self, file: PathBuf) {
        self.boot_id_file = Some(file);
    }

    fn config(&self) -> Value {
        let mut sticky = json!({
            "waitForOldPod": self.patience, "logFile": self.dir.path().join("log"),
            "cluster": {
                "kubeconfig": self.kubeconfig, "node": self.name, "timeout": self.timeout,
                "onUnavailable": self.on_unavailable,
                "selector": {"matchLabels": {"sticky": "yes"}}, "excludePrefixes": self.excluded,
            },
        });
        if let Some(file) = &self.boot_id_file {
            sticky["bootIDFile"] = json!(file);
        }
        if let Some(cilium) = &self.cilium {
            sticky["dataDir"] = json!(self.dir.path());
            sticky["cluster"]["ciliumSocket"] = json!(cilium.socket);
            return json!({
                "cniVersion": "1.1.0", "name": "net", "type": "sticky-ipam",
                "delegate": {"type": "cilium-cni"}, "sticky": sticky,
            });
        }
        json!({
            "cniVersion": "1.1.0", "name": "net", "type": "cilium-cni",
            "ipam": {
                "type": "sticky-ipam", "ranges": self.ranges(), "dataDir": self.dir.path(), "sticky": sticky,
            },
        })
    }

    fn netns(&self, container: &str) -> PathBuf {
        self.dir.path().join(format!("netns-{container}"))
    }

    /// The verb's answer: the document, or the error. None if the witness or the disk ended it.
    async fn verb(
        &self,
        verb: &'static str,
        sandbox: &Sandbox,
        observer: Arc<dyn WriteObserver>,
        disk: impl Disk + Send + 'static,
    ) -> Option<Result<Value, Value>> {
        let netns = self.netns(&sandbox.container);
        if verb == "ADD" {
            std::fs::write(&netns, "").unwrap();
        }
        let mut config = self.config();
        if verb == "GC" {
            config["cni.dev/valid-attachments"] = json!([]);
        }
        let config = config.to_string();
        let bin = self.cilium.as_ref().map_or("/opt/cni/bin".into(), |cilium| cilium.bin.clone());
        let Sandbox { pod, uid, namespace, container } = sandbox.clone();
        let args =
            format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={pod};K8S_POD_UID={uid}");
        let clock = self.clock;
        let ran = tokio::task::spawn_blocking(move || {
            let env = |name: &str| -> Option<OsString> {
                Some(match name {
                    "CNI_COMMAND" => verb.into(),
                    "CNI_CONTAINERID" => container.clone().into(),
                    "CNI_NETNS" => netns.clone().into(),
                    "CNI_IFNAME" => "eth0".into(),
                    "CNI_PATH" => bin.clone().into(),
                    "CNI_ARGS" => args.clone().into(),
                    _ => return None,
                })
            };
            match clock {
                None => plugin::run_observed(&*observer, disk, &env, &mut config.as_bytes()),
                Some(off) => run_by_another_clock(off, &env, config.as_bytes()),
            }
        });
        let answer = match ran.await {
            Ok(answer) => answer,
            Err(ended) => {
                let why = *ended.into_panic().downcast::<&str>().expect("not the witness ended it");
                assert_eq!(why, ENDED);
                if let Some(cilium) = &self.cilium {
                    cilium.wait_for_its_plugin().await;
                }
                return None;
            }
        };
        let document = answer.stdout.map(|text| serde_json::from_str(&text).unwrap()).unwrap_or_default();
        Some(if answer.status == 0 { Ok(document) } else { Err(document) })
    }

    /// ADD. Every address, or the error.
    pub async fn add_all(&self, sandbox: &Sandbox) -> Result<Vec<IpAddr>, Value> {
        let document = self.verb("ADD", sandbox, Arc::new(NoObserver), RealDisk).await.unwrap()?;
        Ok(document["ips"].as_array().unwrap().iter().map(address_of).collect())
    }

    /// ADD. The address, or the error.
    pub async fn add(&self, sandbox: &Sandbox) -> Result<IpAddr, Value> {
        self.add_before(sandbox, Arc::new(NoObserver)).await.unwrap()
    }

    pub async fn add_before(
        &self,
        sandbox: &Sandbox,
        observer: Arc<dyn WriteObserver>,
    ) -> Option<Result<IpAddr, Value>> {
        let answer = self.verb("ADD", sandbox, observer, RealDisk).await?;
        Some(answer.map(|document| address_of(&document["ips"][0])))
    }

    /// ADD on a disk that may end it.
    pub async fn add_on(
        &self,
        disk: impl Disk + Send + 'static,
        sandbox: &Sandbox,
    ) -> Option<Result<IpAddr, Value>> {
        let answer = self.verb("ADD", sandbox, Arc::new(NoObserver), disk).await?;
        Some(answer.map(|document| address_of(&document["ips"][0])))
    }

    /// A first ordinary pod comes and goes: from then on the store knows what is claimed.
    pub async fn seed(&self, case: &Case<'_>) {
        let first = sandbox(&case.pod(&format!("first-of-{}", self.name), &[], Some(&self.name)).await);
        self.add(&first).await.unwrap();
        self.del(&first).await;
        delete_pod(case, &first.pod).await;
        // As the agent does once the pod is gone.
        let decision = self.store().root().join(".sticky/decisions").join(&first.uid);
        let _ = std::fs::remove_file(decision);
    }

    /// DEL; the sandbox's namespace is gone then.
    pub async fn del(&self, sandbox: &Sandbox) {
        self.del_before(sandbox, Arc::new(NoObserver)).await.unwrap();
    }

    pub async fn del_before(&self, sandbox: &Sandbox, observer: Arc<dyn WriteObserver>) -> Option<()> {
        let answer = self.verb("DEL", sandbox, observer, RealDisk).await?;
        assert!(answer.is_ok(), "DEL never fails: {answer:?}");
        self.end(sandbox);
        Some(())
    }

    /// DEL on a disk that may end it.
    pub async fn del_on(&self, disk: impl Disk + Send + 'static, sandbox: &Sandbox) -> Option<()> {
        let answer = self.verb("DEL", sandbox, Arc::new(NoObserver), disk).await?;
        assert!(answer.is_ok(), "DEL never fails: {answer:?}");
        self.end(sandbox);
        Some(())
    }

    /// The sandbox is gone without a DEL.
    pub fn end(&self, sandbox: &Sandbox) {
        let _ = std::fs::remove_file(self.netns(&sandbox.container));
    }

    pub async fn check(&self, sandbox: &Sandbox) -> Result<Value, Value> {
        self.verb("CHECK", sandbox, Arc::new(NoObserver), RealDisk).await.unwrap()
    }

    pub async fn status(&self, sandbox: &Sandbox) -> Result<Value, Value> {
        self.verb("STATUS", sandbox, Arc::new(NoObserver), RealDisk).await.unwrap()
    }

    /// GC that finds no sandbox valid.
    pub async fn gc(&self, sandbox: &Sandbox) -> Result<Value, Value> {
        self.verb("GC", sandbox, Arc::new(NoObserver), RealDisk).await.unwrap()
    }

    pub fn store(&self) -> Store {
        let network = sticky_ipam::names::NetworkName::new("net").unwrap();
        let now = NodeTime::now("/proc/sys/kernel/random/boot_id".as_ref()).unwrap();
        Store::new(RealDisk, self.dir.path(), &network, now, Duration::from_secs(10))
    }

    /// The addresses of its pods.
    pub fn range(&self) -> Ipv4Net {
        self.range
    }

    /// The same as a configuration says it, with the other family's.
    pub fn ranges(&self) -> Value {
        let mut ranges = vec![json!([{"subnet": self.range.to_string()}])];
        ranges.extend(self.also.map(|range| json!([{"subnet": range.to_string()}])));
        ranges.into()
    }

    /// The node's own folder.
    pub fn folder(&self) -> &std::path::Path {
        self.dir.path()
    }

    /// The notes that were left for the agent.
    pub fn pending_updates(&self) -> Vec<PendingUpdate> {
        self.store().pending_updates().unwrap().into_iter().map(|(_, note)| note).collect()
    }

    /// Every address that this node keeps for a StickyIP is claimed for it.
    pub async fn assert_nothing_reserved_without_claim(&self, case: &Case<'_>) {
        let claims = claims(case).await;
        for look in self.store().address_files().unwrap() {
            let Some(binding) = look.record.and_then(|record| record.binding) else { continue };
            let claimed = claims.iter().any(|claim| {
                claim.spec.address == look.address && claim.spec.sticky_ref.name == binding.key.name
            });
            assert!(
                claimed,
                "{} keeps {} for {binding:?}, which has no claim on it",
                self.name, look.address
            );
        }
    }

    /// Every address of this node's block that is claimed is kept from others by its store, wherever its pod
    /// lives.
    pub async fn assert_claims_of_its_block_are_reserved(&self, case: &Case<'_>) {
        let known: Vec<IpAddr> =
            self.store().address_files().unwrap().into_iter().map(|look| look.address).collect();
        for claim in claims(case).await {
            let address = claim.spec.address;
            let own = ipnet::IpNet::from(self.range).contains(&address);
            assert!(!own || known.contains(&address), "{} would give {address} to others", self.name);
        }
    }

    /// Whether an ADD of this pod has its turn.
    pub fn is_adding(&self, sandbox: &Sandbox) -> bool {
        let pod = PodIdentity::new(&sandbox.namespace, &sandbox.pod, None).unwrap();
        let claimant = ClaimantKey::of_pod(&pod, &IfName::new("eth0").unwrap());
        self.store().claimant_lock(&claimant, Duration::ZERO).is_err()
    }

    /// The addresses that a sandbox of this node has.
    pub fn in_use(&self) -> Vec<(IpAddr, String)> {
        let store = self.store();
        let looks = store.address_files().unwrap().into_iter();
        looks
            .filter_map(|look| Some((look.address, look.record?)))
            .filter(|(_, record)| record.is_attached(store.now()))
            .map(|(address, record)| (address, record.attachment.container.as_str().to_owned()))
            .collect()
    }
}

fn address_of(ip: &Value) -> IpAddr {
    ip["address"].as_str().unwrap().split('/').next().unwrap().parse().unwrap()
}

/// Runs the plugin as a process of its own that is told another time.
fn run_by_another_clock(
    off: &str,
    env: &impl Fn(&str) -> Option<OsString>,
    mut config: &[u8],
) -> plugin::Answer {
    let mut command = Command::new("faketime");
    command.args(["-f", off, env!("CARGO_BIN_EXE_sticky-ipam")]);
    for name in ["CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH", "CNI_ARGS"] {
        command.env(name, env(name).unwrap());
    }
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("faketime is missing; run: tests/tools/debian test");
    std::io::copy(&mut config, &mut child.stdin.take().unwrap()).unwrap();
    let done = child.wait_with_output().unwrap();
    let text = String::from_utf8(done.stdout).unwrap();
    let stdout = (!text.is_empty()).then_some(text);
    plugin::Answer { stdout, stderr: None, status: u8::from(!done.status.success()) }
}

/// Makes a node Ready, or not.
pub async fn set_ready(case: &Case<'_>, name: &str, ready: bool) {
    let nodes: Api<Node> = Api::all(case.client());
    let status = if ready { "True" } else { "Unknown" };
    let patch = json!({"status": {"conditions": [{"type": "Ready", "status": status}]}});
    nodes.patch_status(name, &PatchParams::default(), &Patch::Merge(patch)).await.unwrap();
}

/// A Sticky pool over a range of the test's own, for the test's own nodes.
pub async fn sticky_pool(case: &Case<'_>, range: Ipv4Net) {
    let pools: Api<IPPool> = Api::all(case.client());
    let pool = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "IPPool",
                      "metadata": {"name": case.unique("pool")},
                      "spec": {"cidrs": [range.to_string()], "use": "Sticky",
                               "nodeSelector": {"matchLabels": {"case": case.namespace()}}}});
    pools.create(&Default::default(), &serde_json::from_value(pool).unwrap()).await.unwrap();
}

/// A sticky pod on a node. One of the same name is forcibly deleted first.
pub async fn sticky_pod(case: &Case<'_>, name: &str, node: &str, annotations: Value) -> Pod {
    delete_pod(case, name).await;
    let pods: Api<Pod> = Api::namespaced(case.client(), case.namespace());
    let pod = json!({
        "metadata": {"name": name, "labels": {"sticky": "yes"}, "annotations": annotations},
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "none"}]},
    });
    pods.create(&Default::default(), &serde_json::from_value(pod).unwrap()).await.unwrap()
}

/// Deletes a pod by force, if it is there.
pub async fn delete_pod(case: &Case<'_>, name: &str) {
    let pods: Api<Pod> = Api::namespaced(case.client(), case.namespace());
    let _ = pods.delete(name, &DeleteParams { grace_period_seconds: Some(0), ..Default::default() }).await;
}

pub async fn stickies(case: &Case<'_>) -> Vec<StickyIP> {
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    api.list(&ListParams::default()).await.unwrap().items
}

/// The claims for StickyIPs of the test's namespace.
pub async fn claims(case: &Case<'_>) -> Vec<AddressClaim> {
    let api: Api<AddressClaim> = Api::all(case.client());
    let ours = ListParams::default().fields(&format!("spec.stickyRef.namespace={}", case.namespace()));
    api.list(&ours).await.unwrap().items
}

/// What must hold of a test's objects and nodes when nobody is in the middle of anything.
pub async fn assert_in_step(case: &Case<'_>, nodes: &[&TestNode]) {
    let (stickies, claims) = (stickies(case).await, claims(case).await);
    let mut used: Vec<(IpAddr, String)> = nodes.iter().flat_map(|node| node.in_use()).collect();
    used.sort();
    assert!(used.windows(2).all(|two| two[0].0 != two[1].0), "an address is in use twice: {used:?}");
    for sticky in &stickies {
        let name = sticky.metadata.name.as_deref().unwrap();
        for address in &sticky.spec.addresses {
            let claim = claims.iter().find(|claim| claim.spec.address == *address);
            let claim = claim.unwrap_or_else(|| panic!("StickyIP {name} has no claim on {address}"));
            assert_eq!(claim.spec.phase, ClaimPhase::Bound, "{name}");
            assert_eq!(claim.spec.sticky_uid, sticky.metadata.uid, "{name}");
        }
    }
    for claim in &claims {
        let holder = stickies
            .iter()
            .find(|sticky| sticky.metadata.name.as_deref() == Some(&claim.spec.sticky_ref.name));
        let holder = holder.unwrap_or_else(|| panic!("claim {} has no StickyIP", claim.spec.address));
        assert!(
            holder.spec.addresses.contains(&claim.spec.address),
            "claim {} is left over",
            claim.spec.address
        );
    }
}
