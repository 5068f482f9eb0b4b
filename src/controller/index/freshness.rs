//! Whether the cache of a kind may be stale. The caller passes the time in, as the time since the start.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use crate::controller::index::Kind;
use crate::runtime::{cache::CacheEvent, client::WATCH_START};

/// After this long without a failure the first pause is the shortest again, as in kube's own watches.
const BACKOFF_RESET: Duration = Duration::from_secs(120);

#[derive(Debug, Default)]
pub(crate) struct Freshness {
    failed: BTreeMap<Kind, WatchFailure>,
    being_listed: BTreeSet<Kind>,
}

#[derive(Debug, Clone, Copy)]
struct WatchFailure {
    /// How many times in a row.
    times: u32,
    last: Duration,
}

impl WatchFailure {
    /// How long after the last failure the next one is reported at the latest, if there is another: a watch
    /// that works reports nothing. By the pauses of kube's own watches (0.8 s doubled up to 30 s, and by
    /// chance up to twice that), and the start of a watch.
    fn stale_for(self) -> Duration {
        let pause = Duration::from_millis(800) * 2u32.saturating_pow(self.times.saturating_sub(1).min(10));
        pause.min(Duration::from_secs(30)) * 2 + WATCH_START
    }
}

impl Freshness {
    /// The watch of a kind broke off: what is known of it may be out of date.
    pub(crate) fn mark_stale(&mut self, kind: Kind, now: Duration) {
        let before = self.failed.get(&kind).filter(|before| now.saturating_sub(before.last) < BACKOFF_RESET);
        let times = before.map_or(1, |before| before.times.saturating_add(1));
        self.failed.insert(kind, WatchFailure { times, last: now });
    }

    /// A watch reports something, so it works; a list counts when it is complete.
    pub(crate) fn observe_event<T>(&mut self, kind: Kind, event: &CacheEvent<T>) {
        match event {
            // The rest of the list may never come.
            CacheEvent::ListStarted => drop(self.being_listed.insert(kind)),
            CacheEvent::Listed(_) => {}
            CacheEvent::ListComplete => {
                self.being_listed.remove(&kind);
                self.failed.remove(&kind);
            }
            CacheEvent::Applied(_) | CacheEvent::Deleted(_) | CacheEvent::Unreadable(_) => {
                self.failed.remove(&kind);
            }
        }
    }

    /// Whether what is known of a kind may be out of date: it is being listed, or its watch broke off and has
    /// reported nothing since, and another failure could still be on its way.
    pub(crate) fn is_stale(&self, kind: Kind, now: Duration) -> bool {
        self.being_listed.contains(&kind)
            || self.failed.get(&kind).is_some_and(|failure| now < failure.last + failure.stale_for())
    }
}
