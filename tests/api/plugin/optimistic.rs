//! A pod that comes back to its node is attached by the state in which the node's own DEL left its StickyIP,
//! before anything is read. Whatever changed in between, the attachment stands only if it is the one that the
//! reads call for.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::{AddressClaim, ClaimName, StickyIP};
use sticky_ipam::cluster::writer::apply::{SentWrite, WriteObserver};
use sticky_ipam::names::PodIdentity;
use sticky_ipam::store::Decision;

use crate::support::agent::cut_off;
use crate::support::api_server::ApiServer;
use crate::support::api_server::case::Case;
use crate::support::api_server::front::Trouble;
use crate::support::cilium::assert_shown;
use crate::support::node::{
    EndAt, Sandbox, TestNode, assert_in_step, delete_pod, sandbox, stickies, sticky_pod, sticky_pool,
};
use crate::support::repair::mend;

/// Writes down what is written of the protocol.
#[derive(Default)]
struct Writes(Mutex<Vec<&'static str>>);

impl WriteObserver for Writes {
    fn before(&self, _: usize, write: SentWrite<'_>) {
        if let SentWrite::Protocol(write) = write {
            self.0.lock().unwrap().push(write.word());
        }
    }
}

struct Stage {
    case: Case<'static>,
    n1: TestNode,
    n2: TestNode,
}

impl Stage {
    async fn new(cilium_picks: bool) -> Self {
        let server = ApiServer::shared().await;
        server.install_our_kinds().await;
        let case = server.case().await;
        let parts: Vec<_> = case.range().subnets(26).unwrap().collect();
        sticky_pool(&case, parts[2]).await;
        let (n1, n2) = if cilium_picks {
            (
                TestNode::ready_crd(&case, "n1", parts[0]).await,
                TestNode::ready_crd(&case, "n2", parts[1]).await,
            )
        } else {
            (TestNode::ready(&case, "n1", parts[0]).await, TestNode::ready(&case, "n2", parts[1]).await)
        };
        Self { case, n1, n2 }
    }

    async fn pod(&self, name: &str, node: &TestNode, annotations: Value) -> Sandbox {
        sandbox(&sticky_pod(&self.case, name, &node.name, annotations).await)
    }

    fn pods(&self) -> Api<Pod> {
        Api::namespaced(self.case.client(), self.case.namespace())
    }

    fn stickies(&self) -> Api<StickyIP> {
        Api::namespaced(self.case.client(), self.case.namespace())
    }

    async fn attached(&self, name: &str) -> Option<String> {
        let found = self.stickies().get_opt(name).await.unwrap()?;
        Some(found.status?.attachment?.attachment_id.to_string())
    }

    /// A pod that had an address on the first node, and came to its end.
    async fn had(&self, name: &str) -> IpAddr {
        let first = self.pod(name, &self.n1, json!({})).await;
        let address = self.n1.add(&first).await.unwrap();
        self.n1.del(&first).await;
        address
    }
}

/// What happens between the DEL of a pod and the ADD of its successor.
#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    Nothing,
    /// Somebody writes the StickyIP.
    Written,
    /// Somebody deletes the StickyIP.
    Deleted,
    /// Somebody deletes the claim.
    ClaimDeleted,
    /// Somebody deletes the claim, and another pod gets the address.
    ClaimLost,
    /// The pod is no longer to be sticky.
    NotSticky,
    /// The pod is pinned to another address.
    Pinned,
    /// The pod is another node's.
    Elsewhere,
    /// The pod is gone.
    Gone,
    /// The pod was made anew, and the runtime has not heard of it.
    Replaced,
}

const ALL: [Meanwhile; 10] = [
    Meanwhile::Nothing,
    Meanwhile::Written,
    Meanwhile::Deleted,
    Meanwhile::ClaimDeleted,
    Meanwhile::ClaimLost,
    Meanwhile::NotSticky,
    Meanwhile::Pinned,
    Meanwhile::Elsewhere,
    Meanwhile::Gone,
    Meanwhile::Replaced,
];

/// What comes of the ADD.
#[derive(Debug, PartialEq, Eq)]
enum Comes {
    /// The address that the pod had.
    Same,
    /// Another one, by the StickyIP.
    Another,
    /// One that no StickyIP binds.
    Plain,
    /// An error of this code.
    Error(u64),
}

impl Meanwhile {
    /// What the ADD comes to, and its writes to objects of the protocol, where this plugin picks.
    fn expected(self) -> (Comes, &'static [&'static str]) {
        match self {
            Self::Nothing => (Comes::Same, &["attach"]),
            Self::Written => (Comes::Same, &["attach", "attach"]),
            Self::Deleted => {
                (Comes::Same, &["attach", "create StickyIP", "quarantine claim", "seal claim", "attach"])
            }
            Self::ClaimDeleted => (Comes::Same, &["attach", "detach", "create claim", "attach"]),
            Self::ClaimLost => (
                Comes::Another,
                &["attach", "detach", "delete StickyIP", "create StickyIP", "create claim", "attach"],
            ),
            Self::NotSticky => (Comes::Plain, &["attach", "detach"]),
            Self::Pinned => (Comes::Error(101), &["attach", "detach"]),
            Self::Elsewhere => (Comes::Error(4), &["attach", "detach"]),
            Self::Gone | Self::Replaced => (Comes::Error(11), &["attach", "detach"]),
        }
    }

    /// Has it happen, and tells the sandbox that is added next.
    async fn happen(self, stage: &Stage, name: &str, address: IpAddr) -> Sandbox {
        let case = &stage.case;
        let next = |annotations: Value| stage.pod(name, &stage.n1, annotations);
        let claims: Api<AddressClaim> = Api::all(case.client());
        let claim = ClaimName::of(address).to_string();
        match self {
            Self::Nothing => next(json!({})).await,
            Self::Written => {
                let patch = Patch::Merge(json!({"metadata": {"annotations": {"note": "looked at"}}}));
                stage.stickies().patch(name, &PatchParams::default(), &patch).await.unwrap();
                next(json!({})).await
            }
            Self::Deleted => {
                stage.stickies().delete(name, &DeleteParams::default()).await.unwrap();
                next(json!({})).await
            }
            Self::ClaimDeleted => {
                claims.delete(&claim, &DeleteParams::default()).await.unwrap();
                next(json!({})).await
            }
            Self::ClaimLost => {
                claims.delete(&claim, &DeleteParams::default()).await.unwrap();
                let pin = json!({"sticky-ipam.io/ips": address.to_string()});
                let thief = stage.pod(&format!("thief-of-{name}"), &stage.n2, pin).await;
                assert_eq!(stage.n2.add(&thief).await.unwrap(), address);
                next(json!({})).await
            }
            Self::NotSticky => {
                let made = next(json!({})).await;
                let patch = Patch::Merge(json!({"metadata": {"labels": {"sticky": null}}}));
                stage.pods().patch(name, &PatchParams::default(), &patch).await.unwrap();
                made
            }
            Self::Pinned => {
                let other = case.range().subnets(26).unwrap().nth(2).unwrap().hosts().last().unwrap();
                next(json!({"sticky-ipam.io/ips": other.to_string()})).await
            }
            Self::Elsewhere => stage.pod(name, &stage.n2, json!({})).await,
            Self::Gone => {
                let made = next(json!({})).await;
                delete_pod(case, name).await;
                made
            }
            Self::Replaced => {
                let made = next(json!({})).await;
                next(json!({})).await;
                made
            }
        }
    }
}

async fn whatever_happened(cilium_picks: bool) {
    let stage = Stage::new(cilium_picks).await;
    let Stage { case, n1, n2 } = &stage;
    for meanwhile in ALL {
        let name = format!("{meanwhile:?}").to_lowercase();
        let address = stage.had(&name).await;
        let ended = meanwhile.happen(&stage, &name, address).await;
        let writes = Arc::new(Writes::default());
        let answer = n1.add_before(&ended, writes.clone()).await.unwrap();
        let attached = stage.attached(&name).await;
        let came = match &answer {
            Ok(got) if *got == address => Comes::Same,
            Ok(_) if attached.is_some() => Comes::Another,
            Ok(_) => Comes::Plain,
            Err(error) => Comes::Error(error["code"].as_u64().unwrap()),
        };
        let (expected, written) = meanwhile.expected();
        assert_eq!(came, expected, "{meanwhile:?}: {answer:?}");
        assert_eq!(*writes.0.lock().unwrap(), written, "{meanwhile:?}");
        let stands = matches!(came, Comes::Same | Comes::Another).then_some(ended.container.clone());
        assert_eq!(attached, stands, "{meanwhile:?}");
        mend(case).await;
        assert_in_step(case, &[n1, n2]).await;
        assert_shown(case, cilium_picks).await;
        n1.del(&ended).await;
        assert_eq!(stage.attached(&name).await, None, "{meanwhile:?}");
        delete_pod(case, &name).await;
    }
}

#[tokio::test]
async fn an_optimistic_attachment_stands_only_if_the_reads_agree() {
    whatever_happened(false).await;
}

#[tokio::test]
async fn where_cilium_picks_an_optimistic_attachment_stands_only_if_the_reads_agree() {
    whatever_happened(true).await;
}

#[tokio::test]
async fn an_optimistic_add_that_crashes_at_any_write_is_cleaned_up_by_its_del() {
    let stage = Stage::new(false).await;
    let Stage { case, n1, n2 } = &stage;
    for meanwhile in ALL {
        for after in [false, true] {
            let mut number = 1;
            loop {
                let name = format!("{meanwhile:?}-{after}-{number}").to_lowercase();
                let address = stage.had(&name).await;
                let ended = meanwhile.happen(&stage, &name, address).await;
                let came = n1.add_before(&ended, EndAt::new(number, after)).await;
                n1.del(&ended).await;
                assert_eq!(stage.attached(&name).await, None, "{name}");
                mend(case).await;
                assert_in_step(case, &[n1, n2]).await;
                assert_shown(case, false).await;
                // Whoever comes next on another node does not wait for what never lived.
                let next = stage.pod(&name, n2, json!({})).await;
                n2.add(&next).await.unwrap();
                assert_eq!(stage.attached(&name).await, Some(next.container.clone()), "{name}");
                n2.del(&next).await;
                delete_pod(case, &name).await;
                // Or the pool would soon be empty.
                stage.stickies().delete(&name, &DeleteParams::default()).await.unwrap();
                mend(case).await;
                if came.is_some() {
                    break;
                }
                number += 1;
            }
            assert!(number > meanwhile.expected().1.len(), "{meanwhile:?}");
        }
    }
}

#[tokio::test]
async fn a_late_add_of_a_deleted_pod_takes_nothing_from_its_successor_on_another_node() {
    let mut stage = Stage::new(false).await;
    stage.n2.patience("20s");
    let Stage { case, n1, n2 } = &stage;
    for round in 0..20 {
        let name = format!("db-{round}");
        let address = stage.had(&name).await;
        let late = stage.pod(&name, n1, json!({})).await;
        let next = stage.pod(&name, n2, json!({})).await;
        let (lost, won) = tokio::join!(n1.add(&late), n2.add(&next));
        assert_eq!(lost.unwrap_err()["code"], 11);
        assert_eq!(won.unwrap(), address);
        assert_eq!(stage.attached(&name).await, Some(next.container.clone()));
        assert_in_step(case, &[n1, n2]).await;
        // The runtime's DEL after the error frees nothing of the other's.
        n1.del(&late).await;
        assert_eq!(stage.attached(&name).await, Some(next.container));
    }
    assert_eq!(stickies(case).await.len(), 20);
}

#[tokio::test]
async fn with_no_server_to_talk_to_nothing_is_sent_ahead_and_who_may_allocate_does() {
    let mut stage = Stage::new(false).await;
    stage.n1.seed(&stage.case).await;
    for (name, refused) in [("away", false), ("refused", true)] {
        let address = stage.had(name).await;
        let next = stage.pod(name, &stage.n1, json!({})).await;
        let own = stage.n1.kubeconfig();
        stage.n1.on_unavailable("allocate");
        let proxy = match refused {
            true => {
                stage.n1.by(&stage.case.forged_token());
                None
            }
            false => Some(cut_off(&stage.case, &mut stage.n1)),
        };
        let got = stage.n1.add(&next).await.unwrap();
        assert_ne!(got, address, "{name}: it is not known whose that is now");
        stage.n1.del(&next).await;
        drop(proxy);
        stage.n1.by_file(own);
        stage.n1.timeout("20s");
        assert_eq!(stage.attached(name).await, None, "{name}");
    }
}

#[tokio::test]
async fn an_attachment_applied_despite_an_error_answer_is_undone_for_a_plain_pod() {
    let mut stage = Stage::new(false).await;
    let front = stage.case.front().await;
    let bound = stage.case.bound_to(&stage.n1.name).await;
    let access = stage.case.token(&format!("plugin-{}", stage.n1.name), Some(bound)).await;
    let own = stage.n1.kubeconfig();
    // Answered once with an error, and asked again by the client itself; or told as it is. One of the first
    // requests is the attachment.
    for status in [504, 500] {
        for from in 1..=5 {
            for meanwhile in [Meanwhile::NotSticky, Meanwhile::Nothing] {
                let name = format!("{meanwhile:?}-{status}-{from}").to_lowercase();
                let address = stage.had(&name).await;
                let ended = meanwhile.happen(&stage, &name, address).await;
                stage.n1.by(&access.through_front(&front));
                front.begin(Trouble { status, from, to: from, done: true });
                let got = stage.n1.add(&ended).await;
                front.end();
                stage.n1.by_file(own.clone());
                let attached = stage.attached(&name).await;
                match (meanwhile, &got) {
                    (Meanwhile::NotSticky, Ok(got)) => {
                        assert_ne!(*got, address, "{name}");
                        assert_eq!(attached, None, "{name}");
                    }
                    (_, Ok(got)) => {
                        assert_eq!(*got, address, "{name}");
                        assert_eq!(attached, Some(ended.container.clone()), "{name}");
                    }
                    // One of the reads.
                    (_, Err(error)) => assert_eq!(error["code"], 11, "{name}: {error}"),
                }
                assert!(got.is_ok() || status == 500, "{name}: the client asks again");
                stage.n1.del(&ended).await;
                assert_eq!(stage.attached(&name).await, None, "{name}");
                assert_in_step(&stage.case, &[&stage.n1, &stage.n2]).await;
            }
        }
    }
}

#[tokio::test]
async fn a_del_detaches_what_a_crashed_optimistic_add_attached_to_a_now_plain_pod() {
    let stage = Stage::new(true).await;
    let address = stage.had("db-0").await;
    let ended = Meanwhile::NotSticky.happen(&stage, "db-0", address).await;
    assert!(stage.n1.add_before(&ended, EndAt::new(1, true)).await.is_none());
    assert_eq!(stage.attached("db-0").await, Some(ended.container.clone()));
    let pod = PodIdentity::new(&ended.namespace, &ended.pod, Some(&ended.uid)).unwrap();
    let store = stage.n1.store();
    let decision = Decision::about(&pod, None, "test", store.now().clone()).unwrap();
    let mut locked = store.lock().unwrap();
    locked.put_decision(&decision).unwrap();
    locked.commit().unwrap();
    stage.n1.del(&ended).await;
    assert_eq!(stage.attached("db-0").await, None);
}

#[tokio::test]
async fn a_pin_to_one_of_a_nodes_two_families_is_sent_ahead_once_and_stands() {
    let mut stage = Stage::new(false).await;
    stage.n1.also("fd00:7::/120".parse().unwrap());
    let pin = stage.case.range().subnets(26).unwrap().nth(2).unwrap().hosts().nth(7).unwrap().to_string();
    let pinned = || json!({"sticky-ipam.io/ips": pin});
    let first = stage.pod("db-0", &stage.n1, pinned()).await;
    let had = stage.n1.add_all(&first).await.unwrap();
    assert_eq!((had.len(), had[0].to_string()), (2, pin.clone()));
    stage.n1.del(&first).await;
    let again = stage.pod("db-0", &stage.n1, pinned()).await;
    let writes = Arc::new(Writes::default());
    assert_eq!(stage.n1.add_before(&again, writes.clone()).await.unwrap().unwrap(), had[0]);
    assert_eq!(*writes.0.lock().unwrap(), ["attach"]);
}

#[tokio::test]
async fn a_server_of_no_help_is_in_doubt_once_and_then_one_that_was_not_asked() {
    let mut stage = Stage::new(false).await;
    let front = stage.case.front().await;
    let bound = stage.case.bound_to(&stage.n1.name).await;
    let access = stage.case.token(&format!("plugin-{}", stage.n1.name), Some(bound)).await;
    let own = stage.n1.kubeconfig();
    stage.n1.seed(&stage.case).await;
    // It is not ready, however often it is asked; or it fails at all that is asked first, and is well again
    // for the look at what came of it.
    for (status, to) in [(503, usize::MAX), (500, 4)] {
        let name = format!("e-{status}");
        let address = stage.had(&name).await;
        let first = stage.pod(&name, &stage.n1, json!({})).await;
        stage.n1.by(&access.through_front(&front));
        stage.n1.on_unavailable("allocate");
        stage.n1.timeout("2s");
        front.begin(Trouble { status, from: 1, to, done: false });
        let error = stage.n1.add(&first).await.unwrap_err();
        assert_eq!(error["code"], 11, "{name}: the attachment may come late: {error}");
        stage.n1.del(&first).await;
        front.begin(Trouble { status, from: 1, to: usize::MAX, done: false });
        let mut second = first.clone();
        second.container = format!("{}-again", first.container);
        assert_ne!(stage.n1.add(&second).await.unwrap(), address, "{name}: whose it is nobody says");
        stage.n1.del(&second).await;
        front.end();
        stage.n1.by_file(own.clone());
        stage.n1.on_unavailable("fail");
        stage.n1.timeout("20s");
        assert_eq!(stage.attached(&name).await, None, "{name}");
        let third = stage.pod(&name, &stage.n1, json!({})).await;
        assert_eq!(stage.n1.add(&third).await.unwrap(), address, "{name}");
    }
}
