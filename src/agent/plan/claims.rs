//! Whether the store must learn what is claimed, which claims on addresses of this node to grant or refuse,
//! and which adoptions are over. Must never read anything itself.

use super::action::Action;
use super::debounce::{Debounce, LONG, SHORT};
use super::input::{PlanInput, contains};
use crate::agent::snapshot::{is_bound_to, uid_of};
use crate::cluster::objects::ClaimPhase;

/// At once, and before the watches have listed: until then no pod that is not sticky gets an address. Where
/// Cilium picks the addresses, nothing depends on it.
pub(super) fn seed(input: &PlanInput<'_>, actions: &mut Vec<Action>) {
    if !input.store.is_seeded && !input.options.shape.mode.cilium_picks_the_address() {
        actions.push(Action::Seed);
    }
}

pub(super) fn grant(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { options, index, store, now } = input;
    let ours = index.claims.iter().filter(|(_, claim)| claim.home_node.as_deref() == Some(&options.node));
    for (name, claim) in ours {
        let known = store.records.iter().any(|found| found.record.addresses.contains(&claim.address));
        let due = match claim.phase {
            ClaimPhase::Requested => true,
            ClaimPhase::Refused => false,
            // The claim was made by hand, or the record was lost and the store has not noticed.
            ClaimPhase::Granted | ClaimPhase::Bound | ClaimPhase::Quarantined => {
                !known
                    && contains(&options.shape.ranges, claim.address)
                    && debounce.stable_for(format!("reserved {name}"), String::new(), SHORT, *now)
            }
        };
        if due {
            let pod_is_gone = claim.pod.as_ref().is_some_and(|pod| index.pod_of(&pod.uid).is_none());
            actions.push(Action::Grant { address: claim.address, pod_is_gone });
        }
        let user = store.attached().find(|found| {
            found.record.addresses.contains(&claim.address) && !is_bound_to(&found.record, &claim.sticky_ref)
        });
        let user = user.map(|found| found.record.holder());
        if claim.is_granted()
            && user != claim.in_use_by
            && debounce.stable_for(format!("used {name}"), user.unwrap_or_default(), SHORT, *now)
        {
            actions.push(Action::ReportUse { address: claim.address });
        }
        if let Some(pod) = claim.pod.as_ref().filter(|_| claim.is_granted())
            && index.pod_of(&pod.uid).is_none()
            && !store.attached().any(|found| {
                found.record.addresses.contains(&claim.address) && uid_of(&found.record) == Some(&pod.uid)
            })
            && debounce.stable_for(format!("adopted {name}"), pod.uid.clone(), LONG, *now)
        {
            actions.push(Action::FinishAdoption { address: claim.address });
        }
    }
}
