//! Node blocks on a real API server: given once, whoever else gives, wherever a controller ends; returned
//! with a proof.

mod conflicts;

use std::time::{Duration, Instant};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Node};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::cluster::objects::{AddressClaim, IPPool};
use sticky_ipam::controller::duties::node_blocks::NodeBlocks;
use sticky_ipam::controller::duty::Duty;
use sticky_ipam::policy::mode::BlockLocation;
use sticky_ipam::policy::node_blocks::BlockLimits;
use sticky_ipam::runtime::cache::CacheEvent;

use crate::support::api_server::case::Case;
use crate::support::duty::{
    Desk, EndControllerAt, apply, bare_node, case, cilium_node, claim, locks, node, pool, ranges, remove_node,
};
use crate::support::node::ended_by_the_witness;

/// Nobody waits.
const HURRIED: BlockLimits = BlockLimits { low: 4, most: 8, quarantine: 0 };
/// Longer than any rest here.
const PATIENCE: Duration = Duration::from_secs(60);
/// More rounds than anything here needs.
const MOST_ROUNDS: usize = 20;

fn duty(case: &Case<'_>, place: BlockLocation) -> NodeBlocks {
    NodeBlocks::new(place, case.namespace(), HURRIED)
}

/// Rounds until nothing is left to do.
async fn settle(desk: &Desk<'_>, blocks: &mut NodeBlocks) {
    for _ in 0..MOST_ROUNDS {
        desk.look().await;
        let before = desk.context.writer.count();
        let done = blocks.round(&desk.context, Vec::new()).await;
        assert_eq!(done.failures, 0);
        if desk.context.writer.count() == before {
            return;
        }
    }
    panic!("it does not come to rest");
}

async fn given(case: &Case<'_>) {
    let desk = Desk::new(case, &[]).await;
    settle(&desk, &mut duty(case, BlockLocation::CiliumNode)).await;
}

/// The sixteen /28 of the test's range.
fn block(case: &Case<'_>, number: usize) -> String {
    case.range().subnets(28).unwrap().nth(number).unwrap().to_string()
}

fn blocks_of(case: &Case<'_>) -> Value {
    json!({"cidrs": [case.range().to_string()], "use": "NodeBlocks", "blockSize": {"ipv4": 28}})
}

/// No address is with two nodes, every block that stands is locked for its node, and every lock's block
/// stands.
async fn assert_in_step(case: &Case<'_>, nodes: usize) {
    let ranges = ranges(case).await;
    let all: Vec<(ipnet::IpNet, &str)> = ranges
        .iter()
        .flat_map(|(node, list)| list.iter().map(move |text| (text.parse().unwrap(), node.as_str())))
        .collect();
    for (n, (a, one)) in all.iter().enumerate() {
        for (b, other) in &all[n + 1..] {
            assert!(!a.contains(b) && !b.contains(a), "{a} of {one} and {b} of {other}");
        }
    }
    assert_eq!(ranges.iter().filter(|(_, list)| !list.is_empty()).count(), nodes);
    let mut locked = locks(case).await;
    let mut standing: Vec<(String, String)> =
        all.iter().map(|(net, node)| (net.to_string().replace('/', "-"), (*node).to_owned())).collect();
    locked.sort();
    standing.sort();
    assert_eq!(locked, standing);
}

#[tokio::test]
async fn every_node_gets_a_block_of_its_pool_and_keeps_what_others_wrote() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    let away = format!("{}/32", case.range().hosts().last().unwrap());
    let first = node(&case, "a", json!({}), &[&away]).await;
    let second = node(&case, "b", json!({}), &[]).await;
    given(&case).await;
    let expected = [(first, vec![away, block(&case, 0)]), (second, vec![block(&case, 1)])];
    assert_eq!(ranges(&case).await, expected);
    // 16 blocks; the moved address takes one.
    let pools: Api<IPPool> = Api::all(case.client());
    let status = pools.get(&case.unique("p")).await.unwrap().status.unwrap();
    assert_eq!((status.allocated, status.total), (Some(2), Some(16)));
    assert_eq!((status.conditions[0].kind.as_str(), status.conditions[0].status.as_str()), ("Ready", "True"));
    let events: Api<Event> = Api::namespaced(case.client(), "default");
    let told = events.list(&ListParams::default()).await.unwrap();
    let about = |event: &&Event| event.involved_object.name.as_deref() == Some(case.unique("b").as_str());
    assert_eq!(told.items.iter().find(about).unwrap().reason.as_deref(), Some("BlockAssigned"));
}

#[tokio::test]
async fn wherever_a_controller_ends_no_block_is_lost_or_given_twice() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    for after in [false, true] {
        let mut number = 1;
        loop {
            // Two that are there, one that goes.
            let gone = node(&case, &format!("gone-{after}-{number}"), json!({}), &[]).await;
            given(&case).await;
            remove_node(&case, &gone).await;
            let new = [
                node(&case, &format!("x-{after}-{number}"), json!({}), &[]).await,
                node(&case, &format!("y-{after}-{number}"), json!({}), &[]).await,
            ];
            let desk = Desk::watched(&case, &[], EndControllerAt::boxed(number, after)).await;
            let mut blocks = duty(&case, BlockLocation::CiliumNode);
            let ended = ended_by_the_witness(settle(&desk, &mut blocks)).await;
            given(&case).await;
            assert_in_step(&case, 2).await;
            for name in &new {
                remove_node(&case, name).await;
            }
            given(&case).await;
            assert_in_step(&case, 0).await;
            if !ended {
                break;
            }
            number += 1;
        }
        // Two locks and two writes on nodes with an event each, one lock that goes, two writes of the pool's
        // status at least.
        assert!(number > 7, "{number}");
    }
}

#[tokio::test]
async fn two_controllers_at_once_never_give_one_block_twice() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    for round in 0..4 {
        let mut names = Vec::new();
        for n in 0..3 {
            names.push(node(&case, &format!("n{n}-{round}"), json!({}), &[]).await);
        }
        let (one, other) = (Desk::new(&case, &[]).await, Desk::new(&case, &[]).await);
        one.look().await;
        for n in 3..6 {
            names.push(node(&case, &format!("n{n}-{round}"), json!({}), &[]).await);
        }
        other.look().await;
        // Neither has seen the other's nodes: both want the same lowest blocks, for different nodes.
        for name in &names[..3] {
            other.context.index().nodes.apply(CacheEvent::Deleted(name.clone()));
            other.context.index().cilium_nodes.apply(CacheEvent::Deleted(name.clone()));
        }
        let (mut first, mut second) =
            (duty(&case, BlockLocation::CiliumNode), duty(&case, BlockLocation::CiliumNode));
        tokio::join!(first.round(&one.context, Vec::new()), second.round(&other.context, Vec::new()));
        tokio::join!(settle(&one, &mut first), settle(&other, &mut second));
        given(&case).await;
        assert_in_step(&case, 6).await;
        for name in names {
            remove_node(&case, &name).await;
        }
        // One gives back while the other, which has seen nothing of it, still believes in the nodes.
        tokio::join!(settle(&one, &mut first), second.round(&other.context, Vec::new()));
        given(&case).await;
        assert_in_step(&case, 0).await;
    }
}

#[tokio::test]
async fn a_controller_that_looked_long_ago_writes_nothing_wrong() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    let first = node(&case, "a", json!({}), &[]).await;
    let stale = Desk::new(&case, &[]).await;
    stale.look().await;
    // Meanwhile another gave the block, the node went, and its block is another's.
    given(&case).await;
    remove_node(&case, &first).await;
    given(&case).await;
    let second = node(&case, "b", json!({}), &[]).await;
    given(&case).await;
    assert_eq!(ranges(&case).await, [(second, vec![block(&case, 0)])]);
    node(&case, "a", json!({}), &[]).await;
    let mut blocks = duty(&case, BlockLocation::CiliumNode);
    blocks.round(&stale.context, Vec::new()).await;
    given(&case).await;
    assert_in_step(&case, 2).await;
}

#[tokio::test]
async fn sizes_that_differ_between_two_controllers_never_overlap() {
    let case = case().await;
    let large = json!({"cidrs": [case.range().to_string()], "use": "NodeBlocks", "blockSize": {"ipv4": 26}});
    pool(&case, "p", large).await;
    let names = [node(&case, "a", json!({}), &[]).await, node(&case, "b", json!({}), &[]).await];
    let old = Desk::new(&case, &[]).await;
    old.look().await;
    pool(&case, "p", blocks_of(&case)).await;
    let new = Desk::new(&case, &[]).await;
    new.look().await;
    let (mut first, mut second) =
        (duty(&case, BlockLocation::CiliumNode), duty(&case, BlockLocation::CiliumNode));
    tokio::join!(first.round(&old.context, Vec::new()), second.round(&new.context, Vec::new()));
    given(&case).await;
    assert_in_step(&case, names.len()).await;
}

#[tokio::test]
async fn a_block_returns_only_when_its_node_is_gone_and_nothing_is_kept_in_it() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    let name = node(&case, "a", json!({}), &[]).await;
    given(&case).await;
    let address = case.range().hosts().nth(4).unwrap().to_string();
    claim(&case, &address, &name, &block(&case, 0)).await;
    let nodes: Api<Node> = Api::all(case.client());
    nodes.delete(&name, &DeleteParams::default()).await.unwrap();
    given(&case).await;
    assert_eq!(locks(&case).await.len(), 1, "its CiliumNode still stands");
    let cilium: Api<CiliumNode> = Api::all(case.client());
    cilium.delete(&name, &DeleteParams::default()).await.unwrap();
    given(&case).await;
    assert_eq!(locks(&case).await.len(), 1, "an address of it is kept");
    // It comes again under its name: what is kept is at home again.
    node(&case, "a", json!({}), &[]).await;
    let other = node(&case, "b", json!({}), &[]).await;
    given(&case).await;
    let expected = [(name.clone(), vec![block(&case, 0)]), (other.clone(), vec![block(&case, 1)])];
    assert_eq!(ranges(&case).await, expected);
    let claims: Api<AddressClaim> = Api::all(case.client());
    claims.delete(&address, &DeleteParams::default()).await.unwrap();
    remove_node(&case, &name).await;
    given(&case).await;
    let label = block(&case, 1).replace('/', "-");
    assert_eq!(locks(&case).await, [(label, other)]);
    let events: Api<Event> = Api::namespaced(case.client(), "default");
    let told = events.list(&ListParams::default()).await.unwrap();
    let of_pool = |event: &&Event| event.involved_object.name.as_deref() == Some(case.unique("p").as_str());
    let returned =
        told.items.iter().filter(of_pool).find(|event| event.reason.as_deref() == Some("BlockReleased"));
    let message = returned.unwrap().message.as_deref().unwrap();
    assert!(message.contains(&block(&case, 0)) && message.contains(&name), "{message}");
}

#[tokio::test]
async fn a_block_is_free_after_its_quarantine_though_every_round_has_other_steps() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    let (gone, busy) = (node(&case, "a", json!({}), &[]).await, node(&case, "b", json!({}), &[]).await);
    given(&case).await;
    remove_node(&case, &gone).await;
    let desk = Desk::new(&case, &[]).await;
    let limits = BlockLimits { quarantine: 1, ..HURRIED };
    let mut blocks = NodeBlocks::new(BlockLocation::CiliumNode, case.namespace(), limits);
    let deadline = Instant::now() + PATIENCE;
    while locks(&case).await.iter().any(|(_, node)| *node == gone) {
        assert!(Instant::now() < deadline, "the block of a node that is gone does not come back");
        // Somebody writes its object anew, so its block is written on it again.
        cilium_node(&case, &busy, &[]).await;
        desk.look().await;
        assert_eq!(blocks.round(&desk.context, Vec::new()).await.failures, 0);
        assert_eq!(ranges(&case).await, [(busy.clone(), vec![block(&case, 1)])], "a step in every round");
    }
}

/// A Lease named as the lock on a block, made by hand.
async fn lease_by_hand(case: &Case<'_>, namespace: &str, block: &str, spec: Value) -> String {
    let name = format!("sticky-ipam-block-{}", block.replace('/', "-"));
    let object = json!({"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}, "spec": spec});
    apply::<Lease>(Api::namespaced(case.client(), namespace), object).await;
    name
}

#[tokio::test]
async fn a_lease_that_cannot_be_read_keeps_its_block_is_reported_and_blocks_no_node() {
    let case = case().await;
    let stands = block(&case, 1);
    let first = node(&case, "a", json!({}), &[]).await;
    let second = node(&case, "b", json!({}), &[&stands]).await;
    pool(&case, "p", blocks_of(&case)).await;
    let flags = ["--block-min-free=4", &format!("--block-namespace={}", case.block_namespace())];
    let desk = Desk::as_shipped(&case, &flags).await;
    let mut torn = Vec::new();
    for block in [&block(&case, 0), &stands] {
        torn.push(lease_by_hand(&case, &case.block_namespace(), block, json!({})).await);
    }
    settle(&desk, &mut NodeBlocks::from_context(&desk.context).unwrap()).await;
    assert_eq!(ranges(&case).await, [(first, vec![block(&case, 2)]), (second, vec![stands])]);
    let events: Api<Event> = Api::namespaced(case.client(), &case.block_namespace());
    let told = events.list(&ListParams::default()).await.unwrap().items;
    assert_eq!(told.len(), torn.len());
    for name in &torn {
        let about = |event: &&Event| event.involved_object.name.as_ref() == Some(name);
        let event = told.iter().find(about).unwrap();
        assert_eq!(event.reason.as_deref(), Some("Unreadable"));
        let message = event.message.clone().unwrap();
        assert!(message.contains(name) && message.contains("corrected or deleted"), "{message}");
    }
    assert!(desk.context.metrics.page().contains(r#"block_problems{reason="Unreadable"} 2"#));
    // As the event says: what nobody has is free then, and what stands on a node gets its lock.
    let leases: Api<Lease> = Api::namespaced(case.client(), &case.block_namespace());
    for name in &torn {
        leases.delete(name, &DeleteParams::default()).await.unwrap();
    }
    let third = node(&case, "c", json!({}), &[]).await;
    settle(&desk, &mut NodeBlocks::from_context(&desk.context).unwrap()).await;
    assert!(ranges(&case).await.contains(&(third, vec![block(&case, 0)])));
    assert_eq!(leases.list(&ListParams::default()).await.unwrap().items.len(), 3);
}

#[tokio::test]
async fn a_lease_without_label_and_annotations_is_a_lock_by_its_name_and_is_released() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    let back = node(&case, "back", json!({}), &[]).await;
    for (number, holder) in [(0, case.unique("gone")), (3, back.clone())] {
        lease_by_hand(&case, case.namespace(), &block(&case, number), json!({"holderIdentity": holder}))
            .await;
    }
    let new = node(&case, "new", json!({}), &[]).await;
    given(&case).await;
    assert_eq!(ranges(&case).await, [(back, vec![block(&case, 3)]), (new, vec![block(&case, 1)])]);
    let leases: Api<Lease> = Api::namespaced(case.client(), case.namespace());
    assert_eq!(leases.list(&ListParams::default()).await.unwrap().items.len(), 2, "one was given back");
}

#[tokio::test]
async fn a_pool_that_is_gone_is_not_counted_any_more() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    let desk = Desk::new(&case, &[]).await;
    let mut blocks = duty(&case, BlockLocation::CiliumNode);
    settle(&desk, &mut blocks).await;
    let counted = |what: &str| {
        let line = format!("sticky_ipam_controller_{what}{{pool=\"{}\"}}", case.unique("p"));
        desk.context.metrics.page().contains(&line)
    };
    assert!(counted("blocks") && counted("blocks_allocated"));
    let pools: Api<IPPool> = Api::all(case.client());
    pools.delete(&case.unique("p"), &DeleteParams::default()).await.unwrap();
    settle(&desk, &mut blocks).await;
    assert!(!counted("blocks") && !counted("blocks_allocated"));
}

#[tokio::test]
async fn a_claim_that_the_watch_has_not_shown_keeps_the_block() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    let name = node(&case, "a", json!({}), &[]).await;
    given(&case).await;
    remove_node(&case, &name).await;
    let desk = Desk::new(&case, &[]).await;
    desk.look().await;
    claim(&case, &case.range().hosts().nth(4).unwrap().to_string(), &name, &block(&case, 0)).await;
    duty(&case, BlockLocation::CiliumNode).round(&desk.context, Vec::new()).await;
    assert_eq!(locks(&case).await.len(), 1);
    // And a node that it has not shown.
    let desk = Desk::new(&case, &[]).await;
    desk.look().await;
    *desk.context.index() = {
        let mut index = std::mem::take(&mut *desk.context.index());
        index.claims = Default::default();
        index.claims.apply(CacheEvent::ListComplete);
        index
    };
    let claims: Api<AddressClaim> = Api::all(case.client());
    claims.delete(&case.range().hosts().nth(4).unwrap().to_string(), &DeleteParams::default()).await.unwrap();
    node(&case, "a", json!({}), &[]).await;
    duty(&case, BlockLocation::CiliumNode).round(&desk.context, Vec::new()).await;
    assert_eq!(locks(&case).await.len(), 1);
}

#[tokio::test]
async fn pools_are_chosen_by_label_and_priority_and_the_next_takes_over() {
    let case = case().await;
    let parts: Vec<String> = case.range().subnets(26).unwrap().map(|net| net.to_string()).collect();
    let of = |part: &str, priority: i32| json!({"cidrs": [part], "use": "NodeBlocks", "blockSize": {"ipv4": 27}, "priority": priority});
    let mut ssd = of(&parts[0], 5);
    ssd["nodeSelector"] = json!({"matchLabels": {"disk": "ssd"}});
    pool(&case, "ssd", ssd).await;
    let mut all = of(&parts[1], 0);
    all["excluded"] = json!([case.range().subnets(27).unwrap().nth(2).unwrap().to_string()]);
    pool(&case, "all", all).await;
    for name in ["s1", "s2", "s3", "s4"] {
        node(&case, name, json!({"disk": "ssd"}), &[]).await;
    }
    given(&case).await;
    let nth = |n: usize| case.range().subnets(27).unwrap().nth(n).unwrap().to_string();
    let listed: Vec<Vec<String>> = ranges(&case).await.into_iter().map(|(_, list)| list).collect();
    assert_eq!(listed, [vec![nth(0)], vec![nth(1)], vec![nth(3)], vec![]]);
    let pools: Api<IPPool> = Api::all(case.client());
    let ready = pools.get(&case.unique("all")).await.unwrap().status.unwrap().conditions[0].clone();
    assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("False", "Full"));
    // A pool that overlaps an older one is not used, and says so.
    pool(&case, "young", of(&case.range().to_string(), 9)).await;
    given(&case).await;
    let young = pools.get(&case.unique("young")).await.unwrap().status.unwrap();
    assert_eq!(young.conditions[0].reason, "Overlaps");
    assert_eq!(ranges(&case).await.iter().filter(|(_, list)| list.is_empty()).count(), 1);
}

#[tokio::test]
async fn a_node_that_gets_no_block_has_an_event_with_the_reason_and_is_counted() {
    let case = case().await;
    let part = case.range().subnets(28).unwrap().next().unwrap().to_string();
    let mut one = json!({"cidrs": [part], "use": "NodeBlocks", "blockSize": {"ipv4": 28}});
    one["nodeSelector"] = json!({"matchLabels": {"disk": "ssd"}});
    pool(&case, "one", one).await;
    let ssd = json!({"disk": "ssd"});
    let first = node(&case, "first", ssd.clone(), &[&part]).await;
    let late = node(&case, "late", ssd.clone(), &[]).await;
    let other = node(&case, "other", json!({}), &[]).await;
    let desk = Desk::new(&case, &["--cluster-pool-ipv4-cidr="]).await;
    settle(&desk, &mut duty(&case, BlockLocation::CiliumNode)).await;
    // A second node says that it has what the first one has.
    let rival = node(&case, "rival", ssd, &[&part]).await;
    settle(&desk, &mut duty(&case, BlockLocation::CiliumNode)).await;
    let events: Api<Event> = Api::namespaced(case.client(), "default");
    let told = events.list(&ListParams::default()).await.unwrap().items;
    let told = |node: &str, reason: &str| {
        told.iter().any(|event| {
            event.involved_object.name.as_deref() == Some(node) && event.reason.as_deref() == Some(reason)
        })
    };
    assert!(told(&late, "PoolsFull") && told(&other, "NoPoolForNode"));
    assert!(told(&first, "BlockContested") || told(&rival, "BlockContested"));
    let page = desk.context.metrics.page();
    for reason in ["PoolsFull", "NoPoolForNode", "BlockContested"] {
        let line = format!("sticky_ipam_controller_block_problems{{reason=\"{reason}\"}} 1");
        assert!(page.contains(&line), "{line}: {page}");
    }
}

#[tokio::test]
async fn a_sticky_pool_over_a_nodes_block_is_refused_until_it_leaves_the_block_out() {
    let case = case().await;
    let taken = block(&case, 9);
    let name = node(&case, "n9", json!({}), &[&taken]).await;
    let mut sticky = json!({"cidrs": [case.range().to_string()], "use": "Sticky",
                            "nodeSelector": {"matchLabels": {"case": case.namespace()}}});
    pool(&case, "over", sticky.clone()).await;
    given(&case).await;
    let pools: Api<IPPool> = Api::all(case.client());
    let ready = async || pools.get(&case.unique("over")).await.unwrap().status.unwrap().conditions[0].clone();
    let refused = ready().await;
    assert_eq!((refused.status.as_str(), refused.reason.as_str()), ("False", "OverlapsBlock"));
    for part in [&case.unique("over"), &case.range().to_string(), &name, &taken] {
        assert!(refused.message.contains(part), "{part}: {}", refused.message);
    }
    let events: Api<Event> = Api::namespaced(case.client(), "default");
    let told = events.list(&ListParams::default()).await.unwrap();
    let about = |event: &&Event| event.involved_object.name.as_deref() == Some(case.unique("over").as_str());
    assert_eq!(told.items.iter().find(about).unwrap().reason.as_deref(), Some("OverlapsBlock"));
    sticky["excluded"] = json!([taken]);
    pool(&case, "over", sticky).await;
    given(&case).await;
    assert_eq!(ready().await.status, "True");
}

#[tokio::test]
async fn a_pool_whose_selector_cannot_be_read_is_not_used_and_says_why() {
    let case = case().await;
    let near = json!({"matchExpressions": [{"key": "disk", "operator": "Near", "values": ["ssd"]}]});
    let odd = json!({"cidrs": [case.range().to_string()], "use": "NodeBlocks", "blockSize": {"ipv4": 27}, "nodeSelector": near});
    pool(&case, "odd", odd).await;
    node(&case, "a", json!({"disk": "ssd"}), &[]).await;
    given(&case).await;
    assert!(ranges(&case).await.iter().all(|(_, list)| list.is_empty()));
    let pools: Api<IPPool> = Api::all(case.client());
    let ready = pools.get(&case.unique("odd")).await.unwrap().status.unwrap().conditions[0].clone();
    assert_eq!((ready.status.as_str(), ready.reason.as_str()), ("False", "Unreadable"));
    assert!(ready.message.contains("Near") && ready.message.contains("disk"), "{}", ready.message);
}

#[tokio::test]
async fn a_node_that_runs_low_gets_another_block() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    let name = node(&case, "a", json!({}), &[]).await;
    given(&case).await;
    // 13 usable of 16; with 10 in use fewer than four are left.
    for address in case.range().hosts().take(10) {
        claim(&case, &address.to_string(), &name, &block(&case, 0)).await;
    }
    given(&case).await;
    assert_eq!(ranges(&case).await, [(name, vec![block(&case, 0), block(&case, 1)])]);
}

#[tokio::test]
async fn in_kubernetes_mode_both_annotations_of_the_node_say_its_block() {
    let case = case().await;
    let mut both = blocks_of(&case);
    both["cidrs"] = json!([case.range().to_string(), "fd77::/64"]);
    pool(&case, "p", both).await;
    let name = case.unique("a");
    bare_node(&case, &name, json!({}), json!({})).await;
    let said = case.unique("b");
    bare_node(&case, &said, json!({}), json!({"podCIDR": block(&case, 0), "podCIDRs": [block(&case, 0)]}))
        .await;
    let desk = Desk::new(&case, &["--cilium-ipam=kubernetes"]).await;
    settle(&desk, &mut duty(&case, BlockLocation::Annotations)).await;
    let nodes: Api<Node> = Api::all(case.client());
    let annotations = nodes.get(&name).await.unwrap().annotations().clone();
    for key in ["network.cilium.io/ipv4-pod-cidr", "io.cilium.network.ipv4-pod-cidr"] {
        assert_eq!(annotations[key], block(&case, 1));
    }
    for key in ["network.cilium.io/ipv6-pod-cidr", "io.cilium.network.ipv6-pod-cidr"] {
        assert_eq!(annotations[key], "fd77::/112");
    }
    let kept = nodes.get(&said).await.unwrap().annotations().clone();
    assert!(!kept.contains_key("network.cilium.io/ipv4-pod-cidr"), "the Node says it itself: {kept:?}");
    assert_eq!(kept["network.cilium.io/ipv6-pod-cidr"], "fd77::1:0/112");
}

#[tokio::test]
async fn a_thousand_nodes_get_their_blocks_and_then_nothing_is_written() {
    let case = case().await;
    let names: Vec<String> = (0..1000).map(|n| case.unique(&format!("many-{n:04}"))).collect();
    for chunk in names.chunks(50) {
        let made = chunk.iter().map(|name| async {
            bare_node(&case, name, json!({}), json!({})).await;
            cilium_node(&case, name, &[]).await;
        });
        futures(made).await;
    }
    let flags = ["--cluster-pool-ipv4-cidr=100.64.0.0/10", "--cluster-pool-ipv4-mask-size=24"];
    let desk = Desk::new(&case, &flags).await;
    let mut blocks = duty(&case, BlockLocation::CiliumNode);
    settle(&desk, &mut blocks).await;
    let all = ranges(&case).await;
    let distinct: std::collections::BTreeSet<&String> = all.iter().flat_map(|(_, list)| list).collect();
    assert_eq!((all.len(), distinct.len()), (1000, 1000));
    let before = desk.context.writer.count();
    blocks.round(&desk.context, Vec::new()).await;
    assert_eq!(desk.context.writer.count(), before);
    for chunk in names.chunks(50) {
        futures(chunk.iter().map(|name| remove_node(&case, name))).await;
    }
}

#[tokio::test]
async fn with_the_shipped_roles_a_missing_namespace_of_locks_is_no_lost_race() {
    let case = case().await;
    pool(&case, "p", blocks_of(&case)).await;
    node(&case, "a", json!({}), &[]).await;
    let lost = Desk::new(&case, &["--block-namespace=nowhere"]).await;
    lost.look().await;
    assert_eq!(
        NodeBlocks::from_context(&lost.context).unwrap().round(&lost.context, Vec::new()).await.failures,
        1
    );
    let flags = ["--block-min-free=4", &format!("--block-namespace={}", case.block_namespace())];
    let desk = Desk::as_shipped(&case, &flags).await;
    settle(&desk, &mut NodeBlocks::from_context(&desk.context).unwrap()).await;
    let leases: Api<Lease> = Api::namespaced(case.client(), &case.block_namespace());
    assert_eq!(leases.list(&ListParams::default()).await.unwrap().items.len(), 1);
    assert!(locks(&case).await.is_empty(), "none beside the election's");
    assert_eq!(ranges(&case).await[0].1, [block(&case, 0)]);
}

/// All at once.
async fn futures<F: Future<Output = ()>>(all: impl Iterator<Item = F>) {
    let mut all: Vec<_> = all.map(Box::pin).collect();
    std::future::poll_fn(|context| {
        all.retain_mut(|one| one.as_mut().poll(context).is_pending());
        if all.is_empty() { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
}

#[tokio::test]
async fn the_flags_pool_gives_ipv6_blocks_of_its_size_and_none_without_ipv6() {
    let case = case().await;
    let name = node(&case, "a", json!({}), &[]).await;
    let flags = [
        &format!("--cluster-pool-ipv4-cidr={}", case.range()),
        "--cluster-pool-ipv4-mask-size=28",
        "--cluster-pool-ipv6-cidr=fd00:52::/104",
        "--cluster-pool-ipv6-mask-size=120",
    ];
    let without = Desk::new(&case, &flags).await;
    settle(&without, &mut duty(&case, BlockLocation::CiliumNode)).await;
    assert_eq!(ranges(&case).await, [(name.clone(), vec![block(&case, 0)])]);
    let both = Desk::new(&case, &[&flags[..], &["--enable-ipv6=true"]].concat()).await;
    settle(&both, &mut duty(&case, BlockLocation::CiliumNode)).await;
    assert_eq!(ranges(&case).await, [(name, vec![block(&case, 0), "fd00:52::/120".to_owned()])]);
}
