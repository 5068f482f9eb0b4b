//! `RemoveBarriers`: the barrier entries that no grant waits for are removed from this node's CiliumNode. A
//! grant that still waits writes another.

use std::collections::BTreeMap;

use super::{ActionContext, Performed, done};
use crate::cluster::cilium::barrier;
use crate::cluster::cilium::pool::{self, NodePatch};
use crate::store::Disk;

pub(super) async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>) -> Performed {
    pool::change(&mut context.api_writer(), &context.settings.node, None, |object| {
        let keys: BTreeMap<_, _> = barrier::keys(object).map(|key| (key.clone(), None)).collect();
        (!keys.is_empty()).then(|| NodePatch::of_keys(object, keys))
    })
    .await?;
    context.metrics.pool_writes.inc(["unpublish"]);
    done("no grant waits for cilium-agent any more")
}
