//! The way to the API server: connection, client, cached reads, leases.
//! Must never decide anything about addresses.

pub mod cached;
#[cfg(test)]
pub(crate) mod canned;
pub mod client;
pub(crate) mod connection;
pub mod lease;
