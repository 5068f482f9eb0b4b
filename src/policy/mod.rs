//! Decides which pods are sticky, under which name, with which addresses, and for how long. Pure functions.
//!
//! Plugin, agent, controller and command line share it, so all four give the same answer to the same facts.
//! Must never use a clock, a disk or a network: the caller passes the time, and the caller's facts say what
//! was looked up. Every answer carries its reason as data, because users ask why.

pub mod drift;
pub mod endpoint;
pub mod handover;
pub mod lifetime;
pub mod mode;
pub mod node_blocks;
pub mod pool_size;
pub mod preflight;
pub mod selection;

use thiserror::Error;

/// A request of an operator or a workload that cannot be followed, with the key and the value to correct.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PolicyError {
    #[error(
        "label selector {text:?} cannot be read: {why}; write it as {{\"matchLabels\":{{\"app\":\"db\"}}}}"
    )]
    SelectorText { text: String, why: String },
    #[error("label selector: key {key:?}, operator {operator:?}, values {values:?}: {why}")]
    SelectorRequirement { key: String, operator: String, values: Vec<String>, why: &'static str },
    #[error("annotation {key}: {value:?}: {why}")]
    Annotation { key: String, value: String, why: String },
    #[error(
        "annotations {ours}: {ours_value:?} and {theirs}: {theirs_value:?} ask for different addresses; \
         remove one"
    )]
    PinsDisagree { ours: &'static str, ours_value: String, theirs: &'static str, theirs_value: String },
}

impl PolicyError {
    fn annotation(key: &str, value: &str, why: impl Into<String>) -> Self {
        Self::Annotation { key: key.into(), value: value.into(), why: why.into() }
    }
}
