//! The facts about a pod that decisions depend on, without any client library. Must never look anything up.

use std::collections::BTreeMap;

/// Seconds since 1970 by the clock of the caller, who passes them. Decisions use differences only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct TimePoint(pub i64);

impl TimePoint {
    /// Seconds since `earlier`; zero if `earlier` is in the future (it may come from another machine's
    /// clock).
    pub fn seconds_since(self, earlier: TimePoint) -> u64 {
        u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0)
    }
}

/// An owner reference of an object.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Owner {
    /// Group and version, such as `apps/v1`.
    pub api_version: String,
    pub kind: String,
    pub name: String,
    /// The owner's uid; empty when it was derived from a name and not looked up.
    pub uid: String,
}

impl Owner {
    /// The API group: `apps` of `apps/v1`, empty for the core group.
    pub(crate) fn group(&self) -> &str {
        self.api_version.split_once('/').map_or("", |(group, _)| group)
    }
}

/// What a decision needs to know of a pod.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PodFacts {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    /// Its controlling owner first, then that owner's controller, and so on, as far as it was looked up.
    pub owners: Vec<Owner>,
    /// It uses its node's network and so has no address of its own.
    pub host_network: bool,
    pub namespace_annotations: BTreeMap<String, String>,
}

#[cfg(test)]
pub(crate) mod fixture {
    use super::{Owner, PodFacts};

    pub(crate) fn pod(name: &str) -> PodFacts {
        PodFacts {
            namespace: "db".into(),
            name: name.into(),
            uid: format!("uid-{name}"),
            ..PodFacts::default()
        }
    }

    pub(crate) fn owner(api_version: &str, kind: &str, name: &str) -> Owner {
        Owner {
            api_version: api_version.into(),
            kind: kind.into(),
            name: name.into(),
            uid: format!("uid-{kind}-{name}"),
        }
    }

    impl PodFacts {
        pub(crate) fn label(mut self, key: &str, value: &str) -> Self {
            self.labels.insert(key.into(), value.into());
            self
        }
        pub(crate) fn annotation(mut self, key: &str, value: &str) -> Self {
            self.annotations.insert(key.into(), value.into());
            self
        }
        pub(crate) fn owned_by(mut self, api_version: &str, kind: &str, name: &str) -> Self {
            self.owners.push(owner(api_version, kind, name));
            self
        }
    }
}
