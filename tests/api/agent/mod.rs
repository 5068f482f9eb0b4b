//! The agent on a real API server.

mod adoption;
mod away;
mod bypass;
mod cilium;
mod crashes;
mod crd;
mod decisions;
mod install;
mod leaks;
mod mac;
mod pending_updates;
mod release;
mod removal;
mod watches;
