//! The CNI protocol: environment and standard input into a [`Request`], a [`CniResult`] or [`CniError`] into the
//! document to print.
//!
//! Everything a runtime can get wrong is refused here, with the field, the value and what would be right, so that
//! no verb meets an invalid value. This room must never write anything, and never touch standard output.

mod args;
pub mod cluster;
pub mod config;

pub mod error;
mod fields;
mod input;
pub mod ipam;
mod names;
mod request;
mod resolv;
mod result;
pub mod sticky;
mod verb;
mod version;

pub use cluster::{ClusterConf, OnUnavailable};
pub use config::NetConf;
pub use error::{CniError, code};
pub use input::{ConfigSource, MAX_INPUT, Pollable};
pub use ipam::{IpamConf, RequestedAddress};
pub use names::{Attachment, ContainerId, IfName, NetworkName, PodIdentity};
pub use request::{Failure, Parsed, Request, about, read_request};
pub use resolv::parse_resolv_conf;
pub use result::{CniResult, Dns, Interface, IpConfig, Route};
pub use sticky::{LogLevel, OnExhaustion, PodPattern, Retention, StatusWhenExhausted, StickyConf};
pub use verb::Verb;
pub use version::{CniVersion, UnknownVersion};

#[cfg(test)]
#[path = "tests/reference.rs"]
mod reference;
