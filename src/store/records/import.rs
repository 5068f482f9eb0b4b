//! Taking over what host-local wrote: in its own directory, where opening it is enough, or from another one,
//! which is left as it is.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::names::Attachment;
use crate::store::lock::StoreLock;
use crate::store::{AddressFile, Disk, Record, Result, Store};

/// What becomes of the file of host-local's that is named after this address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ImportStep {
    pub address: IpAddr,
    pub fate: ImportAction,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ImportAction {
    Imported(Attachment),
    Ours(Attachment),
    /// It is no record: set aside in place, passed over when copied.
    NoRecord,
    /// It cannot be taken over, and so nothing is: why.
    Conflict(String),
}

impl<D: Disk> Store<D> {
    /// What taking over this directory in place would do. Changes nothing.
    pub(crate) fn plan_import_in_place(&self) -> Result<Vec<ImportStep>> {
        self.plan(|_, record, is_host_local| {
            let fate = if is_host_local { ImportAction::Imported } else { ImportAction::Ours };
            fate(record.attachment)
        })
    }

    /// Takes over this directory in place.
    /// Errors: the lock is not to be had, or the disk fails; the next one who opens the store goes on.
    pub(crate) fn import_in_place(&self) -> Result<()> {
        if let Some(mut locked) = self.lock_existing()? {
            locked.rebuild_derived()?;
            locked.commit()?;
        }
        Ok(())
    }

    /// What copying the records of `from` would do. Changes nothing.
    pub(crate) fn plan_import_from(&self, from: &Self) -> Result<Vec<ImportStep>> {
        let files = if self.is_there()? { self.address_files()? } else { Vec::new() };
        let here: BTreeMap<IpAddr, Record> =
            files.into_iter().filter_map(|look| Some((look.address, look.record?))).collect();
        from.plan(|address, Record { attachment, .. }, is_host_local| match here.get(&address) {
            _ if !is_host_local => ImportAction::Conflict(
                "it is sticky-ipam's own record there; move that directory instead".to_owned(),
            ),
            None => ImportAction::Imported(attachment),
            Some(record) if record.attachment == attachment => ImportAction::Ours(attachment),
            Some(record) => ImportAction::Conflict(format!(
                "container {} has it there, {} has it here",
                attachment.container,
                record.holder()
            )),
        })
    }

    /// What becomes of every file here, if `fate` says it of those that are records, host-local's or ours.
    fn plan(&self, fate: impl Fn(IpAddr, Record, bool) -> ImportAction) -> Result<Vec<ImportStep>> {
        let step = |AddressFile { address, record, is_host_local, .. }| {
            let fate = record.map_or(ImportAction::NoRecord, |record| fate(address, record, is_host_local));
            ImportStep { address, fate }
        };
        Ok(self.address_files()?.into_iter().map(step).collect())
    }

    /// Copies host-local's records of `from`, which is locked meanwhile and left as it is.
    /// Errors: a lock is not to be had, or the disk fails. What is copied stays; the same again goes on.
    pub(crate) fn import_from(&self, from: &Self) -> Result<Vec<ImportStep>> {
        let _held = StoreLock::acquire_existing(&from.path("lock"), from.timeout)?;
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
                None => Record::attached(addresses, attachment.clone(), &self.now),
            };
            locked.put(&record, old.as_ref())?;
        }
        for (index, address) in cursors {
            locked.state.cursors.entry(index).or_insert(address);
        }
        locked.write_page()?;
        locked.commit()?;
        Ok(steps)
    }
}
