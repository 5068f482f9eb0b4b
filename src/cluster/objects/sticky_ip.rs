//! StickyIP: the binding of a claimant to its addresses. Must never change its addresses: another address is
//! another StickyIP, so that a uid identifies its addresses in every precondition.

use std::collections::BTreeMap;
use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cluster::objects::{condition::Condition, lenient::Validate};
use crate::names::AttachmentId;
use crate::policy::{lifetime::retention::Retention, selection::facts::Owner};

/// The condition of an unattached address that will be released at a later time.
pub(crate) const RELEASING: &str = "Releasing";
/// The condition of an unattached address that is kept because its workload cannot be looked up.
pub(crate) const RELEASE_BLOCKED: &str = "ReleaseBlocked";
/// The annotation of a StickyIP with the retention that plugin or controller wrote: a different one in its
/// spec was set by hand.
pub(crate) const RETENTION_SET: &str = "sticky-ipam.io/retention-set";
/// How many handovers a StickyIP records.
pub(crate) const HANDOVERS_KEPT: usize = 10;

/// The annotation that goes with a retention of ours.
pub(crate) fn retention_set(retention: Retention) -> BTreeMap<String, String> {
    [(RETENTION_SET.to_owned(), serde_json::to_string(&retention).unwrap_or_default())].into()
}

/// The addresses that a claimant keeps, and for how long.
#[derive(CustomResource, KubeSchema, Debug, Clone, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "sticky-ipam.io",
    version = "v1alpha1",
    kind = "StickyIP",
    plural = "stickyips",
    singular = "stickyip",
    shortname = "sip",
    namespaced,
    status = "StickyIPStatus",
    derive = "PartialEq",
    doc = "The addresses that a pod, a slot of a Deployment or a virtual machine keeps.",
    selectable = ".status.attachment.node",
    printcolumn(name = "Address", type_ = "string", json_path = ".spec.addresses[0]"),
    printcolumn(name = "Second Address", type_ = "string", json_path = ".spec.addresses[1]", priority = 1),
    printcolumn(name = "Pod", type_ = "string", json_path = ".status.attachment.podName"),
    printcolumn(name = "Node", type_ = "string", json_path = ".status.attachment.node"),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Workload", type_ = "string", json_path = ".spec.workload.name"),
    printcolumn(name = "Kind", type_ = "string", json_path = ".spec.workload.kind", priority = 1),
    printcolumn(name = "MAC", type_ = "string", json_path = ".status.mac", priority = 1),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct StickyIPSpec {
    /// One address per IP family, in canonical form.
    #[schemars(with = "Vec<String>", length(min = 1, max = 2), inner(length(max = 39)))]
    #[x_kube(
        merge_strategy = ListMerge::Atomic,
        validation = Rule::new("self == oldSelf").message("addresses cannot change: delete this StickyIP and \
            bind again"),
        validation = Rule::new("self.all(a, isIP(a) && ip.isCanonical(a))")
            .message("every address must be an IP address in canonical form, such as 10.0.9.9 or fd00::9"),
        validation = Rule::new(
            "self.size() < 2 || !self.all(a, isIP(a)) || ip(self[0]).family() != ip(self[1]).family()"
        ).message("one address per family")
    )]
    pub addresses: Vec<IpAddr>,
    /// Who keeps them.
    #[x_kube(validation = Rule::new("self == oldSelf").message("the claimant cannot change"))]
    pub claimant: ClaimantRef,
    /// The workload whose life decides how long they are kept.
    pub workload: WorkloadRef,
    /// The owner of the workload, the owner of that, and so on, nearest first, as last seen.
    /// Written by the controller: they may create a deleted workload again.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 8))]
    #[x_kube(merge_strategy = ListMerge::Atomic)]
    pub owners: Vec<WorkloadRef>,
    /// How long they are kept once the pod is gone.
    #[serde(default)]
    #[x_kube(
        validation = Rule::new("!has(self.keep) || self.keep != 'TTL' || has(self.ttlSeconds)")
            .message("keep: TTL needs ttlSeconds"),
        validation = Rule::new("!has(self.onScaleDown) || self.onScaleDown != 'TTL' || \
            has(self.scaleDownTtlSeconds)")
            .message("onScaleDown: TTL needs scaleDownTtlSeconds")
    )]
    pub retention: Retention,
}

/// What kind of name the StickyIP has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum ClaimantKind {
    /// A pod's name.
    Pod,
    /// A numbered slot of a workload whose pods have random names.
    Slot,
    /// A virtual machine's name.
    VirtualMachine,
}

/// Who keeps the addresses; the name is the StickyIP's own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct ClaimantRef {
    /// Pod, Slot or VirtualMachine.
    pub kind: ClaimantKind,
    /// The ordinal of the pod or the number of the slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ordinal: Option<u32>,
}

/// A workload of any kind.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WorkloadRef {
    /// Group and version.
    #[schemars(length(max = 317))]
    pub api_version: String,
    /// Kind.
    #[schemars(length(min = 1, max = 63))]
    pub kind: String,
    /// Name, in the StickyIP's namespace.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Its uid, once known; changes when a workload of the same name replaces it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 64))]
    pub uid: String,
}

impl From<&Owner> for WorkloadRef {
    fn from(owner: &Owner) -> Self {
        let Owner { api_version, kind, name, uid } = owner.clone();
        Self { api_version, kind, name, uid }
    }
}

impl From<&WorkloadRef> for Owner {
    fn from(workload: &WorkloadRef) -> Self {
        let WorkloadRef { api_version, kind, name, uid } = workload.clone();
        Self { api_version, kind, name, uid }
    }
}

/// What is the case.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
// We alone write it: the API server need not keep who wrote which part (docs/decisions/0024).
#[schemars(extend("x-kubernetes-map-type" = "atomic"))]
pub struct StickyIPStatus {
    /// The sandbox that has the addresses now. Written with a resourceVersion precondition only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attachment: Option<Attachment>,
    /// Bound, Attached, Retained or Conflict.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<StickyPhase>,
    /// When its pod was last seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>", extend("format" = "date-time"))]
    pub last_seen: Option<Time>,
    /// The MAC that the pod has, or had last; with keep-mac the one that it keeps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 17), extend("pattern" = "^([0-9a-f]{2}:){5}[0-9a-f]{2}$"))]
    pub mac: Option<String>,
    /// Conditions that an operator should know.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub conditions: Vec<Condition>,
    /// The last moves, newest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 10))]
    pub handovers: Vec<HandoverRecord>,
    /// Fields of a newer version, kept when the whole status is written.
    #[serde(flatten)]
    #[schemars(skip)]
    pub newer: BTreeMap<String, serde_json::Value>,
}

/// The sandbox that has the addresses.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct Attachment {
    /// The node.
    #[schemars(length(min = 1, max = 253))]
    pub node: String,
    /// The pod's name: for a slot, not the StickyIP's.
    #[schemars(length(min = 1, max = 253))]
    pub pod_name: String,
    /// The pod's uid.
    #[schemars(length(min = 1, max = 64))]
    pub pod_uid: String,
    /// The sandbox's container id, or the id that was prepared or adopted.
    #[schemars(with = "String", length(max = 256))]
    pub attachment_id: AttachmentId,
    /// Since when, by the node's clock.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub since: Time,
}

/// The phase of a StickyIP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
pub enum StickyPhase {
    /// It has its claims and has not been attached yet.
    Bound,
    /// A pod has it.
    Attached,
    /// Its pod is gone and it is kept.
    Retained,
    /// One of its addresses is claimed for another; the condition names it.
    Conflict,
}

/// One move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HandoverRecord {
    /// The node before; empty at the first attachment.
    #[serde(default)]
    #[schemars(length(max = 253))]
    pub from: String,
    /// The node after; empty after a detach from a dead node.
    #[schemars(length(max = 253))]
    pub to: String,
    /// Why.
    #[schemars(length(max = 256))]
    pub reason: String,
    /// When, by the writer's clock.
    #[schemars(with = "String", extend("format" = "date-time"))]
    pub at: Time,
}

impl StickyIPStatus {
    /// Records a move in front of the others and drops the oldest.
    pub(crate) fn record(&mut self, handover: HandoverRecord) {
        self.handovers.insert(0, handover);
        self.handovers.truncate(HANDOVERS_KEPT);
    }
}

impl Validate for StickyIP {
    fn validation_error(&self) -> Option<String> {
        match self.spec.addresses.as_slice() {
            [_] => None,
            [a, b] if a.is_ipv4() != b.is_ipv4() => None,
            other => Some(format!("spec.addresses must hold one address per family, not {other:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_ten_moves_are_kept_newest_first() {
        let mut status = StickyIPStatus::default();
        for n in 0..15 {
            let at = Time(k8s_openapi::jiff::Timestamp::UNIX_EPOCH);
            status.record(HandoverRecord {
                from: String::new(),
                to: n.to_string(),
                reason: "test".into(),
                at,
            });
        }
        let nodes: Vec<&str> = status.handovers.iter().map(|h| h.to.as_str()).collect();
        assert_eq!(nodes, ["14", "13", "12", "11", "10", "9", "8", "7", "6", "5"]);
    }
}
