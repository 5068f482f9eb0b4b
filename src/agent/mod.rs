//! The node's agent: what it installs on the host, and how it keeps that whole.

pub mod install;
