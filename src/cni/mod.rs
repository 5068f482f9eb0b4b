//! The CNI protocol: environment and standard input into a [`Request`], a [`CniResult`] or [`CniError`] into the
//! document to print.
//!
//! Everything a runtime can get wrong is refused here, with the field, the value and what would be right, so that
//! no verb meets an invalid value. This room must never write anything, and never touch standard output.

pub mod config;

pub mod error;
mod request;
mod result;
mod version;

pub use crate::names::{Attachment, ContainerId, IfName, NetworkName, PodIdentity};
pub use config::NetConf;
pub use config::cluster::{ClusterConf, OnUnavailable};
pub use config::ipam::{IpamConf, RequestedAddress};
pub use config::resolv::parse_resolv_conf;
pub use config::sticky::{
    NodeRetention, OnExhaustion, PluginLogLevel, PodPattern, StatusWhenExhausted, StickyConf,
};
pub use error::{CniError, code};
pub use request::input::{ConfigSource, MAX_INPUT, Pollable};
pub use request::verb::Verb;
pub use request::{ParsedRequest, Request, RequestError, about, read_request};
pub use result::{CniResult, Dns, Interface, IpConfig, Route};
pub use version::{CniVersion, UnknownVersion};

#[cfg(test)]
mod reference;
