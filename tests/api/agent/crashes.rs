//! An agent that ends before or after every write, to the API server and to the disk, counted and not listed
//! by hand; and the process that comes next.

use std::net::IpAddr;

use kube::api::Api;
use serde_json::json;
use sticky_ipam::agent::flags::AgentSettings;
use sticky_ipam::cluster::objects::{AddressClaim, StickyIP};

use crate::support::agent::{Stepped, ends_at, settings};
use crate::support::agent::{case, cut_off, parts};
use crate::support::api_server::access::Access;
use crate::support::api_server::case::Case;
use crate::support::cilium::{assert_in_one_pool, cilium_nodes, owned};
use crate::support::node::{Sandbox, TestNode, assert_in_step, delete_pod, sandbox, stickies, sticky_pod};

const FEW: &[&str] = &["--ip-rate-num", "3", "--max-allocated-ip", "8"];
/// Enough for everything that needs two checks, and for what follows from it.
const LOOKS: usize = 4;

struct Stage {
    case: Case<'static>,
    n1: TestNode,
    n2: TestNode,
    access: Access,
    settings: AgentSettings,
    next: Stepped,
}

impl Stage {
    async fn new() -> Self {
        let case = case().await;
        let [one, two, ..] = parts(&case);
        let n1 = TestNode::ready_crd(&case, "n1", one).await;
        let n2 = TestNode::ready_crd(&case, "n2", two).await;
        let access = case.agent(&n1.name).await;
        let settings = settings(&n1, &access.kubeconfig(), "crd", FEW);
        let mut next = Stepped::by(&access, &n1, "crd", FEW).await;
        next.settle().await;
        Self { case, n1, n2, access, settings, next }
    }

    async fn pod(&self, name: &str, node: &TestNode) -> Sandbox {
        sandbox(&sticky_pod(&self.case, name, &node.name, json!({})).await)
    }

    /// Ends an agent at its n-th write; whether there is such a write.
    async fn ends(&self, steps: usize, number: usize, after: bool) -> bool {
        ends_at(&self.settings, &self.access, steps, number, after).await
    }

    /// What holds whenever no action is half done.
    async fn check(&self) {
        let nodes = cilium_nodes(&self.case).await;
        assert_in_one_pool(&nodes);
        assert_in_step(&self.case, &[&self.n1, &self.n2]).await;
        let stickies = stickies(&self.case).await;
        for sticky in &stickies {
            let attachment = sticky.status.as_ref().and_then(|status| status.attachment.as_ref());
            let namespace = self.case.namespace();
            let name = sticky.metadata.name.as_deref().unwrap();
            let shown = owned(&nodes, &format!("{namespace}/{name}"));
            match attachment {
                Some(attachment) => {
                    let node = attachment.node.clone();
                    assert_eq!(shown, [(node, sticky.spec.addresses[0])], "{name} is attached and shown");
                }
                None => assert!(shown.is_empty(), "{name} is not attached and shown: {shown:?}"),
            }
        }
        assert!(self.n1.pending_updates().is_empty(), "{:?}", self.n1.pending_updates());
        self.n1.assert_nothing_reserved_without_claim(&self.case).await;
    }

    async fn address_of(&self, name: &str) -> Option<IpAddr> {
        let all = stickies(&self.case).await;
        let own = all.into_iter().find(|sticky| sticky.metadata.name.as_deref() == Some(name));
        own.map(|own| own.spec.addresses[0])
    }

    /// The pod, its StickyIP and everything of it go, so that the next round starts as this one.
    async fn clear(&mut self, name: &str) {
        delete_pod(&self.case, name).await;
        if let Some(address) = self.address_of(name).await {
            let own: Api<StickyIP> = Api::namespaced(self.case.client(), self.case.namespace());
            own.delete(name, &Default::default()).await.unwrap();
            let claims: Api<AddressClaim> = Api::all(self.case.client());
            claims.delete(&address.to_string(), &Default::default()).await.unwrap();
        }
        self.next = self.next.anew();
        self.next.settle().await;
        self.check().await;
        assert!(self.n1.store().decisions().unwrap().is_empty());
        assert!(self.n1.in_use().is_empty(), "{:?}", self.n1.in_use());
    }
}

/// Which process continues after the agent has ended while it prepared a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// The agent starts again; then the ADD comes.
    Agent,
    /// The ADD comes at once, and no agent at all.
    Add,
    /// The pod is deleted and created again on the other node, and no agent acts before its ADD.
    Gone,
}

async fn every_end_of_preparing(bound: bool) {
    let mut stage = Stage::new().await;
    let mut writes = 0;
    // A pod that has an address can lose it in two ways; that nothing is left of an ended pod is seen on a
    // new one.
    let every: &[Next] =
        if bound { &[Next::Agent, Next::Add] } else { &[Next::Agent, Next::Add, Next::Gone] };
    for &next in every {
        for after in [false, true] {
            for number in 1.. {
                let name = format!("{next:?}-{after}-{number}").to_lowercase();
                let mut before = None;
                if bound {
                    let first = stage.pod(&name, &stage.n1).await;
                    before = Some(stage.n1.add(&first).await.unwrap());
                    stage.n1.del(&first).await;
                }
                let first = stage.pod(&name, &stage.n1).await;
                let ended = stage.ends(1, number, after).await;
                match next {
                    Next::Agent => {
                        stage.next = stage.next.anew();
                        stage.next.settle().await;
                        let address = stage.n1.add(&first).await.unwrap();
                        assert!(before.is_none_or(|before| before == address));
                    }
                    Next::Add => {
                        let address = stage.n1.add(&first).await.unwrap();
                        assert!(before.is_none_or(|before| before == address));
                        assert_eq!(stage.address_of(&name).await, Some(address));
                    }
                    Next::Gone => {
                        delete_pod(&stage.case, &name).await;
                        stage.next = stage.next.anew();
                        stage.next.settle().await;
                        let expected = stage.address_of(&name).await;
                        let moved = stage.pod(&name, &stage.n2).await;
                        let address = stage.n2.add(&moved).await.unwrap();
                        assert!(expected.is_none_or(|expected| expected == address));
                        stage.check().await;
                        stage.n2.del(&moved).await;
                    }
                }
                if next != Next::Gone {
                    stage.check().await;
                    stage.n1.del(&first).await;
                }
                stage.clear(&name).await;
                if !ended {
                    break;
                }
                writes += 1;
            }
        }
    }
    // Attached, shown, and the decision's file made and named; a new pod is claimed and reserved before.
    let fewest = if bound { 4 } else { 10 };
    assert!(writes >= 2 * every.len() * fewest, "only {writes} writes were seen");
}

#[tokio::test]
async fn preparing_a_new_pod_that_crashes_at_any_write_is_finished_or_undone() {
    every_end_of_preparing(false).await;
}

#[tokio::test]
async fn preparing_a_bound_pod_that_ends_at_any_write_loses_no_address() {
    every_end_of_preparing(true).await;
}

/// What an agent is in the middle of when it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Midst {
    /// Taking back a decision.
    Withdrawing,
    /// Telling what a DEL could not.
    Telling,
    /// Ending a sandbox that is gone.
    Ending,
}

#[tokio::test]
async fn a_release_that_crashes_at_any_write_is_finished_by_the_next_agent() {
    let mut stage = Stage::new().await;
    let good = stage.n1.kubeconfig();
    for midst in [Midst::Withdrawing, Midst::Telling, Midst::Ending] {
        for after in [false, true] {
            let mut writes = 0;
            loop {
                let name = format!("{midst:?}-{after}-{writes}").to_lowercase();
                let first = stage.pod(&name, &stage.n1).await;
                stage.next.settle().await;
                let address = stage.address_of(&name).await.unwrap();
                match midst {
                    Midst::Withdrawing => {}
                    Midst::Telling => {
                        stage.n1.add(&first).await.unwrap();
                        let _proxy = cut_off(&stage.case, &mut stage.n1);
                        stage.n1.del(&first).await;
                        stage.n1.by_file(good.clone());
                        assert_eq!(stage.n1.pending_updates().len(), 1);
                    }
                    Midst::Ending => {
                        stage.n1.add(&first).await.unwrap();
                        stage.n1.end(&first);
                        stage.n1.cilium().end_endpoint(&first.container);
                    }
                }
                delete_pod(&stage.case, &name).await;
                let ended = stage.ends(LOOKS, writes + 1, after).await;
                stage.next = stage.next.anew();
                stage.next.settle().await;
                stage.check().await;
                // The next pod, elsewhere, has the same address.
                let moved = stage.pod(&name, &stage.n2).await;
                assert_eq!(stage.n2.add(&moved).await.unwrap(), address);
                stage.check().await;
                stage.n2.del(&moved).await;
                stage.clear(&name).await;
                if !ended {
                    break;
                }
                writes += 1;
            }
            assert!(writes >= 3, "{midst:?}: only {writes} writes were seen");
        }
    }
}

#[tokio::test]
async fn a_refill_that_crashes_at_any_write_leaves_no_entry_without_its_record() {
    for after in [false, true] {
        for number in 1.. {
            let case = case().await;
            let n1 = TestNode::ready_crd(&case, "n1", parts(&case)[0]).await;
            let access = case.agent(&n1.name).await;
            let settings = settings(&n1, &access.kubeconfig(), "crd", FEW);
            let before = cilium_nodes(&case).await.remove(0).spec.ipam.pool;
            let ended = ends_at(&settings, &access, LOOKS, number, after).await;
            let is_unowned = |key: &String| {
                let mut records = n1.store().address_files().unwrap().into_iter();
                records.any(|found| found.address.to_string() == *key && found.record.unwrap().is_unowned())
            };
            let pool = cilium_nodes(&case).await.remove(0).spec.ipam.pool;
            for key in pool.keys().filter(|key| !before.contains_key(*key)) {
                assert!(is_unowned(key), "the entry of {key} was written before its record");
            }
            // A new sticky pod before the next agent comes: nothing that is in the pool by then.
            let first = sandbox(&sticky_pod(&case, "db-0", &n1.name, json!({})).await);
            let address = n1.add(&first).await.unwrap();
            let mut next = Stepped::by(&access, &n1, "crd", FEW).await;
            next.settle().await;
            let pool = cilium_nodes(&case).await.remove(0).spec.ipam.pool;
            assert_eq!(pool.len(), 4, "{pool:?}");
            assert_eq!(pool[&address.to_string()].owner, format!("{}/db-0", case.namespace()));
            for (key, entry) in &pool {
                assert_eq!(is_unowned(key), entry.owner.is_empty(), "{key}");
            }
            if !ended {
                assert!(number > 5, "only {number} writes were seen");
                break;
            }
        }
    }
}
