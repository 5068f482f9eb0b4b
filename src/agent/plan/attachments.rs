//! Which StickyIPs to attach to sandboxes that run, and which to detach from sandboxes that are gone. Must
//! never read anything itself.

use super::action::Action;
use super::debounce::{Debounce, LONG};
use super::input::PlanInput;
use crate::agent::index::key_of;
use crate::agent::snapshot::Netns;

pub(super) fn attach_and_detach(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { index, store, now, .. } = input;
    for (name, sticky) in index.stickies.iter() {
        let attachment = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
        let Some(attachment) = attachment else { continue };
        let key = key_of(sticky);
        let used = store.attached_to(&key).is_some() || store.prepared(&key).is_some();
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
        let known = index.stickies.get(&key.to_string()).is_some_and(|sticky| {
            let attachment = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
            attachment.is_some_and(|attachment| ids.contains(&Some(&attachment.attachment_id)))
        });
        let what = format!("known {}", record.attachment);
        if !known
            && found.netns != Netns::Gone
            && debounce.stable_for(what, format!("{record:?}"), LONG, *now)
        {
            actions.push(Action::Attach { key, attachment: record.attachment.clone() });
        }
    }
}
