//! How a process is told to end: SIGTERM by Kubernetes, SIGINT by a person.

use tokio::signal::unix::{SignalKind, signal};

/// Returns when the process is to end. Signals that arrived since this was made count.
pub struct ShutdownSignal {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
}

impl ShutdownSignal {
    /// Begins to listen.
    ///
    /// # Errors
    /// The system refuses the handlers.
    pub fn listen() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits.
    pub async fn told(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => tracing::info!("told to end by SIGTERM"),
            _ = self.interrupt.recv() => tracing::info!("told to end by SIGINT"),
        }
    }
}
