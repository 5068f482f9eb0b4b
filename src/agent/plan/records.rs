//! Which records of the store to end or to release. Must never read anything itself.

use ipnet::IpNet;

use super::action::Action;
use super::debounce::{Debounce, LONG};
use super::input::{PlanInput, contains};
use crate::agent::snapshot::{Netns, uid_of};

pub(super) fn end_and_release(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { options, index, store, now } = input;
    let home: Vec<IpNet> = [index.blocks(), options.shape.ranges.clone()].concat();
    for found in &store.records {
        let record = &found.record;
        let uid = uid_of(record);
        let pod_is_there = uid.is_some_and(|uid| index.pod_of(uid).is_some());
        let state = format!("{record:?}");
        if record.is_attached(&store.now) {
            // While its pod exists the runtime may still call DEL; if the pod has a newer sandbox, that DEL
            // does not matter.
            let replaced = uid.is_some()
                && store.attached().any(|other| {
                    other.record.attachment != record.attachment
                        && uid_of(&other.record) == uid
                        && other.netns != Netns::Gone
                });
            let what = format!("attached record {}", record.attachment);
            // A pod that was adopted where Cilium picks the addresses: cilium-agent is asked for its sandbox.
            let unknown = options.shape.mode.cilium_picks_the_address() && record.netns.is_none();
            if (found.netns == Netns::Gone || unknown)
                && (!pod_is_there || replaced)
                && debounce.stable_for(what, state, LONG, *now)
            {
                actions.push(Action::EndAttachment { record: record.clone() });
            }
            continue;
        }
        // Where the home blocks are not known, nothing is known of what is kept.
        let Some(binding) = record.binding.as_ref().filter(|_| !home.is_empty()) else { continue };
        let key = &binding.key;
        let addresses = || record.addresses.iter().copied();
        let is_of_home = |address| contains(&home, address);
        let is_claimed = |address| index.claim_on(address).is_some_and(|claim| claim.sticky_ref == *key);
        let claimed = addresses().any(is_claimed);
        // One of a range set of which the StickyIP has no address, for example.
        let stray = addresses().any(|address| is_of_home(address) && !is_claimed(address));
        // An address of another home is kept for the next sandbox of its own pod only; so is an address
        // beside one that is wanted.
        let kept_for_pod = pod_is_there && (claimed || !addresses().all(is_of_home));
        let wanted = (claimed && !stray) || kept_for_pod || store.prepared(key).is_some();
        let what = format!("kept {}", crate::node::list(&record.addresses));
        if !wanted && debounce.stable_for(what, state, LONG, *now) {
            actions.push(Action::ReleaseRecord { record: record.clone() });
        }
    }
}
