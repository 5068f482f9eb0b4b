//! The peer: whereabouts v0.8.0, unmodified, run as a runtime would run it, with its addresses in the API
//! server.

use std::io::Write;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use ipnet::{IpNet, Ipv4Net};
use serde_json::json;
use tempfile::TempDir;

use super::access::Access;
use super::tools;

/// whereabouts with one range. It keeps its pools in the namespace of the kubeconfig's context.
pub struct Whereabouts {
    program: PathBuf,
    network: String,
    namespace: String,
    _folder: TempDir,
}

impl Whereabouts {
    /// Configured for one identity and one range. Its kinds must be installed (`install_whereabouts_kinds`).
    pub fn configured(access: &Access, range: Ipv4Net) -> Self {
        Self::of(Self::built(), access, range)
    }

    /// The program as it was built.
    pub fn built() -> PathBuf {
        tools::group("whereabouts").join("bin/whereabouts")
    }

    /// The same with a program that lies elsewhere.
    pub fn of(program: PathBuf, access: &Access, range: Ipv4Net) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let settings = folder.path().join("whereabouts.conf");
        let kubernetes = json!({"kubernetes": {"kubeconfig": access.kubeconfig()}});
        std::fs::write(&settings, kubernetes.to_string()).expect("the folder is ours");
        let network = json!({
            "cniVersion": "1.0.0",
            "name": "peer",
            "type": "none",
            "ipam": {
                "type": "whereabouts",
                "range": range.to_string(),
                "configuration_path": settings,
                "log_file": folder.path().join("whereabouts.log"),
                "log_level": "error",
            },
        });
        Self { program, network: network.to_string(), namespace: access.namespace.clone(), _folder: folder }
    }

    /// ADD for a pod's container: its address, or what the plugin said.
    pub fn add(&self, pod: &str, container: &str) -> Result<IpAddr, String> {
        let output = self.run("ADD", pod, container);
        if !output.status.success() {
            return Err(said(&output));
        }
        let result: serde_json::Value =
            serde_json::from_slice(&output.stdout).map_err(|why| why.to_string())?;
        let address =
            result["ips"][0]["address"].as_str().ok_or_else(|| format!("no address in {result}"))?;
        let address: IpNet = address.parse().map_err(|_| format!("{address} is no address"))?;
        Ok(address.addr())
    }

    /// DEL for a pod's container.
    pub fn del(&self, pod: &str, container: &str) -> Result<(), String> {
        let output = self.run("DEL", pod, container);
        if output.status.success() { Ok(()) } else { Err(said(&output)) }
    }

    fn run(&self, command: &str, pod: &str, container: &str) -> Output {
        let arguments = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={pod}", self.namespace);
        let mut plugin = Command::new(&self.program);
        for variable in tools::PROXY_VARIABLES {
            plugin.env_remove(variable);
        }
        let mut plugin = plugin
            .env("CNI_COMMAND", command)
            .env("CNI_CONTAINERID", container)
            .env("CNI_IFNAME", "eth0")
            // IPAM enters no namespace: a name is enough, and the namespace of this process would be refused.
            .env("CNI_NETNS", format!("/var/run/netns/{container}"))
            .env("CNI_PATH", self.program.parent().expect("it lies in bin"))
            .env("CNI_ARGS", arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("whereabouts starts");
        // The write ends with the statement: the plugin reads until the pipe is closed.
        let sent = plugin.stdin.take().expect("a pipe was asked for").write_all(self.network.as_bytes());
        sent.expect("whereabouts reads its configuration");
        plugin.wait_with_output().expect("whereabouts ends")
    }
}

fn said(output: &Output) -> String {
    format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}
