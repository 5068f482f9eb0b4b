//! The agent's settings: flags and, for each, an environment variable. Must never accept a value that would
//! only be found wrong later.

use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::ArgAction::Set;
use clap::{Args, Parser, Subcommand, value_parser};

use crate::agent::install::{
    self, ConflistSource, DEFAULT_BIN_DIR, DEFAULT_CONF_DIR, DEFAULT_KUBECONFIG, DEFAULT_TOKEN_HOURS,
    InstallSettings, ServiceAccountRef,
};
use crate::cluster::cilium::pool::PublishConfig;
use crate::cni::OnUnavailable;
use crate::cni::config::{DEFAULT_DATA_DIR, sticky::DEFAULT_BOOT_ID_FILE};
use crate::names::NetworkName;
use crate::policy::mode::PluginMode;
use crate::runtime::flags::{
    self, BOOL, ClientFlags, LogFlags, SELECTION, SelectionFlags, ServerFlags, dns_name,
};

/// Where cilium-agent listens by default.
const CILIUM_SOCKET: &str = "/var/run/cilium/cilium.sock";

const NODE: &str = "Node";
const POOL: &str = "Addresses for pods that are not sticky";
const INSTALL: &str = "Installation";

#[derive(Debug, Parser)]
#[command(
    name = "sticky-ipam-agent",
    version,
    about = "Manages a node's sticky addresses: installs the plugin, prepares pods, fills Cilium's pool, \
        releases leaks",
    max_term_width = 120,
    mut_args(flags::global)
)]
pub struct AgentCommandLine {
    /// What to do; `run` if nothing is named.
    #[command(subcommand)]
    pub command: Option<AgentCommand>,
    #[command(flatten)]
    pub settings: AgentSettings,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Subcommand)]
pub enum AgentCommand {
    /// Run until SIGTERM or SIGINT (the default)
    Run,
    /// Install plugin, conflist and credentials on the node once
    Install,
    /// Remove what `install` put on the node
    Uninstall {
        /// Remove also what the DEL of running pods needs
        #[arg(long)]
        force: bool,
        /// Go on until SIGTERM: end what sandboxes leave that are gone, and detach them in the cluster
        #[arg(long, conflicts_with = "check")]
        watch: bool,
        /// Remove nothing; list what is installed, and exit with 1 if anything is
        #[arg(long)]
        check: bool,
    },
}

/// Everything that an operator can set.
#[derive(Debug, Clone, Args)]
#[command(mut_arg("metrics_address", |flag| flag.default_value("127.0.0.1:9977").required(false)))]
pub struct AgentSettings {
    /// Name of this node in the cluster; required
    #[arg(long, env = "NODE_NAME", default_value = "", hide_default_value = true, value_parser = node, help_heading = NODE)]
    pub node: String,
    /// How the plugin works with Cilium: crd, delegated or chained
    #[arg(long, env, default_value = "crd", help_heading = NODE)]
    pub mode: PluginMode,
    /// Name of the network in the conflist, and of its directory in the store
    #[arg(long, env, default_value = "cilium", value_parser = NetworkName::new, help_heading = NODE)]
    pub network: NetworkName,
    /// Directory of the node's store
    #[arg(long, env, default_value = DEFAULT_DATA_DIR, value_parser = absolute, help_heading = NODE)]
    pub data_dir: PathBuf,
    /// Where the node's file system is mounted; all paths of the node are below it
    #[arg(long, env, default_value = "/", value_parser = absolute, help_heading = NODE)]
    pub host_root: PathBuf,
    /// Socket of cilium-agent on the node
    #[arg(long, env, default_value = CILIUM_SOCKET, value_parser = absolute, help_heading = NODE)]
    pub cilium_socket: PathBuf,
    /// File on the node whose content differs from boot to boot; set it where nodes are containers
    #[arg(long, env, default_value = DEFAULT_BOOT_ID_FILE, value_parser = absolute, help_heading = NODE)]
    pub boot_id_file: PathBuf,
    /// Seconds between two reads of the node's store
    #[arg(long, env, default_value_t = 5, value_parser = value_parser!(u64).range(1..=600), help_heading = NODE)]
    pub tick_seconds: u64,
    /// Whether the agent adds routes by which the host reaches pods that cilium-agent does not route on its
    /// own node (mode crd); it needs NET_ADMIN
    #[arg(long, env, value_name = BOOL, action = Set, default_value_t = true, help_heading = NODE)]
    pub host_routes: bool,

    #[command(flatten)]
    pub selection: SelectionFlags,
    /// Let the next pod of a claimant ask Cilium for the same MAC address (modes crd and delegated)
    #[arg(long, env, help_heading = SELECTION)]
    pub keep_mac: bool,

    /// Free addresses per IP family in Cilium's pool, beside one for each pod that waits for it (mode crd)
    #[arg(long, env, alias = "ipRateNum", default_value_t = 8, help_heading = POOL)]
    pub ip_rate_num: usize,
    /// Maximum number of addresses per IP family in Cilium's pool (mode crd)
    #[arg(long, env, alias = "maxAllocatedIP", default_value_t = 256, help_heading = POOL)]
    pub max_allocated_ip: usize,

    /// Directory of CNI plugins on the node
    #[arg(long, env, default_value = DEFAULT_BIN_DIR, value_parser = absolute, help_heading = INSTALL)]
    pub cni_bin_dir: PathBuf,
    /// Directory of conflists on the node
    #[arg(long, env, default_value = DEFAULT_CONF_DIR, value_parser = absolute, help_heading = INSTALL)]
    pub cni_conf_dir: PathBuf,
    /// Conflist to install: a template's path, built-in or none; default: built-in with --plugin, else none
    #[arg(long, env, help_heading = INSTALL)]
    pub conflist: Option<PathBuf>,
    /// Plugin to install; without it no plugin is installed
    #[arg(long, env, help_heading = INSTALL)]
    pub plugin: Option<PathBuf>,
    /// The plugin's kubeconfig on the node
    #[arg(long, env, default_value = DEFAULT_KUBECONFIG, value_parser = absolute, help_heading = INSTALL)]
    pub plugin_kubeconfig: PathBuf,
    /// Service account of the plugin's tokens, namespace/name; without it no kubeconfig is written
    #[arg(long, env, help_heading = INSTALL)]
    pub plugin_service_account: Option<ServiceAccountRef>,
    /// Lifetime of the plugin's tokens in hours: for so long, less one, pods start on a node without its
    /// agent
    #[arg(long, env, default_value_t = DEFAULT_TOKEN_HOURS, value_parser = value_parser!(u64).range(1..=720), help_heading = INSTALL)]
    pub plugin_token_hours: u64,
    /// API server as the host reaches it, if not as the agent does
    #[arg(long, env, help_heading = INSTALL)]
    pub api_server: Option<String>,
    /// What ADD does when the API server is unavailable and the node has not decided about the pod: fail or
    /// allocate; default: as the conflist says, or fail
    #[arg(long, env, value_parser = on_unavailable, help_heading = INSTALL)]
    pub on_unavailable: Option<OnUnavailable>,

    #[command(flatten)]
    pub client: ClientFlags,
    #[command(flatten)]
    pub server: ServerFlags,
    #[command(flatten)]
    pub log: LogFlags,
}

impl AgentSettings {
    /// What flags cannot say one by one.
    /// Errors: the flag, its value, and what would be right.
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
        self.selection.check()?;
        if self.keep_mac && !self.mode.can_keep_mac() {
            let why = "--keep-mac (KEEP_MAC) and --mode chained: another plugin makes the interface then, \
                and Cilium cannot set its MAC";
            return Err(why.into());
        }
        self.server.certificate().map(|_| ()).map_err(|error| error.to_string())
    }

    /// What the node's CiliumNode shows. `ranges` are those of the node's own configuration.
    pub fn shape(&self, ranges: Vec<ipnet::IpNet>) -> PublishConfig {
        PublishConfig { mode: self.mode, ranges, known_blocks: Vec::new() }
    }

    pub fn install(&self) -> InstallSettings {
        let conflist = match &self.conflist {
            None if self.plugin.is_some() => ConflistSource::BuiltIn,
            None => ConflistSource::None,
            Some(path) if path.as_os_str() == "none" => ConflistSource::None,
            Some(path) if path.as_os_str() == "built-in" => ConflistSource::BuiltIn,
            Some(path) => ConflistSource::File(path.clone()),
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
            token_lifetime: Duration::from_secs(self.plugin_token_hours * 3600),
            api_server: self.api_server.clone(),
            rules: self.selection.rules(),
            on_unavailable: self.on_unavailable,
            cilium_socket: Some(self.cilium_socket.clone()).filter(|path| *path != Path::new(CILIUM_SOCKET)),
            awaited_cilium: Some(self.cilium_socket.clone()),
            boot_id_file: self.boot_id_file.clone(),
            ..InstallSettings::new(self.node.clone(), self.mode, self.network.clone())
        }
    }

    /// The file of the boot id as the agent sees it.
    pub fn boot_id_path(&self) -> PathBuf {
        let path = &self.boot_id_file;
        if install::is_kernels(path) { path.clone() } else { self.on_host(path) }
    }

    /// Where a path of the node is found from here.
    pub fn on_host(&self, path: &Path) -> PathBuf {
        if self.host_root == Path::new("/") {
            return path.to_owned();
        }
        self.host_root.join(path.strip_prefix("/").unwrap_or(path))
    }
}

fn node(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Ok(String::new());
    }
    dns_name(text)
        .map_err(|_| "it is not the name of a node; write it as `kubectl get nodes` shows it".into())
}

fn absolute(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err("it is not absolute; write it from / on".into()) }
}

fn on_unavailable(text: &str) -> Result<OnUnavailable, String> {
    match text {
        "fail" => Ok(OnUnavailable::Fail),
        "allocate" => Ok(OnUnavailable::Allocate),
        _ => Err("write fail or allocate".into()),
    }
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
