//! How long an address is kept after its pod is gone. Must never shorten what the object says.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::policy::PolicyError;
use crate::policy::lifetime::duration::parse_duration;
use crate::policy::selection::facts::PodFacts;

/// The annotation, on a pod or its namespace, that says for how long its address is kept.
pub const RETENTION: &str = "sticky-ipam.io/retention";

/// When an address is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[cfg_attr(feature = "controller", derive(clap::ValueEnum), value(rename_all = "verbatim"))]
pub enum Keep {
    /// When the workload is gone.
    #[default]
    WithWorkload,
    /// A time after the pod was last seen, once the workload or the pod's ordinal is gone.
    #[serde(rename = "TTL")]
    #[cfg_attr(feature = "controller", value(name = "TTL"))]
    Ttl,
    /// Only when its StickyIP is deleted by hand.
    Forever,
}

/// What happens to an address whose ordinal the workload no longer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[cfg_attr(feature = "controller", derive(clap::ValueEnum), value(rename_all = "verbatim"))]
pub(crate) enum OnScaleDown {
    /// It is kept as long as the workload.
    #[default]
    Retain,
    /// It is released at once.
    Release,
    /// It is released a time after the pod was last seen.
    #[serde(rename = "TTL")]
    #[cfg_attr(feature = "controller", value(name = "TTL"))]
    Ttl,
}

/// The retention of one StickyIP, as written in its spec.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, schemars::JsonSchema)]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
#[serde(rename_all = "camelCase")]
pub struct Retention {
    /// When the address is released.
    #[serde(default)]
    pub keep: Keep,
    /// Seconds after the pod was last seen; needed with `keep: TTL`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 315_360_000))]
    pub ttl_seconds: Option<u32>,
    /// What happens to the address when the workload is scaled below this pod.
    #[serde(default)]
    pub(crate) on_scale_down: OnScaleDown,
    /// Seconds after the pod was last seen; needed with `onScaleDown: TTL`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 315_360_000))]
    pub scale_down_ttl_seconds: Option<u32>,
}

impl fmt::Display for Retention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let after =
            |seconds: Option<u32>| format!("{} s after its pod was last seen", seconds.unwrap_or_default());
        match self.keep {
            Keep::WithWorkload => f.write_str("kept as long as its workload")?,
            Keep::Ttl => write!(f, "released {}", after(self.ttl_seconds))?,
            Keep::Forever => f.write_str("kept until its StickyIP is deleted by hand")?,
        }
        match self.on_scale_down {
            OnScaleDown::Retain => Ok(()),
            OnScaleDown::Release => f.write_str("; after a scale-down released at once"),
            OnScaleDown::Ttl => {
                write!(f, "; after a scale-down released {}", after(self.scale_down_ttl_seconds))
            }
        }
    }
}

impl Retention {
    /// Kept until it is released by hand.
    pub const FOREVER: Self = Self {
        keep: Keep::Forever,
        ttl_seconds: None,
        on_scale_down: OnScaleDown::Retain,
        scale_down_ttl_seconds: None,
    };

    /// Kept for this time after the pod was last seen, in whole seconds: one that has begun counts.
    pub fn for_time(time: Duration) -> Self {
        let seconds = time.as_secs().saturating_add(u64::from(time.subsec_nanos() > 0));
        let ttl_seconds = Some(u32::try_from(seconds).unwrap_or(u32::MAX));
        Self { keep: Keep::Ttl, ttl_seconds, ..Self::default() }
    }

    /// The time after which the address is released, if nothing but time releases it.
    pub fn time(&self) -> Option<Duration> {
        let seconds = self.ttl_seconds.filter(|_| self.keep == Keep::Ttl);
        seconds.map(|seconds| Duration::from_secs(seconds.into()))
    }
}

/// The longest TTL that an object takes: ten years.
pub(crate) const LONGEST_TTL: u64 = 315_360_000;

/// Parses an annotation: `WithWorkload`, `Forever`, or a time after the pod was last seen. The rule for
/// scale-down is taken from `default`.
/// Errors: names the annotation and its value.
pub(crate) fn from_annotation(key: &str, text: &str, default: Retention) -> Result<Retention, PolicyError> {
    let (keep, ttl_seconds) = match text {
        "WithWorkload" => (Keep::WithWorkload, None),
        "Forever" => (Keep::Forever, None),
        time => {
            let seconds = parse_duration(time).and_then(|time| u32::try_from(time.as_secs()).ok());
            let seconds = seconds.filter(|seconds| (1..=LONGEST_TTL).contains(&u64::from(*seconds)));
            let why = "must be WithWorkload, Forever, or a time from 1s to ten years such as 72h";
            (Keep::Ttl, Some(seconds.ok_or_else(|| PolicyError::annotation(key, text, why))?))
        }
    };
    Ok(Retention { keep, ttl_seconds, ..default })
}

/// What the pod asks for, else its namespace as far as that was read. The default if neither has a valid
/// annotation: a pod does not fail because of it, and the controller reports it.
pub(crate) fn asked_by(facts: &PodFacts) -> Retention {
    let said = facts.annotations.get(RETENTION).or(facts.namespace_annotations.get(RETENTION));
    let read = |text: &String| from_annotation(RETENTION, text, Retention::default()).ok();
    said.and_then(read).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_annotation_is_a_kind_or_a_duration() {
        let read = |text: &str| from_annotation("k", text, Retention::default());
        assert_eq!(read("Forever").unwrap().keep, Keep::Forever);
        assert_eq!(read("WithWorkload").unwrap(), Retention::default());
        assert_eq!(read("1h").unwrap().ttl_seconds, Some(3600));
        for bad in ["", "forever", "0s", "-1h", "10", "900000h"] {
            let message = read(bad).unwrap_err().to_string();
            assert!(message.contains(&format!("k: {bad:?}")), "{message}");
        }
    }

    #[test]
    fn a_pods_annotation_counts_before_its_namespaces_and_an_unknown_one_is_the_default() {
        let of = |pod: Option<&str>, namespace: Option<&str>| {
            let one = |text: Option<&str>| text.map(|text| (RETENTION.to_owned(), text.to_owned()));
            let annotations = one(pod).into_iter().collect();
            let namespace_annotations = one(namespace).into_iter().collect();
            asked_by(&PodFacts { annotations, namespace_annotations, ..PodFacts::default() })
        };
        assert_eq!(of(None, None), Retention::default());
        assert_eq!(of(Some("1h"), Some("Forever")).ttl_seconds, Some(3600));
        assert_eq!(of(None, Some("Forever")).keep, Keep::Forever);
        assert_eq!(
            of(Some("soon"), Some("Forever")),
            Retention::default(),
            "the pod's word counts, readable or not"
        );
    }

    #[test]
    fn the_written_form_is_the_one_in_the_manual() {
        let read = |text: &str| serde_json::from_str::<Retention>(text).unwrap();
        assert_eq!(read("{}"), Retention::default());
        let ttl = read(r#"{"keep":"TTL","onScaleDown":"TTL","ttlSeconds":5,"scaleDownTtlSeconds":6}"#);
        assert_eq!((ttl.keep, ttl.on_scale_down), (Keep::Ttl, OnScaleDown::Ttl));
    }
}
