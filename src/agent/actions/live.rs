//! Live reads that several actions rest on. Must never be answered by a watch.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams};

use super::context::ActionContext;
use super::outcome::{Performed, postponed};
use crate::cluster::api::client::Connection;
use crate::cluster::cilium::pool;
use crate::cluster::objects::cilium::CiliumNode;
use crate::cluster::objects::{AddressClaim, ClaimName};
use crate::cluster::pod;
use crate::cluster::protocol::stale_nodes;
use crate::store::Disk;

impl<D: Disk + Clone> ActionContext<'_, D> {
    pub(super) async fn claim_on(&self, address: IpAddr) -> Performed<Option<AddressClaim>> {
        let api = self.connection();
        let claims: Api<AddressClaim> = Api::all(api.client());
        let name = ClaimName::of(address).to_string();
        Ok(api.read(&format!("get AddressClaim {address}"), || claims.get_opt(&name)).await?)
    }

    /// Whether the pod that the runtime knows by this uid exists.
    pub(super) async fn pod_exists(&self, namespace: &str, name: &str, uid: &str) -> Performed<bool> {
        let found = read_pod(&self.connection(), namespace, name).await?;
        Ok(found.is_some_and(|found| pod::is_meant(&found, uid)))
    }

    /// What says that a pod of another node may have this address although no claim says so: that node
    /// publishes it, or the pod shows it.
    pub(super) async fn user_elsewhere(&self, address: IpAddr) -> Performed<Option<String>> {
        let api = self.connection();
        if let Some((node, _)) = stale_nodes::publishing(&api, &self.settings.node, &[address]).await? {
            return Ok(Some(format!("node {node} publishes it")));
        }
        let pods: Api<Pod> = Api::all(api.client());
        let showing = ListParams::default().fields(&format!("status.podIP={address}"));
        let found = api.read("list Pods", || pods.list(&showing)).await?.items;
        let is_live = |pod: &&Pod| {
            let node = pod.spec.as_ref().and_then(|spec| spec.node_name.as_deref());
            let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
            node != Some(&self.settings.node) && !matches!(phase, Some("Succeeded" | "Failed"))
        };
        let live = found.iter().find(is_live).map(|pod| &pod.metadata);
        Ok(live.map(|pod| {
            let name = |text: &Option<String>| text.clone().unwrap_or_default();
            format!("pod {}/{} shows it", name(&pod.namespace), name(&pod.name))
        }))
    }

    /// This node's CiliumNode; without one the action waits.
    pub(super) async fn cilium_node(&self, api: &Connection) -> Performed<CiliumNode> {
        match pool::read_node(api, &self.settings.node).await? {
            Some(node) => Ok(node),
            None => postponed(format!("CiliumNode {} does not exist", self.settings.node)),
        }
    }
}

pub(super) async fn read_pod(api: &Connection, namespace: &str, name: &str) -> Performed<Option<Pod>> {
    let pods: Api<Pod> = Api::namespaced(api.client(), namespace);
    Ok(api.read(&format!("get Pod {namespace}/{name}"), || pods.get_opt(name)).await?)
}
