//! The cluster's controller: who is sticky, what is let go, what is repaired. One of several replicas works, elected on a Lease.
//!
//! Watches feed a synchronous [`index`]; each duty is a file of its own that decides by a pure function from the index and
//! carries out by [`act`]. Must never rely on being the only one: every write has a precondition, and what proves
//! something is read live.

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

use flags::{ControllerCommand, NoSettings};

use crate::runtime::log;

/// Why the process ends before its time.
#[derive(Debug)]
pub struct ExitError {
    /// For standard error.
    pub text: String,
    /// The exit status.
    pub status: u8,
}

impl ExitError {
    /// It could not start.
    #[must_use]
    pub fn start(text: String) -> Self {
        Self { text, status: 2 }
    }
}

/// What a command prints and ends with.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ExitOutput {
    /// For standard output.
    pub text: String,
    /// The exit status.
    pub status: u8,
}

impl From<String> for ExitOutput {
    fn from(text: String) -> Self {
        Self { text, status: 0 }
    }
}

/// The whole program; what goes to standard output.
///
/// # Errors
/// What goes to standard error, and the status.
pub fn main(arguments: Vec<OsString>) -> Result<ExitOutput, ExitError> {
    let loaded = match flags::load(&arguments) {
        Ok(loaded) => loaded,
        Err(NoSettings::Line(error)) if !error.use_stderr() => return Ok(error.to_string().into()),
        Err(NoSettings::Line(error)) => return Err(ExitError::start(error.to_string())),
        Err(NoSettings::Refused(refused)) => return Err(ExitError::start(format!("error: {refused}"))),
    };
    let command = loaded.line.command.clone().unwrap_or(ControllerCommand::Run);
    if command == ControllerCommand::Reference {
        return Ok(flags::reference().into());
    }
    let settings = loaded.line.settings.clone();
    log::start(settings.log_level, settings.log_format);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| ExitError::start(format!("cannot start: {error}")))?;
    runtime.block_on(async {
        match command {
            ControllerCommand::Audit { output } => commands::audit(&settings, output).await,
            ControllerCommand::Adopt(adoption) => commands::adopt(&settings, &adoption).await,
            ControllerCommand::Run | ControllerCommand::Reference => {
                run::run(loaded, arguments).await.map(|()| ExitOutput::default())
            }
        }
    })
}
