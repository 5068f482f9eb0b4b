//! Giving an address of this node that was kept for a StickyIP to any pod again: its record first, under the
//! lock, then the owner of its pool entry (`crd` mode). From the first step on nothing on this node can
//! reserve it. If the process ends before the second, the entry of an unowned address has an owner, and
//! `Unpublish` finds it.
//!
//! Must never remove the owner of an entry whose address is kept: Cilium would give it to any pod, and the
//! next pod of its StickyIP would have it, too.

use std::net::IpAddr;

use super::context::ActionContext;
use super::outcome::Performed;
use crate::cluster::cilium::pool;
use crate::cluster::objects::cilium::PoolEntry;
use crate::cluster::writer::apply::ApiWriter;
use crate::store::Disk;

impl<D: Disk + Clone> ActionContext<'_, D> {
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
