//! The settings file. Its values are parsed as flags are, and command line and environment override them.
//! Must never be accepted in part: an unknown key rejects the whole file.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{CommandFactory, Parser};
use serde_json::{Map, Value};
use thiserror::Error;

use crate::controller::{flags::ControllerCommandLine, flags::check::SettingsError};

#[derive(Debug)]
pub struct LoadedSettings {
    /// The command line with everything filled in.
    pub line: ControllerCommandLine,
    /// The file, and its text as it was read.
    pub file: Option<(PathBuf, String)>,
}

#[derive(Debug, Error)]
pub enum LoadError {
    /// The command line cannot be read, or asks for help: clap's own words.
    #[error(transparent)]
    CommandLine(#[from] clap::Error),
    /// The file, or what the settings say together, is refused.
    #[error("error: {0}")]
    Settings(#[from] SettingsError),
}

/// Reads the command line, the environment and the file, and checks what they say together.
/// Errors: names the flag or the key, and its value.
pub fn load(arguments: &[OsString]) -> Result<LoadedSettings, LoadError> {
    let line = ControllerCommandLine::try_parse_from(arguments)?;
    let Some(path) = line.settings.config.clone() else {
        line.settings.check()?;
        return Ok(LoadedSettings { line, file: None });
    };
    let text = read(&path)?;
    let line = with_file(arguments, &path, &text)?;
    Ok(LoadedSettings { line, file: Some((path, text)) })
}

/// Whether the file says something else now. None if it is as it was.
pub(crate) fn reread(arguments: &[OsString], path: &Path, before: &str) -> Option<Result<(), SettingsError>> {
    match read(path) {
        Ok(text) if text == before => None,
        Ok(text) => Some(with_file(arguments, path, &text).map(|_| ())),
        Err(refused) => Some(Err(refused)),
    }
}

fn read(path: &Path) -> Result<String, SettingsError> {
    std::fs::read_to_string(path)
        .map_err(|error| SettingsError(format!("cannot read --config {}: {error}", path.display())))
}

fn with_file(
    arguments: &[OsString],
    path: &Path,
    text: &str,
) -> Result<ControllerCommandLine, SettingsError> {
    let refuse = |why: String| SettingsError(format!("--config {}: {why}", path.display()));
    let said: Option<Map<String, Value>> =
        serde_saphyr::from_str(text).map_err(|error| refuse(format!("it is not a YAML map: {error}")))?;
    let command = ControllerCommandLine::command();
    let bad_line = |error: clap::Error| refuse(error.to_string());
    let given = command.clone().try_get_matches_from(arguments).map_err(bad_line)?;
    let mut all = arguments.to_vec();
    for (key, value) in said.unwrap_or_default() {
        let argument = command
            .get_arguments()
            .find(|argument| spellings(argument).any(|spelling| spelling == key))
            .ok_or_else(|| refuse(format!("there is no setting {key:?}; keys are the names of the flags")))?;
        let Some(flag) = argument.get_long().filter(|_| argument.get_id() != "config") else {
            return Err(refuse(format!("{key:?} cannot be set here")));
        };
        let stronger = matches!(
            given.value_source(argument.get_id().as_str()),
            Some(ValueSource::CommandLine | ValueSource::EnvVariable)
        );
        if !stronger {
            let value = as_text(&value).ok_or_else(|| refuse(format!("{key}: {value} is no value")))?;
            all.push(format!("--{flag}={value}").into());
        }
    }
    let line = ControllerCommandLine::try_parse_from(all).map_err(bad_line)?;
    line.settings.check().map_err(|SettingsError(why)| refuse(why))?;
    Ok(line)
}

fn spellings(argument: &clap::Arg) -> impl Iterator<Item = &str> {
    argument.get_long().into_iter().chain(argument.get_all_aliases().into_iter().flatten())
}

fn as_text(value: &Value) -> Option<String> {
    Some(match value {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().map(as_text).collect::<Option<Vec<_>>>()?.join(","),
        // An object is a selector, written as YAML.
        Value::Bool(_) | Value::Number(_) | Value::Object(_) => value.to_string(),
    })
}
