//! `RestoreUnowned`: unowned pool entries are written again that the pool has lost and that are in none of
//! the node's blocks: its CiliumNode was created again, which has neither. That they are recorded proves that
//! they were in the pool, so that ordinary pods may live with these addresses. After its next start
//! cilium-agent would take the network from such a pod.
//!
//! Must never write an entry for an address that is claimed, or that another node may have by now.

use std::collections::BTreeSet;
use std::net::IpAddr;

use kube::api::{Api, ListParams};

use super::{ActionContext, Performed, done, needs_attention, not_needed};
use crate::agent::plan::contains;
use crate::cluster::cilium::pool::{home_blocks, list_nodes};
use crate::cluster::objects::cilium::CiliumNode;
use crate::cluster::objects::{AddressClaim, ClaimName};
use crate::node::list;
use crate::store::Disk;

pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    planned: &[IpAddr],
) -> Performed {
    let mut api_writer = context.api_writer();
    let (own, others): (Vec<CiliumNode>, Vec<CiliumNode>) = list_nodes(api_writer.api())
        .await?
        .into_iter()
        .partition(|node| node.metadata.name.as_deref() == Some(&context.settings.node));
    let Some(node) = own.into_iter().next() else { return not_needed("the CiliumNode is gone") };
    let claimed = context.all_claimed().await?;
    let store = context.store()?;
    let mut locked = store.lock()?;
    let (mut lost, mut refused) = (Vec::new(), Vec::new());
    for address in planned {
        let there = locked.find_by_address(*address)?;
        if node.spec.ipam.pool.contains_key(&address.to_string())
            || !there.is_some_and(|there| there.record.is_unowned())
        {
            continue;
        }
        let is_others = others.iter().any(|other| is_of(other, *address));
        if claimed.contains(address) || is_others { refused.push(*address) } else { lost.push(*address) }
    }
    drop(locked);
    // With blocks of its own again, the others have been given away.
    if lost.is_empty() && !refused.is_empty() && home_blocks(&node).is_empty() {
        return needs_attention(format!(
            "{} was in this node's pool and is claimed or another node's now; if an ordinary pod of this node \
             has it, delete the pod",
            list(&refused)
        ));
    }
    if lost.is_empty() {
        return not_needed("the pool has them, or they are not this node's any more");
    }
    context.add_unowned(&mut api_writer, node, &lost).await?;
    done(format!("wrote unowned entries again: {}", list(&lost)))
}

/// Whether another node may have this address: it is in its blocks or in its pool.
fn is_of(other: &CiliumNode, address: IpAddr) -> bool {
    contains(&home_blocks(other), address) || other.spec.ipam.pool.contains_key(&address.to_string())
}

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Every address that is claimed, by a live read.
    async fn all_claimed(&self) -> Performed<BTreeSet<IpAddr>> {
        let api = self.connection();
        let claims: Api<AddressClaim> = Api::all(api.client());
        let every = ListParams::default();
        let listed = api.read("list AddressClaims", || claims.list_metadata(&every)).await?;
        let names = listed.items.into_iter().filter_map(|claim| claim.metadata.name);
        Ok(names.filter_map(|name| name.parse::<ClaimName>().ok()).map(ClaimName::address).collect())
    }
}
