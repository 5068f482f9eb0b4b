//! A pod, as a runtime names it.

use std::fmt;

use super::{PLAIN_RULE, clipped, is_plain};

/// The longest namespace or pod name, as Kubernetes has it.
const MAX_POD_NAME: usize = 253;

/// The pod behind a container, as runtimes pass it in `CNI_ARGS`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodIdentity {
    namespace: String,
    name: String,
    uid: Option<String>,
}

/// A namespace, name or uid that no pod can have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key}={value} is not valid: {PLAIN_RULE}, and be at most {MAX_POD_NAME} characters long")]
pub struct InvalidPodIdentity {
    /// The key of the part in `CNI_ARGS`.
    pub key: &'static str,
    value: String,
}

impl PodIdentity {
    /// Checks the three parts. An empty uid counts as absent. Errors: the part that is wrong.
    pub fn new(namespace: &str, name: &str, uid: Option<&str>) -> Result<Self, InvalidPodIdentity> {
        let uid = uid.filter(|uid| !uid.is_empty());
        let parts = [("K8S_POD_NAMESPACE", namespace), ("K8S_POD_NAME", name)].into_iter();
        for (key, value) in parts.chain(uid.map(|uid| ("K8S_POD_UID", uid))) {
            if !is_uid(value) {
                return Err(InvalidPodIdentity { key, value: clipped(value) });
            }
        }
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.map(str::to_owned) })
    }

    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the runtime passes it.
    pub fn uid(&self) -> Option<&str> {
        self.uid.as_deref()
    }
}

impl fmt::Display for PodIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// Whether this can be a pod's uid, and so a file name. The same holds for its namespace and its name.
pub(crate) fn is_uid(text: &str) -> bool {
    is_plain(text) && text.len() <= MAX_POD_NAME
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forged_pod_is_refused_with_the_key_that_is_wrong() {
        let refused = |namespace: &str, name: &str, uid: Option<&str>| {
            PodIdentity::new(namespace, name, uid).unwrap_err().to_string()
        };
        let error = refused("../..", "p", None);
        assert!(error.contains("K8S_POD_NAMESPACE") && error.contains("../.."), "{error}");
        assert!(refused("ns", &"x".repeat(254), None).contains("K8S_POD_NAME="));
        assert!(refused("ns", "p", Some("a/b")).contains("K8S_POD_UID"));
        assert_eq!(PodIdentity::new("ns", "p", Some("")).unwrap().uid(), None);
    }
}
