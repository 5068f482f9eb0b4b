//! From environment and standard input to a request, in the order of checks that runtimes rely on: the verb,
//! its variables, the document, the name, the version, the rest.
//!
//! Nothing here writes anything; whatever is wrong is found before a verb starts.

use std::ffi::OsString;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::cni::args::CniArgs;
use crate::cni::config::NetConf;
use crate::cni::error::{CniError, code};
use crate::cni::fields::Fields;
use crate::cni::verb::Verb;
use crate::cni::version::{CniVersion, UnknownVersion, is_well_formed};
use crate::names::{Attachment, ContainerId, IfName, PodIdentity, clipped};
use input::{ConfigSource, MAX_INPUT};

/// How long VERSION waits for a configuration that may never come.
const VERSION_INPUT_TIMEOUT: Duration = Duration::from_millis(400);
/// How long an answer to a wrong environment waits for the configuration, whose version it would like to use.
const ERROR_INPUT_TIMEOUT: Duration = Duration::from_millis(50);

/// What messages about the whole document begin with.
const INPUT: &str = "the configuration on standard input";

/// A valid request of a runtime.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub verb: Verb,
    /// For which container; there for ADD, DEL and CHECK.
    pub attachment: Option<Attachment>,
    /// The container's network namespace; may be absent for DEL.
    pub netns: Option<PathBuf>,
    /// Where plugins are looked for.
    pub cni_path: Vec<PathBuf>,
    /// `CNI_ARGS` as it was given, for a delegate.
    pub cni_args: Option<OsString>,
    /// The pod behind the container, where the runtime says.
    pub pod: Option<PodIdentity>,
    pub config: NetConf,
    /// What was odd but is no reason to refuse; for the log.
    pub warnings: Vec<String>,
}

/// What a run of the plugin is about.
#[derive(Debug, Clone, PartialEq)]
pub enum ParsedRequest {
    /// No verb was asked for: a person is looking. See [`about`].
    About,
    /// VERSION, answered.
    Version { reply: Value },
    /// Any other verb.
    Verb(Box<Request>),
}

/// An error and the version to print it in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestError {
    pub error: CniError,
    /// The version of the configuration where it is known, else the newest.
    pub version: CniVersion,
}

impl RequestError {
    pub fn to_json(&self) -> Value {
        self.error.to_json(self.version)
    }
}

impl From<CniError> for RequestError {
    fn from(error: CniError) -> Self {
        Self { error, version: CniVersion::LATEST }
    }
}

/// The text for a person who runs the plugin by hand.
pub fn about() -> String {
    format!(
        "sticky-ipam {}: a CNI plugin for IP addresses that pods keep.\n\
         It is run by container runtimes and other plugins, which set CNI_COMMAND.\n\
         CNI protocol versions supported: {}\n",
        env!("CARGO_PKG_VERSION"),
        CniVersion::supported_list()
    )
}

pub fn read_request(
    env: &impl Fn(&str) -> Option<OsString>,
    stdin: &mut impl ConfigSource,
) -> Result<ParsedRequest, RequestError> {
    let Some(command) = env("CNI_COMMAND").filter(|value| !value.is_empty()) else {
        return Ok(ParsedRequest::About);
    };
    let Some(verb) = command.to_str().and_then(Verb::parse) else {
        let known = Verb::ALL.map(Verb::as_str).join(", ");
        let given = clipped(&command.to_string_lossy());
        let error = CniError::invalid_environment(format!("CNI_COMMAND: {given:?} is none of {known}"));
        return Err(with_version_of_input(error, stdin));
    };
    if verb == Verb::Version {
        return Ok(ParsedRequest::Version { reply: version_reply(stdin) });
    }
    let environment = Environment::read(env, verb).map_err(|error| with_version_of_input(error, stdin))?;
    let bytes =
        stdin.read_all().map_err(|e| CniError::io(format!("standard input could not be read: {e}")))?;
    let raw = read_document(&bytes)?;
    let version = version_of(&raw).unwrap_or(CniVersion::LATEST);
    let request = environment.with_config(&raw).map_err(|error| RequestError { error, version })?;
    Ok(ParsedRequest::Verb(Box::new(request)))
}

fn read_document(bytes: &[u8]) -> Result<Map<String, Value>, CniError> {
    if bytes.len() as u64 > MAX_INPUT {
        let most = MAX_INPUT / 1024 / 1024;
        return Err(CniError::decoding(format!("{INPUT} is longer than {most} MiB; make it shorter")));
    }
    match serde_json::from_slice(bytes) {
        Ok(Value::Object(map)) => Ok(map),
        // Everywhere else null is the same as nothing said, so here it is a configuration without a name.
        Ok(Value::Null) => Ok(Map::new()),
        Ok(other) => Err(CniError::wrong_type(INPUT, &other, "a JSON object")),
        Err(error) => Err(CniError::decoding(format!("{INPUT} is not valid JSON: {error}"))),
    }
}

fn version_of(raw: &Map<String, Value>) -> Option<CniVersion> {
    CniVersion::parse(Fields::root(raw).get("cniVersion")?.as_str()?).ok()
}

/// An error found before the configuration was read; its version is used if it is there already.
fn with_version_of_input(error: CniError, stdin: &mut impl ConfigSource) -> RequestError {
    let bytes = stdin.read_ready(ERROR_INPUT_TIMEOUT).unwrap_or_default();
    let version = read_document(&bytes).ok().and_then(|raw| version_of(&raw));
    RequestError { error, version: version.unwrap_or(CniVersion::LATEST) }
}

/// VERSION never fails: without a version to repeat, the newest stands there.
fn version_reply(stdin: &mut impl ConfigSource) -> Value {
    let bytes = stdin.read_ready(VERSION_INPUT_TIMEOUT).unwrap_or_default();
    let raw = read_document(&bytes).unwrap_or_default();
    let given = Fields::root(&raw).get("cniVersion").and_then(Value::as_str);
    let asked = given.filter(|text| is_well_formed(text)).unwrap_or(CniVersion::LATEST.as_str());
    json!({"cniVersion": asked, "supportedVersions": CniVersion::SUPPORTED.map(CniVersion::as_str)})
}

struct Environment {
    verb: Verb,
    attachment: Option<Attachment>,
    netns: Option<PathBuf>,
    own_netns_allowed: bool,
    cni_path: Vec<PathBuf>,
    cni_args: Option<OsString>,
    args: CniArgs,
    warnings: Vec<String>,
}

impl Environment {
    fn read(env: &impl Fn(&str) -> Option<OsString>, verb: Verb) -> Result<Self, CniError> {
        let get = |name: &str| env(name).filter(|value| !value.is_empty());
        let missing: Vec<&str> = verb.required().iter().copied().filter(|name| get(name).is_none()).collect();
        if !missing.is_empty() {
            let names = missing.join(", ");
            return Err(CniError::invalid_environment(format!("{verb} needs {names}: missing or empty")));
        }
        let mut warnings = Vec::new();
        let attachment = verb.has_attachment().then(|| read_attachment(&get)).transpose()?;
        let cni_args = get("CNI_ARGS").filter(|_| verb.has_attachment());
        let args = match read_args(cni_args.as_ref()) {
            Err(error) if verb.is_lenient() => {
                warnings.push(error.to_string());
                CniArgs::default()
            }
            other => other?,
        };
        Ok(Self {
            verb,
            attachment,
            netns: get("CNI_NETNS").filter(|_| verb.has_attachment()).map(PathBuf::from),
            own_netns_allowed: get("CNI_NETNS_OVERRIDE")
                .is_some_and(|v| v == "1" || v.eq_ignore_ascii_case("true")),
            cni_path: get("CNI_PATH").iter().flat_map(std::env::split_paths).collect(),
            cni_args,
            args,
            warnings,
        })
    }

    fn with_config(mut self, raw: &Map<String, Value>) -> Result<Request, CniError> {
        let is_ingress = self.attachment.as_ref().is_some_and(|a| a.container.is_cilium_ingress());
        if is_ingress {
            // cilium-agent names a pod that does not exist, and a namespace that ends with the call.
            self.args.pod = None;
            self.own_netns_allowed = true;
        }
        let root = Fields::root(raw);
        let name = NetConf::read_name(&root)?;
        let version = read_version(&root, self.verb)?;
        self.check_netns()?;
        let config = NetConf::read(raw, name, version, self.verb, &self.args, &mut self.warnings)?;
        // An API server knows no pod without a namespace; a node that decides alone can keep its address.
        let name_alone = self
            .args
            .name_alone
            .filter(|_| !is_ingress && config.sticky().is_none_or(|sticky| sticky.cluster.is_none()));
        Ok(Request {
            verb: self.verb,
            attachment: self.attachment,
            netns: self.netns.filter(|_| !is_ingress),
            cni_path: self.cni_path,
            cni_args: self.cni_args,
            pod: self.args.pod.or(name_alone),
            config,
            warnings: self.warnings,
        })
    }

    /// A container in the plugin's own namespace has the node's addresses, so it must not get one of ours;
    /// but what it should never have got may always be taken away.
    fn check_netns(&mut self) -> Result<(), CniError> {
        let Some(netns) = self.netns.as_deref().filter(|_| !self.own_netns_allowed) else { return Ok(()) };
        if !is_own_netns(netns) {
            return Ok(());
        }
        let message = format!(
            "CNI_NETNS: {} is the plugin's own network namespace; name the container's, or set \
             CNI_NETNS_OVERRIDE=1",
            netns.display()
        );
        if self.verb == Verb::Add {
            return Err(CniError::new(code::INVALID_NETNS, message));
        }
        self.warnings.push(message);
        Ok(())
    }
}

fn read_attachment(get: &impl Fn(&str) -> Option<OsString>) -> Result<Attachment, CniError> {
    let named = |name: &str, problem: String| CniError::invalid_environment(format!("{name}: {problem}"));
    let text = |name: &str| -> Result<String, CniError> {
        get(name).unwrap_or_default().into_string().map_err(|bytes| {
            named(name, format!("{:?} is not valid UTF-8", clipped(&bytes.to_string_lossy())))
        })
    };
    Ok(Attachment {
        container: ContainerId::new(&text("CNI_CONTAINERID")?).map_err(|p| named("CNI_CONTAINERID", p))?,
        interface: IfName::new(&text("CNI_IFNAME")?).map_err(|p| named("CNI_IFNAME", p))?,
    })
}

fn read_args(args: Option<&OsString>) -> Result<CniArgs, CniError> {
    let Some(args) = args else { return Ok(CniArgs::default()) };
    let not_text = || CniError::invalid_environment("CNI_ARGS: the value is not valid UTF-8");
    CniArgs::parse(args.to_str().ok_or_else(not_text)?)
}

/// ADD and DEL take a malformed version for one that is not spoken; the verbs that compare versions first
/// call it undecodable. Both as runtimes know it from other plugins.
fn read_version(root: &Fields<'_>, verb: Verb) -> Result<CniVersion, CniError> {
    let text = root.string("cniVersion")?.unwrap_or_default();
    let version = CniVersion::parse(text).map_err(|unknown| match (unknown, verb) {
        (UnknownVersion::Malformed, Verb::Check | Verb::Gc | Verb::Status) => {
            let given = clipped(text);
            CniError::decoding(format!("cniVersion: {given:?} is not a version; write one such as 1.1.0"))
        }
        _ => CniError::incompatible_version(format!("cniVersion: {:?} is not supported", clipped(text))),
    })?;
    if version < verb.since() {
        // The sentence of libcni's skeleton, whole: clients compare it. Details would become a part of it.
        let message = format!("config version does not allow {verb}");
        return Err(CniError::new(code::INCOMPATIBLE_VERSION, message));
    }
    Ok(version)
}

/// A path that cannot be looked at is left to the plugin that must enter it.
fn is_own_netns(path: &Path) -> bool {
    let file = |path: &Path| std::fs::metadata(path).map(|file| (file.dev(), file.ino())).ok();
    file(path).is_some_and(|theirs| Some(theirs) == file(Path::new("/proc/thread-self/ns/net")))
}

pub(crate) mod input;
#[cfg(test)]
mod tests;
