//! ADD and DEL of a sticky pod that end before or after every change to the node's disk, counted and not
//! listed by hand; and whoever comes next. What ends at a write to the API server is in `crashes`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use futures_util::future::join_all;
use kube::api::Api;
use serde_json::json;
use sticky_ipam::cluster::objects::StickyIP;
use sticky_ipam::names::AttachmentId;

use crate::support::agent::Stepped;
use crate::support::agent::{case, parts};
use crate::support::api_server::case::Case;
use crate::support::cilium::assert_shown;
use crate::support::crash::{Counted, EndsAt};
use crate::support::node::{
    Sandbox, TestNode, assert_in_step, delete_pod, sandbox, stickies, sticky_pod, sticky_pool,
};
use crate::support::repair::mend;

/// What ends half way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ends {
    /// The first ADD of a claimant.
    First,
    /// The ADD of a pod that has an address.
    Bound,
    /// The ADD of a pod for which the agent has decided.
    Prepared,
    /// The DEL.
    Del,
    /// The DEL of a pod for which the agent had decided.
    DelOfPrepared,
}

impl Ends {
    const ALL: [Self; 5] = [Self::First, Self::Bound, Self::Prepared, Self::Del, Self::DelOfPrepared];

    fn is_prepared(self) -> bool {
        matches!(self, Self::Prepared | Self::DelOfPrepared)
    }

    fn is_del(self) -> bool {
        matches!(self, Self::Del | Self::DelOfPrepared)
    }
}

/// Who goes on after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Next {
    /// The runtime ends the sandbox by DEL and makes a new one for the same pod.
    Runtime,
    /// The pod is deleted and its sandbox gone, and nobody says DEL: only the agent and the repair loop come.
    /// The DEL comes when the next pod of the name lives.
    LateDel,
}

struct Stage {
    case: Case<'static>,
    node: TestNode,
    agent: Stepped,
}

impl Stage {
    /// `pool`: addresses are of a Sticky pool, else of the node's own block.
    async fn new(mode: &str, pool: bool) -> Self {
        let case = case().await;
        let [block, _, sticky, _] = parts(&case);
        if pool {
            sticky_pool(&case, sticky).await;
        }
        let node = match mode {
            "crd" => TestNode::ready_crd(&case, "n1", block).await,
            _ => TestNode::ready(&case, "n1", block).await,
        };
        let few = ["--ip-rate-num", "3", "--max-allocated-ip", "8"];
        let mut agent = Stepped::new(&case, &node, mode, &few).await;
        agent.settle().await;
        Self { case, node, agent }
    }

    async fn pod(&self, name: &str) -> Sandbox {
        sandbox(&sticky_pod(&self.case, name, &self.node.name, json!({})).await)
    }

    async fn sticky(&self, name: &str) -> Option<StickyIP> {
        let mut all = stickies(&self.case).await.into_iter();
        all.find(|sticky| sticky.metadata.name.as_deref() == Some(name))
    }

    /// Ends a verb at its n-th change to the disk, and lets the next one go on. Whether there is such a
    /// change.
    async fn round(&mut self, ends: Ends, next: Next, number: usize, after: bool) -> bool {
        let name = format!("{ends:?}-{next:?}").to_lowercase();
        let mut expected = None;
        if ends != Ends::First {
            let old = self.pod(&name).await;
            expected = Some(self.node.add(&old).await.unwrap());
            self.node.del(&old).await;
        }
        let dead = self.pod(&name).await;
        if ends.is_prepared() {
            self.agent.step().await;
            assert!(self.node.store().has_decision(&dead.uid));
        }
        let disk = Counted(EndsAt::new(number, after));
        let ended = if ends.is_del() {
            assert_eq!(self.node.add(&dead).await.ok(), expected);
            self.node.del_on(disk, &dead).await.is_none()
        } else {
            let answer = self.node.add_on(disk, &dead).await;
            answer.map(|answer| answer.unwrap()).is_none()
        };
        let what =
            format!("{ends:?} of {}, then {next:?}: ended at {number}, after it: {after}", dead.container);
        let living = match next {
            Next::Runtime => {
                self.node.del(&dead).await;
                Sandbox { container: format!("{}-again", dead.container), ..dead.clone() }
            }
            Next::LateDel => {
                delete_pod(&self.case, &name).await;
                self.node.end(&dead);
                if let Some(cilium) = &self.node.cilium {
                    cilium.end_endpoint(&dead.container);
                }
                self.agent = self.agent.anew();
                // Twice: what was half done the agent finishes with its first look under the lock, and then
                // has something new to look at.
                self.agent.settle().await;
                self.agent.settle().await;
                mend(&self.case).await;
                self.assert_nobody_lives(&what).await;
                self.pod(&name).await
            }
        };
        let address = self.node.add(&living).await.unwrap_or_else(|why| panic!("{what}: {why}"));
        assert!(expected.is_none_or(|expected| expected == address), "{what}: {expected:?} became {address}");
        if next == Next::LateDel {
            self.node.del(&dead).await;
        }
        self.assert_lives(&living, address, &dead, &what).await;
        self.node.del(&living).await;
        delete_pod(&self.case, &name).await;
        self.assert_nobody_lives(&what).await;
        self.assert_sound(&what);
        self.forget(&name, &what).await;
        ended
    }

    /// The pod has its address and shows it, and nothing is left of the sandbox that died.
    async fn assert_lives(&self, living: &Sandbox, address: IpAddr, dead: &Sandbox, what: &str) {
        assert_eq!(self.node.in_use(), [(address, living.container.clone())], "{what}");
        let own = self.sticky(&living.pod).await.unwrap();
        assert_eq!(own.spec.addresses, [address], "{what}");
        let attachment = own.status.unwrap().attachment.unwrap();
        let names = [living.container.clone(), AttachmentId::Prepared(living.uid.clone()).to_string()];
        assert!(names.contains(&attachment.attachment_id.to_string()), "{what}: {attachment:?}");
        if let Some(cilium) = &self.node.cilium {
            let only = BTreeMap::from([(living.container.clone(), address)]);
            assert_eq!(cilium.endpoints(), only, "{what}");
        }
        for look in self.node.store().address_files().unwrap() {
            let record = look.record.unwrap();
            let of_dead = record.attachment.container.as_str() == dead.container;
            assert!(!of_dead, "{what}: a record of the dead sandbox: {record:?}");
        }
        assert_in_step(&self.case, &[&self.node]).await;
        self.assert_sound(what);
        self.look(what).await;
    }

    async fn assert_nobody_lives(&self, what: &str) {
        assert_eq!(self.node.in_use(), [], "{what}");
        for sticky in stickies(&self.case).await {
            assert_eq!(sticky.status.and_then(|status| status.attachment), None, "{what}");
        }
        if let Some(cilium) = &self.node.cilium {
            assert_eq!(cilium.endpoints(), BTreeMap::new(), "{what}");
        }
        self.look(what).await;
    }

    /// What holds whenever nobody is in the middle of anything.
    async fn look(&self, what: &str) {
        assert_eq!(self.node.store().decisions().unwrap(), [], "{what}");
        assert_eq!(self.node.pending_updates(), [], "{what}");
        self.node.assert_nothing_reserved_without_claim(&self.case).await;
        self.node.assert_claims_of_its_block_are_reserved(&self.case).await;
        assert_shown(&self.case, self.node.cilium.is_some()).await;
    }

    /// The store's files agree, and none is left over. A file that never got its names may lie there until
    /// the next change, a draft until the DEL of its sandbox.
    fn assert_sound(&self, what: &str) {
        let store = self.node.store();
        let wrong: Vec<_> = store.verify().unwrap().into_iter().filter(|finding| finding.wrong).collect();
        assert_eq!(wrong, [], "{what}");
        let drafts = std::fs::read_dir(store.root().join(".sticky/drafts")).into_iter().flatten();
        assert_eq!(drafts.count(), 0, "{what}: a draft is left");
    }

    /// The StickyIP is deleted, so that the next round starts as this one did. The node keeps nothing of it
    /// then.
    async fn forget(&mut self, name: &str, what: &str) {
        let own: Api<StickyIP> = Api::namespaced(self.case.client(), self.case.namespace());
        own.delete(name, &Default::default()).await.unwrap();
        mend(&self.case).await;
        self.agent.settle().await;
        let walked = self.node.store().address_files().unwrap().into_iter().filter_map(|look| look.record);
        let kept: Vec<_> = walked.filter(|record| record.binding.is_some()).collect();
        assert_eq!(kept, [], "{what}");
    }
}

/// What follows has a node of its own each, and all go on side by side: a round mostly waits.
async fn every_end(mode: &str, pool: bool) {
    // To the files, after one change is before the next: what lies between two is at the API server, and a
    // DEL finds it there.
    let follows = [(Next::Runtime, false), (Next::Runtime, true), (Next::LateDel, false)];
    join_all(follows.map(async |(next, after)| {
        let mut stage = Stage::new(mode, pool).await;
        for ends in Ends::ALL {
            let mut changes = 0;
            while stage.round(ends, next, changes + 1, after).await {
                changes += 1;
            }
            assert!(changes >= 5, "{ends:?}: only {changes} changes were seen");
        }
    }))
    .await;
}

#[tokio::test]
async fn a_verb_that_crashes_at_any_disk_change_loses_and_leaves_nothing_of_a_sticky_pool() {
    every_end("delegated", true).await;
}

#[tokio::test]
async fn a_verb_that_crashes_at_any_disk_change_loses_and_leaves_nothing_of_the_block() {
    every_end("delegated", false).await;
}

#[tokio::test]
async fn where_cilium_picks_a_crash_at_any_disk_change_loses_nothing_of_a_sticky_pool() {
    every_end("crd", true).await;
}

#[tokio::test]
async fn where_cilium_picks_a_crash_at_any_disk_change_loses_nothing_of_the_block() {
    every_end("crd", false).await;
}
