//! Reading fields out of a JSON object so that every complaint names the field by its full path.
//!
//! `null` is the same as absent, and a key is found in any case when its exact spelling is absent: both as
//! host-local reads its configuration.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};

use crate::cni::error::{CniError, shown};
use crate::policy::lifetime::duration::parse_duration;

/// The longest wait that may be configured; runtimes give up long before.
pub(crate) const MAX_WAIT: Duration = Duration::from_secs(600);

/// An object of the configuration and the path that leads to it.
#[derive(Clone)]
pub(crate) struct Fields<'a> {
    path: String,
    map: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    pub(crate) fn root(map: &'a Map<String, Value>) -> Self {
        Self { path: String::new(), map }
    }

    /// The value as an object under this path.
    pub(crate) fn of(path: String, value: &'a Value) -> Result<Self, CniError> {
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            other => Err(CniError::wrong_type(&path, other, "an object")),
        }
    }

    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    pub(crate) fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.map.keys().map(String::as_str)
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        let exact = self.map.get(key);
        let value =
            exact.or_else(|| self.map.iter().find(|(k, _)| k.eq_ignore_ascii_case(key)).map(|(_, v)| v));
        value.filter(|v| !v.is_null())
    }

    /// The refusal of this field's value, with a sentence about it.
    pub(crate) fn invalid(&self, key: &str, problem: impl fmt::Display) -> CniError {
        CniError::invalid_config(&self.path_of(key), problem)
    }

    /// Refuses a key that is none of the known ones.
    pub(crate) fn refuse_unknown(&self, known: &[&str]) -> Result<(), CniError> {
        let Some(unknown) = self.keys().find(|key| !known.contains(key)) else { return Ok(()) };
        let hint = nearest(unknown, known).unwrap_or_default();
        let value = self.get(unknown).map_or_else(|| "null".to_owned(), shown);
        let known = known.join(", ");
        let problem = format!("no such field (its value is {value}); did you mean {hint:?}? Known: {known}");
        Err(self.invalid(unknown, problem))
    }

    fn read<T>(
        &self,
        key: &str,
        right: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, CniError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| CniError::wrong_type(&self.path_of(key), value, right))
    }

    pub(crate) fn string(&self, key: &str) -> Result<Option<&'a str>, CniError> {
        self.read(key, "a string", Value::as_str)
    }

    pub(crate) fn number(&self, key: &str) -> Result<Option<u64>, CniError> {
        self.read(key, "a whole number of zero or more", Value::as_u64)
    }

    pub(crate) fn object(&self, key: &str) -> Result<Option<Self>, CniError> {
        self.get(key).map(|value| Self::of(self.path_of(key), value)).transpose()
    }

    pub(crate) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, CniError> {
        self.read(key, "a list", |value| value.as_array().map(Vec::as_slice))
    }

    /// A list of strings, each parsed; a problem is a sentence about the string.
    pub(crate) fn strings<T>(
        &self,
        key: &str,
        parse: impl Fn(&'a str) -> Result<T, String>,
    ) -> Result<Option<Vec<T>>, CniError> {
        let Some(items) = self.list(key)? else { return Ok(None) };
        let item_path = |i| format!("{}[{i}]", self.path_of(key));
        let text = |(i, item): (usize, &'a Value)| {
            item.as_str().ok_or_else(|| CniError::wrong_type(&item_path(i), item, "a string"))
        };
        // The types first: a string is parsed only if all items are strings.
        let texts = items.iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?;
        let parsed = texts
            .into_iter()
            .enumerate()
            .map(|(i, text)| parse(text).map_err(|problem| CniError::invalid_config(&item_path(i), problem)));
        parsed.collect::<Result<_, _>>().map(Some)
    }

    pub(crate) fn owned_strings(&self, key: &str) -> Result<Vec<String>, CniError> {
        Ok(self.strings(key, |text| Ok(text.to_owned()))?.unwrap_or_default())
    }

    /// A path that does not depend on where the plugin happens to be started; empty is absent.
    pub(crate) fn absolute_path(&self, key: &str) -> Result<Option<PathBuf>, CniError> {
        match self.string(key)? {
            None | Some("") => Ok(None),
            Some(text) if text.contains('\0') => {
                Err(self.invalid(key, format!("{text:?} is no path; it must not hold a NUL character")))
            }
            Some(text) if text.starts_with('/') => Ok(Some(PathBuf::from(text))),
            Some(text) => {
                Err(self.invalid(key, format!("{text:?} is not an absolute path; start it with '/'")))
            }
        }
    }

    /// One of these words, or the default.
    pub(crate) fn choice<T: Copy>(&self, key: &str, known: &[(&str, T)], default: T) -> Result<T, CniError> {
        let Some(text) = self.string(key)? else { return Ok(default) };
        let chosen = known.iter().find(|(word, _)| *word == text);
        chosen.map(|(_, value)| *value).ok_or_else(|| {
            let words: Vec<String> = known.iter().map(|(word, _)| format!("{word:?}")).collect();
            self.invalid(key, format!("{text:?} is none of {}", words.join(", ")))
        })
    }

    pub(crate) fn wait(&self, key: &str) -> Result<Option<Duration>, CniError> {
        let Some(text) = self.string(key)? else { return Ok(None) };
        parse_duration(text).filter(|time| *time <= MAX_WAIT).map(Some).ok_or_else(|| {
            let right = "is not a duration of at most 10m; write one such as \"10s\" or \"1m30s\"";
            self.invalid(key, format!("{text:?} {right}"))
        })
    }

    /// The pairs whose keys are none of the known ones, which are carried along unread.
    pub(crate) fn others(&self, known: &[&str]) -> Map<String, Value> {
        let unknown =
            self.map.iter().filter(|(k, _)| !known.iter().any(|known| k.eq_ignore_ascii_case(known)));
        unknown.map(|(k, v)| (k.clone(), v.clone())).collect()
    }
}

/// The known word that the given one was most likely meant to be.
pub(crate) fn nearest<'k>(given: &str, known: &[&'k str]) -> Option<&'k str> {
    known.iter().copied().min_by_key(|word| edit_distance(given, word))
}

/// How many letters must be changed, put in or taken out to get from one word to the other, whatever their
/// case.
fn edit_distance(from: &str, to: &str) -> usize {
    // No misspelt key differs in more letters than this; it bounds the work on hostile input.
    let from: Vec<char> = from.chars().take(64).map(|c| c.to_ascii_lowercase()).collect();
    let to: Vec<char> = to.chars().map(|c| c.to_ascii_lowercase()).collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (i, a) in from.iter().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in to.iter().enumerate() {
            let changed = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_nearest_word_is_the_one_with_the_fewest_letters_to_change() {
        assert_eq!(nearest("retenton", &["pods", "retention", "logFile"]), Some("retention"));
        assert_eq!(nearest("LOGFILE", &["pods", "retention", "logFile"]), Some("logFile"));
        assert_eq!(nearest("", &["pods", "logFile"]), Some("pods"));
    }

    #[test]
    fn null_is_absent_and_case_does_not_matter_but_the_exact_key_wins() {
        let value = json!({"a": null, "SubNet": "x", "gateway": "exact", "GATEWAY": "other"});
        let fields = Fields::of("ipam".into(), &value).unwrap();
        assert!(fields.get("a").is_none());
        assert_eq!(fields.string("subnet"), Ok(Some("x")));
        assert_eq!(fields.string("gateway"), Ok(Some("exact")));
    }

    #[test]
    fn a_wrong_type_is_reported_with_the_full_path_and_what_would_be_right() {
        let value = json!({"n": -1, "list": ["a", 5], "p": "relative"});
        let fields = Fields::of("ipam.sticky".into(), &value).unwrap();
        let error = fields.number("n").unwrap_err();
        assert_eq!(error.code, 6);
        assert!(error.msg.contains("ipam.sticky.n") && error.msg.contains("-1"), "{error}");
        assert!(fields.owned_strings("list").unwrap_err().msg.contains("ipam.sticky.list[1]"));
        assert_eq!(fields.absolute_path("p").unwrap_err().code, 7);
    }
}
