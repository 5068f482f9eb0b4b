//! A pod that keeps its MAC beside its address, over its deletion and over nodes, on unpatched Cilium (`crd`
//! mode).

use serde_json::json;

use crate::support::lab::api::Seen;
use crate::support::lab::stage::Stage;
use crate::support::lab::workloads::{spec, stateful_set};
use crate::support::lab::{Mode, eventually};

/// The MAC that the interface in the pod has.
fn in_the_pod(stage: &Stage, namespace: &str, pod: &str) -> String {
    let name = format!("{namespace}/{pod}");
    let shown = stage.lab.must(&["pod-exec", &name, "ip", "-o", "link", "show", "eth0"]);
    let mac = shown.split_whitespace().skip_while(|word| *word != "link/ether").nth(1);
    mac.unwrap_or_else(|| panic!("no MAC in {shown:?}")).to_owned()
}

/// The pod's MAC, once its StickyIP tells the same.
fn recorded(stage: &Stage, namespace: &str, pod: &str) -> String {
    let mac = in_the_pod(stage, namespace, pod);
    eventually(&format!("StickyIP {namespace}/{pod} to have the MAC {mac}"), || {
        let told = stage.api.sticky(namespace, pod).and_then(|sticky| sticky.status?.mac);
        if told.as_ref() == Some(&mac) { Ok(()) } else { Err(format!("it has {told:?}")) }
    });
    mac
}

/// Uncordons the node, whatever becomes of the test.
struct Cordoned<'a>(&'a Stage, String);

impl Drop for Cordoned<'_> {
    fn drop(&mut self) {
        let _ = self.0.lab.attempt(&["kubectl", "uncordon", &self.1]);
    }
}

#[test]
fn a_pod_that_keeps_its_mac_has_it_after_deletion_and_on_another_node() {
    let stage = Stage::of(Mode::Crd);
    let namespace = "macs";
    stage.lab.namespace(namespace);
    let mut keeps = stateful_set(namespace, "keeps", 1, spec(None));
    keeps["spec"]["template"]["metadata"]["annotations"] = json!({"sticky-ipam.io/keep-mac": "true"});
    stage.api.create(keeps);
    stage.api.create(stateful_set(namespace, "other", 1, spec(None)));
    let both = ["keeps-0", "other-0"];
    let first: Vec<(Seen, String)> = both
        .iter()
        .map(|pod| {
            let seen = stage.api.ready(namespace, pod);
            let mac = recorded(&stage, namespace, pod);
            (seen, mac)
        })
        .collect();
    let again = stage.api.replace(namespace, "keeps-0", None);
    assert_eq!(again.addresses, first[0].0.addresses);
    assert_eq!(recorded(&stage, namespace, "keeps-0"), first[0].1, "after its deletion");
    for (pod, (seen, mac)) in both.iter().zip(&first) {
        let now = stage.api.ready(namespace, pod);
        stage.lab.kubectl(&["cordon", &now.node]);
        let _cordoned = Cordoned(&stage, now.node.clone());
        let moved = stage.api.replace(namespace, pod, None);
        assert_ne!(moved.node, now.node, "{pod} moved");
        assert_eq!(moved.addresses, seen.addresses, "{pod}");
        let same = recorded(&stage, namespace, pod) == *mac;
        assert_eq!(same, *pod == "keeps-0", "{pod} on another node");
    }
    stage.lab.delete_namespace(namespace);
}
