//! The agent's settings: flags and, for each, an environment variable. Must never let a value pass that would only be
//! found wrong later.

use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::agent::install::{
    ConflistSource, DEFAULT_BIN_DIR, DEFAULT_CONF_DIR, DEFAULT_KUBECONFIG, InstallSettings, ServiceAccountRef,
};
use crate::policy::mode::PluginMode;

use crate::cluster::cilium::pool::PublishConfig;
use crate::cni::{NetworkName, OnUnavailable};
use crate::policy::selection::rules::{DEFAULT_EXCLUDE_KEY, Rules};
use crate::policy::selection::selector::Selector;
use crate::runtime::tls::{CertificateFiles, TlsError};

/// Where Cilium's agent listens, unless told otherwise.
const CILIUM_SOCKET: &str = "/var/run/cilium/cilium.sock";

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "sticky-ipam-agent",
    version,
    about = "Keeps a node in step with the cluster's sticky addresses: prepares pods, keeps the node's own CiliumNode, frees leaks"
)]
pub struct AgentCommandLine {
    /// What to do; `run` if nothing is named.
    #[command(subcommand)]
    pub command: Option<AgentCommand>,
    /// The settings.
    #[command(flatten)]
    pub settings: AgentSettings,
}

/// What the agent can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Subcommand)]
pub enum AgentCommand {
    /// Keep the node in step until told to end (the default)
    Run,
    /// Put plugin, conflist and credentials onto the node once, and end
    Install,
    /// Take away what `install` put onto the node, and end
    Uninstall {
        /// Also what the DEL of running pods needs
        #[arg(long)]
        force: bool,
    },
}

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people
    Text,
    /// One JSON object a line
    Json,
}

/// Which log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogLevel {
    /// What failed
    Error,
    /// And what is odd
    Warn,
    /// And what was done
    Info,
    /// And what was looked at
    Debug,
    /// Everything
    Trace,
}

/// Everything the agent is told.
#[derive(Debug, Clone, Args)]
pub struct AgentSettings {
    /// This node's name in the cluster; required
    #[arg(long, env = "NODE_NAME", global = true, default_value = "", hide_default_value = true, value_parser = node, help_heading = "Node")]
    pub node: String,
    /// How sticky-ipam stands before Cilium: crd, delegated or chained
    #[arg(long, env = "MODE", global = true, default_value = "crd", help_heading = "Node")]
    pub mode: PluginMode,
    /// The agent's credentials; without it those that the cluster gives a pod
    #[arg(long, env = "KUBECONFIG", global = true, help_heading = "Node")]
    pub kubeconfig: Option<PathBuf>,
    /// The network's name in the conflist
    #[arg(long, env = "NETWORK", global = true, default_value = "cilium", value_parser = network, help_heading = "Node")]
    pub network: NetworkName,
    /// The directory of the node's store
    #[arg(long, env = "DATA_DIR", global = true, default_value = crate::cni::config::ipam::DEFAULT_DATA_DIR, value_parser = absolute, help_heading = "Node")]
    pub data_dir: PathBuf,
    /// Where the node's file system is mounted
    #[arg(long, env = "HOST_ROOT", global = true, default_value = "/", value_parser = absolute, help_heading = "Node")]
    pub host_root: PathBuf,
    /// Cilium's socket on the node
    #[arg(long, env = "CILIUM_SOCKET", global = true, default_value = CILIUM_SOCKET, value_parser = absolute, help_heading = "Node")]
    pub cilium_socket: PathBuf,

    /// Which pods are sticky, as JSON: {"matchLabels":{"app":"db"}}
    #[arg(long, env = "LABEL_SELECTOR", global = true, value_parser = selector, help_heading = "Who is sticky")]
    pub label_selector: Option<Selector>,
    /// The label whose value's prefix excludes a pod
    #[arg(long, env = "EXCLUDE_KEY", global = true, default_value = DEFAULT_EXCLUDE_KEY, help_heading = "Who is sticky")]
    pub exclude_key: String,
    /// Prefixes that exclude a pod, separated by commas
    #[arg(
        long,
        env = "EXCLUDE_PREFIXES",
        global = true,
        value_delimiter = ',',
        help_heading = "Who is sticky"
    )]
    pub exclude_prefixes: Vec<String>,

    /// Have a sticky pod's next incarnation ask Cilium for the same MAC (modes crd and delegated)
    #[arg(long, env = "KEEP_MAC", global = true, help_heading = "Who is sticky")]
    pub keep_mac: bool,

    /// Addresses a family that Cilium's pool has free at least (mode crd)
    #[arg(
        long,
        alias = "ipRateNum",
        env = "IP_RATE_NUM",
        global = true,
        default_value_t = 8,
        help_heading = "Addresses for pods that are not sticky"
    )]
    pub ip_rate_num: usize,
    /// Addresses a family that Cilium's pool has at most (mode crd)
    #[arg(
        long,
        alias = "maxAllocatedIP",
        env = "MAX_ALLOCATED_IP",
        global = true,
        default_value_t = 256,
        help_heading = "Addresses for pods that are not sticky"
    )]
    pub max_allocated_ip: usize,

    /// Where the node's plugins are
    #[arg(long, env = "CNI_BIN_DIR", global = true, default_value = DEFAULT_BIN_DIR, value_parser = absolute, help_heading = "Installation")]
    pub cni_bin_dir: PathBuf,
    /// Where the node's conflists are
    #[arg(long, env = "CNI_CONF_DIR", global = true, default_value = DEFAULT_CONF_DIR, value_parser = absolute, help_heading = "Installation")]
    pub cni_conf_dir: PathBuf,
    /// The conflist to install: a template's path, "built-in" or "none"; built-in if a plugin is to be installed, else none
    #[arg(long, env = "CONFLIST", global = true, help_heading = "Installation")]
    pub conflist: Option<PathBuf>,
    /// The plugin to install; nothing is installed without it
    #[arg(long, env = "PLUGIN", global = true, help_heading = "Installation")]
    pub plugin: Option<PathBuf>,
    /// The plugin's credentials on the node
    #[arg(long, env = "PLUGIN_KUBECONFIG", global = true, default_value = DEFAULT_KUBECONFIG, value_parser = absolute, help_heading = "Installation")]
    pub plugin_kubeconfig: PathBuf,
    /// The service account of the plugin's tokens, namespace/name; no credentials are written without it
    #[arg(long, env = "PLUGIN_SERVICE_ACCOUNT", global = true, help_heading = "Installation")]
    pub plugin_service_account: Option<ServiceAccountRef>,

    /// The API server as the host reaches it, if not as the agent does
    #[arg(long, env = "API_SERVER", global = true, help_heading = "Installation")]
    pub api_server: Option<String>,
    /// What a sticky pod's ADD does when the API server cannot be asked: fail or allocate
    #[arg(long, env = "ON_UNAVAILABLE", global = true, value_parser = on_unavailable, help_heading = "Installation")]
    pub on_unavailable: Option<OnUnavailable>,

    /// Where /metrics, /healthz and /readyz are served
    #[arg(
        long,
        env = "METRICS_ADDRESS",
        global = true,
        default_value = "127.0.0.1:9977",
        value_parser = listener,
        help_heading = "Operation"
    )]
    pub metrics_address: SocketAddr,
    /// The certificate, as PEM, with which they are served over TLS; a change of it is noticed
    #[arg(long, env = "TLS_CERT_FILE", global = true, help_heading = "Operation")]
    pub tls_cert_file: Option<PathBuf>,
    /// The private key of that certificate, as PEM
    #[arg(long, env = "TLS_KEY_FILE", global = true, help_heading = "Operation")]
    pub tls_key_file: Option<PathBuf>,
    /// Seconds between two looks at the node's own files
    #[arg(long, env = "TICK_SECONDS", global = true, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600), help_heading = "Operation")]
    pub tick_seconds: u64,
    /// Which log lines are written
    #[arg(
        long,
        env = "LOG_LEVEL",
        global = true,
        value_enum,
        default_value = "info",
        help_heading = "Operation"
    )]
    pub log_level: LogLevel,
    /// How log lines look
    #[arg(
        long,
        env = "LOG_FORMAT",
        global = true,
        value_enum,
        default_value = "text",
        help_heading = "Operation"
    )]
    pub log_format: LogFormat,
}

impl AgentSettings {
    /// What flags cannot say one by one.
    ///
    /// # Errors
    /// The flag, its value, and what would be right.
    pub fn check(&self) -> Result<(), String> {
        if self.node.is_empty() {
            return Err(
                "--node (NODE_NAME) is missing; name this node as `kubectl get nodes` shows it".into()
            );
        }
        if self.ip_rate_num > self.max_allocated_ip {
            return Err(format!(
                "--ip-rate-num {} is more than --max-allocated-ip {}; so many can never be free",
                self.ip_rate_num, self.max_allocated_ip
            ));
        }
        if self.exclude_key.is_empty() {
            return Err("--exclude-key (EXCLUDE_KEY) is empty; name a label".into());
        }
        if self.keep_mac && !self.mode.can_keep_mac() {
            return Err("--keep-mac (KEEP_MAC) and --mode chained: another plugin makes the interface then, and Cilium cannot set its MAC".into());
        }
        self.tls().map(|_| ()).map_err(|error| error.to_string())
    }

    /// The files with which the pages are served over TLS; none for plain HTTP.
    ///
    /// # Errors
    /// Only one was given.
    pub fn tls(&self) -> Result<Option<CertificateFiles>, TlsError> {
        CertificateFiles::of(self.tls_cert_file.as_deref(), self.tls_key_file.as_deref())
    }

    /// Who is sticky.
    #[must_use]
    pub fn rules(&self) -> Rules {
        Rules {
            selector: self.label_selector.clone(),
            exclude_key: self.exclude_key.clone(),
            exclude_prefixes: self.exclude_prefixes.clone(),
        }
    }

    /// What the node's CiliumNode shows. `ranges` are those of the node's own configuration.
    #[must_use]
    pub fn shape(&self, ranges: Vec<ipnet::IpNet>) -> PublishConfig {
        PublishConfig { mode: self.mode, ranges }
    }

    /// What is to be installed.
    #[must_use]
    pub fn install(&self) -> InstallSettings {
        let conflist = match self.conflist.as_deref().map(|path| (path.to_str(), path)) {
            None if self.plugin.is_some() => ConflistSource::BuiltIn,
            None | Some((Some("none"), _)) => ConflistSource::None,
            Some((Some("built-in"), _)) => ConflistSource::BuiltIn,
            Some((_, path)) => ConflistSource::File(path.to_owned()),
        };
        InstallSettings {
            data_dir: self.data_dir.clone(),
            host_root: self.host_root.clone(),
            cni_bin_dir: self.cni_bin_dir.clone(),
            cni_conf_dir: self.cni_conf_dir.clone(),
            conflist,
            plugin: self.plugin.clone(),
            plugin_kubeconfig: self.plugin_kubeconfig.clone(),
            plugin_service_account: self.plugin_service_account.clone(),
            api_server: self.api_server.clone(),
            rules: self.rules(),
            on_unavailable: self.on_unavailable,
            cilium_socket: Some(self.cilium_socket.clone()).filter(|path| *path != Path::new(CILIUM_SOCKET)),
            ..InstallSettings::new(self.node.clone(), self.mode, self.network.clone())
        }
    }

    /// Where a path of the node is found from here.
    #[must_use]
    pub fn on_host(&self, path: &Path) -> PathBuf {
        if self.host_root == Path::new("/") {
            return path.to_owned();
        }
        self.host_root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Between two looks at the node's own files.
    #[must_use]
    pub fn tick(&self) -> Duration {
        Duration::from_secs(self.tick_seconds)
    }

    /// Whether the metrics are served to this machine alone.
    #[must_use]
    pub fn serves_loopback(&self) -> bool {
        match self.metrics_address.ip() {
            IpAddr::V4(v4) => v4.is_loopback(),
            IpAddr::V6(v6) => v6.is_loopback(),
        }
    }
}

fn is_dns_name(text: &str) -> bool {
    let framed = |part: &str| {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        !part.is_empty() && part.bytes().all(inner) && !part.starts_with('-') && !part.ends_with('-')
    };
    text.len() <= 253 && text.split('.').all(framed)
}

fn node(text: &str) -> Result<String, String> {
    if text.is_empty() || is_dns_name(text) {
        return Ok(text.to_owned());
    }
    Err("it is not a node's name; write it as `kubectl get nodes` shows it".into())
}

fn network(text: &str) -> Result<NetworkName, String> {
    NetworkName::new(text)
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("it is not absolute; write it from / on".into()) }
}

fn listener(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "write address and port, such as 127.0.0.1:9977".into())
}

fn on_unavailable(text: &str) -> Result<OnUnavailable, String> {
    match text {
        "fail" => Ok(OnUnavailable::Fail),
        "allocate" => Ok(OnUnavailable::Allocate),
        _ => Err("write fail or allocate".into()),
    }
}

fn selector(text: &str) -> Result<Selector, String> {
    Selector::parse(text).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(arguments: &[&str]) -> Result<AgentCommandLine, String> {
        let all = std::iter::once("sticky-ipam-agent").chain(arguments.iter().copied());
        let parsed = AgentCommandLine::try_parse_from(all).map_err(|error| error.to_string())?;
        parsed.settings.check()?;
        Ok(parsed)
    }

    #[test]
    fn a_node_is_enough_and_both_spellings_of_a_flag_are_understood() {
        let line = parse(&["--node", "n1", "--ipRateNum", "4", "--maxAllocatedIP=9"]).unwrap();
        assert_eq!((line.settings.ip_rate_num, line.settings.max_allocated_ip), (4, 9));
        assert_eq!(line.settings.mode, PluginMode::Crd);
        assert_eq!(line.command, None);
        let line = parse(&["install", "--node", "n1", "--mode", "chained"]).unwrap();
        assert_eq!((line.command, line.settings.mode), (Some(AgentCommand::Install), PluginMode::Chained));
    }

    #[test]
    fn every_mistake_names_the_flag_and_the_value() {
        for (arguments, parts) in [
            (&[][..], ["--node", "NODE_NAME"]),
            (&["--node", "Node_1"], ["--node", "Node_1"]),
            (&["--node", "n", "--mode", "overlay"], ["--mode", "overlay"]),
            (&["--node", "n", "--network", "a/b"], ["--network", "a/b"]),
            (&["--node", "n", "--data-dir", "x"], ["--data-dir", "'x'"]),
            (&["--node", "n", "--label-selector", "{\"app\":1}"], ["--label-selector", "app"]),
            (&["--node", "n", "--ip-rate-num", "x"], ["--ip-rate-num", "'x'"]),
            (&["--node", "n", "--ip-rate-num", "9", "--max-allocated-ip", "8"], ["--ip-rate-num 9", "8"]),
            (&["--node", "n", "--plugin-service-account", "x"], ["--plugin-service-account", "'x'"]),
            (&["--node", "n", "--metrics-address", "here"], ["--metrics-address", "here"]),
            (&["--node", "n", "--tls-cert-file", "/x"], ["--tls-cert-file", "--tls-key-file"]),
            (&["--node", "n", "--tls-key-file", "/x"], ["--tls-key-file", "--tls-cert-file"]),
            (&["--node", "n", "--tick-seconds", "0"], ["--tick-seconds", "0"]),
        ] {
            let error = parse(arguments).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{arguments:?}: {error}");
        }
    }

    #[test]
    fn paths_of_the_node_are_looked_up_below_its_mount() {
        let mut settings = parse(&["--node", "n1"]).unwrap().settings;
        assert_eq!(settings.on_host(Path::new("/a/b")), Path::new("/a/b"));
        settings.host_root = "/host".into();
        assert_eq!(settings.on_host(Path::new("/a/b")), Path::new("/host/a/b"));
    }
}
