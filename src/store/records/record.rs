//! What the store remembers of an address: who has it, or for whom it is kept.
//!
//! A record is a small JSON file under each of its addresses' names. host-local's two lines are understood too.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::names::{Attachment, ContainerId, IfName, PodIdentity};
use crate::store::{ATTACHMENTS, CLAIMANTS, NodeTime};

/// The longest name that is used for an index entry as it is; longer ones are shortened to a hash. 255 bytes is
/// what file systems allow.
const MAX_FILE_NAME: usize = 200;

/// For how long an address is kept for its pod once the pod is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// Not at all: it goes back when its attachment ends.
    No,
    /// For this long.
    For(Duration),
    /// Until somebody releases it.
    Forever,
}

/// Whether somebody uses the address now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// A container has it.
    Attached,
    /// Nobody has it; it waits for its pod.
    Kept,
}

/// One attachment and its addresses, or the addresses kept for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// The addresses, one a range set, in the order of the sets.
    pub addresses: Vec<IpAddr>,
    /// Who has them, or had them last.
    pub attachment: Attachment,
    /// Whether the attachment lives.
    pub phase: Phase,
    /// The container's network namespace, to see whether an old sandbox is still there.
    pub netns: Option<PathBuf>,
    /// The pod, where the runtime named one.
    pub pod: Option<PodIdentity>,
    /// What happens to the addresses when the attachment ends.
    pub keep: Keep,
    /// The StickyIP that binds them, where the cluster does. Only the cluster lets go of such an address.
    pub binding: Option<StickyBinding>,
    /// Since when it is in its phase.
    pub since: NodeTime,
}

/// The StickyIP behind a record.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StickyBinding {
    /// Its namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// The container id under which the API server knows the attachment: an older one than the record's if the API server
    /// was away when the sandbox was made anew. Empty as long as the address is reserved and was never attached here.
    pub container: String,
}

/// For whom a sticky address is kept: a pod's interface.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Claimant {
    namespace: String,
    name: String,
    interface: IfName,
}

impl Claimant {
    /// The claimant that this pod is, with this interface.
    pub fn new(pod: &PodIdentity, interface: &IfName) -> Self {
        Self {
            namespace: pod.namespace().to_owned(),
            name: pod.name().to_owned(),
            interface: interface.clone(),
        }
    }

    /// The claimant whose address this StickyIP binds.
    pub fn bound(namespace: &str, name: &str, interface: &IfName) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned(), interface: interface.clone() }
    }

    pub(crate) fn interface(&self) -> &IfName {
        &self.interface
    }

    /// The name of its entry in the index.
    pub(crate) fn entry(&self) -> String {
        shortened(format!("{},{},{}", self.namespace, self.name, self.interface.as_str()))
    }

    /// Where its entry stands, relative to the network's directory.
    pub(crate) fn index_path(&self) -> String {
        format!("{CLAIMANTS}/{}", self.entry())
    }
}

/// The name of an attachment's entry in the index. The comma is in no container id, so the name is unambiguous.
pub(crate) fn attachment_file_name(attachment: &Attachment) -> String {
    shortened(format!("{},{}", attachment.container.as_str(), attachment.interface.as_str()))
}

/// Where an attachment's entry stands, relative to the network's directory.
pub(crate) fn attachment_index_path(attachment: &Attachment) -> String {
    format!("{ATTACHMENTS}/{}", attachment_file_name(attachment))
}

/// The entries of these attachments, for GC.
pub(crate) fn attachment_file_names(attachments: &[Attachment]) -> HashSet<String> {
    attachments.iter().map(attachment_file_name).collect()
}

fn shortened(name: String) -> String {
    if name.len() <= MAX_FILE_NAME {
        return name;
    }
    let digest: String = Sha256::digest(name.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    // Two commas never stand together in a readable entry.
    format!("{},,{digest}", &name[..name.floor_char_boundary(64)])
}

impl Record {
    /// For whom these addresses are kept, if they are.
    pub fn claimant(&self) -> Option<Claimant> {
        if self.is_left() {
            return None;
        }
        if let (true, Some(StickyBinding { namespace, name, .. })) = (self.keep != Keep::No, &self.binding) {
            return Some(Claimant::bound(namespace, name, &self.attachment.interface));
        }
        match (self.keep, &self.pod) {
            (Keep::No, _) | (_, None) => None,
            (_, Some(pod)) => Some(Claimant::new(pod, &self.attachment.interface)),
        }
    }

    /// Addresses that are reserved for the claimant of a StickyIP and were never attached here.
    pub fn reserved(
        addresses: Vec<IpAddr>,
        claimant: &Claimant,
        pod: Option<PodIdentity>,
        attachment: &Attachment,
        now: &NodeTime,
    ) -> Self {
        let Claimant { namespace, name, .. } = claimant.clone();
        Self {
            addresses,
            attachment: attachment.clone(),
            phase: Phase::Kept,
            netns: None,
            pod,
            keep: Keep::Forever,
            binding: Some(StickyBinding { namespace, name, container: String::new() }),
            since: now.clone(),
        }
    }

    /// Whether the address may go to somebody else: kept, and its time has run out. `first_opened_at` is when this boot
    /// first looked into the store: what was attached before the boot counts as kept since then.
    pub fn has_expired(&self, now: &NodeTime, first_opened_at: &NodeTime) -> bool {
        let Keep::For(time) = self.keep else { return false };
        if self.is_attached(now) {
            return false;
        }
        let since = if self.phase == Phase::Attached { first_opened_at } else { &self.since };
        // Moments are whole seconds, so one that has begun does not count.
        time.is_zero() || now.since(since) > time
    }

    /// Whether a container has it: attached, and since this boot.
    pub fn is_attached(&self, now: &NodeTime) -> bool {
        self.phase == Phase::Attached && self.since.boot() == now.boot()
    }

    /// The pod and container, as messages name them.
    pub fn holder(&self) -> String {
        let container = self.attachment.container.as_str();
        match &self.pod {
            Some(pod) => format!("pod {}/{} (container {container})", pod.namespace(), pod.name()),
            None => format!("container {container}"),
        }
    }

    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut bytes = serde_json::to_vec_pretty(&RecordFile::from(self))?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Reads a record of ours. Nothing that is torn, cut or foreign passes.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let written: RecordFile = serde_json::from_slice(bytes).ok()?;
        written.into_record()
    }

    /// Reads host-local's record of `address`: the container and the interface, a line each. Its older form, the id
    /// alone, counts only where it looks like a runtime's id, and stands for eth0.
    pub(crate) fn from_host_local(bytes: &[u8], address: IpAddr, now: &NodeTime) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let (container, interface) = match text.trim().split_once("\r\n") {
            Some((container, interface)) => (container, interface),
            None if text.trim().len() == 64 => (text.trim(), "eth0"),
            None => return None,
        };
        let attachment = Attachment {
            container: ContainerId::new(container).ok()?,
            interface: IfName::new(interface).ok()?,
        };
        Some(Self::of_host_local(vec![address], attachment, now))
    }

    /// What host-local's record says: an attachment, and nothing of a pod.
    pub(crate) fn of_host_local(addresses: Vec<IpAddr>, attachment: Attachment, now: &NodeTime) -> Self {
        Self {
            addresses,
            attachment,
            phase: Phase::Attached,
            netns: None,
            pod: None,
            keep: Keep::No,
            binding: None,
            since: now.clone(),
        }
    }
}

/// The record as it stands in its file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordFile {
    addresses: Vec<IpAddr>,
    phase: Phase,
    container: String,
    interface: String,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    netns: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    namespace: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pod: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    uid: Option<String>,
    /// Absent: not sticky. "Forever", or seconds.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    keep: Option<WrittenKeep>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    sticky: Option<StickyBinding>,
    since: NodeTime,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum WrittenKeep {
    Seconds(u64),
    Word(Forever),
}

#[derive(Serialize, Deserialize)]
enum Forever {
    Forever,
}

impl From<&Record> for RecordFile {
    fn from(record: &Record) -> Self {
        let pod = record.pod.as_ref();
        Self {
            addresses: record.addresses.clone(),
            phase: record.phase,
            container: record.attachment.container.as_str().to_owned(),
            interface: record.attachment.interface.as_str().to_owned(),
            netns: record.netns.clone(),
            namespace: pod.map(|pod| pod.namespace().to_owned()),
            pod: pod.map(|pod| pod.name().to_owned()),
            uid: pod.and_then(|pod| pod.uid().map(str::to_owned)),
            keep: match record.keep {
                Keep::No => None,
                Keep::For(time) => {
                    Some(WrittenKeep::Seconds(time.as_secs() + u64::from(time.subsec_nanos() > 0)))
                }
                Keep::Forever => Some(WrittenKeep::Word(Forever::Forever)),
            },
            sticky: record.binding.clone(),
            since: record.since.clone(),
        }
    }
}

impl RecordFile {
    fn into_record(self) -> Option<Record> {
        if self.addresses.is_empty() {
            return None;
        }
        let pod = match (self.namespace, self.pod) {
            (Some(namespace), Some(name)) => {
                Some(PodIdentity::new(&namespace, &name, self.uid.as_deref()).ok()?)
            }
            (None, None) => None,
            _ => return None,
        };
        Some(Record {
            addresses: self.addresses,
            attachment: Attachment {
                container: ContainerId::new(&self.container).ok()?,
                interface: IfName::new(&self.interface).ok()?,
            },
            phase: self.phase,
            netns: self.netns,
            pod,
            keep: match self.keep {
                None => Keep::No,
                Some(WrittenKeep::Seconds(seconds)) => Keep::For(Duration::from_secs(seconds)),
                Some(WrittenKeep::Word(Forever::Forever)) => Keep::Forever,
            },
            binding: self.sticky,
            since: self.since,
        })
    }
}
