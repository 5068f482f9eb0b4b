//! The handle that tests have on the lab: bring up the one they need, act on it, wait for what they expect.
//!
//! Everything goes through `tests/lab/lab`, as for people. Nothing here sleeps for a fixed time to be safe:
//! it waits for a condition.

pub mod api;
pub mod reach;
pub mod services;
pub mod stage;
pub mod witness;
pub mod workloads;

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// How long a test waits for anything that is bound to happen. Generous: a loaded machine is slow, and only
/// failures pay for it.
pub const PATIENCE: Duration = Duration::from_secs(180);
/// Between two looks at a condition.
const GLANCE: Duration = Duration::from_millis(200);

/// The image of the lab's pods.
pub const POD_IMAGE: &str = "localhost/sticky-ipam/pod:lab";

/// The lab that is up in this process, if any. Its lock is what keeps tests one after the other.
static MACHINE: Mutex<Option<Flavour>> = Mutex::new(None);

/// The labs that tests ask for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Flavour {
    /// Cilium alone, addresses from CiliumNode pools.
    Stock,
    /// cilium-cni calls our plugin. Pods of the namespace `keeps` are sticky; a node has `RANGE_SIZE`
    /// addresses.
    Delegated,
    /// ptp with our plugin, then cilium-cni; else as `Delegated`.
    Chained,
    /// Cilium's operator gives out blocks.
    ClusterPool,
    /// Cilium takes the blocks that Nodes name.
    Kubernetes,
    /// As `Stock`, with both families.
    DualStack,
    /// All of ours, with agents and the cluster's policy: pods with the label `sticky: yes` keep their
    /// addresses over nodes.
    Ours(Mode),
    /// The same with both families.
    OursDualStack(Mode),
    /// The same in `crd` with native routing and direct routes between the nodes.
    OursNative,
    /// As `Ours(Mode::Crd)`, with controllers whose times are short ([`CONTROLLER_FLAGS`]) and with endpoint
    /// routes: hosts need them to reach what is of no node's first block.
    Controllers,
    /// As `Ours(Mode::Crd)` on the field profile: Cilium with the settings of its own chart, and what stands
    /// beside it on a cluster.
    Field,
    /// The same on containerd 2.
    FieldOnContainerd2,
}

/// The ways to stand before Cilium.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    Crd,
    Delegated,
    Chained,
}

/// How long an address rests in the lab of [`Flavour::Controllers`]: long enough that a pod starts within it
/// on a loaded machine.
pub const QUARANTINE: Duration = Duration::from_secs(20);

/// What the controllers of [`Flavour::Controllers`] are told. Few addresses a second, so that a mass delete
/// takes its time.
pub const CONTROLLER_FLAGS: [&str; 6] = [
    "--quarantine=20s",
    "--proof-gap=2s",
    "--orphan-after=20s",
    "--block-quarantine=5s",
    "--cep-termination-timeout=5s",
    "--recycle-rate=5",
];

/// The addresses of a node where our plugin gives them out: few, so that a test can use them up.
pub const RANGE_SIZE: usize = 6;

impl Flavour {
    fn options(self) -> &'static [&'static str] {
        match self {
            Self::Stock => &["--mode", "crd", "--stock"],
            Self::Delegated => &["--mode", "delegated"],
            Self::Chained => &["--mode", "chained"],
            Self::ClusterPool => &["--mode", "cluster-pool", "--stock"],
            Self::Kubernetes => &["--mode", "kubernetes", "--stock"],
            Self::DualStack => &["--mode", "crd", "--stock", "--dual-stack"],
            Self::Ours(Mode::Crd) => &["--mode", "crd"],
            Self::Controllers => &["--mode", "crd", "--endpoint-routes"],
            Self::Field => &["--mode", "crd", "--profile", "field"],
            Self::FieldOnContainerd2 => {
                &["--mode", "crd", "--profile", "field", "--containerd", "v2.4.2", "--kube-proxy", "none"]
            }
            Self::Ours(Mode::Delegated) => &["--mode", "delegated"],
            Self::Ours(Mode::Chained) => &["--mode", "chained"],
            Self::OursDualStack(Mode::Crd) => &["--mode", "crd", "--dual-stack"],
            Self::OursDualStack(Mode::Delegated) => &["--mode", "delegated", "--dual-stack"],
            Self::OursDualStack(Mode::Chained) => &["--mode", "chained", "--dual-stack"],
            Self::OursNative => &["--mode", "crd", "--routing", "native"],
        }
    }

    /// The policy of one node alone, and few addresses, where a test is about that.
    fn environment(self) -> Vec<(&'static str, String)> {
        match self {
            Self::Delegated | Self::Chained => vec![
                ("LAB_STICKY", r#"{"pods": ["keeps/*"], "retention": "Forever"}"#.to_owned()),
                ("LAB_RANGE_SIZE", RANGE_SIZE.to_string()),
            ],
            Self::Controllers => vec![("LAB_CONTROLLER_FLAGS", CONTROLLER_FLAGS.join(" "))],
            _ => Vec::new(),
        }
    }
}

/// The repository.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folder of the tests' lab: not the one that a person works with.
pub fn folder() -> PathBuf {
    std::env::var_os("LAB_DIR").map_or_else(|| std::env::temp_dir().join("sticky-ipam-e2e"), PathBuf::from)
}

/// The name that the tests' lab has on the machine.
pub fn name() -> String {
    std::env::var("LAB_LABEL").unwrap_or_else(|_| "sticky-ipam-lab".to_owned())
}

/// `tests/lab/lab` with these arguments, not yet started.
pub fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(root().join("tests/lab/lab"));
    command
        .args(arguments)
        .env("LAB_DIR", folder())
        .env_remove("LAB_STICKY")
        .env_remove("LAB_RANGE_SIZE")
        .env_remove("LAB_CONTROLLER_FLAGS")
        .current_dir(root())
        .stdin(Stdio::null());
    command
}

/// Runs `tests/lab/lab` to its end.
pub fn run(arguments: &[&str]) -> Output {
    command(arguments).output().unwrap_or_else(|error| panic!("tests/lab/lab cannot be run: {error}"))
}

/// Both outputs, for a message.
pub fn text(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// Waits until `condition` gives a value; fails the test with what was seen last when it does not in time.
pub fn eventually<T>(what: &str, mut condition: impl FnMut() -> Result<T, String>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match condition() {
            Ok(value) => return value,
            Err(seen) => {
                assert!(Instant::now() < deadline, "waited {PATIENCE:?} for {what}; last seen: {seen}")
            }
        }
        thread::sleep(GLANCE);
    }
}

/// A lab that is up, for one test. Logs are kept when the test fails.
pub struct Lab {
    machine: MutexGuard<'static, Option<Flavour>>,
}

/// The machine without a lab, for tests of `up` and `down` themselves.
pub struct FreeMachine {
    _machine: MutexGuard<'static, Option<Flavour>>,
}

fn machine() -> MutexGuard<'static, Option<Flavour>> {
    // A test that failed says so itself; the next one starts anew.
    MACHINE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn down() {
    let output = run(&["down"]);
    assert!(output.status.success(), "the lab could not be removed:\n{}", text(&output));
}

impl FreeMachine {
    /// Removes the lab of earlier tests.
    pub fn take() -> Self {
        let mut machine = machine();
        *machine = None;
        down();
        Self { _machine: machine }
    }
}

impl Drop for FreeMachine {
    fn drop(&mut self) {
        // Also after a failure: the next test finds the machine as it must be.
        let _ = run(&["down"]);
    }
}

impl Lab {
    /// The lab of this kind: the one of the test before, or a new one.
    pub fn of(flavour: Flavour) -> Self {
        let mut machine = machine();
        if *machine != Some(flavour) {
            *machine = None;
            down();
            let options: Vec<&str> = ["up"].iter().chain(flavour.options()).copied().collect();
            let mut up = command(&options);
            let output = up.envs(flavour.environment()).output().expect("tests/lab/lab can be run");
            assert!(output.status.success(), "the lab {flavour:?} did not come up:\n{}", text(&output));
            *machine = Some(flavour);
        }
        Self { machine }
    }

    /// A lab command that must succeed; its standard output, trimmed.
    pub fn must(&self, arguments: &[&str]) -> String {
        self.attempt(arguments).unwrap_or_else(|error| panic!("lab {}: {error}", arguments.join(" ")))
    }

    /// A lab command; its standard output, or all that it said when it failed.
    pub fn attempt(&self, arguments: &[&str]) -> Result<String, String> {
        let output = run(arguments);
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        } else {
            Err(text(&output))
        }
    }

    /// kubectl that must succeed.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        self.must(&[&["kubectl"], arguments].concat())
    }

    /// Creates objects from JSON.
    pub fn create(&self, object: &serde_json::Value) {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        std::fs::write(file.path(), object.to_string()).expect("the object's file");
        self.kubectl(&["create", "-f", &file.path().to_string_lossy()]);
    }

    /// A namespace, ready for pods.
    pub fn namespace(&self, name: &str) {
        if self.attempt(&["kubectl", "get", "namespace", name]).is_err() {
            self.kubectl(&["create", "namespace", name]);
        }
        eventually("the namespace's service account", || {
            self.attempt(&["kubectl", "get", "serviceaccount", "default", "-n", name])
        });
    }

    /// A pod on a node, not waited for.
    pub fn pod(&self, namespace: &str, name: &str, node: &str) {
        self.create(&serde_json::json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"namespace": namespace, "name": name},
            "spec": pod_spec(node),
        }));
    }

    /// A StatefulSet of one pod, `NAME-0`, on a node, not waited for.
    pub fn stateful_set(&self, namespace: &str, name: &str, node: &str) {
        self.create(&serde_json::json!({
            "apiVersion": "apps/v1", "kind": "StatefulSet",
            "metadata": {"namespace": namespace, "name": name},
            "spec": {
                "serviceName": name, "replicas": 1,
                "selector": {"matchLabels": {"app": name}},
                "template": {"metadata": {"labels": {"app": name}}, "spec": pod_spec(node)},
            },
        }));
    }

    /// Waits until a pod is ready; its addresses, IPv4 first.
    pub fn addresses(&self, namespace: &str, pod: &str) -> Vec<String> {
        eventually(&format!("pod {namespace}/{pod} to be ready"), || {
            let condition = self.attempt(&[
                "kubectl", "get", "pod", "-n", namespace, pod, "-o",
                r#"jsonpath={.status.conditions[?(@.type=="Ready")].status} {.metadata.deletionTimestamp} {.status.podIPs[*].ip}"#,
            ])?;
            let mut words = condition.split(' ');
            match (words.next(), words.next()) {
                (Some("True"), Some("")) => Ok(words.map(str::to_owned).collect()),
                _ => {
                    let events =
                        self.attempt(&["kubectl", "events", "-n", namespace, "--for", &format!("pod/{pod}")]);
                    Err(format!("{condition:?}, events: {}", events.unwrap_or_default()))
                }
            }
        })
    }

    /// As `addresses`, the first one.
    pub fn address(&self, namespace: &str, pod: &str) -> String {
        self.addresses(namespace, pod).swap_remove(0)
    }

    fn uid(&self, namespace: &str, pod: &str) -> Result<String, String> {
        self.attempt(&["kubectl", "get", "pod", "-n", namespace, pod, "-o", "jsonpath={.metadata.uid}"])
    }

    /// Deletes the pod of a workload and waits until its successor is ready; the successor's address.
    pub fn replace(&self, namespace: &str, pod: &str) -> String {
        let before = self.uid(namespace, pod).unwrap_or_else(|error| panic!("{error}"));
        self.kubectl(&["delete", "pod", "-n", namespace, pod, "--wait=false"]);
        eventually(&format!("another pod {namespace}/{pod}"), || match self.uid(namespace, pod)? {
            uid if uid == before => Err("the old one is still there".to_owned()),
            _ => Ok(()),
        });
        self.address(namespace, pod)
    }

    /// One pod pings another's address. Eventual: the other node learns of an address a moment after the pod
    /// runs.
    pub fn pings(&self, namespace: &str, pod: &str, address: &str) {
        let ping = if address.contains(':') { "ping6" } else { "ping" };
        eventually(&format!("{namespace}/{pod} to reach {address}"), || {
            self.attempt(&["pod-exec", &format!("{namespace}/{pod}"), ping, "-c", "1", "-W", "2", address])
        });
    }

    /// The pod answers over HTTP to a node, and says this address.
    pub fn answers(&self, node: &str, address: &str) {
        let host = if address.contains(':') { format!("[{address}]") } else { address.to_owned() };
        let page = eventually(&format!("{address} to answer to {node}"), || {
            self.attempt(&["on", node, "curl", "-sfg", "--max-time", "5", &format!("http://{host}:8080/")])
        });
        assert!(
            page.split(' ').any(|own| own == address),
            "the pod at {address} says that its addresses are {page}"
        );
    }

    /// Two pods on two nodes reach each other both ways, and answer to the other's node.
    pub fn proves_reach(&self, namespace: &str) {
        self.namespace(namespace);
        self.pod(namespace, "one", "node-1");
        self.pod(namespace, "two", "node-2");
        let (ones, twos) = (self.addresses(namespace, "one"), self.addresses(namespace, "two"));
        for two in &twos {
            self.pings(namespace, "one", two);
            self.answers("node-1", two);
        }
        for one in &ones {
            self.pings(namespace, "two", one);
            self.answers("node-2", one);
        }
        self.delete_namespace(namespace);
    }

    /// Ends what a test made. The API server forgets it later; names are not used twice.
    pub fn delete_namespace(&self, namespace: &str) {
        self.kubectl(&["delete", "namespace", namespace, "--wait=false"]);
    }
}

pub fn pod_spec(node: &str) -> serde_json::Value {
    serde_json::json!({
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        // A test that cuts a node off must not lose its pods to eviction.
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "pod", "image": POD_IMAGE, "imagePullPolicy": "Never"}],
    })
}

impl Drop for Lab {
    fn drop(&mut self) {
        if thread::panicking() {
            let name = thread::current().name().unwrap_or("test").replace("::", "-");
            let logs = root().join("target/lab-logs").join(name);
            let _ = std::fs::remove_dir_all(&logs);
            let saved = run(&["save-logs", &logs.to_string_lossy()]);
            eprintln!("the logs of every component are in {}\n{}", logs.display(), text(&saved));
            eprintln!("{}", text(&run(&["logs"])));
            // Whatever it did to the lab, the next test gets another one.
            *self.machine = None;
        }
    }
}
