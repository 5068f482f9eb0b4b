//! Decides which pods are sticky, and why. Must never say yes for a pod that has no address of its own.
//!
//! The first rule that applies wins: host network (no) → excluded (no) → the pod's annotation (yes or no) → a
//! pin (yes) → the `fixed-ip` label or annotation (yes) → the namespace's annotation (yes or no) → the
//! selector (yes) → no. Exclusion wins over annotation and pin: a copy of a workload for a test branch has
//! the same template, and with it the same annotations and pins as the one it must not disturb.

use std::collections::BTreeMap;

use thiserror::Error;

use crate::policy::PolicyError;
use crate::policy::selection::facts::PodFacts;
use crate::policy::selection::pin::{CALICO_ADDRESSES, PIN};
use crate::policy::selection::selector::Selector;

/// The annotation, on a pod or its namespace, that says yes (`"true"`) or no (`"false"`).
pub const STICKY: &str = "sticky-ipam.io/sticky";
/// The older label or annotation of a pod that says yes if it is `"true"`.
pub(crate) const FIXED_IP: &str = "fixed-ip";
/// The label whose value's prefix excludes a pod, unless configured otherwise.
pub(crate) const DEFAULT_EXCLUDE_KEY: &str = "dbbranch";

/// The operator's rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// Selects pods by label; without it no pod is selected.
    pub selector: Option<Selector>,
    /// The label whose value is compared with the prefixes.
    pub exclude_key: String,
    /// A value that starts with one of these excludes the pod. Empty prefixes are ignored: they would exclude
    /// all.
    pub exclude_prefixes: Vec<String>,
}

impl Default for Rules {
    fn default() -> Self {
        Self { selector: None, exclude_key: DEFAULT_EXCLUDE_KEY.into(), exclude_prefixes: Vec::new() }
    }
}

/// Why a pod is sticky or not.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum StickyReason {
    #[error("it uses its node's network")]
    HostNetwork,
    #[error("its label {key}: {value:?} starts with the excluded prefix {prefix:?}")]
    Excluded { key: String, value: String, prefix: String },
    #[error("its annotation {STICKY} says so")]
    PodAnnotation,
    #[error("its annotation {key} asks for an address")]
    Pinned { key: &'static str },
    #[error("it has {FIXED_IP}: \"true\"")]
    FixedIp,
    #[error("its namespace's annotation {STICKY} says so")]
    NamespaceAnnotation,
    #[error("the label selector selects it")]
    Selected,
    #[error("no annotation and no selector applies to it")]
    NothingAsksForIt,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub sticky: bool,
    pub reason: StickyReason,
}

impl Rules {
    /// Decides for one pod.
    /// Errors: an annotation that is neither `"true"` nor `"false"` is refused and named: a guess could give
    /// a database a wrong address.
    pub(crate) fn judge(&self, pod: &PodFacts) -> Result<Verdict, PolicyError> {
        let verdict = |sticky, reason| Ok(Verdict { sticky, reason });
        if pod.host_network {
            return verdict(false, StickyReason::HostNetwork);
        }
        if let Some(reason) = self.exclusion(&pod.labels) {
            return verdict(false, reason);
        }
        let said = |annotations: &BTreeMap<String, String>| {
            yes_or_no(STICKY, annotations.get(STICKY), "must be \"true\" or \"false\"")
        };
        if let Some(sticky) = said(&pod.annotations)? {
            return verdict(sticky, StickyReason::PodAnnotation);
        }
        if let Some(key) = [PIN, CALICO_ADDRESSES].into_iter().find(|key| pod.annotations.contains_key(*key))
        {
            return verdict(true, StickyReason::Pinned { key });
        }
        if [&pod.labels, &pod.annotations]
            .iter()
            .any(|marks| marks.get(FIXED_IP).is_some_and(|v| v == "true"))
        {
            return verdict(true, StickyReason::FixedIp);
        }
        if let Some(sticky) = said(&pod.namespace_annotations)? {
            return verdict(sticky, StickyReason::NamespaceAnnotation);
        }
        if self.selector.as_ref().is_some_and(|selector| selector.matches(&pod.labels)) {
            return verdict(true, StickyReason::Selected);
        }
        verdict(false, StickyReason::NothingAsksForIt)
    }

    fn exclusion(&self, labels: &BTreeMap<String, String>) -> Option<StickyReason> {
        let value = labels.get(&self.exclude_key)?;
        let prefix =
            self.exclude_prefixes.iter().find(|prefix| !prefix.is_empty() && value.starts_with(*prefix))?;
        let (key, value, prefix) = (self.exclude_key.clone(), value.clone(), prefix.clone());
        Some(StickyReason::Excluded { key, value, prefix })
    }
}

/// What an annotation says, if it is there.
/// Errors: neither `true` nor `false`; `why` is what to write instead.
pub(super) fn yes_or_no(key: &str, word: Option<&String>, why: &str) -> Result<Option<bool>, PolicyError> {
    word.map(|word| word.parse().map_err(|_| PolicyError::annotation(key, word, why))).transpose()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::selection::facts::fixture::pod;

    fn rules() -> Rules {
        Rules {
            selector: Some(Selector::parse(r#"{"matchLabels":{"app":"db"}}"#).unwrap()),
            exclude_prefixes: vec!["test-".into(), String::new()],
            ..Rules::default()
        }
    }

    fn verdict(pod: &PodFacts) -> (bool, StickyReason) {
        let verdict = rules().judge(pod).unwrap();
        (verdict.sticky, verdict.reason)
    }

    #[test]
    fn a_pod_that_nothing_asks_for_is_not_sticky() {
        assert_eq!(verdict(&pod("a")), (false, StickyReason::NothingAsksForIt));
        assert_eq!(verdict(&pod("a").label("dbbranch", "main")), (false, StickyReason::NothingAsksForIt));
    }

    #[test]
    fn selector_annotation_and_fixed_ip_each_make_a_pod_sticky() {
        assert_eq!(verdict(&pod("a").label("app", "db")), (true, StickyReason::Selected));
        assert_eq!(verdict(&pod("a").annotation(STICKY, "true")), (true, StickyReason::PodAnnotation));
        assert_eq!(verdict(&pod("a").label(FIXED_IP, "true")), (true, StickyReason::FixedIp));
        assert_eq!(verdict(&pod("a").annotation(FIXED_IP, "true")), (true, StickyReason::FixedIp));
        assert_eq!(verdict(&pod("a").label(FIXED_IP, "false")), (false, StickyReason::NothingAsksForIt));
        assert_eq!(verdict(&pod("a").annotation(PIN, "10.0.0.1")), (true, StickyReason::Pinned { key: PIN }));
    }

    #[test]
    fn the_pod_overrules_its_namespace_and_the_namespace_overrules_the_selector() {
        let mut quiet = pod("a").label("app", "db");
        quiet.namespace_annotations.insert(STICKY.into(), "false".into());
        assert_eq!(verdict(&quiet), (false, StickyReason::NamespaceAnnotation));
        assert_eq!(verdict(&quiet.clone().annotation(STICKY, "true")), (true, StickyReason::PodAnnotation));
        let mut loud = pod("a");
        loud.namespace_annotations.insert(STICKY.into(), "true".into());
        assert_eq!(verdict(&loud), (true, StickyReason::NamespaceAnnotation));
        assert_eq!(verdict(&loud.annotation(STICKY, "false")), (false, StickyReason::PodAnnotation));
    }

    #[test]
    fn exclusion_beats_every_wish_and_says_which_prefix() {
        let copy = pod("a")
            .label("app", "db")
            .label("dbbranch", "test-7")
            .annotation(STICKY, "true")
            .annotation(PIN, "10.0.0.1");
        let (sticky, reason) = verdict(&copy);
        assert!(!sticky);
        assert!(reason.to_string().contains("\"test-\""), "{reason}");
    }

    #[test]
    fn the_excluding_label_is_the_operators_choice() {
        let rules = Rules { exclude_key: "branch".into(), ..rules() };
        assert!(!rules.judge(&pod("a").label("app", "db").label("branch", "test-1")).unwrap().sticky);
        assert!(rules.judge(&pod("a").label("app", "db").label("dbbranch", "test-1")).unwrap().sticky);
    }

    #[test]
    fn a_host_network_pod_is_never_sticky() {
        let mut host = pod("a").annotation(STICKY, "true");
        host.host_network = true;
        assert_eq!(verdict(&host), (false, StickyReason::HostNetwork));
    }

    #[test]
    fn an_annotation_that_is_neither_yes_nor_no_is_refused_by_name_and_value() {
        let message = rules().judge(&pod("a").annotation(STICKY, "yes")).unwrap_err().to_string();
        assert!(message.contains(STICKY) && message.contains("\"yes\""), "{message}");
    }
}
