//! Marking end to end: the controller asks, the node's agent grants what the pod has, and the pod's end and
//! its next incarnation go the usual way.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::{ClaimPhase, StickyIP};

use crate::support::agent::Stepped;
use crate::support::cilium::{CiliumRelease, anybodys, cilium_nodes, owned};
use crate::support::controller::{Desk, while_at_work};
use crate::support::node::{Sandbox, TestNode, assert_in_step, delete_pod, sandbox, stickies};

/// In a hurry, but for claims, which may stand without their StickyIP for as long as an agent takes.
const FLAGS: &[&str] =
    &["--proof-gap=0s", "--quarantine=0s", r#"--label-selector={"matchLabels":{"sticky":"yes"}}"#];
const FEW: &[&str] = &["--ip-rate-num", "3", "--max-allocated-ip", "8"];

fn attached(sticky: &StickyIP) -> Option<String> {
    Some(sticky.status.as_ref()?.attachment.as_ref()?.attachment_id.to_string())
}

/// Steps the agent while the controller works, until the condition holds.
async fn until(desk: &Desk, agent: &mut Stepped, what: &str, holds: impl AsyncFn(&Desk) -> bool) {
    until_of(desk, std::slice::from_mut(agent), what, holds).await;
}

/// The same with several agents.
async fn until_of(desk: &Desk, agents: &mut [Stepped], what: &str, holds: impl AsyncFn(&Desk) -> bool) {
    let deadline = tokio::time::Instant::now() + crate::support::controller::DEADLINE;
    while !holds(desk).await {
        assert!(tokio::time::Instant::now() < deadline, "{what} did not come");
        for agent in &mut *agents {
            agent.step().await;
            agent.later();
        }
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

async fn is_marked(desk: &Desk, name: &str, uid: &str) -> bool {
    let found = desk.stickies().get_opt(name).await.unwrap();
    found.as_ref().and_then(attached) == Some(format!("adopted-{uid}"))
}

async fn make_sticky(desk: &Desk, name: &str) {
    let pods: Api<Pod> = Api::namespaced(desk.case.client(), desk.case.namespace());
    let no_word = json!({"metadata": {"annotations": {"sticky-ipam.io/sticky": null}}});
    pods.patch(name, &PatchParams::default(), &Patch::Merge(no_word)).await.unwrap();
}

/// A pod that Cilium gave an unowned address, without the plugin.
async fn came_up_without_us(
    desk: &Desk,
    node: &TestNode,
    name: &str,
    owner: Option<&Value>,
) -> (Sandbox, IpAddr) {
    let pod = sandbox(&desk.pod(name, &node.name, owner, json!({})).await);
    let address = anybodys(&desk.case, node).await;
    node.cilium().put_endpoint_of(&pod.container, address, &format!("{}/{name}", pod.namespace));
    (pod, address)
}

/// A node where Cilium picks, its agent, and the pod `db-0` of a set, which came up without us.
async fn with_a_running_pod(desk: &Desk) -> (TestNode, Stepped, Value, Sandbox, IpAddr) {
    let node = TestNode::ready_crd(&desk.case, "n1", desk.case.range()).await;
    let mut agent = Stepped::new(&desk.case, &node, "crd", FEW).await;
    agent.settle().await;
    let set = desk.stateful_set("db", 1).await;
    let (first, address) = came_up_without_us(desk, &node, "db-0", Some(&set)).await;
    (node, agent, set, first, address)
}

#[tokio::test]
async fn where_cilium_picks_an_adopted_pods_entry_gets_its_owner_and_the_next_pod_has_it() {
    for release in CiliumRelease::DIFFERENT {
        an_adopted_pods_entry_gets_its_owner(release).await;
    }
}

async fn an_adopted_pods_entry_gets_its_owner(release: CiliumRelease) {
    let desk = Desk::take().await;
    let (node, mut agent, set, first, address) = with_a_running_pod(&desk).await;
    node.cilium().be_release(release);
    let context = desk.context(FLAGS);
    let owner = format!("{}/db-0", first.namespace);
    while_at_work(&context, async {
        desk.runs("db-0", &address.to_string()).await;
        until(&desk, &mut agent, "the binding", async |desk| is_marked(desk, "db-0", &first.uid).await).await;
        let nodes = cilium_nodes(&desk.case).await;
        assert_eq!(owned(&nodes, &owner), [(node.name.clone(), address)]);
        assert_eq!(node.in_use(), [(address, first.container.clone())], "and the store knows its sandbox");
        // It lives: nothing of it is let go, however long one looks.
        agent.settle().await;
        assert!(is_marked(&desk, "db-0", &first.uid).await);
        // A DEL of an older sandbox of the same pod frees nothing.
        node.del(&Sandbox { container: "older".into(), ..first.clone() }).await;
        assert!(is_marked(&desk, "db-0", &first.uid).await);
        // Its own does.
        delete_pod(&desk.case, "db-0").await;
        node.del(&first).await;
        assert_eq!(attached(&stickies(&desk.case).await[0]), None);
        assert!(owned(&cilium_nodes(&desk.case).await, &owner).is_empty());
        let next = sandbox(&desk.pod("db-0", &node.name, Some(&set), json!({})).await);
        assert_eq!(node.add(&next).await.unwrap(), address);
        agent.settle().await;
        let claims = desk.claims().await;
        assert_eq!(claims[0].spec.pod, None, "the first pod is forgotten");
    })
    .await;
    assert_in_step(&desk.case, &[&node]).await;
}

#[tokio::test]
async fn where_the_store_knows_it_an_adopted_pods_record_outlives_its_del() {
    let desk = Desk::take().await;
    let node = TestNode::ready(&desk.case, "n1", desk.case.range()).await;
    let mut agent = Stepped::new(&desk.case, &node, "delegated", &[]).await;
    let set = desk.stateful_set("db", 1).await;
    let plain = desk.pod("db-0", &node.name, Some(&set), json!({"sticky-ipam.io/sticky": "false"})).await;
    agent.step().await;
    let first = sandbox(&plain);
    let address = node.add(&first).await.unwrap();
    assert!(desk.names().await.is_empty(), "it is not sticky");
    let context = desk.context(FLAGS);
    while_at_work(&context, async {
        desk.runs("db-0", &address.to_string()).await;
        make_sticky(&desk, "db-0").await;
        until(&desk, &mut agent, "the binding", async |desk| is_marked(desk, "db-0", &first.uid).await).await;
        assert!(node.check(&first).await.is_ok());
        agent.settle().await;
        delete_pod(&desk.case, "db-0").await;
        node.del(&first).await;
        assert_eq!(attached(&stickies(&desk.case).await[0]), None, "by the DEL, at once");
        assert!(node.in_use().is_empty());
        assert_eq!(node.store().address_files().unwrap().len(), 1, "kept for its next pod");
        let next = sandbox(&desk.pod("db-0", &node.name, Some(&set), json!({})).await);
        assert_eq!(node.add(&next).await.unwrap(), address);
        agent.settle().await;
    })
    .await;
    assert_in_step(&desk.case, &[&node]).await;
}

#[tokio::test]
async fn an_adopted_pod_that_ends_without_a_del_is_detached_once_cilium_released_it() {
    let desk = Desk::take().await;
    let (node, mut agent, _, first, address) = with_a_running_pod(&desk).await;
    let context = desk.context(FLAGS);
    while_at_work(&context, async {
        desk.runs("db-0", &address.to_string()).await;
        until(&desk, &mut agent, "the binding", async |desk| is_marked(desk, "db-0", &first.uid).await).await;
        delete_pod(&desk.case, "db-0").await;
        agent.settle().await;
        assert!(is_marked(&desk, "db-0", &first.uid).await, "Cilium still has its endpoint");
        node.cilium().end_endpoint(&first.container);
        until(&desk, &mut agent, "the detachment", async |desk| {
            attached(&stickies(&desk.case).await[0]).is_none()
        })
        .await;
        agent.settle().await;
    })
    .await;
    assert!(owned(&cilium_nodes(&desk.case).await, &format!("{}/db-0", first.namespace)).is_empty());
    assert!(node.pending_updates().is_empty() && node.in_use().is_empty());
    assert_in_step(&desk.case, &[&node]).await;
}

#[tokio::test]
async fn an_address_that_another_pod_has_is_refused_and_the_pod_gets_an_event() {
    for release in CiliumRelease::DIFFERENT {
        anothers_address_is_refused(release).await;
    }
}

async fn anothers_address_is_refused(release: CiliumRelease) {
    let desk = Desk::take().await;
    let [one, two, ..] = crate::support::agent::parts(&desk.case);
    let n1 = TestNode::ready_crd(&desk.case, "n1", one).await;
    n1.cilium().be_release(release);
    let n2 = TestNode::ready(&desk.case, "n2", two).await;
    let mut agents = [
        Stepped::new(&desk.case, &n1, "crd", FEW).await,
        Stepped::new(&desk.case, &n2, "delegated", &[]).await,
    ];
    agents[0].settle().await;
    let (other, of_another) = came_up_without_us(&desk, &n1, "other", None).await;
    delete_pod(&desk.case, "other").await;
    let plain = sandbox(&desk.case.pod("plain", &[], Some(&n2.name)).await);
    let stored = n2.add(&plain).await.unwrap();
    let context = desk.context(FLAGS);
    while_at_work(&context, async {
        for (pod, node, address, agent) in [("db-0", &n1, of_another, 0), ("db-1", &n2, stored, 1)] {
            desk.pod(pod, &node.name, None, json!({})).await;
            // The kubelet's word alone proves nothing.
            desk.runs(pod, &address.to_string()).await;
            until(&desk, &mut agents[agent], "the refusal", async |desk| {
                desk.told("AdoptionFailed").await.iter().any(|told| told.contains(&address.to_string()))
            })
            .await;
        }
    })
    .await;
    assert!(desk.names().await.is_empty());
    assert!(desk.claims().await.iter().all(|claim| claim.spec.phase == ClaimPhase::Refused));
    let pool = cilium_nodes(&desk.case).await.remove(0).spec.ipam.pool;
    assert!(pool.values().all(|entry| entry.owner.is_empty()), "{pool:?}");
    let told = desk.told("AdoptionFailed").await.join("; ");
    let holder = match release {
        CiliumRelease::V1_20 => format!("container {}, which is another pod's", other.container),
        _ => format!("{}/other", other.namespace),
    };
    assert!(
        told.contains(&format!("cilium-agent has it for {holder}")) && told.contains("/plain (container"),
        "{release:?}: {told}"
    );
}

fn deployment() -> Value {
    json!({"apiVersion": "test.example/v1", "kind": "Fleet", "name": "web", "uid": "f", "controller": true})
}

/// A running sticky pod of the Deployment, whose address came from Cilium (`crd`) or from the plugin before
/// it was sticky.
async fn runs_unmarked(desk: &Desk, node: &TestNode, name: &str) -> (Sandbox, IpAddr) {
    let owner = deployment();
    let (pod, address) = match node.cilium {
        Some(_) => came_up_without_us(desk, node, name, Some(&owner)).await,
        None => {
            let plain = json!({"sticky-ipam.io/sticky": "false"});
            let pod = sandbox(&desk.pod(name, &node.name, Some(&owner), plain).await);
            let address = node.add(&pod).await.unwrap();
            make_sticky(desk, name).await;
            (pod, address)
        }
    };
    desk.runs(name, &address.to_string()).await;
    (pod, address)
}

/// The addresses of the StickyIPs by the pods that they are attached to.
async fn by_pod(desk: &Desk) -> Vec<(String, Vec<IpAddr>)> {
    let of = |sticky: StickyIP| Some((attached(&sticky)?, sticky.spec.addresses));
    let mut all: Vec<_> = stickies(&desk.case).await.into_iter().filter_map(of).collect();
    all.sort();
    all
}

fn adopted(pods: &[(Sandbox, IpAddr)]) -> Vec<(String, Vec<IpAddr>)> {
    let mut all: Vec<_> =
        pods.iter().map(|(pod, address)| (format!("adopted-{}", pod.uid), vec![*address])).collect();
    all.sort();
    all
}

/// A node where Cilium picks and one whose store does, with their agents.
async fn two_nodes(desk: &Desk) -> ([TestNode; 2], [Stepped; 2]) {
    let [one, two, ..] = crate::support::agent::parts(&desk.case);
    let n1 = TestNode::ready_crd(&desk.case, "n1", one).await;
    let n2 = TestNode::ready(&desk.case, "n2", two).await;
    let mut agents = [
        Stepped::new(&desk.case, &n1, "crd", FEW).await,
        Stepped::new(&desk.case, &n2, "delegated", &[]).await,
    ];
    settle(&mut agents).await;
    ([n1, n2], agents)
}

async fn settle(agents: &mut [Stepped; 2]) {
    for agent in agents {
        agent.settle().await;
    }
}

#[tokio::test]
async fn pods_of_a_deployment_on_several_nodes_get_a_slot_each_with_their_own_addresses() {
    for two_on in [0, 1] {
        let desk = Desk::take().await;
        let (nodes, mut agents) = two_nodes(&desk).await;
        let mut pods = Vec::new();
        for (n, node) in [0, 1, two_on].into_iter().enumerate() {
            pods.push(runs_unmarked(&desk, &nodes[node], &format!("web-{n}x")).await);
        }
        // It finds all of them in its first round.
        let context = desk.context(FLAGS);
        while_at_work(&context, async {
            until_of(&desk, &mut agents, "three slots", async |desk| by_pod(desk).await.len() == 3).await;
            assert_eq!(by_pod(&desk).await, adopted(&pods));
            let mut names = desk.names().await;
            names.sort();
            assert_eq!(names, ["web-0", "web-1", "web-2"]);
            assert!(desk.told("AdoptionFailed").await.is_empty());
            settle(&mut agents).await;
        })
        .await;
        assert_in_step(&desk.case, &[&nodes[0], &nodes[1]]).await;
    }
}

#[tokio::test]
async fn a_pod_whose_slot_another_took_after_the_grant_gets_the_next_with_its_own_address() {
    for at in [0, 1] {
        let desk = Desk::take().await;
        let (nodes, mut agents) = two_nodes(&desk).await;
        let marked = runs_unmarked(&desk, &nodes[at], "web-x").await;
        let context = desk.context(FLAGS);
        while_at_work(&context, async {
            crate::support::controller::until("the request", || async { !desk.claims().await.is_empty() })
                .await;
        })
        .await;
        // Granted as web-0, and the controller is away.
        agents[at].settle().await;
        assert_eq!(desk.claims().await[0].spec.phase, ClaimPhase::Granted);
        let elsewhere = &nodes[1 - at];
        let new = sandbox(&desk.pod("web-y", &elsewhere.name, Some(&deployment()), json!({})).await);
        let its_own = elsewhere.add(&new).await.unwrap();
        assert_eq!(desk.names().await, ["web-0"]);
        let context = desk.context(FLAGS);
        while_at_work(&context, async {
            until_of(&desk, &mut agents, "the binding", async |desk| by_pod(desk).await.len() == 2).await;
            let mut expected = adopted(std::slice::from_ref(&marked));
            expected.push((new.container.clone(), vec![its_own]));
            expected.sort();
            assert_eq!(by_pod(&desk).await, expected);
            assert!(is_marked(&desk, "web-1", &marked.0.uid).await);
            settle(&mut agents).await;
        })
        .await;
        assert_in_step(&desk.case, &[&nodes[0], &nodes[1]]).await;
    }
}

#[tokio::test]
async fn a_slot_that_is_kept_with_another_address_is_passed_over() {
    let desk = Desk::take().await;
    let (nodes, mut agents) = two_nodes(&desk).await;
    let fleet = json!({"apiVersion": "test.example/v1", "kind": "Fleet", "name": "web"});
    let kept = json!({"claimant": {"kind": "Slot", "ordinal": 0}, "retention": {"keep": "Forever"}});
    desk.retained("web-0", "192.0.2.77", fleet, kept).await;
    let pod = runs_unmarked(&desk, &nodes[1], "web-x").await;
    let context = desk.context(FLAGS);
    while_at_work(&context, async {
        until_of(&desk, &mut agents, "the binding", async |desk| !by_pod(desk).await.is_empty()).await;
        assert_eq!(by_pod(&desk).await, adopted(&[pod]));
        assert_eq!(desk.names().await, ["web-0", "web-1"]);
    })
    .await;
}
