//! Pods that run already, the claims that the controller asks for them, and what their node's agent answers.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use sticky_ipam::cluster::objects::{AddressClaim, ClaimPhase};

use super::agent::parts;
use super::api_server::case::Case;
use super::cilium::anybodys;
use super::node::{Sandbox, TestNode, sandbox, sticky_pod};

pub const FEW: &[&str] = &["--ip-rate-num", "3", "--max-allocated-ip", "8"];

/// Enough for everything that needs two looks, and for what follows from it.
pub const LOOKS: usize = 4;

pub fn claims(case: &Case<'_>) -> Api<AddressClaim> {
    Api::all(case.client())
}

/// The kubelet's word.
pub async fn runs(case: &Case<'_>, pod: &str, address: IpAddr) {
    let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
    Api::<Pod>::namespaced(case.client(), case.namespace())
        .patch_status(pod, &PatchParams::default(), &Patch::Merge(status))
        .await
        .unwrap();
}

/// What the controller asks.
pub async fn ask(case: &Case<'_>, node: &TestNode, sandbox: &Sandbox, address: IpAddr) {
    let claim = json!({"metadata": {"name": address.to_string()}, "spec": {"address": address, "phase": "Requested",
        "homeNode": node.name, "stickyRef": {"namespace": case.namespace(), "name": sandbox.pod},
        "pod": {"name": sandbox.pod, "uid": sandbox.uid}}});
    claims(case).create(&Default::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
}

pub async fn answer(case: &Case<'_>, address: IpAddr) -> (ClaimPhase, String) {
    let claim = claims(case).get(&address.to_string()).await.unwrap().spec;
    (claim.phase, claim.reason.unwrap_or_default())
}

/// A running pod whose address came from Cilium (`crd`) or from the plugin (not sticky then).
pub async fn running(case: &Case<'_>, node: &TestNode, name: &str) -> (Sandbox, IpAddr) {
    let Some(cilium) = &node.cilium else {
        let pod = sandbox(&case.pod(name, &[], Some(&node.name)).await);
        let address = node.add(&pod).await.unwrap();
        runs(case, name, address).await;
        return (pod, address);
    };
    let pod = sandbox(&sticky_pod(case, name, &node.name, json!({})).await);
    let address = anybodys(case, node).await;
    cilium.put_endpoint_of(&pod.container, address, &format!("{}/{name}", pod.namespace));
    runs(case, name, address).await;
    (pod, address)
}

pub async fn node_of(case: &Case<'_>, mode: &str, name: &str, part: usize) -> TestNode {
    match mode {
        "crd" => TestNode::ready_crd(case, name, parts(case)[part]).await,
        _ => TestNode::ready(case, name, parts(case)[part]).await,
    }
}
