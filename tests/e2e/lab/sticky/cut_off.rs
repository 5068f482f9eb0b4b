//! A node that is cut off is NotReady and still runs its pods. Nobody else has their addresses, also when
//! their objects are gone, until its kubelet has ended them.

use serde_json::{Value, json};

use super::moves::{in_step, other, probed_well, sandbox};
use crate::support::lab::api::{Seen, named};
use crate::support::lab::eventually;
use crate::support::lab::reach::{self, From, NODES};
use crate::support::lab::stage::Stage;
use crate::support::lab::witness::Witness;
use crate::support::lab::workloads::{probed_spec, stateful_set};

/// A node off the network, and no place for new pods; as before when this is dropped, also by a test that
/// fails.
struct CutOff<'a>(&'a Stage, &'a str);

impl<'a> CutOff<'a> {
    fn node(stage: &'a Stage, node: &'a str) -> Self {
        let cut = Self(stage, node);
        stage.lab.must(&["cut", node]);
        stage.lab.kubectl(&["cordon", node]);
        cut
    }
}

impl Drop for CutOff<'_> {
    fn drop(&mut self) {
        let _ = self.0.lab.attempt(&["heal", self.1]);
        let _ = self.0.lab.attempt(&["kubectl", "uncordon", self.1]);
    }
}

/// Whether the node's API object says that it is Ready.
fn is_ready(stage: &Stage, node: &str) -> bool {
    let found = stage.api.get(named("v1", "Node", "", node)).expect("a Node");
    let conditions = found["status"]["conditions"].as_array().cloned().unwrap_or_default();
    conditions.iter().any(|condition| condition["type"] == "Ready" && condition["status"] == "True")
}

/// Whether the sandbox runs, as the node itself sees it.
fn runs(stage: &Stage, node: &str, sandbox: &str) -> bool {
    let tasks = stage.lab.must(&["on", node, "ctr", "--namespace", "k8s.io", "tasks", "ls"]);
    tasks.lines().any(|line| line.starts_with(sandbox) && line.ends_with("RUNNING"))
}

/// The new pod's object, once there is one. It has no address: the old pod has that.
fn without_address(stage: &Stage, namespace: &str, old: &Seen) -> Option<Value> {
    let found = stage.api.get(named("v1", "Pod", namespace, "mysql-0"))?;
    let new = (found["metadata"]["uid"] != json!(old.uid)).then_some(found)?;
    assert_eq!(new["status"].get("podIP"), None, "the new pod has an address while the old one runs");
    Some(new)
}

/// Waits for kubelet's word that the new pod's sandbox was refused because of the old node, which is NotReady
/// and no more.
fn refused(stage: &Stage, namespace: &str, old: &Seen) {
    eventually(&format!("the refusal of mysql-0 that names {}", old.node), || {
        without_address(stage, namespace, old);
        let events = stage.lab.attempt(&["kubectl", "events", "-n", namespace, "--for", "pod/mysql-0"])?;
        let told = |line: &str| {
            ["FailedCreatePodSandBox", &*old.node, &*old.uid, "NotReady"]
                .iter()
                .all(|part| line.contains(part))
        };
        if events.lines().any(told) { Ok(()) } else { Err(events) }
    });
}

/// The old pod's object is deleted by force while its node is cut off; then the node is back.
pub fn still_runs(stage: &Stage) {
    let namespace = "cut-off";
    stage.lab.namespace(namespace);
    stage.api.create(stateful_set(namespace, "mysql", 1, probed_spec()));
    let old = stage.api.ready(namespace, "mysql-0");
    let old_sandbox = sandbox(stage, &old);
    let witness = Witness::start(&stage.api);
    let cut = CutOff::node(stage, &old.node);
    // The new pod's ADD waits for the old one longer than it takes until the node is NotReady.
    stage.api.delete_pod(namespace, "mysql-0", Some(0));
    refused(stage, namespace, &old);

    let new = without_address(stage, namespace, &old).expect("the StatefulSet made it anew");
    assert_eq!(new["spec"]["nodeName"], other(&old.node));
    let attachment = stage.api.sticky(namespace, "mysql-0").and_then(|sticky| sticky.status?.attachment);
    assert_eq!(attachment.map(|held| held.pod_uid), Some(old.uid.clone()), "the old pod holds it");
    assert!(!is_ready(stage, &old.node), "all of this was while the node was NotReady");
    assert!(runs(stage, &old.node, &old_sandbox), "the old sandbox runs");
    let old_host = [From::Host(&old.node)];
    reach::soon(stage, namespace, &old_host, old.address());

    drop(cut);
    let moved = stage.api.ready_after(namespace, "mysql-0", &old.uid);
    assert!(!runs(stage, &old.node, &old_sandbox), "the new pod is Ready and the old sandbox still runs");
    assert_eq!(json!([moved.node, moved.addresses]), json!([other(&old.node), old.addresses]));
    eventually("the node to be Ready", || {
        if is_ready(stage, &old.node) { Ok(()) } else { Err("it is not".to_owned()) }
    });
    reach::soon(stage, namespace, &NODES.map(From::Host), old.address());
    in_step(stage, namespace, "mysql-0", &moved);
    probed_well(stage, namespace, &moved);
    witness.finish();
    stage.lab.delete_namespace(namespace);
}
