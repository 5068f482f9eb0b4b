//! The node's agent: installs the plugin, prepares decisions for pods that are bound to the node, keeps the node's own
//! CiliumNode in step, answers for the node's addresses, drains the plugin's notes and frees what nobody ended.
//!
//! Watches feed an [`index`]; [`plan`] is a function from it and the store to actions; [`act`] carries out one at a
//! time. Must never be needed for a pod to start: with the agent dead the plugin goes its way by the API server. Must
//! never write another node's objects.

pub mod actions;
mod blocks;
pub mod flags;
pub mod index;
pub mod install;
pub mod metrics;
pub mod plan;
pub mod reconciler;
mod run;
pub mod snapshot;
pub mod watch;

use std::ffi::OsString;

use clap::Parser;

use crate::runtime::exit::ExitError;
use crate::runtime::log;
use flags::{AgentCommand, AgentCommandLine};
pub use run::{AgentError, run};

/// The whole program. What it returns is for standard output.
///
/// # Errors
/// What went wrong, and the exit status.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> Result<String, ExitError> {
    let line = match AgentCommandLine::try_parse_from(arguments) {
        Ok(line) => line,
        Err(error) if error.use_stderr() => return Err(ExitError::start(error.to_string())),
        Err(help) => return Ok(help.to_string()),
    };
    line.settings.check().map_err(|text| ExitError::start(format!("error: {text}")))?;
    log::start(line.settings.log.log_level, line.settings.log.log_format);
    if let Some(AgentCommand::Uninstall { force }) = line.command {
        let removed = install::uninstall(&line.settings.install(), force);
        return removed
            .map(|removed| removed.to_string())
            .map_err(|error| ExitError::failed(error.to_string()));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| ExitError::failed(format!("cannot start: {error}")))?;
    let done = runtime.block_on(async {
        match line.command {
            Some(AgentCommand::Install) => run::install_once(&line.settings).await,
            _ => run::run(line.settings, run::shutdown()).await,
        }
    });
    done.map(|()| String::new()).map_err(|error| ExitError::failed(error.to_string()))
}
