//! Other programs in the folder of conflists: Cilium, which renames what is not its own, and files that sort
//! before.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// What to do about a Cilium that wants the folder for itself.
pub(super) const EXCLUSIVE: &str = "Cilium renames it to *.cilium_bak again and again; set \
    cni.exclusive=false in Cilium's values (--cni-exclusive=false), or let Cilium write it itself with \
    --read-cni-conf (see docs/agent.md)";

/// How often the conflist is restored within [`WINDOW`]. A Cilium that starts may rename it once or twice;
/// beyond that both would only alternate, and the runtime would load one after the other.
const PATIENCE: usize = 3;
const WINDOW: Duration = Duration::from_secs(600);

/// The name that Cilium gives to others' conflists.
pub(super) fn renamed(conflist: &Path) -> PathBuf {
    let mut name = conflist.as_os_str().to_owned();
    name.push(".cilium_bak");
    PathBuf::from(name)
}

#[derive(Debug, Default)]
pub(super) struct RestoreLimit(Vec<SystemTime>);

impl RestoreLimit {
    /// Whether it may be restored once more now; if so, that counts.
    pub(super) fn may_restore(&mut self, now: SystemTime) -> bool {
        // A clock that was set back must not forbid it for long: times in the future do not count.
        self.0.retain(|then| now.duration_since(*then).is_ok_and(|age| age < WINDOW));
        let may = self.0.len() < PATIENCE;
        if may {
            self.0.push(now);
        }
        may
    }
}

/// The file that runtimes read instead of `conflist`, if any.
pub(super) fn sorts_before(conflist: &Path) -> Option<String> {
    let own = conflist.file_name()?.to_str()?;
    others(conflist).into_iter().find(|name| name.as_str() < own)
}

/// The files beside `conflist` that runtimes read, in the order in which they do.
pub(super) fn others(conflist: &Path) -> BTreeSet<String> {
    let folder = conflist.parent().and_then(|folder| fs::read_dir(folder).ok());
    let names =
        folder.into_iter().flatten().flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let is_read = |name: &String| {
        let ending = Path::new(name).extension().and_then(|ending| ending.to_str());
        matches!(ending, Some("conf" | "conflist" | "json"))
    };
    names.filter(|name| is_read(name) && conflist.file_name() != Some(name.as_ref())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_restored_three_times_and_then_only_after_a_while() {
        let mut restore_limit = RestoreLimit::default();
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(
            [0, 10, 20, 30, 590].map(|s| restore_limit.may_restore(at(s))),
            [true, true, true, false, false]
        );
        assert!(restore_limit.may_restore(at(601)), "the first does not count any more");
        assert!(!restore_limit.may_restore(at(602)));
        assert!(restore_limit.may_restore(start - WINDOW), "a clock that was set back forbids nothing");
    }

    #[test]
    fn only_files_that_a_runtime_reads_can_sort_before_ours() {
        let dir = tempfile::tempdir().unwrap();
        let ours = dir.path().join("03-sticky-ipam.conflist");
        for name in
            ["00-note.txt", "01-x.conflist.cilium_bak", "03-sticky-ipam.conflist", "05-cilium.conflist"]
        {
            fs::write(dir.path().join(name), "").unwrap();
        }
        assert_eq!(sorts_before(&ours), None);
        fs::write(dir.path().join("02-flannel.conf"), "").unwrap();
        fs::write(dir.path().join("01-multus.json"), "").unwrap();
        assert_eq!(sorts_before(&ours).as_deref(), Some("01-multus.json"));
    }
}
