//! The agent's answer to a claim on the address of a running pod: refused for any other pod, continued or
//! undone after a crash at any write, and without harm to other pods in between.

use std::net::IpAddr;

use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use sticky_ipam::cluster::objects::cilium::PoolEntry;
use sticky_ipam::cluster::objects::{ClaimPhase, StickyIP};

use crate::support::agent::{Stepped, ends_at, settings};
use crate::support::agent::{case, parts};
use crate::support::api_server::case::Case;
use crate::support::cilium::{CiliumRelease, cilium_nodes, owned};
use crate::support::node::{Sandbox, delete_pod, sandbox, sticky_pod};
use crate::support::running_pod::{FEW, LOOKS, answer, ask, claims, node_of, running, runs};

#[tokio::test]
async fn only_the_very_pod_that_has_the_address_now_is_granted_it() {
    let releases = CiliumRelease::DIFFERENT.map(|release| ("crd", release));
    for (mode, release) in releases.into_iter().chain([("delegated", CiliumRelease::default())]) {
        let case = case().await;
        let node = node_of(&case, mode, "n1", 0).await;
        if let Some(cilium) = &node.cilium {
            cilium.be_release(release);
        }
        let mut agent = Stepped::new(&case, &node, mode, FEW).await;
        agent.settle().await;
        // Replaced between the controller's read and the agent's: same name, same address shown, another uid.
        let (first, address) = running(&case, &node, "db-0").await;
        ask(&case, &node, &Sandbox { uid: "another".into(), ..first.clone() }, address).await;
        agent.settle().await;
        let (phase, why) = answer(&case, address).await;
        assert!(phase == ClaimPhase::Refused && why.contains("another uid by now"), "{mode}: {why}");
        claims(&case).delete(&address.to_string(), &Default::default()).await.unwrap();
        // It shows another address than it is asked for.
        let (second, its_own) = running(&case, &node, "db-1").await;
        runs(&case, "db-1", "192.0.2.1".parse().unwrap()).await;
        ask(&case, &node, &second, its_own).await;
        agent.settle().await;
        let (phase, why) = answer(&case, its_own).await;
        assert!(phase == ClaimPhase::Refused && why.contains("does not show"), "{mode}: {why}");
        // It shows the address of another pod.
        runs(&case, "db-1", address).await;
        ask(&case, &node, &second, address).await;
        agent.settle().await;
        let (phase, why) = answer(&case, address).await;
        let other = if release == CiliumRelease::V1_20 { first.container.as_str() } else { "db-0" };
        assert!(phase == ClaimPhase::Refused && why.contains(other), "{mode} {release:?}: {why}");
        // Its predecessor of the same name has it, and is still in the store.
        if mode == "delegated" {
            delete_pod(&case, "db-0").await;
            let successor = sandbox(&case.pod("db-0", &[], Some(&node.name)).await);
            runs(&case, "db-0", address).await;
            claims(&case).delete(&address.to_string(), &Default::default()).await.unwrap();
            ask(&case, &node, &successor, address).await;
            agent.settle().await;
            assert_eq!(answer(&case, address).await.0, ClaimPhase::Refused, "{mode}");
        }
        assert!(owned(&cilium_nodes(&case).await, &format!("{}/db-0", case.namespace())).is_empty());
        assert!(
            node.store().address_files().unwrap().iter().all(|look| look
                .record
                .as_ref()
                .unwrap()
                .binding
                .is_none())
        );
    }
}

#[tokio::test]
async fn a_grant_that_crashes_at_any_write_is_finished_or_leaves_nothing_without_a_claim() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let node = node_of(&case, mode, "n1", 0).await;
        let access = case.agent(&node.name).await;
        let settings = settings(&node, &access.kubeconfig(), mode, FEW);
        let mut next = Stepped::by(&access, &node, mode, FEW).await;
        next.settle().await;
        for given_up in [false, true] {
            for after in [false, true] {
                let mut writes = 0;
                loop {
                    let name = format!("db-{given_up}-{after}-{writes}");
                    let owner = format!("{}/{name}", case.namespace());
                    let (pod, address) = running(&case, &node, &name).await;
                    ask(&case, &node, &pod, address).await;
                    let ended = ends_at(&settings, &access, LOOKS, writes + 1, after).await;
                    if given_up {
                        // The claim is deleted, and the pod ends.
                        claims(&case).delete(&address.to_string(), &Default::default()).await.unwrap();
                    } else {
                        next = next.anew();
                        next.settle().await;
                        assert_eq!(answer(&case, address).await.0, ClaimPhase::Granted, "{name}");
                        assert_eq!(
                            owned(&cilium_nodes(&case).await, &owner).len(),
                            usize::from(mode == "crd")
                        );
                        assert!(node.in_use().contains(&(address, pod.container.clone())), "{name}");
                        claims(&case).delete(&address.to_string(), &Default::default()).await.unwrap();
                    }
                    delete_pod(&case, &name).await;
                    node.del(&pod).await;
                    next = next.anew();
                    next.settle().await;
                    next.later();
                    next.settle().await;
                    assert!(owned(&cilium_nodes(&case).await, &owner).is_empty(), "{name}");
                    node.assert_nothing_reserved_without_claim(&case).await;
                    assert!(node.in_use().is_empty() && node.pending_updates().is_empty(), "{name}");
                    if !ended {
                        break;
                    }
                    writes += 1;
                }
                assert!(writes >= 3, "{mode}: only {writes} writes were seen");
            }
        }
    }
}

/// All that was granted is bound, and a running sandbox is attached.
async fn bind_if_granted(case: &Case<'_>, agent: &mut Stepped, name: &str, address: IpAddr) {
    if answer(case, address).await.0 == ClaimPhase::Granted {
        bind(case, name, address).await;
        agent.settle().await;
    }
}

#[tokio::test]
async fn an_owner_that_cilium_does_not_know_of_owns_no_address() {
    let case = case().await;
    let n1 = node_of(&case, "crd", "n1", 0).await;
    let n2 = node_of(&case, "crd", "n2", 1).await;
    let mut agent = Stepped::new(&case, &n1, "crd", FEW).await;
    agent.settle().await;
    let (pod, address) = running(&case, &n1, "db-0").await;
    let owner = format!("{}/db-0", case.namespace());
    n1.cilium().hold_back().await;
    ask(&case, &n1, &pod, address).await;
    agent.settle().await;
    bind_if_granted(&case, &mut agent, "db-0", address).await;
    // The pod ends, the next one starts on another node, and Cilium gives what it considers unowned to
    // another pod.
    delete_pod(&case, "db-0").await;
    n1.del(&pod).await;
    let next = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
    let elsewhere = n2.add(&next).await.unwrap();
    let ordinary = sandbox(&case.pod("web", &[], Some(&n1.name)).await);
    let error = n1.add(&ordinary).await.unwrap_err();
    let why = error["msg"].as_str().unwrap();
    assert!(why.contains(&format!("Cilium gave {address} ")), "else the test shows nothing: {error}");
    assert_ne!(elsewhere, address, "one address with two pods");
    // It came up without the plugin, which does not let it have an address that the store keeps.
    n1.cilium().put_endpoint_of(&ordinary.container, address, &format!("{}/web", case.namespace()));
    // Whatever the agent still has to do, the ordinary pod keeps its pool entry, and nothing of ours is
    // there.
    let _ = claims(&case).delete(&address.to_string(), &Default::default()).await;
    agent.settle().await;
    n1.cilium().catch_up();
    agent.settle().await;
    let nodes = cilium_nodes(&case).await;
    let pool =
        &nodes.iter().find(|node| node.metadata.name.as_ref() == Some(&n1.name)).unwrap().spec.ipam.pool;
    assert_eq!(pool.get(&address.to_string()), Some(&PoolEntry::default()));
    assert!(!owned(&nodes, &owner).iter().any(|(node, _)| *node == n1.name));
    n1.assert_nothing_reserved_without_claim(&case).await;
    let again = n1.store().lock().unwrap().find_by_address(address).unwrap().unwrap();
    assert!(again.record.is_unowned(), "{:?}", again.record);
}

#[tokio::test]
async fn once_cilium_knows_of_the_owner_the_grant_is_given_and_no_barrier_is_left() {
    let case = case().await;
    let node = node_of(&case, "crd", "n1", 0).await;
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    agent.settle().await;
    let (first, address) = running(&case, &node, "db-0").await;
    let (second, another) = running(&case, &node, "db-1").await;
    node.cilium().hold_back().await;
    ask(&case, &node, &first, address).await;
    ask(&case, &node, &second, another).await;
    agent.settle().await;
    for address in [address, another] {
        assert_eq!(answer(&case, address).await.0, ClaimPhase::Requested);
    }
    node.cilium().catch_up();
    agent.later();
    agent.settle().await;
    for address in [address, another] {
        assert_eq!(answer(&case, address).await.0, ClaimPhase::Granted);
    }
    let nodes = cilium_nodes(&case).await;
    assert_eq!(owned(&nodes, "sticky-ipam.io/barrier"), [], "a barrier entry is left");
    assert_eq!(node.cilium().taken(), [].into());
}

/// The StickyIP as the controller makes it, and before it is attached.
async fn bind(case: &Case<'_>, name: &str, address: IpAddr) {
    let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
    let sticky = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP", "metadata": {"name": name},
        "spec": {"addresses": [address], "claimant": {"kind": "Pod"},
                 "workload": {"apiVersion": "v1", "kind": "Pod", "name": name}}});
    let made = api.create(&Default::default(), &serde_json::from_value(sticky).unwrap()).await.unwrap();
    let seal = json!({"spec": {"phase": "Bound", "stickyUid": made.metadata.uid}});
    claims(case).patch(&address.to_string(), &PatchParams::default(), &Patch::Merge(seal)).await.unwrap();
}

#[tokio::test]
async fn the_next_pod_elsewhere_waits_for_an_adopted_one_that_was_never_attached() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let n1 = node_of(&case, mode, "n1", 0).await;
        let n2 = node_of(&case, mode, "n2", 1).await;
        let mut agent = Stepped::new(&case, &n1, mode, FEW).await;
        agent.settle().await;
        let (first, address) = running(&case, &n1, "db-0").await;
        ask(&case, &n1, &first, address).await;
        agent.settle().await;
        assert_eq!(answer(&case, address).await.0, ClaimPhase::Granted);
        // Forcibly deleted: the sandbox runs, and the agent of its node does not act.
        let other = sandbox(&sticky_pod(&case, "db-0", &n2.name, json!({})).await);
        let elsewhere = n2.add(&other).await.unwrap();
        assert_ne!(elsewhere, address, "{mode}: granted, and with another pod");
        n2.del(&other).await;
        delete_pod(&case, "db-0").await;
        for claim in claims(&case).list(&Default::default()).await.unwrap() {
            if claim.spec.sticky_ref.namespace == case.namespace() && claim.spec.address != address {
                claims(&case).delete(&claim.metadata.name.unwrap(), &Default::default()).await.unwrap();
            }
        }
        let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
        api.delete("db-0", &Default::default()).await.unwrap();
        let _ = claims(&case).delete(&address.to_string(), &Default::default()).await;

        // Once more, and this time the controller ends after the seal.
        let (pod, again) = running(&case, &n1, "db-1").await;
        ask(&case, &n1, &pod, again).await;
        agent.settle().await;
        bind(&case, "db-1", again).await;
        let moved = sandbox(&sticky_pod(&case, "db-1", &n2.name, json!({})).await);
        let refused = n2.add(&moved).await.unwrap_err();
        assert!(refused.to_string().contains(&pod.uid), "{mode}: {refused}");
        agent.settle().await;
        assert!(n2.add(&moved).await.is_err(), "{mode}: the sandbox runs");
        n1.del(&pod).await;
        agent.settle().await;
        assert_eq!(n2.add(&moved).await.unwrap(), again, "{mode}: its node says that it is gone");
        n2.del(&moved).await;
    }
}

#[tokio::test]
async fn a_pod_is_not_attached_to_a_stickyip_that_has_other_addresses_than_it_lives_with() {
    for mode in ["crd", "delegated"] {
        let case = case().await;
        let node = node_of(&case, mode, "n1", 0).await;
        let mut agent = Stepped::new(&case, &node, mode, FEW).await;
        agent.settle().await;
        let (pod, address) = running(&case, &node, "db-0").await;
        ask(&case, &node, &pod, address).await;
        agent.settle().await;
        assert_eq!(answer(&case, address).await.0, ClaimPhase::Granted);
        // Another pod got the name first, and is gone by now.
        claims(&case).delete(&address.to_string(), &Default::default()).await.unwrap();
        let other: IpAddr = parts(&case)[2].hosts().next().unwrap().into();
        let claim = json!({"metadata": {"name": other.to_string()}, "spec": {"address": other, "phase": "Granted",
            "stickyRef": {"namespace": case.namespace(), "name": "db-0"}}});
        claims(&case).create(&Default::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
        bind(&case, "db-0", other).await;
        for _ in 0..LOOKS {
            agent.settle().await;
            agent.later();
        }
        let api: Api<StickyIP> = Api::namespaced(case.client(), case.namespace());
        let attachment = api.get("db-0").await.unwrap().status.and_then(|status| status.attachment);
        assert_eq!(attachment, None, "{mode}: {} runs with {address}", pod.pod);
    }
}
