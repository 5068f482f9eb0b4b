//! Errors as the specification wants them printed, and every code that is ever used, in one place.
//!
//! A message is one sentence that says what was wrong and what would be right; it must never be a mere code,
//! and never carry a secret.

use std::fmt;

use serde_json::{Value, json};

use crate::cni::version::CniVersion;
use crate::names::clipped;

/// The codes: 1 to 99 are the specification's, 100 and above ours (docs/configuration.md).
pub mod code {
    pub const INCOMPATIBLE_VERSION: u32 = 1;
    pub const UNSUPPORTED_FIELD: u32 = 2;
    pub const UNKNOWN_CONTAINER: u32 = 3;
    pub const INVALID_ENVIRONMENT: u32 = 4;
    pub const IO_FAILURE: u32 = 5;
    pub const DECODING_FAILURE: u32 = 6;
    pub const INVALID_CONFIG: u32 = 7;
    pub const INVALID_NETNS: u32 = 8;
    pub const TRY_AGAIN: u32 = 11;
    pub const NOT_AVAILABLE: u32 = 50;
    pub const LIMITED_CONNECTIVITY: u32 = 51;
    pub const EXHAUSTED: u32 = 100;
    pub const REQUEST_REFUSED: u32 = 101;
    pub const STORE_UNUSABLE: u32 = 102;
    pub const CHECK_FAILED: u32 = 103;
    pub const DELEGATE_FAILED: u32 = 104;
    pub const INTERNAL: u32 = 999;
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
    pub fn new(code: u32, msg: impl Into<String>) -> Self {
        Self { code, msg: msg.into(), details: String::new() }
    }

    /// The same with more about it.
    pub(crate) fn with_details(mut self, details: impl Into<String>) -> Self {
        self.details = details.into();
        self
    }

    pub(crate) fn incompatible_version(msg: impl Into<String>) -> Self {
        Self::new(code::INCOMPATIBLE_VERSION, msg)
            .with_details(format!("supported versions: {}", CniVersion::supported_list()))
    }

    /// Code 4: the message must name the variables.
    pub(crate) fn invalid_environment(msg: impl Into<String>) -> Self {
        Self::new(code::INVALID_ENVIRONMENT, msg)
    }

    pub fn io(msg: impl Into<String>) -> Self {
        Self::new(code::IO_FAILURE, msg)
    }

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

    pub(crate) fn try_again(msg: impl Into<String>) -> Self {
        Self::new(code::TRY_AGAIN, msg)
    }

    pub(crate) fn not_available(msg: impl Into<String>) -> Self {
        Self::new(code::NOT_AVAILABLE, msg)
    }

    pub(crate) fn internal(msg: impl Into<String>) -> Self {
        Self::new(code::INTERNAL, msg)
    }

    /// The error object to print; it always names a version.
    pub fn to_json(&self, version: CniVersion) -> Value {
        let mut object = json!({"cniVersion": version.as_str(), "code": self.code, "msg": self.msg});
        if !self.details.is_empty() {
            object["details"] = json!(self.details);
        }
        object
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
        let codes: Vec<u32> = crate::cni::reference::CODES.iter().map(|row| row.0).collect();
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
