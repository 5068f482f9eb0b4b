//! STATUS: whether an ADD could succeed. The cost does not depend on the number of addresses.

use crate::alloc::RangeSet;
use crate::cni::{CniError, OnExhaustion, StatusWhenExhausted};
use crate::plugin::verbs::add::of_set;
use crate::plugin::{VerbContext, VerbLog};
use crate::store::Disk;

pub(crate) fn run<D: Disk>(verb: &VerbContext<'_, D>, log: &mut VerbLog<'_>) -> Result<(), CniError> {
    verb.store.check_usable().map_err(|error| CniError::not_available(error.to_string()))?;
    if let Some(conf) = &verb.sticky.cluster {
        crate::plugin::cluster::del::is_ready(conf)?;
    }
    log.report(&[], "ready");
    // Without our settings the specification decides: an ADD that cannot succeed is not ready.
    let sticky = verb.request.config.sticky();
    if sticky.is_some_and(|sticky| sticky.status_when_exhausted == StatusWhenExhausted::Ready) {
        return Ok(());
    }
    for set in &verb.ipam.sets {
        if verb.store.count_free(set, 1)? == 0 && !could_reclaim(verb, set)? {
            return Err(CniError::not_available(format!("no IP addresses available in range set: {set}")));
        }
    }
    Ok(())
}

/// Whether an ADD could take a kept address of this set instead. Looked at only when nothing is free.
fn could_reclaim<D: Disk>(verb: &VerbContext<'_, D>, set: &RangeSet) -> Result<bool, CniError> {
    let Some(mut locked) = verb.store.lock_existing()? else { return Ok(true) };
    let first_opened_at = locked.first_opened_at().clone();
    let kept = locked.kept_records()?;
    let may_go = verb.sticky.on_exhaustion == OnExhaustion::Reclaim;
    Ok(kept.iter().map(|stored| &stored.record).any(|record| {
        let is_ours = record.binding.is_none() && of_set(record, set).is_some();
        is_ours && (may_go || record.has_expired(verb.store.now(), &first_opened_at))
    }))
}
