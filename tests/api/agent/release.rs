//! Addresses that were kept for a StickyIP and that it does not have any more: entry and record become
//! unowned together, and no pod gets one back while that is done.

use std::net::IpAddr;
use std::sync::{Arc, Mutex, mpsc};

use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use sticky_ipam::cluster::objects::ClaimPhase;
use sticky_ipam::cluster::objects::cilium::{CiliumNode, PoolEntry};
use sticky_ipam::cluster::writer::apply::{SentWrite, WriteObserver};
use sticky_ipam::names::{Attachment, AttachmentId, ContainerId, IfName, PodIdentity, StickyKey};
use sticky_ipam::policy::lifetime::retention::Retention;
use sticky_ipam::store::{ClaimantKey, NodeTime, Record, RecordState, StickyBinding};
use tokio::sync::oneshot;

use crate::support::agent::fill;
use crate::support::agent::{Stepped, ends_at, settings};
use crate::support::agent::{case, parts};
use crate::support::api_server::case::Case;
use crate::support::cilium::{anybodys, cilium_nodes, owned};
use crate::support::node::{TestNode, delete_pod, sandbox, stickies, sticky_pod};
use crate::support::running_pod::{FEW, LOOKS, answer, ask, claims, node_of, running};
use crate::support::workloads::deployed;

async fn pool_entry(case: &Case<'_>, node: &TestNode, address: IpAddr) -> Option<PoolEntry> {
    let nodes: Api<CiliumNode> = Api::all(case.client());
    nodes.get(&node.name).await.unwrap().spec.ipam.pool.get(&address.to_string()).cloned()
}

fn at(node: &TestNode, address: IpAddr) -> Option<Record> {
    node.store().lock().unwrap().find_by_address(address).unwrap().map(|stored| stored.record)
}

fn put(node: &TestNode, record: &Record) {
    let store = node.store();
    let mut locked = store.lock().unwrap();
    let old = locked.find_by_address(record.addresses[0]).unwrap();
    locked.put(record, old.as_ref()).unwrap();
    locked.commit().unwrap();
}

fn attachment(container: &str) -> Attachment {
    let interface = IfName::new("eth0").unwrap();
    Attachment { container: ContainerId::new(container).unwrap(), interface }
}

/// Longer ago than the agent waits between its two checks, which a test does not wait for: a record that is
/// written again differs by its time, in whole seconds.
fn long_ago(node: &TestNode) -> NodeTime {
    let now = node.store().now().clone();
    NodeTime::new(now.wall() - 60, 0, now.boot())
}

/// What is kept for a StickyIP that had these addresses, last with a pod that is gone.
fn kept(case: &Case<'_>, node: &TestNode, addresses: &[IpAddr], sticky: &str, pod: &str) -> Record {
    let claimant = ClaimantKey::new(case.namespace(), sticky, &attachment("old").interface);
    let pod = PodIdentity::new(case.namespace(), pod, Some("gone")).unwrap();
    Record::reserved(addresses.to_vec(), &claimant, Some(pod), &attachment("old"), &long_ago(node))
}

/// Unowned: Cilium may give it to any pod, and no record here keeps it.
async fn assert_unowned(case: &Case<'_>, node: &TestNode, address: IpAddr) {
    assert_eq!(pool_entry(case, node, address).await, Some(PoolEntry::default()), "{address}");
    assert!(at(node, address).is_some_and(|record| record.is_unowned()), "{:?}", at(node, address));
}

#[tokio::test]
async fn an_adoption_whose_pod_ended_before_it_was_granted_leaves_no_owner_behind() {
    let case = case().await;
    let node = node_of(&case, "crd", "n1", 0).await;
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    agent.settle().await;
    let (first, address) = running(&case, &node, "db-0").await;
    let owner = format!("{}/db-0", case.namespace());
    node.cilium().hold_back().await;
    ask(&case, &node, &first, address).await;
    agent.settle().await;
    assert_eq!(owned(&cilium_nodes(&case).await, &owner), [(node.name.clone(), address)]);
    // It ends, and its successor comes to the same node.
    delete_pod(&case, "db-0").await;
    node.del(&first).await;
    let next = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    agent.step().await;
    assert_eq!(owned(&cilium_nodes(&case).await, &owner).len(), 1, "its successor's alone");
    assert_unowned(&case, &node, address).await;
    node.cilium().catch_up();
    agent.settle().await;
    let its_own = node.add(&next).await.unwrap();
    assert_ne!(its_own, address);
    agent.settle().await;
    assert_eq!(owned(&cilium_nodes(&case).await, &owner), [(node.name.clone(), its_own)]);
    assert_unowned(&case, &node, address).await;
    let ordinary = sandbox(&case.pod("web", &[], Some(&node.name)).await);
    assert_ne!(node.add(&ordinary).await.unwrap(), its_own);
}

#[tokio::test]
async fn an_address_left_with_an_owner_is_unowned_again_wherever_the_agent_crashes() {
    let case = case().await;
    let node = node_of(&case, "crd", "n1", 0).await;
    let access = case.agent(&node.name).await;
    let settings = settings(&node, &access.kubeconfig(), "crd", FEW);
    let mut next = Stepped::by(&access, &node, "crd", FEW).await;
    next.settle().await;
    let mut pins = node.range().hosts().map(IpAddr::from).skip(20);
    for after in [false, true] {
        for number in 1.. {
            let name = format!("db-{after}-{number}");
            let owner = format!("{}/{name}", case.namespace());
            let (first, address) = running(&case, &node, &name).await;
            node.cilium().hold_back().await;
            ask(&case, &node, &first, address).await;
            next.settle().await;
            delete_pod(&case, &name).await;
            node.del(&first).await;
            // Its successor is pinned, and does not want what was asked for.
            claims(&case).delete(&address.to_string(), &Default::default()).await.unwrap();
            let pin = pins.next().unwrap();
            let pinned = json!({"sticky-ipam.io/ips": pin.to_string()});
            let pod = sandbox(&sticky_pod(&case, &name, &node.name, pinned).await);
            node.cilium().catch_up();
            // The old entry has the same owner, and Cilium gives it; the plugin would try until its time is
            // over.
            let _ = node.add(&pod).await;
            assert!(
                at(&node, address).is_some_and(|record| record.state == RecordState::Superseded),
                "else the test shows nothing"
            );
            let ended = ends_at(&settings, &access, LOOKS, number, after).await;
            next = next.anew();
            next.settle().await;
            assert_unowned(&case, &node, address).await;
            assert!(owned(&cilium_nodes(&case).await, &owner).iter().all(|(_, key)| *key == pin));
            delete_pod(&case, &name).await;
            node.del(&pod).await;
            next.settle().await;
            if !ended {
                assert!(number > 4, "only {number} writes were seen");
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_kept_address_that_cilium_may_have_given_out_is_not_taken_back() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let address = anybodys(&case, &node).await;
    // The agent ended between the entry and the record.
    put(&node, &kept(&case, &node, &[address], "db-0", "db-0"));
    let pod = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    assert_ne!(node.add(&pod).await.unwrap(), address);
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    agent.settle().await;
    assert_unowned(&case, &node, address).await;
}

#[tokio::test]
async fn no_entry_of_a_record_loses_its_owner_while_cilium_has_another_of_its_addresses() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    agent.settle().await;
    let hosts: Vec<IpAddr> = node.range().hosts().map(IpAddr::from).collect();
    let [shown, hidden] = [hosts[30], hosts[31]];
    let owner = format!("{}/db-0", case.namespace());
    let nodes: Api<CiliumNode> = Api::all(case.client());
    let pool = json!({"spec": {"ipam": {"pool": {shown.to_string(): {"owner": owner}}}}});
    nodes.patch(&node.name, &PatchParams::default(), &Patch::Merge(pool)).await.unwrap();
    let record = kept(&case, &node, &[shown, hidden], "db-0", "db-0");
    put(&node, &record);
    node.cilium().put_endpoint("another", hidden);
    agent.settle().await;
    assert_eq!(at(&node, shown), Some(record), "Cilium has an endpoint with {hidden}");
    assert_eq!(
        pool_entry(&case, &node, shown).await.unwrap().owner,
        owner,
        "a kept address beside an unowned entry"
    );
    node.cilium().end_endpoint("another");
    agent.settle().await;
    assert_unowned(&case, &node, shown).await;
    assert_eq!(at(&node, hidden), None);
}

#[tokio::test]
async fn a_record_without_sandbox_is_released_though_cilium_gave_its_address_to_another() {
    let case = case().await;
    let node = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
    let mut agent = Stepped::new(&case, &node, "crd", FEW).await;
    agent.settle().await;
    let address = anybodys(&case, &node).await;
    // The agent ended when it had written the record of a pod that had just released the address.
    let gone = PodIdentity::new(case.namespace(), "db-0", Some("gone")).unwrap();
    let binding = StickyBinding {
        key: StickyKey { namespace: case.namespace().to_owned(), name: "db-0".to_owned() },
        attachment_id: Some(AttachmentId::Adopted("gone".into())),
    };
    let record = Record {
        addresses: vec![address],
        attachment: attachment("gone"),
        state: RecordState::Attached,
        netns: None,
        pod: Some(gone),
        retention: Some(Retention::FOREVER),
        binding: Some(binding),
        since: node.store().now().clone(),
    };
    put(&node, &record);
    node.cilium().put_endpoint_of("stranger", address, "other/web");
    agent.settle().await;
    assert!(node.in_use().is_empty(), "{:?}", node.in_use());
    let next = sandbox(&sticky_pod(&case, "db-0", &node.name, json!({})).await);
    let its_own = node.add(&next).await.unwrap();
    assert_ne!(its_own, address);
    agent.settle().await;
    assert_unowned(&case, &node, address).await;
    assert_eq!(node.in_use(), [(its_own, next.container)]);
}

/// Halts a verb before its first write of the protocol until the test continues it.
struct Halt {
    arrived: Mutex<Option<oneshot::Sender<()>>>,
    go_on: Mutex<mpsc::Receiver<()>>,
}

impl WriteObserver for Halt {
    fn before(&self, _: usize, write: SentWrite<'_>) {
        let protocol = matches!(write, SentWrite::Protocol(_));
        if let Some(arrived) = self.arrived.lock().unwrap().take_if(|_| protocol) {
            arrived.send(()).unwrap();
            self.go_on.lock().unwrap().recv().unwrap();
        }
    }
}

#[tokio::test]
async fn what_an_add_takes_back_for_its_slot_is_not_freed_under_it() {
    for is_left in [false, true] {
        let case = case().await;
        let range = parts(&case)[0].subnets(29).unwrap().next().unwrap();
        let node = TestNode::ready(&case, "n1", range).await;
        let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
        let address = IpAddr::from(range.hosts().last().unwrap());
        // What an ended pod of the slot had, and what is not claimed.
        let record = kept(&case, &node, &[address], "web-0", "web-old");
        let claimant = ClaimantKey::new(case.namespace(), "web-0", &record.attachment.interface);
        put(
            &node,
            &match is_left {
                true => Record::superseded(address, &claimant, &record.attachment, &long_ago(&node)),
                false => record,
            },
        );
        assert!(!fill(&case, &node, "first").await.contains(&address));
        agent.step().await;
        agent.later();
        let pod = deployed(&case, "web-new", &node.name).await;
        if is_left {
            let pin = json!({"metadata": {"annotations": {"sticky-ipam.io/ips": address.to_string()}}});
            let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(case.client(), case.namespace());
            pods.patch("web-new", &PatchParams::default(), &Patch::Merge(pin)).await.unwrap();
        }
        let (arrived, comes) = oneshot::channel();
        let (go_on, continued) = mpsc::channel();
        let halt = Arc::new(Halt { arrived: Mutex::new(Some(arrived)), go_on: Mutex::new(continued) });
        let add = {
            let pod = sandbox(&pod);
            let node = &node;
            async move { node.add_before(&pod, halt).await.unwrap() }
        };
        let meanwhile = async {
            comes.await.expect("the ADD writes nothing");
            agent.step().await;
            let given = fill(&case, &node, "second").await;
            go_on.send(()).unwrap();
            given
        };
        let (added, given) = tokio::join!(add, meanwhile);
        assert_eq!(given, [] as [IpAddr; 0], "left: {is_left}");
        assert_eq!(added.unwrap(), address, "left: {is_left}");
        assert_eq!(stickies(&case).await[0].spec.addresses, [address]);
        assert_eq!(answer(&case, address).await.0, ClaimPhase::Bound);
    }
}
