//! Waiting inside ADD for the pod that had the address before: with a grace period of nought the new pod's ADD
//! comes seconds before the old one's DEL, and one address must not live in two namespaces.

use std::path::Path;
use std::time::{Duration, Instant};

use crate::cni::{CniError, Request};
use crate::store::{NodeTime, Record};

/// Between two looks at the store.
const PAUSE: Duration = Duration::from_millis(25);

/// The patience with an old pod.
pub(crate) struct OldPodWait {
    started: Instant,
    patience: Duration,
}

impl OldPodWait {
    pub(crate) fn new(patience: Duration) -> Self {
        Self { started: Instant::now(), patience }
    }

    /// Who is in the way: another pod of the same name (another uid) whose namespace is still there. A sandbox made
    /// anew for the same pod takes over at once: its old one is dead.
    pub(crate) fn in_the_way(request: &Request, record: &Record, now: &NodeTime) -> Option<String> {
        let old = record.pod.as_ref().and_then(|pod| pod.uid());
        let new = request.pod.as_ref().and_then(|pod| pod.uid());
        let other_pod = matches!((old, new), (Some(old), Some(new)) if old != new);
        let alive = record
            .netns
            .as_ref()
            .is_some_and(|netns| Some(netns) != request.netns.as_ref() && may_be_there(netns));
        (record.is_attached(now) && other_pod && alive).then(|| record.holder())
    }

    /// Waits a little.
    ///
    /// # Errors
    /// Patience has run out; the runtime tries again.
    pub(crate) fn wait_for(&mut self, holder: &str) -> Result<(), CniError> {
        if self.started.elapsed() >= self.patience {
            return Err(CniError::try_again(format!(
                "the address is still with the old {holder} after {:?}; it is free when that container is deleted",
                self.patience
            )));
        }
        std::thread::sleep(PAUSE.min(self.patience.saturating_sub(self.started.elapsed())));
        Ok(())
    }
}

/// Only what is surely gone is gone: a path that must not be looked at may be a pod's that runs.
pub(crate) fn may_be_there(netns: &Path) -> bool {
    netns.try_exists().unwrap_or(true)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_that_cannot_be_looked_at_counts_as_there() {
        let dir = tempfile::tempdir().unwrap();
        assert!(may_be_there(dir.path()));
        assert!(!may_be_there(&dir.path().join("gone")));
        // Root is refused by no permission, but a link that leads to itself cannot be followed by anybody.
        let circle = dir.path().join("circle");
        std::os::unix::fs::symlink(&circle, &circle).unwrap();
        assert!(may_be_there(&circle));
    }
}
