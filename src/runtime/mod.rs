//! What every long-running part has in common: watches into an index, log, pages for probes and Prometheus, signals.
//!
//! Must never know what the part is for: nothing here decides about an address.

pub mod cache;
pub mod client;
pub mod http;
pub mod log;
pub mod signals;
pub mod tls;
pub mod watch;
