//! `store list`: who has which address.

use serde::Serialize;

use crate::cli::store::{CommandError, CommandOutput, Options, networks, open};
use crate::names::NetworkName;
use crate::store::{AddressFile, NodeTime, RealDisk, Record, RecordState, Store};

pub(super) const OPTIONS: &[&str] = &["-o"];
pub(super) const HELP: &str = "\
usage: sticky-ipam store list [--dir DIR] [--network NAME] [-o json|table] [--boot-id-file FILE]

Shows every address of the store, or of one network, and changes nothing.
STATE is one of
  attached     a container has it
  kept         it is kept for its pod
  reserved     it is reserved for a StickyIP and not attached to a container of this node
  superseded   its StickyIP has another address by now, but may still claim this one
  unowned      an unowned entry of the CiliumNode's pool: Cilium may give it to any pod
  expired      its retention is over: released if an address is needed, or by the next GC
  stale        its container is from before a reboot: released by the next verb
  host-local   host-local's record: imported by the next verb
  unreadable   no record: set aside by the next verb
RETENTION is a time, Forever, or no: released when the container ends.
CONTAINER is cut to 13 characters; -o json has all of it.
";

/// The width that distinguishes containers and leaves room for the rest.
const SHORT_ID: usize = 13;
const HEAD: [&str; 8] =
    ["NETWORK", "ADDRESS", "STATE", "POD", "CONTAINER", "INTERFACE", "SINCE", "RETENTION"];

#[derive(Serialize)]
struct Row {
    network: String,
    address: String,
    state: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pod: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    uid: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    container: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    interface: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    since: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retention: Option<String>,
}

pub(super) fn run(options: &Options) -> Result<CommandOutput, CommandError> {
    let mut rows = Vec::new();
    for network in networks(options, &options.dir)? {
        let store = open(options, &options.dir, &network)?;
        let first_opened_at = store.first_opened().unwrap_or_else(|| store.now().clone());
        rows.extend(store.address_files()?.iter().map(|look| row(&store, &network, look, &first_opened_at)));
    }
    let stdout = if options.json { serde_json::to_string_pretty(&rows)? + "\n" } else { table(&rows) };
    Ok(CommandOutput::printed(stdout))
}

fn row(
    store: &Store<RealDisk>,
    network: &NetworkName,
    look: &AddressFile,
    first_opened_at: &NodeTime,
) -> Row {
    let record = look.record.as_ref();
    let state = match record {
        None => "unreadable",
        Some(_) if look.is_host_local => "host-local",
        Some(record) => state(record, store.now(), first_opened_at),
    };
    // Of when host-local wrote its record nothing is known.
    let ours = record.filter(|_| !look.is_host_local);
    Row {
        network: network.to_string(),
        address: look.address.to_string(),
        state,
        pod: record.and_then(|record| record.pod.as_ref()).map(ToString::to_string),
        uid: record.and_then(|record| record.pod.as_ref()?.uid().map(str::to_owned)),
        container: record.map(|record| record.attachment.container.to_string()),
        interface: record.map(|record| record.attachment.interface.to_string()),
        since: ours.map(|record| record.since.to_rfc3339()),
        retention: ours.map(|record| match record.retention {
            None => "no".to_owned(),
            Some(it) => it.time().map_or_else(|| "Forever".to_owned(), |time| written(time.as_secs())),
        }),
    }
}

fn state(record: &Record, now: &NodeTime, first_opened_at: &NodeTime) -> &'static str {
    match record.state {
        RecordState::Superseded => "superseded",
        RecordState::Unowned => "unowned",
        RecordState::Attached if record.is_attached(now) => "attached",
        RecordState::Attached if record.retention.is_none() => "stale",
        _ if record.has_expired(now, first_opened_at) => "expired",
        _ if record.binding.is_some() && record.attachment_id().is_none() => "reserved",
        _ => "kept",
    }
}

/// Seconds, as they are written in the configuration.
fn written(seconds: u64) -> String {
    let parts = [(seconds / 3600, 'h'), (seconds / 60 % 60, 'm'), (seconds % 60, 's')];
    let text: String = parts.iter().filter(|(n, _)| *n > 0).map(|(n, unit)| format!("{n}{unit}")).collect();
    if text.is_empty() { "0s".to_owned() } else { text }
}

fn table(rows: &[Row]) -> String {
    fn dash(text: &Option<String>) -> &str {
        text.as_deref().unwrap_or("-")
    }
    let mut lines = vec![HEAD];
    lines.extend(rows.iter().map(|row| {
        let container = dash(&row.container);
        let container = container.get(..SHORT_ID).unwrap_or(container);
        let (pod, interface) = (dash(&row.pod), dash(&row.interface));
        let (since, retention) = (dash(&row.since), dash(&row.retention));
        [row.network.as_str(), &row.address, row.state, pod, container, interface, since, retention]
    }));
    let width_of = |column: usize| lines.iter().map(|line| line[column].chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..HEAD.len()).map(width_of).collect();
    let mut text = String::new();
    for line in &lines {
        let cells: Vec<String> =
            line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        text += cells.join("  ").trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::written;

    #[test]
    fn a_time_is_written_as_it_is_configured() {
        assert_eq!(written(0), "0s");
        assert_eq!(written(5400), "1h30m");
        assert_eq!(written(259_200), "72h");
        assert_eq!(written(61), "1m1s");
    }
}
