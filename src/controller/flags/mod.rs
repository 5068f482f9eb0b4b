//! The controller's settings: flags, an environment variable for each, and a file. Must never let a value pass that would only
//! be found wrong later. Spellings that older manifests use are understood beside ours.

mod check;
mod file;
mod reference;
#[cfg(test)]
mod tests;
mod values;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{ArgAction, Args, Parser, Subcommand, ValueEnum};

use crate::policy::mode::CiliumMode;
use crate::policy::selection::rules::DEFAULT_EXCLUDE_KEY;
use crate::policy::selection::selector::Selector;
use crate::runtime::log::{LogFormat, LogLevel};

pub use check::Refused;
pub use file::{Loaded, NoSettings, load, reread};
pub use reference::reference;
pub use values::{DurationArg, PoolRange};

/// The default of both watermarks of a node's pool, as older manifests know it. They are the agent's: nothing here goes by them.
const WATERMARK: u32 = 255;

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "sticky-ipam-controller",
    version,
    about = "Keeps the cluster's sticky addresses: marks pods, recycles addresses, repairs, hands out node blocks, watches for drift",
    max_term_width = 120
)]
pub struct ControllerCommandLine {
    /// What to do; `run` if nothing is named.
    #[command(subcommand)]
    pub command: Option<ControllerCommand>,
    /// The settings.
    #[command(flatten)]
    pub settings: ControllerSettings,
}

/// What the controller can do.
#[derive(Debug, Clone, PartialEq, Eq, Subcommand)]
pub enum ControllerCommand {
    /// Work until told to end (the default)
    Run,
    /// Compare what Nodes, CiliumNodes, annotations and pods say of addresses; status 1 if they disagree
    Audit {
        /// How the findings are printed
        #[arg(long, value_enum, default_value = "text")]
        output: OutputFormat,
    },
    /// Take over a running cluster into Cilium's crd mode, or check the way back; without --apply nothing is written
    Adopt(AdoptOptions),
    /// Print the reference of all flags, as the manual has it
    #[command(hide = true)]
    Reference,
}

/// How a command prints what it found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OutputFormat {
    /// For people
    Text,
    /// For machines
    Json,
}

/// What `adopt` is told.
#[derive(Debug, Clone, PartialEq, Eq, Args)]
pub struct AdoptOptions {
    /// Write the pools; without it only say what would be written
    #[arg(long)]
    pub apply: bool,
    /// Go on putting in the addresses of pods that start, until told to end
    #[arg(long, requires = "apply")]
    pub follow: bool,
    /// Check that every address away from home has gone home, for the way back into this mode
    #[arg(
        long,
        value_enum,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "cluster-pool",
        value_name = "MODE",
        conflicts_with_all = ["apply", "follow"]
    )]
    pub back: Option<BackTo>,
    /// Addresses a node and family that any pod may get from its pool
    #[arg(long, default_value_t = 16, value_name = "N")]
    pub free: usize,
}

/// Where the way back leads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum BackTo {
    /// Every block of the CiliumNode is the node's
    ClusterPool,
    /// Only what the Node itself names, one range a family
    Kubernetes,
}

/// What ends the keeping of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RetentionWord {
    /// The end of the workload
    #[value(name = "WithWorkload", alias = "with-workload")]
    WithWorkload,
    /// The end of the workload, and then a time after the pod was last seen
    #[value(name = "TTL", alias = "ttl")]
    Ttl,
    /// Nothing but a person
    #[value(name = "Forever", alias = "forever")]
    Forever,
}

/// What becomes of an address when its workload is scaled below its pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScaleDownWord {
    /// It is kept
    #[value(name = "Retain", alias = "retain")]
    Retain,
    /// It is let go
    #[value(name = "Release", alias = "release")]
    Release,
    /// It is let go a time after the pod was last seen
    #[value(name = "TTL", alias = "ttl")]
    Ttl,
}

/// Everything the controller is told.
#[derive(Debug, Clone, Args)]
pub struct ControllerSettings {
    /// The credentials; without it those that the cluster gives a pod
    #[arg(long, env = "KUBECONFIG", global = true, value_name = "FILE", help_heading = "Process")]
    pub kubeconfig: Option<PathBuf>,
    /// A YAML file of settings by the names of the flags; flags and variables win over it, and a change of it is noticed
    #[arg(long, env = "CONFIG", global = true, value_name = "FILE", help_heading = "Process")]
    pub config: Option<PathBuf>,
    /// Where /metrics, /healthz and /readyz are served
    #[arg(
        long,
        env = "METRICS_ADDRESS",
        global = true,
        default_value = "0.0.0.0:9978",
        help_heading = "Process"
    )]
    pub metrics_address: SocketAddr,
    /// The certificate, as PEM, with which they are served over TLS; a change of it is noticed
    #[arg(long, env = "TLS_CERT_FILE", global = true, value_name = "FILE", help_heading = "Process")]
    pub tls_cert_file: Option<PathBuf>,
    /// The private key of that certificate, as PEM
    #[arg(long, env = "TLS_KEY_FILE", global = true, value_name = "FILE", help_heading = "Process")]
    pub tls_key_file: Option<PathBuf>,
    /// Which log lines are written: error, warn, info, debug, trace, or 0 to 6
    #[arg(
        long,
        alias = "logLevel",
        env = "LOG_LEVEL",
        global = true,
        default_value = "4",
        value_name = "LEVEL",
        help_heading = "Process"
    )]
    pub log_level: LogLevel,
    /// How log lines look
    #[arg(
        long,
        alias = "logFormat",
        env = "LOG_FORMAT",
        global = true,
        value_enum,
        default_value = "text",
        value_name = "FORMAT",
        help_heading = "Process"
    )]
    pub log_format: LogFormat,

    /// Which pods are sticky, as JSON
    #[arg(long, alias = "labelSector", alias = "labelSelector", env = "LABEL_SELECTOR", global = true,
          default_value = r#"{"matchLabels":{"noStatic":"true"}}"#, value_parser = values::selector, value_name = "JSON", help_heading = "Who is sticky")]
    pub label_selector: Selector,
    /// The label whose value's prefix excludes a pod
    #[arg(long, env = "EXCLUDE_KEY", global = true, default_value = DEFAULT_EXCLUDE_KEY, value_name = "LABEL", help_heading = "Who is sticky")]
    pub exclude_key: String,
    /// Prefixes that exclude a pod, separated by commas
    #[arg(
        long,
        alias = "excludeDbbranchPrefixs",
        env = "EXCLUDE_PREFIXES",
        global = true,
        value_delimiter = ',',
        value_name = "PREFIXES",
        help_heading = "Who is sticky"
    )]
    pub exclude_prefixes: Vec<String>,
    /// Whether running pods that came up without the plugin get a binding from the addresses they show
    #[arg(long, env = "MARK", global = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true", value_name = "BOOL", help_heading = "Who is sticky")]
    pub mark: bool,
    /// Whether nodes get IPv6 blocks
    #[arg(long, alias = "enableIPv6", env = "ENABLE_IPV6", global = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_name = "BOOL", help_heading = "Who is sticky")]
    pub enable_ipv6: bool,
    /// Whether a pod's IPv6 address is marked too
    #[arg(long, alias = "enableStaticPodIPv6", env = "ENABLE_STATIC_POD_IPV6", global = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "false", value_name = "BOOL", help_heading = "Who is sticky")]
    pub enable_static_pod_ipv6: bool,

    /// What ends the keeping of an address, unless the pod or its namespace says otherwise
    #[arg(
        long,
        env = "RETENTION",
        global = true,
        value_enum,
        default_value = "WithWorkload",
        value_name = "WORD",
        help_heading = "How long an address is kept"
    )]
    pub retention: RetentionWord,
    /// The time of --retention TTL
    #[arg(
        long,
        env = "RETENTION_TTL",
        global = true,
        value_name = "DURATION",
        help_heading = "How long an address is kept"
    )]
    pub retention_ttl: Option<DurationArg>,
    /// What becomes of an address when its workload is scaled below its pod
    #[arg(
        long,
        env = "ON_SCALE_DOWN",
        global = true,
        value_enum,
        default_value = "Retain",
        value_name = "WORD",
        help_heading = "How long an address is kept"
    )]
    pub on_scale_down: ScaleDownWord,
    /// The time of --on-scale-down TTL
    #[arg(
        long,
        env = "SCALE_DOWN_TTL",
        global = true,
        value_name = "DURATION",
        help_heading = "How long an address is kept"
    )]
    pub scale_down_ttl: Option<DurationArg>,
    /// How long an address rests before another owner may have it
    #[arg(
        long,
        env = "QUARANTINE",
        global = true,
        default_value = "10m",
        value_name = "DURATION",
        help_heading = "How long an address is kept"
    )]
    pub quarantine: DurationArg,
    /// How long a claim may stand without its StickyIP before it is taken for left over
    #[arg(
        long,
        env = "ORPHAN_AFTER",
        global = true,
        default_value = "2m",
        value_name = "DURATION",
        help_heading = "How long an address is kept"
    )]
    pub orphan_after: DurationArg,
    /// The time between the two looks that prove a workload gone
    #[arg(
        long,
        env = "PROOF_GAP",
        global = true,
        default_value = "10s",
        value_name = "DURATION",
        help_heading = "How long an address is kept"
    )]
    pub proof_gap: DurationArg,
    /// Whether a workload made anew under its name gets the addresses of the former one; without, they are let go and not given back, unless one of its pods came before that
    #[arg(long, env = "INHERIT", global = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true", value_name = "BOOL", help_heading = "How long an address is kept")]
    pub inherit: bool,
    /// How long after its pod was last seen an address is kept for a workload that is gone while what made it is there; 0s for not
    /// at all
    #[arg(
        long,
        env = "OWNER_GRACE",
        global = true,
        default_value = "24h",
        value_name = "DURATION",
        help_heading = "How long an address is kept"
    )]
    pub owner_grace: DurationArg,
    /// How many addresses a second are let go at most
    #[arg(long, env = "RECYCLE_RATE", global = true, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..), value_name = "N", help_heading = "How long an address is kept")]
    pub recycle_rate: u32,

    /// How Cilium gets its addresses
    #[arg(
        long,
        env = "CILIUM_IPAM",
        global = true,
        value_enum,
        default_value = "crd",
        value_name = "MODE",
        help_heading = "Node blocks"
    )]
    pub cilium_ipam: CiliumMode,
    /// The IPv4 range of the pool that serves nodes which no IPPool serves; empty for none
    #[arg(long, env = "CLUSTER_POOL_IPV4_CIDR", global = true, default_value = "10.0.0.0/8", value_parser = values::range_v4, value_name = "CIDR", help_heading = "Node blocks")]
    pub cluster_pool_ipv4_cidr: PoolRange,
    /// The prefix length of its blocks
    #[arg(long, env = "CLUSTER_POOL_IPV4_MASK_SIZE", global = true, default_value = "24", value_parser = clap::value_parser!(u8).range(16..=30), value_name = "BITS", help_heading = "Node blocks")]
    pub cluster_pool_ipv4_mask_size: u8,
    /// The IPv6 range of that pool; empty for none
    #[arg(long, env = "CLUSTER_POOL_IPV6_CIDR", global = true, default_value = "", value_parser = values::range_v6, value_name = "CIDR", help_heading = "Node blocks")]
    pub cluster_pool_ipv6_cidr: PoolRange,
    /// The prefix length of its blocks
    #[arg(long, env = "CLUSTER_POOL_IPV6_MASK_SIZE", global = true, default_value = "112", value_parser = clap::value_parser!(u8).range(64..=124), value_name = "BITS", help_heading = "Node blocks")]
    pub cluster_pool_ipv6_mask_size: u8,
    /// A node whose blocks have fewer free addresses gets another block; 0 for never
    #[arg(
        long,
        env = "BLOCK_LOW",
        global = true,
        default_value_t = 16,
        value_name = "N",
        help_heading = "Node blocks"
    )]
    pub block_min_free: u32,
    /// The most blocks of one family that a node gets
    #[arg(
        long,
        env = "BLOCKS_PER_NODE",
        global = true,
        default_value_t = 8,
        value_name = "N",
        help_heading = "Node blocks"
    )]
    pub blocks_per_node: usize,
    /// How long a node must be gone before its blocks are free again
    #[arg(
        long,
        env = "BLOCK_REST",
        global = true,
        default_value = "10m",
        value_name = "DURATION",
        help_heading = "Node blocks"
    )]
    pub block_quarantine: DurationArg,
    /// The namespace of the Leases that lock blocks, the same for every replica; without it that of the election's Lease
    #[arg(long, env = "BLOCK_NAMESPACE", global = true, value_parser = values::dns_label, value_name = "NAMESPACE", help_heading = "Node blocks")]
    pub block_namespace: Option<String>,
    /// Without effect here: how many addresses of a node's pool are free is kept by the node's agent, whose flag of this name counts
    #[arg(
        long,
        alias = "ipRateNum",
        env = "IP_RATE_NUM",
        global = true,
        default_value_t = WATERMARK,
        value_name = "N",
        help_heading = "Node blocks"
    )]
    pub ip_rate_num: u32,
    /// Without effect here: the most addresses of a node's pool are kept by the node's agent, whose flag of this name counts
    #[arg(
        long,
        alias = "maxAllocatedIP",
        env = "MAX_ALLOCATED_IP",
        global = true,
        default_value_t = WATERMARK,
        value_name = "N",
        help_heading = "Node blocks"
    )]
    pub max_allocated_ip: u32,

    /// How long a CiliumEndpoint may take to be deleted before its finalizers are taken off
    #[arg(
        long,
        alias = "cepTerminationTimeout",
        env = "CEP_TERMINATION_TIMEOUT",
        global = true,
        default_value = "30m",
        value_name = "DURATION",
        help_heading = "Endpoints"
    )]
    pub cep_termination_timeout: DurationArg,

    /// Whether one of several replicas is elected to work
    #[arg(long, env = "ENABLE_LEADER_ELECTION", global = true, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value = "true", value_name = "BOOL", help_heading = "Leader election")]
    pub enable_leader_election: bool,
    /// The namespace of the Lease
    #[arg(long, env = "POD_NAMESPACE", global = true, default_value = "kube-system", value_parser = values::dns_label, value_name = "NAMESPACE", help_heading = "Leader election")]
    pub leader_election_namespace: String,
    /// The name of the Lease
    #[arg(long, env = "LEADER_ELECTION_ID", global = true, default_value = "cilium-ipam-leader", value_parser = values::dns_name, value_name = "NAME", help_heading = "Leader election")]
    pub leader_election_id: String,
    /// How long a lease that nobody renews is respected
    #[arg(
        long,
        env = "LEADER_ELECTION_LEASE_DURATION",
        global = true,
        default_value = "15s",
        value_name = "DURATION",
        help_heading = "Leader election"
    )]
    pub leader_election_lease_duration: DurationArg,
    /// How long a leader that cannot renew goes on
    #[arg(
        long,
        env = "LEADER_ELECTION_RENEW_DEADLINE",
        global = true,
        default_value = "10s",
        value_name = "DURATION",
        help_heading = "Leader election"
    )]
    pub leader_election_renew_deadline: DurationArg,
    /// Between two looks at the lease
    #[arg(
        long,
        env = "LEADER_ELECTION_RETRY_PERIOD",
        global = true,
        default_value = "2s",
        value_name = "DURATION",
        help_heading = "Leader election"
    )]
    pub leader_election_retry_period: DurationArg,
}
