//! Pods that run already become sticky, with the addresses that they have.

use serde_json::json;

use super::{Controlled, phase};
use crate::support::lab::api::named;
use crate::support::lab::eventually;
use crate::support::lab::workloads::{plain, pod, spec};

const NAMESPACE: &str = "marking";

#[test]
fn a_running_pod_is_adopted_once_cilium_knows_its_owner_and_keeps_its_address() {
    let controlled = Controlled::lab();
    let stage = &controlled.stage;
    stage.lab.namespace(NAMESPACE);
    let on = |node: &str| {
        let mut bound = spec(None);
        bound["nodeName"] = node.into();
        pod(NAMESPACE, "old", plain("old"), json!({}), bound)
    };
    stage.api.create(on("node-1"));
    let first = stage.api.ready(NAMESPACE, "old");
    let word = json!({"metadata": {"annotations": {"sticky-ipam.io/sticky": "true"}}});
    stage.api.patch(named("v1", "Namespace", "", NAMESPACE), word);
    eventually("the pod's binding", || match stage.api.sticky(NAMESPACE, "old") {
        Some(sticky) if sticky.status.as_ref().is_some_and(|status| status.attachment.is_some()) => Ok(()),
        other => Err(format!("{other:?}")),
    });
    assert_eq!(phase(stage, first.address()).as_deref(), Some("Bound"));
    let owner = || {
        let node = stage.api.get(named("cilium.io/v2", "CiliumNode", "", "node-1")).expect("it is there");
        node["spec"]["ipam"]["pool"].clone()
    };
    assert_eq!(owner()[first.address()]["owner"], format!("{NAMESPACE}/old"));
    stage.api.delete_pod(NAMESPACE, "old", None);
    stage.api.gone(NAMESPACE, "old");
    stage.api.create(on("node-2"));
    assert_eq!(stage.api.ready(NAMESPACE, "old").address(), first.address());
    // What told that Cilium knew the owner is not there for good.
    eventually("the pool without a sign", || {
        let pool = owner();
        match pool.to_string().contains("sticky-ipam.io/barrier") {
            true => Err(pool.to_string()),
            false => Ok(()),
        }
    });
    stage.lab.delete_namespace(NAMESPACE);
}
