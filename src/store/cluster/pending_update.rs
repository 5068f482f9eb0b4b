//! Pending updates: what a verb did and could not write to the API server, for the node's agent, in
//! `.sticky/pending-updates`, one small file per attachment. They are derived from nothing, so nothing but
//! [`LockedStore::remove_pending_update`] and [`LockedStore::clear_pending_update`] may remove them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::names::{Attachment, AttachmentId};
use crate::store::error::cannot;
use crate::store::files::{self, if_there};
use crate::store::records::record::attachment_file_name;
use crate::store::{DERIVED, Disk, LockedStore, NodeTime, Result, Store, inode_of};

const PENDING_UPDATES: &str = ".sticky/pending-updates";
/// A pending update before it has its name.
const NEW: &str = ".sticky/new-update";

/// What the agent has to write to the API server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingUpdate {
    pub kind: PendingUpdateKind,
    /// The sandbox's container id.
    pub container: String,
    pub interface: String,
    /// The StickyIP's namespace; absent when it must be searched among the node's by container id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The id under which the API server knows the attachment, if it is not the container id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attachment_id: Option<AttachmentId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    pub at: NodeTime,
}

/// What happened to a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PendingUpdateKind {
    /// It came to an end: detach it.
    Ended,
    /// It took its pod's older sandbox's place while the API server was away: attach it.
    Attached,
}

/// How long a small file must last.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durability {
    /// It is on the disk when it is in place.
    PowerLoss,
    /// The processes of this boot see it, and that is enough.
    ThisBoot,
}

impl<D: Disk> LockedStore<'_, D> {
    /// In place of an earlier one of the same attachment. It is on the disk when this returns.
    pub fn put_pending_update(&mut self, attachment: &Attachment, update: &PendingUpdate) -> Result<()> {
        let path = self.store.pending_update_path(&attachment_file_name(attachment));
        self.put_small_file("write the pending update", update, NEW, &path, Durability::PowerLoss)
    }

    /// Puts a pending update or a decision in place, whole, by way of `new`; `what` is for the error.
    pub(crate) fn put_small_file(
        &self,
        what: &'static str,
        content: &impl Serialize,
        new: &str,
        path: &Path,
        lasting: Durability,
    ) -> Result<()> {
        let (disk, new) = (&self.store.disk, self.store.path(new));
        let folder = path.parent().unwrap_or(path);
        if inode_of(folder)?.is_none() {
            self.store.make_dir(folder)?;
            self.store.sync_dir(&self.store.path(DERIVED))?;
        }
        serde_json::to_vec_pretty(content)
            .map_err(io::Error::from)
            .and_then(|bytes| self.store.create_replacing(&new, &bytes))
            .and_then(|file| if lasting == Durability::PowerLoss { disk.sync(&file) } else { Ok(()) })
            .and_then(|()| disk.rename(&new, path))
            .map_err(cannot(what, path))?;
        if lasting == Durability::PowerLoss { self.store.sync_dir(folder) } else { Ok(()) }
    }

    pub(crate) fn pending_update_of(&mut self, attachment: &Attachment) -> Result<Option<PendingUpdate>> {
        let bytes = self.store.read_pending_update(&attachment_file_name(attachment))?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    /// The API server has it.
    pub(crate) fn clear_pending_update(&mut self, attachment: &Attachment) -> Result<()> {
        self.remove_if_there(&self.store.pending_update_path(&attachment_file_name(attachment)))
    }

    /// Removes a pending update, if it is still the same.
    pub(crate) fn remove_pending_update(&mut self, name: &str, update: &PendingUpdate) -> Result<()> {
        let path = self.store.pending_update_path(name);
        let there = fs::read(&path).ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        if there.as_ref() == Some(update) { self.remove(&path) } else { Ok(()) }
    }
}

impl<D: Disk> Store<D> {
    /// Every pending update with its name, as they are now. Other files are ignored.
    pub fn pending_updates(&self) -> Result<Vec<(String, PendingUpdate)>> {
        let mut pending_updates = Vec::new();
        for (name, _) in files::names(&self.path(PENDING_UPDATES))? {
            let Some(bytes) = self.read_pending_update(&name)? else { continue };
            match serde_json::from_slice(&bytes) {
                Ok(update) => pending_updates.push((name, update)),
                Err(error) => {
                    tracing::warn!(name, %error, "a file is no pending update and is ignored; remove it");
                }
            }
        }
        pending_updates.sort_by(|(a, _), (b, _)| a.cmp(b));
        Ok(pending_updates)
    }

    fn pending_update_path(&self, name: &str) -> PathBuf {
        self.path(PENDING_UPDATES).join(name)
    }

    fn read_pending_update(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let path = self.pending_update_path(name);
        if_there(fs::read(&path)).map_err(cannot("read the pending update", &path))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{ContainerId, IfName, NetworkName};
    use crate::store::RealDisk;

    #[test]
    fn a_pending_update_outlasts_a_reboot_and_is_removed_only_as_it_was_read() {
        let dir = tempfile::tempdir().unwrap();
        let network = NetworkName::new("net").unwrap();
        let store = |boot: &str| {
            Store::new(RealDisk, dir.path(), &network, NodeTime::new(1, 1, boot), std::time::Duration::ZERO)
        };
        let attachment = Attachment {
            container: ContainerId::new("c1").unwrap(),
            interface: IfName::new("eth0").unwrap(),
        };
        let note = |kind| PendingUpdate {
            kind,
            container: "c1".into(),
            interface: "eth0".into(),
            namespace: Some("db".into()),
            name: Some("db-0".into()),
            attachment_id: None,
            uid: None,
            at: NodeTime::new(1, 1, "a"),
        };
        let first = store("a");
        first.lock().unwrap().put_pending_update(&attachment, &note(PendingUpdateKind::Attached)).unwrap();
        first.lock().unwrap().put_pending_update(&attachment, &note(PendingUpdateKind::Ended)).unwrap();
        let later = store("b");
        drop(later.lock().unwrap());
        let pending_updates = later.pending_updates().unwrap();
        assert_eq!(pending_updates, [("c1,eth0".to_owned(), note(PendingUpdateKind::Ended))]);
        let mut locked = later.lock().unwrap();
        locked.remove_pending_update("c1,eth0", &note(PendingUpdateKind::Attached)).unwrap();
        assert_eq!(later.pending_updates().unwrap().len(), 1);
        locked.remove_pending_update("c1,eth0", &note(PendingUpdateKind::Ended)).unwrap();
        assert_eq!(later.pending_updates().unwrap(), []);
    }
}
