//! The log of a process, on standard error: levels by name or by number, lines for people or for programs.

use std::str::FromStr;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;

/// The lowest level that is logged. Also by number: 0 to 2 are errors, 3 warnings, 4 actions, 5 decisions,
/// 6 everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    Error,
    /// And warnings.
    Warn,
    /// And actions.
    #[default]
    Info,
    /// And decisions.
    Debug,
    /// Everything.
    Trace,
}

impl FromStr for LogLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            "0" | "1" | "2" | "error" => Self::Error,
            "3" | "warn" => Self::Warn,
            "4" | "info" => Self::Info,
            "5" | "debug" => Self::Debug,
            "6" | "trace" => Self::Trace,
            _ => return Err("write error, warn, info, debug, trace, or a number from 0 to 6".to_owned()),
        })
    }
}

impl std::fmt::Display for LogLevel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warn => "warn",
            Self::Info => "info",
            Self::Debug => "debug",
            Self::Trace => "trace",
        })
    }
}

impl From<LogLevel> for LevelFilter {
    fn from(level: LogLevel) -> Self {
        match level {
            LogLevel::Error => Self::ERROR,
            LogLevel::Warn => Self::WARN,
            LogLevel::Info => Self::INFO,
            LogLevel::Debug => Self::DEBUG,
            LogLevel::Trace => Self::TRACE,
        }
    }
}

/// The format of log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

/// Starts the log of this process. A second call changes nothing.
pub fn start(level: LogLevel, format: LogFormat) {
    let level = LevelFilter::from(level);
    // kube_runtime logs the server's whole answer each time a watch fails; we report it in a sentence.
    let theirs = if level > LevelFilter::INFO { level } else { level.min(LevelFilter::ERROR) };
    let targets = Targets::new().with_default(level).with_target("kube_runtime", theirs);
    let registry = tracing_subscriber::registry().with(targets);
    let lines = fmt::layer().with_ansi(false).with_target(false).with_writer(std::io::stderr);
    // Fails only where a log was started before, as in tests that share a process.
    let _ = match format {
        LogFormat::Text => tracing::subscriber::set_global_default(registry.with(lines)),
        LogFormat::Json => {
            tracing::subscriber::set_global_default(registry.with(lines.json().flatten_event(true)))
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_known_by_name_and_by_number() {
        let level = |text: &str| text.parse::<LogLevel>().unwrap();
        let numbers: Vec<LogLevel> = (0..=6).map(|n: u8| level(&n.to_string())).collect();
        let words = ["error", "error", "error", "warn", "info", "debug", "trace"].map(level);
        assert_eq!(numbers, words);
        for bad in ["7", "-1", "", "INFO", "4.0"] {
            assert!(bad.parse::<LogLevel>().unwrap_err().contains("0 to 6"), "{bad}");
        }
        for word in words {
            assert_eq!(level(&word.to_string()), word);
        }
    }
}
