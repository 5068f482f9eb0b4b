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
pub(crate) mod installation;
pub mod metrics;
pub mod queue;
pub mod run;
pub mod writer;

use std::ffi::OsString;

use crate::runtime::exit::{ExitError, ExitOutput};
use crate::runtime::{flags::LogFlags, log};
use flags::{ControllerCommand, LoadError};

/// The whole program; what goes to standard output.
/// Errors: what goes to standard error, and the status.
pub fn main(arguments: Vec<OsString>) -> Result<ExitOutput, ExitError> {
    let loaded = match flags::load(&arguments) {
        Ok(loaded) => loaded,
        Err(LoadError::CommandLine(error)) if !error.use_stderr() => return Ok(error.to_string().into()),
        Err(refused) => return Err(ExitError::start(refused.to_string())),
    };
    let LogFlags { log_level, log_format } = loaded.line.settings.log;
    log::start(log_level, log_format);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| ExitError::start(format!("cannot start: {error}")))?;
    runtime.block_on(async {
        match loaded.line.command {
            Some(ControllerCommand::Audit { output }) => commands::audit(&loaded.line.settings, output).await,
            Some(ControllerCommand::Adopt(options)) => commands::adopt(&loaded.line.settings, options).await,
            Some(ControllerCommand::Run) | None => {
                run::run(loaded, arguments).await.map(|()| ExitOutput::default())
            }
        }
    })
}
