//! A fast path: the file of a pod's record is written while the API server handles the write that attaches
//! the pod, so that nothing waits for the disk afterwards. Must never be needed: without a draft the record
//! is written under the lock.

use std::cell::RefCell;
use std::net::IpAddr;

use crate::node::addresses::NodeAddresses;
use crate::plugin::cluster::context::AddContext;
use crate::plugin::cluster::record;
use crate::store::{Disk, Draft};

pub(crate) struct RecordDraft<'a, D: Disk> {
    context: &'a AddContext<'a, D>,
    draft: RefCell<Option<Draft>>,
}

impl<'a, D: Disk> RecordDraft<'a, D> {
    pub(crate) fn new(context: &'a AddContext<'a, D>, draft: Option<Draft>) -> Self {
        Self { context, draft: RefCell::new(draft) }
    }

    /// Writes the record that most likely follows. One of the same sandbox that was written before is
    /// overwritten.
    pub(crate) fn write(&self, node: &NodeAddresses<'_, D>, addresses: &[IpAddr]) {
        let all = match node.source.publish.mode.cilium_picks_the_address() {
            true => Some(addresses.to_vec()),
            false => record::serving(&node.source.sets, addresses).into_iter().collect(),
        };
        // An address for a set that they do not serve is found under the lock.
        let Some(all) = all else { return };
        let record = record::attached_record(self.context, node, all, node.attachment.id());
        match self.context.verb.store.draft(&record) {
            Ok(draft) => drop(self.draft.replace(Some(draft))),
            // If the disk fails, the record itself fails too.
            Err(error) => {
                let pod = &node.pod;
                tracing::debug!(%pod, %error, "cannot write a draft; the record is written under the lock");
            }
        }
    }

    pub(crate) fn take(&self) -> Option<Draft> {
        self.draft.take()
    }

    pub(crate) fn discard(&self) {
        if let Some(Err(error)) = self.take().map(|draft| self.context.verb.store.discard_draft(&draft)) {
            let pod = self.context.pod;
            tracing::warn!(%pod, %error, "cannot remove the draft of a record; the container's DEL does");
        }
    }
}
