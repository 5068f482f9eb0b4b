//! The settings under the one key that is ours, `sticky`.
//!
//! A new field is added to [`StickyConf`], to [`FIELDS`] and to `StickyConf::read`, and the tests then ask
//! for it in the schema and in the reference. The cluster's settings are in [`crate::cni::config::cluster`].

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::cni::config::DEFAULT_DATA_DIR;
use crate::cni::config::cluster::ClusterConf;
use crate::cni::error::CniError;
use crate::cni::fields::Fields;
use crate::names::PodIdentity;
use crate::policy::lifetime::duration::parse_duration;
use crate::policy::lifetime::retention::Retention;

/// Every key that may stand under `sticky`.
pub(crate) const FIELDS: &[&str] = &[
    "pods",
    "excludePods",
    "retention",
    "onExhaustion",
    "statusWhenExhausted",
    "lockTimeout",
    "waitForOldPod",
    "logFile",
    "logLevel",
    "logMaxFiles",
    "bootIDFile",
    "dataDir",
    "cluster",
];

/// How long a verb waits for the store's lock.
pub(crate) const DEFAULT_LOCK_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an ADD waits for the pod that had the address before, by default.
pub(crate) const DEFAULT_WAIT_FOR_OLD_POD: Duration = Duration::from_secs(30);
/// How many log files are kept, by default.
pub(crate) const DEFAULT_LOG_MAX_FILES: usize = 5;
/// The most log files that may be kept.
pub(crate) const MAX_LOG_FILES: u64 = 1000;
/// Where the kernel tells one boot from another.
pub(crate) const DEFAULT_BOOT_ID_FILE: &str = "/proc/sys/kernel/random/boot_id";

/// What happens when a new pod comes and nothing is free but addresses kept for pods that are away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OnExhaustion {
    /// The ADD fails; what is kept stays kept.
    Fail,
    /// The address that was kept longest is given away.
    Reclaim,
}

/// What STATUS says when no address is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StatusWhenExhausted {
    /// Ready: a full pool must not turn the node NotReady.
    Ready,
    /// Not available (code 50), as the specification has it.
    NotReady,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum PluginLogLevel {
    /// Failures only.
    Error,
    /// What an operator should look at.
    Warn,
    /// A line a verb.
    Info,
    Debug,
    Trace,
}

impl PluginLogLevel {
    const WORDS: [(&'static str, Self); 5] = [
        ("error", Self::Error),
        ("warn", Self::Warn),
        ("info", Self::Info),
        ("debug", Self::Debug),
        ("trace", Self::Trace),
    ];
}

/// A pattern of pods, `namespace/name`, where `*` stands for any run of characters and `?` for one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodPattern {
    namespace: String,
    name: String,
}

impl PodPattern {
    pub(crate) fn new(text: &str) -> Result<Self, String> {
        let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b"_.-*?".contains(&b);
        let allowed = |part: &str| !part.is_empty() && part.bytes().all(is_allowed);
        match text.split_once('/') {
            Some((namespace, name)) if allowed(namespace) && allowed(name) => {
                Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
            }
            _ => Err(format!(
                "{text:?} is not a pod pattern; write namespace/name with '*' and '?' as wildcards, \
                 such as \"databases/*\" or \"*/web-?\""
            )),
        }
    }

    pub(crate) fn matches(&self, pod: &PodIdentity) -> bool {
        glob(self.namespace.as_bytes(), pod.namespace().as_bytes())
            && glob(self.name.as_bytes(), pod.name().as_bytes())
    }
}

impl fmt::Display for PodPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Matches with one point of return, the last `*`: time grows with the product of the lengths, never faster.
fn glob(pattern: &[u8], text: &[u8]) -> bool {
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(b) if *b == b'?' || *b == text[t] => {
                p += 1;
                t += 1;
            }
            _ => match star {
                Some((star_p, star_t)) => {
                    star = Some((star_p, star_t + 1));
                    p = star_p + 1;
                    t = star_t + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|b| *b == b'*')
}

/// What is kept, for whom and how long, and how the plugin behaves while doing so (docs/configuration.md).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StickyConf {
    pub pods: Vec<PodPattern>,
    pub(crate) exclude_pods: Vec<PodPattern>,
    pub retention: Retention,
    pub(crate) on_exhaustion: OnExhaustion,
    pub(crate) status_when_exhausted: StatusWhenExhausted,
    pub lock_timeout: Duration,
    pub wait_for_old_pod: Duration,
    /// Where the log goes; standard error when absent.
    pub log_file: Option<PathBuf>,
    pub log_level: PluginLogLevel,
    pub log_max_files: usize,
    pub boot_id_file: PathBuf,
    /// Beside `delegate`, where no `ipam` says it: the directory that holds a directory for every network.
    pub data_dir: PathBuf,
    /// How the cluster is asked; absent when this node decides alone.
    pub cluster: Option<ClusterConf>,
}

impl Default for StickyConf {
    fn default() -> Self {
        Self {
            pods: vec![PodPattern { namespace: "*".to_owned(), name: "*".to_owned() }],
            exclude_pods: Vec::new(),
            retention: Retention::FOREVER,
            on_exhaustion: OnExhaustion::Fail,
            status_when_exhausted: StatusWhenExhausted::Ready,
            lock_timeout: DEFAULT_LOCK_TIMEOUT,
            wait_for_old_pod: DEFAULT_WAIT_FOR_OLD_POD,
            log_file: None,
            log_level: PluginLogLevel::Info,
            log_max_files: DEFAULT_LOG_MAX_FILES,
            boot_id_file: PathBuf::from(DEFAULT_BOOT_ID_FILE),
            data_dir: PathBuf::from(DEFAULT_DATA_DIR),
            cluster: None,
        }
    }
}

impl StickyConf {
    pub(crate) fn selects(&self, pod: &PodIdentity) -> bool {
        self.pods.iter().any(|p| p.matches(pod)) && !self.exclude_pods.iter().any(|p| p.matches(pod))
    }

    /// Reads what is needed to open the store as ADD opened it. Which boot it is must not be guessed: a wrong
    /// one looks like a reboot, and frees the addresses of pods that run.
    pub(crate) fn read_leniently(fields: &Fields<'_>, warnings: &mut Vec<String>) -> Result<Self, CniError> {
        let error = match Self::read(fields) {
            Ok(read) => return Ok(read),
            Err(error) => error,
        };
        let boot_id_file = fields.absolute_path("bootIDFile")?;
        let data_dir = fields.absolute_path("dataDir")?;
        warnings.push(error.to_string());
        let default = Self::default();
        Ok(Self {
            lock_timeout: fields.wait("lockTimeout").ok().flatten().unwrap_or(default.lock_timeout),
            log_file: fields.absolute_path("logFile").ok().flatten(),
            cluster: cluster(fields).ok().flatten(),
            boot_id_file: boot_id_file.unwrap_or(default.boot_id_file),
            data_dir: data_dir.unwrap_or(default.data_dir),
            ..default
        })
    }

    pub(crate) fn read(fields: &Fields<'_>) -> Result<Self, CniError> {
        fields.refuse_unknown(FIELDS)?;
        let default = Self::default();
        Ok(Self {
            pods: fields.strings("pods", PodPattern::new)?.unwrap_or(default.pods),
            exclude_pods: fields.strings("excludePods", PodPattern::new)?.unwrap_or_default(),
            retention: retention(fields)?.unwrap_or(default.retention),
            on_exhaustion: fields.choice(
                "onExhaustion",
                &[("fail", OnExhaustion::Fail), ("reclaim", OnExhaustion::Reclaim)],
                default.on_exhaustion,
            )?,
            status_when_exhausted: fields.choice(
                "statusWhenExhausted",
                &[("ready", StatusWhenExhausted::Ready), ("notReady", StatusWhenExhausted::NotReady)],
                default.status_when_exhausted,
            )?,
            lock_timeout: fields.wait("lockTimeout")?.unwrap_or(default.lock_timeout),
            wait_for_old_pod: fields.wait("waitForOldPod")?.unwrap_or(default.wait_for_old_pod),
            log_file: fields.absolute_path("logFile")?,
            log_level: fields.choice("logLevel", &PluginLogLevel::WORDS, default.log_level)?,
            log_max_files: log_max_files(fields)?.unwrap_or(default.log_max_files),
            boot_id_file: fields.absolute_path("bootIDFile")?.unwrap_or(default.boot_id_file),
            data_dir: fields.absolute_path("dataDir")?.unwrap_or(default.data_dir),
            cluster: cluster(fields)?,
        })
    }
}

fn cluster(fields: &Fields<'_>) -> Result<Option<ClusterConf>, CniError> {
    fields.object("cluster")?.map(|cluster| ClusterConf::read(&cluster)).transpose()
}

fn retention(fields: &Fields<'_>) -> Result<Option<Retention>, CniError> {
    let Some(text) = fields.string("retention")? else { return Ok(None) };
    if text == "Forever" {
        return Ok(Some(Retention::FOREVER));
    }
    parse_duration(text).map(|time| Some(Retention::for_time(time))).ok_or_else(|| {
        let right = "write \"Forever\" or a duration such as \"72h\" or \"1h30m\"";
        fields.invalid("retention", format!("{text:?} is not a retention; {right}"))
    })
}

fn log_max_files(fields: &Fields<'_>) -> Result<Option<usize>, CniError> {
    match fields.number("logMaxFiles")? {
        None => Ok(None),
        Some(number @ 1..=MAX_LOG_FILES) => Ok(usize::try_from(number).ok()),
        Some(number) => {
            Err(fields.invalid("logMaxFiles", format!("{number} is not between 1 and {MAX_LOG_FILES}")))
        }
    }
}

#[cfg(test)]
mod tests;
