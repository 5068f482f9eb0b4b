//! Events: each is sent once, however often it is decided. Must never hold a duty up, nor decide anything.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Mutex;
use std::time::Duration;

use futures_util::StreamExt;
use tokio::sync::mpsc;

use crate::cluster::events::{self, NewEvent};
use crate::controller::writer::Writer;
use crate::runtime::locked;

/// Events that are sent at the same time. Few: a duty that decides in numbers has its own writes to make.
const CONCURRENCY: usize = 2;
/// How often the recorder looks whether urgent work is over.
const URGENT_WORK_POLL: Duration = Duration::from_millis(50);
/// Events that wait to be sent. Beyond that each duty sends its own, which slows it down to what the API
/// server takes.
const MAX_QUEUED: usize = 4096;
/// How many events are remembered as sent. One that falls out may be sent again; its name is taken then.
const MAX_REMEMBERED: usize = 10_000;

#[derive(Debug, Default)]
pub(crate) struct EventRecorder {
    memory: Mutex<SentEvents>,
    /// Where events go while [`EventRecorder::run`] runs.
    out: Mutex<Option<mpsc::Sender<NewEvent>>>,
}

#[derive(Debug, Default)]
struct SentEvents {
    names: BTreeSet<String>,
    order: VecDeque<String>,
}

impl EventRecorder {
    /// Records an event, unless it was recorded before; in the background while [`EventRecorder::run`] runs.
    pub(crate) async fn record(&self, writer: &Writer, event: NewEvent) {
        if let Some(event) = self.enqueue(event) {
            self.send(writer, &event).await;
        }
    }

    /// The same without waiting: if too many are queued, this one is recorded when it is decided again.
    pub(crate) fn record_later(&self, event: NewEvent) {
        if let Some(event) = self.enqueue(event) {
            self.forget(&event);
        }
    }

    /// Sends queued events while nothing urgent is done. Until dropped.
    pub(crate) async fn run(&self, writer: &Writer, has_urgent_work: impl Fn() -> bool) {
        let (out, queued) = mpsc::channel(MAX_QUEUED);
        *locked(&self.out) = Some(out);
        let queued = futures_util::stream::unfold(queued, async |mut queued| {
            queued.recv().await.map(|event| (event, queued))
        });
        let send = async |event| {
            while has_urgent_work() {
                tokio::time::sleep(URGENT_WORK_POLL).await;
            }
            self.send(writer, &event).await;
        };
        queued.for_each_concurrent(CONCURRENCY, send).await;
    }

    /// None if it was recorded before, or is queued now; else the event, which the caller must send.
    fn enqueue(&self, event: NewEvent) -> Option<NewEvent> {
        if !self.is_new(&event) {
            return None;
        }
        let Some(out) = locked(&self.out).clone() else { return Some(event) };
        out.try_send(event).err().map(mpsc::error::TrySendError::into_inner)
    }

    async fn send(&self, writer: &Writer, event: &NewEvent) {
        if !events::send(&mut writer.api_writer(), event).await {
            self.forget(event);
        }
    }

    /// Whether this is new; from now on it is not.
    fn is_new(&self, event: &NewEvent) -> bool {
        let mut memory = locked(&self.memory);
        let name = event.name();
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

    /// It could not be sent: when it is decided again, it is new.
    fn forget(&self, event: &NewEvent) {
        let mut memory = locked(&self.memory);
        let name = event.name();
        if memory.names.remove(&name) {
            memory.order.retain(|other| *other != name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_event_is_sent_once_and_the_memory_is_bounded() {
        let event_recorder = EventRecorder::default();
        let event = |message: String| NewEvent {
            about: events::pod("db", "db-0", "u"),
            reason: "Test",
            message,
            warning: false,
        };
        assert!(event_recorder.is_new(&event("a".into())));
        assert!(!event_recorder.is_new(&event("a".into())));
        for n in 0..MAX_REMEMBERED {
            assert!(event_recorder.is_new(&event(n.to_string())));
        }
        assert!(event_recorder.is_new(&event("a".into())), "it was forgotten");
        assert_eq!(event_recorder.memory.lock().unwrap().names.len(), MAX_REMEMBERED);
        event_recorder.forget(&event("a".into()));
        assert!(event_recorder.is_new(&event("a".into())), "it was not sent");
    }
}
