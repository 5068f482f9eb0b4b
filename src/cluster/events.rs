//! Kubernetes Events on pods, StickyIPs, nodes and pools. Best effort, after the write that they report. Must
//! never fail or delay that work: the caller continues whether or not the event was sent.
//!
//! Not kube's `Recorder`: it aggregates in the memory of one process, under random names, and the plugin is a
//! new process for each verb. Here the same event has the same name, so the API server keeps it once, however
//! many processes send it. And every event is a write that tests can observe and interrupt
//! (`ApiWriter::observed`).

use std::time::Duration;

use k8s_openapi::api::core::v1::{Event, EventSource, ObjectReference};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::Resource;
use kube::api::{Api, ObjectMeta};
use sha2::{Digest, Sha256};

use crate::cluster::api::client::ApiError;
use crate::cluster::objects::{HandoverRecord, IPPool, Skipped, StickyIP};
use crate::cluster::writer::apply::{ApiWriter, FIELD_MANAGER, SentWrite, post_params};
use crate::policy::selection::facts::PodFacts;

/// How long sending an event may delay a verb.
const PATIENCE: Duration = Duration::from_millis(500);
/// The longest message that the API server takes.
const LONGEST_MESSAGE: usize = 1024;
/// The longest start of an event's name that is an object's.
const LONGEST_NAME: usize = 200;

#[derive(Debug, Clone)]
pub struct NewEvent {
    pub about: ObjectReference,
    pub reason: &'static str,
    pub message: String,
    pub warning: bool,
}

fn reference(
    api_version: &str,
    kind: &str,
    namespace: Option<&str>,
    name: &str,
    uid: Option<&str>,
) -> ObjectReference {
    ObjectReference {
        api_version: Some(api_version.into()),
        kind: Some(kind.into()),
        namespace: namespace.map(str::to_owned),
        name: Some(name.into()),
        uid: uid.map(str::to_owned),
        ..ObjectReference::default()
    }
}

pub fn pod(namespace: &str, name: &str, uid: &str) -> ObjectReference {
    reference("v1", "Pod", Some(namespace), name, Some(uid))
}

pub fn node(name: &str, uid: &str) -> ObjectReference {
    reference("v1", "Node", None, name, Some(uid))
}

pub(crate) fn sticky_ip(object: &StickyIP) -> ObjectReference {
    of_object(object)
}

pub fn pool(object: &IPPool) -> ObjectReference {
    of_object(object)
}

/// An object of ours, as an event names it. Without its resourceVersion: an event is about every version.
fn of_object<K: Resource<DynamicType = ()>>(object: &K) -> ObjectReference {
    ObjectReference { resource_version: None, ..object.object_ref(&()) }
}

pub fn skipped(object: &Skipped) -> ObjectReference {
    let split = object.name.split_once('/');
    let (namespace, name) = split.map_or((None, &*object.name), |(namespace, name)| (Some(namespace), name));
    let api_version = match object.kind.as_str() {
        "Pod" => "v1",
        kind if kind.starts_with("Cilium") => "cilium.io/v2",
        _ => "sticky-ipam.io/v1alpha1",
    };
    reference(api_version, &object.kind, namespace, name, object.uid.as_deref())
}

/// The message if this attachment moved the address from another node: from, to, and why. `before` is the
/// StickyIP as it was read before, if it was: two attachments within one second look alike.
pub(crate) fn move_message(before: Option<&StickyIP>, object: &StickyIP) -> Option<String> {
    let status = object.status.as_ref()?;
    let known = before.and_then(|before| before.status.as_ref()?.handovers.first());
    if known.is_some() && known == status.handovers.first() {
        return None;
    }
    let attachment = status.attachment.as_ref()?;
    let last = status.handovers.first()?;
    let just_now = last.at == attachment.since && last.to == attachment.node;
    if !just_now || last.from.is_empty() || last.from == last.to {
        return None;
    }
    let addresses: Vec<String> = object.spec.addresses.iter().map(ToString::to_string).collect();
    let (addresses, pod) = (addresses.join(", "), &attachment.pod_name);
    let HandoverRecord { from, to, reason, .. } = last;
    Some(format!("{addresses} moved from node {from} to node {to} with pod {pod}: {reason}"))
}

/// Sends an event on the StickyIP and on the pod if the address came from another node.
pub(crate) async fn emit_move_events(
    writer: &mut ApiWriter<'_>,
    before: Option<&StickyIP>,
    object: &StickyIP,
    facts: &PodFacts,
) {
    let Some(message) = move_message(before, object) else { return };
    let pod = pod(&facts.namespace, &facts.name, &facts.uid);
    for about in [sticky_ip(object), pod] {
        let event = NewEvent { about, reason: "AddressMoved", message: message.clone(), warning: false };
        send(writer, &event).await;
    }
}

impl NewEvent {
    /// The name of the event: the same event has the same name, so that it exists once.
    pub(crate) fn name(&self) -> String {
        let object = self.about.name.as_deref().unwrap_or_default();
        let uid = self.about.uid.as_deref().unwrap_or_default();
        let digest = Sha256::digest(format!("{uid}\n{}\n{}", self.reason, self.message).as_bytes());
        let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        format!("{}.{digest}", &object[..object.floor_char_boundary(LONGEST_NAME)])
    }

    /// That of its object, or the one that Kubernetes uses for cluster-scoped objects.
    fn namespace(&self) -> &str {
        self.about.namespace.as_deref().unwrap_or("default")
    }

    fn object(&self) -> Event {
        let now = Timestamp::now();
        let now = Time(Timestamp::from_second(now.as_second()).unwrap_or(now));
        Event {
            metadata: ObjectMeta {
                name: Some(self.name()),
                namespace: Some(self.namespace().to_owned()),
                ..ObjectMeta::default()
            },
            involved_object: self.about.clone(),
            reason: Some(self.reason.into()),
            message: Some(self.message[..self.message.floor_char_boundary(LONGEST_MESSAGE)].into()),
            type_: Some(if self.warning { "Warning" } else { "Normal" }.into()),
            source: Some(EventSource { component: Some(FIELD_MANAGER.into()), host: None }),
            first_timestamp: Some(now.clone()),
            last_timestamp: Some(now),
            count: Some(1),
            ..Event::default()
        }
    }
}

/// Sends it within a short time. Returns whether it exists now.
pub async fn send(writer: &mut ApiWriter<'_>, event: &NewEvent) -> bool {
    let api = writer.api().clone();
    let events: Api<Event> = Api::namespaced(api.client(), event.namespace());
    let (name, object) = (event.name(), event.object());
    let what = format!("create Event {name}");
    let create = async {
        let params = post_params();
        let sent = api.once(&what, events.create(&params, &object));
        let too_late = |_| Err(ApiError::TooLate { what: what.clone(), timeout: PATIENCE });
        tokio::time::timeout(PATIENCE, sent).await.unwrap_or_else(too_late)
    };
    match writer.observed(SentWrite::Event(&name), create).await {
        // It exists already.
        Ok(_) | Err(ApiError::Refused { code: 409, .. }) => true,
        Err(error) => {
            tracing::warn!(%error, reason = event.reason, message = event.message, "cannot send an event");
            false
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_event_twice_has_one_name_and_other_events_have_others() {
        let event = |message: &str| NewEvent {
            about: pod("db", "db-0", "u1"),
            reason: "AddressRefused",
            message: message.into(),
            warning: true,
        };
        assert_eq!(event("held by x").name(), event("held by x").name());
        assert_ne!(event("held by x").name(), event("held by y").name());
        assert!(event("held by x").name().starts_with("db-0."));
        assert_eq!(event(&"é".repeat(2000)).object().message.unwrap().len(), LONGEST_MESSAGE);
    }

    #[test]
    fn a_move_is_what_this_attachment_did_and_nothing_older() {
        let sticky = |from: &str, at: &str| -> StickyIP {
            serde_json::from_value(serde_json::json!({
                "metadata": {"name": "db-0", "namespace": "db"},
                "spec": {"addresses": ["10.0.0.7"], "claimant": {"kind": "Pod"},
                         "workload": {"apiVersion": "v1", "kind": "Pod", "name": "db-0", "uid": "u"}},
                "status": {"attachment": {"node": "n2", "podName": "db-0", "podUid": "u", "attachmentId": "c",
                                          "since": "2026-01-01T00:00:05Z"},
                           "handovers": [{"from": from, "to": "n2", "reason": "the address was free", "at": at}]}}))
            .unwrap()
        };
        let moved = sticky("n1", "2026-01-01T00:00:05Z");
        let message = move_message(None, &moved).unwrap();
        assert!(message.contains("10.0.0.7 moved from node n1 to node n2"), "{message}");
        assert_eq!(move_message(Some(&sticky("n3", "2026-01-01T00:00:05Z")), &moved), Some(message));
        assert_eq!(move_message(Some(&moved), &moved), None);
        assert_eq!(move_message(None, &sticky("n1", "2026-01-01T00:00:04Z")), None);
        assert_eq!(move_message(None, &sticky("", "2026-01-01T00:00:05Z")), None);
        assert_eq!(move_message(None, &sticky("n2", "2026-01-01T00:00:05Z")), None);
    }
}
