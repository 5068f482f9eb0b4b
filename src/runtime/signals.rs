//! How a process is asked to end: SIGTERM by Kubernetes, SIGINT by a person.

use tokio::signal::unix::{SignalKind, signal};

/// Listens for the signals that end a process. Signals that arrive after it was made are not lost.
pub(crate) struct ShutdownSignal {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl ShutdownSignal {
    /// Starts to listen.
    /// Errors: the system refuses the handlers.
    pub(crate) fn listen() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Returns when one was received.
    pub(crate) async fn received(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => tracing::info!("received SIGTERM, shutting down"),
            _ = self.interrupt.recv() => tracing::info!("received SIGINT, shutting down"),
        }
    }
}
