//! The plugin's log: one line per verb, to a file per day, or to standard error.
//!
//! A log that cannot be written never fails a verb.

use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use tracing::Level;
use tracing::subscriber::DefaultGuard;
use tracing_appender::rolling::{RollingFileAppender, Rotation};

use crate::cni::{CniError, PluginLogLevel, Request, StickyConf};
use crate::plugin::VerbLog;

pub(super) fn start(sticky: Option<&StickyConf>) -> DefaultGuard {
    // A drop-in for host-local is as quiet as it is.
    let level = sticky.map_or(Level::WARN, |sticky| match sticky.log_level {
        PluginLogLevel::Error => Level::ERROR,
        PluginLogLevel::Warn => Level::WARN,
        PluginLogLevel::Info => Level::INFO,
        PluginLogLevel::Debug => Level::DEBUG,
        PluginLogLevel::Trace => Level::TRACE,
    });
    let lines = tracing_subscriber::fmt().with_max_level(level).with_target(false).with_ansi(false);
    let file = sticky.and_then(|sticky| Some((sticky.log_file.as_deref()?, sticky.log_max_files)));
    match file {
        Some((path, most)) => {
            let writer = LogFile { path: path.to_owned(), most, opened: OnceLock::new() };
            tracing::subscriber::set_default(lines.with_writer(writer).finish())
        }
        None => tracing::subscriber::set_default(lines.with_writer(|| QuietWriter(io::stderr())).finish()),
    }
}

pub(super) fn verb(request: &Request, verb_log: &VerbLog<'_>, error: Option<&CniError>, took: Duration) {
    let verb = request.verb.as_str();
    let network = request.config.name.as_str();
    let pod =
        request.pod.as_ref().map_or_else(String::new, |pod| format!("{}/{}", pod.namespace(), pod.name()));
    let container = request.attachment.as_ref().map_or("", |attachment| attachment.container.as_str());
    let interface = request.attachment.as_ref().map_or("", |attachment| attachment.interface.as_str());
    let (address, reason, took) = (&verb_log.addresses, &verb_log.reason, took.as_micros());
    match error {
        None => tracing::info!(verb, network, pod, container, interface, address, reason, took_us = took),
        Some(error) => {
            tracing::error!(verb, network, pod, container, interface, address, %error, took_us = took);
        }
    }
}

fn open(path: &Path, most: usize) -> io::Result<RollingFileAppender> {
    let not_a_file = || io::Error::new(io::ErrorKind::InvalidInput, "not the path of a file");
    let (directory, name) =
        path.parent().zip(path.file_name().and_then(|name| name.to_str())).ok_or_else(not_a_file)?;
    fs::create_dir_all(directory)?;
    prune(directory, name, most);
    RollingFileAppender::builder()
        .rotation(Rotation::DAILY)
        .filename_prefix(name)
        .build(directory)
        .map_err(io::Error::other)
}

/// Removes the oldest files of this log, and only those: the log's name, a dot and a date.
fn prune(directory: &Path, name: &str, most: usize) {
    let Ok(entries) = fs::read_dir(directory) else { return };
    let fits =
        |(at, byte): (usize, u8)| if at == 4 || at == 7 { byte == b'-' } else { byte.is_ascii_digit() };
    let is_date = |text: &str| text.len() == 10 && text.bytes().enumerate().all(fits);
    let mut ours: Vec<String> = entries
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|file| file.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')).is_some_and(is_date))
        .collect();
    ours.sort();
    for old in ours.iter().rev().skip(most.max(1)) {
        let _ = fs::remove_file(directory.join(old));
    }
}

/// The log's file, opened with the first line: a verb that logs nothing at this `logLevel` does not open it.
struct LogFile {
    path: PathBuf,
    most: usize,
    /// None if it could not be opened: the lines go to standard error then.
    opened: OnceLock<Option<RollingFileAppender>>,
}

impl<'a> tracing_subscriber::fmt::MakeWriter<'a> for LogFile {
    type Writer = Box<dyn io::Write + 'a>;

    fn make_writer(&'a self) -> Self::Writer {
        let opened = self.opened.get_or_init(|| {
            let path = self.path.display();
            open(&self.path, self.most)
                .inspect_err(|error| {
                    let line =
                        format!("cannot write the log file {path}; logging to standard error: {error}\n");
                    let _ = QuietWriter(io::stderr()).write_all(line.as_bytes());
                })
                .ok()
        });
        match opened {
            Some(appender) => Box::new(QuietWriter(appender.make_writer())),
            None => Box::new(QuietWriter(io::stderr())),
        }
    }
}

/// A writer that ignores its failures: a full disk, or a runtime that does not read any more, must not fail
/// an ADD that succeeded.
struct QuietWriter<W>(W);

impl<W: io::Write> io::Write for QuietWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(self.0.write(bytes).unwrap_or(bytes.len()))
    }

    fn flush(&mut self) -> io::Result<()> {
        let _ = self.0.flush();
        Ok(())
    }
}
