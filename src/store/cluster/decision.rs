//! Prepared decisions: what the node's agent has found out about a pod before its ADD comes, in
//! `.sticky/decisions`, one small file per pod uid. ADD then needs no API server.
//!
//! A decision about a sticky pod says that its StickyIP **is attached** to this node under
//! [`PreparedSticky::attachment_id`]. It is used once: the record that takes it over has that id, and a
//! decision whose id a record has already is used up, whatever lies in the folder. Must never be used if it
//! is torn, of another pod, or from before a reboot.

use std::io;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use crate::names::{AttachmentId, IfName, PodIdentity};
use crate::store::cluster::pending_update::Durability;
use crate::store::files;
use crate::store::{
    ClaimantKey, Disk, LockedStore, NodeTime, Record, RecordState, StickyBinding, Store, StoreError,
    StoredRecord, inode_of, open, read_file,
};

const DECISIONS: &str = ".sticky/decisions";
/// A decision before it has its name.
const NEW: &str = ".sticky/new-decision";
/// The version of the files.
const VERSION: u32 = 1;

/// What is decided about one pod.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decision {
    version: u32,
    /// The pod's uid as the runtime passes it.
    pub uid: String,
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub pod: String,
    /// The StickyIP that is attached for it; none: the pod is not sticky.
    pub sticky: Option<PreparedSticky>,
    /// Why, for people.
    pub reason: String,
    /// When.
    pub at: NodeTime,
}

/// A StickyIP that is attached to this node and waits for its pod's sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreparedSticky {
    /// The StickyIP's namespace.
    pub namespace: String,
    /// The StickyIP's name.
    pub name: String,
    pub addresses: Vec<IpAddr>,
    /// The workload as a CiliumNode's pool shows it, `namespace/Kind/name`.
    pub resource: String,
    /// The id under which the API server knows the attachment.
    pub attachment_id: AttachmentId,
}

impl Decision {
    /// A decision about this pod, which must have a uid. None if it has none.
    pub fn about(
        pod: &PodIdentity,
        sticky: Option<PreparedSticky>,
        reason: &str,
        at: NodeTime,
    ) -> Option<Self> {
        Some(Self {
            version: VERSION,
            uid: pod.uid()?.to_owned(),
            namespace: pod.namespace().to_owned(),
            pod: pod.name().to_owned(),
            sticky,
            reason: reason.to_owned(),
            at,
        })
    }

    pub fn pod(&self) -> Option<PodIdentity> {
        PodIdentity::new(&self.namespace, &self.pod, Some(&self.uid)).ok()
    }

    /// Whether it is for this pod and may be used now: a sandbox of an earlier boot had its own.
    pub fn is_for(&self, pod: &PodIdentity, now: &NodeTime) -> bool {
        self.pod().as_ref() == Some(pod) && (self.sticky.is_none() || self.at.boot() == now.boot())
    }

    fn from_bytes(name: &str, bytes: &[u8]) -> Option<Self> {
        let decision: Self = serde_json::from_slice(bytes).ok()?;
        let sound = decision.version == VERSION && decision.uid == name && decision.pod().is_some();
        let usable = decision.sticky.as_ref().is_none_or(|sticky| {
            !sticky.addresses.is_empty()
                && sticky.attachment_id.prepared_uid().is_some()
                && PodIdentity::new(&sticky.namespace, &sticky.name, None).is_ok()
        });
        (sound && usable).then_some(decision)
    }
}

/// What became of a decision that is to be withdrawn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Withdrawn {
    /// There is none about this pod.
    Nothing,
    /// It is gone, and no sandbox has used it. The caller detaches what it attached.
    Unused(Box<Decision>),
    /// A sandbox has it: its DEL detaches. The file is gone if it was still there.
    InUse,
}

impl<D: Disk> Store<D> {
    /// Whether something lies where a decision about this pod would. Without the lock: only a read under
    /// the lock shows what it is.
    pub fn has_decision(&self, uid: &str) -> bool {
        let folder = self.path(DECISIONS);
        checked(uid, &folder).is_ok_and(|name| folder.join(name).symlink_metadata().is_ok())
    }
}

impl<D: Disk> LockedStore<'_, D> {
    /// Puts a decision in place of an earlier one about the same pod, whole. It is not synced: the pod's ADD
    /// is on its way. After the next boot what it says of a sticky pod is not used; of another pod it still
    /// says the same, if it exists.
    pub fn put_decision(&mut self, decision: &Decision) -> Result<(), StoreError> {
        let (folder, new) = (self.store.path(DECISIONS), self.store.path(NEW));
        let path = folder.join(checked(&decision.uid, &folder)?);
        self.put_small_file("write the decision", decision, &new, &path, Durability::ThisBoot)
    }

    /// The decision about the pod of this uid. A file that is none is set aside; one that a record has used
    /// up is taken away. Either way there is none then.
    pub fn find_decision(&mut self, uid: &str, interface: &IfName) -> Result<Option<Decision>, StoreError> {
        let folder = self.store.path(DECISIONS);
        let name = checked(uid, &folder)?;
        let path = folder.join(name);
        let bytes = match read_file(&path) {
            Ok((bytes, _)) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) if crate::store::no_plain_file(&error) => Vec::new(),
            Err(source) => return Err(StoreError::io("read the decision", &path, source)),
        };
        let Some(decision) = Decision::from_bytes(name, &bytes) else {
            self.set_aside(DECISIONS, name, "it is no prepared decision")?;
            return Ok(None);
        };
        if self.decision_user(&decision, interface)?.is_some() {
            self.remove(&path)?;
            return Ok(None);
        }
        Ok(Some(decision))
    }

    /// Whether an ADD is yet to come for what the API server knows as attached under this id: a decision
    /// rests on it that no sandbox has used. Every sandbox of a pod is prepared under the same id, so what is
    /// said of an older one must not be taken for this one.
    pub(crate) fn awaits_add(&mut self, id: &AttachmentId, interface: &IfName) -> Result<bool, StoreError> {
        let Some(uid) = id.prepared_uid() else { return Ok(false) };
        let this_boot = self.store.now.boot().to_owned();
        let decision = self.find_decision(uid, interface)?.filter(|decision| decision.at.boot() == this_boot);
        Ok(decision.and_then(|decision| decision.sticky).is_some_and(|sticky| sticky.attachment_id == *id))
    }

    /// Uses a decision up: the record is put in place, then the file is removed. If a crash leaves both, the
    /// decision is used up. Durable with the commit.
    /// Errors: as [`LockedStore::put_reclaiming`]; the decision is kept then.
    pub fn use_decision(
        &mut self,
        decision: &Decision,
        record: &Record,
        replacing: Option<&StoredRecord>,
        given_up: &[StoredRecord],
    ) -> Result<(), StoreError> {
        self.put_reclaiming(record, replacing, given_up)?;
        self.remove_decision(&decision.uid)
    }

    /// Takes the decision about a pod away if it is there.
    pub(crate) fn remove_decision(&mut self, uid: &str) -> Result<(), StoreError> {
        let folder = self.store.path(DECISIONS);
        self.remove_if_there(&folder.join(checked(uid, &folder)?))
    }

    /// Removes the decision that a pod is not sticky. On the disk when this returns: such a decision is used
    /// after the next boot, too.
    pub(crate) fn remove_decision_durably(&mut self, uid: &str) -> Result<(), StoreError> {
        self.remove_decision(uid)?;
        let folder = self.store.path(DECISIONS);
        if inode_of(&folder)?.is_some() { open::sync_dir(&self.store.disk, &folder) } else { Ok(()) }
    }

    /// Writes down that the API server knows none of these ids as attached any more: what is kept for the
    /// claimant does not speak for its pod from here on, because others may have the address, and a decision
    /// that rests on such an attachment goes. What a living sandbox has is left alone. Durable with the
    /// commit.
    pub fn clear_attachment(
        &mut self,
        claimant: &ClaimantKey,
        ids: &[AttachmentId],
    ) -> Result<(), StoreError> {
        let Some(stored) = self.find_by_claimant(claimant)? else { return Ok(()) };
        let record = &stored.record;
        let is_cleared = record.attachment_id().is_some_and(|id| ids.contains(id));
        if record.is_attached(&self.store.now) || !is_cleared {
            return Ok(());
        }
        if let Some(uid) = record.used_decision() {
            // First: the record is what says that it is used up.
            self.remove_decision(uid)?;
        }
        let binding = record.binding.clone().map(|binding| StickyBinding { attachment_id: None, ..binding });
        self.put(&Record { state: RecordState::Kept, netns: None, binding, ..record.clone() }, Some(&stored))
    }

    /// Withdraws a decision whose pod will not come. The caller detaches what is unused, after it released
    /// the lock.
    pub fn withdraw_decision(&mut self, uid: &str, interface: &IfName) -> Result<Withdrawn, StoreError> {
        let folder = self.store.path(DECISIONS);
        let name = checked(uid, &folder)?.to_owned();
        let path = folder.join(&name);
        let decision = match read_file(&path) {
            Ok((bytes, _)) => Decision::from_bytes(&name, &bytes),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Withdrawn::Nothing),
            Err(error) if crate::store::no_plain_file(&error) => None,
            Err(source) => return Err(StoreError::io("read the decision", &path, source)),
        };
        let Some(decision) = decision else {
            self.set_aside(DECISIONS, &name, "it is no prepared decision")?;
            return Ok(Withdrawn::Nothing);
        };
        let user = self.decision_user(&decision, interface)?;
        self.remove(&path)?;
        open::sync_dir(&self.store.disk, &folder)?;
        Ok(match user {
            Some(RecordState::Attached) => Withdrawn::InUse,
            // Its sandbox has come and gone, and DEL has detached or left a pending update.
            Some(_) => Withdrawn::Nothing,
            None => Withdrawn::Unused(Box::new(decision)),
        })
    }

    /// The state of the record that has the attachment id of this decision.
    fn decision_user(
        &mut self,
        decision: &Decision,
        interface: &IfName,
    ) -> Result<Option<RecordState>, StoreError> {
        let Some(sticky) = &decision.sticky else { return Ok(None) };
        let claimant = ClaimantKey::new(&sticky.namespace, &sticky.name, interface);
        let stored = self.find_by_claimant(&claimant)?;
        let is_user = |stored: &StoredRecord| stored.record.attachment_id() == Some(&sticky.attachment_id);
        Ok(stored.filter(is_user).map(|stored| stored.record.state))
    }
}

impl<D: Disk> Store<D> {
    /// Every decision as it is now, by uid. Files that are none are ignored.
    pub fn decisions(&self) -> Result<Vec<Decision>, StoreError> {
        let folder = self.path(DECISIONS);
        let mut decisions = Vec::new();
        for (name, _) in files::names(&folder)? {
            match read_file(&folder.join(&name)) {
                Ok((bytes, _)) => decisions.extend(Decision::from_bytes(&name, &bytes)),
                Err(error)
                    if error.kind() == io::ErrorKind::NotFound || crate::store::no_plain_file(&error) => {}
                Err(source) => return Err(StoreError::io("read the decision", &folder.join(name), source)),
            }
        }
        decisions.sort_by(|a, b| a.uid.cmp(&b.uid));
        Ok(decisions)
    }
}

/// The uid as a file's name, if it can be one: it came from outside.
fn checked<'a>(uid: &'a str, folder: &std::path::Path) -> Result<&'a str, StoreError> {
    match PodIdentity::new("n", "p", Some(uid)) {
        Ok(pod) if pod.uid().is_some() => Ok(uid),
        _ => {
            let source = io::Error::new(io::ErrorKind::InvalidInput, format!("{uid:?} is no pod's uid"));
            Err(StoreError::io("look for a decision in", folder, source))
        }
    }
}
