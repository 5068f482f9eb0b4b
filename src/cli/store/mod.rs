//! `sticky-ipam store`: look at a node's store, verify it, put it in order, import host-local's.

mod check;
mod import;
mod list;
mod options;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use thiserror::Error;

use crate::cli::CommandOutput;
use crate::names::NetworkName;
use crate::store::{NodeTime, RealDisk, Store, StoreError};
use options::Options;

/// How long a command waits for a store's lock, as the plugin does by default.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

pub const HELP: &str = "\
usage: sticky-ipam store COMMAND [OPTION…]

Commands:
  list                show which container or pod has which address
  check               verify the store; with --fix put it in order
  import-host-local   import host-local's addresses while its pods run

Options of all commands:
  --dir DIR           the data directory (ipam.dataDir; default /var/lib/cni/networks)
  --network NAME      only this network (default: all below the data directory)
  --boot-id-file FILE as sticky.bootIDFile (default /proc/sys/kernel/random/boot_id)
  -h, --help          help, also of each command
";

#[derive(Debug, Error)]
enum CommandError {
    #[error("{0}")]
    Usage(String),
    #[error("there is no directory {}; name the data directory with {option}", path.display())]
    NoDirectory { path: PathBuf, option: &'static str },
    #[error("there is no network {network} in {}; there are: {}", dir.display(), names(.known))]
    NoNetwork { network: NetworkName, dir: PathBuf, known: Vec<NetworkName> },
    #[error("cannot list {}: {source}; {}", path.display(), cure_of_listing(source, option))]
    List { path: PathBuf, source: io::Error, option: &'static str },
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("cannot write the list as JSON: {0}")]
    Json(#[from] serde_json::Error),
}

fn cure_of_listing(source: &io::Error, option: &str) -> String {
    match source.kind() {
        io::ErrorKind::NotADirectory => format!("name the data directory with {option}"),
        io::ErrorKind::PermissionDenied => "run this as root".to_owned(),
        _ => "look after its disk and run this again".to_owned(),
    }
}

fn names(networks: &[NetworkName]) -> String {
    if networks.is_empty() {
        return "none".to_owned();
    }
    networks.iter().map(NetworkName::as_str).collect::<Vec<_>>().join(", ")
}

pub fn run(arguments: &[OsString]) -> CommandOutput {
    run_command(arguments).unwrap_or_else(|error| {
        let (status, hint) = match error {
            CommandError::Usage(_) => (2, " (sticky-ipam store --help)"),
            _ => (1, ""),
        };
        let stderr = format!("sticky-ipam store: {error}{hint}\n");
        CommandOutput { stderr, status, ..CommandOutput::default() }
    })
}

/// Runs a command, or only prints its help. What the store logs meanwhile goes to standard error.
fn run_command(arguments: &[OsString]) -> Result<CommandOutput, CommandError> {
    type Command = fn(&Options) -> Result<CommandOutput, CommandError>;
    let usage = |why: String| Err(CommandError::Usage(why));
    let name = arguments.first().map(|argument| argument.to_string_lossy());
    let (own, help, command): (_, _, Command) = match name.as_deref() {
        Some("list") => (list::OPTIONS, list::HELP, list::run),
        Some("check") => (check::OPTIONS, check::HELP, check::run),
        Some("import-host-local") => (import::OPTIONS, import::HELP, import::run),
        Some("-h" | "--help") => return Ok(CommandOutput::printed(HELP)),
        Some(other) => {
            return usage(format!(
                "there is no command '{other}'; there are: list, check, import-host-local"
            ));
        }
        None => return usage("which command? There are: list, check, import-host-local".into()),
    };
    let options = Options::parse(&arguments[1..], own)?;
    if options.help {
        return Ok(CommandOutput::printed(help));
    }
    let log = tracing_subscriber::fmt().with_target(false).with_ansi(false).with_writer(io::stderr);
    tracing::subscriber::with_default(log.finish(), || command(&options))
}

fn open(options: &Options, dir: &Path, network: &NetworkName) -> Result<Store<RealDisk>, CommandError> {
    let now = NodeTime::now(&options.boot_id_file)?;
    Ok(Store::new(RealDisk, dir, network, now, LOCK_TIMEOUT))
}

/// The networks asked for: the one named, or all below `dir`.
fn networks(options: &Options, dir: &Path) -> Result<Vec<NetworkName>, CommandError> {
    let option = if options.from.as_deref() == Some(dir) { "--from" } else { "--dir" };
    let failed = |source| CommandError::List { path: dir.to_owned(), source, option };
    let mut found = Vec::new();
    let entries = fs::read_dir(dir).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => CommandError::NoDirectory { path: dir.to_owned(), option },
        _ => failed(error),
    })?;
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if entry.path().is_dir()
            && let Some(name) = entry.file_name().to_str().and_then(|name| NetworkName::new(name).ok())
        {
            found.push(name);
        }
    }
    found.sort();
    match &options.network {
        None => Ok(found),
        Some(network) if found.contains(network) => Ok(vec![network.clone()]),
        Some(network) => {
            Err(CommandError::NoNetwork { network: network.clone(), dir: dir.to_owned(), known: found })
        }
    }
}
