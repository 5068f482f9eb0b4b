//! Attachments: one interface of one container, and the id under which the API server knows it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::pod::is_uid;
use super::{ContainerId, IfName};

/// One interface of one container: what an ADD makes and a DEL removes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attachment {
    /// The container.
    pub container: ContainerId,
    /// Its interface.
    pub interface: IfName,
}

impl Attachment {
    /// What stands for a sandbox where the node itself acts: it grants a claim, or records an unowned pool entry. It
    /// equals no sandbox's attachment: runtimes give longer ids.
    pub fn of_node(interface: IfName) -> Self {
        Self { container: ContainerId("node".to_owned()), interface }
    }
}

impl fmt::Display for Attachment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.container, self.interface)
    }
}

/// How the ids of attachments begin that the agent made before the pod's ADD.
const PREPARED: &str = "prepared-";
/// How the ids of attachments begin that were made for a pod which already ran.
const ADOPTED: &str = "adopted-";

/// The id under which the API server knows an attachment. Its written form is the container id, `prepared-<pod uid>` or
/// `adopted-<pod uid>`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum AttachmentId {
    /// By the container id that the runtime gave the sandbox.
    Runtime(ContainerId),
    /// Prepared by the agent for the pod of this uid. Every sandbox of the pod is prepared under the same id.
    Prepared(String),
    /// Adopted: the pod of this uid already ran with the address.
    Adopted(String),
}

impl AttachmentId {
    /// Reads the written form; on failure a sentence about it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let uid_after = |prefix: &str| text.strip_prefix(prefix).filter(|uid| is_uid(uid)).map(str::to_owned);
        match (uid_after(PREPARED), uid_after(ADOPTED)) {
            (Some(uid), _) => Ok(Self::Prepared(uid)),
            (_, Some(uid)) => Ok(Self::Adopted(uid)),
            _ => ContainerId::new(text).map(Self::Runtime),
        }
    }

    /// The uid of the pod that the attachment was prepared for, by the written form of its id.
    pub fn prepared_uid(text: &str) -> Option<String> {
        match Self::parse(text) {
            Ok(Self::Prepared(uid)) => Some(uid),
            _ => None,
        }
    }

    /// Whether this is the written form.
    pub fn is_written(&self, text: &str) -> bool {
        Self::parse(text).as_ref() == Ok(self)
    }
}

impl fmt::Display for AttachmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Runtime(container) => write!(f, "{container}"),
            Self::Prepared(uid) => write!(f, "{PREPARED}{uid}"),
            Self::Adopted(uid) => write!(f, "{ADOPTED}{uid}"),
        }
    }
}

impl From<AttachmentId> for String {
    fn from(id: AttachmentId) -> Self {
        id.to_string()
    }
}

impl TryFrom<String> for AttachmentId {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        Self::parse(&text)
    }
}

impl From<&ContainerId> for AttachmentId {
    fn from(container: &ContainerId) -> Self {
        Self::Runtime(container.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_reads_back_from_its_written_form() {
        let container = ContainerId::new("c0ffee").unwrap();
        for (id, text) in [
            (AttachmentId::Runtime(container), "c0ffee"),
            (AttachmentId::Prepared("u-1".into()), "prepared-u-1"),
            (AttachmentId::Adopted("u-1".into()), "adopted-u-1"),
        ] {
            assert_eq!(id.to_string(), text);
            assert_eq!(AttachmentId::parse(text).unwrap(), id);
            assert_eq!(serde_json::to_string(&id).unwrap(), format!("{text:?}"));
            assert!(id.is_written(text) && !id.is_written("other"));
        }
        for text in ["", "../x", "prepared-../x", "adopted-a/b", ".prepared-u"] {
            assert!(AttachmentId::parse(text).is_err(), "{text:?}");
        }
        assert_eq!(AttachmentId::prepared_uid("prepared-u-1").as_deref(), Some("u-1"));
        assert_eq!(AttachmentId::prepared_uid("adopted-u-1"), None);
    }
}
