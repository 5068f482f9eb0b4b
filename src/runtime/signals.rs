//! How a process is asked to end: SIGTERM by Kubernetes, SIGINT by a person.

use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::runtime::exit::ExitError;

/// Listens for the signals that end a process. Signals that arrive after it was made are not lost.
pub(crate) struct ShutdownSignal {
    terminate: Signal,
    interrupt: Signal,
}

impl ShutdownSignal {
    pub(crate) fn listen() -> Result<Self, ExitError> {
        let on = |kind| {
            signal(kind).map_err(|error| ExitError::start(format!("cannot listen for signals: {error}")))
        };
        Ok(Self { terminate: on(SignalKind::terminate())?, interrupt: on(SignalKind::interrupt())? })
    }

    pub(crate) async fn received(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => tracing::info!("received SIGTERM, shutting down"),
            _ = self.interrupt.recv() => tracing::info!("received SIGINT, shutting down"),
        }
    }
}
