//! The cluster's controller: adopts running pods, releases addresses of deleted workloads, repairs what was
//! left half done. One of several replicas works, elected on a Lease.
//!
//! Watches feed a synchronous [`index`]. Each of the [`duties`] decides by a pure function from the index,
//! and writes by [`writer`]. Must never rely on being the only one: every write has a precondition, and every
//! proof is read live.

pub mod cilium_config;
pub mod commands;
pub mod context;
pub mod drift_condition;
pub mod duties;
pub mod duty;
pub mod events;
pub mod flags;
pub mod index;
pub mod metrics;
pub mod queue;
pub mod run;
pub mod writer;

use std::ffi::OsString;

use flags::{ControllerCommand, LoadError};

use crate::runtime::exit::{ExitError, ExitOutput};
use crate::runtime::log;

/// The whole program; what goes to standard output.
/// Errors: what goes to standard error, and the status.
pub fn main(arguments: Vec<OsString>) -> Result<ExitOutput, ExitError> {
    let loaded = match flags::load(&arguments) {
        Ok(loaded) => loaded,
        Err(LoadError::CommandLine(error)) if !error.use_stderr() => return Ok(error.to_string().into()),
        Err(LoadError::CommandLine(error)) => return Err(ExitError::start(error.to_string())),
        Err(LoadError::Settings(refused)) => return Err(ExitError::start(format!("error: {refused}"))),
    };
    let command = loaded.line.command.clone().unwrap_or(ControllerCommand::Run);
    let settings = loaded.line.settings.clone();
    log::start(settings.log.log_level, settings.log.log_format);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| ExitError::start(format!("cannot start: {error}")))?;
    runtime.block_on(async {
        match command {
            ControllerCommand::Audit { output } => commands::audit(&settings, output).await,
            ControllerCommand::Adopt(adoption) => commands::adopt(&settings, &adoption).await,
            ControllerCommand::Run => run::run(loaded, arguments).await.map(|()| ExitOutput::default()),
        }
    })
}
