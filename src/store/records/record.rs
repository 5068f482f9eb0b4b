//! What the store remembers of an address: who has it, or for whom it is kept.
//!
//! A record is a small JSON file under each of its addresses' names. host-local's two lines are read, too.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::names::{Attachment, AttachmentId, ContainerId, IfName, PodIdentity, StickyKey};
use crate::policy::lifetime::retention::Retention;
use crate::store::{ATTACHMENTS, CLAIMANTS, NodeTime};

/// Longer names of index entries are shortened to a hash. File systems allow 255 bytes.
const MAX_FILE_NAME: usize = 200;

/// Who may use the addresses of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum RecordState {
    /// A container has them.
    Attached,
    /// They wait for their claimant. Under a binding without an attachment id they are reserved only: the API
    /// server knows of no sandbox of this node that has them.
    Kept,
    /// The claimant of the binding has other ones now. They may still be claimed for it, so no other may have
    /// them, and it is not found by them.
    Superseded,
    /// They are unowned entries of the pool of the node's CiliumNode: Cilium may give them to any pod, and
    /// nothing on this node reserves them for a claimant.
    Unowned,
}

/// One attachment and its addresses, or the addresses kept for a pod.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// One per range set, in the order of the sets.
    pub addresses: Vec<IpAddr>,
    /// Who has them, or had them last.
    pub attachment: Attachment,
    pub state: RecordState,
    /// The container's network namespace, to see whether an old sandbox is still there.
    pub netns: Option<PathBuf>,
    /// The pod, where the runtime named one.
    pub pod: Option<PodIdentity>,
    /// How long the addresses are kept for their pod. None: they are released when the attachment ends.
    pub retention: Option<Retention>,
    /// The StickyIP that binds them. Only the cluster releases such an address.
    pub binding: Option<StickyBinding>,
    pub since: NodeTime,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StickyBinding {
    #[serde(flatten)]
    pub key: StickyKey,
    /// The id under which the API server knows the attachment: an older one than the record's if the API
    /// server was away when the pod got a new sandbox. None: reserved, and not attached here as far as the
    /// API server knows.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub attachment_id: Option<AttachmentId>,
}

/// For whom a sticky address is kept: a pod's interface.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ClaimantKey {
    namespace: String,
    name: String,
    interface: IfName,
}

impl ClaimantKey {
    pub fn of_pod(pod: &PodIdentity, interface: &IfName) -> Self {
        Self::new(pod.namespace(), pod.name(), interface)
    }

    pub(crate) fn of_sticky(key: &StickyKey, interface: &IfName) -> Self {
        Self::new(&key.namespace, &key.name, interface)
    }

    pub fn new(namespace: &str, name: &str, interface: &IfName) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned(), interface: interface.clone() }
    }

    pub(crate) fn interface(&self) -> &IfName {
        &self.interface
    }

    /// Its name in the index.
    pub(crate) fn entry(&self) -> String {
        shortened(format!("{},{},{}", self.namespace, self.name, self.interface.as_str()))
    }

    /// Relative to the network's directory.
    pub(crate) fn index_path(&self) -> String {
        format!("{CLAIMANTS}/{}", self.entry())
    }
}

/// The name of an attachment's entry in the index. It is unambiguous: no container id has a comma.
pub(crate) fn attachment_file_name(attachment: &Attachment) -> String {
    shortened(format!("{},{}", attachment.container.as_str(), attachment.interface.as_str()))
}

/// Relative to the network's directory.
pub(crate) fn attachment_index_path(attachment: &Attachment) -> String {
    format!("{ATTACHMENTS}/{}", attachment_file_name(attachment))
}

fn shortened(name: String) -> String {
    if name.len() <= MAX_FILE_NAME {
        return name;
    }
    let digest: String = Sha256::digest(name.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    // Two commas never follow each other in a readable entry.
    format!("{},,{digest}", &name[..name.floor_char_boundary(64)])
}

impl Record {
    /// For whom these addresses are kept, if they are.
    pub fn claimant(&self) -> Option<ClaimantKey> {
        if self.retention.is_none() || matches!(self.state, RecordState::Superseded | RecordState::Unowned) {
            return None;
        }
        let interface = &self.attachment.interface;
        match (&self.binding, &self.pod) {
            (Some(binding), _) => Some(ClaimantKey::of_sticky(&binding.key, interface)),
            (None, pod) => pod.as_ref().map(|pod| ClaimantKey::of_pod(pod, interface)),
        }
    }

    /// Its entries in the indexes.
    pub(crate) fn index_paths(&self, now: &NodeTime) -> impl Iterator<Item = String> {
        let claimant = self.claimant().map(|claimant| claimant.index_path());
        let attachment = self.is_attached(now).then(|| attachment_index_path(&self.attachment));
        claimant.into_iter().chain(attachment)
    }

    /// The id under which the API server knows the attachment.
    pub fn attachment_id(&self) -> Option<&AttachmentId> {
        self.binding.as_ref()?.attachment_id.as_ref()
    }

    /// The pod's uid, if the record has used up the decision that was prepared for it.
    pub(crate) fn used_decision(&self) -> Option<&str> {
        let uid = self.pod.as_ref()?.uid()?;
        self.attachment_id()?.prepared_uid().filter(|prepared| *prepared == uid)
    }

    /// Addresses that are reserved for the claimant of a StickyIP and were never attached here.
    pub fn reserved(
        addresses: Vec<IpAddr>,
        claimant: &ClaimantKey,
        pod: Option<PodIdentity>,
        attachment: &Attachment,
        now: &NodeTime,
    ) -> Self {
        let ClaimantKey { namespace, name, .. } = claimant.clone();
        Self {
            state: RecordState::Kept,
            pod,
            retention: Some(Retention::FOREVER),
            binding: Some(StickyBinding { key: StickyKey { namespace, name }, attachment_id: None }),
            ..Self::attached(addresses, attachment.clone(), now)
        }
    }

    /// Whether another pod may get the address: it is kept, and its retention is over. What was attached
    /// before the boot counts as kept since `first_opened_at`, when this boot first looked into the store.
    pub fn has_expired(&self, now: &NodeTime, first_opened_at: &NodeTime) -> bool {
        let Some(time) = self.retention.and_then(|retention| retention.time()) else { return false };
        if self.is_attached(now) {
            return false;
        }
        let since = if self.state == RecordState::Attached { first_opened_at } else { &self.since };
        // Moments are whole seconds, so one that has begun does not count.
        time.is_zero() || now.since(since) > time
    }

    /// Whether a container of this boot has it.
    pub fn is_attached(&self, now: &NodeTime) -> bool {
        self.state == RecordState::Attached && self.since.boot() == now.boot()
    }

    /// The pod and container, as messages name them.
    pub fn holder(&self) -> String {
        let container = self.attachment.container.as_str();
        match &self.pod {
            Some(pod) => format!("pod {}/{} (container {container})", pod.namespace(), pod.name()),
            None => format!("container {container}"),
        }
    }

    pub(crate) fn to_bytes(&self) -> io::Result<Vec<u8>> {
        let mut bytes = serde_json::to_vec_pretty(&RecordFile::from(self))?;
        bytes.push(b'\n');
        Ok(bytes)
    }

    /// Reads a record of ours. Nothing that is torn, cut or foreign passes.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        serde_json::from_slice::<RecordFile>(bytes).ok()?.into_record()
    }

    /// Reads host-local's record of `address`: the container and the interface, one per line. Its older form,
    /// the id alone, counts only where it looks like a runtime's id, and means eth0.
    pub(crate) fn from_host_local(bytes: &[u8], address: IpAddr, now: &NodeTime) -> Option<Self> {
        let text = std::str::from_utf8(bytes).ok()?;
        let (container, interface) = match text.trim().split_once("\r\n") {
            Some((container, interface)) => (container, interface),
            None if text.trim().len() == 64 => (text.trim(), "eth0"),
            None => return None,
        };
        Some(Self::attached(vec![address], attachment_of(container, interface)?, now))
    }

    /// An attachment, and nothing of a pod: what host-local's record says.
    pub(crate) fn attached(addresses: Vec<IpAddr>, attachment: Attachment, now: &NodeTime) -> Self {
        Self {
            addresses,
            attachment,
            state: RecordState::Attached,
            netns: None,
            pod: None,
            retention: None,
            binding: None,
            since: now.clone(),
        }
    }
}

fn attachment_of(container: &str, interface: &str) -> Option<Attachment> {
    Some(Attachment { container: ContainerId::new(container).ok()?, interface: IfName::new(interface).ok()? })
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RecordFile {
    addresses: Vec<IpAddr>,
    state: RecordState,
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
    retention: Option<WrittenRetention>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    sticky: Option<StickyBinding>,
    since: NodeTime,
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum WrittenRetention {
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
            state: record.state,
            container: record.attachment.container.as_str().to_owned(),
            interface: record.attachment.interface.as_str().to_owned(),
            netns: record.netns.clone(),
            namespace: pod.map(|pod| pod.namespace().to_owned()),
            pod: pod.map(|pod| pod.name().to_owned()),
            uid: pod.and_then(|pod| pod.uid().map(str::to_owned)),
            retention: record.retention.map(|retention| match retention.time() {
                Some(time) => WrittenRetention::Seconds(time.as_secs()),
                None => WrittenRetention::Word(Forever::Forever),
            }),
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
            (Some(space), Some(name)) => Some(PodIdentity::new(&space, &name, self.uid.as_deref()).ok()?),
            (None, None) => None,
            _ => return None,
        };
        Some(Record {
            addresses: self.addresses,
            attachment: attachment_of(&self.container, &self.interface)?,
            state: self.state,
            netns: self.netns,
            pod,
            retention: self.retention.map(|written| match written {
                WrittenRetention::Seconds(seconds) => Retention::for_time(Duration::from_secs(seconds)),
                WrittenRetention::Word(Forever::Forever) => Retention::FOREVER,
            }),
            binding: self.sticky,
            since: self.since,
        })
    }
}
