//! The options of the store commands. A few flags of one tool: no parser is worth its size in the plugin.

use std::ffi::OsString;
use std::path::PathBuf;

use crate::cli::store::CommandError;
use crate::cni::config::{DEFAULT_DATA_DIR, sticky};
use crate::names::NetworkName;

#[derive(Debug, Default)]
pub(super) struct Options {
    pub(super) dir: PathBuf,
    pub(super) network: Option<NetworkName>,
    pub(super) boot_id_file: PathBuf,
    pub(super) from: Option<PathBuf>,
    pub(super) dry_run: bool,
    pub(super) fix: bool,
    pub(super) json: bool,
    pub(super) help: bool,
}

const EVERYWHERE: [&str; 5] = ["--dir", "--network", "--boot-id-file", "--help", "-h"];

impl Options {
    /// Reads the options; those that are neither everywhere nor in `own` are refused.
    pub(super) fn parse(arguments: &[OsString], own: &[&str]) -> Result<Self, CommandError> {
        let usage = CommandError::Usage;
        let mut options = Self {
            dir: PathBuf::from(DEFAULT_DATA_DIR),
            boot_id_file: PathBuf::from(sticky::DEFAULT_BOOT_ID_FILE),
            ..Self::default()
        };
        let mut rest = arguments.iter();
        while let Some(argument) = rest.next() {
            let text = argument.to_string_lossy();
            let (name, attached) = match text.split_once('=') {
                Some((name, value)) if name.starts_with("--") => (name, Some(OsString::from(value))),
                _ => (text.as_ref(), None),
            };
            if !EVERYWHERE.contains(&name) && !own.contains(&name) {
                let all = EVERYWHERE[..4].iter().chain(own).copied().collect::<Vec<_>>().join(", ");
                return Err(usage(format!("'{text}' is not understood; there are: {all}")));
            }
            let mut value = || {
                let value = attached.clone().or_else(|| rest.next().cloned());
                value.filter(|value| !value.is_empty()).ok_or_else(|| usage(format!("{name} needs a value")))
            };
            match name {
                "--dir" => options.dir = value()?.into(),
                "--from" => options.from = Some(value()?.into()),
                "--boot-id-file" => options.boot_id_file = value()?.into(),
                "--network" => {
                    let name = value()?;
                    let network = NetworkName::new(&name.to_string_lossy());
                    options.network = Some(network.map_err(|why| usage(format!("--network: {why}")))?);
                }
                "-o" => match value()?.to_str() {
                    Some("json") => options.json = true,
                    Some("table") => options.json = false,
                    _ => return Err(usage("-o takes json or table".into())),
                },
                _ if attached.is_some() => return Err(usage(format!("{name} takes no value"))),
                "--dry-run" => options.dry_run = true,
                "--fix" => options.fix = true,
                _ => options.help = true,
            }
        }
        Ok(options)
    }
}
