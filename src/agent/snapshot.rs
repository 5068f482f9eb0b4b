//! The node's store at one moment, read without its lock. Must never be the only reason for a change: an
//! action reads again under the lock.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;

use ipnet::IpNet;

use crate::names::StickyKey;
use crate::store::{Decision, Disk, NodeTime, PendingUpdate, Record, Store, StoreError};

/// Whether the network namespace of a sandbox exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Netns {
    /// It exists, or cannot be looked at.
    MayExist,
    /// It is gone, and its directory exists.
    Gone,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRecord {
    pub record: Record,
    pub netns: Netns,
}

#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The records, each once.
    pub records: Vec<NodeRecord>,
    pub decisions: Vec<Decision>,
    /// The pending updates, with the names of their files.
    pub pending_updates: Vec<(String, PendingUpdate)>,
    /// Whether every claim on an address of this node is reserved in the store.
    pub is_seeded: bool,
    /// The blocks that the CiliumNode had last, as far as the store knows.
    pub blocks: Vec<IpNet>,
    pub now: NodeTime,
}

impl Snapshot {
    /// `on_host` is where the agent finds a path of the node.
    pub(crate) fn take<D: Disk>(
        store: &Store<D>,
        on_host: impl Fn(&Path) -> std::path::PathBuf,
    ) -> Result<Self, StoreError> {
        let mut seen: BTreeSet<IpAddr> = BTreeSet::new();
        let mut records = Vec::new();
        for found in store.address_files()? {
            let Some(record) = found.record.filter(|_| !seen.contains(&found.address)) else { continue };
            seen.extend(record.addresses.iter().copied());
            let netns = match record.netns.as_deref() {
                Some(path) if record.is_attached(store.now()) => netns_at(&on_host(path)),
                _ => Netns::MayExist,
            };
            records.push(NodeRecord { record, netns });
        }
        Ok(Self {
            records,
            decisions: store.decisions()?,
            pending_updates: store.pending_updates()?,
            is_seeded: store.is_seeded()?,
            blocks: store.known_blocks()?,
            now: store.now().clone(),
        })
    }

    /// The records that sandboxes of this boot have.
    pub(crate) fn attached(&self) -> impl Iterator<Item = &NodeRecord> {
        self.records.iter().filter(|found| found.record.is_attached(&self.now))
    }

    /// The record of the sandbox that has this StickyIP.
    pub(crate) fn attached_to(&self, key: &StickyKey) -> Option<&Record> {
        self.attached().map(|found| &found.record).find(|record| is_bound_to(record, key))
    }

    /// The decision that is prepared through this StickyIP.
    pub(crate) fn prepared(&self, key: &StickyKey) -> Option<&Decision> {
        self.decisions.iter().find(|decision| {
            let sticky = decision.sticky.as_ref();
            sticky.is_some_and(|sticky| sticky.namespace == key.namespace && sticky.name == key.name)
        })
    }

    /// Whether a sandbox or a decision has this StickyIP.
    pub(crate) fn is_used(&self, key: &StickyKey) -> bool {
        self.attached_to(key).is_some() || self.prepared(key).is_some()
    }

    pub(crate) fn has_sandbox(&self, uid: &str) -> bool {
        self.attached().any(|found| uid_of(&found.record) == Some(uid))
    }

    /// Whether a sandbox of the pod has a StickyIP.
    pub(crate) fn has_bound_sandbox(&self, uid: &str) -> bool {
        self.attached().any(|found| found.record.binding.is_some() && uid_of(&found.record) == Some(uid))
    }

    /// Whether a sandbox or a decision has this address.
    pub(crate) fn uses(&self, address: IpAddr) -> bool {
        let mut prepared = self.decisions.iter().filter_map(|decision| decision.sticky.as_ref());
        self.attached().any(|found| found.record.addresses.contains(&address))
            || prepared.any(|sticky| sticky.addresses.contains(&address))
    }
}

pub(crate) fn is_bound_to(record: &Record, key: &StickyKey) -> bool {
    record.binding.as_ref().is_some_and(|binding| binding.key == *key)
}

pub(crate) fn uid_of(record: &Record) -> Option<&str> {
    record.pod.as_ref().and_then(|pod| pod.uid())
}

/// A namespace is gone only if its directory exists without it. Namespaces that are named by a process are
/// not looked at: the agent may have another process namespace.
fn netns_at(path: &Path) -> Netns {
    let is_seen = path.parent().is_some_and(Path::is_dir);
    let by_process = path.components().any(|part| part.as_os_str() == "proc");
    let is_gone = is_seen && !by_process && matches!(path.try_exists(), Ok(false));
    if is_gone { Netns::Gone } else { Netns::MayExist }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_gone_only_where_its_directory_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().join("cni-1");
        std::fs::write(&there, "").unwrap();
        assert_eq!(netns_at(&there), Netns::MayExist);
        assert_eq!(netns_at(&dir.path().join("cni-2")), Netns::Gone);
        assert_eq!(netns_at(&dir.path().join("unmounted/cni-2")), Netns::MayExist);
        assert_eq!(netns_at(Path::new("/proc/4194305/ns/net")), Netns::MayExist);
    }
}
