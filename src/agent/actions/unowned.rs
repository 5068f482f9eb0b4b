//! Unowned pool entries: adding them, and giving an address of this node that was kept for a StickyIP to any
//! pod again: its record first, under the lock, then the owner of its pool entry (`crd` mode). From the first
//! step on nothing on this node can reserve it. If the process ends before the second, the entry of an
//! unowned address has an owner, and `Unpublish` finds it.
//!
//! Must never remove the owner of an entry whose address is kept: Cilium would give it to any pod, and the
//! next pod of its StickyIP would have it, too.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::context::ActionContext;
use super::outcome::Performed;
use crate::cluster::cilium::pool::{self, NodePatch};
use crate::cluster::objects::cilium::{CiliumNode, PoolEntry};
use crate::cluster::writer::apply::ApiWriter;
use crate::store::Disk;

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Adds unowned entries for these addresses, which the store has recorded, where the pool has none.
    pub(super) async fn add_unowned(
        &self,
        api_writer: &mut ApiWriter<'_>,
        node: CiliumNode,
        addresses: &[IpAddr],
    ) -> Performed<()> {
        let keys: BTreeMap<String, Option<PoolEntry>> =
            addresses.iter().map(|address| (address.to_string(), Some(PoolEntry::default()))).collect();
        pool::change(api_writer, &self.settings.node, Some(node), |object| {
            let mut missing = keys.clone();
            missing.retain(|key, _| !object.spec.ipam.pool.contains_key(key));
            (!missing.is_empty()).then(|| NodePatch::of_keys(object, missing))
        })
        .await?;
        Ok(())
    }

    /// Removes the owner from these pool entries, where it is of this kind.
    pub(super) async fn disown(
        &self,
        api_writer: &mut ApiWriter<'_>,
        addresses: &[IpAddr],
        whose: impl Fn(&PoolEntry) -> bool,
    ) -> Performed<()> {
        let patch = |object: &_| pool::disown(object, addresses, &whose);
        pool::change(api_writer, &self.settings.node, None, patch).await?;
        Ok(())
    }
}
