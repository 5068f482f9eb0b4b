//! Prepared decisions: what the node's agent has found out about a pod before its ADD comes, in
//! `.sticky/decisions`, one small file per pod uid. ADD then needs no API server.
//!
//! A decision about a sticky pod says that its StickyIP **is attached** to this node under
//! [`PreparedSticky::attachment_id`]. It is used once: the record that takes it over has that id, and a
//! decision whose id a record has already is used up, whatever lies in the folder. Must never be used if it
//! is torn, of another pod, or from before a reboot.

use std::io;
use std::net::IpAddr;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::names::{AttachmentId, IfName, PodIdentity, is_uid};
use crate::store::cluster::pending_update::Durability;
use crate::store::error::cannot;
use crate::store::files::{self, read_file};
use crate::store::{ClaimantKey, Disk, LockedStore, NodeTime, Record, RecordState};
use crate::store::{Result, StickyBinding, Store, StoredRecord, inode_of};

const DECISIONS: &str = ".sticky/decisions";
/// A decision before it has its name.
const NEW: &str = ".sticky/new-decision";
const VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Decision {
    version: u32,
    /// The pod's uid as the runtime passes it.
    pub uid: String,
    pub namespace: String,
    pub pod: String,
    /// The StickyIP that is attached for it; none: the pod is not sticky.
    pub sticky: Option<PreparedSticky>,
    /// Why, for people.
    pub reason: String,
    pub at: NodeTime,
}

/// A StickyIP that is attached to this node and waits for its pod's sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PreparedSticky {
    pub namespace: String,
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
    /// Whether something lies where this decision would. Only a read under the lock shows what it is.
    pub fn has_decision(&self, uid: &str) -> bool {
        self.decision_path(uid).is_ok_and(|path| path.symlink_metadata().is_ok())
    }

    /// Every decision as it is now, by uid. Files that are none are ignored.
    pub fn decisions(&self) -> Result<Vec<Decision>> {
        let mut decisions = Vec::new();
        for (name, _) in files::names(&self.path(DECISIONS))? {
            decisions.extend(self.read_decision(&name)?.flatten());
        }
        decisions.sort_by(|a, b| a.uid.cmp(&b.uid));
        Ok(decisions)
    }

    /// What lies in the folder under this name, if anything does; no decision if it is not one.
    fn read_decision(&self, name: &str) -> Result<Option<Option<Decision>>> {
        let read = read_file("read the decision", &self.path(DECISIONS).join(name))?;
        Ok(read.map(|(bytes, _)| Decision::from_bytes(name, &bytes)))
    }

    /// The file of a decision. Errors: the uid, which came from outside, cannot be a file's name.
    fn decision_path(&self, uid: &str) -> Result<PathBuf> {
        let folder = self.path(DECISIONS);
        if is_uid(uid) {
            return Ok(folder.join(uid));
        }
        let source = io::Error::new(io::ErrorKind::InvalidInput, format!("{uid:?} is no pod's uid"));
        Err(cannot("look for a decision in", &folder)(source))
    }
}

impl<D: Disk> LockedStore<'_, D> {
    /// Puts a decision in place of an earlier one about the same pod, whole. It is not synced: the pod's ADD
    /// is on its way. After the next boot what it says of a sticky pod is not used; of another pod it still
    /// says the same, if it exists.
    pub fn put_decision(&mut self, decision: &Decision) -> Result<()> {
        let path = self.store.decision_path(&decision.uid)?;
        self.put_small_file("write the decision", decision, NEW, &path, Durability::ThisBoot)
    }

    /// The decision about the pod of this uid. A file that is none is set aside; one that a record has used
    /// up is taken away. Either way there is none then.
    pub fn find_decision(&mut self, uid: &str, interface: &IfName) -> Result<Option<Decision>> {
        let Some((path, decision)) = self.sound_decision(uid)? else { return Ok(None) };
        if self.decision_user(&decision, interface)?.is_some() {
            self.remove(&path)?;
            return Ok(None);
        }
        Ok(Some(decision))
    }

    /// Whether an ADD is yet to come for what the API server knows as attached under this id: a decision
    /// rests on it that no sandbox has used. Every sandbox of a pod is prepared under the same id, so what is
    /// said of an older one must not be taken for this one.
    pub(crate) fn awaits_add(&mut self, id: &AttachmentId, interface: &IfName) -> Result<bool> {
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
    ) -> Result<()> {
        self.put_reclaiming(record, replacing, given_up)?;
        self.remove_decision(&decision.uid)
    }

    /// Takes the decision about a pod away if it is there.
    pub(crate) fn remove_decision(&mut self, uid: &str) -> Result<()> {
        self.remove_if_there(&self.store.decision_path(uid)?)
    }

    /// Removes the decision that a pod is not sticky, on the disk too: the next boot would use it.
    pub(crate) fn remove_decision_durably(&mut self, uid: &str) -> Result<()> {
        self.remove_decision(uid)?;
        let folder = self.store.path(DECISIONS);
        if inode_of(&folder)?.is_some() { self.store.sync_dir(&folder) } else { Ok(()) }
    }

    /// Writes down that the API server knows none of these ids as attached any more: what is kept for the
    /// claimant does not speak for its pod from here on, because others may have the address, and a decision
    /// that rests on such an attachment goes. What a living sandbox has is left alone. Durable with the
    /// commit.
    pub fn clear_attachment(&mut self, claimant: &ClaimantKey, ids: &[AttachmentId]) -> Result<()> {
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

    /// Withdraws a decision whose pod will not come. The caller detaches what is unused, without the lock.
    pub fn withdraw_decision(&mut self, uid: &str, interface: &IfName) -> Result<Withdrawn> {
        let Some((path, decision)) = self.sound_decision(uid)? else { return Ok(Withdrawn::Nothing) };
        let user = self.decision_user(&decision, interface)?;
        self.remove(&path)?;
        self.store.sync_dir(&self.store.path(DECISIONS))?;
        Ok(match user {
            Some(RecordState::Attached) => Withdrawn::InUse,
            // Its sandbox has come and gone, and DEL has detached or left a pending update.
            Some(_) => Withdrawn::Nothing,
            None => Withdrawn::Unused(Box::new(decision)),
        })
    }

    /// The decision about the pod of this uid, with its file. A file that is none is set aside.
    fn sound_decision(&mut self, uid: &str) -> Result<Option<(PathBuf, Decision)>> {
        let path = self.store.decision_path(uid)?;
        let found = self.store.read_decision(uid)?;
        if let Some(None) = found {
            self.set_aside(DECISIONS, uid, "it is no prepared decision")?;
        }
        Ok(found.flatten().map(|decision| (path, decision)))
    }

    /// The state of the record that has the attachment id of this decision.
    fn decision_user(&mut self, decision: &Decision, interface: &IfName) -> Result<Option<RecordState>> {
        let Some(sticky) = &decision.sticky else { return Ok(None) };
        let claimant = ClaimantKey::new(&sticky.namespace, &sticky.name, interface);
        let stored = self.find_by_claimant(&claimant)?;
        let is_user = |stored: &StoredRecord| stored.record.attachment_id() == Some(&sticky.attachment_id);
        Ok(stored.filter(is_user).map(|stored| stored.record.state))
    }
}
