//! Which StickyIPs to attach to sandboxes that run, and which to detach from sandboxes that are gone. Must
//! never read anything itself.

use super::action::Action;
use super::debounce::{Debounce, LONG};
use super::input::PlanInput;
use crate::agent::index::{attachment_of, key_of};
use crate::agent::snapshot::Netns;

pub(super) fn attach_and_detach(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { index, store, now, .. } = input;
    for (name, sticky) in index.stickies.iter() {
        let Some(attachment) = attachment_of(sticky) else { continue };
        let key = key_of(sticky);
        let used = store.is_used(&key);
        let pod_is_there = index.pod_of(&attachment.pod_uid).is_some();
        let state = sticky.metadata.resource_version.clone().unwrap_or_default();
        if !used && !pod_is_there && debounce.stable_for(format!("attached {name}"), state, LONG, *now) {
            actions.push(Action::Detach { key, id: attachment.attachment_id.clone() });
        }
    }
    for found in store.attached() {
        let record = &found.record;
        let Some(binding) = &record.binding else { continue };
        let key = binding.key.clone();
        let ids = [Some(&record.attachment.id()), binding.attachment_id.as_ref()];
        let attached = index.stickies.get(&key.to_string()).and_then(attachment_of);
        let known = attached.is_some_and(|attached| ids.contains(&Some(&attached.attachment_id)));
        let what = format!("known {}", record.attachment);
        if !known
            && found.netns != Netns::Gone
            && debounce.stable_for(what, format!("{record:?}"), LONG, *now)
        {
            actions.push(Action::Attach { key, attachment: record.attachment.clone() });
        }
    }
}
