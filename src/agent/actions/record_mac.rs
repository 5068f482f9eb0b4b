//! `RecordMac`: the MAC of a running pod, from what Cilium says of its endpoint; the same way in every mode
//! and at no cost to ADD.
//!
//! Must never let a kept MAC be lost without an event.

use super::cilium;
use super::context::{ActionContext, bound};
use super::keep_mac::{keeps, recorded};
use super::outcome::{ActionError, ActionOutcome};
use crate::cluster::api::events::{self, NewEvent};
use crate::cluster::protocol::apply::Applied;
use crate::cluster::protocol::bind;
use crate::cluster::protocol::step::at_sticky;
use crate::cluster::protocol::view::StickyView;
use crate::cluster::protocol::write::Write;
use crate::names::StickyKey;
use crate::policy::selection::mac::{CILIUM_MAC_ANNOTATION, is_mac};
use crate::store::Disk;

/// Records the MAC that cilium-agent reports of a running pod of a StickyIP. A kept MAC that the pod did not
/// get is reported as an event.
pub(super) async fn perform<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    key: &StickyKey,
) -> Result<ActionOutcome, ActionError> {
    let store = context.store()?;
    let attached = store.lock()?.find_by_claimant(&bound(key)?)?.map(|stored| stored.record);
    let Some(record) = attached.filter(|record| record.is_attached(store.now())) else {
        return Ok(ActionOutcome::NotNeeded("no sandbox runs with it".into()));
    };
    let Some(address) = record.addresses.first() else {
        return Ok(ActionOutcome::NotNeeded("it has no address".into()));
    };
    let endpoint = match cilium::endpoint_of(context, *address).await {
        Ok(Some(found)) if found.container == record.attachment.container.as_str() => found,
        Ok(_) => {
            return Ok(ActionOutcome::Postponed("cilium-agent has no endpoint of its sandbox yet".into()));
        }
        // cilium-agent may be restarting; nothing depends on this.
        Err(error) => return Ok(ActionOutcome::Postponed(error.to_string())),
    };
    let mac = endpoint.mac.to_lowercase();
    if !is_mac(&mac) {
        return Ok(ActionOutcome::Postponed(format!("cilium-agent reports a MAC that is none: {mac}")));
    }
    if context.index.stickies.get(&key.to_string()).and_then(recorded).as_ref() == Some(&mac) {
        return Ok(ActionOutcome::NotNeeded("it is recorded already".into()));
    }
    let mut api_writer = context.api_writer();
    let Some(object) = bind::read_sticky(&api_writer, key).await? else {
        return Ok(ActionOutcome::NotNeeded("the StickyIP does not exist any more".into()));
    };
    let attachment = object.status.as_ref().and_then(|status| status.attachment.as_ref());
    let ids = [Some(&record.attachment.id()), record.attachment_id()];
    let ours = attachment.filter(|attachment| {
        attachment.node == context.settings.node && ids.contains(&Some(&attachment.attachment_id))
    });
    let Some(attachment) = ours else {
        return Ok(ActionOutcome::Postponed("another sandbox is attached, or none".into()));
    };
    if let Some(kept) = recorded(&object).filter(|kept| *kept != mac)
        && let Some(pod) = context.index.pod_of(&attachment.pod_uid)
        && pod.facts.annotations.get(CILIUM_MAC_ANNOTATION).is_none_or(|asked| *asked == kept)
        && keeps(context, &pod.facts).await?
    {
        let facts = &pod.facts;
        let message = format!(
            "it runs with the MAC {mac} instead of {kept}, which StickyIP {key} keeps: it was not prepared \
             in \
             time; delete the pod to start it with the kept MAC"
        );
        let about = events::pod(&facts.namespace, &facts.name, &facts.uid);
        let event = NewEvent { about, reason: "MacNotKept", message: message.clone(), warning: true };
        events::send(&mut api_writer, &event).await;
        return Ok(ActionOutcome::NeedsAttention(format!(
            "pod {}/{}: {message}",
            facts.namespace, facts.name
        )));
    }
    let at = at_sticky(&StickyView::from(&object));
    match api_writer.apply(&Write::RecordMac { key: key.clone(), at, mac: mac.clone() }, None, "").await? {
        Applied::Conflict => Ok(ActionOutcome::Postponed("the StickyIP changed meanwhile".into())),
        _ => Ok(ActionOutcome::Done(format!("its MAC is {mac}"))),
    }
}
