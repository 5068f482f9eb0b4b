//! Taking over what host-local wrote: in its own directory, where opening it is enough, or from another data
//! directory, which is left as it is.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::names::Attachment;
use crate::store::lock::StoreLock;
use crate::store::{Disk, Record, Store, StoreError, inode_of};

/// What becomes of one file of host-local's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImportStep {
    /// The address that the file is named after.
    pub address: IpAddr,
    /// What becomes of it.
    pub fate: ImportAction,
}

/// What becomes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ImportAction {
    /// It becomes a record of ours.
    Imported(Attachment),
    /// It is one already.
    Ours(Attachment),
    /// It is no record: set aside in place, passed over when copied.
    NoRecord,
    /// It cannot be taken over, and so nothing is: why.
    Conflict(String),
}

impl<D: Disk> Store<D> {
    /// What taking over this directory in place would do. Changes nothing.
    pub(crate) fn plan_import_in_place(&self) -> Result<Vec<ImportStep>, StoreError> {
        let mut steps = Vec::new();
        for look in self.address_files()? {
            let fate = match look.record {
                None => ImportAction::NoRecord,
                Some(record) if look.is_host_local => ImportAction::Imported(record.attachment),
                Some(record) => ImportAction::Ours(record.attachment),
            };
            steps.push(ImportStep { address: look.address, fate });
        }
        Ok(steps)
    }

    /// Takes over this directory in place.
    /// Errors: the lock is not to be had, or the disk fails; the next one who opens the store goes on.
    pub(crate) fn import_in_place(&self) -> Result<(), StoreError> {
        if let Some(mut locked) = self.lock_existing()? {
            locked.rebuild_derived()?;
            locked.commit()?;
        }
        Ok(())
    }

    /// What copying the records of `from` would do. Changes nothing.
    pub(crate) fn plan_import_from(&self, from: &Self) -> Result<Vec<ImportStep>, StoreError> {
        let mut here: BTreeMap<IpAddr, Record> = BTreeMap::new();
        if self.is_there()? {
            for look in self.address_files()? {
                here.extend(look.record.map(|record| (look.address, record)));
            }
        }
        let mut steps = Vec::new();
        for look in from.address_files()? {
            let address = look.address;
            let fate = match look.record {
                None => ImportAction::NoRecord,
                Some(_) if !look.is_host_local => ImportAction::Conflict(
                    "it is sticky-ipam's own record there; move that directory instead".into(),
                ),
                Some(record) => fate(address, record.attachment, &here),
            };
            steps.push(ImportStep { address, fate });
        }
        Ok(steps)
    }

    /// Copies host-local's records of `from`, which is locked meanwhile and left as it is.
    /// Errors: a lock is not to be had, or the disk fails. What is copied by then stays; the same again goes
    /// on.
    pub(crate) fn import_from(&self, from: &Self) -> Result<Vec<ImportStep>, StoreError> {
        let lock = from.path("lock");
        let _held = match inode_of(&lock)? {
            Some(_) => Some(StoreLock::acquire(&lock, from.timeout)?),
            None => None,
        };
        let cursors = from.host_local_cursors();
        let mut locked = self.lock()?;
        let steps = self.plan_import_from(from)?;
        if steps.iter().any(|step| matches!(step.fate, ImportAction::Conflict(_))) {
            return Ok(steps);
        }
        let mut joined: BTreeMap<&Attachment, Vec<IpAddr>> = BTreeMap::new();
        for step in &steps {
            if let ImportAction::Imported(attachment) = &step.fate {
                joined.entry(attachment).or_default().push(step.address);
            }
        }
        for (attachment, addresses) in joined {
            let old = locked.find_by_attachment(attachment)?;
            let known = old.iter().flat_map(|old| old.record.addresses.iter().copied());
            let addresses = known.chain(addresses).collect();
            let record = match &old {
                Some(old) => Record { addresses, ..old.record.clone() },
                None => Record::of_host_local(addresses, attachment.clone(), &self.now),
            };
            locked.put(&record, old.as_ref())?;
        }
        for (index, address) in cursors {
            if !locked.state.cursors.contains_key(&index) {
                locked.set_cursor(index, address);
            }
        }
        locked.write_page()?;
        locked.commit()?;
        Ok(steps)
    }
}

fn fate(address: IpAddr, attachment: Attachment, here: &BTreeMap<IpAddr, Record>) -> ImportAction {
    match here.get(&address) {
        Some(record) if record.attachment == attachment => ImportAction::Ours(attachment),
        Some(record) => ImportAction::Conflict(format!(
            "container {} has it there, {} has it here",
            attachment.container,
            record.holder()
        )),
        None => ImportAction::Imported(attachment),
    }
}
