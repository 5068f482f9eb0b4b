//! A disk that ends, or is full for once, at a chosen operation.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::path::Path;

use sticky_ipam::store::{Disk, RealDisk};

/// What happens at the chosen operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The process ends before it: nothing works from there on.
    End,
    /// The process ends half way through: a new file holds half of its bytes.
    EndHalfWay,
    /// The disk is full for this operation, and takes the next ones.
    Full,
}

/// Counts the operations, and fails at one.
#[derive(Debug)]
pub struct Faulty {
    fault: Fault,
    at: usize,
    end: Option<usize>,
    done: Cell<usize>,
}

impl Faulty {
    pub fn new(fault: Fault, at: usize) -> Self {
        Self { fault, at, end: None, done: Cell::new(0) }
    }

    /// Full at one operation, and ended at a later one.
    pub fn full_then_end(full: usize, end: usize) -> Self {
        Self { fault: Fault::Full, at: full, end: Some(end), done: Cell::new(0) }
    }

    /// Whether the later operation came too.
    pub fn has_ended(&self) -> bool {
        self.end.is_some_and(|end| self.done.get() > end)
    }

    /// Whether the chosen operation came.
    pub fn struck(&self) -> bool {
        self.done.get() > self.at
    }

    fn next<T>(
        &self,
        operation: impl FnOnce() -> io::Result<T>,
        half: impl FnOnce() -> io::Result<()>,
    ) -> io::Result<T> {
        let number = self.done.get();
        self.done.set(number + 1);
        if self.end.is_some_and(|end| number >= end) {
            return Err(io::Error::other("the process has ended"));
        }
        match self.fault {
            Fault::Full if number == self.at => Err(io::Error::from(io::ErrorKind::StorageFull)),
            Fault::End | Fault::EndHalfWay if number >= self.at => {
                if number == self.at && self.fault == Fault::EndHalfWay {
                    half()?;
                }
                Err(io::Error::other("the process has ended"))
            }
            _ => operation(),
        }
    }
}

fn nothing() -> io::Result<()> {
    Ok(())
}

impl Disk for &Faulty {
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.next(|| RealDisk.make_dir(path), nothing)
    }

    fn create(&self, path: &Path, bytes: &[u8]) -> io::Result<File> {
        let half = || RealDisk.create(path, &bytes[..bytes.len() / 2]).map(drop);
        self.next(|| RealDisk.create(path, bytes), half)
    }

    fn write_at(&self, file: &File, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.next(|| RealDisk.write_at(file, offset, bytes), nothing)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.next(|| RealDisk.link(from, to), nothing)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.next(|| RealDisk.rename(from, to), nothing)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.next(|| RealDisk.remove(path), nothing)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        self.next(|| RealDisk.sync(file), nothing)
    }
}
