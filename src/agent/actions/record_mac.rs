//! `RecordMac`: the MAC of a running pod, from what Cilium says of its endpoint; the same way in every mode
//! and at no cost to ADD.
//!
//! Must never let a kept MAC, or an address of a family that Cilium has disabled, be lost without an event.

use std::net::IpAddr;

use super::keep_mac::recorded;
use super::{ActionContext, Performed, bound, done, needs_attention, not_needed, postponed};
use crate::agent::index::attachment_of;
use crate::alloc::range::Family;
use crate::cluster::cilium::socket::EndpointInfo;
use crate::cluster::events::{self, NewEvent};
use crate::cluster::protocol::{bind, step::at_sticky};
use crate::cluster::view::StickyView;
use crate::cluster::writer::{apply::Applied, write::Write};
use crate::names::StickyKey;
use crate::node::list;
use crate::policy::selection::mac::{CILIUM_MAC_ANNOTATION, is_mac};
use crate::store::{Disk, Record};

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
    report_missing_families(context, key, &record, &endpoint).await;
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

/// Emits an event, once, if a pod runs without an address of its StickyIP because Cilium serves no address of
/// that family.
async fn report_missing_families<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    key: &StickyKey,
    record: &Record,
    endpoint: &EndpointInfo,
) {
    let missing = missing_families(&record.addresses, &endpoint.addresses);
    let uid = record.pod.as_ref().and_then(|pod| pod.uid()).and_then(|uid| context.index.pod_of(uid));
    let (false, Some(pod)) = (missing.is_empty(), uid) else { return };
    let (facts, node) = (&pod.facts, &context.settings.node);
    let message = format!(
        "it runs without {} of StickyIP {key}, because Cilium on node {node} gives no address of that family; \
         enable the family in Cilium and delete the pod",
        list(&missing)
    );
    let about = events::pod(&facts.namespace, &facts.name, &facts.uid);
    let event = NewEvent { about, reason: "AddressFamilyDisabled", message, warning: true };
    events::send(&mut context.api_writer(), &event).await;
}

/// Those of a pod's own addresses of whose family its endpoint has none. Nothing if the endpoint names none.
fn missing_families(own: &[IpAddr], endpoint: &[IpAddr]) -> Vec<IpAddr> {
    let families: Vec<Family> = endpoint.iter().map(|address| Family::of(*address)).collect();
    let is_missing = |own: &&IpAddr| !families.is_empty() && !families.contains(&Family::of(**own));
    own.iter().filter(is_missing).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_is_missing_only_if_the_endpoint_names_addresses_and_none_of_it() {
        let ips = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpAddr>>();
        let both = ips(&["10.0.0.7", "fd00::7"]);
        assert_eq!(missing_families(&both, &ips(&["10.0.0.7"])), ips(&["fd00::7"]));
        assert_eq!(missing_families(&both, &both), ips(&[]));
        assert_eq!(missing_families(&both, &[]), ips(&[]));
    }
}
