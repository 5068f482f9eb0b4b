//! A network in a fresh directory, and verbs on it: one line of a test is one verb.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sticky_ipam::cni::{CniError, ParsedRequest, Request, read_request};
use sticky_ipam::plugin::run_verb_on;
use sticky_ipam::store::{Disk, NodeTime};

/// When tests begin: any second of any year.
pub const START: u64 = 1_700_000_000;

/// A verb and what it is asked with.
#[derive(Clone, Debug)]
pub struct Call {
    pub verb: &'static str,
    pub container: String,
    pub pod: Option<String>,
    pub ip: Option<String>,
    pub valid: Option<Vec<String>>,
    pub sticky: Value,
    pub ranges: Value,
}

impl Call {
    fn new(verb: &'static str, container: &str) -> Self {
        Self {
            verb,
            container: container.to_owned(),
            pod: None,
            ip: None,
            valid: None,
            sticky: json!({"pods": ["db/*"], "retention": "1h"}),
            ranges: json!([[{"subnet": "10.1.0.0/29"}]]),
        }
    }

    pub fn add(container: &str) -> Self {
        Self::new("ADD", container)
    }

    pub fn del(container: &str) -> Self {
        Self::new("DEL", container)
    }

    pub fn gc(valid: &[&str]) -> Self {
        let valid = Some(valid.iter().map(|id| (*id).to_owned()).collect());
        Self { valid, ..Self::new("GC", "-") }
    }

    /// For the pod `name`, in the namespace whose pods keep their addresses.
    pub fn sticky(self, name: &str) -> Self {
        Self { pod: Some(format!("K8S_POD_NAMESPACE=db;K8S_POD_NAME={name}")), ..self }
    }

    /// For the pod `name`, in another namespace.
    pub fn plain(self, name: &str) -> Self {
        Self { pod: Some(format!("K8S_POD_NAMESPACE=web;K8S_POD_NAME={name}")), ..self }
    }

    pub fn asking_for(self, ip: &str) -> Self {
        Self { ip: Some(ip.to_owned()), ..self }
    }

    pub fn dual(self) -> Self {
        Self { ranges: json!([[{"subnet": "10.1.0.0/29"}], [{"subnet": "fd00::/125"}]]), ..self }
    }

    pub fn setting(mut self, key: &str, value: &str) -> Self {
        self.sticky[key] = json!(value);
        self
    }

    fn request(&self, data_dir: &Path) -> Request {
        let mut config = json!({
            "cniVersion": "1.1.0", "name": "net", "type": "ptp",
            "ipam": {"type": "sticky-ipam", "dataDir": data_dir, "ranges": self.ranges, "sticky": self.sticky},
        });
        if let Some(valid) = &self.valid {
            let pair = |id: &String| json!({"containerID": id, "ifname": "eth0"});
            config["cni.dev/valid-attachments"] = valid.iter().map(pair).collect();
        }
        let args = self.pod.iter().cloned().chain(self.ip.iter().map(|ip| format!("IP={ip}")));
        let args = args.collect::<Vec<_>>().join(";");
        let env: BTreeMap<&str, &str> = [
            ("CNI_COMMAND", self.verb),
            ("CNI_CONTAINERID", &self.container),
            ("CNI_IFNAME", "eth0"),
            ("CNI_NETNS", "/run/netns/none-of-this-name"),
            ("CNI_PATH", "/opt/cni/bin"),
            ("CNI_ARGS", &args),
        ]
        .into();
        let text = config.to_string();
        match read_request(&|name: &str| env.get(name).map(OsString::from), &mut text.as_bytes()) {
            Ok(ParsedRequest::Verb(request)) => *request,
            other => panic!("{self:?}: {other:?}"),
        }
    }
}

/// A network's data directory, and a clock.
pub struct Stage {
    dir: tempfile::TempDir,
    pub data_dir: PathBuf,
    pub now: NodeTime,
    uptime: u64,
}

impl Stage {
    /// A directory that is not there yet, two levels deep, below one that is.
    pub fn new() -> Self {
        let dir = fresh_dir();
        let data_dir = dir.path().join("lib/networks");
        Self { dir, data_dir, now: NodeTime::new(START, 100, "boot-1"), uptime: 100 }
    }

    /// The directory that is there before anything else.
    pub fn base(&self) -> &Path {
        self.dir.path()
    }

    /// The network's directory.
    pub fn root(&self) -> PathBuf {
        self.data_dir.join("net")
    }

    pub fn pass(&mut self, seconds: u64) {
        self.uptime += seconds;
        self.now = NodeTime::new(self.now.wall() + seconds, self.uptime, self.now.boot());
    }

    pub fn reboot(&mut self) {
        self.uptime = 10;
        self.now = NodeTime::new(self.now.wall() + 60, 10, format!("{}-again", self.now.boot()));
    }

    /// Carries the verb out on a disk; the addresses of the answer, none for a verb without.
    pub fn call(&self, call: &Call, disk: impl Disk) -> Result<Vec<IpAddr>, CniError> {
        run_verb_on(&call.request(&self.data_dir), disk, self.now.clone()).map(|answer| addresses(&answer))
    }
}

/// In memory where the machine has a place for that: thousands of stores are made and synced.
pub fn fresh_dir() -> tempfile::TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.unwrap()
}

fn addresses(answer: &Option<Value>) -> Vec<IpAddr> {
    let ips = answer.as_ref().and_then(|answer| answer["ips"].as_array().cloned()).unwrap_or_default();
    ips.iter().map(|ip| ip["address"].as_str().unwrap().split('/').next().unwrap().parse().unwrap()).collect()
}
