//! An API server that goes away in the middle of a first ADD, at every write of it, and comes back; and one
//! that answers with errors.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::json;
use sticky_ipam::cluster::writer::apply::{SentWrite, WriteObserver};

use crate::support::agent::Stepped;
use crate::support::agent::{case, parts};
use crate::support::api_server::Weather;
use crate::support::api_server::access::Access;
use crate::support::api_server::case::Case;
use crate::support::api_server::front::Trouble;
use crate::support::api_server::proxy::Proxy;
use crate::support::cilium::assert_shown;
use crate::support::node::{
    Sandbox, TestNode, assert_in_step, delete_pod, sandbox, stickies, sticky_pod, sticky_pool,
};
use crate::support::repair::mend;

/// Turns the weather right before the n-th write.
struct Turns {
    proxy: Arc<Proxy>,
    weather: Weather,
    at: usize,
    seen: AtomicUsize,
}

impl WriteObserver for Turns {
    fn before(&self, number: usize, _: SentWrite<'_>) {
        self.seen.store(number, Ordering::SeqCst);
        if number == self.at {
            self.proxy.set(self.weather);
        }
    }
}

/// How the server goes away, and whether it is back when the runtime's DEL comes.
const OUTAGES: [(Weather, bool); 4] = [
    (Weather::Reset, true),
    (Weather::Reset, false),
    // The write is done, and nobody hears of it.
    (Weather::AnswersLost, true),
    // The write is done when the server is back, and the writer is gone by then.
    (Weather::Blackhole, true),
];

/// Other credentials of the node's plugin.
async fn plugin_of(case: &Case<'_>, node: &TestNode) -> Access {
    let bound = case.bound_to(&node.name).await;
    case.token(&format!("plugin-{}", node.name), Some(bound)).await
}

async fn a_server_that_goes_away(mode: &str, pool: bool) {
    let case = case().await;
    let [block, _, sticky, _] = parts(&case);
    if pool {
        sticky_pool(&case, sticky).await;
    }
    let mut node = match mode {
        "crd" => TestNode::ready_crd(&case, "n1", block).await,
        _ => TestNode::ready(&case, "n1", block).await,
    };
    let mut agent =
        Stepped::new(&case, &node, mode, &["--ip-rate-num", "3", "--max-allocated-ip", "8"]).await;
    agent.settle().await;
    let proxy = Arc::new(case.proxy());
    node.by(&plugin_of(&case, &node).await.through(&proxy));
    for (weather, back_for_del) in OUTAGES {
        // A blackhole ends with the plugin's timeout: short, and longer where the machine is too busy for it.
        let mut timeouts = ["500ms", "2s", "8s"].into_iter();
        let mut timeout = if weather == Weather::Blackhole { timeouts.next().unwrap() } else { "20s" };
        let mut at = 1;
        loop {
            let what = format!("{weather:?} at write {at}, back for the DEL: {back_for_del}");
            let name = format!("{weather:?}-{back_for_del}-{timeout}-{at}").to_lowercase();
            let dead = sandbox(&sticky_pod(&case, &name, &node.name, json!({})).await);
            let turns = Arc::new(Turns { proxy: Arc::clone(&proxy), weather, at, seen: AtomicUsize::new(0) });
            node.timeout(timeout);
            let answer = node.add_before(&dead, turns.clone()).await.unwrap();
            let reached = turns.seen.load(Ordering::SeqCst) >= at;
            node.timeout("20s");
            if reached {
                let error = answer.unwrap_err();
                assert_eq!(error["code"], 11, "{what}: {error}");
            } else if let Err(error) = answer {
                // The write was not reached in time: the same once more, with a longer timeout.
                timeout = timeouts.next().unwrap_or_else(|| panic!("{what}: {error}"));
                node.del(&dead).await;
                delete_pod(&case, &name).await;
                continue;
            }
            if back_for_del {
                proxy.heal();
            }
            node.del(&dead).await;
            proxy.heal();
            let living = Sandbox { container: format!("{}-again", dead.container), ..dead.clone() };
            let address = node.add(&living).await.unwrap_or_else(|why| panic!("{what}: {why}"));
            // Not before: a write that came late may have left what is nobody's.
            mend(&case).await;
            agent.settle().await;
            assert_in_step(&case, &[&node]).await;
            assert_shown(&case, node.cilium.is_some()).await;
            assert_eq!(node.in_use(), [(address, living.container.clone())], "{what}");
            assert_eq!(node.pending_updates(), [], "{what}");
            node.assert_nothing_reserved_without_claim(&case).await;
            node.assert_claims_of_its_block_are_reserved(&case).await;
            let mut own = stickies(&case).await.into_iter();
            let own = own.find(|sticky| sticky.metadata.name.as_deref() == Some(&name)).unwrap();
            assert_eq!(own.spec.addresses, [address], "{what}");
            assert_eq!(
                own.status.unwrap().attachment.unwrap().attachment_id.to_string(),
                living.container,
                "{what}"
            );
            node.del(&living).await;
            delete_pod(&case, &name).await;
            for sticky in stickies(&case).await {
                assert_eq!(sticky.status.and_then(|status| status.attachment), None, "{what}");
            }
            if !reached {
                assert!(at > 4, "only {at} writes were seen");
                break;
            }
            at += 1;
        }
    }
}

#[tokio::test]
async fn an_outage_at_any_write_of_a_first_add_leaves_one_owner_of_a_sticky_pools_address() {
    a_server_that_goes_away("delegated", true).await;
}

#[tokio::test]
async fn an_outage_at_any_write_of_a_first_add_leaves_one_owner_of_the_blocks_address() {
    a_server_that_goes_away("delegated", false).await;
}

#[tokio::test]
async fn an_outage_at_any_write_of_a_first_add_leaves_one_owner_where_cilium_picks() {
    a_server_that_goes_away("crd", false).await;
}

/// Every request of a first ADD is answered with an error once; and from some of them on all are.
async fn a_server_that_answers_with_errors(pool: bool) {
    let case = case().await;
    let [block, _, sticky, _] = parts(&case);
    if pool {
        sticky_pool(&case, sticky).await;
    }
    let mut node = TestNode::ready(&case, "n1", block).await;
    let mut agent = Stepped::new(&case, &node, "delegated", &[]).await;
    let front = case.front().await;
    node.by(&plugin_of(&case, &node).await.through_front(&front));
    // Too many requests; an error after the work was done; not yet, or not any more, ready.
    for (status, done, once) in [(429, false, true), (500, true, true), (503, false, false)] {
        // The client itself tries again for as long as the time lasts: where no try helps it must be short,
        // and the rounds few.
        for from in (1..).step_by(if once { 1 } else { 5 }) {
            node.timeout(if once { "20s" } else { "2s" });
            let what = format!("{status} at request {from}, done: {done}, once: {once}");
            let name = format!("e-{status}-{once}-{from}");
            let dead = sandbox(&sticky_pod(&case, &name, &node.name, json!({})).await);
            front.begin(Trouble { status, from, to: if once { from } else { usize::MAX }, done });
            let answer = node.add(&dead).await;
            let reached = front.seen() >= from;
            if let Err(error) = &answer {
                assert_eq!(error["code"], 11, "{what}: {error}");
            }
            if once {
                front.end();
            }
            // While the server does not help, this leaves a note.
            node.del(&dead).await;
            front.end();
            node.timeout("20s");
            let living = Sandbox { container: format!("{}-again", dead.container), ..dead.clone() };
            let address = node.add(&living).await.unwrap_or_else(|why| panic!("{what}: {why}"));
            mend(&case).await;
            agent.settle().await;
            assert_in_step(&case, &[&node]).await;
            assert_shown(&case, false).await;
            assert_eq!(node.in_use(), [(address, living.container.clone())], "{what}");
            assert_eq!(node.pending_updates(), [], "{what}");
            node.assert_nothing_reserved_without_claim(&case).await;
            node.assert_claims_of_its_block_are_reserved(&case).await;
            node.del(&living).await;
            delete_pod(&case, &name).await;
            for sticky in stickies(&case).await {
                assert_eq!(sticky.status.and_then(|status| status.attachment), None, "{what}");
            }
            if !reached {
                assert!(from > 8, "only {from} requests were seen");
                answer.unwrap();
                break;
            }
        }
    }
}

#[tokio::test]
async fn a_server_error_at_any_request_of_a_first_add_leaves_nothing_of_a_sticky_pool() {
    a_server_that_answers_with_errors(true).await;
}

#[tokio::test]
async fn a_server_error_at_any_request_of_a_first_add_leaves_nothing_of_the_block() {
    a_server_that_answers_with_errors(false).await;
}
