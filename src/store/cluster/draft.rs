//! A record's file that is on the disk before it is known whether it will be needed: while the API server is
//! at its own write, the disk can be at this one. It belongs to no record until a change gives it names
//! ([`crate::store::records::change`]). Must never be read: what an ended process has left says nothing.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::names::Attachment;
use crate::store::error::cannot;
use crate::store::records::record::attachment_file_name;
use crate::store::{DRAFTS, Disk, LockedStore, Record, Result, Store};

#[derive(Debug)]
pub struct Draft {
    pub(crate) path: PathBuf,
    pub(crate) bytes: Vec<u8>,
    pub(crate) file: File,
}

impl<D: Disk> Store<D> {
    /// Writes the file of a record, and returns when it is on the disk. Its name is the attachment's, so the
    /// lock is not needed; the store must have been locked once, so that it is there.
    pub fn draft(&self, record: &Record) -> Result<Draft> {
        self.make_dir(&self.path(DRAFTS))?;
        let path = self.path(DRAFTS).join(attachment_file_name(&record.attachment));
        let write = || {
            let bytes = record.to_bytes()?;
            let file = self.create_replacing(&path, &bytes)?;
            self.disk.sync(&file)?;
            Ok((bytes, file))
        };
        let (bytes, file) = write().map_err(cannot("write", &path))?;
        Ok(Draft { path, bytes, file })
    }

    /// Takes a draft away that is not needed after all.
    pub(crate) fn discard_draft(&self, draft: &Draft) -> Result<()> {
        self.disk.remove(&draft.path).map_err(cannot("remove", &draft.path))
    }

    /// Makes a file, in the place of one that a process which ended has left.
    pub(crate) fn create_replacing(&self, path: &Path, bytes: &[u8]) -> io::Result<File> {
        match self.disk.create(path, bytes) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                self.disk.remove(path).and_then(|()| self.disk.create(path, bytes))
            }
            created => created,
        }
    }
}

impl<D: Disk> LockedStore<'_, D> {
    /// The next record that is put in place and says the very same is made of this.
    pub(crate) fn use_draft(&mut self, draft: Option<Draft>) {
        self.draft = draft;
    }

    /// Takes away what an ADD of this attachment has left if it did not come to its end.
    pub(crate) fn remove_draft(&mut self, attachment: &Attachment) -> Result<()> {
        self.remove_if_there(&self.store.path(DRAFTS).join(attachment_file_name(attachment)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::names::{ContainerId, IfName, NetworkName, PodIdentity};
    use crate::store::{ClaimantKey, NodeTime, RealDisk};

    fn sandbox(container: &str) -> Attachment {
        let interface = IfName::new("eth0").unwrap();
        Attachment { container: ContainerId::new(container).unwrap(), interface }
    }

    fn made(store: &Store, address: &str, container: &str) -> Record {
        let pod = PodIdentity::new("db", "db-0", Some("u")).unwrap();
        let last = sandbox(container);
        let claimant = ClaimantKey::new("db", "db-0", &last.interface);
        Record::reserved(vec![address.parse().unwrap()], &claimant, Some(pod), &last, store.now())
    }

    #[test]
    fn a_record_is_made_of_its_own_draft_and_of_no_other_and_none_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let (network, now) = (NetworkName::new("net").unwrap(), NodeTime::new(1, 1, "a"));
        let store = Store::new(RealDisk, dir.path(), &network, now, std::time::Duration::ZERO);
        drop(store.lock().unwrap());
        let inode = |path: &Path| crate::store::inode_of(path).unwrap();
        let drafts = || crate::store::files::names(&store.path(DRAFTS)).unwrap().len();
        // The first has nothing to replace, the second its own older one, the third's draft is of another
        // address.
        for (drafted, put, is_used) in
            [("10.0.0.1", "10.0.0.1", true), ("10.0.0.1", "10.0.0.1", true), ("10.0.0.9", "10.0.0.1", false)]
        {
            let mut locked = store.lock().unwrap();
            let record = made(&store, put, "c1");
            let kept = locked.find_by_claimant(&record.claimant().unwrap()).unwrap();
            let draft = store.draft(&made(&store, drafted, "c1")).unwrap();
            // As long as it is open no other file gets its inode.
            let (_open, of_draft) = (draft.file.try_clone().unwrap(), inode(&draft.path));
            locked.use_draft(Some(draft));
            locked.put(&record, kept.as_ref()).unwrap();
            locked.commit().unwrap();
            assert_eq!(inode(&store.path(put)) == of_draft, is_used, "{drafted}, {put}");
            assert_eq!(drafts(), 0);
        }
        // One that was taken away meanwhile is none.
        let mut locked = store.lock().unwrap();
        let draft = store.draft(&made(&store, "10.0.0.2", "c2")).unwrap();
        store.discard_draft(&draft).unwrap();
        locked.use_draft(Some(draft));
        let kept = locked.find_by_claimant(&made(&store, "10.0.0.2", "c2").claimant().unwrap()).unwrap();
        locked.put(&made(&store, "10.0.0.2", "c2"), kept.as_ref()).unwrap();
        locked.commit().unwrap();
        // Left by processes that ended: one goes with its container, the others with the boot.
        for container in ["c3", "c4"] {
            store.draft(&made(&store, "10.0.0.2", container)).unwrap();
        }
        store.lock().unwrap().remove_draft(&sandbox("c3")).unwrap();
        assert_eq!(drafts(), 1);
        assert!(store.verify().unwrap().is_empty());
        let later =
            Store::new(RealDisk, dir.path(), &network, NodeTime::new(2, 2, "b"), std::time::Duration::ZERO);
        drop(later.lock().unwrap());
        assert_eq!(drafts(), 0);
    }
}
