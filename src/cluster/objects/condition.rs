//! A condition, in the shape that every Kubernetes tool knows. Must never carry a decision: it tells of one.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// One condition of an object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What it is about, such as `Ready`.
    #[serde(rename = "type")]
    #[schemars(length(max = 316))]
    pub kind: String,
    /// True, False or Unknown.
    #[schemars(length(max = 16))]
    pub status: String,
    /// A word for machines.
    #[schemars(length(max = 1024))]
    pub reason: String,
    /// A sentence for people: what, why, what next.
    #[schemars(length(max = 32768))]
    pub message: String,
    /// When the status last changed.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub last_transition_time: Time,
}
