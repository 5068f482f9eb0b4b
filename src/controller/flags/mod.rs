//! The controller's settings: flags, an environment variable for each, and a file. Must never accept a value
//! that would only be found wrong later. Spellings that older manifests use are understood beside ours.

mod check;
mod file;
#[cfg(test)]
mod tests;
mod values;

use std::path::PathBuf;

use clap::ArgAction::Set;
use clap::builder::PossibleValuesParser;
use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::policy::lifetime::retention::{Keep, OnScaleDown};
use crate::policy::mode::CiliumMode;
use crate::policy::preflight::HARMFUL;
use crate::runtime::flags::{
    self, BOOL, ClientFlags, LogFlags, SELECTION, SelectionFlags, ServerFlags, dns_name,
};

pub use file::load;
pub(crate) use file::{LoadError, LoadedSettings, reread};
pub(crate) use values::{DurationArg, PoolRange};
use values::{at_least_one, dns_label, mask_size, range_v4, range_v6};

/// The default of both watermarks of a node's pool, as older manifests know it. Only the agent goes by them.
const WATERMARK: u32 = 255;
/// Which pods are sticky unless the operator says so, as older manifests know it.
const DEFAULT_SELECTOR: &str = r#"{"matchLabels":{"noStatic":"true"}}"#;

const RETENTION: &str = "How long an address is kept";
const BLOCKS: &str = "Node blocks";
const ELECTION: &str = "Leader election";

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "sticky-ipam-controller",
    version,
    about = "Manages sticky addresses: adopts pods, releases and repairs addresses, gives nodes blocks, \
        reports drift",
    max_term_width = 120,
    mut_args(flags::global)
)]
pub struct ControllerCommandLine {
    #[command(subcommand)]
    pub command: Option<ControllerCommand>,
    #[command(flatten)]
    pub settings: ControllerSettings,
}

/// What the controller can do.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum ControllerCommand {
    /// Run until SIGTERM or SIGINT (the default)
    Run,
    /// Compare the addresses in Nodes, CiliumNodes, annotations and pods; exit status 1 if they disagree
    Audit {
        /// Format of the findings
        #[arg(long, value_enum, default_value = "text")]
        output: OutputFormat,
    },
    /// Adopt a running cluster into Cilium's crd mode, or check the way back; without --apply nothing is
    /// written
    Adopt(AdoptOptions),
}

/// How a command prints what it found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// For people
    Text,
    /// For programs
    Json,
}

/// The options of `adopt`.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct AdoptOptions {
    /// Write the pools; without it only print what would be written
    #[arg(long)]
    pub apply: bool,
    /// Add the addresses of pods that start, until SIGTERM or SIGINT
    #[arg(long, requires = "apply")]
    pub follow: bool,
    /// Check that every address is on its home node again, so that Cilium can return to this mode; with
    /// --apply, remove the settings per node once Cilium's ConfigMap names that mode
    #[arg(long, value_enum, num_args = 0..=1, require_equals = true, default_missing_value = "cluster-pool")]
    #[arg(value_name = "MODE", conflicts_with_all = ["follow", "canary"])]
    pub back: Option<BackTo>,
    /// Free addresses per node and IP family that any pod may get from the pool until the agent fills it, as
    /// far as the node's block has them
    #[arg(long, default_value_t = 110, value_name = "N")]
    pub free: usize,
    /// Switch this node first: with --apply, its cilium-agent uses crd mode from its next start on
    #[arg(long, value_name = "NODE")]
    pub canary: Option<String>,
    /// Go on in spite of the harmful findings of this name
    #[arg(long, value_name = "FINDING", value_parser = PossibleValuesParser::new(HARMFUL))]
    pub accept: Vec<String>,
}

/// The mode to which Cilium returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackTo {
    /// Every block of the CiliumNode stays with the node
    ClusterPool,
    /// Only the ranges that the Node itself names stay, one per IP family
    Kubernetes,
}

/// Everything that an operator can set.
#[derive(Debug, Clone, Args)]
#[command(
    mut_arg("metrics_address", |flag| flag.default_value("0.0.0.0:9978").required(false)),
    mut_arg("label_selector", |flag| flag.default_value(DEFAULT_SELECTOR))
)]
pub struct ControllerSettings {
    #[command(flatten)]
    pub client: ClientFlags,
    /// YAML file of settings, by the names of the flags; flags and variables override it, and a change of it
    /// restarts the process
    #[arg(long, env, value_name = "FILE", help_heading = "Process")]
    pub config: Option<PathBuf>,
    #[command(flatten)]
    pub server: ServerFlags,
    #[command(flatten)]
    pub log: LogFlags,

    #[command(flatten)]
    pub selection: SelectionFlags,
    /// Whether running pods that started without the plugin get a StickyIP for the addresses they have
    #[arg(long, env, value_name = BOOL, action = Set, default_value_t = true, help_heading = SELECTION)]
    pub adopt_running: bool,
    /// Whether nodes get IPv6 blocks
    #[arg(long, env, alias = "enableIPv6", value_name = BOOL, action = Set, default_value_t, help_heading = SELECTION)]
    pub enable_ipv6: bool,
    /// Whether a pod's IPv6 address is adopted too
    #[arg(long, env, alias = "enableStaticPodIPv6", value_name = BOOL, action = Set, default_value_t, help_heading = SELECTION)]
    pub enable_static_pod_ipv6: bool,

    /// When an address is released, unless the pod or its namespace says otherwise
    #[arg(long, env, value_enum, ignore_case = true, default_value = "WithWorkload", help_heading = RETENTION)]
    pub retention: Keep,
    /// Duration of --retention TTL
    #[arg(long, env, value_name = "DURATION", help_heading = RETENTION)]
    pub(crate) retention_ttl: Option<DurationArg>,
    /// What happens to an address when its workload is scaled down below its pod
    #[arg(long, env, value_enum, ignore_case = true, default_value = "Retain", help_heading = RETENTION)]
    pub(crate) on_scale_down: OnScaleDown,
    /// Duration of --on-scale-down TTL
    #[arg(long, env, value_name = "DURATION", help_heading = RETENTION)]
    pub(crate) scale_down_ttl: Option<DurationArg>,
    /// How long a released address is quarantined before another claimant may have it
    #[arg(long, env, default_value = "10m", value_name = "DURATION", help_heading = RETENTION)]
    pub quarantine: DurationArg,
    /// How long an AddressClaim may exist without its StickyIP before it is removed as an orphan
    #[arg(long, env, default_value = "2m", value_name = "DURATION", help_heading = RETENTION)]
    pub(crate) orphan_after: DurationArg,
    /// Time between the two reads that prove a workload deleted
    #[arg(long, env, default_value = "10s", value_name = "DURATION", help_heading = RETENTION)]
    pub(crate) proof_gap: DurationArg,
    /// Whether a workload that is created again under its name keeps its former addresses; if not, they are
    /// released, unless one of its pods started before that
    #[arg(long, env, value_name = BOOL, action = Set, default_value_t = true, help_heading = RETENTION)]
    pub inherit: bool,
    /// Grace period for a deleted workload whose owner still exists, since its pod was last seen; 0s for none
    #[arg(long, env, default_value = "24h", value_name = "DURATION", help_heading = RETENTION)]
    pub(crate) owner_grace: DurationArg,
    /// Maximum number of StickyIPs that are released per second
    #[arg(long, env, default_value_t = 500, value_parser = at_least_one(), help_heading = RETENTION)]
    pub recycle_rate: u32,

    /// IPAM mode of Cilium
    #[arg(long, env, value_enum, default_value = "crd", value_name = "MODE", help_heading = BLOCKS)]
    pub cilium_ipam: CiliumMode,
    /// IPv4 range of the pool for nodes that no IPPool serves; empty for none
    #[arg(long, env, default_value = "10.0.0.0/8", value_parser = range_v4, help_heading = BLOCKS)]
    pub(crate) cluster_pool_ipv4_cidr: PoolRange,
    /// Prefix length of its IPv4 blocks
    #[arg(long, env, default_value_t = 24, value_parser = mask_size(16..=30), help_heading = BLOCKS)]
    pub cluster_pool_ipv4_mask_size: u8,
    /// IPv6 range of that pool; empty for none
    #[arg(long, env, default_value = "", value_parser = range_v6, help_heading = BLOCKS)]
    pub(crate) cluster_pool_ipv6_cidr: PoolRange,
    /// Prefix length of its IPv6 blocks
    #[arg(long, env, default_value_t = 112, value_parser = mask_size(64..=124), help_heading = BLOCKS)]
    pub cluster_pool_ipv6_mask_size: u8,
    /// A node whose blocks have fewer free addresses gets another block; 0 for never
    #[arg(long, env, default_value_t = 16, value_name = "N", help_heading = BLOCKS)]
    pub block_min_free: u32,
    /// Maximum number of blocks per node and IP family
    #[arg(long, env, default_value_t = 8, value_name = "N", help_heading = BLOCKS)]
    pub blocks_per_node: usize,
    /// How long the blocks of a deleted node are quarantined before another node may have them
    #[arg(long, env, default_value = "10m", value_name = "DURATION", help_heading = BLOCKS)]
    pub(crate) block_quarantine: DurationArg,
    /// Namespace of the Leases that lock blocks, the same for every replica; default: that of the election's
    /// Lease
    #[arg(long, env, value_parser = dns_label, value_name = "NAMESPACE", help_heading = BLOCKS)]
    pub block_namespace: Option<String>,
    /// Without effect here: the flag of this name of the agent sets how many addresses of a node's pool are
    /// free
    #[arg(long, env, alias = "ipRateNum", default_value_t = WATERMARK, help_heading = BLOCKS)]
    pub ip_rate_num: u32,
    /// Without effect here: the flag of this name of the agent limits the addresses of a node's pool
    #[arg(long, env, alias = "maxAllocatedIP", default_value_t = WATERMARK, help_heading = BLOCKS)]
    pub max_allocated_ip: u32,

    /// How long the deletion of a CiliumEndpoint may take before its finalizers are removed
    #[arg(long, env, alias = "cepTerminationTimeout", default_value = "30m", help_heading = "Endpoints")]
    pub(crate) cep_termination_timeout: DurationArg,

    /// Whether one of several replicas is elected to work
    #[arg(long, env, value_name = BOOL, action = Set, default_value_t = true, help_heading = ELECTION)]
    pub enable_leader_election: bool,
    /// Namespace of the Lease
    #[arg(long, env = "POD_NAMESPACE", default_value = "kube-system", value_parser = dns_label, help_heading = ELECTION)]
    pub leader_election_namespace: String,
    /// Name of the Lease
    #[arg(long, env, default_value = "cilium-ipam-leader", value_parser = dns_name, help_heading = ELECTION)]
    pub leader_election_id: String,
    /// How long a Lease that is not renewed stays valid
    #[arg(long, env, default_value = "15s", value_name = "DURATION", help_heading = ELECTION)]
    pub(crate) leader_election_lease_duration: DurationArg,
    /// How long a leader that cannot renew the Lease goes on working
    #[arg(long, env, default_value = "10s", value_name = "DURATION", help_heading = ELECTION)]
    pub(crate) leader_election_renew_deadline: DurationArg,
    /// Time between two reads of the Lease
    #[arg(long, env, default_value = "2s", value_name = "DURATION", help_heading = ELECTION)]
    pub(crate) leader_election_retry_period: DurationArg,
}
