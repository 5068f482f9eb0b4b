//! The settings file. Its values are parsed as flags are, and command line and environment override them.
//! Must never be accepted in part: an unknown key rejects the whole file.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches};
use serde_json::{Map, Value};

use crate::controller::flags::ControllerCommandLine;
use crate::controller::flags::check::SettingsError;

/// Settings, and the text of the file that they come from.
#[derive(Debug)]
pub struct LoadedSettings {
    /// The command line with everything filled in.
    pub line: ControllerCommandLine,
    /// The file, and its text as it was read.
    pub file: Option<(PathBuf, String)>,
}

/// Why there are no settings.
#[derive(Debug)]
pub enum LoadError {
    /// The command line cannot be read, or asks for help: clap's own words.
    CommandLine(clap::Error),
    /// The file, or what the settings say together, is refused.
    Settings(SettingsError),
}

/// Reads the command line, the environment and the file, and checks what they say together.
/// Errors: names the flag or the key, and its value.
pub fn load(arguments: &[OsString]) -> Result<LoadedSettings, LoadError> {
    let matches =
        ControllerCommandLine::command().try_get_matches_from(arguments).map_err(LoadError::CommandLine)?;
    let line = ControllerCommandLine::from_arg_matches(&matches).map_err(LoadError::CommandLine)?;
    let Some(path) = line.settings.config.clone() else {
        line.settings.check().map_err(LoadError::Settings)?;
        return Ok(LoadedSettings { line, file: None });
    };
    let text = read(&path).map_err(LoadError::Settings)?;
    let line = with_file(arguments, &path, &text).map_err(LoadError::Settings)?;
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
    let given = command.clone().try_get_matches_from(arguments).map_err(|error| refuse(error.to_string()))?;
    let mut all: Vec<OsString> = arguments.to_vec();
    for (key, value) in said.unwrap_or_default() {
        let argument = command
            .get_arguments()
            .find(|argument| spellings(argument).any(|spelling| spelling == key))
            .ok_or_else(|| refuse(format!("there is no setting {key:?}; keys are the names of the flags")))?;
        if argument.get_id() == "config" || argument.get_long().is_none() {
            return Err(refuse(format!("{key:?} cannot be set here")));
        }
        let stronger = matches!(
            given.value_source(argument.get_id().as_str()),
            Some(ValueSource::CommandLine | ValueSource::EnvVariable)
        );
        if !stronger {
            let value = as_text(&value).ok_or_else(|| refuse(format!("{key}: {value} is no value")))?;
            all.push(format!("--{}={value}", argument.get_long().unwrap_or_default()).into());
        }
    }
    let matches = command.try_get_matches_from(all).map_err(|error| refuse(error.to_string()))?;
    let line =
        ControllerCommandLine::from_arg_matches(&matches).map_err(|error| refuse(error.to_string()))?;
    line.settings.check().map_err(|SettingsError(why)| refuse(why))?;
    Ok(line)
}

/// Every name of an argument.
fn spellings(argument: &clap::Arg) -> impl Iterator<Item = &str> {
    argument.get_long().into_iter().chain(argument.get_all_aliases().into_iter().flatten())
}

fn as_text(value: &Value) -> Option<String> {
    Some(match value {
        Value::String(text) => text.clone(),
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::Array(parts) => parts.iter().map(as_text).collect::<Option<Vec<_>>>()?.join(","),
        // A selector, written as YAML.
        Value::Object(_) => value.to_string(),
        Value::Null => String::new(),
    })
}
