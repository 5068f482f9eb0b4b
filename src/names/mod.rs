//! Ids and names, checked once at the door. A value of these types can be a file name and a log field.

use std::fmt;

use crate::cni::error::{CniError, clipped};

/// The longest namespace or pod name, as Kubernetes has it.
const MAX_POD_NAME: usize = 253;
/// The longest interface name that Linux takes.
const MAX_IF_NAME: usize = 15;

/// Whether the text starts with a letter or digit and goes on with those, `_`, `.` and `-`.
fn is_plain(text: &str) -> bool {
    text.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

const PLAIN_RULE: &str =
    "it must start with a letter or digit and hold only letters, digits, '_', '.' and '-'";

macro_rules! text_type {
    ($name:ident) => {
        impl $name {
            /// The text itself.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }
    };
}

/// The id of a container (a pod's sandbox), as the runtime names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerId(String);
text_type!(ContainerId);

impl ContainerId {
    /// Checks an id; on failure a sentence about it.
    pub fn new(text: &str) -> Result<Self, String> {
        if is_plain(text) {
            Ok(Self(text.to_owned()))
        } else {
            Err(format!("{:?} is not a container id: {PLAIN_RULE}", clipped(text)))
        }
    }
}

/// The name of an interface inside a container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IfName(String);
text_type!(IfName);

impl IfName {
    /// Checks a name; on failure a sentence about it.
    pub fn new(text: &str) -> Result<Self, String> {
        let problem = if text.is_empty() {
            "it is empty"
        } else if text.len() > MAX_IF_NAME {
            "it must be at most 15 bytes long"
        } else if text == "." || text == ".." {
            "it must not be '.' or '..'"
        } else if text.chars().any(|c| c == '/' || c == ':' || c.is_whitespace() || c.is_control()) {
            "it must not hold '/', ':', blanks or control characters"
        } else {
            return Ok(Self(text.to_owned()));
        };
        Err(format!("{:?} is not an interface name: {problem}", clipped(text)))
    }
}

/// The name of a network, which is also the name of its directory in the store.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NetworkName(String);
text_type!(NetworkName);

impl NetworkName {
    /// Checks a name; on failure a sentence about it.
    pub fn new(text: &str) -> Result<Self, String> {
        if is_plain(text) {
            Ok(Self(text.to_owned()))
        } else {
            Err(format!("{:?} is not a network name: {PLAIN_RULE}", clipped(text)))
        }
    }
}

/// What an ADD makes and a DEL takes away: one interface of one container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attachment {
    /// The container.
    pub container: ContainerId,
    /// Its interface.
    pub interface: IfName,
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.container, self.interface)
    }
}

/// The pod behind a container, as runtimes pass it in `CNI_ARGS`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PodIdentity {
    namespace: String,
    name: String,
    uid: Option<String>,
}

impl PodIdentity {
    /// Checks the three parts; a forged one is refused with code 4, naming the key.
    pub fn new(namespace: &str, name: &str, uid: Option<&str>) -> Result<Self, CniError> {
        check_pod_part("K8S_POD_NAMESPACE", namespace)?;
        check_pod_part("K8S_POD_NAME", name)?;
        let uid = uid.filter(|uid| !uid.is_empty());
        if let Some(uid) = uid {
            check_pod_part("K8S_POD_UID", uid)?;
        }
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned(), uid: uid.map(str::to_owned) })
    }

    /// The pod's namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The pod's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The pod's uid, where the runtime passes it.
    pub fn uid(&self) -> Option<&str> {
        self.uid.as_deref()
    }
}

impl fmt::Display for PodIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

fn check_pod_part(key: &str, value: &str) -> Result<(), CniError> {
    if is_plain(value) && value.len() <= MAX_POD_NAME {
        return Ok(());
    }
    Err(CniError::invalid_environment(format!(
        "CNI_ARGS: {key}={} is not valid: {PLAIN_RULE}, and be at most {MAX_POD_NAME} characters long",
        clipped(value)
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_and_network_names_that_would_leave_the_directory_are_refused() {
        for text in ["", ".", "..", "../x", "a/b", "-abc", ".hidden", "a b", "é", "a\0b", "a\n"] {
            assert!(ContainerId::new(text).is_err(), "{text:?}");
            assert!(NetworkName::new(text).is_err(), "{text:?}");
        }
        for text in ["a", "0", "net_1.x-y", &"e".repeat(300)] {
            assert!(ContainerId::new(text).is_ok(), "{text:?}");
            assert!(NetworkName::new(text).is_ok(), "{text:?}");
        }
    }

    #[test]
    fn interface_names_follow_the_rules_of_linux() {
        for text in ["", ".", "..", "eth/0", "eth:0", "eth 0", "eth\u{a0}0", "a\0b", "abcdefghijklmnop"] {
            assert!(IfName::new(text).is_err(), "{text:?}");
        }
        for text in ["eth0", "abcdefghijklmno", "-", "..x"] {
            assert!(IfName::new(text).is_ok(), "{text:?}");
        }
    }

    #[test]
    fn a_forged_pod_is_refused_with_the_key_that_is_wrong() {
        let error = PodIdentity::new("../..", "p", None).unwrap_err();
        assert_eq!(error.code, 4);
        assert!(error.msg.contains("K8S_POD_NAMESPACE") && error.msg.contains("../.."), "{error}");
        let error = PodIdentity::new("ns", &"x".repeat(254), None).unwrap_err();
        assert!(error.msg.contains("K8S_POD_NAME="), "{error}");
        let error = PodIdentity::new("ns", "p", Some("a/b")).unwrap_err();
        assert!(error.msg.contains("K8S_POD_UID"), "{error}");
        assert_eq!(PodIdentity::new("ns", "p", Some("")).unwrap().uid(), None);
    }
}
