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
    /// The generation of the object that it tells of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
}

impl Condition {
    /// Whether it says the same, whenever it was said.
    pub fn says_the_same(&self, other: &Self) -> bool {
        (&self.kind, &self.status, &self.reason, &self.message)
            == (&other.kind, &other.status, &other.reason, &other.message)
    }
}

/// Puts a condition in the place of the one of its kind. One whose status is as it was keeps the time at
/// which that changed.
pub fn set(conditions: &mut Vec<Condition>, mut new: Condition) {
    match conditions.iter_mut().find(|condition| condition.kind == new.kind) {
        Some(old) => {
            if old.status == new.status {
                new.last_transition_time = old.last_transition_time.clone();
            }
            *old = new;
        }
        None => conditions.push(new),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::jiff::Timestamp;

    #[test]
    fn a_condition_has_the_time_of_its_status_and_not_of_its_message() {
        let at = |second: i64, status: &str, message: &str| Condition {
            kind: "Releasing".into(),
            status: status.into(),
            reason: "TTLRunning".into(),
            message: message.into(),
            last_transition_time: Time(Timestamp::from_second(second).unwrap()),
            observed_generation: None,
        };
        let mut all = Vec::new();
        set(&mut all, at(1, "True", "a"));
        set(&mut all, at(2, "True", "b"));
        assert_eq!(all, [at(1, "True", "b")]);
        set(&mut all, at(3, "False", "b"));
        assert_eq!(all, [at(3, "False", "b")]);
        assert!(at(1, "True", "a").says_the_same(&at(9, "True", "a")));
        assert!(!at(1, "True", "a").says_the_same(&at(1, "True", "b")));
    }
}
