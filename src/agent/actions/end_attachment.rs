//! `EndAttachment`: the attachment of a sandbox that is gone ends as its DEL would have ended it: the address
//! is released, or kept for its StickyIP, and a pending update names it.
//!
//! Must never end it on what the watches show alone: the pod is read live, the sandbox under the lock.

use super::{ActionContext, Performed, done, not_needed, postponed};
use crate::agent::snapshot::uid_of;
use crate::node::end::{UpdateFirst, end_attachment};
use crate::node::list;
use crate::store::{Disk, Record};

pub(super) async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, seen: &Record) -> Performed {
    for address in seen.addresses.iter().filter(|_| context.settings.mode.cilium_picks_the_address()) {
        // An endpoint of another container says nothing of this one: Cilium gave the address to another pod
        // since. One without a container may be this one's.
        let container = seen.attachment.container.as_str();
        let endpoint = context.endpoint_of(*address).await?;
        if endpoint.is_some_and(|found| found.container.is_empty() || found.container == container) {
            return postponed(format!("cilium-agent still has an endpoint with {address}"));
        }
    }
    if let (Some(pod), Some(uid)) = (&seen.pod, uid_of(seen)) {
        let store = context.store()?;
        // By a sandbox: a record that is only kept names the last pod that wanted it.
        let replaced = store.address_files()?.into_iter().filter_map(|found| found.record).any(|record| {
            record.is_attached(store.now())
                && uid_of(&record) == Some(uid)
                && record.attachment != seen.attachment
        });
        if !replaced && context.pod_exists(pod.namespace(), pod.name(), uid).await? {
            return postponed("its pod still exists");
        }
    }
    let store = context.store()?;
    let mut locked = store.lock()?;
    let stored = locked.find_by_attachment(&seen.attachment)?.filter(|stored| stored.record == *seen);
    let Some(stored) = stored else { return not_needed("its DEL came in the meantime") };
    let may_exist = match &seen.netns {
        Some(netns) => context.may_exist(netns),
        // Where Cilium picks the addresses, cilium-agent was asked above and has no endpoint.
        None => !context.settings.mode.cilium_picks_the_address(),
    };
    if may_exist {
        return not_needed("its network namespace exists");
    }
    end_attachment(&mut locked, &stored, store.now(), UpdateFirst::IfBound)?;
    locked.commit()?;
    context.metrics.leaks.inc(["sandbox"]);
    let (holder, addresses) = (seen.holder(), list(&seen.addresses));
    done(format!("the sandbox of {holder} is gone without a DEL, with {addresses}"))
}
