//! Identity types: ids and names of containers, interfaces, networks, pods and StickyIPs. Each is checked
//! once, where it enters, so it can be a file name and a log field. Must never depend on another module.

mod attachment;
mod pod;
mod sticky_key;

use std::fmt;

pub use attachment::{Attachment, AttachmentId};
pub use pod::PodIdentity;
pub(crate) use pod::{InvalidPodIdentity, is_uid};
pub use sticky_key::StickyKey;

/// The longest interface name that Linux takes.
const MAX_IF_NAME: usize = 15;
/// The longest piece of a foreign value that a message repeats, in characters.
const MAX_QUOTED_CHARS: usize = 120;

const PLAIN_RULE: &str =
    "it must start with a letter or digit and hold only letters, digits, '_', '.' and '-'";

/// Whether the text starts with a letter or digit and continues with those, `_`, `.` and `-`.
fn is_plain(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'.' | b'-'))
}

/// A checked id or name; on failure a sentence about it.
fn plain(text: &str, what: &str) -> Result<String, String> {
    if is_plain(text) {
        Ok(text.to_owned())
    } else {
        Err(format!("{:?} is not a {what}: {PLAIN_RULE}", clipped(text)))
    }
}

/// A text, short enough for a message.
pub(crate) fn clipped(text: &str) -> String {
    match text.char_indices().nth(MAX_QUOTED_CHARS) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

macro_rules! text_type {
    ($name:ident) => {
        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

/// What the container ids begin with under which cilium-agent asks for an address of its own. The name of the
/// node follows. Runtimes use hexadecimal digits.
const CILIUM_INGRESS: &str = "cilium-ingress-";

/// The id of a container (a pod's sandbox), as the runtime names it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ContainerId(String);
text_type!(ContainerId);

impl ContainerId {
    pub fn new(text: &str) -> Result<Self, String> {
        plain(text, "container id").map(Self)
    }

    /// Whether cilium-agent uses it for the address of its own Envoy on a node, in `delegated` mode
    /// (CFP-45607 of Cilium). Such an address belongs to no pod, no runtime lists it, and only its DEL ends
    /// it.
    pub(crate) fn is_cilium_ingress(&self) -> bool {
        self.0.strip_prefix(CILIUM_INGRESS).is_some_and(|node| !node.is_empty())
    }
}

/// The name of an interface inside a container.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct IfName(String);
text_type!(IfName);

impl IfName {
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
    pub fn new(text: &str) -> Result<Self, String> {
        plain(text, "network name").map(Self)
    }
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
}
