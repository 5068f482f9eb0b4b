//! Turns Pods and Nodes into the facts that decisions depend on. Must never decide anything.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::core::ObjectMeta;

use crate::policy::handover::{NodeState, OldPod};
use crate::policy::selection::facts::{Owner, PodFacts};

/// The taint by which an operator or a tool confirms that a node is off.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";
/// A static pod's real uid, on the mirror that the API server has of it.
const CONFIG_HASH: &str = "kubernetes.io/config.hash";

/// The facts of a pod. Its owner's owners are not looked up.
pub fn facts(pod: &Pod, namespace_annotations: BTreeMap<String, String>) -> PodFacts {
    let meta = &pod.metadata;
    PodFacts {
        namespace: meta.namespace.clone().unwrap_or_default(),
        name: meta.name.clone().unwrap_or_default(),
        uid: meta.uid.clone().unwrap_or_default(),
        labels: meta.labels.clone().unwrap_or_default(),
        annotations: meta.annotations.clone().unwrap_or_default(),
        owners: controlling_owner(meta).into_iter().collect(),
        host_network: pod.spec.as_ref().and_then(|spec| spec.host_network) == Some(true),
        namespace_annotations,
    }
}

pub(crate) fn controlling_owner(meta: &ObjectMeta) -> Option<Owner> {
    let owner = meta.owner_references.iter().flatten().find(|owner| owner.controller == Some(true))?;
    Some(Owner {
        api_version: owner.api_version.clone(),
        kind: owner.kind.clone(),
        name: owner.name.clone(),
        uid: owner.uid.clone(),
    })
}

/// Whether this is the pod that the runtime means by `uid`.
pub(crate) fn is_meant(pod: &Pod, uid: &str) -> bool {
    let mirrored = pod.metadata.annotations.as_ref().and_then(|all| all.get(CONFIG_HASH));
    pod.metadata.uid.as_deref() == Some(uid) || mirrored.is_some_and(|hash| hash == uid)
}

/// The uid by which the runtime knows a pod: a static pod's own, not its mirror's.
pub(crate) fn runtime_uid(pod: &Pod) -> &str {
    let mirrored = pod.metadata.annotations.as_ref().and_then(|all| all.get(CONFIG_HASH));
    mirrored.or(pod.metadata.uid.as_ref()).map_or("", String::as_str)
}

/// The state of a node; none means that it does not exist.
pub(crate) fn node_state(node: Option<&Node>) -> NodeState {
    let Some(node) = node else { return NodeState::Gone };
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref());
    if taints.into_iter().flatten().any(|taint| taint.key == OUT_OF_SERVICE) {
        return NodeState::OutOfService;
    }
    let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
    let ready = conditions.into_iter().flatten().any(|c| c.type_ == "Ready" && c.status == "True");
    if ready { NodeState::Ready } else { NodeState::NotReady }
}

/// The state of the pod with this uid, from the pod that has its name now.
pub(crate) fn old_pod(found: Option<&Pod>, uid: &str) -> OldPod {
    let Some(pod) = found.filter(|pod| is_meant(pod, uid)) else { return OldPod::Gone };
    if pod.metadata.deletion_timestamp.is_some() {
        return OldPod::Terminating;
    }
    match pod.status.as_ref().and_then(|status| status.phase.as_deref()) {
        Some("Succeeded" | "Failed") => OldPod::Finished,
        _ => OldPod::Running,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn node(value: serde_json::Value) -> NodeState {
        node_state(Some(&serde_json::from_value(value).unwrap()))
    }

    #[test]
    fn a_node_is_ready_only_when_it_says_so_and_a_taint_speaks_louder() {
        assert_eq!(node_state(None), NodeState::Gone);
        assert_eq!(node(json!({"metadata": {}})), NodeState::NotReady);
        let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
        let unknown = json!({"conditions": [{"type": "Ready", "status": "Unknown"}]});
        assert_eq!(node(json!({"metadata": {}, "status": ready.clone()})), NodeState::Ready);
        assert_eq!(node(json!({"metadata": {}, "status": unknown})), NodeState::NotReady);
        let taint = json!({"taints": [{"key": OUT_OF_SERVICE, "effect": "NoExecute"}]});
        assert_eq!(node(json!({"metadata": {}, "spec": taint, "status": ready})), NodeState::OutOfService);
    }

    #[test]
    fn a_pod_of_the_same_name_and_another_uid_is_another_pod() {
        let pod = |value| serde_json::from_value::<Pod>(value).unwrap();
        let running = pod(json!({"metadata": {"uid": "a"}}));
        assert_eq!(old_pod(Some(&running), "a"), OldPod::Running);
        assert_eq!(old_pod(Some(&running), "b"), OldPod::Gone);
        assert_eq!(old_pod(None, "a"), OldPod::Gone);
        let ended = pod(json!({"metadata": {"uid": "a"}, "status": {"phase": "Failed"}}));
        assert_eq!(old_pod(Some(&ended), "a"), OldPod::Finished);
        let going = pod(json!({"metadata": {"uid": "a", "deletionTimestamp": "2025-01-01T00:00:00Z"}}));
        assert_eq!(old_pod(Some(&going), "a"), OldPod::Terminating);
        let mirror = pod(json!({"metadata": {"uid": "m", "annotations": {CONFIG_HASH: "s"}}}));
        assert!(is_meant(&mirror, "s") && is_meant(&mirror, "m") && !is_meant(&mirror, "x"));
    }
}
