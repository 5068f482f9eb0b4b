//! Running another plugin in our place (`delegate` in the configuration): cilium-cni in `crd` mode, where
//! Cilium picks the address and [`cilium`] makes sure which one it is.

pub(crate) mod cilium;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde_json::{Value, json};

use crate::cni::config::{OLD_VALID_ATTACHMENTS, VALID_ATTACHMENTS};
use crate::cni::{CniError, Request, Verb, code};
use crate::names::Attachment;
use crate::plugin::VerbLog;
use crate::plugin::cluster::add::DeadSandbox;
use crate::store::Disk;

/// A large Go program that ends after a moment: a quarter of its start goes to collecting garbage that its
/// end throws away. It begins to collect at that much memory, unless the environment says otherwise
/// (docs/decisions/0030).
const CILIUM_CNI: &str = "cilium-cni";
const GO_GC_LIMITS: [(&str, &str); 2] = [("GOGC", "off"), ("GOMEMLIMIT", "128MiB")];

/// Runs a verb by the delegate.
/// Errors: as [`Delegate::pass`]; or the cluster's.
pub(super) fn run(
    request: &Request,
    delegate: &Value,
    disk: impl Disk,
    log: &mut VerbLog<'_>,
) -> Result<Option<Value>, CniError> {
    let delegate = Delegate::find(request, delegate)?;
    if let Some(conf) = request.config.sticky().and_then(|sticky| sticky.cluster.as_ref()) {
        return cilium::run(request, conf, &delegate, disk, log);
    }
    // Without the cluster a delegate needs no store.
    drop(disk);
    delegate.pass(log)
}

pub(super) struct Delegate<'a> {
    request: &'a Request,
    kind: String,
    program: PathBuf,
    config: Value,
}

impl<'a> Delegate<'a> {
    fn find(request: &'a Request, delegate: &Value) -> Result<Self, CniError> {
        let kind = delegate.get("type").and_then(Value::as_str).unwrap_or_default().to_owned();
        let program = find(request, &kind)?;
        Ok(Self { request, kind, program, config: config_for(request, delegate) })
    }

    /// Runs the delegate with our environment, and passes its answer on as it is.
    /// Errors: the delegate's own, or why it could not be run. One whose ADD failed has been run with DEL by
    /// then, so that it leaves nothing behind, as the specification asks.
    pub(super) fn pass(&self, log: &mut VerbLog<'_>) -> Result<Option<Value>, CniError> {
        log.report(&[], format!("answered by {}", self.kind));
        let outcome = self.ask(self.request.verb);
        if self.request.verb == Verb::Add && outcome.is_err() {
            self.clean_up();
        }
        outcome
    }

    /// Has the delegate undo what an ADD may have left.
    pub(super) fn clean_up(&self) {
        if let Err(error) = self.ask(Verb::Del) {
            tracing::warn!(delegate = self.kind, %error, "the delegate could not clean up after its ADD");
        }
    }

    /// Runs DEL of the delegate for another sandbox, which is dead. In its network namespace if that is left:
    /// never in that of the sandbox which is added.
    /// Errors: as [`Delegate::ask`].
    pub(super) fn delete(&self, dead: &DeadSandbox) -> Result<(), CniError> {
        let sandbox = Sandbox { attachment: Some(&dead.attachment), netns: dead.netns.as_deref() };
        let child = self.execute(Verb::Del, sandbox).map_err(|error| self.cannot_run(&error))?;
        RunningDelegate { delegate: self, child }.answer().map(drop)
    }

    /// Runs one verb of the delegate.
    /// Errors: the delegate's own, or why it could not be run.
    pub(super) fn ask(&self, verb: Verb) -> Result<Option<Value>, CniError> {
        self.start(verb)?.answer()
    }

    /// Starts one verb of the delegate, which runs until its answer is asked for.
    pub(super) fn start(&self, verb: Verb) -> Result<RunningDelegate<'_>, CniError> {
        let own =
            Sandbox { attachment: self.request.attachment.as_ref(), netns: self.request.netns.as_deref() };
        let child = self.execute(verb, own).map_err(|error| self.cannot_run(&error))?;
        Ok(RunningDelegate { delegate: self, child })
    }

    fn cannot_run(&self, error: &std::io::Error) -> CniError {
        let message = format!("cannot run the delegate {}: {error}", self.program.display());
        CniError::new(code::DELEGATE_FAILED, message)
    }

    fn execute(&self, verb: Verb, sandbox: Sandbox<'_>) -> std::io::Result<Child> {
        let mut command = Command::new(&self.program);
        command.env("CNI_COMMAND", verb.as_str());
        let is_set = GO_GC_LIMITS.iter().any(|(name, _)| std::env::var_os(name).is_some());
        if self.kind == CILIUM_CNI && !is_set {
            command.envs(GO_GC_LIMITS);
        }
        if let Some(attachment) = sandbox.attachment {
            command.env("CNI_CONTAINERID", attachment.container.as_str());
            command.env("CNI_IFNAME", attachment.interface.as_str());
        }
        let paths = std::env::join_paths(&self.request.cni_path).ok().filter(|paths| !paths.is_empty());
        command.envs(self.request.cni_args.as_ref().map(|args| ("CNI_ARGS", args)));
        // Ours names the sandbox of the request.
        command.env_remove("CNI_NETNS").envs(sandbox.netns.map(|path| ("CNI_NETNS", path)));
        command.envs(paths.map(|paths| ("CNI_PATH", paths)));
        // A runtime reads our standard error until every process that has it has ended. The delegate has it
        // too, beside its own: if this process is killed, the DEL does not come while the ADD of the delegate
        // still runs.
        let _handed_down = nix::unistd::dup(std::io::stderr()).ok();
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A delegate may answer without reading.
            let _ = stdin.write_all(self.config.to_string().as_bytes());
        }
        Ok(child)
    }
}

/// The sandbox that a verb is about.
struct Sandbox<'a> {
    attachment: Option<&'a Attachment>,
    netns: Option<&'a Path>,
}

pub(super) struct RunningDelegate<'a> {
    delegate: &'a Delegate<'a>,
    child: Child,
}

impl RunningDelegate<'_> {
    /// Waits for its end.
    /// Errors: the delegate's own, or that it could not be waited for.
    pub(super) fn answer(self) -> Result<Option<Value>, CniError> {
        let Delegate { program, kind, .. } = self.delegate;
        let output = self.child.wait_with_output().map_err(|error| self.delegate.cannot_run(&error))?;
        // Its messages are for operators; if standard error is closed there is no one to report to.
        let _ = std::io::stderr().write_all(&output.stderr);
        let failed = |what: String| {
            CniError::new(code::DELEGATE_FAILED, format!("the delegate {} {what}", program.display()))
        };
        let parse = || {
            let parsed = serde_json::from_slice::<Value>(&output.stdout);
            parsed.map_err(|error| failed(format!("answered what is not JSON: {error}")))
        };
        let has_answer = !output.stdout.trim_ascii().is_empty();
        let answer = has_answer.then(parse).transpose()?;
        match (output.status.success(), answer) {
            (true, answer) => Ok(answer),
            (false, Some(error)) => Err(error_of(&error, kind)),
            (false, None) => Err(failed(format!("ended with {}", output.status))
                .with_details(String::from_utf8_lossy(&output.stderr).trim())),
        }
    }
}

/// The delegate's configuration, with what a runtime would have put in.
fn config_for(request: &Request, delegate: &Value) -> Value {
    let mut config = delegate.clone();
    let raw = &request.config.raw;
    if let Some(fields) = config.as_object_mut() {
        let passed_on = ["cniVersion", "name", "runtimeConfig", "prevResult", "args"];
        for key in passed_on.into_iter().chain([VALID_ATTACHMENTS, OLD_VALID_ATTACHMENTS]) {
            if let Some(value) = raw.get(key) {
                fields.insert(key.to_owned(), value.clone());
            }
        }
        fields.entry("cniVersion").or_insert_with(|| json!(request.config.version.to_string()));
    }
    config
}

fn find(request: &Request, kind: &str) -> Result<PathBuf, CniError> {
    let found = request.cni_path.iter().map(|directory| directory.join(kind)).find(|path| path.is_file());
    found.ok_or_else(|| {
        let places: Vec<String> = request.cni_path.iter().map(|path| path.display().to_string()).collect();
        let places = places.join(":");
        let message =
            format!("delegate.type: {kind:?} is not found in CNI_PATH ({places}); install that plugin there");
        CniError::new(code::DELEGATE_FAILED, message)
    })
}

fn error_of(error: &Value, kind: &str) -> CniError {
    let text = |key: &str| error.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
    let number = error.get("code").and_then(Value::as_u64).and_then(|code| u32::try_from(code).ok());
    let message = match text("msg") {
        empty if empty.is_empty() => format!("{kind} failed and did not say why"),
        message => message,
    };
    CniError::new(number.unwrap_or(code::DELEGATE_FAILED), message).with_details(text("details"))
}
