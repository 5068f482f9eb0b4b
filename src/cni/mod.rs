//! The CNI protocol: environment and standard input into a [`Request`], a [`CniResult`] or [`CniError`] into
//! the document to print.
//!
//! Everything a runtime can get wrong is refused here, with the field, the value and what would be right, so
//! that no verb meets an invalid value. This room must never write anything, and never touch standard output.

mod args;
pub mod config;
pub mod error;
mod fields;
mod request;
mod result;
mod verb;
mod version;

pub(crate) use config::cluster::{ClusterConf, OnUnavailable};
pub(crate) use config::ipam::IpamConf;
pub(crate) use config::resolv::parse_resolv_conf;
pub(crate) use config::sticky::{OnExhaustion, PluginLogLevel, StatusWhenExhausted, StickyConf};
pub use error::{CniError, code};
pub(crate) use request::input::ConfigSource;
pub use request::input::Pollable;
pub use request::{ParsedRequest, Request, RequestError, about, read_request};
pub(crate) use result::{CniResult, Dns, IpConfig};
pub use verb::Verb;

#[cfg(test)]
mod reference;
