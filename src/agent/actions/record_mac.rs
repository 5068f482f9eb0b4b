//! `RecordMac`: the MAC of a running pod, from what Cilium says of its endpoint; the same way in every mode
//! and at no cost to ADD.
//!
//! Must never let a kept MAC be lost without an event.

use super::keep_mac::recorded;
use super::{ActionContext, Performed, bound, done, needs_attention, not_needed, postponed};
use crate::agent::index::attachment_of;
use crate::cluster::events::{self, NewEvent};
use crate::cluster::protocol::{bind, step::at_sticky};
use crate::cluster::view::StickyView;
use crate::cluster::writer::{apply::Applied, write::Write};
use crate::names::StickyKey;
use crate::policy::selection::mac::{CILIUM_MAC_ANNOTATION, is_mac};
use crate::store::Disk;

pub(super) async fn perform<D: Disk + Clone>(context: &ActionContext<'_, D>, key: &StickyKey) -> Performed {
    let store = context.store()?;
    let attached = store.lock()?.find_by_claimant(&bound(key)?)?.map(|stored| stored.record);
    let Some(record) = attached.filter(|record| record.is_attached(store.now())) else {
        return not_needed("no sandbox runs with it");
    };
    let Some(address) = record.addresses.first() else { return not_needed("it has no address") };
    let endpoint = match context.endpoint_of(*address).await {
        Ok(Some(found)) if found.container == record.attachment.container.as_str() => found,
        Ok(_) => return postponed("cilium-agent has no endpoint of its sandbox yet"),
        // cilium-agent may be restarting; nothing depends on this.
        Err(error) => return postponed(error.to_string()),
    };
    let mac = endpoint.mac.to_lowercase();
    if !is_mac(&mac) {
        return postponed(format!("cilium-agent reports a MAC that is none: {mac}"));
    }
    if context.index.stickies.get(&key.to_string()).and_then(recorded).as_ref() == Some(&mac) {
        return not_needed("it is recorded already");
    }
    let mut api_writer = context.api_writer();
    let Some(object) = bind::read_sticky(&api_writer, key).await? else {
        return not_needed("the StickyIP does not exist any more");
    };
    let ids = [Some(&record.attachment.id()), record.attachment_id()];
    let ours = attachment_of(&object).filter(|attachment| {
        attachment.node == context.settings.node && ids.contains(&Some(&attachment.attachment_id))
    });
    let Some(attachment) = ours else {
        return postponed("another sandbox is attached, or none");
    };
    if let Some(kept) = recorded(&object).filter(|kept| *kept != mac)
        && let Some(pod) = context.index.pod_of(&attachment.pod_uid)
        && pod.facts.annotations.get(CILIUM_MAC_ANNOTATION).is_none_or(|asked| *asked == kept)
        && context.keeps(&pod.facts).await?
    {
        let facts = &pod.facts;
        let message = format!(
            "it runs with the MAC {mac} instead of {kept}, which StickyIP {key} keeps: it was not prepared \
             in time; delete the pod to start it with the kept MAC"
        );
        let about = events::pod(&facts.namespace, &facts.name, &facts.uid);
        let event = NewEvent { about, reason: "MacNotKept", message: message.clone(), warning: true };
        events::send(&mut api_writer, &event).await;
        return needs_attention(format!("pod {}/{}: {message}", facts.namespace, facts.name));
    }
    let at = at_sticky(&StickyView::from(&object));
    match api_writer.apply(&Write::RecordMac { key: key.clone(), at, mac: mac.clone() }, None, "").await? {
        Applied::Conflict => postponed("the StickyIP changed meanwhile"),
        _ => done(format!("its MAC is {mac}")),
    }
}
