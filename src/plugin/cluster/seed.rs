//! Nothing of this node's ranges is given out before the claims on them are reserved: what the store of a
//! node lacks may be with a pod of another node. Must never be asked for an address that is claimed already.

use crate::cluster::api::client::Connection;
use crate::cluster::objects::AddressClaim;
use crate::cni::{ClusterConf, CniError};
use crate::node::seed::{home_claims, reserve_claims};
use crate::plugin::VerbContext;
use crate::plugin::cluster::context::{AddError, block_on};
use crate::store::{Disk, LockedStore};

/// Whether an address that has no record here may be another pod's. Costs a look at one file.
pub(crate) fn is_unseeded<D: Disk>(
    verb: &VerbContext<'_, D>,
    locked: &LockedStore<'_, D>,
) -> Result<bool, CniError> {
    Ok(verb.sticky.cluster.is_some() && !locked.is_seeded()?)
}

/// Reserves what is claimed. The lock is released while the claims are listed; what is not claimed is free
/// to be given out under the lock that is returned.
/// Errors: the API server does not answer; nothing is changed then.
pub(crate) fn seed<'a, D: Disk>(
    verb: &'a VerbContext<'_, D>,
    locked: LockedStore<'a, D>,
) -> Result<LockedStore<'a, D>, CniError> {
    drop(locked);
    let Some(conf) = &verb.sticky.cluster else { return Ok(verb.store.lock()?) };
    let claims = list_claims(conf)?;
    let mut locked = verb.store.lock()?;
    if locked.is_seeded()? {
        // Another process came first, and its list is the newer one.
        return Ok(locked);
    }
    let in_use = reserve_claims(&mut locked, &claims, &verb.attachment()?.interface)?;
    for found in &in_use {
        let (address, sticky_ip, held_by) = (found.address, &found.key, found.record.holder());
        tracing::error!(%address, %sticky_ip, held_by, "a pod has an address that is claimed for another");
    }
    tracing::info!(claims = claims.len(), "reserved what is claimed in a store that did not know it");
    Ok(locked)
}

/// On a thread of its own: the caller may be in the middle of other requests.
fn list_claims(conf: &ClusterConf) -> Result<Vec<AddressClaim>, CniError> {
    let listed = std::thread::scope(|scope| {
        let listing = scope.spawn(|| {
            block_on(async {
                let listed = async {
                    let api = Connection::open(&conf.kubeconfig, conf.timeout).await?;
                    home_claims(&api, &conf.node).await
                };
                listed.await.map_err(AddError::Unreachable)
            })
        });
        listing.join()
    });
    match listed {
        Ok(Ok(claims)) => Ok(claims),
        Ok(Err(AddError::Rejected(error))) => Err(error),
        Ok(Err(AddError::Unreachable(error) | AddError::WriteInDoubt(error))) => {
            Err(CniError::try_again(format!(
                "the store of node {} is new or was restored, and must learn first which of its addresses are \
                 claimed: {error}; it is tried again, and the agent of this node does it too",
                conf.node
            )))
        }
        Err(_) => Err(CniError::internal("the list of claims ended early")),
    }
}
