//! The status of a StickyIP as a write leaves it. Pure but for the clock. Must never drop what a newer
//! version says there.

use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::cluster::objects::sticky_ip::{RELEASE_BLOCKED, RELEASING};
use crate::cluster::objects::{
    Attachment, Condition, HandoverRecord, StickyIPStatus, StickyPhase, condition,
};
use crate::names::StickyKey;
use crate::policy::handover::{Attached, Takeover};

/// The condition of a StickyIP whose address is claimed for another.
const CONFLICT: &str = "Conflict";
/// Conditions that end when a pod is attached.
const OF_UNATTACHED: &[&str] = &[CONFLICT, RELEASE_BLOCKED, RELEASING];

pub(super) fn now() -> Timestamp {
    // The schema's date-time knows seconds; more would only make two writes of one second differ.
    let now = Timestamp::now();
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

pub(super) fn attached_status(
    mut status: StickyIPStatus,
    attached: &Attached,
    takeover: Option<Takeover>,
    pod: &str,
    now: Timestamp,
) -> StickyIPStatus {
    let from = status.attachment.as_ref().map(|old| old.node.clone());
    let (to, at, reason) = (attached.node.clone(), Time(now), takeover.map(|why| reason_of(why).to_owned()));
    match status.handovers.first().cloned() {
        // It left a dead node and was not attached since: this completes the move.
        Some(begun) if begun.to.is_empty() => {
            let (from, reason) = (from.unwrap_or(begun.from), reason.unwrap_or(begun.reason));
            status.handovers[0] = HandoverRecord { from, to, reason, at };
        }
        // A new sandbox on the same node is no move.
        Some(last) if last.to == to && takeover.is_none_or(|why| why == Takeover::SandboxReplaced) => {}
        last => {
            let from = from.or(last.map(|last| last.to)).unwrap_or_default();
            let reason = reason.unwrap_or_else(|| "the address was free".to_owned());
            status.record(HandoverRecord { from, to, reason, at });
        }
    }
    status.attachment = Some(Attachment {
        node: attached.node.clone(),
        pod_name: pod.to_owned(),
        pod_uid: attached.pod_uid.clone(),
        attachment_id: attached.attachment_id.clone(),
        since: Time(now),
    });
    status.phase = Some(StickyPhase::Attached);
    status.last_seen = Some(Time(now));
    // Conditions of an unattached StickyIP no longer apply.
    status.conditions.retain(|condition| !OF_UNATTACHED.contains(&condition.kind.as_str()));
    status
}

/// The status of a StickyIP that is detached from a dead node: the next attachment is a move from there, for
/// this reason.
pub(super) fn left_behind(mut status: StickyIPStatus, proof: Takeover, now: Timestamp) -> StickyIPStatus {
    if let Some(attachment) = status.attachment.take() {
        let reason = reason_of(proof).to_owned();
        status.record(HandoverRecord { from: attachment.node, to: String::new(), reason, at: Time(now) });
    }
    status
}

fn reason_of(takeover: Takeover) -> &'static str {
    match takeover {
        Takeover::SandboxReplaced => "the same pod has a new sandbox",
        Takeover::LocalSandboxGone => "the old pod's sandbox on this node is gone",
        Takeover::NodeGone => "the old node was deleted",
        Takeover::OutOfService => "the old node is tainted out-of-service",
    }
}

pub(super) fn conflict_status(
    mut status: StickyIPStatus,
    generation: Option<i64>,
    key: &StickyKey,
    address: IpAddr,
    held_by: &StickyKey,
    now: Timestamp,
) -> Value {
    let conflict = Condition {
        kind: CONFLICT.into(),
        status: "True".into(),
        reason: "ClaimedForAnother".into(),
        message: format!(
            "{address} of StickyIP {key} is claimed for StickyIP {held_by}; delete one of the two"
        ),
        last_transition_time: Time(now),
        observed_generation: generation,
    };
    condition::set(&mut status.conditions, conflict);
    json!({"phase": StickyPhase::Conflict, "conditions": status.conditions})
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(node: &str, container: &str) -> Attached {
        Attached { node: node.into(), pod_uid: "u".into(), attachment_id: container.into() }
    }

    #[test]
    fn a_move_is_written_down_and_a_new_sandbox_on_the_same_node_is_none() {
        let first = attached_status(StickyIPStatus::default(), &on("n1", "c1"), None, "p", now());
        assert_eq!(first.handovers.len(), 1);
        let again =
            attached_status(first.clone(), &on("n1", "c2"), Some(Takeover::SandboxReplaced), "p", now());
        assert_eq!(again.handovers.len(), 1);
        assert_eq!(again.attachment.unwrap().attachment_id.to_string(), "c2");
        let moved = attached_status(first, &on("n2", "c3"), Some(Takeover::NodeGone), "p", now());
        assert_eq!((&*moved.handovers[0].from, &*moved.handovers[0].to), ("n1", "n2"));
    }

    #[test]
    fn a_move_off_a_dead_node_keeps_its_reason_whichever_part_detached_first() {
        let first = attached_status(StickyIPStatus::default(), &on("n1", "c1"), None, "p", now());
        let taken = attached_status(first.clone(), &on("n2", "c2"), Some(Takeover::OutOfService), "p", now());
        let left = left_behind(first, Takeover::OutOfService, now());
        assert_eq!((&*left.handovers[0].from, &*left.handovers[0].to), ("n1", ""));
        let detached = attached_status(left, &on("n2", "c2"), None, "p", now());
        assert_eq!(detached.handovers, taken.handovers);
        assert!(detached.handovers[0].reason.contains("out-of-service"));
    }

    #[test]
    fn an_attachment_clears_the_conflict_condition_and_no_other() {
        let key = |name: &str| StickyKey { namespace: "db".into(), name: name.into() };
        let address = "10.0.0.1".parse().unwrap();
        let marked =
            conflict_status(StickyIPStatus::default(), Some(3), &key("a"), address, &key("b"), now());
        assert_eq!(marked["conditions"][0]["observedGeneration"], 3);
        let message = marked["conditions"][0]["message"].as_str().unwrap();
        assert!(message.contains("db/a") && message.contains("db/b"), "{message}");
        let mut status: StickyIPStatus = serde_json::from_value(marked).unwrap();
        status.conditions.push(Condition { kind: "Other".into(), ..status.conditions[0].clone() });
        let attached = attached_status(status, &on("n1", "c1"), None, "p", now());
        let kinds: Vec<&str> = attached.conditions.iter().map(|condition| condition.kind.as_str()).collect();
        assert_eq!(kinds, ["Other"]);
    }

    #[test]
    fn what_a_newer_version_says_in_the_status_is_carried_along() {
        let known = json!({"phase": "Retained", "mac": "02:00:00:00:00:01", "weather": {"wind": "north"}});
        let status: StickyIPStatus = serde_json::from_value(known).unwrap();
        let written = json!(attached_status(status, &on("n1", "c1"), None, "p", now()));
        assert_eq!(written["weather"], json!({"wind": "north"}));
        assert_eq!((&written["phase"], &written["mac"]), (&json!("Attached"), &json!("02:00:00:00:00:01")));
    }
}
