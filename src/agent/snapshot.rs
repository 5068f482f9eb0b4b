//! The node's store as it stands at one moment, read without its lock. Must never be the ground of a change:
//! whoever changes something looks again under the lock.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::path::Path;

use crate::cluster::objects::StickyKey;
use crate::store::{Decision, Disk, NodeTime, PendingUpdate, Record, Store, StoreError};

/// What a look at a sandbox's network namespace shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Netns {
    /// It is there, or nobody can tell.
    MayExist,
    /// It is gone, and the directory that it lay in is there.
    Gone,
}

/// A record and what is left of its sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeRecord {
    /// The record.
    pub record: Record,
    /// Its namespace.
    pub netns: Netns,
}

/// Everything in the store that concerns the agent.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// The records, each once.
    pub held: Vec<NodeRecord>,
    /// The prepared decisions.
    pub decisions: Vec<Decision>,
    /// The notes, with their names.
    pub pending_updates: Vec<(String, PendingUpdate)>,
    /// When.
    pub now: NodeTime,
}

impl Snapshot {
    /// Reads it. `on_host` tells where a path of the node is found.
    ///
    /// # Errors
    /// A directory cannot be read.
    pub fn take<D: Disk>(
        store: &Store<D>,
        on_host: impl Fn(&Path) -> std::path::PathBuf,
    ) -> Result<Self, StoreError> {
        let mut seen: BTreeSet<IpAddr> = BTreeSet::new();
        let mut held = Vec::new();
        for look in store.walk()? {
            let Some(record) = look.record.filter(|_| !seen.contains(&look.address)) else { continue };
            seen.extend(record.addresses.iter().copied());
            let netns = match record.netns.as_deref() {
                Some(path) if record.is_attached(store.now()) => look_at(&on_host(path)),
                _ => Netns::MayExist,
            };
            held.push(NodeRecord { record, netns });
        }
        Ok(Self {
            held,
            decisions: store.decisions()?,
            pending_updates: store.pending_updates()?,
            now: store.now().clone(),
        })
    }

    /// The records that sandboxes of this boot have.
    pub fn attached(&self) -> impl Iterator<Item = &NodeRecord> {
        self.held.iter().filter(|held| held.record.is_attached(&self.now))
    }

    /// The record with which a sandbox lives through this StickyIP.
    #[must_use]
    pub fn living(&self, key: &StickyKey) -> Option<&Record> {
        self.attached().map(|held| &held.record).find(|record| is_bound_to(record, key))
    }

    /// The decision that is prepared through this StickyIP.
    #[must_use]
    pub fn prepared(&self, key: &StickyKey) -> Option<&Decision> {
        self.decisions.iter().find(|decision| {
            decision
                .sticky
                .as_ref()
                .is_some_and(|sticky| sticky.namespace == key.namespace && sticky.name == key.name)
        })
    }

    /// Whether a sandbox or a decision stands with this address.
    #[must_use]
    pub fn uses(&self, address: IpAddr) -> bool {
        self.attached().any(|held| held.record.addresses.contains(&address))
            || self.decisions.iter().any(|decision| {
                decision.sticky.as_ref().is_some_and(|sticky| sticky.addresses.contains(&address))
            })
    }
}

/// Whether the record is of this StickyIP.
#[must_use]
pub fn is_bound_to(record: &Record, key: &StickyKey) -> bool {
    record
        .binding
        .as_ref()
        .is_some_and(|binding| binding.namespace == key.namespace && binding.name == key.name)
}

/// The uid of a record's pod.
#[must_use]
pub fn uid_of(record: &Record) -> Option<&str> {
    record.pod.as_ref().and_then(|pod| pod.uid())
}

/// A namespace is gone only where its directory can be seen without it. Namespaces named by a process are not
/// looked at: the agent may live among other processes.
fn look_at(path: &Path) -> Netns {
    let folder = path.parent().filter(|folder| folder.is_dir());
    let by_process = path.components().any(|part| part.as_os_str() == "proc");
    match (folder, by_process) {
        (Some(_), false) if matches!(path.try_exists(), Ok(false)) => Netns::Gone,
        _ => Netns::MayExist,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_is_gone_only_where_its_directory_is_seen() {
        let dir = tempfile::tempdir().unwrap();
        let there = dir.path().join("cni-1");
        std::fs::write(&there, "").unwrap();
        assert_eq!(look_at(&there), Netns::MayExist);
        assert_eq!(look_at(&dir.path().join("cni-2")), Netns::Gone);
        assert_eq!(look_at(&dir.path().join("unmounted/cni-2")), Netns::MayExist);
        assert_eq!(look_at(Path::new("/proc/4194305/ns/net")), Netns::MayExist);
    }
}
