//! Pods with the owners that workloads give them.

use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;
use serde_json::{Value, json};

use super::api_server::case::Case;

pub async fn launched(case: &Case<'_>, name: &str, machine: &str, node: &str) -> Pod {
    let owner = json!({"apiVersion": "kubevirt.io/v1", "kind": "VirtualMachineInstance", "name": machine, "uid": machine,
                       "controller": true});
    owned(case, name, node, json!({"sticky": "yes"}), owner).await
}

pub async fn deployed(case: &Case<'_>, name: &str, node: &str) -> Pod {
    deployed_by(case, name, "web", node).await
}

pub async fn deployed_by(case: &Case<'_>, name: &str, deployment: &str, node: &str) -> Pod {
    let owner = json!({"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": format!("{deployment}-1"), "uid": "u",
                       "controller": true});
    owned(case, name, node, json!({"sticky": "yes", "pod-template-hash": "1"}), owner).await
}

pub async fn owned(case: &Case<'_>, name: &str, node: &str, labels: Value, owner: Value) -> Pod {
    let pods: Api<Pod> = Api::namespaced(case.client(), case.namespace());
    let pod = json!({
        "metadata": {"name": name, "labels": labels, "ownerReferences": [owner]},
        "spec": {"nodeName": node, "containers": [{"name": "main", "image": "none"}]},
    });
    pods.create(&Default::default(), &serde_json::from_value(pod).unwrap()).await.unwrap()
}
