//! `RemoveBarriers`: the barrier entries that no grant waits for are removed from this node's CiliumNode.

use std::collections::BTreeMap;

use super::context::ActionContext;
use super::outcome::{ActionError, ActionOutcome};
use crate::cluster::cilium::barrier;
use crate::cluster::cilium::pool::{self, NodePatch};
use crate::store::Disk;

/// Removes the barrier entries that no grant waits for any more. A grant that still waits writes another.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
) -> Result<ActionOutcome, ActionError> {
    pool::change(&mut context.api_writer(), &context.settings.node, None, |object| {
        let keys: BTreeMap<_, _> = barrier::keys(object).map(|key| (key.clone(), None)).collect();
        (!keys.is_empty()).then(|| NodePatch::of_keys(object, keys))
    })
    .await?;
    context.metrics.pool_writes.inc(["unpublish"]);
    Ok(ActionOutcome::Done("no grant waits for cilium-agent any more".into()))
}
