//! Which StickyIPs to attach to sandboxes that run, and which to detach from sandboxes that are gone. Must
//! never look at anything itself.

use super::action::Action;
use super::debounce::{Debounce, LONG};
use super::input::PlanInput;
use crate::agent::index::key_of;
use crate::agent::snapshot::Netns;
use crate::cluster::objects::StickyKey;

pub(super) fn attach_and_detach(input: &PlanInput<'_>, debounce: &mut Debounce, actions: &mut Vec<Action>) {
    let PlanInput { index, store, now, .. } = input;
    for (name, sticky) in index.stickies.iter() {
        let attachment = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
        let Some(attachment) = attachment else { continue };
        let key = key_of(sticky);
        let used = store.living(&key).is_some() || store.prepared(&key).is_some();
        let pod_is_there = index.pod_of(&attachment.pod_uid).is_some();
        let state = sticky.metadata.resource_version.clone().unwrap_or_default();
        if !used && !pod_is_there && debounce.stable_for(format!("attached {name}"), state, LONG, *now) {
            actions.push(Action::Detach { key, container: attachment.container_id.clone() });
        }
    }
    for held in store.attached() {
        let record = &held.record;
        let Some(binding) = &record.binding else { continue };
        let key = StickyKey { namespace: binding.namespace.clone(), name: binding.name.clone() };
        let containers = [record.attachment.container.as_str(), binding.container.as_str()];
        let known = index.stickies.get(&key.to_string()).is_some_and(|sticky| {
            let attachment = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
            attachment.is_some_and(|attachment| containers.contains(&attachment.container_id.as_str()))
        });
        let what = format!("known {}", record.attachment);
        if !known && held.netns != Netns::Gone && debounce.stable_for(what, format!("{record:?}"), LONG, *now)
        {
            actions.push(Action::Attach { key, attachment: record.attachment.clone() });
        }
    }
}
