//! The log of a process: levels by word or by number, lines for people or for machines, to standard error.

use std::str::FromStr;

use tracing_subscriber::filter::LevelFilter;

/// Which lines are written. Also by number: 0 and 1 are what ends a process, 2 errors, 3 warnings, 4 what is done, 5 what is
/// looked at, 6 everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogLevel {
    /// What failed.
    Error,
    /// And what is odd.
    Warn,
    /// And what was done.
    #[default]
    Info,
    /// And what was looked at.
    Debug,
    /// Everything.
    Trace,
}

impl FromStr for LogLevel {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Ok(match text {
            // A process that panics or ends says so as an error.
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

/// How lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object a line
    Json,
}

/// Starts the log of this process. A second call changes nothing.
pub fn start(level: LogLevel, format: LogFormat) {
    let lines = tracing_subscriber::fmt()
        .with_max_level(LevelFilter::from(level))
        .with_writer(std::io::stderr)
        .with_ansi(false);
    // Fails only where a log was started before, as in tests that share a process.
    let _ = match format {
        LogFormat::Text => tracing::subscriber::set_global_default(lines.with_target(false).finish()),
        LogFormat::Json => tracing::subscriber::set_global_default(lines.json().flatten_event(true).finish()),
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
