//! The loop that every duty runs in.

use std::time::Duration;

use tokio::time::Instant;

use crate::controller::queue::{Inbox, Key};
use crate::controller::{context::Context, index::Kind};
use crate::runtime::metrics::whole;

#[derive(Debug, Default)]
pub struct RoundResult {
    /// What to look at again, and after how long.
    pub again: Vec<(Key, Duration)>,
    /// How many steps failed. They are counted here, logged by the duty itself, and tried again by `again`.
    pub failures: usize,
}

impl RoundResult {
    /// A step on this key failed, and is tried again after this time.
    pub fn retry(&mut self, key: Key, after: Duration) {
        self.failures += 1;
        self.again.push((key, after));
    }
}

/// One of the controller's duties. A round decides by a pure function from the index, and writes by
/// [`Context::writer`].
pub trait Duty {
    /// For logs and metrics.
    const NAME: &'static str;
    /// The kinds whose changes wake it.
    const TRIGGERS: &'static [Kind];
    /// Changes are gathered for this long before a round, and rounds are at least this far apart.
    const BATCH_DELAY: Duration = Duration::from_millis(5);
    /// A full round takes place this often, however much or little is due. None: never.
    const TICK: Option<Duration> = None;

    fn round(&mut self, context: &Context, due: Vec<Key>) -> impl Future<Output = RoundResult>;

    /// The tick's round: over what is due, and over what changes without waking the duty. A duty that looks
    /// at everything in each round has no other.
    fn full_round(&mut self, context: &Context, due: Vec<Key>) -> impl Future<Output = RoundResult> {
        self.round(context, due)
    }
}

/// Runs a duty until it is dropped.
pub(crate) async fn run_duty<D: Duty>(duty: D, context: &Context) {
    run_duty_with(duty, context, &context.inbox(D::TRIGGERS)).await;
}

/// The same with an inbox that others put keys into, too.
pub(crate) async fn run_duty_with<D: Duty>(mut duty: D, context: &Context, inbox: &Inbox) {
    let mut tick = D::TICK.map(|every| Instant::now() + every);
    let mut is_first = !inbox.queue().is_empty();
    if !is_first {
        // There is nothing to look at.
        context.first_round_done();
    }
    loop {
        let mut due = match tick {
            None => inbox.due(context.started).await,
            Some(at) => tokio::select! {
                due = inbox.due(context.started) => due,
                () = tokio::time::sleep_until(at) => Vec::new(),
            },
        };
        // What changes now changes more than once. What was there at the start was listed completely.
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
        let now = context.elapsed();
        let (metrics, duty_name) = (&context.metrics, [D::NAME]);
        metrics.rounds.with(duty_name).observe(began.elapsed().as_secs_f64());
        metrics.errors.with(duty_name).inc_by(u64::try_from(done.failures).unwrap_or(u64::MAX));
        metrics.queue.with(duty_name).set(whole(inbox.queue().depth(now)));
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

    use std::sync::Arc;

    use super::*;
    use crate::cluster::api::canned::Canned;
    use crate::cluster::writer::apply::NoObserver;
    use crate::controller::flags::load;
    use crate::controller::writer::Writer;
    use crate::runtime::http::Readiness;

    /// Always has something to look at in its next round, and reports its full ones.
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
        let writer = Writer::new(Canned::new().client(), "canned".into(), Box::new(NoObserver));
        let settings = load(&["sticky-ipam-controller".into()]).unwrap().line.settings;
        let context = Context::new(writer, settings, Arc::default(), Readiness::default());
        let inbox = context.inbox(Busy::TRIGGERS);
        inbox.put(work(), Duration::ZERO);
        let (full, mut reported) = unbounded_channel();
        let ticks = async {
            for _ in 0..3 {
                assert_eq!(reported.recv().await, Some(vec![work()]));
            }
        };
        tokio::select! {
            () = run_duty_with(Busy { full }, &context, &inbox) => panic!("the duty ended by itself"),
            in_time = tokio::time::timeout(DEADLINE, ticks) => in_time.expect("a full round at each tick"),
        }
    }
}
