//! What the duties share: the index, their inboxes, the time, the writer, events, settings and metrics.
//!
//! A duty holds the index's lock while it decides, and writes after it has released it. Must never be held
//! locked over an await.

use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::{sync::Notify, time::Instant};

use crate::cluster::events::NewEvent;
use crate::controller::events::EventRecorder;
use crate::controller::flags::ControllerSettings;
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::metrics::ControllerMetrics;
use crate::controller::queue::{Inbox, Key};
use crate::controller::writer::Writer;
use crate::policy::selection::facts::TimePoint;
use crate::runtime::{cache::CacheEvent, http::Readiness, locked};

/// For how long urgent work may hold up the rest at most: an API server that hangs keeps a duty busy, too.
const MAX_URGENT_WORK: Duration = Duration::from_secs(10);

pub struct Context {
    index: Mutex<ClusterIndex>,
    inboxes: Mutex<Vec<Arc<Inbox>>>,
    pub writer: Writer,
    pub settings: ControllerSettings,
    pub metrics: Arc<ControllerMetrics>,
    pub ready: Readiness,
    pub(crate) event_recorder: EventRecorder,
    listed: Notify,
    /// How many rounds decide about addresses right now, and since when there is one.
    urgent_work: Mutex<(usize, Instant)>,
    /// How many duties have yet to finish their first round, and since when they run.
    pending_first_rounds: Mutex<Option<(usize, Instant)>>,
    pub started: Instant,
    started_at: i64,
}

impl Context {
    pub fn new(
        writer: Writer,
        settings: ControllerSettings,
        metrics: Arc<ControllerMetrics>,
        ready: Readiness,
    ) -> Self {
        Self {
            index: Mutex::default(),
            inboxes: Mutex::default(),
            writer,
            settings,
            metrics,
            ready,
            event_recorder: EventRecorder::default(),
            listed: Notify::new(),
            urgent_work: Mutex::new((0, Instant::now())),
            pending_first_rounds: Mutex::default(),
            started: Instant::now(),
            started_at: Timestamp::now().as_second(),
        }
    }

    /// Never over an await.
    pub fn index(&self) -> MutexGuard<'_, ClusterIndex> {
        locked(&self.index)
    }

    /// The time: the wall clock at the start, and from then on a clock that cannot be set.
    pub fn now(&self) -> TimePoint {
        let since = i64::try_from(self.started.elapsed().as_secs()).unwrap_or(i64::MAX);
        TimePoint(self.started_at.saturating_add(since))
    }

    /// The time since the start, for queues.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Takes a watch's event into the index, and wakes the duties that it concerns.
    pub fn apply<T>(
        &self,
        kind: Kind,
        event: CacheEvent<T>,
        apply: impl FnOnce(&mut ClusterIndex, CacheEvent<T>) -> Vec<String>,
    ) {
        let changed = {
            let mut index = self.index();
            index.freshness.observe_event(kind, &event);
            apply(&mut index, event)
        };
        self.enqueue(kind, &changed);
        self.listed.notify_waiters();
    }

    pub async fn wait_until_listed(&self) {
        self.ready.no("not every kind has been listed yet; see the log");
        loop {
            let changed = self.listed.notified();
            if self.index().missing().is_empty() {
                self.ready.yes();
                return;
            }
            changed.await;
        }
    }

    /// Pods are being adopted or addresses released, until the answer is dropped: everything else can wait.
    pub(crate) fn start_urgent_work(&self) -> UrgentWork<'_> {
        let mut urgent_work = locked(&self.urgent_work);
        if urgent_work.0 == 0 {
            urgent_work.1 = Instant::now();
        }
        urgent_work.0 += 1;
        UrgentWork(self)
    }

    /// Whether what can wait should wait.
    pub fn has_urgent_work(&self) -> bool {
        let (many, since) = *locked(&self.urgent_work);
        many > 0 && since.elapsed() < MAX_URGENT_WORK
    }

    /// This many duties start now; when each has finished its first round, the initial sync is complete.
    pub fn start_initial_sync(&self, duties: usize) {
        *locked(&self.pending_first_rounds) = Some((duties, Instant::now()));
    }

    /// A duty has looked at everything that was known at its start.
    pub fn first_round_done(&self) {
        let mut pending = locked(&self.pending_first_rounds);
        let Some((left, began)) = pending.as_mut() else { return };
        *left = left.saturating_sub(1);
        if *left == 0 {
            let seconds = began.elapsed().as_secs_f64();
            self.metrics.initial_sync.set(seconds);
            tracing::info!(seconds, "initial sync complete: every duty has looked at every object once");
            *pending = None;
        }
    }

    /// Wakes every duty that these changed objects concern.
    fn enqueue(&self, kind: Kind, names: &[String]) {
        if names.is_empty() {
            return;
        }
        let inboxes = locked(&self.inboxes).clone();
        let now = self.elapsed();
        for inbox in inboxes.iter().filter(|inbox| inbox.takes(kind)) {
            names.iter().for_each(|name| inbox.put(Key::new(kind, name), now));
        }
    }

    /// An inbox for changes of these kinds. It starts with every object that is known already.
    pub(crate) fn inbox(&self, kinds: &'static [Kind]) -> Arc<Inbox> {
        let inbox = Arc::new(Inbox::new(kinds));
        let index = self.index();
        let now = self.elapsed();
        for kind in kinds {
            index.names(*kind).for_each(|name| inbox.put(Key::new(*kind, name), now));
        }
        locked(&self.inboxes).push(inbox.clone());
        inbox
    }

    /// Records an event once; in the background while [`EventRecorder::run`] runs.
    pub(crate) async fn record_event(&self, event: NewEvent) {
        self.event_recorder.record(&self.writer, event).await;
    }
}

/// Lasts as long as a round decides about addresses.
pub(crate) struct UrgentWork<'a>(&'a Context);

impl Drop for UrgentWork<'_> {
    fn drop(&mut self) {
        locked(&self.0.urgent_work).0 -= 1;
    }
}
