//! The node's agent: installs the plugin, prepares decisions for pods before their ADD, keeps the node's own
//! CiliumNode in sync, grants the node's addresses, sends the plugin's pending updates and releases what no
//! DEL ended.
//!
//! It is one loop:
//!
//! ```text
//!   API server --watch--> index ---+
//!                                  +--> plan (pure) --> actions, one at a time --> API server, store
//!   store -------------> snapshot -+                         |      ^
//!                                                            v      |
//!                                               inside an action that binds a pod:
//!                                               read live -> decide -> write, until done
//! ```
//!
//! [`watch`] feeds the [`index`]; [`snapshot`] reads the store; [`plan`] is a function from both to a list of
//! actions; [`reconciler`] performs them in [`actions`], each in the file of its name. What a watch or a
//! snapshot shows may be out of date, so an action reads again before it writes. For a binding this is a
//! second, complete loop of read, decide and write (`cluster::protocol::bind`): it ends when the StickyIP is
//! attached or refused.
//!
//! Must never be needed for a pod to start: without the agent the plugin asks the API server itself. Must
//! never write another node's objects.

pub mod actions;
mod blocks;
mod cilium;
pub mod flags;
mod host_routes;
pub mod index;
pub mod install;
pub mod metrics;
pub mod plan;
pub mod reconciler;
pub mod removal;
mod run;
pub mod snapshot;
pub mod watch;

use std::ffi::OsString;

use clap::Parser;

use crate::runtime::{exit::ExitError, log};
use flags::{AgentCommand, AgentCommandLine};
pub use run::run;

/// The whole program. What it returns is for standard output.
/// Errors: what went wrong, and the exit status.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> Result<String, ExitError> {
    fn failed(error: impl ToString) -> ExitError {
        ExitError::failed(error.to_string())
    }
    let line = match AgentCommandLine::try_parse_from(arguments) {
        Ok(line) => line,
        Err(error) if error.use_stderr() => return Err(ExitError::start(error.to_string())),
        Err(help) => return Ok(help.to_string()),
    };
    line.settings.check().map_err(|text| ExitError::start(format!("error: {text}")))?;
    log::start(line.settings.log.log_level, line.settings.log.log_format);
    let settings = line.settings.install();
    match line.command {
        Some(AgentCommand::Uninstall { check: true, .. }) => return still_installed(&settings),
        Some(AgentCommand::Uninstall { force, watch: false, .. }) => {
            let removed = install::uninstall(&settings, force, install::DelConflist::default());
            return removed.map(|removed| removed.to_string()).map_err(failed);
        }
        _ => {}
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| ExitError::failed(format!("cannot start: {error}")))?;
    let done = runtime.block_on(async {
        match line.command {
            Some(AgentCommand::Install) => run::install_once(&line.settings).await,
            Some(AgentCommand::Uninstall { force, .. }) => {
                removal::run(line.settings, force, run::shutdown()).await;
                Ok(())
            }
            _ => run::run(line.settings, run::shutdown()).await,
        }
    });
    done.map(|()| String::new()).map_err(failed)
}

/// That nothing of ours is on the host. Errors: what is.
fn still_installed(settings: &install::InstallSettings) -> Result<String, ExitError> {
    let found = install::installed(settings).map_err(|error| ExitError::failed(error.to_string()))?;
    if found.is_empty() {
        return Ok("nothing of ours is installed\n".to_owned());
    }
    let lines: Vec<String> = found.iter().map(|path| format!("installed {}", path.display())).collect();
    Err(ExitError::failed(lines.join("\n")))
}
