//! Making an address of this node anybody's again that was kept for a StickyIP: its record first, under the lock, then the owner of
//! its key in the pool (`crd` mode). From the first on nobody on this node can reserve it; whoever ends before the second leaves an
//! owner beside an address that is anybody's, and that is found (`hide`).
//!
//! Must never take the owner from a key whose address is kept: Cilium would give it to anybody, and its StickyIP's next pod would
//! have it, too.

use std::net::IpAddr;

use crate::agent::actions::{ActionContext, ActionError, ActionOutcome, list};
use crate::agent::metrics::AgentMetrics;
use crate::agent::snapshot::is_bound_to;
use crate::cluster::cilium::barrier;
use crate::cluster::cilium::objects::{CiliumNode, PoolEntry};
use crate::cluster::cilium::pool;
use crate::cluster::objects::StickyKey;
use crate::cluster::protocol::apply::ApiWriter;
use crate::cluster::protocol::view::ClaimView;
use crate::store::{Disk, Record, Store, StoredRecord};

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// The marks of these addresses as anybody's.
    pub(crate) fn unowned_records(
        store: &Store<D>,
        addresses: &[IpAddr],
    ) -> Result<Vec<Record>, ActionError> {
        let mark = |address: &IpAddr| Record::offered(*address, store.now()).map_err(ActionError::Name);
        addresses.iter().map(mark).collect()
    }

    /// Takes the owner from these keys, where it is of this kind.
    pub(crate) async fn disown(
        &self,
        api_writer: &mut ApiWriter<'_>,
        addresses: &[IpAddr],
        whose: impl Fn(&PoolEntry) -> bool,
    ) -> Result<(), ActionError> {
        pool::change(api_writer, &self.settings.node, None, |object| pool::disown(object, addresses, &whose))
            .await?;
        Ok(())
    }

    /// Undoes what was done to mark a pod, which cannot be granted the address any more: until Cilium saw the owner it could give the
    /// address to anybody. False if the claim or the record is not what it was: then there is something else to answer.
    pub(crate) async fn undo_adoption(
        &self,
        api_writer: &mut ApiWriter<'_>,
        view: &ClaimView,
        owner: &str,
    ) -> Result<bool, ActionError> {
        let address = view.address;
        let store = self.store()?;
        let there = store.lock()?.at(address)?;
        if there.as_ref().is_some_and(|there| !is_adopted_for(&there.record, &view.sticky_ref)) {
            return Ok(true);
        }
        // After the look at the record: what is asked for now was asked for when it stood so.
        let claim = self.claim_on(address).await?.map(|claim| ClaimView::from(&claim));
        if claim.as_ref() != Some(view) {
            return Ok(false);
        }
        let mut locked = store.lock()?;
        if locked.at(address)? != there {
            return Ok(false);
        }
        match &there {
            Some(there) if there.record.is_unowned() => {}
            Some(there) => {
                let mut others = there.record.addresses.clone();
                others.retain(|other| *other != address);
                locked.keep_only(there, others, &Self::unowned_records(&store, &[address])?)?;
            }
            None => {
                for mark in Self::unowned_records(&store, &[address])? {
                    locked.put(&mark, None)?;
                }
            }
        }
        locked.commit()?;
        self.disown(api_writer, &[address], |entry| entry.owner == owner).await?;
        Ok(true)
    }

    /// Takes the owner from a key whose address is anybody's, and claimed by nobody: whoever gave it back ended in between. None if the
    /// address is not anybody's.
    pub(crate) async fn remove_stale_owner(
        &self,
        address: IpAddr,
    ) -> Result<Option<ActionOutcome>, ActionError> {
        let there = self.store()?.lock()?.at(address)?;
        if !there.is_some_and(|there| there.record.is_unowned()) {
            return Ok(None);
        }
        let mut api_writer = self.api_writer();
        self.disown(&mut api_writer, &[address], |entry| !barrier::is_barrier(entry)).await?;
        if api_writer.count() == 0 {
            return Ok(None);
        }
        AgentMetrics::count(&self.metrics.leaks, "key");
        Ok(Some(ActionOutcome::Done(format!("{} is anybody's, and had an owner", list(&[address])))))
    }
}

/// Whether an address is kept for no other than this StickyIP: for it, or it is anybody's already.
fn is_adopted_for(record: &Record, key: &StickyKey) -> bool {
    record.is_unowned() || is_bound_to(record, key)
}

/// Those of these addresses of a record that are anybody's once the record is gone, because they stand in the pool: unowned, or for a
/// pod of the record's StickyIP. Its pods are of its namespace, and nobody else keeps the address here.
pub(crate) fn in_the_pool(node: &CiliumNode, stored: &StoredRecord, addresses: &[IpAddr]) -> Vec<IpAddr> {
    let stands = |address: &&IpAddr| {
        let entry = node.spec.ipam.pool.get(&address.to_string());
        entry.is_some_and(|entry| entry.owner.is_empty() || is_of_its_namespace(&stored.record, entry))
    };
    addresses.iter().filter(stands).copied().collect()
}

/// Whether a key is for a pod of the namespace of a record's StickyIP.
pub(crate) fn is_of_its_namespace(record: &Record, entry: &PoolEntry) -> bool {
    let namespace = entry.owner.split_once('/').map(|(namespace, _)| namespace);
    record.binding.as_ref().is_some_and(|binding| namespace == Some(&binding.namespace))
}
