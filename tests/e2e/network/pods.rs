//! Pods that are nothing but network namespaces, on a node that is one too: all of it ends with the test.

use std::cell::RefCell;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Output};
use std::sync::atomic::{AtomicU32, Ordering};

use serde_json::{Value, json};

static NEXT: AtomicU32 = AtomicU32::new(0);

/// A node with a network whose addresses come from one IPAM plugin.
pub struct Pods {
    dir: tempfile::TempDir,
    node: String,
    made: RefCell<Vec<String>>,
    attached: RefCell<Vec<String>>,
    containers: RefCell<u32>,
}

impl Pods {
    pub fn new(ipam: &str) -> Self {
        let node = format!("sipn{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let pods = Self {
            dir: tempfile::tempdir().unwrap(),
            node: node.clone(),
            made: RefCell::default(),
            attached: RefCell::default(),
            containers: RefCell::new(0),
        };
        pods.make_namespace(&node);
        done(Command::new("ip").args(["-n", &node, "link", "set", "lo", "up"]));
        let enter = ["netns", "exec", &node, "sysctl", "-qw", "net.ipv4.ip_forward=1"];
        done(Command::new("ip").args(enter));
        let mut conf = json!({
            "cniVersion": "1.0.0", "name": "net",
            "plugins": [{"type": "ptp", "ipMasq": false, "ipam": {
                "type": ipam, "dataDir": pods.dir.path().join("data"),
                "subnet": "10.77.0.0/24", "routes": [{"dst": "0.0.0.0/0"}],
            }}],
        });
        if ipam == "sticky-ipam" {
            conf["plugins"][0]["ipam"]["sticky"] = json!({"pods": ["db/*"], "logLevel": "error"});
        }
        fs::create_dir(pods.dir.path().join("net.d")).unwrap();
        fs::write(pods.dir.path().join("net.d/10-net.conflist"), conf.to_string()).unwrap();
        pods
    }

    /// Starts the pod in a namespace of its own, and tells its address.
    pub fn add(&self, pod: &str) -> String {
        *self.containers.borrow_mut() += 1;
        fs::write(self.dir.path().join(pod), format!("{pod}-{}", self.containers.borrow())).unwrap();
        self.make_namespace(&self.namespace(pod));
        let output = done(&mut self.cnitool("add", pod));
        self.attached.borrow_mut().push(pod.to_owned());
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        let address = result["ips"][0]["address"].as_str().unwrap();
        address.split('/').next().unwrap().to_owned()
    }

    pub fn check(&self, pod: &str) {
        done(&mut self.cnitool("check", pod));
    }

    pub fn del(&self, pod: &str) {
        done(&mut self.cnitool("del", pod));
        self.attached.borrow_mut().retain(|attached| attached != pod);
        self.end_namespace(&self.namespace(pod));
    }

    pub fn ping(&self, from: &str, address: &str) {
        done(&mut ping(&self.namespace(from), address));
    }

    pub fn ping_from_host(&self, address: &str) {
        done(&mut ping(&self.node, address));
    }

    pub fn answers_the_host(&self, address: &str) -> bool {
        ping(&self.node, address).output().unwrap().status.success()
    }

    /// Another one for every ADD: cnitool makes the container's id from the namespace's path.
    fn namespace(&self, pod: &str) -> String {
        let container = fs::read_to_string(self.dir.path().join(pod)).unwrap();
        format!("{}-{container}", self.node)
    }

    fn cnitool(&self, verb: &str, pod: &str) -> Command {
        let tools = PathBuf::from(std::env::var_os("STICKY_IPAM_CNI_BIN").expect(
            "STICKY_IPAM_CNI_BIN must name the folder with cnitool and ptp; make e2e builds and names it",
        ));
        let ours = PathBuf::from(env!("CARGO_BIN_EXE_sticky-ipam"));
        let path = std::env::join_paths([ours.parent().unwrap(), &tools]).unwrap();
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.node]).arg(tools.join("cnitool"));
        command.args([verb, "net"]).arg(format!("/run/netns/{}", self.namespace(pod)));
        command.env("CNI_PATH", path).env("NETCONFPATH", self.dir.path().join("net.d"));
        command.env("CNI_ARGS", format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=db;K8S_POD_NAME={pod}"));
        command
    }

    fn make_namespace(&self, name: &str) {
        done(Command::new("ip").args(["netns", "add", name]));
        self.made.borrow_mut().push(name.to_owned());
    }

    fn end_namespace(&self, name: &str) {
        done(Command::new("ip").args(["netns", "del", name]));
        self.made.borrow_mut().retain(|made| made != name);
    }
}

impl Drop for Pods {
    fn drop(&mut self) {
        // cnitool caches each ADD in /var/lib/cni/results of the machine until DEL, and takes no other
        // folder.
        for pod in self.attached.borrow().iter() {
            let _ = self.cnitool("del", pod).output();
        }
        for name in self.made.borrow().iter().rev() {
            let _ = Command::new("ip").args(["netns", "del", name]).status();
        }
    }
}

fn ping(namespace: &str, address: &str) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", namespace, "ping", "-c", "1", "-W", "2", address]);
    command
}

/// Runs it to its end; its output. Panics: it failed.
pub fn done(command: &mut Command) -> Output {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}: {said}", output.status);
    output
}
