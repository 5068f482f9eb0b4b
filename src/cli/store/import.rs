//! `store import-host-local`: import host-local's addresses.

use crate::cli::store::{CommandError, CommandOutput, Options, networks, open};
use crate::store::{ImportAction, ImportStep};

pub(super) const OPTIONS: &[&str] = &["--from", "--dry-run"];
pub(super) const HELP: &str = "\
usage: sticky-ipam store import-host-local [--dry-run] [--from DIR] [--dir DIR] [--network NAME]
                                           [--boot-id-file FILE]

Imports the addresses that host-local gave out, while their pods run.
Without --from: in place. --dir is the data directory that host-local uses and sticky-ipam will use. The first
  verb does the same; this command shows it beforehand.
With --from: copies the records of that data directory into --dir, and leaves it as it is. host-local must no
  longer give out addresses from there: change the conflist first.
  --dry-run   reports what would happen and changes nothing
An address that another container has in --dir is a conflict: it is reported, and nothing of that network is
copied. host-local does not know pods, so an address that it gave out is released with its container. Later
ones are kept.
Exit status: 0 done (or could be), 1 conflict or failure, 2 the command was not understood.
";

pub(super) fn run(options: &Options) -> Result<CommandOutput, CommandError> {
    let mut outcome = CommandOutput::default();
    let source = options.from.as_deref().unwrap_or(&options.dir);
    for network in networks(options, source)? {
        let store = open(options, &options.dir, &network)?;
        let steps = match &options.from {
            None => {
                let steps = store.plan_import_in_place()?;
                if !options.dry_run {
                    store.import_in_place()?;
                }
                steps
            }
            Some(from) => {
                let from = open(options, from, &network)?;
                if options.dry_run { store.plan_import_from(&from)? } else { store.import_from(&from)? }
            }
        };
        for step in &steps {
            outcome.stdout += &format!("{network}: {}\n", sentence(step, options));
        }
        let refused = steps.iter().any(|step| matches!(step.fate, ImportAction::Conflict(_)));
        let count = steps.iter().filter(|step| matches!(step.fate, ImportAction::Imported(_))).count();
        outcome.stdout += &match (refused, options.dry_run) {
            (true, _) => format!("{network}: refused, nothing is changed\n"),
            (_, true) => format!("{network}: {count} addresses would be imported, nothing is changed\n"),
            _ => format!("{network}: {count} addresses imported\n"),
        };
        if refused {
            outcome.status = 1;
        }
    }
    Ok(outcome)
}

fn sentence(step: &ImportStep, options: &Options) -> String {
    let address = step.address;
    let verb = |would: &'static str, done: &'static str| if options.dry_run { would } else { done };
    match &step.fate {
        ImportAction::Imported(attachment) => {
            format!("{address} {} from {attachment}", verb("would be imported", "imported"))
        }
        ImportAction::Ours(attachment) => format!("{address} is here already, with {attachment}"),
        ImportAction::NoRecord if options.from.is_some() => format!("{address} is no record, ignored"),
        ImportAction::NoRecord => {
            format!("{address} is no record, {}", verb("would be set aside", "set aside"))
        }
        ImportAction::Conflict(why) => format!("{address} conflict: {why}"),
    }
}
