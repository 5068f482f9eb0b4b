//! The end of a process before or after one of its writes, counted and not listed by hand. It ends by a
//! panic, which the caller tells from others by its words.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use sticky_ipam::cluster::writer::apply::{SentWrite, WriteObserver};
use sticky_ipam::store::{Disk, RealDisk};

pub const ENDED: &str = "ended by the witness";

/// Ends this thread without a word of the panic's hook: it is no news.
fn end() -> ! {
    std::panic::resume_unwind(Box::new(ENDED))
}

/// Ends whoever carries writes to the API server before or after the n-th of one carrier.
pub struct EndAt {
    pub number: usize,
    pub after: bool,
    /// How many writes were seen.
    pub seen: AtomicUsize,
}

impl EndAt {
    pub fn new(number: usize, after: bool) -> Arc<Self> {
        Arc::new(Self { number, after, seen: AtomicUsize::new(0) })
    }
}

impl WriteObserver for EndAt {
    fn before(&self, number: usize, _: SentWrite<'_>) {
        self.seen.store(number, Ordering::SeqCst);
        if !self.after && number == self.number {
            end();
        }
    }
    fn after(&self, number: usize, _: SentWrite<'_>) {
        if self.after && number == self.number {
            end();
        }
    }
}

/// Counts every write of a process, to the disk and, as a witness, to the API server, and ends it before or
/// after one of them.
#[derive(Debug)]
pub struct EndsAt {
    number: usize,
    after: bool,
    seen: AtomicUsize,
}

impl EndsAt {
    pub fn new(number: usize, after: bool) -> Arc<Self> {
        Arc::new(Self { number, after, seen: AtomicUsize::new(0) })
    }

    fn before(&self) {
        let seen = self.seen.fetch_add(1, Ordering::SeqCst) + 1;
        if !self.after && seen == self.number {
            end();
        }
    }

    fn after(&self) {
        if self.after && self.seen.load(Ordering::SeqCst) == self.number {
            end();
        }
    }
}

impl WriteObserver for EndsAt {
    fn before(&self, _: usize, _: SentWrite<'_>) {
        self.before();
    }
    fn after(&self, _: usize, _: SentWrite<'_>) {
        self.after();
    }
}

/// The disk under that counter.
#[derive(Clone, Debug)]
pub struct Counted(pub Arc<EndsAt>);

impl Counted {
    fn count<T>(&self, write: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.0.before();
        let done = write();
        self.0.after();
        done
    }
}

impl Disk for Counted {
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.count(|| RealDisk.make_dir(path))
    }
    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<File> {
        self.count(|| RealDisk.create(path, bytes))
    }
    fn write_at(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.count(|| RealDisk.write_at(file, offset, bytes))
    }
    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.count(|| RealDisk.link(from, to))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.count(|| RealDisk.rename(from, to))
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.count(|| RealDisk.remove(path))
    }
    fn sync(&self, file: &File) -> io::Result<()> {
        // Nothing changes by it but what a loss of power would show, which the store's own tests do.
        RealDisk.sync(file)
    }
}

/// Runs until the end, or until the witness ends it; whether it did.
pub async fn ended_by_the_witness(work: impl Future<Output = ()>) -> bool {
    use std::panic::AssertUnwindSafe;
    let mut work = std::pin::pin!(work);
    let polled = std::future::poll_fn(|context| {
        match std::panic::catch_unwind(AssertUnwindSafe(|| work.as_mut().poll(context))) {
            Ok(poll) => poll.map(|()| None),
            Err(ended) => std::task::Poll::Ready(Some(ended)),
        }
    });
    let Some(ended) = polled.await else { return false };
    let why = *ended.downcast::<&str>().expect("not the witness ended it");
    assert_eq!(why, ENDED);
    true
}
