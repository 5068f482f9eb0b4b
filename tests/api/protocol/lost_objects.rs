//! Objects of the API server that are lost while pods run: deleted by hand or with their definitions, created
//! again from what `kubectl get -o yaml` printed, or as an older backup has them. No address is with two pods
//! meanwhile, and what a program can repair is repaired.

use std::collections::BTreeSet;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use kube::{Resource, ResourceExt};
use serde_json::json;
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::cluster::objects::{AddressClaim, ClaimPhase, StickyIP};
use sticky_ipam::cluster::protocol::repair::Repairer;
use sticky_ipam::cluster::writer::apply::NoObserver;

use crate::support::agent::{Stepped, case, fill, parts};
use crate::support::api_server::case::Case;
use crate::support::node::{
    Sandbox, TestNode, assert_in_step, claims, delete_pod, sandbox, stickies, sticky_pod,
};
use crate::support::repair::{MOST_PASSES, Surroundings, pass};
use crate::support::workloads::{deployed, launched};

const FEW: &[&str] = &["--ip-rate-num", "3", "--max-allocated-ip", "8"];

/// Two nodes, whose agents and a repairer act in turn.
struct Stage<'a> {
    case: &'a Case<'a>,
    nodes: [TestNode; 2],
    agents: [Stepped; 2],
    around: Surroundings,
}

impl<'a> Stage<'a> {
    async fn new(case: &'a Case<'a>, mode: &str) -> Self {
        let [one, two, ..] = parts(case);
        let nodes = match mode {
            "crd" => [TestNode::ready_crd(case, "n1", one).await, TestNode::ready_crd(case, "n2", two).await],
            _ => [TestNode::ready(case, "n1", one).await, TestNode::ready(case, "n2", two).await],
        };
        let agents =
            [Stepped::new(case, &nodes[0], mode, FEW).await, Stepped::new(case, &nodes[1], mode, FEW).await];
        let blocks = nodes.iter().map(|node| (node.range().into(), node.name.clone())).collect();
        Self { case, nodes, agents, around: Surroundings { blocks, ..Surroundings::default() } }
    }

    async fn agents_settle(&mut self) {
        for agent in &mut self.agents {
            agent.settle().await;
        }
    }

    /// Agents and repairer act until nothing is left to repair.
    async fn settle(&mut self) {
        let mut repairer = Repairer::default();
        for _ in 0..MOST_PASSES {
            self.agents_settle().await;
            if pass(self.case, &mut repairer, &NoObserver, &self.around).await == 0 {
                self.agents_settle().await;
                return;
            }
        }
        panic!("nothing comes to rest: {:?}", claims(self.case).await);
    }

    /// A sticky pod with an address of n1, on n2.
    async fn away_from_home(&self, name: &str) -> (IpAddr, Sandbox) {
        let [n1, n2] = &self.nodes;
        let first = sandbox(&sticky_pod(self.case, name, &n1.name, json!({})).await);
        let address = n1.add(&first).await.unwrap();
        n1.del(&first).await;
        let moved = sandbox(&sticky_pod(self.case, name, &n2.name, json!({})).await);
        assert_eq!(n2.add(&moved).await.unwrap(), address);
        (address, moved)
    }

    /// What ordinary pods of n1 get.
    async fn given_to_others(&self, names: &str) -> BTreeSet<IpAddr> {
        let n1 = &self.nodes[0];
        if n1.cilium.is_none() {
            return fill(self.case, n1, names).await.into_iter().collect();
        }
        let nodes: Api<CiliumNode> = Api::all(self.case.client());
        let pool = nodes.get(&n1.name).await.unwrap().spec.ipam.pool;
        let unowned = pool.into_iter().filter(|(_, entry)| entry.owner.is_empty());
        unowned.map(|(key, _)| key.parse().unwrap()).collect()
    }
}

/// Deletes every StickyIP and every claim of the test; what they were.
async fn lose_all(case: &Case<'_>) -> (Vec<StickyIP>, Vec<AddressClaim>) {
    let lost = (stickies(case).await, claims(case).await);
    let (sticky_api, claim_api) = apis(case);
    for sticky in &lost.0 {
        sticky_api.delete(&sticky.name_any(), &Default::default()).await.unwrap();
    }
    for claim in &lost.1 {
        claim_api.delete(&claim.name_any(), &Default::default()).await.unwrap();
    }
    lost
}

fn apis(case: &Case<'_>) -> (Api<StickyIP>, Api<AddressClaim>) {
    (Api::namespaced(case.client(), case.namespace()), Api::all(case.client()))
}

/// As `kubectl create -f` does with what `kubectl get -o yaml` printed: with another uid, and without status.
fn anew<K: Resource>(mut object: K) -> K {
    let meta = object.meta_mut();
    (meta.uid, meta.resource_version, meta.creation_timestamp) = (None, None, None);
    meta.managed_fields = None;
    object
}

#[tokio::test]
async fn objects_restored_from_yaml_are_those_of_the_running_pods_again() {
    for mode in ["delegated", "crd"] {
        let case = case().await;
        let mut stage = Stage::new(&case, mode).await;
        let home = sandbox(&sticky_pod(&case, "db-0", &stage.nodes[0].name, json!({})).await);
        let at_home = stage.nodes[0].add(&home).await.unwrap();
        let (away, _) = stage.away_from_home("cache-0").await;
        stage.agents_settle().await;
        stage.around.in_use = [at_home, away].into();
        let (lost_stickies, lost_claims) = lose_all(&case).await;
        let (sticky_api, claim_api) = apis(&case);
        for sticky in lost_stickies {
            sticky_api.create(&Default::default(), &anew(sticky)).await.unwrap();
        }
        for claim in lost_claims {
            claim_api.create(&Default::default(), &anew(claim)).await.unwrap();
        }
        stage.settle().await;
        let [n1, n2] = &stage.nodes;
        for (name, address, node) in [("db-0", at_home, n1), ("cache-0", away, n2)] {
            let sticky = sticky_api.get(name).await.unwrap();
            let attached = sticky.status.and_then(|status| status.attachment).map(|held| held.node);
            assert_eq!(
                (attached.as_deref(), &sticky.spec.addresses[..]),
                (Some(&*node.name), &[address][..])
            );
        }
        assert_in_step(&case, &[n1, n2]).await;
        let given = stage.given_to_others("web").await;
        assert!(!given.contains(&at_home) && !given.contains(&away), "{mode}: {given:?}");
        delete_pod(&case, "cache-0").await;
    }
}

#[tokio::test]
async fn an_address_whose_objects_are_lost_stays_with_the_pod_that_has_it_elsewhere() {
    for mode in ["delegated", "crd"] {
        let case = case().await;
        let mut stage = Stage::new(&case, mode).await;
        let (address, lives) = stage.away_from_home("db-0").await;
        stage.agents_settle().await;
        lose_all(&case).await;
        stage.agents_settle().await;
        assert!(!stage.given_to_others("web").await.contains(&address), "{mode}: n2 publishes {address}");
        // Nor if only the pod shows it.
        let [_, n2] = &stage.nodes;
        let nodes: Api<CiliumNode> = Api::all(case.client());
        let routes = json!({"spec": {"ipam": {"podCIDRs": [n2.range().to_string()],
                                              "pool": {address.to_string(): null}}}});
        nodes.patch(&n2.name, &PatchParams::default(), &Patch::Merge(routes)).await.unwrap();
        let pods: Api<Pod> = Api::namespaced(case.client(), case.namespace());
        let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
        pods.patch_status("db-0", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
        stage.agents_settle().await;
        assert!(!stage.given_to_others("more").await.contains(&address), "{mode}: db-0 shows {address}");
        // Once it has ended, the address is nobody's.
        stage.nodes[1].del(&lives).await;
        delete_pod(&case, "db-0").await;
        stage.agents_settle().await;
        let kept = stage.nodes[0].store().address_files().unwrap();
        let kept = kept.into_iter().find(|found| found.address == address);
        assert!(kept.and_then(|found| found.record?.binding).is_none(), "{mode}: it is released");
    }
}

#[tokio::test]
async fn an_older_attachment_from_a_backup_gives_way_to_the_pod_that_runs() {
    for mode in ["delegated", "crd"] {
        let case = case().await;
        let mut stage = Stage::new(&case, mode).await;
        let first = sandbox(&sticky_pod(&case, "db-0", &stage.nodes[0].name, json!({})).await);
        let address = stage.nodes[0].add(&first).await.unwrap();
        let older = stickies(&case).await.remove(0).status;
        stage.nodes[0].del(&first).await;
        let moved = sandbox(&sticky_pod(&case, "db-0", &stage.nodes[1].name, json!({})).await);
        assert_eq!(stage.nodes[1].add(&moved).await.unwrap(), address);
        let (sticky_api, _) = apis(&case);
        let older = json!({"status": older});
        sticky_api.patch_status("db-0", &PatchParams::default(), &Patch::Merge(older)).await.unwrap();
        stage.around.in_use = [address].into();
        stage.settle().await;
        let attached = stickies(&case).await.remove(0).status.and_then(|status| status.attachment).unwrap();
        assert_eq!((attached.node, attached.pod_uid), (stage.nodes[1].name.clone(), moved.uid.clone()));
        assert!(!stage.given_to_others("web").await.contains(&address), "{mode}");
        assert_in_step(&case, &[&stage.nodes[0], &stage.nodes[1]]).await;
    }
}

#[tokio::test]
async fn a_claim_deleted_by_hand_comes_back_to_its_own_slot_or_machine() {
    for kind in ["slot", "machine"] {
        let case = case().await;
        let mut stage = Stage::new(&case, "crd").await;
        let node = stage.nodes[0].name.clone();
        let start = async |name: &str| match kind {
            "slot" => sandbox(&deployed(&case, name, &node).await),
            _ => sandbox(&launched(&case, name, "vm", &node).await),
        };
        let first = start("web-7f9").await;
        let address = stage.nodes[0].add(&first).await.unwrap();
        stage.agents_settle().await;
        let before = stickies(&case).await.remove(0);
        assert_ne!(before.name_any(), "web-7f9", "it is called otherwise than its pod");
        stage.around.in_use = [address].into();
        let (_, claim_api) = apis(&case);
        // While its pod runs, and while it is kept for the next one.
        for runs in [true, false] {
            if !runs {
                stage.nodes[0].del(&first).await;
                delete_pod(&case, "web-7f9").await;
                stage.around.in_use.clear();
            }
            claim_api.delete(&address.to_string(), &Default::default()).await.unwrap();
            stage.settle().await;
            let claim = claims(&case).await.remove(0).spec;
            assert_eq!((claim.phase, claim.reason), (ClaimPhase::Bound, None), "{kind}, runs: {runs}");
            assert_eq!(stickies(&case).await.remove(0).metadata.uid, before.metadata.uid, "{kind}");
        }
        let next = start("web-8aa").await;
        assert_eq!(stage.nodes[0].add(&next).await.unwrap(), address, "{kind}");
    }
}
