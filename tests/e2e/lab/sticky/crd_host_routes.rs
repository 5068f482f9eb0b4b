//! The own host reaches what cilium-agent does not route there: addresses of a Sticky pool, on a tunnel
//! without endpoint routes. By kubelet's probes, after a restart of cilium-agent, a move and a reboot.

use serde_json::json;

use crate::support::lab::{Flavour, Lab, Mode, pod_spec};

const NAMESPACE: &str = "pooled";
/// Of no node's block.
const ADDRESS: &str = "10.77.0.7";

/// The pod that has this address, on a node; returns once kubelet's probe has reached it there.
fn runs_on(lab: &Lab, node: &str) {
    let _ = lab.attempt(&["kubectl", "delete", "pod", "-n", NAMESPACE, "db-0", "--wait"]);
    let mut spec = pod_spec(node);
    spec["containers"][0]["readinessProbe"] = json!({"tcpSocket": {"port": 8080}, "periodSeconds": 1});
    lab.create(&json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": NAMESPACE, "name": "db-0", "labels": {"sticky": "yes"},
                     "annotations": {"sticky-ipam.io/ips": ADDRESS}},
        "spec": spec,
    }));
    assert_eq!(lab.address(NAMESPACE, "db-0"), ADDRESS);
    is_reached(lab);
}

fn is_reached(lab: &Lab) {
    for node in ["node-1", "node-2"] {
        lab.answers(node, ADDRESS);
    }
}

#[test]
fn hosts_reach_addresses_of_a_sticky_pool_over_a_tunnel_without_endpoint_routes() {
    let lab = Lab::of(Flavour::Ours(Mode::Crd));
    lab.namespace(NAMESPACE);
    lab.create(&json!({
        "apiVersion": "sticky-ipam.io/v1alpha1", "kind": "IPPool", "metadata": {"name": "db"},
        "spec": {"use": "Sticky", "cidrs": ["10.77.0.0/24"]},
    }));
    runs_on(&lab, "node-1");
    lab.must(&["stop", "cilium@node-1"]);
    lab.must(&["start", "cilium@node-1"]);
    is_reached(&lab);
    runs_on(&lab, "node-2");
    runs_on(&lab, "node-1");
    lab.must(&["reboot", "node-1"]);
    runs_on(&lab, "node-1");
    // What the pod leaves behind.
    lab.kubectl(&["delete", "pod", "-n", NAMESPACE, "db-0", "--wait"]);
    lab.kubectl(&["delete", "ippool.sticky-ipam.io", "db"]);
    lab.delete_namespace(NAMESPACE);
}
