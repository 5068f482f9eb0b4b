//! Label selectors with the meaning they have in Kubernetes, checked once when they are read.
//!
//! Must never match by guess: a selector that breaks a rule is refused with key, operator and value named.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::policy::PolicyError;

/// A label selector as written in an object or on a command line; not yet checked.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct LabelSelector {
    /// Labels that must be there with exactly these values.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub match_labels: BTreeMap<String, String>,
    /// Further requirements; all of them must hold.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub match_expressions: Vec<Expression>,
}

/// One requirement as written.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Expression {
    /// The label key.
    pub key: String,
    /// In, NotIn, Exists or DoesNotExist.
    pub operator: String,
    /// The values for In and NotIn; none for the others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub values: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Test {
    In(Vec<String>),
    NotIn(Vec<String>),
    Exists,
    DoesNotExist,
}

/// A checked selector. An empty one matches everything, as in Kubernetes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Selector {
    tests: Vec<(String, Test)>,
}

impl Selector {
    /// Reads the JSON form, as the `--labelSector` flag takes it.
    /// Errors: names the text, or the key, operator and values of the requirement that breaks a rule.
    pub(crate) fn parse(text: &str) -> Result<Self, PolicyError> {
        let refuse = |why: String| PolicyError::SelectorText { text: text.into(), why };
        let value: serde_json::Value =
            serde_json::from_str(text).map_err(|error| refuse(error.to_string()))?;
        // A derived parser accepts `[]` as an empty struct, which would match every pod.
        if !value.is_object() {
            return Err(refuse("it must be a JSON object".into()));
        }
        let written: LabelSelector =
            serde_json::from_value(value).map_err(|error| refuse(error.to_string()))?;
        Self::check(&written)
    }

    /// Checks a selector as written.
    /// Errors: names the key, operator and values of the requirement that breaks a rule.
    pub(crate) fn check(written: &LabelSelector) -> Result<Self, PolicyError> {
        let mut tests = Vec::new();
        for (key, value) in &written.match_labels {
            let refuse = |why| refusal(key, "matchLabels", std::slice::from_ref(value), why);
            check_key(key).map_err(refuse)?;
            check_value(value).map_err(refuse)?;
            tests.push((key.clone(), Test::In(vec![value.clone()])));
        }
        for Expression { key, operator, values } in &written.match_expressions {
            let refuse = |why| refusal(key, operator, values, why);
            check_key(key).map_err(refuse)?;
            for value in values {
                check_value(value).map_err(refuse)?;
            }
            let test = match (operator.as_str(), values.is_empty()) {
                ("In", false) => Test::In(values.clone()),
                ("NotIn", false) => Test::NotIn(values.clone()),
                ("In" | "NotIn", true) => return Err(refuse("needs at least one value")),
                ("Exists", true) => Test::Exists,
                ("DoesNotExist", true) => Test::DoesNotExist,
                ("Exists" | "DoesNotExist", false) => return Err(refuse("takes no values")),
                _ => return Err(refuse("the operator must be In, NotIn, Exists or DoesNotExist")),
            };
            tests.push((key.clone(), test));
        }
        Ok(Self { tests })
    }

    /// The selector in its written form; parsed again, it is the same one.
    pub(crate) fn written(&self) -> LabelSelector {
        let expression = |(key, test): &(String, Test)| {
            let (operator, values) = match test {
                Test::In(values) => ("In", values.clone()),
                Test::NotIn(values) => ("NotIn", values.clone()),
                Test::Exists => ("Exists", Vec::new()),
                Test::DoesNotExist => ("DoesNotExist", Vec::new()),
            };
            Expression { key: key.clone(), operator: operator.to_owned(), values }
        };
        let match_expressions = self.tests.iter().map(expression).collect();
        LabelSelector { match_labels: BTreeMap::new(), match_expressions }
    }

    pub(crate) fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.tests.iter().all(|(key, test)| {
            let value = labels.get(key);
            match test {
                Test::In(values) => value.is_some_and(|value| values.contains(value)),
                Test::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
                Test::Exists => value.is_some(),
                Test::DoesNotExist => value.is_none(),
            }
        })
    }
}

fn refusal(key: &str, operator: &str, values: &[String], why: &'static str) -> PolicyError {
    PolicyError::SelectorRequirement {
        key: key.into(),
        operator: operator.into(),
        values: values.to_vec(),
        why,
    }
}

fn check_key(key: &str) -> Result<(), &'static str> {
    let (prefix, name) = match key.split_once('/') {
        Some((prefix, name)) => (Some(prefix), name),
        None => (None, key),
    };
    let prefix_holds = prefix.is_none_or(|prefix| {
        !prefix.is_empty()
            && prefix.len() <= 253
            && prefix.split('.').all(|part| {
                is_framed(part)
                    && part.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
            })
    });
    if !prefix_holds {
        return Err("the key's prefix must be a DNS name");
    }
    if name.is_empty() || name.len() > 63 || !is_label_text(name) {
        return Err("the key must be 1 to 63 letters, digits, '-', '_' or '.', framed by letters or digits");
    }
    Ok(())
}

fn check_value(value: &str) -> Result<(), &'static str> {
    if value.is_empty() || (value.len() <= 63 && is_label_text(value)) {
        Ok(())
    } else {
        Err("a value must be at most 63 letters, digits, '-', '_' or '.', framed by letters or digits")
    }
}

fn is_label_text(text: &str) -> bool {
    is_framed(text) && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

fn is_framed(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.ends_with(|c: char| c.is_ascii_alphanumeric())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_string(), (*v).to_string())).collect()
    }

    #[test]
    fn each_operator_means_what_it_means_in_kubernetes() {
        let cases = [
            (r#"{"matchLabels":{"app":"db"}}"#, &[("app", "db")][..], true),
            (r#"{"matchLabels":{"app":"db"}}"#, &[("app", "web")], false),
            (r#"{"matchLabels":{"app":"db"}}"#, &[], false),
            (
                r#"{"matchExpressions":[{"key":"app","operator":"In","values":["a","b"]}]}"#,
                &[("app", "b")],
                true,
            ),
            (
                r#"{"matchExpressions":[{"key":"app","operator":"NotIn","values":["a"]}]}"#,
                &[("app", "a")],
                false,
            ),
            // A missing label satisfies NotIn: this surprises people, and it is what Kubernetes does.
            (r#"{"matchExpressions":[{"key":"app","operator":"NotIn","values":["a"]}]}"#, &[], true),
            (r#"{"matchExpressions":[{"key":"app","operator":"Exists"}]}"#, &[("app", "")], true),
            (r#"{"matchExpressions":[{"key":"app","operator":"Exists"}]}"#, &[], false),
            (r#"{"matchExpressions":[{"key":"app","operator":"DoesNotExist"}]}"#, &[("app", "x")], false),
            (r#"{"matchExpressions":[{"key":"app","operator":"DoesNotExist"}]}"#, &[], true),
            ("{}", &[("any", "thing")], true),
            (
                r#"{"matchLabels":{"a":"1"},"matchExpressions":[{"key":"b","operator":"Exists"}]}"#,
                &[("a", "1")],
                false,
            ),
        ];
        for (text, pod, expected) in cases {
            assert_eq!(Selector::parse(text).unwrap().matches(&labels(pod)), expected, "{text} on {pod:?}");
        }
    }

    #[test]
    fn a_selector_that_is_written_down_and_read_again_is_the_same() {
        let text = r#"{"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "c", "operator": "NotIn", "values": ["d"]},
            {"key": "e", "operator": "Exists"}, {"key": "f", "operator": "DoesNotExist"}]}"#;
        for text in [text, "{}"] {
            let selector = Selector::parse(text).unwrap();
            assert_eq!(Selector::check(&selector.written()), Ok(selector));
        }
    }

    #[test]
    fn a_refusal_names_key_operator_and_value() {
        let cases = [
            (r#"{"matchExpressions":[{"key":"app","operator":"Is","values":["a"]}]}"#, ["app", "Is", "a"]),
            (r#"{"matchExpressions":[{"key":"app","operator":"In"}]}"#, ["app", "In", "at least one"]),
            (
                r#"{"matchExpressions":[{"key":"app","operator":"Exists","values":["v"]}]}"#,
                ["app", "Exists", "v"],
            ),
            (r#"{"matchLabels":{"bad key":"v"}}"#, ["bad key", "matchLabels", "v"]),
            (r#"{"matchLabels":{"Upper.example/x":"v"}}"#, ["Upper.example/x", "matchLabels", "DNS"]),
            (r#"{"matchLabels":{"app":"-v"}}"#, ["app", "matchLabels", "-v"]),
        ];
        for (text, parts) in cases {
            let message = Selector::parse(text).unwrap_err().to_string();
            for part in parts {
                assert!(message.contains(part), "{message:?} does not name {part:?}");
            }
        }
    }

    #[test]
    fn text_that_is_no_selector_is_refused_with_the_text() {
        for text in ["", "app=db", "[]", r#"{"matchLabel":{"a":"b"}}"#, r#"{"matchLabels":{"a":1}}"#] {
            let message = Selector::parse(text).unwrap_err().to_string();
            assert!(message.contains(&format!("{text:?}")), "{message}");
        }
    }
}
