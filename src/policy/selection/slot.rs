//! Slots: the numbered claimants of a workload whose pods have random names. Must never give a pod a slot
//! that another pod has.

use std::collections::BTreeSet;

/// How many slots a pod tries before it gives up for now: other pods of its workload take some at the same
/// time. More than a Deployment starts at once on one node; the runtime, the agent and the controller try
/// again later.
pub(crate) const MAX_SLOT_TRIES: usize = 16;

pub(crate) fn slot_name(workload: &str, slot: u32) -> String {
    format!("{workload}-{slot}")
}

/// The number of a slot from its name, if the name is one that [`slot_name`] gives for this workload.
pub(crate) fn slot_number(workload: &str, name: &str) -> Option<u32> {
    let slot = name.strip_prefix(workload)?.strip_prefix('-')?.parse().ok()?;
    (slot_name(workload, slot) == name).then_some(slot)
}

/// An existing slot, for the choice of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot<'a> {
    pub number: u32,
    /// The uid of the pod that it is attached to, if any.
    pub held_by: Option<&'a str>,
}

/// The slot for a pod: the one it already has, else the lowest that no pod has, existing or not.
///
/// Two pods may choose the same slot: attaching with the StickyIP's resourceVersion succeeds for one of them,
/// and the other chooses again.
pub(crate) fn choose_slot(slots: &[Slot<'_>], pod_uid: &str) -> u32 {
    if let Some(own) = slots.iter().filter(|slot| slot.held_by == Some(pod_uid)).map(|slot| slot.number).min()
    {
        return own;
    }
    let held: BTreeSet<u32> =
        slots.iter().filter(|slot| slot.held_by.is_some()).map(|slot| slot.number).collect();
    (0..=u32::MAX).find(|number| !held.contains(number)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn slot_names_are_read_back_only_if_they_are_exactly_ours() {
        assert_eq!(slot_number("web", "web-12"), Some(12));
        for foreign in ["web", "web-", "web-01", "web-x", "webs-1", "web-+1", "web-a-1"] {
            assert_eq!(slot_number("web", foreign), None, "{foreign}");
        }
    }

    #[test]
    fn a_pod_keeps_the_slot_it_holds() {
        let slots = [Slot { number: 0, held_by: None }, Slot { number: 3, held_by: Some("me") }];
        assert_eq!(choose_slot(&slots, "me"), 3);
        assert_eq!(choose_slot(&slots, "other"), 0);
    }

    proptest! {
        #[test]
        fn the_chosen_slot_is_the_lowest_free_one(held in proptest::collection::btree_set(0u32..40, 0..40)) {
            let slots: Vec<Slot<'_>> = held.iter().map(|&number| Slot { number, held_by: Some("x") }).collect();
            let chosen = choose_slot(&slots, "me");
            prop_assert!(!held.contains(&chosen));
            prop_assert!((0..chosen).all(|lower| held.contains(&lower)));
        }
    }
}
