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

use crate::cluster::writer::apply::{NoObserver, WriteObserver};
use crate::cni::{self, CniError, ConfigSource, IpamConf, ParsedRequest, Request};
use crate::cni::{StickyConf, Verb, code};
use crate::names::Attachment;
use crate::node::list;
use crate::policy::lifetime::retention::Retention;
use crate::policy::mode::PluginMode;
use crate::store::{Disk, NodeTime, RealDisk, Record, Store, StoreError};

/// What a run of the plugin returns: what to print where, and how to exit.
#[derive(Debug, PartialEq, Eq)]
pub struct Answer {
    /// The one document for standard output, or nothing.
    pub stdout: Option<String>,
    pub stderr: Option<String>,
    pub status: u8,
}

/// Runs the verb that the environment and standard input ask for.
pub fn run(env: &impl Fn(&str) -> Option<OsString>, stdin: &mut impl ConfigSource) -> Answer {
    answer(env, stdin, RealDisk, VerbLog::default())
}

/// The same, with an observer of every write to the API server, on a disk that a test may provide.
pub fn run_observed(
    observer: &dyn WriteObserver,
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
    observer: &'a dyn WriteObserver,
}

impl Default for VerbLog<'_> {
    fn default() -> Self {
        Self { addresses: String::new(), reason: String::new(), observer: &NoObserver }
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
        None => NodeTime::now(&sticky_of(request).boot_id_file)
            .map_err(CniError::from)
            .and_then(|now| dispatch(request, disk, now, &mut verb_log)),
    };
    log::verb(request, &verb_log, outcome.as_ref().err(), started.elapsed());
    match outcome {
        Ok(Some(result)) => Answer::document(&result, 0),
        Ok(None) => Answer { stdout: None, stderr: None, status: 0 },
        Err(error) => Answer::document(&error.to_json(request.config.version), 1),
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
    let ipam = request.config.ipam.as_ref().ok_or_else(|| {
        CniError::invalid_config("ipam", "missing; give the ranges that addresses are taken from")
    })?;
    let context = VerbContext::new(request, ipam, PluginMode::of_call(false), disk, now);
    let verb = match request.verb {
        Verb::Add => return verbs::add::run(&context, verb_log).map(Some),
        Verb::Del => verbs::del::run,
        Verb::Check => verbs::check::run,
        Verb::Gc => verbs::gc::run,
        Verb::Status => verbs::status::run,
        Verb::Version => return Err(version_is_answered()),
    };
    verb(&context, verb_log).map(|()| None)
}

/// What every verb needs, looked up once.
pub(crate) struct VerbContext<'a, D: Disk> {
    request: &'a Request,
    ipam: &'a IpamConf,
    sticky: StickyConf,
    store: Store<D>,
    mode: PluginMode,
}

impl<'a, D: Disk> VerbContext<'a, D> {
    fn new(request: &'a Request, ipam: &'a IpamConf, mode: PluginMode, disk: D, now: NodeTime) -> Self {
        let sticky = sticky_of(request);
        let store = Store::new(disk, &ipam.data_dir, &request.config.name, now, sticky.lock_timeout);
        Self { request, ipam, sticky, store, mode }
    }

    /// How long the addresses of this request are kept after its sandbox has ended, by this node's own
    /// settings. Without them nothing is kept, as host-local does; where the cluster decides who is sticky,
    /// this node does not.
    fn retention(&self) -> Option<Retention> {
        let (sticky, pod) = (self.request.config.sticky()?, self.request.pod.as_ref()?);
        (sticky.cluster.is_none() && sticky.selects(pod)).then_some(sticky.retention)
    }

    /// The record of the request's attachment, if this node has one.
    fn record(&self) -> Result<Option<Record>, CniError> {
        let attachment = self.attachment()?;
        let Some(mut locked) = self.store.lock_existing()? else { return Ok(None) };
        Ok(locked.find_by_attachment(attachment)?.map(|stored| stored.record))
    }

    /// The attachment, which the reader of requests requires for the verbs that need one.
    fn attachment(&self) -> Result<&'a Attachment, CniError> {
        let attachment = self.request.attachment.as_ref();
        attachment.ok_or_else(|| CniError::internal("the request has no attachment"))
    }
}

fn sticky_of(request: &Request) -> StickyConf {
    request.config.sticky().cloned().unwrap_or_default()
}

fn version_is_answered() -> CniError {
    CniError::internal("VERSION is answered by the protocol")
}

impl From<StoreError> for CniError {
    fn from(error: StoreError) -> Self {
        let code = match error {
            StoreError::Io { .. } | StoreError::Escapes { .. } => code::IO_FAILURE,
            StoreError::LockTimeout { .. } => code::TRY_AGAIN,
            StoreError::NewerVersion { .. } => code::STORE_UNUSABLE,
            StoreError::Taken(_) => code::REQUEST_REFUSED,
        };
        CniError::new(code, error.to_string())
    }
}
