//! The workloads of the scenarios. Their pods end within a second and say nothing of a node, so that they can
//! move.

use serde_json::{Value, json};

use super::POD_IMAGE;

/// Labels of a pod that keeps its address.
pub fn sticky(app: &str) -> Value {
    json!({"app": app, "sticky": "yes"})
}

/// Labels of one that does not.
pub fn plain(app: &str) -> Value {
    json!({"app": app})
}

/// What runs in a pod; `node` binds it.
pub fn spec(node: Option<&str>) -> Value {
    let mut spec = json!({
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "containers": [{"name": "pod", "image": POD_IMAGE, "imagePullPolicy": "Never"}],
    });
    if let Some(node) = node {
        spec["nodeSelector"] = json!({"kubernetes.io/hostname": node});
    }
    spec
}

/// The same, with kubelet asking by HTTP and by TCP. It is Ready only when both have reached it: the TCP one
/// once at first, because kubelet asks nothing else until a container has started. Later its failure starts
/// the container anew, which `Seen::restarts` tells.
pub fn probed_spec() -> Value {
    let mut spec = spec(None);
    let container = &mut spec["containers"][0];
    let tcp = |failures: u32| json!({"tcpSocket": {"port": 7007}, "periodSeconds": 1, "timeoutSeconds": 2, "failureThreshold": failures});
    // Never given up on: the test does that.
    container["startupProbe"] = tcp(1000);
    container["readinessProbe"] =
        json!({"httpGet": {"path": "/", "port": 8080}, "periodSeconds": 1, "timeoutSeconds": 2});
    container["livenessProbe"] = tcp(5);
    spec
}

pub fn pod(namespace: &str, name: &str, labels: Value, annotations: Value, spec: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": labels, "annotations": annotations},
        "spec": spec,
    })
}

pub fn stateful_set(namespace: &str, name: &str, replicas: usize, spec: Value) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "StatefulSet",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "serviceName": name, "replicas": replicas, "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": sticky(name)}, "spec": spec},
        },
    })
}

pub fn deployment(namespace: &str, name: &str, replicas: usize, labels: Value, spec: Value) -> Value {
    json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "replicas": replicas,
            "strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "selector": {"matchLabels": {"app": name}},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    })
}

/// A patch that makes every pod of a workload anew.
pub fn new_template(version: usize) -> Value {
    json!({"spec": {"template": {"metadata": {"annotations": {"version": version.to_string()}}}}})
}
