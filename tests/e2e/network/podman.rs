//! Containers of Debian's podman, whose CNI back end calls us without a kubelet. podman's own folders and its
//! node's network namespace end with the test.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::pods::done;

static NEXT: AtomicU32 = AtomicU32::new(0);

/// What the containers run: Debian's busybox has everything that they need.
const BUSYBOX: &str = "/bin/busybox";
/// A container may not raise its limits where the tests themselves have low ones.
const LIMITS: &str = r#"default_ulimits = ["nofile=1024:1024", "nproc=1024:1024"]"#;

pub struct Podman {
    dir: tempfile::TempDir,
    node: String,
}

impl Podman {
    /// A node whose default network is this main plugin, with us as its IPAM plugin, before `others`.
    pub fn new(mut main: Value, others: &[Value]) -> Self {
        let node = format!("sippm{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let podman = Self { dir: tempfile::tempdir().unwrap(), node };
        let dir = podman.dir.path();
        main["ipam"] = json!({
            "type": "sticky-ipam", "dataDir": dir.join("data"),
            "ranges": [[{"subnet": "10.77.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}],
            "sticky": {"logFile": dir.join("plugin.log")},
        });
        let plugins: Vec<&Value> = [&main].into_iter().chain(others).collect();
        let conflist = json!({"cniVersion": "1.0.0", "name": "sticky", "plugins": plugins});
        fs::create_dir(dir.join("net.d")).unwrap();
        fs::write(dir.join("net.d/10-sticky.conflist"), conflist.to_string()).unwrap();
        let tools = PathBuf::from(std::env::var_os("STICKY_IPAM_CNI_BIN").expect(
            "STICKY_IPAM_CNI_BIN must name the folder with ptp and bridge; make e2e builds and names it",
        ));
        let ours = PathBuf::from(env!("CARGO_BIN_EXE_sticky-ipam"));
        let settings = format!(
            "[containers]\n{LIMITS}\n[engine]\nruntime = \"runc\"\ncgroup_manager = \"cgroupfs\"\n\
             events_logger = \"none\"\n[network]\nnetwork_backend = \"cni\"\ndefault_network = \"sticky\"\n\
             network_config_dir = {:?}\ncni_plugin_dirs = [{tools:?}, {:?}]\n",
            dir.join("net.d"),
            ours.parent().unwrap(),
        );
        fs::write(dir.join("containers.conf"), settings).unwrap();
        fs::create_dir_all(dir.join("rootfs/bin")).unwrap();
        fs::copy(BUSYBOX, dir.join("rootfs/bin/busybox")).expect("Debian's busybox-static is there");
        done(Command::new("ip").args(["netns", "add", &podman.node]));
        done(podman.inside().args(["ip", "link", "set", "lo", "up"]));
        podman
    }

    /// Runs a container of this name with these further options; its first address.
    pub fn run(&self, name: &str, options: &[&str]) -> String {
        let unconfined = ["--security-opt", "seccomp=unconfined", "--security-opt", "apparmor=unconfined"];
        let mut command = self.podman();
        command.args(["run", "--detach", "--name", name, "--network", "sticky"]).args(unconfined);
        command.args(options).arg("--rootfs").arg(self.dir.path().join("rootfs"));
        done(command.args(["/bin/busybox", "nc", "-ll", "-p", "8080", "-e", "/bin/busybox", "hostname"]));
        let output = done(self.podman().args(["inspect", name]));
        let found: Value = serde_json::from_slice(&output.stdout).unwrap();
        let address = &found[0]["NetworkSettings"]["Networks"]["sticky"]["IPAddress"];
        assert_ne!(address, "", "{name} ended: {found:#}");
        address.as_str().unwrap().to_owned()
    }

    /// Removes it, as `podman rm --force` does: its DEL comes after its end.
    pub fn remove(&self, name: &str) {
        done(self.podman().args(["rm", "--force", "--time", "0", name]));
    }

    /// What the server in a container answers on this port of this address, asked from the node. The server
    /// may still be starting: it is asked until it answers, or for ten seconds.
    pub fn answer(&self, address: &str, port: u16) -> Option<String> {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let answer = self.answer_now(address, port);
            if answer.is_some() || Instant::now() >= deadline {
                return answer;
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// The same, asked once.
    pub fn answer_now(&self, address: &str, port: u16) -> Option<String> {
        let mut command = self.inside();
        command.args([BUSYBOX, "nc", "-w", "2", address, &port.to_string()]);
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        (output.status.success() && !text.is_empty()).then_some(text)
    }

    fn inside(&self) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--net=/run/netns/{}", self.node));
        command
    }

    fn podman(&self) -> Command {
        let dir = self.dir.path();
        let mut command = self.inside();
        command.arg("podman").env("CONTAINERS_CONF", dir.join("containers.conf"));
        for (option, folder) in [("--root", "root"), ("--runroot", "run"), ("--tmpdir", "tmp")] {
            command.arg(option).arg(dir.join(folder));
        }
        command.args(["--storage-driver", "vfs", "--log-level", "error"]);
        command
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = self.podman().args(["rm", "--all", "--force", "--time", "0"]).output();
        let _ = Command::new("ip").args(["netns", "del", &self.node]).status();
    }
}
