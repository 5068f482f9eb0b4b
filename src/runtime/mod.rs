//! What agent and controller share: caches fed by watches, the API server's client, flags, log, metrics, HTTP
//! server, TLS, signals.
//!
//! Must never know what the program is for: nothing here decides about an address.

pub mod cache;
pub mod client;
pub mod exit;
pub mod flags;
pub mod http;
pub mod log;
pub mod metrics;
pub mod signals;
pub mod tls;
pub mod watch;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. A task that panicked while it held it left nothing half done: each change is one step.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
