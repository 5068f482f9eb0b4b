//! Events: each thing is told once, however often it is decided. Must never hold a duty up, nor decide anything.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use tokio::sync::mpsc;

use crate::cluster::api::events;
use crate::cluster::api::events::Told;
use crate::controller::context::Context;

/// Events on their way at once. Few: whatever is decided in numbers has its own writes to make.
const CONCURRENCY: usize = 2;
/// How often is looked whether there is time for events.
const URGENT_WORK_POLL: Duration = Duration::from_millis(50);
/// Events that wait to be told. Beyond that each duty tells its own, which slows it down to what the server takes.
const MAX_QUEUED: usize = 4096;

/// How many things are remembered as told. What falls out may be told again, and then stands there already.
const MAX_REMEMBERED: usize = 10_000;

/// What was told.
#[derive(Debug, Default)]
pub struct EventRecorder {
    memory: Mutex<SentEvents>,
    /// Where events go while [`Context::run_events`] is at work.
    out: Mutex<Option<mpsc::Sender<Told>>>,
}

#[derive(Debug, Default)]
struct SentEvents {
    names: BTreeSet<String>,
    order: VecDeque<String>,
}

impl EventRecorder {
    /// Whether this is new; from now on it is not.
    fn is_new(&self, told: &Told) -> bool {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let name = told.name();
        if !memory.names.insert(name.clone()) {
            return false;
        }
        memory.order.push_back(name);
        if memory.order.len() > MAX_REMEMBERED
            && let Some(oldest) = memory.order.pop_front()
        {
            memory.names.remove(&oldest);
        }
        true
    }

    /// It could not be told: when it is decided again, it is new.
    fn forget(&self, told: &Told) {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        let name = told.name();
        if memory.names.remove(&name) {
            memory.order.retain(|other| *other != name);
        }
    }
}

impl Context {
    /// Tells an event, unless it was told before; by and by, while [`Context::run_events`] is at work.
    pub async fn record_event(&self, told: Told) {
        if let Some(told) = self.hand_over(told) {
            self.send_event(&told).await;
        }
    }

    /// The same for who cannot wait: if too much waits to be told, it is told when it is decided again.
    pub fn record_event_later(&self, told: Told) {
        if let Some(told) = self.hand_over(told) {
            self.event_recorder.forget(&told);
        }
    }

    /// None if it was told before, or will be by and by; else it comes back.
    fn hand_over(&self, told: Told) -> Option<Told> {
        if !self.event_recorder.is_new(&told) {
            return None;
        }
        let out = self.event_recorder.out.lock().unwrap_or_else(PoisonError::into_inner).clone();
        match out {
            Some(out) => out.try_send(told).err().map(mpsc::error::TrySendError::into_inner),
            None => Some(told),
        }
    }

    async fn send_event(&self, told: &Told) {
        if !events::tell(&mut self.writer.api_writer(), told).await {
            self.event_recorder.forget(told);
        }
    }

    /// Tells what the duties have to tell, beside them. Until dropped.
    pub async fn run_events(&self) {
        let (out, waiting) = mpsc::channel(MAX_QUEUED);
        *self.event_recorder.out.lock().unwrap_or_else(PoisonError::into_inner) = Some(out);
        let waiting = futures_util::stream::unfold(waiting, async |mut waiting| {
            waiting.recv().await.map(|told| (told, waiting))
        });
        waiting
            .for_each_concurrent(CONCURRENCY, |told| async move {
                while self.has_urgent_work() {
                    tokio::time::sleep(URGENT_WORK_POLL).await;
                }
                self.send_event(&told).await;
            })
            .await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_event_is_sent_once_and_the_memory_is_bounded() {
        let event_recorder = EventRecorder::default();
        let told = |message: String| Told {
            about: events::pod("db", "db-0", "u"),
            reason: "Test",
            message,
            warning: false,
        };
        assert!(event_recorder.is_new(&told("a".into())));
        assert!(!event_recorder.is_new(&told("a".into())));
        for n in 0..MAX_REMEMBERED {
            assert!(event_recorder.is_new(&told(n.to_string())));
        }
        assert!(event_recorder.is_new(&told("a".into())), "it was forgotten");
        assert_eq!(event_recorder.memory.lock().unwrap().names.len(), MAX_REMEMBERED);
        event_recorder.forget(&told("a".into()));
        assert!(event_recorder.is_new(&told("a".into())), "it was not told");
    }
}
