//! What the agent does for pods: decisions before their ADD, pending updates that are sent, claims that are
//! answered.

use std::net::IpAddr;
use std::time::Duration;

use k8s_openapi::api::core::v1::{Namespace, Pod};
use kube::api::{Api, Patch, PatchParams, PostParams};
use serde_json::json;
use sticky_ipam::cluster::objects::{AddressClaim, ClaimPhase};
use sticky_ipam::names::{Attachment, ContainerId, IfName, PodIdentity};
use sticky_ipam::policy::lifetime::retention::Keep;
use sticky_ipam::store::ClaimantKey;

use crate::support::agent::Stepped;
use crate::support::agent::{attached, case, cut_off, parts};
use crate::support::api_server::case::Case;
use crate::support::api_server::comes_true;
use crate::support::cilium::CiliumRelease;
use crate::support::node::{
    Sandbox, TestNode, assert_in_step, claims, delete_pod, sandbox, stickies, sticky_pod,
};

async fn pod(case: &Case<'_>, name: &str, node: &TestNode) -> Sandbox {
    sandbox(&sticky_pod(case, name, &node.name, json!({})).await)
}

#[tokio::test]
async fn a_pod_that_is_bound_here_is_decided_before_its_add_which_needs_no_api_server() {
    let case = case().await;
    let mut node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let sticky = pod(&case, "db-0", &node).await;
    let plain = sandbox(&case.pod("web", &[], Some(&node.name)).await);
    let host = json!({"metadata": {"name": "host"}, "spec": {"nodeName": node.name, "hostNetwork": true,
                      "containers": [{"name": "main", "image": "none"}]}});
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(case.client(), case.namespace());
    pods.create(&PostParams::default(), &serde_json::from_value(host).unwrap()).await.unwrap();
    assert_eq!(agent.step().await.done, 3, "it reserves what is claimed, and decides twice");
    let decisions = node.store().decisions().unwrap();
    assert_eq!(decisions.len(), 2, "{decisions:?}");
    assert_eq!(attached(&case).await, Some(format!("prepared-{}", sticky.uid)));
    assert_eq!(agent.step().await.done, 0, "nothing is done twice");
    let _proxy = cut_off(&case, &mut node);
    let address = node.add(&sticky).await.unwrap();
    assert_eq!(stickies(&case).await[0].spec.addresses, [address]);
    let other = node.add(&plain).await.unwrap();
    assert_ne!(other, address);
    assert_eq!(agent.step().await.done, 0, "what the agent prepared is in use");
    assert_in_step(&case, &[&node]).await;
}

#[tokio::test]
async fn a_namespaces_annotation_counts_as_it_is_when_the_pod_is_decided() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let namespaces: Api<Namespace> = Api::all(case.client());
    let word = json!({"metadata": {"annotations": {"sticky-ipam.io/sticky": "true", "sticky-ipam.io/retention": "Forever"}}});
    namespaces.patch(case.namespace(), &PatchParams::default(), &Patch::Merge(word)).await.unwrap();
    case.pod("web", &[], Some(&node.name)).await;
    agent.step().await;
    let decisions = node.store().decisions().unwrap();
    assert!(decisions[0].sticky.is_some() && decisions[0].reason.contains("namespace"), "{decisions:?}");
    assert_eq!(stickies(&case).await[0].spec.retention.keep, Keep::Forever);
}

#[tokio::test]
async fn a_pod_that_was_not_sticky_is_judged_again_as_long_as_it_waits() {
    let releases = CiliumRelease::DIFFERENT.map(|release| ("crd", release));
    for (mode, release) in releases.into_iter().chain([("delegated", CiliumRelease::default())]) {
        let case = case().await;
        let node = match mode {
            "crd" => TestNode::ready_crd(&case, "n1", parts(&case)[0]).await,
            _ => TestNode::ready(&case, "n1", parts(&case)[0]).await,
        };
        if let Some(cilium) = &node.cilium {
            cilium.be_release(release);
        }
        let access = case.agent(&node.name).await;
        let mut agent = Stepped::by(&access, &node, mode, &[]).await;
        agent.settle().await;
        let decided = |pod: &Sandbox| {
            let decisions = node.store().decisions().unwrap();
            decisions.into_iter().find(|decision| decision.uid == pod.uid).map(|it| it.sticky.is_some())
        };
        let yes = json!({"metadata": {"annotations": {"sticky-ipam.io/sticky": "true"}}});
        let pods: Api<Pod> = Api::namespaced(case.client(), case.namespace());
        let by_its_word = sandbox(&case.pod("word", &[], Some(&node.name)).await);
        let by_the_rules = sandbox(&case.pod("rules", &[("app", "db")], Some(&node.name)).await);
        let by_its_namespace = sandbox(&case.pod("namespace", &[], Some(&node.name)).await);
        let lives = sandbox(&case.pod("lives", &[], Some(&node.name)).await);
        agent.settle().await;
        let ordinary = node.add(&lives).await.unwrap();
        for pod in [&by_its_word, &by_the_rules, &by_its_namespace, &lives] {
            assert_eq!(decided(pod), Some(false), "{mode}: {}", pod.pod);
        }
        for pod in ["word", "lives"] {
            pods.patch(pod, &PatchParams::default(), &Patch::Merge(&yes)).await.unwrap();
        }
        // At once: what is due again after a while is not what is asked for here.
        agent.step().await;
        agent.step().await;
        assert_eq!(decided(&by_its_word), Some(true), "{mode}");
        // A restart with other rules.
        let rules = json!({"matchLabels": {"app": "db"}}).to_string();
        let mut agent = Stepped::by(&access, &node, mode, &["--label-selector", &rules]).await;
        agent.step().await;
        agent.step().await;
        assert_eq!(decided(&by_the_rules), Some(true), "{mode}");
        let namespaces: Api<Namespace> = Api::all(case.client());
        namespaces.patch(case.namespace(), &PatchParams::default(), &Patch::Merge(&yes)).await.unwrap();
        agent.settle().await;
        assert_eq!(decided(&by_its_namespace), Some(true), "{mode}");
        for pod in [&by_its_word, &by_the_rules, &by_its_namespace] {
            let address = node.add(pod).await.unwrap();
            let bound =
                stickies(&case).await.into_iter().find(|it| it.metadata.name.as_ref() == Some(&pod.pod));
            assert_eq!(bound.unwrap().spec.addresses, [address], "{mode}");
        }
        assert_eq!(
            decided(&lives),
            Some(false),
            "{mode}: it runs with {ordinary}, and the controller adopts it"
        );
    }
}

#[tokio::test]
async fn a_plain_pod_that_becomes_sticky_while_cilium_adds_it_is_left_alone() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", &[]).await;
    agent.settle().await;
    let late = sandbox(&case.pod("late", &[], Some(&node.name)).await);
    agent.settle().await;
    let (gate, diary) = (node.cilium().hold_adds().await, node.cilium().diary());
    let meanwhile = async {
        let waits = || diary.lock().unwrap().iter().any(|it| it == "cilium ADD waits");
        assert!(comes_true(Duration::from_secs(60), || async { waits() }).await, "Cilium is asked");
        let pods: Api<Pod> = Api::namespaced(case.client(), case.namespace());
        let yes = json!({"metadata": {"annotations": {"sticky-ipam.io/sticky": "true"}}});
        pods.patch("late", &PatchParams::default(), &Patch::Merge(&yes)).await.unwrap();
        for _ in 0..4 {
            agent.step().await;
        }
        drop(gate);
    };
    let (added, ()) = tokio::join!(node.add(&late), meanwhile);
    added.unwrap();
    agent.settle().await;
    assert!(stickies(&case).await.is_empty(), "it has an address of Cilium's, and the controller adopts it");
}

#[tokio::test]
async fn a_decision_is_taken_back_when_its_pod_will_not_come() {
    let case = case().await;
    let [one, two, ..] = parts(&case);
    let (n1, n2) = (TestNode::ready(&case, "n1", one).await, TestNode::ready(&case, "n2", two).await);
    let mut agent = Stepped::new(&case, &n1, "delegated", &[]).await;
    pod(&case, "db-0", &n1).await;
    case.pod("web", &[], Some(&n1.name)).await;
    agent.step().await;
    let address = stickies(&case).await[0].spec.addresses[0];
    delete_pod(&case, "db-0").await;
    delete_pod(&case, "web").await;
    agent.step().await;
    assert!(n1.store().decisions().unwrap().is_empty());
    assert_eq!(attached(&case).await, None);
    // The next pod may come anywhere.
    let moved = pod(&case, "db-0", &n2).await;
    assert_eq!(n2.add(&moved).await.unwrap(), address);
    agent.settle().await;
    assert_eq!(attached(&case).await, Some(moved.container.clone()));
    assert_in_step(&case, &[&n1, &n2]).await;
}

#[tokio::test]
async fn a_pod_whose_predecessor_still_runs_here_is_decided_when_it_has_gone() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let old = pod(&case, "db-0", &node).await;
    agent.step().await;
    let address = node.add(&old).await.unwrap();
    // Forcibly deleted: its sandbox still runs for a while.
    let new = pod(&case, "db-0", &node).await;
    agent.step().await;
    assert!(node.store().decisions().unwrap().is_empty(), "the old sandbox has the address");
    assert_eq!(attached(&case).await, Some(format!("prepared-{}", old.uid)));
    node.del(&old).await;
    agent.later();
    agent.step().await;
    assert_eq!(attached(&case).await, Some(format!("prepared-{}", new.uid)));
    assert_eq!(node.add(&new).await.unwrap(), address);
    assert_in_step(&case, &[&node]).await;
}

#[tokio::test]
async fn what_a_del_could_not_write_is_written_by_the_agent() {
    let case = case().await;
    let [one, two, ..] = parts(&case);
    let mut n1 = TestNode::ready(&case, "n1", one).await;
    let n2 = TestNode::ready(&case, "n2", two).await;
    let mut agent = Stepped::new(&case, &n1, "delegated", &[]).await;
    let first = pod(&case, "db-0", &n1).await;
    let address = n1.add(&first).await.unwrap();
    let _proxy = cut_off(&case, &mut n1);
    n1.del(&first).await;
    assert_eq!(n1.pending_updates().len(), 1);
    assert_eq!(attached(&case).await, Some(first.container.clone()));
    agent.step().await;
    assert_eq!(attached(&case).await, None);
    assert!(n1.pending_updates().is_empty());
    let moved = pod(&case, "db-0", &n2).await;
    assert_eq!(n2.add(&moved).await.unwrap(), address);
    assert_in_step(&case, &[&n1, &n2]).await;
}

#[tokio::test]
async fn a_new_sandbox_made_without_the_api_server_keeps_its_address_as_the_old_one_ends() {
    let case = case().await;
    let mut node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let first = pod(&case, "db-0", &node).await;
    let address = node.add(&first).await.unwrap();
    let _proxy = cut_off(&case, &mut node);
    let again = Sandbox { container: format!("{}-again", first.container), ..first.clone() };
    assert_eq!(node.add(&again).await.unwrap(), address);
    node.del(&first).await;
    let pending = node.pending_updates();
    assert_eq!(pending.len(), 2, "{pending:?}");
    agent.step().await;
    assert_eq!(attached(&case).await, Some(again.container.clone()));
    assert!(node.pending_updates().is_empty());
    assert_eq!(node.in_use(), [(address, again.container.clone())]);
    agent.settle().await;
    assert_eq!(attached(&case).await, Some(again.container.clone()));
}

async fn ask(case: &Case<'_>, address: IpAddr, home: &str, holder: &str) {
    let claims: Api<AddressClaim> = Api::all(case.client());
    let claim = json!({"metadata": {"name": address.to_string()}, "spec": {
        "address": address, "phase": "Requested", "homeNode": home,
        "stickyRef": {"namespace": case.namespace(), "name": holder}}});
    claims.create(&PostParams::default(), &serde_json::from_value(claim).unwrap()).await.unwrap();
}

#[tokio::test]
async fn a_claim_on_this_nodes_address_is_granted_or_refused_with_the_claimants_name() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let plain = sandbox(&case.pod("web", &[], Some(&node.name)).await);
    let used = node.add(&plain).await.unwrap();
    let free: IpAddr = node.range().hosts().nth(40).unwrap().into();
    let gateway: IpAddr = node.range().hosts().next().unwrap().into();
    for (address, holder) in [(used, "a"), (free, "b"), (gateway, "c")] {
        ask(&case, address, &node.name, holder).await;
    }
    ask(&case, node.range().hosts().nth(41).unwrap().into(), "elsewhere", "d").await;
    agent.step().await;
    let answers = claims(&case).await;
    let answer = |address: IpAddr| answers.iter().find(|claim| claim.spec.address == address).unwrap();
    assert_eq!(answer(free).spec.phase, ClaimPhase::Granted);
    assert_eq!(answer(used).spec.phase, ClaimPhase::Refused);
    assert!(answer(used).spec.reason.as_deref().unwrap().contains("web"), "{answers:?}");
    assert_eq!(answer(gateway).spec.phase, ClaimPhase::Refused);
    let elsewhere = answers.iter().find(|claim| claim.spec.sticky_ref.name == "d").unwrap();
    assert_eq!(elsewhere.spec.phase, ClaimPhase::Requested, "another node answers it");
    // What was granted is not given to any other pod of this node.
    let mut given = Vec::new();
    for number in 0..70 {
        let pod = case.pod(&format!("p{number}"), &[], Some(&node.name)).await;
        given.extend(node.add(&sandbox(&pod)).await.ok());
    }
    assert!(given.len() > 50 && !given.contains(&free), "{} were given", given.len());
}

#[tokio::test]
async fn what_was_granted_is_not_freed_by_the_refused_walk_that_had_reserved_it_before() {
    let case = case().await;
    let node = TestNode::ready(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let address: IpAddr = node.range().hosts().nth(40).unwrap().into();
    let (container, interface) = (ContainerId::new("refused").unwrap(), IfName::new("eth0").unwrap());
    let walk = Attachment { container, interface };
    let claimant = ClaimantKey::new(case.namespace(), "db-0", &walk.interface);
    let refused = PodIdentity::new(case.namespace(), "db-0", Some("u")).unwrap();
    let store = node.store();
    store.lock().unwrap().reserve(address, &claimant, &refused, &walk, None, &[]).unwrap();
    // It has found no claim on what it reserved; before it releases that, its claimant's next pod claims it
    // from another node.
    ask(&case, address, &node.name, "db-0").await;
    agent.step().await;
    assert_eq!(claims(&case).await[0].spec.phase, ClaimPhase::Granted);
    store.unreserve(&claimant, &walk, &[address]).unwrap();
    node.assert_claims_of_its_block_are_reserved(&case).await;
}

#[tokio::test]
async fn an_earlier_attempts_address_that_is_unowned_now_is_not_prepared() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", &[]).await;
    // It is unowned in the pool; its claimant had it reserved once, and the store was lost since.
    let offered: IpAddr = node.range().hosts().last().unwrap().into();
    ask(&case, offered, &node.name, "db-0").await;
    let api: Api<AddressClaim> = Api::all(case.client());
    let granted = json!({"spec": {"phase": "Granted"}});
    api.patch(&offered.to_string(), &PatchParams::default(), &Patch::Merge(granted)).await.unwrap();
    pod(&case, "db-0", &node).await;
    agent.settle().await;
    assert!(stickies(&case).await.is_empty(), "another pod may have {offered}");
    assert!(node.store().decisions().unwrap().iter().all(|decision| decision.sticky.is_none()));
}
