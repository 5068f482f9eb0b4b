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
pub mod selection;

use thiserror::Error;

/// A request of an operator or a workload that cannot be followed, with the key and the value to correct.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum PolicyError {
    /// The text is no label selector in JSON form.
    #[error(
        "label selector {text:?} cannot be read: {why}; write it as {{\"matchLabels\":{{\"app\":\"db\"}}}}"
    )]
    SelectorText {
        /// The text as given.
        text: String,
        /// What the parser found.
        why: String,
    },
    /// One requirement of a selector breaks the rules of label selectors.
    #[error("label selector: key {key:?}, operator {operator:?}, values {values:?}: {why}")]
    SelectorRequirement {
        /// The label key.
        key: String,
        /// The operator as written.
        operator: String,
        /// The values as written.
        values: Vec<String>,
        /// Which rule is broken.
        why: &'static str,
    },
    /// An annotation's value is not one of those that we understand.
    #[error("annotation {key}: {value:?}: {why}")]
    Annotation {
        /// The annotation's key.
        key: String,
        /// Its value as written.
        value: String,
        /// What is wrong, and what would be right.
        why: String,
    },
    /// Two annotations pin different addresses.
    #[error(
        "annotations {ours}: {ours_value:?} and {theirs}: {theirs_value:?} ask for different addresses; \
         remove one"
    )]
    PinsDisagree {
        /// Our annotation's key.
        ours: &'static str,
        ours_value: String,
        /// The other annotation's key.
        theirs: &'static str,
        theirs_value: String,
    },
    /// A retention setting contradicts itself.
    #[error("retention: {field} {why}")]
    Retention {
        /// The field's name as in the object.
        field: &'static str,
        /// What is wrong with it.
        why: &'static str,
    },
}
