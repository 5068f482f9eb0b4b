//! `store import-host-local`: take over host-local's addresses.

use crate::cli::store::{CommandError, CommandOutput, Options, networks, open};
use crate::store::{ImportAction, ImportStep};

pub(super) const OPTIONS: &[&str] = &["--from", "--dry-run"];
pub(super) const HELP: &str = "\
usage: sticky-ipam store import-host-local [--dry-run] [--from DIR] [--dir DIR] [--network NAME] [--boot-id-file FILE]

Takes over the addresses that host-local gave out, while their pods run.
Without --from: in place. --dir is the data directory that host-local uses and sticky-ipam will use. This happens by
  itself with the first verb, too; done here, it can be looked at before.
With --from: copies the records of that data directory into --dir, and leaves it as it is. host-local must give out
  nothing from there any more: change the conflist first.
  --dry-run   tells what would happen and changes nothing
An address that another container has in --dir is a conflict: it is named, and nothing of that network is copied.
host-local does not know pods, so what it gave out goes back with its container; from then on addresses are kept.
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
                    store.take_over()?;
                }
                steps
            }
            Some(from) => {
                let from = open(options, from, &network)?;
                if options.dry_run { store.plan_import_from(&from)? } else { store.copy(&from)? }
            }
        };
        for step in &steps {
            outcome.stdout += &format!("{network}: {}\n", sentence(step, options));
        }
        let refused = steps.iter().any(|step| matches!(step.fate, ImportAction::Conflict(_)));
        let count = steps.iter().filter(|step| matches!(step.fate, ImportAction::TakenOver(_))).count();
        outcome.stdout += &match (refused, options.dry_run) {
            (true, _) => format!("{network}: refused, nothing is changed\n"),
            (false, true) => {
                format!("{network}: {count} addresses would be taken over, nothing is changed\n")
            }
            (false, false) => format!("{network}: {count} addresses taken over\n"),
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
        ImportAction::TakenOver(attachment) => {
            format!("{address} {} from {attachment}", verb("would be taken over", "taken over"))
        }
        ImportAction::Ours(attachment) => format!("{address} is here already, with {attachment}"),
        ImportAction::NoRecord if options.from.is_some() => format!("{address} is no record, passed over"),
        ImportAction::NoRecord => {
            format!("{address} is no record, {}", verb("would be set aside", "set aside"))
        }
        ImportAction::Conflict(why) => format!("{address} conflict: {why}"),
    }
}
