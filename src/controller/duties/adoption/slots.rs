//! Which slot a running pod of a Deployment is adopted under. A slot that was asked for is no StickyIP yet,
//! so the claims show which pod asked, and the duty's own memory does until the watches show the claims.
//!
//! Must never give a pod a slot that keeps other addresses than the pod's, and never one slot to two pods.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::cluster::objects::ClaimName;
use crate::controller::index::ClusterIndex;
use crate::policy::selection::{claimant::Claimant, facts::PodFacts, slot::slot_number};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct UsedSlots {
    numbers: BTreeSet<u32>,
    /// Those about which a home node was asked, with the pod's name.
    asked: BTreeMap<u32, String>,
}

impl UsedSlots {
    pub(crate) fn add(&mut self, number: u32) {
        self.numbers.insert(number);
    }

    /// What this pod must not have.
    pub(crate) fn for_others_than(&self, pod: &str) -> BTreeSet<u32> {
        let asked = self.asked.iter().filter(|(_, asked)| *asked != pod).map(|(number, _)| *number);
        self.numbers.iter().copied().chain(asked).collect()
    }
}

/// The slots that claims are for, and those that a home node was asked for (StickyIP and pod), of these
/// workloads (`namespace/name`). One look at all claims, for the pods of a whole round.
pub(crate) fn used(
    index: &ClusterIndex,
    asked: &BTreeMap<String, String>,
    workloads: &BTreeSet<String>,
) -> BTreeMap<String, UsedSlots> {
    let mut all: BTreeMap<String, UsedSlots> = BTreeMap::new();
    if workloads.is_empty() {
        return all;
    }
    let claimed = index.claims.values().map(|claim| (claim.spec.sticky_ref.to_string(), None));
    for (sticky, pod) in claimed.chain(asked.iter().map(|(sticky, pod)| (sticky.clone(), Some(pod)))) {
        // The name of a slot is its workload's name and a number.
        let Some((workload, _)) = sticky.rsplit_once('-').filter(|(name, _)| workloads.contains(*name))
        else {
            continue;
        };
        let Some(number) = slot_number(workload, &sticky) else { continue };
        let used = all.entry(workload.to_owned()).or_default();
        match pod {
            None => used.add(number),
            Some(pod) => drop(used.asked.insert(number, pod.clone())),
        }
    }
    all
}

/// The slot for which the pod's addresses are claimed already, if they are: by an earlier look for this very
/// pod, or for a slot of its workload that names no pod.
pub(crate) fn claimed(
    index: &ClusterIndex,
    claimant: &Claimant,
    facts: &PodFacts,
    addresses: &[IpAddr],
) -> Option<u32> {
    addresses.iter().find_map(|address| {
        let claim = &index.claims.get(&ClaimName::of(*address).to_string())?.spec;
        let is_ours = claim.pod.as_ref().is_none_or(|pod| pod.uid == facts.uid);
        let key = Some(&claim.sticky_ref).filter(|key| is_ours && key.namespace == facts.namespace)?;
        slot_number(&claimant.workload().name, &key.name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::index::fixture::pod;
    use crate::runtime::cache::CacheEvent;
    use serde_json::json;

    fn claim(index: &mut ClusterIndex, address: &str, holder: &str, uid: Option<&str>) {
        let pod = uid.map(|uid| json!({"name": "any", "uid": uid}));
        let object = json!({"metadata": {"name": address}, "spec": {"address": address, "phase": "Requested",
            "homeNode": "n1", "stickyRef": {"namespace": "db", "name": holder}, "pod": pod}});
        index
            .claims
            .apply(CacheEvent::Applied((address.to_owned(), serde_json::from_value(object).unwrap())));
    }

    #[test]
    fn a_pod_goes_on_with_the_slot_that_was_asked_for_and_no_other() {
        let (_, seen) = pod("web-x", "10.0.0.1", Some(("Fleet", "web")));
        let claimant = Claimant::of(&seen.facts);
        let mut index = ClusterIndex::default();
        let mut slot_with = |holder: &str, uid: Option<&str>| {
            claim(&mut index, "10.0.0.1", holder, uid);
            claimed(&index, &claimant, &seen.facts, &seen.addresses)
        };
        assert_eq!(slot_with("web-3", Some("uid-web-x")), Some(3));
        assert_eq!(slot_with("web-3", None), Some(3), "of a Sticky pool, whose claims name no pod");
        assert_eq!(slot_with("web-3", Some("another")), None);
        assert_eq!(slot_with("shop-3", None), None, "another workload's");
        assert_eq!(claimed(&ClusterIndex::default(), &claimant, &seen.facts, &seen.addresses), None);
    }

    #[test]
    fn a_slot_is_taken_once_a_claim_is_for_it_or_it_was_asked_for_another_pod() {
        let mut index = ClusterIndex::default();
        claim(&mut index, "10.0.0.1", "web-0", Some("a"));
        claim(&mut index, "10.0.0.2", "shop-4", Some("b"));
        claim(&mut index, "10.0.0.3", "mysql", None);
        let asked = [("db/web-1", "db/x"), ("db/web-2", "db/y"), ("other/web-3", "other/x")];
        let asked = asked.map(|(holder, pod)| (holder.to_owned(), pod.to_owned())).into();
        assert!(used(&index, &asked, &BTreeSet::new()).is_empty());
        let mut all = used(&index, &asked, &["db/web".to_owned()].into());
        assert_eq!(all.len(), 1);
        let of_web = all.get_mut("db/web").unwrap();
        assert_eq!(of_web.for_others_than("db/x"), [0, 2].into());
        of_web.add(5);
        assert_eq!(of_web.for_others_than("db/z"), [0, 1, 2, 5].into());
    }
}
