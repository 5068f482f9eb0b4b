//! The log of a process, on standard error: levels by name or by number, lines for people or for programs.

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::fmt;
use tracing_subscriber::layer::SubscriberExt;

/// The lowest level that is logged. Also by number: 0 to 2 are errors, 3 warnings, 4 actions, 5 decisions,
/// 6 everything.
pub(crate) fn level(text: &str) -> Result<LevelFilter, String> {
    Ok(match text {
        "0" | "1" | "2" | "error" => LevelFilter::ERROR,
        "3" | "warn" => LevelFilter::WARN,
        "4" | "info" => LevelFilter::INFO,
        "5" | "debug" => LevelFilter::DEBUG,
        "6" | "trace" => LevelFilter::TRACE,
        _ => return Err("write error, warn, info, debug, trace, or a number from 0 to 6".to_owned()),
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LogFormat {
    /// For people
    #[default]
    Text,
    /// One JSON object per line
    Json,
}

/// Starts the log of this process. A second call changes nothing.
pub fn start(level: LevelFilter, format: LogFormat) {
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
        let parsed = |text: &str| level(text).unwrap();
        let numbers: Vec<LevelFilter> = (0..=6).map(|n: u8| parsed(&n.to_string())).collect();
        let words = ["error", "error", "error", "warn", "info", "debug", "trace"].map(parsed);
        assert_eq!(numbers, words);
        for bad in ["7", "-1", "", "INFO", "4.0"] {
            assert!(level(bad).unwrap_err().contains("0 to 6"), "{bad}");
        }
        for word in words {
            assert_eq!(parsed(&word.to_string()), word);
        }
    }
}
