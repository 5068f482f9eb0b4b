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

use flags::{AgentCommand, AgentCommandLine, AgentSettings, LogFormat, LogLevel};
pub use run::{AgentError, connect, run};

/// Why the program ends without success.
#[derive(Debug)]
pub struct ExitError {
    /// For a person.
    pub text: String,
    /// The exit status: 2 for a mistake in the flags.
    pub status: u8,
}

/// The whole program. What it returns is for standard output.
///
/// # Errors
/// What went wrong, and the exit status.
pub fn main(arguments: impl IntoIterator<Item = OsString>) -> Result<String, ExitError> {
    let line = match AgentCommandLine::try_parse_from(arguments) {
        Ok(line) => line,
        Err(error) if error.use_stderr() => return Err(ExitError { text: error.to_string(), status: 2 }),
        Err(help) => return Ok(help.to_string()),
    };
    line.settings.check().map_err(|text| ExitError { text: format!("error: {text}"), status: 2 })?;
    start_log(&line.settings);
    let failed = |text: String| ExitError { text, status: 1 };
    if let Some(AgentCommand::Uninstall { force }) = line.command {
        let removed = install::uninstall(&line.settings.install(), force);
        return removed.map(|removed| removed.to_string()).map_err(|error| failed(error.to_string()));
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| failed(format!("cannot start: {error}")))?;
    let done = runtime.block_on(async {
        match line.command {
            Some(AgentCommand::Install) => run::install_once(&line.settings).await,
            _ => run::run(line.settings, run::told_to_end()).await,
        }
    });
    done.map(|()| String::new()).map_err(|error| failed(error.to_string()))
}

fn start_log(settings: &AgentSettings) {
    use tracing_subscriber::filter::{LevelFilter, Targets};
    use tracing_subscriber::fmt;
    use tracing_subscriber::layer::SubscriberExt;
    let level = match settings.log_level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    };
    // The library logs the server's whole answer each time a watch breaks off; we say it in a sentence.
    let theirs = if level > LevelFilter::INFO { level } else { level.min(LevelFilter::ERROR) };
    let targets = Targets::new().with_default(level).with_target("kube_runtime", theirs);
    let registry = tracing_subscriber::registry().with(targets);
    // Only the first one in a process counts; a test may have set its own.
    let _ = match settings.log_format {
        LogFormat::Text => {
            let layer = fmt::layer().with_ansi(false).with_target(false).with_writer(std::io::stderr);
            tracing::subscriber::set_global_default(registry.with(layer))
        }
        LogFormat::Json => {
            let layer = fmt::layer().json().with_target(false).with_writer(std::io::stderr);
            tracing::subscriber::set_global_default(registry.with(layer))
        }
    };
}
