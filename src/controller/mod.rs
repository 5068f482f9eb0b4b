//! The cluster's controller: who is sticky, what is let go, what is repaired. One of several replicas works, elected on a Lease.
//!
//! Watches feed a synchronous [`index`]; each duty is a file of its own that decides by a pure function from the index and
//! carries out by [`act`]. Must never rely on being the only one: every write has a precondition, and what proves
//! something is read live.

pub mod act;
pub mod blocks;
pub mod endpoints;
pub mod index;
pub mod mark;
pub mod metrics;
pub mod queue;
pub mod recycle;
pub mod remove;
pub mod repair;
pub mod retain;
pub mod run;
pub mod settings;
pub mod survey;
pub mod tally;
pub mod tell;
pub mod workloads;
pub mod world;

use std::ffi::OsString;

use settings::{Command, NoSettings};

use crate::process::log;

/// Why the process ends before its time.
#[derive(Debug)]
pub struct Failure {
    /// For standard error.
    pub text: String,
    /// The exit status.
    pub status: u8,
}

impl Failure {
    /// It could not start.
    #[must_use]
    pub fn start(text: String) -> Self {
        Self { text, status: 2 }
    }
}

/// The whole program; what goes to standard output.
///
/// # Errors
/// What goes to standard error, and the status.
pub fn main(arguments: Vec<OsString>) -> Result<String, Failure> {
    let loaded = match settings::load(&arguments) {
        Ok(loaded) => loaded,
        Err(NoSettings::Line(error)) if !error.use_stderr() => return Ok(error.to_string()),
        Err(NoSettings::Line(error)) => return Err(Failure::start(error.to_string())),
        Err(NoSettings::Refused(refused)) => return Err(Failure::start(format!("error: {refused}"))),
    };
    match loaded.line.command.clone().unwrap_or(Command::Run) {
        Command::Reference => Ok(settings::reference()),
        Command::Run => {
            log::start(loaded.line.settings.log_level, loaded.line.settings.log_format);
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
            let runtime = runtime.map_err(|error| Failure::start(format!("cannot start: {error}")))?;
            runtime.block_on(run::run(loaded, arguments)).map(|()| String::new())
        }
    }
}
