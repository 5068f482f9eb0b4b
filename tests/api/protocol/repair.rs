//! The repair loop on a real API server: every fault cured, at every point where it may end, and against pods
//! on their way.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::{AddressClaim, ClaimPhase, StickyIP, StickyPhase};
use sticky_ipam::cluster::protocol::repair::Repairer;
use sticky_ipam::cluster::view::Origin;
use sticky_ipam::cluster::writer::apply::NoObserver;

use crate::support::api_server::ApiServer;
use crate::support::api_server::case::Case;
use crate::support::node::{
    EndAt, TestNode, assert_in_step, claims, ended_by_the_witness, sandbox, sticky_pod, sticky_pool,
};
use crate::support::repair::{Surroundings, mend, pass};

async fn case() -> Case<'static> {
    let server = ApiServer::shared().await;
    server.install_our_kinds().await;
    server.case().await
}

/// Addresses of the test's range, each handed out once.
struct Addresses {
    next: u32,
}

impl Addresses {
    fn of(case: &Case<'_>) -> Self {
        Self { next: case.range().network().to_bits() + 1 }
    }
    fn next(&mut self) -> IpAddr {
        self.next += 1;
        Ipv4Addr::from_bits(self.next).into()
    }
}

async fn sticky(case: &Case<'_>, name: &str, address: IpAddr) -> String {
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    let object = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP", "metadata": {"name": name},
        "spec": {"addresses": [address], "claimant": {"kind": "Pod"},
                 "workload": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db"}}});
    let made = api.create(&Default::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
    made.metadata.uid.unwrap()
}

async fn attach(case: &Case<'_>, name: &str) {
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    let status = json!({"status": {"phase": "Attached", "attachment": {"node": "n1", "podName": name,
        "podUid": "u", "attachmentId": "c", "since": "2026-01-01T00:00:00Z"}}});
    api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
}

async fn claim(case: &Case<'_>, address: IpAddr, holder: &str, phase: &str, sticky_uid: Option<&str>) {
    let api: Api<AddressClaim> = Api::all(case.client());
    let mut spec = json!({"address": address, "phase": phase, "stickyRef": {"namespace": case.namespace(), "name": holder}});
    if let Some(uid) = sticky_uid {
        spec["stickyUid"] = Value::from(uid);
    }
    let object = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "AddressClaim",
                        "metadata": {"name": address}, "spec": spec});
    api.create(&Default::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}

/// Every fault that there is. The name of the StickyIP that stays in conflict.
async fn break_everything(case: &Case<'_>, mark: &str, addresses: &mut Addresses) -> String {
    let name = |what: &str| format!("{what}-{mark}");
    let address = addresses.next();
    sticky(case, &name("not-sealed"), address).await;
    claim(case, address, &name("not-sealed"), "Granted", None).await;
    let address = addresses.next();
    let uid = sticky(case, &name("lost-attempt"), address).await;
    claim(case, address, &name("lost-attempt"), "Bound", Some(&uid)).await;
    claim(case, addresses.next(), &name("lost-attempt"), "Granted", None).await;
    claim(case, addresses.next(), &name("orphan"), "Granted", None).await;
    claim(case, addresses.next(), &name("holder-gone"), "Bound", Some("gone")).await;
    sticky(case, &name("claim-missing"), addresses.next()).await;
    let address = addresses.next();
    let uid = sticky(case, &name("rightful"), address).await;
    claim(case, address, &name("rightful"), "Bound", Some(&uid)).await;
    sticky(case, &name("thief"), address).await;
    sticky(case, &name("live-thief"), address).await;
    attach(case, &name("live-thief")).await;
    name("live-thief")
}

/// Takes the StickyIP in conflict away, as a person would, and looks at the rest.
async fn assert_mended(case: &Case<'_>, mark: &str, in_conflict: &str) {
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    let marked = api.get(in_conflict).await.unwrap().status.unwrap();
    assert_eq!(marked.phase, Some(StickyPhase::Conflict));
    assert!(marked.conditions[0].message.contains(&format!("rightful-{mark}")), "{marked:?}");
    assert!(marked.attachment.is_some(), "nobody detached it");
    api.delete(in_conflict, &Default::default()).await.unwrap();
    assert!(api.get_opt(&format!("thief-{mark}")).await.unwrap().is_none());
    assert_in_step(case, &[]).await;
    for claim in claims(case).await {
        assert_eq!(claim.spec.phase, ClaimPhase::Bound);
    }
}

#[tokio::test]
async fn every_fault_is_cured_wherever_a_pass_ends() {
    let case = case().await;
    let mut addresses = Addresses::of(&case);
    for after in [false, true] {
        let mut number = 1;
        loop {
            let mark = format!("{after}-{number}");
            let in_conflict = break_everything(&case, &mark, &mut addresses).await;
            let end = EndAt::new(number, after);
            let ended = ended_by_the_witness(async {
                // Also those writes that only a later pass comes to.
                let (mut repairer, around) = (Repairer::default(), Surroundings::of(&case));
                while pass(&case, &mut repairer, &*end, &around).await > 0 {}
            })
            .await;
            mend(&case).await;
            assert_mended(&case, &mark, &in_conflict).await;
            if !ended {
                break;
            }
            number += 1;
        }
        // The most writes of one pass: seal, two deletes, rest, create, delete a StickyIP, mark a conflict.
        assert_eq!(number, 8);
    }
}

#[tokio::test]
async fn a_claim_stays_quarantined_while_a_pod_shows_its_address() {
    let case = case().await;
    let address = Addresses::of(&case).next();
    claim(&case, address, "gone", "Bound", Some("gone")).await;
    let mut repairer = Repairer::default();
    let mut around = Surroundings { in_use: [address].into(), ..Surroundings::of(&case) };
    while pass(&case, &mut repairer, &NoObserver, &around).await > 0 {}
    assert_eq!(claims(&case).await[0].spec.phase, ClaimPhase::Quarantined);
    around.in_use.clear();
    while pass(&case, &mut repairer, &NoObserver, &around).await > 0 {}
    assert!(claims(&case).await.is_empty());
}

#[tokio::test]
async fn a_repairer_in_a_hurry_never_keeps_a_pod_from_its_address_of_the_nodes_block() {
    a_repairer_in_a_hurry(false).await;
}

#[tokio::test]
async fn a_repairer_in_a_hurry_never_keeps_a_pod_from_its_address_of_a_sticky_pool() {
    a_repairer_in_a_hurry(true).await;
}

async fn a_repairer_in_a_hurry(of_a_pool: bool) {
    let case = case().await;
    let quarters: Vec<_> = case.range().subnets(26).unwrap().collect();
    if of_a_pool {
        sticky_pool(&case, quarters[2]).await;
    }
    let node = TestNode::ready(&case, "n1", quarters[0]).await;
    let stop = Arc::new(tokio::sync::Notify::new());
    let mending = async {
        let (mut repairer, around) = (Repairer::default(), Surroundings::of(&case));
        let mut cured = 0;
        loop {
            tokio::select! {
                () = stop.notified() => return cured,
                found = pass(&case, &mut repairer, &NoObserver, &around) => cured += found,
            }
        }
    };
    let pods = async {
        for round in 0..20 {
            let name = format!("db-{round}");
            let first = sandbox(&sticky_pod(&case, &name, &node.name, json!({})).await);
            let address = node.add(&first).await.unwrap();
            node.del(&first).await;
            let again = sandbox(&sticky_pod(&case, &name, &node.name, json!({})).await);
            assert_eq!(node.add(&again).await.unwrap(), address, "{name}");
        }
        stop.notify_one();
    };
    let (cured, ()) = tokio::join!(mending, pods);
    assert!(cured > 0, "the repairer never met a pod on its way");
    mend(&case).await;
    assert_in_step(&case, &[&node]).await;
}

#[test]
fn a_lost_claim_on_a_block_is_asked_of_its_home_node() {
    let around = Surroundings {
        pools: vec!["10.9.0.0/24".parse().unwrap()],
        blocks: vec![("10.1.0.0/24".parse().unwrap(), "n1".into())],
        ..Surroundings::default()
    };
    let origin = |text: &str| around.origin(text.parse().unwrap());
    assert!(matches!(origin("10.9.0.5"), Origin::StickyPool { .. }));
    assert!(matches!(origin("10.1.0.5"), Origin::ForeignBlock { home, .. } if home == "n1"));
    assert_eq!(origin("10.2.0.5"), Origin::Nowhere);
}
