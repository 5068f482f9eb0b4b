//! Flags that both programs have, in groups that each program flattens into its own. Every flag has an
//! environment variable of its name.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use clap::{Arg, Args};
use tracing_subscriber::filter::LevelFilter;

use super::client::IN_CLUSTER;
use super::log::{LogFormat, level};
use super::tls::{CertificateFiles, TlsError};
use crate::policy::selection::rules::{DEFAULT_EXCLUDE_KEY, Rules};
use crate::policy::selection::selector::Selector;

/// The value name of a flag that is true or false. With [`global`], the flag alone means true.
pub(crate) const BOOL: &str = "BOOL";

const PROCESS: &str = "Process";
/// The heading of the flags that select pods.
pub(crate) const SELECTION: &str = "Who is sticky";

/// Makes a flag known to every subcommand. For `#[command(mut_args(global))]`.
pub(crate) fn global(flag: Arg) -> Arg {
    let is_bool = matches!(flag.get_value_names(), Some([name]) if name.as_str() == BOOL);
    let flag = flag.global(true);
    if is_bool { flag.num_args(0..=1).require_equals(true).default_missing_value("true") } else { flag }
}

/// How the API server is reached.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = PROCESS)]
pub struct ClientFlags {
    /// Kubeconfig of the API server; default: the pod's service account
    #[arg(long, env, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

impl ClientFlags {
    /// Where the credentials come from, for messages.
    pub fn origin(&self) -> &Path {
        self.kubeconfig.as_deref().unwrap_or(Path::new(IN_CLUSTER))
    }
}

/// Where metrics and probes are served.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = PROCESS)]
pub struct ServerFlags {
    /// Address on which /metrics, /healthz and /readyz are served
    #[arg(long, env, value_parser = listen_address, value_name = "ADDRESS:PORT")]
    pub metrics_address: SocketAddr,
    /// Certificate (PEM) to serve these pages over TLS; read again when the file changes
    #[arg(long, env, value_name = "FILE")]
    pub tls_cert_file: Option<PathBuf>,
    /// Private key (PEM) of that certificate
    #[arg(long, env, value_name = "FILE")]
    pub tls_key_file: Option<PathBuf>,
}

impl ServerFlags {
    /// The certificate and its key; none for plain HTTP.
    pub(crate) fn certificate(&self) -> Result<Option<CertificateFiles>, TlsError> {
        CertificateFiles::of(self.tls_cert_file.as_deref(), self.tls_key_file.as_deref())
    }
}

/// What is logged.
#[derive(Debug, Clone, Copy, Args)]
#[command(next_help_heading = PROCESS)]
pub struct LogFlags {
    /// Lowest level that is logged: error, warn, info, debug, trace, or 0 to 6
    #[arg(long, alias = "logLevel", env, default_value = "info", value_parser = level, value_name = "LEVEL")]
    pub log_level: LevelFilter,
    /// Format of log lines
    #[arg(long, alias = "logFormat", env, value_enum, default_value = "text", value_name = "FORMAT")]
    pub log_format: LogFormat,
}

/// Which pods are sticky, unless pod or namespace say otherwise.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = SELECTION)]
pub struct SelectionFlags {
    /// Label selector of sticky pods, as JSON: {"matchLabels":{"app":"db"}}
    #[arg(long, env, value_parser = selector, value_name = "JSON")]
    #[arg(aliases = ["labelSector", "labelSelector"])]
    pub label_selector: Option<Selector>,
    /// Label whose value can exclude a pod
    #[arg(long, env, default_value = DEFAULT_EXCLUDE_KEY, value_name = "LABEL")]
    pub exclude_key: String,
    /// Prefixes of that value which exclude a pod, separated by commas
    #[arg(long, alias = "excludeDbbranchPrefixs", env, value_delimiter = ',', value_name = "PREFIXES")]
    pub exclude_prefixes: Vec<String>,
}

impl SelectionFlags {
    /// Checks what the parser of a single flag cannot.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.exclude_key.is_empty() {
            return Err("--exclude-key (EXCLUDE_KEY) is empty; name a label".into());
        }
        Ok(())
    }

    pub fn rules(&self) -> Rules {
        Rules {
            selector: self.label_selector.clone(),
            exclude_key: self.exclude_key.clone(),
            exclude_prefixes: self.exclude_prefixes.clone(),
        }
    }
}

fn listen_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| "write address and port, such as 127.0.0.1:9977".into())
}

fn selector(text: &str) -> Result<Selector, String> {
    Selector::parse(text).map_err(|error| error.to_string())
}

/// A DNS name, as Kubernetes names most objects.
pub(crate) fn dns_name(text: &str) -> Result<String, String> {
    let is_label = |part: &str| {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        !part.is_empty() && part.bytes().all(inner) && !part.starts_with('-') && !part.ends_with('-')
    };
    if text.len() <= 253 && text.split('.').all(is_label) {
        Ok(text.to_owned())
    } else {
        Err("it must be a DNS name: lower case letters, digits, '-' and '.'".to_owned())
    }
}
