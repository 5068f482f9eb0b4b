//! Whose MAC address to record. Must never look at anything itself.

use super::action::Action;
use super::debounce::{Debounce, SHORT};
use super::input::PlanInput;
use crate::agent::index::key_of;

/// Last, because nothing rests on it, and not while the pod still starts: the node is busy enough then. What
/// is recorded already costs a question to Cilium, less and less often.
pub(super) fn record(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { index, store, now, .. } = input;
    for key in index.stickies.values().map(key_of) {
        let Some(living) = store.living(&key) else { continue };
        let sandbox = living.attachment.to_string();
        if debounce.stable_for(format!("mac {key}"), sandbox, SHORT, *now) {
            actions.push(Action::RecordMac { key });
        }
    }
}
