//! Errors as the specification wants them printed, and every code that is ever used, in one place.
//!
//! A message is one sentence that says what was wrong and what would be right; it must never be a mere code,
//! and never carry a secret.

use std::fmt;

use serde_json::{Map, Value, json};

use crate::cni::version::CniVersion;
use crate::names::clipped;

/// The codes. 1 to 99 are the specification's, 100 and above ours.
pub mod code {
    /// The configuration's version is not spoken, or does not know the verb.
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    /// A field of the configuration is not supported.
    pub const UNSUPPORTED_FIELD: u32 = 2;
    /// The container is not known; the runtime need not clean up.
    pub const UNKNOWN_CONTAINER: u32 = 3;
    /// An environment variable is missing or invalid.
    pub const INVALID_ENVIRONMENT: u32 = 4;
    /// Reading or writing failed.
    pub const IO_FAILURE: u32 = 5;
    /// The input is not what it should be made of.
    pub const DECODING_FAILURE: u32 = 6;
    /// The configuration can be read but not followed.
    pub const INVALID_CONFIG: u32 = 7;
    /// The network namespace is the plugin's own.
    pub const INVALID_NETNS: u32 = 8;
    /// A passing condition; the runtime should call again.
    pub const TRY_AGAIN: u32 = 11;
    /// ADD cannot be served.
    pub const NOT_AVAILABLE: u32 = 50;
    /// ADD cannot be served, and running pods may be cut off.
    pub const LIMITED_CONNECTIVITY: u32 = 51;
    /// No address is free.
    pub const EXHAUSTED: u32 = 100;
    /// A requested address belongs to someone else, or to nobody here.
    pub const REQUEST_REFUSED: u32 = 101;
    /// The store cannot be used as it is: written by a newer version, or damaged.
    pub const STORE_UNUSABLE: u32 = 102;
    /// CHECK found something other than what ADD left.
    pub const CHECK_FAILED: u32 = 103;
    /// The delegate plugin could not be run, or answered with nonsense.
    pub const DELEGATE_FAILED: u32 = 104;
    /// A defect of ours.
    pub const INTERNAL: u32 = 999;

    /// Every code with a name and its meaning, for the documentation and for `about`.
    pub const TABLE: &[(u32, &str, &str)] = &[
        (INCOMPATIBLE_VERSION, "incompatible version", "cniVersion is not spoken, or lacks the verb"),
        (UNSUPPORTED_FIELD, "unsupported field", "a field that cannot be honoured"),
        (UNKNOWN_CONTAINER, "unknown container", "nothing to clean up"),
        (INVALID_ENVIRONMENT, "invalid environment", "a CNI_ variable is missing or invalid"),
        (IO_FAILURE, "I/O failure", "a file or standard input could not be read or written"),
        (DECODING_FAILURE, "decoding failure", "not JSON, or a field of the wrong JSON type"),
        (INVALID_CONFIG, "invalid configuration", "a field has a value that cannot be followed"),
        (INVALID_NETNS, "invalid network namespace", "CNI_NETNS is the plugin's own namespace"),
        (TRY_AGAIN, "try again later", "a passing condition"),
        (NOT_AVAILABLE, "not available", "ADD cannot be served"),
        (LIMITED_CONNECTIVITY, "limited connectivity", "ADD cannot be served and pods may be cut off"),
        (EXHAUSTED, "no address free", "every address of a range set is in use or kept"),
        (REQUEST_REFUSED, "requested address refused", "outside the ranges, the gateway, or someone else's"),
        (STORE_UNUSABLE, "store unusable", "written by a newer version, or damaged"),
        (CHECK_FAILED, "check failed", "the attachment is not as ADD left it"),
        (DELEGATE_FAILED, "delegate failed", "the delegate plugin could not be run or answered nonsense"),
        (INTERNAL, "internal error", "a defect; please report it"),
    ];
}

/// An error of the protocol: a code, a sentence, and more where there is more to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CniError {
    pub code: u32,
    /// What was wrong and what would be right.
    pub msg: String,
    /// More about it; empty when there is nothing to add.
    pub details: String,
}

impl CniError {
    /// An error with a code of the table.
    pub fn new(code: u32, msg: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: String::new() }
    }

    /// The same with more about it.
    pub(crate) fn with_details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    /// Code 1.
    pub(crate) fn incompatible_version(msg: impl Into<String>) -> Self {
        Self::new(code::INCOMPATIBLE_VERSION, msg)
            .with_details(format!("supported versions: {}", CniVersion::supported_list()))
    }

    /// Code 3.
    pub(crate) fn unknown_container(msg: impl Into<String>) -> Self {
        Self::new(code::UNKNOWN_CONTAINER, msg)
    }

    /// Code 4: the message must name the variables.
    pub(crate) fn invalid_environment(msg: impl Into<String>) -> Self {
        Self::new(code::INVALID_ENVIRONMENT, msg)
    }

    /// Code 5.
    pub fn io(msg: impl Into<String>) -> Self {
        Self::new(code::IO_FAILURE, msg)
    }

    /// Code 6.
    pub(crate) fn decoding(msg: impl Into<String>) -> Self {
        Self::new(code::DECODING_FAILURE, msg)
    }

    /// Code 6, for a field whose JSON type is wrong.
    pub(crate) fn wrong_type(field: &str, value: &Value, right: &str) -> Self {
        Self::decoding(format!("{field}: {} is not {right}", shown(value)))
    }

    /// Code 7: the field and a sentence about its value.
    pub(crate) fn invalid_config(field: &str, problem: impl fmt::Display) -> Self {
        Self::new(code::INVALID_CONFIG, format!("{field}: {problem}"))
    }

    /// Code 8.
    pub(crate) fn invalid_netns(msg: impl Into<String>) -> Self {
        Self::new(code::INVALID_NETNS, msg)
    }

    /// Code 11.
    pub(crate) fn try_again(msg: impl Into<String>) -> Self {
        Self::new(code::TRY_AGAIN, msg)
    }

    /// Code 50.
    pub(crate) fn not_available(msg: impl Into<String>) -> Self {
        Self::new(code::NOT_AVAILABLE, msg)
    }

    /// Code 999.
    pub(crate) fn internal(msg: impl Into<String>) -> Self {
        Self::new(code::INTERNAL, msg)
    }

    /// The error object to print; it always names a version.
    pub fn to_json(&self, version: CniVersion) -> Value {
        let mut object = Map::new();
        object.insert("cniVersion".into(), json!(version.as_str()));
        object.insert("code".into(), json!(self.code));
        object.insert("msg".into(), json!(self.msg));
        if !self.details.is_empty() {
            object.insert("details".into(), json!(self.details));
        }
        Value::Object(object)
    }
}

impl fmt::Display for CniError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.msg)?;
        if self.details.is_empty() { Ok(()) } else { write!(f, "; {}", self.details) }
    }
}

impl std::error::Error for CniError {}

/// A value of the configuration, short enough for a message.
pub(crate) fn shown(value: &Value) -> String {
    clipped(&value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_stands_once_in_the_table_and_ours_start_at_one_hundred() {
        let codes: Vec<u32> = code::TABLE.iter().map(|row| row.0).collect();
        assert!(codes.is_sorted_by(|a, b| a < b), "{codes:?}");
        assert!(codes.contains(&code::EXHAUSTED) && code::EXHAUSTED >= 100);
    }

    #[test]
    fn an_error_always_names_its_version_and_leaves_empty_details_out() {
        let error = CniError::io("disk full");
        let printed = error.to_json(CniVersion::V0_4_0);
        assert_eq!(printed, json!({"cniVersion": "0.4.0", "code": 5, "msg": "disk full"}));
        let printed = error.with_details("on /x").to_json(CniVersion::LATEST);
        assert_eq!(printed["details"], "on /x");
    }

    #[test]
    fn a_foreign_value_is_cut_in_messages_but_never_inside_a_character() {
        let long = "é".repeat(5000);
        let error = CniError::wrong_type("ipam.subnet", &json!([long]), "a string");
        assert!(error.msg.chars().count() < 200, "{}", error.msg);
    }
}
