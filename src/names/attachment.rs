//! Attachments: one interface of one container, and the id under which the API server knows it.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::pod::is_uid;
use super::{ContainerId, IfName};

/// One interface of one container: what an ADD makes and a DEL removes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attachment {
    pub container: ContainerId,
    pub interface: IfName,
}

impl Attachment {
    /// For the node itself, when it grants a claim. It equals no sandbox's: runtimes give longer ids.
    pub fn of_node(interface: IfName) -> Self {
        Self { container: ContainerId("node".to_owned()), interface }
    }

    /// What stands for a sandbox in the record of an address that Cilium may give to any pod.
    pub(crate) fn of_cilium() -> Self {
        Self { container: ContainerId("none".to_owned()), interface: IfName("cilium".to_owned()) }
    }

    /// The id under which the API server knows it, unless it was attached under another one.
    pub fn id(&self) -> AttachmentId {
        AttachmentId::from(self.container.as_str())
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

/// The id under which the API server knows an attachment. Its written form is the container id,
/// `prepared-<pod uid>` or `adopted-<pod uid>`. Every text is one: what another program wrote into a StickyIP
/// counts as a runtime's id.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub enum AttachmentId {
    /// The runtime's container id. Read by [`From`], so that no other id gets in here.
    Runtime(String),
    /// Prepared by the agent for the pod of this uid. Every sandbox of the pod is prepared under the same id.
    Prepared(String),
    /// Adopted: the pod of this uid already ran with the address.
    Adopted(String),
}

impl AttachmentId {
    /// The uid of the pod that the attachment was prepared for.
    pub(crate) fn prepared_uid(&self) -> Option<&str> {
        if let Self::Prepared(uid) = self { Some(uid) } else { None }
    }

    /// Whether the pod already ran when it was attached.
    pub(crate) fn is_adopted(&self) -> bool {
        matches!(self, Self::Adopted(_))
    }

    /// What stands in the store for the sandbox of this id.
    /// Errors: the id cannot be a file name: a sentence about it.
    pub fn container(&self) -> Result<ContainerId, String> {
        ContainerId::new(&self.to_string())
    }
}

impl fmt::Display for AttachmentId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Runtime(container) => f.write_str(container),
            Self::Prepared(uid) => write!(f, "{PREPARED}{uid}"),
            Self::Adopted(uid) => write!(f, "{ADOPTED}{uid}"),
        }
    }
}

impl From<&str> for AttachmentId {
    fn from(text: &str) -> Self {
        let uid_after = |prefix: &str| text.strip_prefix(prefix).filter(|uid| is_uid(uid)).map(str::to_owned);
        match (uid_after(PREPARED), uid_after(ADOPTED)) {
            (Some(uid), _) => Self::Prepared(uid),
            (_, Some(uid)) => Self::Adopted(uid),
            _ => Self::Runtime(text.to_owned()),
        }
    }
}

impl From<String> for AttachmentId {
    fn from(text: String) -> Self {
        Self::from(text.as_str())
    }
}

impl From<AttachmentId> for String {
    fn from(id: AttachmentId) -> Self {
        id.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_id_reads_back_from_its_written_form() {
        for (id, text) in [
            (AttachmentId::Runtime("c0ffee".into()), "c0ffee"),
            (AttachmentId::Prepared("u-1".into()), "prepared-u-1"),
            (AttachmentId::Adopted("u-1".into()), "adopted-u-1"),
        ] {
            assert_eq!(id.to_string(), text);
            assert_eq!(AttachmentId::from(text), id);
            assert_eq!(serde_json::to_string(&id).unwrap(), format!("{text:?}"));
            assert_eq!(serde_json::from_str::<AttachmentId>(&format!("{text:?}")).unwrap(), id);
            assert_eq!(id.container().unwrap().as_str(), text);
        }
        assert_eq!(AttachmentId::from("prepared-u-1").prepared_uid(), Some("u-1"));
        assert_eq!(AttachmentId::from("adopted-u-1").prepared_uid(), None);
    }

    #[test]
    fn a_foreign_id_is_kept_as_it_is_and_names_no_file() {
        for text in ["", "../x", "prepared-../x", "adopted-a/b", ".prepared-u"] {
            let id = AttachmentId::from(text);
            assert_eq!(id, AttachmentId::Runtime(text.to_owned()));
            assert_eq!(id.to_string(), text);
            assert!(id.container().is_err(), "{text:?}");
        }
    }
}
