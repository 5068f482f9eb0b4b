//! The bypass of the node: its file follows the annotation of the Node.
//!
//! Must never remove a file that a person put there: the agent may have been away, and must not undo what was
//! done about it.

use std::fs;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;

use super::CHECK_EVERY;
use super::error::InstallError;
use super::place::{self, Content};
use crate::agent::metrics::AgentMetrics;

/// The annotation of a Node that turns the bypass on; any value but `false` does.
pub(crate) const ANNOTATION: &str = "sticky-ipam.io/bypass";
/// The content of a file that the agent made. One of another content is a person's.
const BY_AGENT: &str = "Made by sticky-ipam-agent for the annotation sticky-ipam.io/bypass of the Node; removed \
    with it.\n";

/// Whether the bypass of the node is on, and by whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Bypass {
    #[default]
    Off,
    ByAnnotation,
    /// The annotation does not ask for it: a person made the file, and has to remove it.
    ByHand,
}

/// Makes or removes the file as the annotation says; none: it is not known. Returns what holds then.
/// Errors: the file cannot be read, made or removed.
pub fn keep(path: &Path, wanted: Option<bool>) -> Result<Bypass, InstallError> {
    let found = match fs::read(path) {
        Ok(content) => Some(content),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(InstallError::io("read", path)(error)),
    };
    let by_agent = found.as_deref() == Some(BY_AGENT.as_bytes());
    match (wanted, found.is_some()) {
        (Some(true), false) => {
            if let Some(folder) = path.parent() {
                place::private_folder(folder)?;
            }
            place::ensure(path, Content::Bytes(BY_AGENT.as_bytes()), super::PRIVATE, &mut None)?;
            Ok(Bypass::ByAnnotation)
        }
        (Some(false), true) if by_agent => place::remove(path).map(|_| Bypass::Off),
        (Some(true), true) => Ok(Bypass::ByAnnotation),
        (_, true) if by_agent => Ok(Bypass::ByAnnotation),
        (_, true) => Ok(Bypass::ByHand),
        (_, false) => Ok(Bypass::Off),
    }
}

/// Keeps the file until `stop` comes: at once when the annotation changes, and every [`CHECK_EVERY`].
pub(crate) async fn run(
    path: PathBuf,
    mut wanted: watch::Receiver<Option<bool>>,
    metrics: Arc<AgentMetrics>,
    stop: impl Future<Output = ()>,
) {
    let mut stop = std::pin::pin!(stop);
    let (mut logged, mut known, mut has_ended) = (String::new(), Bypass::Off, false);
    loop {
        let asked = *wanted.borrow_and_update();
        let problem = match keep(&path, asked) {
            Ok(now) => {
                metrics.bypass.set(i64::from(now != Bypass::Off));
                report(&path, std::mem::replace(&mut known, now), now);
                String::new()
            }
            Err(error) => error.to_string(),
        };
        if problem != logged && !problem.is_empty() {
            tracing::error!(reason = problem, "cannot turn the bypass on or off; trying again");
        }
        logged = problem;
        tokio::select! {
            () = &mut stop => return,
            () = tokio::time::sleep(CHECK_EVERY) => {}
            changed = wanted.changed(), if !has_ended => has_ended = changed.is_err(),
        }
    }
}

fn report(path: &Path, before: Bypass, now: Bypass) {
    let file = path.display();
    match now {
        _ if before == now => {}
        Bypass::Off => tracing::info!(%file, "the bypass is off: every pod is looked up again"),
        Bypass::ByAnnotation => tracing::warn!(
            %file,
            "the bypass is on: pods that are not known as sticky are passed; remove the annotation {ANNOTATION} \
             of the Node to end it"
        ),
        Bypass::ByHand => tracing::warn!(
            %file,
            "the bypass is on by a person's file: pods that are not known as sticky are passed; remove the file \
             to end it"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_follows_the_annotation_and_a_persons_file_stays() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sticky-ipam.d/bypass");
        assert_eq!(keep(&path, None).unwrap(), Bypass::Off);
        assert_eq!(keep(&path, Some(false)).unwrap(), Bypass::Off);
        assert_eq!(keep(&path, Some(true)).unwrap(), Bypass::ByAnnotation);
        assert!(path.exists());
        assert_eq!(keep(&path, None).unwrap(), Bypass::ByAnnotation, "what is not known changes nothing");
        assert_eq!(keep(&path, Some(false)).unwrap(), Bypass::Off);
        assert!(!path.exists());
        fs::write(&path, "").unwrap();
        for wanted in [None, Some(false)] {
            assert_eq!(keep(&path, wanted).unwrap(), Bypass::ByHand);
        }
        assert_eq!(keep(&path, Some(true)).unwrap(), Bypass::ByAnnotation);
        assert_eq!(keep(&path, Some(false)).unwrap(), Bypass::ByHand, "it is still the person's");
        assert!(path.exists());
    }
}
