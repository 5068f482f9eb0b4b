//! The CNI plugin: one verb per run, each in a file of its own.
//!
//! A verb asks the store, and the cluster where it is configured, and answers with a result or an error of
//! the form that the specification gives. Must never print anything else on standard output, and never leave
//! half of a verb done.

pub mod cluster;
mod delegate;
mod log;
pub mod verbs;

use std::ffi::OsString;
use std::net::IpAddr;
use std::time::Instant;

use serde_json::Value;

use crate::cni;
use crate::cni::{
    CniError, ConfigSource, IpamConf, ParsedRequest, Request, RequestError, StickyConf, Verb, code,
};
use crate::names::Attachment;
use crate::node::list;
use crate::policy::lifetime::retention::Retention;
use crate::policy::mode::PluginMode;
use crate::store::{Disk, NodeTime, RealDisk, Store, StoreError};

/// What a run of the plugin returns: what to print where, and how to exit.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    /// The one document for standard output, or nothing.
    pub stdout: Option<String>,
    /// A text for an operator.
    pub stderr: Option<String>,
    /// The exit status.
    pub status: u8,
}

/// Runs the verb that the environment and standard input ask for.
pub fn run(env: &impl Fn(&str) -> Option<OsString>, stdin: &mut impl ConfigSource) -> Answer {
    answer(env, stdin, RealDisk, VerbLog::default())
}

/// The same, with an observer of every write to the API server, on a disk that a test may provide.
pub fn run_observed(
    observer: &dyn crate::cluster::protocol::apply::WriteObserver,
    disk: impl Disk,
    env: &impl Fn(&str) -> Option<OsString>,
    stdin: &mut impl ConfigSource,
) -> Answer {
    answer(env, stdin, disk, VerbLog { observer, ..VerbLog::default() })
}

fn answer(
    env: &impl Fn(&str) -> Option<OsString>,
    stdin: &mut impl ConfigSource,
    disk: impl Disk,
    verb_log: VerbLog<'_>,
) -> Answer {
    match cni::read_request(env, stdin) {
        Ok(ParsedRequest::About) => Answer { stdout: None, stderr: Some(cni::about()), status: 0 },
        Ok(ParsedRequest::Version { reply }) => Answer::document(&reply, 0),
        Ok(ParsedRequest::Verb(request)) => run_verb(&request, disk, verb_log),
        Err(failure) => Answer::document(&failure.to_json(), 1),
    }
}

impl Answer {
    fn document(document: &Value, status: u8) -> Self {
        Self { stdout: Some(format!("{document:#}\n")), stderr: None, status }
    }
}

/// What a verb did, for the log: the addresses and why it is those. And the observer of its writes.
pub(crate) struct VerbLog<'a> {
    addresses: String,
    reason: String,
    observer: &'a dyn crate::cluster::protocol::apply::WriteObserver,
}

impl Default for VerbLog<'_> {
    fn default() -> Self {
        Self {
            addresses: String::new(),
            reason: String::new(),
            observer: &crate::cluster::protocol::apply::NoObserver,
        }
    }
}

impl VerbLog<'_> {
    fn report(&mut self, addresses: &[IpAddr], reason: impl Into<String>) {
        self.addresses = list(addresses);
        self.reason = reason.into();
    }
}

fn run_verb(request: &Request, disk: impl Disk, mut verb_log: VerbLog<'_>) -> Answer {
    let started = Instant::now();
    let _log = log::start(request.config.sticky());
    for warning in &request.warnings {
        tracing::warn!(network = request.config.name.as_str(), "{warning}");
    }
    let outcome = match &request.config.delegate {
        Some(delegate) => delegate::run(request, delegate, disk, &mut verb_log),
        None => NodeTime::now(&boot_id_file(request))
            .map_err(CniError::from)
            .and_then(|now| dispatch(request, disk, now, &mut verb_log)),
    };
    log::verb(request, &verb_log, outcome.as_ref().err(), started.elapsed());
    match outcome {
        Ok(Some(result)) => Answer::document(&result, 0),
        Ok(None) => Answer { stdout: None, stderr: None, status: 0 },
        Err(error) => {
            let failure = RequestError { error, version: request.config.version };
            Answer::document(&failure.to_json(), 1)
        }
    }
}

/// Runs a verb on this disk and at this moment, without a log: for tests that make the disk fail or set the
/// clock.
pub fn run_verb_on<D: Disk>(request: &Request, disk: D, now: NodeTime) -> Result<Option<Value>, CniError> {
    dispatch(request, disk, now, &mut VerbLog::default())
}

fn dispatch<D: Disk>(
    request: &Request,
    disk: D,
    now: NodeTime,
    verb_log: &mut VerbLog<'_>,
) -> Result<Option<Value>, CniError> {
    let context = VerbContext::of(request, disk, now)?;
    let verb = match request.verb {
        Verb::Add => return verbs::add::run(&context, request, verb_log).map(Some),
        Verb::Del => verbs::del::run,
        Verb::Check => verbs::check::run,
        Verb::Gc => verbs::gc::run,
        Verb::Status => verbs::status::run,
        Verb::Version => return Err(CniError::internal("VERSION is answered by the protocol")),
    };
    verb(&context, request, verb_log).map(|()| None)
}

/// What every verb needs, looked up once.
pub(crate) struct VerbContext<'a, D: Disk> {
    ipam: &'a IpamConf,
    sticky: StickyConf,
    store: Store<D>,
    /// How the plugin is used beside Cilium.
    mode: PluginMode,
}

impl<'a, D: Disk> VerbContext<'a, D> {
    fn of(request: &'a Request, disk: D, now: NodeTime) -> Result<Self, CniError> {
        let ipam = request.config.ipam.as_ref().ok_or_else(|| {
            CniError::invalid_config("ipam", "missing; give the ranges that addresses are taken from")
        })?;
        let sticky = request.config.sticky().cloned().unwrap_or_default();
        let store = Store::new(disk, &ipam.data_dir, &request.config.name, now, sticky.lock_timeout);
        Ok(Self { ipam, sticky, store, mode: PluginMode::of_call(false) })
    }
}

fn boot_id_file(request: &Request) -> std::path::PathBuf {
    request.config.sticky().cloned().unwrap_or_default().boot_id_file
}

/// How long the addresses of this request are kept after its sandbox has ended, by this node's own settings.
/// Without them nothing is kept, as host-local does; where the cluster decides who is sticky, this node does
/// not.
fn retention(request: &Request) -> Option<Retention> {
    let (sticky, pod) = (request.config.sticky()?, request.pod.as_ref()?);
    (sticky.cluster.is_none() && sticky.selects(pod)).then_some(sticky.retention)
}

/// The attachment, which the reader of requests requires for the verbs that need one.
fn attachment(request: &Request) -> Result<&Attachment, CniError> {
    request.attachment.as_ref().ok_or_else(|| CniError::internal("the request has no attachment"))
}

impl From<StoreError> for CniError {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        match error {
            StoreError::Io { .. } | StoreError::Escapes { .. } => CniError::io(message),
            StoreError::LockTimeout { .. } => CniError::try_again(message),
            StoreError::NewerVersion { .. } => CniError::new(code::STORE_UNUSABLE, message),
            StoreError::Taken(_) => CniError::new(code::REQUEST_REFUSED, message),
        }
    }
}
