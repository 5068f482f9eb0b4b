//! Whose MAC address to record. Must never read anything itself.

use super::action::Action;
use super::debounce::{Debounce, SHORT};
use super::input::PlanInput;
use crate::agent::index::key_of;

/// Last, because nothing depends on it, and not while the pod still starts: the node is busy then. What is
/// recorded already costs a question to cilium-agent, less and less often.
pub(super) fn record(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { index, store, now, .. } = input;
    for key in index.stickies.values().map(key_of) {
        let Some(record) = store.attached_to(&key) else { continue };
        let sandbox = record.attachment.to_string();
        if debounce.stable_for(format!("mac {key}"), sandbox, SHORT, *now) {
            actions.push(Action::RecordMac { key });
        }
    }
}
