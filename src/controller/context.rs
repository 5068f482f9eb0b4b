//! What the duties share: the index, their inboxes, the time, hands, settings and counts. And the loop that every duty runs in.
//!
//! A duty looks at the index under its lock, for as long as it decides and no longer, and writes after it has let go of it. Must
//! never be held locked over an await.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::controller::events::EventRecorder;
use crate::controller::flags::ControllerSettings;
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::metrics::ControllerMetrics;
use crate::controller::queue::{Key, Queue};
use crate::controller::writer::Writer;
use crate::policy::selection::facts::TimePoint;
use crate::runtime::cache::CacheEvent;
use crate::runtime::http::Readiness;

/// For how long what nobody waits for is put off at most.
const MAX_URGENT_WORK: Duration = Duration::from_secs(10);

/// Everything that a duty works with.
pub struct Context {
    index: Mutex<ClusterIndex>,
    inboxes: Mutex<Vec<Arc<Inbox>>>,
    /// What carries writes out.
    pub writer: Writer,
    /// What the operator has set.
    pub settings: ControllerSettings,
    /// What is counted.
    pub metrics: Arc<ControllerMetrics>,
    /// Whether this process is in step.
    pub ready: Readiness,
    pub(super) event_recorder: EventRecorder,
    listed: Notify,
    /// How many decide about addresses right now, and since when somebody does.
    urgent_work: Mutex<(usize, Instant)>,
    /// The duties that have yet to look for the first time, and since when they could.
    pending_first_rounds: Mutex<Option<(usize, Instant)>>,
    started: Instant,
    started_at: i64,
}

impl Context {
    /// A world in which nothing is known yet.
    #[must_use]
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

    /// The index. Never over an await.
    pub fn index(&self) -> MutexGuard<'_, ClusterIndex> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time: the wall clock as it stood at the start, and since then a clock that nobody sets.
    #[must_use]
    pub fn now(&self) -> TimePoint {
        let since = i64::try_from(self.started.elapsed().as_secs()).unwrap_or(i64::MAX);
        TimePoint(self.started_at.saturating_add(since))
    }

    /// The time since the start, for queues.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    /// Takes a change into the index and tells whom it concerns.
    pub fn told(&self, kind: Kind, take: impl FnOnce(&mut ClusterIndex) -> Vec<String>) {
        let changed = take(&mut self.index());
        self.changed(kind, changed);
        self.listed.notify_waiters();
    }

    /// The same of what a watch tells, which is heard by that.
    pub fn hear<T>(
        &self,
        kind: Kind,
        told: CacheEvent<T>,
        take: impl FnOnce(&mut ClusterIndex, CacheEvent<T>) -> Vec<String>,
    ) {
        self.told(kind, |index| {
            index.observe_event(kind, &told);
            take(index, told)
        });
    }

    /// Returns when every kind has been listed once.
    pub async fn listed(&self) {
        self.ready.no("not every kind has been listed yet; see the log");
        loop {
            let told = self.listed.notified();
            if self.index().missing().is_empty() {
                self.ready.yes();
                return;
            }
            told.await;
        }
    }

    /// Pods are being marked or addresses let go, until the answer is dropped: what nobody waits for is put off.
    pub fn start_urgent_work(&self) -> UrgentWork<'_> {
        let mut urgent_work = self.urgent_work.lock().unwrap_or_else(PoisonError::into_inner);
        if urgent_work.0 == 0 {
            urgent_work.1 = Instant::now();
        }
        urgent_work.0 += 1;
        UrgentWork(self)
    }

    /// Whether what nobody waits for should be put off. Not for ever: a server that hangs keeps a duty busy, too.
    #[must_use]
    pub fn has_urgent_work(&self) -> bool {
        let (many, since) = *self.urgent_work.lock().unwrap_or_else(PoisonError::into_inner);
        many > 0 && since.elapsed() < MAX_URGENT_WORK
    }

    /// So many duties begin now; when each has looked once, the world is in step.
    pub fn begin(&self, duties: usize) {
        *self.pending_first_rounds.lock().unwrap_or_else(PoisonError::into_inner) =
            Some((duties, Instant::now()));
    }

    /// A duty has looked at everything that was known at its start.
    fn first_round_done(&self) {
        let mut pending_first_rounds =
            self.pending_first_rounds.lock().unwrap_or_else(PoisonError::into_inner);
        let Some((left, began)) = pending_first_rounds.as_mut() else { return };
        *left = left.saturating_sub(1);
        if *left == 0 {
            let took = began.elapsed();
            self.metrics.initial_sync.set(took.as_secs_f64());
            tracing::info!(?took, "in step: every duty has looked at everything once");
            *pending_first_rounds = None;
        }
    }

    /// Tells everyone who asked for this kind that these objects are other than before.
    pub fn changed(&self, kind: Kind, names: Vec<String>) {
        if names.is_empty() {
            return;
        }
        let inboxes = self.inboxes.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let now = self.elapsed();
        for inbox in inboxes.iter().filter(|inbox| inbox.kinds.contains(&kind)) {
            for name in &names {
                inbox.put(Key::new(kind, name.clone()), now);
            }
        }
    }

    /// An inbox for changes of these kinds. What is known already is put into it.
    pub fn inbox(&self, kinds: &'static [Kind]) -> Arc<Inbox> {
        let inbox = Arc::new(Inbox { kinds, queue: Mutex::default(), arrived: Notify::new() });
        let index = self.index();
        let now = self.elapsed();
        for kind in kinds {
            for name in index.names(*kind) {
                inbox.put(Key::new(*kind, name), now);
            }
        }
        self.inboxes.lock().unwrap_or_else(PoisonError::into_inner).push(inbox.clone());
        inbox
    }
}

/// Lasts as long as addresses are decided about.
pub struct UrgentWork<'a>(&'a Context);

impl Drop for UrgentWork<'_> {
    fn drop(&mut self) {
        self.0.urgent_work.lock().unwrap_or_else(PoisonError::into_inner).0 -= 1;
    }
}

/// What a duty has yet to look at.
pub struct Inbox {
    kinds: &'static [Kind],
    queue: Mutex<Queue>,
    arrived: Notify,
}

impl Inbox {
    /// Puts a key in, due at this time since the start.
    pub fn put(&self, key: Key, at: Duration) {
        self.queue().put(key, at);
        self.arrived.notify_one();
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something is due, and takes all of it.
    pub async fn due(&self, context: &Context) -> Vec<Key> {
        loop {
            let next = {
                let mut queue = self.queue();
                let due = queue.take_due(context.elapsed());
                if !due.is_empty() {
                    return due;
                }
                queue.next()
            };
            match next {
                None => self.arrived.notified().await,
                Some(at) => tokio::select! {
                    () = self.arrived.notified() => {}
                    () = tokio::time::sleep_until(context.started + at) => {}
                },
            }
        }
    }

    /// How many keys are due.
    #[must_use]
    pub fn depth(&self, now: Duration) -> usize {
        self.queue().depth(now)
    }
}

/// What a round came to.
#[derive(Debug, Default)]
pub struct RoundResult {
    /// What to look at again, and after how long.
    pub again: Vec<(Key, Duration)>,
    /// How many steps failed; they are counted, told in the log by the duty itself, and tried again by `again`.
    pub failures: usize,
}

/// One of the controller's duties. A round decides by a pure function from the index, and carries out by [`Context::hands`].
pub trait Duty {
    /// For logs and metrics.
    const NAME: &'static str;
    /// Whose changes wake it.
    const TRIGGERS: &'static [Kind];
    /// Changes are gathered for so long before a round, and rounds are at least so far apart.
    const BATCH_DELAY: Duration = Duration::from_millis(5);
    /// A full round takes place this often, however much or little is due. None: never.
    const TICK: Option<Duration> = None;

    /// One round over what is due.
    fn round(&mut self, context: &Context, due: Vec<Key>) -> impl Future<Output = RoundResult>;

    /// The tick's round: over what is due, and over what changes without waking the duty. One that looks at everything in each
    /// round has no other.
    fn full_round(&mut self, context: &Context, due: Vec<Key>) -> impl Future<Output = RoundResult> {
        self.round(context, due)
    }
}

/// Runs a duty until it is dropped.
pub async fn run_duty<D: Duty>(duty: D, context: &Context) {
    run_duty_with(duty, context, &context.inbox(D::TRIGGERS)).await;
}

/// The same with an inbox that others put keys into too.
pub async fn run_duty_with<D: Duty>(mut duty: D, context: &Context, inbox: &Inbox) {
    let mut tick = D::TICK.map(|every| Instant::now() + every);
    let mut is_first = true;
    if inbox.queue().is_empty() {
        // There is nothing to look at.
        is_first = false;
        context.first_round_done();
    }
    loop {
        let mut due = match tick {
            None => inbox.due(context).await,
            Some(at) => tokio::select! {
                due = inbox.due(context) => due,
                () = tokio::time::sleep_until(at) => Vec::new(),
            },
        };
        // What changes now changes more than once. What was there at the start was listed as a whole.
        if !is_first {
            tokio::time::sleep(D::BATCH_DELAY).await;
        }
        due.extend(inbox.queue().take_due(context.elapsed()));
        due.sort();
        due.dedup();
        let began = Instant::now();
        // By the clock, not by what ended the wait: where something is always due, that is never the tick.
        let done = if tick.is_some_and(|at| began >= at) {
            tick = D::TICK.map(|every| began + every);
            duty.full_round(context, due).await
        } else {
            duty.round(context, due).await
        };
        context.metrics.round(D::NAME, began.elapsed(), done.failures, inbox.depth(context.elapsed()));
        let now = context.elapsed();
        for (key, after) in done.again {
            inbox.put(key, now + after);
        }
        if std::mem::take(&mut is_first) {
            context.first_round_done();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

    use super::*;
    use crate::cluster::api::canned::Canned;
    use crate::controller::flags::load;
    use crate::controller::writer::Unwatched;

    /// Always has something to look at in its next round, and tells of its full ones.
    struct Busy {
        full: UnboundedSender<Vec<Key>>,
    }

    fn work() -> Key {
        Key::new(Kind::Pod, "db/db-0")
    }

    fn more_work() -> RoundResult {
        RoundResult { again: vec![(work(), Duration::ZERO)], failures: 0 }
    }

    impl Duty for Busy {
        const NAME: &'static str = "busy";
        const TRIGGERS: &'static [Kind] = &[Kind::Pod];
        const BATCH_DELAY: Duration = Duration::from_millis(1);
        const TICK: Option<Duration> = Some(Duration::from_millis(20));

        async fn round(&mut self, _: &Context, due: Vec<Key>) -> RoundResult {
            assert_eq!(due, [work()], "without a tick it is woken by work alone");
            more_work()
        }

        async fn full_round(&mut self, _: &Context, due: Vec<Key>) -> RoundResult {
            self.full.send(due).unwrap();
            more_work()
        }
    }

    #[tokio::test]
    async fn a_tick_has_its_full_round_though_something_is_always_due_and_loses_none_of_it() {
        const DEADLINE: Duration = Duration::from_secs(30);
        let writer = Writer::new(Canned::new().client(), "canned".into(), Box::new(Unwatched));
        let settings = load(&["sticky-ipam-controller".into()]).unwrap().line.settings;
        let context = Context::new(writer, settings, Arc::default(), Readiness::default());
        let inbox = context.inbox(Busy::TRIGGERS);
        inbox.put(work(), Duration::ZERO);
        let (full, mut told) = unbounded_channel();
        let ticks = async {
            for _ in 0..3 {
                assert_eq!(told.recv().await, Some(vec![work()]));
            }
        };
        tokio::select! {
            () = run_duty_with(Busy { full }, &context, &inbox) => panic!("the duty ended by itself"),
            in_time = tokio::time::timeout(DEADLINE, ticks) => in_time.expect("a full round at each tick"),
        }
    }
}
