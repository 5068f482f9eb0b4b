//! `store check`: verify a store, and with `--fix` put it in order.

use crate::cli::store::{CommandError, CommandOutput, Options, networks, open};
use crate::store::VerifyFinding;

pub(super) const OPTIONS: &[&str] = &["--fix"];
pub(super) const HELP: &str = "\
usage: sticky-ipam store check [--fix] [--dir DIR] [--network NAME] [--boot-id-file FILE]

Compares records, indexes and bitmaps under the store's lock and reports what is wrong. Without --fix it
changes nothing.
  --fix   rebuilds indexes and bitmaps from the records, finishes what a process left half done, sets aside
          files that are no records, imports host-local's. Records are never changed or removed, except those
          of containers from before a reboot that are not sticky.
Exit status: 0 nothing is wrong, 1 something is (with --fix: still is), 2 the command was not understood.
A line that starts with 'notice' is worth a look, and is not wrong.
";

pub(super) fn run(options: &Options) -> Result<CommandOutput, CommandError> {
    let mut outcome = CommandOutput::default();
    for network in networks(options, &options.dir)? {
        let store = open(options, &options.dir, &network)?;
        let mut findings = store.verify()?;
        if options.fix {
            report(&mut outcome.stdout, &findings, "found");
            // Also where nothing is wrong: it costs little, and does not depend on the check.
            store.import_in_place()?;
            findings = store.verify()?;
        }
        report(&mut outcome.stdout, &findings, "wrong");
        let wrong = findings.iter().filter(|finding| finding.wrong).count();
        outcome.stdout += &match wrong {
            0 => format!("{network}: in order, {} addresses\n", store.address_files()?.len()),
            1 => format!("{network}: 1 thing is wrong\n"),
            many => format!("{network}: {many} things are wrong\n"),
        };
        if wrong > 0 {
            outcome.status = 1;
        }
    }
    if outcome.status == 1 && !options.fix {
        outcome.stderr = "sticky-ipam store: put it in order with: sticky-ipam store check --fix\n".into();
    }
    Ok(outcome)
}

fn report(text: &mut String, findings: &[VerifyFinding], word: &str) {
    for finding in findings {
        // What is reported as found is reported again as a notice if it stays.
        let word = match word {
            word if finding.wrong => word,
            "found" => continue,
            _ => "notice",
        };
        *text += &format!("{word}: {} {}\n", finding.path.display(), finding.what);
    }
}
