//! Waiting inside ADD for the pod that had the address before: with a grace period of zero the new pod's ADD
//! comes seconds before the old one's DEL, and one address must not be in two network namespaces.

use std::time::{Duration, Instant};

use crate::cni::{CniError, Request};
use crate::node::addresses::may_exist;
use crate::store::{NodeTime, Record};

/// Between two reads of the store.
const PAUSE: Duration = Duration::from_millis(25);

pub(crate) struct OldPodWait {
    started: Instant,
    patience: Duration,
}

impl OldPodWait {
    pub(crate) fn new(patience: Duration) -> Self {
        Self { started: Instant::now(), patience }
    }

    /// The pod that still has the address: another one of the same name (another uid) whose network namespace
    /// exists. A new sandbox of the same pod takes over at once: its old one is dead.
    pub(crate) fn old_pod(request: &Request, record: &Record, now: &NodeTime) -> Option<String> {
        let old = record.pod.as_ref().and_then(|pod| pod.uid());
        let new = request.pod.as_ref().and_then(|pod| pod.uid());
        let other_pod = matches!((old, new), (Some(old), Some(new)) if old != new);
        let netns = record.netns.as_ref().filter(|netns| Some(*netns) != request.netns.as_ref());
        let alive = netns.is_some_and(|netns| may_exist(netns));
        (record.is_attached(now) && other_pod && alive).then(|| record.holder())
    }

    /// Waits a little.
    /// Errors: patience has run out; the runtime tries again.
    pub(crate) fn wait_for(&mut self, holder: &str) -> Result<(), CniError> {
        if self.started.elapsed() >= self.patience {
            let waited = self.patience.as_secs_f64();
            return Err(CniError::try_again(format!(
                "the old {holder} still has the address after {waited} s; it is free when that container is \
                 deleted"
            )));
        }
        std::thread::sleep(PAUSE.min(self.patience.saturating_sub(self.started.elapsed())));
        Ok(())
    }
}
