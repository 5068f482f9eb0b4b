//! Standard input: read to its end for most verbs, and only as far as it comes at once for VERSION, since a
//! caller need not close it then.

use std::io::{self, Read};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// The most that is read. GC's list of a full node (60,000 attachments) takes 7 MiB.
pub(crate) const MAX_INPUT: u64 = 32 * 1024 * 1024;

pub trait ConfigSource {
    /// Everything up to the end, but never more than one byte over [`MAX_INPUT`].
    fn read_all(&mut self) -> io::Result<Vec<u8>>;

    /// What comes before the patience ends; enough is enough once it is a whole JSON document.
    fn read_ready(&mut self, timeout: Duration) -> io::Result<Vec<u8>>;
}

fn read_to_end(source: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    source.take(MAX_INPUT + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

impl ConfigSource for &[u8] {
    fn read_all(&mut self) -> io::Result<Vec<u8>> {
        read_to_end(self)
    }

    fn read_ready(&mut self, _: Duration) -> io::Result<Vec<u8>> {
        self.read_all()
    }
}

/// A source that can be waited for, such as standard input.
#[derive(Debug)]
pub struct Pollable<T>(pub T);

impl<T: Read + AsFd> ConfigSource for Pollable<T> {
    fn read_all(&mut self) -> io::Result<Vec<u8>> {
        read_to_end(&mut self.0)
    }

    fn read_ready(&mut self, timeout: Duration) -> io::Result<Vec<u8>> {
        let deadline = Instant::now() + timeout;
        let mut bytes = Vec::new();
        let mut piece = [0u8; 8192];
        while bytes.len() as u64 <= MAX_INPUT && wait_for_input(&self.0, deadline)? {
            match self.0.read(&mut piece) {
                Ok(0) => break,
                Ok(count) => bytes.extend_from_slice(&piece[..count]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if bytes.trim_ascii_end().ends_with(b"}")
                && serde_json::from_slice::<serde::de::IgnoredAny>(&bytes).is_ok()
            {
                break;
            }
        }
        Ok(bytes)
    }
}

/// Whether a read would return at once, waiting for that until the deadline.
fn wait_for_input(source: &impl AsFd, deadline: Instant) -> io::Result<bool> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(source.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(ready) => return Ok(ready > 0),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// Far longer than any of these reads may take; a test that needs it has failed.
    const LONG: Duration = Duration::from_secs(600);

    #[test]
    fn a_pipe_that_stays_open_does_not_hold_up_a_whole_document() {
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(br#"{"cniVersion":"0.4.0"}"#).unwrap();
        assert_eq!(Pollable(reader).read_ready(LONG).unwrap(), br#"{"cniVersion":"0.4.0"}"#);
        drop(writer);
    }

    #[test]
    fn an_open_pipe_without_data_times_out() {
        let (reader, writer) = io::pipe().unwrap();
        assert_eq!(Pollable(reader).read_ready(Duration::from_millis(1)).unwrap(), b"");
        drop(writer);
    }

    #[test]
    fn a_closed_pipe_ends_at_once() {
        let (reader, mut writer) = io::pipe().unwrap();
        writer.write_all(b"{").unwrap();
        drop(writer);
        assert_eq!(Pollable(reader).read_ready(LONG).unwrap(), b"{");
    }
}
