//! A verb that ends before or after every write to the API server, counted and not listed by hand, and
//! whoever comes next.

use std::net::IpAddr;

use kube::api::Api;
use serde_json::json;
use sticky_ipam::cluster::objects::StickyIP;

use crate::support::api_server::ApiServer;
use crate::support::api_server::case::Case;
use crate::support::cilium::assert_shown;
use crate::support::node::{
    EndAt, Sandbox, TestNode, assert_in_step, claims, delete_pod, sandbox, stickies, sticky_pod, sticky_pool,
};
use crate::support::repair::mend;

/// Who goes on after the crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// The runtime ends the sandbox and makes a new one for the same pod.
    SamePod,
    /// The runtime ends the sandbox; the pod is made anew on the same node.
    SameNode,
    /// Nobody ever ends the sandbox by DEL, but it is gone; the pod is made anew on the same node.
    NoDel,
    /// The runtime ends the sandbox; the pod is made anew on the other node.
    OtherNode,
    /// Nobody comes but the repair loop.
    Repair,
}

const ALL: [Next; 5] = [Next::SamePod, Next::SameNode, Next::NoDel, Next::OtherNode, Next::Repair];

struct Stage {
    case: Case<'static>,
    n1: TestNode,
    n2: TestNode,
}

/// Where the addresses come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum From {
    /// A Sticky pool: away from every node's home.
    Pool,
    /// The node's own block.
    Block,
    /// The node's own block, out of which Cilium picks.
    Cilium,
    /// A Sticky pool, and Cilium picks.
    PoolByCilium,
}

impl Stage {
    async fn new(from: From) -> Self {
        let server = ApiServer::shared().await;
        server.install_our_kinds().await;
        let case = server.case().await;
        let parts: Vec<_> = case.range().subnets(26).unwrap().collect();
        if matches!(from, From::Pool | From::PoolByCilium) {
            sticky_pool(&case, parts[2]).await;
        }
        let (n1, n2) = if matches!(from, From::Cilium | From::PoolByCilium) {
            (
                TestNode::ready_crd(&case, "n1", parts[0]).await,
                TestNode::ready_crd(&case, "n2", parts[1]).await,
            )
        } else {
            (TestNode::ready(&case, "n1", parts[0]).await, TestNode::ready(&case, "n2", parts[1]).await)
        };
        Self { case, n1, n2 }
    }

    async fn new_pod(&self, name: &str, node: &TestNode) -> Sandbox {
        sandbox(&sticky_pod(&self.case, name, &node.name, json!({})).await)
    }

    /// Lets the next actor run, and looks at what stands then.
    async fn go_on(&self, next: Next, name: &str, ended: &Sandbox, expected: Option<IpAddr>) {
        let Self { case, n1, n2 } = self;
        match next {
            Next::NoDel => n1.end(ended),
            Next::Repair => {
                n1.del(ended).await;
                delete_pod(case, name).await;
            }
            _ => n1.del(ended).await,
        }
        let (sandbox, node) = match next {
            Next::SamePod => {
                let mut again = ended.clone();
                again.container = format!("{}-again", ended.container);
                (again, n1)
            }
            Next::SameNode | Next::NoDel => (self.new_pod(name, n1).await, n1),
            Next::OtherNode => (self.new_pod(name, n2).await, n2),
            Next::Repair => {
                mend(case).await;
                assert_in_step(case, &[n1, n2]).await;
                assert_shown(case, n1.cilium.is_some()).await;
                return;
            }
        };
        let address = node.add(&sandbox).await.unwrap();
        assert!(expected.is_none_or(|expected| expected == address), "{expected:?} became {address}");
        assert_in_step(case, &[n1, n2]).await;
        assert_shown(case, n1.cilium.is_some()).await;
        let own =
            stickies(case).await.into_iter().find(|sticky| sticky.metadata.name.as_deref() == Some(name));
        let own = own.unwrap();
        assert_eq!(own.spec.addresses, [address]);
        assert_eq!(own.status.unwrap().attachment.unwrap().attachment_id.to_string(), sandbox.container);
        node.assert_nothing_reserved_without_claim(case).await;
        node.del(&sandbox).await;
        let own =
            stickies(case).await.into_iter().find(|sticky| sticky.metadata.name.as_deref() == Some(name));
        assert!(own.unwrap().status.unwrap().attachment.is_none());
        assert_shown(case, n1.cilium.is_some()).await;
        delete_pod(case, name).await;
    }
}

async fn every_crash_of_a_first_add(from: From) {
    let stage = Stage::new(from).await;
    for next in ALL {
        for after in [false, true] {
            let mut number = 1;
            loop {
                let name = format!("{next:?}-{after}-{number}").to_lowercase();
                let first = stage.new_pod(&name, &stage.n1).await;
                let end = EndAt::new(number, after);
                if stage.n1.add_before(&first, end).await.is_some() {
                    // There is no such write any more.
                    stage.n1.del(&first).await;
                    delete_pod(&stage.case, &name).await;
                    break;
                }
                stage.go_on(next, &name, &first, None).await;
                number += 1;
            }
            // Bind, claim, attach; claim, bind, seal, attach where only the node may claim. Away from home,
            // or where Cilium picks, it is shown.
            let writes = if from == From::Cilium { 5 } else { 4 };
            assert_eq!(number, writes + 1, "{next:?}");
        }
    }
}

#[tokio::test]
async fn a_first_add_that_crashes_at_any_write_is_finished_or_undone_from_a_sticky_pool() {
    every_crash_of_a_first_add(From::Pool).await;
}

#[tokio::test]
async fn a_first_add_that_crashes_at_any_write_is_finished_or_undone_from_the_block() {
    every_crash_of_a_first_add(From::Block).await;
}

#[tokio::test]
async fn a_first_add_that_crashes_at_any_write_is_finished_or_undone_where_cilium_picks() {
    every_crash_of_a_first_add(From::Cilium).await;
}

/// What ends half way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    /// The ADD of a pod that is back on its node.
    Add,
    /// The ADD of a pod that comes from the other node.
    Move,
    /// The DEL.
    Del,
}

/// Every write of the ADD and the DEL of a pod that has its address already. `writes` is how many each of
/// them sends.
async fn every_crash_of_a_bound_pod(from: From, nexts: &[Next], writes: [(Ends, usize); 3]) {
    let stage = Stage::new(from).await;
    for next in nexts {
        for after in [false, true] {
            for (ends, writes) in writes {
                let mut number = 1;
                loop {
                    let name = format!("{next:?}-{after}-{ends:?}").to_lowercase();
                    let before = if ends == Ends::Move { &stage.n2 } else { &stage.n1 };
                    let mut ended = stage.new_pod(&name, before).await;
                    let address = before.add(&ended).await.unwrap();
                    let end = EndAt::new(number, after);
                    let done = if ends == Ends::Del {
                        stage.n1.del_before(&ended, end).await.is_some()
                    } else {
                        before.del(&ended).await;
                        ended = stage.new_pod(&name, &stage.n1).await;
                        stage.n1.add_before(&ended, end).await.is_some()
                    };
                    if ends == Ends::Del {
                        assert!(stage.n1.in_use().is_empty());
                    }
                    if done {
                        stage.n1.del(&ended).await;
                        delete_pod(&stage.case, &name).await;
                        break;
                    }
                    stage.go_on(*next, &name, &ended, Some(address)).await;
                    number += 1;
                }
                assert_eq!(number, writes + 1, "{from:?} {ends:?}");
            }
        }
    }
}

#[tokio::test]
async fn an_add_or_del_of_a_bound_pod_that_crashes_at_any_write_loses_no_address() {
    // A move attaches by what this node remembers, in vain, and by what it read; it shows the route and tells
    // two events.
    let writes = [(Ends::Add, 1), (Ends::Move, 5), (Ends::Del, 1)];
    every_crash_of_a_bound_pod(From::Block, &ALL, writes).await;
}

#[tokio::test]
async fn an_add_or_del_that_crashes_at_any_write_loses_no_address_where_cilium_picks() {
    let writes = [(Ends::Add, 2), (Ends::Move, 5), (Ends::Del, 2)];
    every_crash_of_a_bound_pod(From::Cilium, &ALL, writes).await;
}

#[tokio::test]
async fn an_add_or_del_that_crashes_at_any_write_leaves_no_entry_or_route_of_a_pool() {
    let writes = [(Ends::Add, 2), (Ends::Move, 5), (Ends::Del, 2)];
    every_crash_of_a_bound_pod(From::PoolByCilium, &[Next::NoDel, Next::OtherNode], writes).await;
}

#[tokio::test]
async fn a_stickyip_deleted_by_hand_quarantines_its_claim_and_the_claimant_gets_it_back() {
    let stage = Stage::new(From::Pool).await;
    let first = stage.new_pod("db-0", &stage.n1).await;
    let address = stage.n1.add(&first).await.unwrap();
    stage.n1.del(&first).await;
    let objects: Api<StickyIP> = Api::namespaced(stage.case.client(), stage.case.namespace());
    objects.delete("db-0", &Default::default()).await.unwrap();
    let again = stage.new_pod("db-0", &stage.n2).await;
    assert_eq!(stage.n2.add(&again).await.unwrap(), address);
    assert_in_step(&stage.case, &[&stage.n1, &stage.n2]).await;
    stage.n2.del(&again).await;
    objects.delete("db-0", &Default::default()).await.unwrap();
    mend(&stage.case).await;
    assert!(claims(&stage.case).await.is_empty());
}
