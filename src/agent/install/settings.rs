//! What is to be installed, and where.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use crate::cni::OnUnavailable;
use crate::cni::config::{cluster::BYPASS_FILE, sticky::DEFAULT_BOOT_ID_FILE};
use crate::names::NetworkName;
use crate::policy::mode::PluginMode;
use crate::policy::selection::rules::Rules;

/// The conflist's name: it sorts before the one that Cilium writes.
pub(crate) const CONFLIST: &str = "03-sticky-ipam.conflist";
pub const PLUGIN: &str = "sticky-ipam";
pub(crate) const DEFAULT_BIN_DIR: &str = "/opt/cni/bin";
pub(crate) const DEFAULT_CONF_DIR: &str = "/etc/cni/net.d";
/// Where the plugin's credentials are. A folder of its own, because runtimes read the files beside the
/// conflist.
pub(crate) const DEFAULT_KUBECONFIG: &str = "/etc/cni/net.d/sticky-ipam.d/kubeconfig";
/// The lifetime of a token, in hours. It is renewed every hour, so of 49 hours at least 48 are left whenever
/// the agent dies: a day, and one more to notice. What that means for a stolen one is in docs/agent.md.
pub(crate) const DEFAULT_TOKEN_HOURS: u64 = 49;
/// Pods of a node without an agent start for a day at least; a token that ends before that is reported.
pub(super) const SHORT_TOKEN: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServiceAccountRef {
    pub namespace: String,
    pub name: String,
}

impl fmt::Display for ServiceAccountRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl FromStr for ServiceAccountRef {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
            }
            _ => Err(format!(
                "{text:?} is not a service account; write namespace/name, such as \
                 kube-system/sticky-ipam-node"
            )),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ConflistSource {
    /// None is installed.
    None,
    /// The mode's own, with the node's home blocks.
    BuiltIn,
    /// A template, as the agent sees it.
    File(PathBuf),
}

/// What is to be installed, and where. Paths are the host's; the agent finds them below `host_root`.
#[derive(Debug, Clone)]
pub struct InstallSettings {
    pub node: String,
    pub mode: PluginMode,
    /// The network's name in the conflist, and of its directory in the store.
    pub network: NetworkName,
    pub data_dir: PathBuf,
    pub host_root: PathBuf,
    pub cni_bin_dir: PathBuf,
    pub cni_conf_dir: PathBuf,
    pub conflist: ConflistSource,
    /// The plugin to install, as the agent sees it; none is installed if there is none.
    pub plugin: Option<PathBuf>,
    /// Where the plugin finds its credentials.
    pub plugin_kubeconfig: PathBuf,
    /// Whose token the plugin gets; its kubeconfig is not written if there is none.
    pub plugin_service_account: Option<ServiceAccountRef>,
    pub token_lifetime: Duration,
    /// The API server as the host reaches it, if not as the agent does.
    pub api_server: Option<String>,
    pub rules: Rules,
    /// What ADD does when the API server cannot be asked; what the template or the plugin says if none.
    pub on_unavailable: Option<OnUnavailable>,
    /// The socket of cilium-agent on the host, if it is not at the plugin's default.
    pub cilium_socket: Option<PathBuf>,
    /// The socket on which cilium-agent must answer before a host gets its first conflist; without it no
    /// conflist waits for Cilium.
    pub awaited_cilium: Option<PathBuf>,
    /// Where plugin and agent read which boot of the host it is.
    pub boot_id_file: PathBuf,
}

impl InstallSettings {
    pub fn new(node: impl Into<String>, mode: PluginMode, network: NetworkName) -> Self {
        Self {
            node: node.into(),
            mode,
            network,
            data_dir: PathBuf::from(crate::cni::config::DEFAULT_DATA_DIR),
            host_root: PathBuf::from("/"),
            cni_bin_dir: PathBuf::from(DEFAULT_BIN_DIR),
            cni_conf_dir: PathBuf::from(DEFAULT_CONF_DIR),
            conflist: ConflistSource::BuiltIn,
            plugin: None,
            plugin_kubeconfig: PathBuf::from(DEFAULT_KUBECONFIG),
            plugin_service_account: None,
            token_lifetime: Duration::from_secs(DEFAULT_TOKEN_HOURS * 3600),
            api_server: None,
            rules: Rules::default(),
            on_unavailable: None,
            cilium_socket: None,
            awaited_cilium: None,
            boot_id_file: PathBuf::from(DEFAULT_BOOT_ID_FILE),
        }
    }

    /// A path of the host as the agent sees it.
    pub fn on_host(&self, path: &Path) -> PathBuf {
        self.host_root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// The file of the boot id as the agent sees it.
    pub fn boot_id_path(&self) -> PathBuf {
        if is_kernels(&self.boot_id_file) {
            self.boot_id_file.clone()
        } else {
            self.on_host(&self.boot_id_file)
        }
    }

    pub fn plugin_path(&self) -> PathBuf {
        self.on_host(&self.cni_bin_dir).join(PLUGIN)
    }

    pub fn conflist_path(&self) -> PathBuf {
        self.on_host(&self.cni_conf_dir).join(CONFLIST)
    }

    pub fn kubeconfig_path(&self) -> PathBuf {
        self.on_host(&self.plugin_kubeconfig)
    }

    /// Where the plugin looks whether the bypass is on.
    pub fn bypass_path(&self) -> PathBuf {
        self.kubeconfig_path().with_file_name(BYPASS_FILE)
    }
}

/// Whether a file is the kernel's, and so the same wherever it is read.
pub(crate) fn is_kernels(path: &Path) -> bool {
    path.starts_with("/proc")
}
