//! Work queues: each key once, and not before its time. The caller passes the time in. Must never lose a key:
//! what was put in comes out once it is due.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::{sync::Notify, time::Instant};

use crate::controller::index::Kind;
use crate::runtime::locked;

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub kind: Kind,
    /// Its name, with its namespace in front if it has one.
    pub name: String,
}

impl Key {
    pub fn new(kind: Kind, name: impl Into<String>) -> Self {
        Self { kind, name: name.into() }
    }
}

/// The keys that wait, each with the time at which it is due; times are since any fixed point.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    due: BTreeMap<Key, Duration>,
    order: BTreeSet<(Duration, Key)>,
}

impl Queue {
    /// Puts a key in. One that waits already keeps the earlier of both times.
    pub(crate) fn put(&mut self, key: Key, at: Duration) {
        if let Some(before) = self.due.get(&key) {
            if *before <= at {
                return;
            }
            self.order.remove(&(*before, key.clone()));
        }
        self.due.insert(key.clone(), at);
        self.order.insert((at, key));
    }

    /// Takes out everything that is due, in the order of its time.
    pub(crate) fn take_due(&mut self, now: Duration) -> Vec<Key> {
        let mut due = Vec::new();
        while self.next().is_some_and(|at| at <= now)
            && let Some((_, key)) = self.order.pop_first()
        {
            self.due.remove(&key);
            due.push(key);
        }
        due
    }

    pub(crate) fn next(&self) -> Option<Duration> {
        self.order.first().map(|(at, _)| *at)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.due.is_empty()
    }

    pub(crate) fn depth(&self, now: Duration) -> usize {
        self.order.iter().take_while(|(at, _)| *at <= now).count()
    }
}

/// What a duty has yet to look at.
pub struct Inbox {
    kinds: &'static [Kind],
    queue: Mutex<Queue>,
    arrived: Notify,
}

impl Inbox {
    pub(crate) fn new(kinds: &'static [Kind]) -> Self {
        Self { kinds, queue: Mutex::default(), arrived: Notify::new() }
    }

    pub(crate) fn takes(&self, kind: Kind) -> bool {
        self.kinds.contains(&kind)
    }

    /// Puts a key in, due at this time since the start.
    pub(crate) fn put(&self, key: Key, at: Duration) {
        self.queue().put(key, at);
        self.arrived.notify_one();
    }

    /// Never over an await, and not to put a key in: [`Inbox::put`] wakes the duty, too.
    pub(crate) fn queue(&self) -> MutexGuard<'_, Queue> {
        locked(&self.queue)
    }

    /// Waits until something is due, and takes all of it. Times are since `started`.
    pub(crate) async fn due(&self, started: Instant) -> Vec<Key> {
        loop {
            let next = {
                let mut queue = self.queue();
                let due = queue.take_due(started.elapsed());
                if !due.is_empty() {
                    return due;
                }
                queue.next()
            };
            match next {
                None => self.arrived.notified().await,
                Some(at) => tokio::select! {
                    () = self.arrived.notified() => {}
                    () = tokio::time::sleep_until(started + at) => {}
                },
            }
        }
    }
}

/// A token bucket: a rate with a burst. The caller passes the time in.
#[derive(Debug, Clone)]
pub(crate) struct TokenBucket {
    per_second: f64,
    burst: f64,
    tokens: f64,
    filled: Duration,
}

impl TokenBucket {
    /// A full bucket that gets `per_second` tokens and holds `burst`, one at least.
    pub(crate) fn new(per_second: u32, burst: u32) -> Self {
        let burst = f64::from(burst.max(1));
        Self { per_second: f64::from(per_second.max(1)), burst, tokens: burst, filled: Duration::ZERO }
    }

    /// Takes a token.
    /// Errors: the time until the next token.
    pub(crate) fn take(&mut self, now: Duration) -> Result<(), Duration> {
        let since = now.saturating_sub(self.filled).as_secs_f64();
        self.filled = self.filled.max(now);
        self.tokens = (self.tokens + since * self.per_second).min(self.burst);
        if self.tokens >= 1.0 {
            self.tokens -= 1.0;
            return Ok(());
        }
        Err(Duration::from_secs_f64((1.0 - self.tokens) / self.per_second))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(n: u8) -> Key {
        Key::new(Kind::Pod, n.to_string())
    }

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_key_comes_out_once_and_not_before_its_time() {
        let mut queue = Queue::default();
        queue.put(key(1), at(5));
        queue.put(key(1), at(9));
        queue.put(key(2), at(7));
        queue.put(key(2), at(3));
        assert_eq!((queue.take_due(at(2)), queue.next(), queue.due.len()), (vec![], Some(at(3)), 2));
        assert_eq!(queue.depth(at(4)), 1);
        assert_eq!(queue.take_due(at(6)), [key(2), key(1)]);
        assert!(queue.is_empty() && queue.take_due(at(100)).is_empty());
    }

    #[test]
    fn a_bucket_lets_a_burst_through_and_then_so_many_a_second() {
        let mut bucket = TokenBucket::new(10, 3);
        let taken = (0..9).filter(|_| bucket.take(at(0)).is_ok()).count();
        assert_eq!(taken, 3);
        assert_eq!(bucket.take(at(0)).unwrap_err(), Duration::from_millis(100));
        assert!(bucket.take(Duration::from_millis(100)).is_ok());
        assert!(bucket.take(Duration::from_millis(100)).is_err());
        let later = (0..99).filter(|_| bucket.take(at(60)).is_ok()).count();
        assert_eq!(later, 3, "it holds no more than a burst");
    }

    proptest! {
        #[test]
        fn whatever_is_put_in_comes_out(puts in proptest::collection::vec((0u8..20, 0u64..50), 0..100)) {
            let mut queue = Queue::default();
            let mut earliest: BTreeMap<Key, u64> = BTreeMap::new();
            for (n, time) in &puts {
                queue.put(key(*n), at(*time));
                let first = earliest.entry(key(*n)).or_insert(*time);
                *first = (*first).min(*time);
            }
            for now in 0..50 {
                for key in queue.take_due(at(now)) {
                    prop_assert_eq!(earliest.remove(&key), Some(now));
                }
            }
            prop_assert!(earliest.is_empty() && queue.is_empty());
        }
    }
}
