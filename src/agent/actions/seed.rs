//! `Seed`: what is claimed is reserved in a store that is new or was restored. Until then the plugin gives no
//! address to pods that are not sticky, unless it does this itself.
//!
//! Must never use the watches: what they show may be older than the store.

use super::{ActionContext, Performed, done, interface, needs_attention, not_needed};
use crate::node::seed::{home_claims, reserve_claims};
use crate::store::Disk;

pub(super) async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>) -> Performed {
    let store = context.store()?;
    if store.lock()?.is_seeded()? {
        return not_needed("another process has done it");
    }
    let claims = home_claims(&context.connection(), &context.settings.node).await?;
    let mut locked = store.lock()?;
    if locked.is_seeded()? {
        return not_needed("another process has done it");
    }
    let in_use = reserve_claims(&mut locked, &claims, &interface()?)?;
    locked.commit()?;
    match in_use.first() {
        None => done(format!("{} claims on addresses of this node are reserved", claims.len())),
        Some(found) => needs_attention(format!(
            "{} is claimed for StickyIP {}, and {} has it; delete that pod, it starts with another address",
            found.address,
            found.key,
            found.record.holder()
        )),
    }
}
