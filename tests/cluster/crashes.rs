//! A verb that ends before or after every write to the API server, counted and not listed by hand, and whoever comes next.

use std::net::IpAddr;

use kube::api::Api;
use serde_json::json;
use sticky_ipam::cluster::objects::StickyIP;

use crate::bench::ApiServer;
use crate::bench::case::Case;
use crate::node::{
    EndAt, Sandbox, TestNode, assert_in_step, claims, delete_pod, sandbox, stickies, sticky_pod, sticky_pool,
};
use crate::repair::mend;

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

impl Stage {
    async fn new(pool: bool) -> Self {
        let server = ApiServer::shared().await;
        server.install_our_kinds().await;
        let case = server.case().await;
        let parts: Vec<_> = case.range().subnets(26).unwrap().collect();
        if pool {
            sticky_pool(&case, parts[2]).await;
        }
        let n1 = TestNode::ready(&case, "n1", parts[0]).await;
        let n2 = TestNode::ready(&case, "n2", parts[1]).await;
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
                return;
            }
        };
        let address = node.add(&sandbox).await.unwrap();
        assert!(expected.is_none_or(|expected| expected == address), "{expected:?} became {address}");
        assert_in_step(case, &[n1, n2]).await;
        let own =
            stickies(case).await.into_iter().find(|sticky| sticky.metadata.name.as_deref() == Some(name));
        let own = own.unwrap();
        assert_eq!(own.spec.addresses, [address]);
        assert_eq!(own.status.unwrap().attachment.unwrap().container_id, sandbox.container);
        node.assert_nothing_reserved_without_claim(case).await;
        node.del(&sandbox).await;
        let own =
            stickies(case).await.into_iter().find(|sticky| sticky.metadata.name.as_deref() == Some(name));
        assert!(own.unwrap().status.unwrap().attachment.is_none());
        delete_pod(case, name).await;
    }
}

async fn every_crash_of_a_first_add(pool: bool) {
    let stage = Stage::new(pool).await;
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
            // Claim, bind, seal, attach.
            assert_eq!(number, 5, "{next:?}");
        }
    }
}

#[tokio::test]
async fn a_first_add_that_ends_at_any_write_is_gone_on_with_or_undone_from_a_sticky_pool() {
    every_crash_of_a_first_add(true).await;
}

#[tokio::test]
async fn a_first_add_that_ends_at_any_write_is_gone_on_with_or_undone_from_the_nodes_block() {
    every_crash_of_a_first_add(false).await;
}

#[tokio::test]
async fn an_add_or_del_of_a_bound_pod_that_ends_at_any_write_loses_no_address() {
    let stage = Stage::new(false).await;
    for next in ALL {
        for after in [false, true] {
            for crash_in_del in [false, true] {
                let name = format!("{next:?}-{after}-{crash_in_del}").to_lowercase();
                let first = stage.new_pod(&name, &stage.n1).await;
                let address = stage.n1.add(&first).await.unwrap();
                let ended = if crash_in_del {
                    let del = stage.n1.del_before(&first, EndAt::new(1, after)).await;
                    assert!(del.is_none(), "DEL of an attached sandbox writes once");
                    assert!(stage.n1.in_use().is_empty());
                    first
                } else {
                    stage.n1.del(&first).await;
                    let second = stage.new_pod(&name, &stage.n1).await;
                    assert!(stage.n1.add_before(&second, EndAt::new(1, after)).await.is_none());
                    second
                };
                stage.go_on(next, &name, &ended, Some(address)).await;
            }
        }
    }
}

#[tokio::test]
async fn a_stickyip_deleted_by_hand_lets_its_claim_rest_and_the_claimant_gets_it_back() {
    let stage = Stage::new(true).await;
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
