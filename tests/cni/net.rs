//! One network in a fresh directory, and the plugin run on it.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

/// Every version with its place in the order of the specification.
pub const VERSIONS: [&str; 7] = ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0"];

/// A network: its directory and its configuration, which tests change at will.
pub struct Net {
    dir: tempfile::TempDir,
    pub config: Value,
}

/// The environment of a verb for the container `id`.
pub fn env(verb: &str, id: &str) -> BTreeMap<String, String> {
    let pairs = [
        ("CNI_COMMAND", verb),
        ("CNI_CONTAINERID", id),
        ("CNI_IFNAME", "eth0"),
        ("CNI_NETNS", "/run/netns/none-of-this-name"),
        ("CNI_PATH", "/opt/cni/bin"),
    ];
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).into()
}

/// What containerd passes about a pod.
pub fn pod(namespace: &str, name: &str, uid: &str) -> String {
    format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={name};K8S_POD_UID={uid}")
}

impl Net {
    /// A network of host-local's kind: one small range, none of our settings.
    pub fn new() -> Self {
        // In memory where there is such a place: the store syncs every change.
        let memory = Path::new("/dev/shm");
        let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
        let dir = made.unwrap();
        let config = json!({
            "cniVersion": "1.1.0", "name": "net", "type": "ptp",
            "ipam": {"type": "sticky-ipam", "dataDir": dir.path().join("data"), "subnet": "10.1.0.0/29"},
        });
        Self { dir, config }
    }

    /// A network whose pods of the namespace `db` keep their addresses.
    pub fn sticky() -> Self {
        let mut net = Self::new();
        net.set("ipam.sticky", json!({"pods": ["db/*"], "logLevel": "error", "waitForOldPod": "0s"}));
        net
    }

    /// Sets a field by its path; null takes it away.
    pub fn set(&mut self, path: &str, value: Value) -> &mut Self {
        let mut at = &mut self.config;
        for key in path.split('.') {
            at = &mut at[key];
        }
        *at = value;
        self
    }

    /// The range sets, instead of the one subnet.
    pub fn ranges(&mut self, sets: Value) -> &mut Self {
        self.set("ipam.subnet", Value::Null).set("ipam.ranges", sets)
    }

    /// A path beside the data directory.
    pub fn beside(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A path in the network's directory.
    pub fn file(&self, name: &str) -> PathBuf {
        self.dir.path().join("data/net").join(name)
    }

    /// The addresses that have files.
    pub fn held(&self) -> Vec<String> {
        let names = fs::read_dir(self.file("")).into_iter().flatten();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut held: Vec<_> = names.filter(|name| name.parse::<std::net::IpAddr>().is_ok()).collect();
        held.sort();
        held
    }

    pub fn call(&self, env: &BTreeMap<String, String>) -> Seen {
        run(env, self.config.to_string().as_bytes())
    }

    pub fn verb(&self, verb: &str, id: &str) -> Seen {
        self.call(&env(verb, id))
    }

    pub fn add(&self, id: &str) -> Seen {
        self.verb("ADD", id)
    }

    pub fn del(&self, id: &str) -> Seen {
        self.verb("DEL", id)
    }

    /// ADD for a pod of the sticky namespace.
    pub fn add_pod(&self, id: &str, name: &str, uid: &str) -> Seen {
        self.add_with(id, "CNI_ARGS", &pod("db", name, uid))
    }

    pub fn add_with(&self, id: &str, key: &str, value: &str) -> Seen {
        let mut env = env("ADD", id);
        env.insert(key.to_owned(), value.to_owned());
        self.call(&env)
    }

    /// GC that keeps these containers.
    pub fn gc(&mut self, valid: &[&str]) -> Seen {
        let pairs = valid.iter().map(|id| json!({"containerID": id, "ifname": "eth0"}));
        self.config["cni.dev/valid-attachments"] = pairs.collect();
        let seen = self.verb("GC", "");
        self.config.as_object_mut().unwrap().remove("cni.dev/valid-attachments");
        seen
    }
}

/// Starts the plugin with nothing but this environment.
pub fn start(env: &BTreeMap<String, String>) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sticky-ipam"));
    command.env_clear().envs(env);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

pub fn run(env: &BTreeMap<String, String>, stdin: &[u8]) -> Seen {
    let mut child = start(env);
    // The plugin may answer without reading to the end.
    let _ = child.stdin.take().unwrap().write_all(stdin);
    Seen::of(child)
}

/// What a run left.
#[derive(Debug)]
pub struct Seen {
    pub status: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Seen {
    pub fn of(child: Child) -> Self {
        let output = child.wait_with_output().unwrap();
        Self {
            status: output.status.code().unwrap(),
            stdout: String::from_utf8(output.stdout).unwrap(),
            stderr: String::from_utf8(output.stderr).unwrap(),
        }
    }

    /// The one document of a success.
    #[track_caller]
    pub fn json(&self) -> Value {
        assert_eq!(self.status, 0, "{self:?}");
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The addresses of a result, without their prefix lengths.
    #[track_caller]
    pub fn ips(&self) -> Vec<String> {
        let all = self.json()["ips"].as_array().unwrap_or_else(|| panic!("{self:?}")).clone();
        all.iter().map(|ip| ip["address"].as_str().unwrap().split('/').next().unwrap().to_owned()).collect()
    }

    #[track_caller]
    pub fn ip(&self) -> String {
        let mut ips = self.ips();
        assert_eq!(ips.len(), 1, "{self:?}");
        ips.remove(0)
    }

    /// A success that says nothing.
    #[track_caller]
    pub fn silent(&self) {
        assert_eq!((self.status, self.stdout.as_str()), (0, ""), "{self:?}");
    }

    /// An error of the specification's shape, with this code and these words in its message.
    #[track_caller]
    pub fn fails(&self, code: u64, words: &[&str]) -> Value {
        assert_eq!(self.status, 1, "{self:?}");
        let error: Value = serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {self:?}"));
        assert_eq!(error["code"], code, "{self:?}");
        assert!(error["cniVersion"].is_string(), "{self:?}");
        let text = format!("{} {}", error["msg"].as_str().unwrap(), error["details"].as_str().unwrap_or(""));
        for word in words {
            assert!(text.contains(word), "no {word:?} in {self:?}");
        }
        error
    }
}
