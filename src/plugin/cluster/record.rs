//! The record of a sticky pod's sandbox on this node. Must never replace what a sandbox of another pod has.

use std::net::IpAddr;

use crate::alloc::RangeSet;
use crate::alloc::range::Family;
use crate::cni::{CniError, code};
use crate::names::AttachmentId;
use crate::node::addresses::NodeAddresses;
use crate::plugin::cluster::context::AddContext;
use crate::plugin::cluster::seed;
use crate::policy::lifetime::retention::Retention;
use crate::store::{Decision, Disk, Draft, LockedStore, Record, RecordState, StickyBinding, StoredRecord};

#[derive(Default)]
pub(crate) struct RecordSources<'a> {
    /// The decision that it uses up, under the same lock.
    pub(crate) decision: Option<&'a Decision>,
    /// A file that may be the record already.
    pub(crate) draft: Option<Draft>,
}

/// The record of a sandbox that has these addresses, and that the API server knows by this id.
pub(crate) fn attached_record<D: Disk>(
    context: &AddContext<'_, D>,
    node: &NodeAddresses<'_, D>,
    addresses: Vec<IpAddr>,
    attachment_id: AttachmentId,
) -> Record {
    Record {
        addresses,
        attachment: node.attachment.clone(),
        state: RecordState::Attached,
        netns: context.verb.request.netns.clone(),
        pod: Some(node.pod.clone()),
        retention: Some(Retention::FOREVER),
        binding: Some(StickyBinding { key: node.key.clone(), attachment_id: Some(attachment_id) }),
        since: context.verb.store.now().clone(),
    }
}

/// Writes that the sandbox has these addresses, and one of this node's ranges for every range set that they
/// do not serve. The addresses by range set; where Cilium picks the address there are no sets.
///
/// The store's lock protects it: what the claimant has is found under it, and the record of a sandbox that
/// may run is not replaced. On the disk when this returns.
pub(crate) fn write_record<'a, D: Disk>(
    context: &AddContext<'a, D>,
    node: &NodeAddresses<'_, D>,
    mut locked: LockedStore<'a, D>,
    addresses: &[IpAddr],
    sources: RecordSources<'_>,
) -> Result<Vec<IpAddr>, CniError> {
    let cilium_picks = node.source.publish.mode.cilium_picks_the_address();
    let is_served = || serving(&node.source.sets, addresses).iter().all(Option::is_some);
    if !cilium_picks && !is_served() && seed::is_unseeded(context.verb, &locked)? {
        locked = seed::seed(context.verb, locked)?;
    }
    let kept = node.kept(&mut locked).map_err(|error| CniError::try_again(error.to_string()))?;
    let mut superseded: Vec<StoredRecord> = Vec::new();
    for address in addresses {
        let there = locked.find_by_address(*address)?;
        let ours = there.as_ref().is_none_or(|there| there.record.claimant() == Some(node.claimant()));
        if let (false, Some(there)) = (ours, there) {
            // The claim is sealed to our StickyIP, so the one for which the address is only kept here is
            // gone. Or it was ours.
            if there.record.state != RecordState::Attached && there.record.binding.is_some() {
                superseded.push(there);
                continue;
            }
            let message = format!("{address} of StickyIP {} is held by {}", node.key, there.record.holder());
            return Err(CniError::try_again(message));
        }
    }
    let all = if cilium_picks { addresses.to_vec() } else { by_set(node, &mut locked, addresses)? };
    let RecordSources { decision, draft } = sources;
    let prepared = decision.and_then(|decision| decision.sticky.as_ref());
    let id = prepared.map_or_else(|| node.attachment.id(), |prepared| prepared.attachment_id.clone());
    let record = attached_record(context, node, all.clone(), id);
    locked.use_draft(draft);
    locked.mark_superseded(kept.as_ref(), &all, &node.reserved)?;
    match decision {
        Some(decision) => locked.use_decision(decision, &record, kept.as_ref(), &superseded)?,
        None => locked.put_reclaiming(&record, kept.as_ref(), &superseded)?,
    }
    locked.commit()?;
    Ok(all)
}

/// The address that serves each range set: one of its own, else one of another node's ranges.
pub(crate) fn serving(sets: &[RangeSet], addresses: &[IpAddr]) -> Vec<Option<IpAddr>> {
    let own = |set: &RangeSet| addresses.iter().find(|address| set.contains(**address).is_some()).copied();
    let mut all: Vec<Option<IpAddr>> = sets.iter().map(own).collect();
    for address in addresses {
        let serves = |(set, serving): (&RangeSet, &Option<IpAddr>)| {
            serving.is_none() && Family::of(*address) == set.family()
        };
        if !all.contains(&Some(*address))
            && let Some(index) = sets.iter().zip(&all).position(serves)
        {
            all[index] = Some(*address);
        }
    }
    all
}

fn by_set<D: Disk>(
    node: &NodeAddresses<'_, D>,
    locked: &mut LockedStore<'_, D>,
    addresses: &[IpAddr],
) -> Result<Vec<IpAddr>, CniError> {
    let sets = &node.source.sets;
    let mut all = serving(sets, addresses);
    if all.iter().all(Option::is_none) {
        let (key, has) = (&node.key, crate::node::list(addresses));
        let message = format!("StickyIP {key} has {has}, and this node's ranges are of another family");
        return Err(CniError::new(code::REQUEST_REFUSED, message));
    }
    for (index, set) in sets.iter().enumerate() {
        if all[index].is_some() {
            continue;
        }
        all[index] = locked.next_free(index, set)?;
        match all[index] {
            Some(next) => locked.set_cursor(index, next),
            // The pod has its sticky address of this family: it is not kept waiting for a further one.
            None if addresses.iter().any(|address| Family::of(*address) == set.family()) => {}
            None => {
                let message = format!("no IP addresses available in range set: {set}");
                return Err(CniError::new(code::EXHAUSTED, message));
            }
        }
    }
    Ok(all.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::alloc::range::{Range, RangeSpec};

    #[test]
    fn an_address_serves_the_range_set_that_contains_it() {
        let set = |subnet: &str| {
            let spec = RangeSpec { subnet, ..RangeSpec::default() };
            RangeSet::new(vec![Range::from_spec(&spec).unwrap()]).unwrap()
        };
        let sets = [set("10.1.0.0/24"), set("10.2.0.0/24"), set("fd00::/64")];
        let serves = |addresses: &[&str]| {
            let addresses: Vec<IpAddr> = addresses.iter().map(|text| text.parse().unwrap()).collect();
            let texts = serving(&sets, &addresses).into_iter();
            texts
                .map(|address| address.map_or("-".to_owned(), |address| address.to_string()))
                .collect::<Vec<_>>()
        };
        assert_eq!(serves(&["10.2.0.10"]), ["-", "10.2.0.10", "-"]);
        assert_eq!(
            serves(&["10.9.0.1"]),
            ["10.9.0.1", "-", "-"],
            "another node's, in the first of its family"
        );
        assert_eq!(serves(&["10.9.0.1", "10.1.0.5"]), ["10.1.0.5", "10.9.0.1", "-"]);
        assert_eq!(serves(&["fd01::1", "10.1.0.5"]), ["10.1.0.5", "-", "fd01::1"]);
        assert_eq!(serves(&["10.9.0.1", "10.9.0.2", "10.9.0.3"]), ["10.9.0.1", "10.9.0.2", "-"]);
    }
}
