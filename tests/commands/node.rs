//! A node for a test: a data directory, a boot id, and the plugin to run over them.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::{Value, json};
use tempfile::TempDir;

/// The plugin under test.
pub const PLUGIN: &str = env!("CARGO_BIN_EXE_sticky-ipam");

/// The project's top folder.
pub fn project() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// How a command ended.
#[derive(Debug)]
pub struct Ended {
    pub status: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    pub fn of(output: &Output) -> Self {
        Self {
            status: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8(output.stdout.clone()).unwrap(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    pub fn well(self) -> Self {
        assert_eq!(self.status, 0, "{self:?}");
        self
    }

    pub fn has(self, text: &str) -> Self {
        assert!(self.stdout.contains(text), "{text:?} is not in {self:?}");
        self
    }
}

pub struct Node {
    folder: TempDir,
}

impl Node {
    pub fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("boot"), "boot-1\n").unwrap();
        fs::create_dir(folder.path().join("data")).unwrap();
        Self { folder }
    }

    pub fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.data().join("net").join(name)
    }

    pub fn boot_id_file(&self) -> PathBuf {
        self.folder.path().join("boot")
    }

    pub fn reboot(&self) {
        fs::write(self.boot_id_file(), "boot-2\n").unwrap();
    }

    fn config(&self, sticky: &Value) -> Value {
        let mut sticky = sticky.clone();
        if let Some(sticky) = sticky.as_object_mut() {
            sticky.insert("bootIDFile".into(), json!(self.boot_id_file()));
        }
        let ranges = json!([[{"subnet": "10.7.0.0/24"}]]);
        json!({"cniVersion": "1.1.0", "name": "net", "type": "ptp",
               "ipam": {"type": "sticky-ipam", "dataDir": self.data(), "ranges": ranges, "sticky": sticky}})
    }

    /// Runs a verb for a container of a pod; its address on ADD.
    pub fn verb(&self, verb: &str, container: &str, pod: &str, sticky: &Value) -> Option<String> {
        let mut child = Command::new(PLUGIN)
            .env_clear()
            .envs([
                ("CNI_COMMAND", verb),
                ("CNI_CONTAINERID", container),
                ("CNI_NETNS", "/run/netns/not-there"),
                ("CNI_IFNAME", "eth0"),
                ("CNI_PATH", "/opt/cni/bin"),
                ("CNI_ARGS", &format!("IgnoreUnknown=1;K8S_POD_NAMESPACE=default;K8S_POD_NAME={pod}")),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(self.config(sticky).to_string().as_bytes()).unwrap();
        let ended = Ended::of(&child.wait_with_output().unwrap()).well();
        let result: Value = serde_json::from_str(&ended.stdout).unwrap_or_default();
        let address = result["ips"][0]["address"].as_str()?;
        Some(address.split('/').next().unwrap().to_owned())
    }

    pub fn add(&self, container: &str, pod: &str) -> String {
        self.verb("ADD", container, pod, &json!({})).unwrap()
    }

    pub fn del(&self, container: &str, pod: &str) {
        self.verb("DEL", container, pod, &json!({}));
    }

    /// Runs `sticky-ipam store` over the data directory.
    pub fn store(&self, arguments: &[&str]) -> Ended {
        let (command, rest) = arguments.split_first().unwrap();
        let output = Command::new(PLUGIN)
            .env_remove("CNI_COMMAND")
            .args(["store", command, "--dir"])
            .arg(self.data())
            .arg("--boot-id-file")
            .arg(self.boot_id_file())
            .args(rest)
            .output()
            .unwrap();
        Ended::of(&output)
    }

    /// Writes a record as host-local does, into any data directory.
    pub fn host_local(data: &Path, address: &str, container: &str) {
        fs::create_dir_all(data.join("net")).unwrap();
        fs::write(data.join("net").join(address), format!("{container}\r\neth0")).unwrap();
    }

    /// Every file below a directory with its bytes, to see whether anything changed.
    pub fn everything(directory: &Path) -> Vec<(PathBuf, Vec<u8>)> {
        let mut found = Vec::new();
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                found.push((path.clone(), Vec::new()));
                found.extend(Self::everything(&path));
            } else {
                found.push((path.clone(), fs::read(&path).unwrap()));
            }
        }
        found.sort();
        found
    }
}

/// Runs `sticky-ipam` with these arguments and nothing else.
pub fn command(arguments: &[&str]) -> Ended {
    Ended::of(&Command::new(PLUGIN).env_remove("CNI_COMMAND").args(arguments).output().unwrap())
}
