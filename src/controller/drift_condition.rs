//! The Node condition `AddressDrift` of the drift audit: its name, how it is read and how it is written.

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use crate::policy::drift::DriftFinding;

/// True while objects disagree about the node's addresses.
pub(crate) const TYPE: &str = "AddressDrift";
const MAX_MESSAGE: usize = 4096;

/// The message of a Node's condition, if that is True.
pub fn message(node: &Node) -> Option<String> {
    let conditions = node.status.as_ref()?.conditions.as_ref()?;
    let ours = conditions.iter().find(|condition| condition.type_ == TYPE && condition.status == "True")?;
    Some(ours.message.clone().unwrap_or_default())
}

/// The condition for these findings; none if the Node has it already. `current` is the message of a condition
/// that is True. A node that never drifted gets no condition.
pub fn changed(findings: &[&DriftFinding], current: Option<&str>) -> Option<Value> {
    let texts: Vec<String> = findings.iter().map(ToString::to_string).collect();
    let text = texts.join("; ");
    let message = &text[..text.floor_char_boundary(MAX_MESSAGE)];
    if current.map_or(message.is_empty(), |current| current == message) {
        return None;
    }
    let (status, reason, message) = match findings.first() {
        Some(first) => ("True", first.reason(), message),
        None => ("False", "InSync", "the Node, its CiliumNode and its pods agree about its addresses"),
    };
    let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default().to_string();
    Some(json!({"type": TYPE, "status": status, "reason": reason, "message": message,
                "lastTransitionTime": now, "lastHeartbeatTime": now}))
}
