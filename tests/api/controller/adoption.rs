//! Running pods that came up without the plugin get a binding from the addresses they show.

use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::{AddressClaim, ClaimPhase, IPPool, StickyIP};
use sticky_ipam::cluster::writer::apply::{SentWrite, WriteObserver};
use sticky_ipam::policy::lifetime::retention::Keep;

use crate::support::controller::{Desk, HURRIED, rounds, until, while_at_work};
use crate::support::node::{TestNode, assert_in_step, delete_pod, sandbox, set_ready, sticky_pool};

impl Desk {
    /// The kubelet's word: the pod runs with this address.
    pub async fn runs(&self, pod: &str, address: &str) {
        let api: Api<Pod> = Api::namespaced(self.case.client(), self.case.namespace());
        let status = json!({"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}});
        api.patch_status(pod, &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    }

    /// What the agent of the home node would say.
    pub async fn answer(&self, address: &str, spec: Value) {
        let api: Api<AddressClaim> = Api::all(self.case.client());
        api.patch(address, &PatchParams::default(), &Patch::Merge(json!({"spec": spec}))).await.unwrap();
    }

    pub async fn claim(&self, address: &str) -> Option<AddressClaim> {
        Api::<AddressClaim>::all(self.case.client()).get_opt(address).await.unwrap()
    }
}

fn attachment(sticky: &StickyIP) -> Option<(String, String)> {
    let attachment = sticky.status.as_ref()?.attachment.as_ref()?;
    Some((attachment.node.clone(), attachment.attachment_id.to_string()))
}

#[tokio::test]
async fn an_address_of_a_sticky_pool_is_bound_at_once() {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    let owner = desk.stateful_set("db", 1).await;
    let context = desk.context(&HURRIED[1..]);
    while_at_work(&context, async {
        let says = json!({"sticky-ipam.io/retention": "Forever"});
        let pod = desk.pod("db-0", "n1", Some(&owner), says).await;
        desk.pod("plain", "n1", None, json!({"sticky-ipam.io/sticky": "false"})).await;
        desk.runs("plain", &desk.address(8)).await;
        desk.runs("db-0", &desk.address(7)).await;
        until("the binding", || async {
            let found = desk.stickies().get_opt("db-0").await.unwrap();
            found.as_ref().and_then(attachment).is_some()
        })
        .await;
        let sticky = desk.stickies().get("db-0").await.unwrap();
        assert_eq!(sticky.spec.addresses[0].to_string(), desk.address(7));
        assert_eq!(
            (sticky.spec.workload.kind.as_str(), sticky.spec.workload.name.as_str()),
            ("StatefulSet", "db")
        );
        let adopted = format!("adopted-{}", pod.metadata.uid.unwrap());
        assert_eq!(attachment(&sticky), Some(("n1".to_owned(), adopted)));
        let as_made = (sticky.spec.retention.keep, sticky.metadata.generation);
        assert_eq!(as_made, (Keep::Forever, Some(1)), "made with what its pod asks for");
        assert_eq!(desk.names().await, ["db-0"], "the other one is not sticky");
        until("the event", || async { desk.told("Adopted").await.len() == 1 }).await;
    })
    .await;
    assert_in_step(&desk.case, &[]).await;
}

#[tokio::test]
async fn an_address_of_a_nodes_block_is_asked_of_that_node_and_bound_when_it_grants() {
    let desk = Desk::take().await;
    let context = desk.context(&[&HURRIED[..2], &HURRIED[3..]].concat());
    let (granted, refused) = (desk.address(7), desk.address(8));
    while_at_work(&context, async {
        for (pod, address) in [("db-0", &granted), ("db-1", &refused)] {
            desk.pod(pod, "n1", None, json!({})).await;
            desk.runs(pod, address).await;
            until("the request", || async { desk.claim(address).await.is_some() }).await;
            let claim = desk.claim(address).await.unwrap().spec;
            assert_eq!((claim.phase, claim.home_node.as_deref()), (ClaimPhase::Requested, Some("n1")));
        }
        assert!(desk.names().await.is_empty());
        desk.answer(&granted, json!({"phase": "Granted"})).await;
        until("the binding", || async {
            let found = desk.stickies().get_opt("db-0").await.unwrap();
            found.as_ref().and_then(attachment).is_some()
        })
        .await;
        desk.answer(&refused, json!({"phase": "Refused", "reason": "another pod has it"})).await;
        until("the refusal's event", || async { !desk.told("AdoptionFailed").await.is_empty() }).await;
        let told = desk.told("AdoptionFailed").await;
        assert!(told[0].contains("another pod has it"), "{told:?}");
        assert_eq!(desk.names().await, ["db-0"]);
    })
    .await;
}

#[tokio::test]
async fn a_request_stands_while_its_pod_runs_however_long_the_node_does_not_answer() {
    let desk = Desk::take().await;
    let context = desk.context(HURRIED);
    let address = desk.address(7);
    while_at_work(&context, async {
        desk.pod("db-0", "n1", None, json!({})).await;
        desk.runs("db-0", &address).await;
        until("the request", || async { desk.claim(&address).await.is_some() }).await;
        let asked = desk.claim(&address).await.unwrap().metadata.uid;
        // Every claim is old enough to be an orphan at once.
        let so_far = rounds(&context, "repair");
        until("looks", || async { rounds(&context, "repair") > so_far + 2 }).await;
        assert_eq!(desk.claim(&address).await.and_then(|claim| claim.metadata.uid), asked);
        delete_pod(&desk.case, "db-0").await;
        until("its end", || async { desk.claim(&address).await.is_none() }).await;
    })
    .await;
}

#[tokio::test]
async fn an_address_of_a_nodes_block_is_asked_of_that_node_though_a_sticky_pool_covers_it() {
    let desk = Desk::take().await;
    let node = TestNode::ready(&desk.case, "n1", desk.case.range()).await;
    sticky_pool(&desk.case, desk.case.range()).await;
    let context = desk.context(&[&HURRIED[..2], &HURRIED[3..]].concat());
    let address = desk.address(7);
    while_at_work(&context, async {
        desk.pod("db-0", &node.name, None, json!({})).await;
        desk.runs("db-0", &address).await;
        until("the claim", || async { desk.claim(&address).await.is_some() }).await;
        let claim = desk.claim(&address).await.unwrap().spec;
        assert_eq!(claim.phase, ClaimPhase::Requested);
        assert_eq!(
            (claim.home_node, claim.block),
            (Some(node.name.clone()), Some(desk.case.range().to_string()))
        );
        assert!(desk.names().await.is_empty());
    })
    .await;
}

type Written = Arc<Mutex<Vec<String>>>;

/// Keeps the words of every write.
struct Recorder(Written);

impl WriteObserver for Recorder {
    fn before(&self, _: usize, write: SentWrite<'_>) {
        self.0.lock().unwrap().push(write.description().to_owned());
    }
}

#[tokio::test]
async fn a_pod_that_the_plugin_attached_is_left_alone() {
    let desk = Desk::take().await;
    let node = TestNode::ready(&desk.case, "n1", desk.case.range()).await;
    set_ready(&desk.case, &node.name, true).await;
    let pod = sandbox(&desk.pod("db-0", &node.name, None, json!({})).await);
    let address = node.add(&pod).await.unwrap();
    let written: Written = Arc::default();
    let context = desk.context_with(desk.case.client(), HURRIED, Box::new(Recorder(written.clone())));
    while_at_work(&context, async {
        desk.runs("db-0", &address.to_string()).await;
        let so_far = rounds(&context, "adoption");
        until("a look", || async { rounds(&context, "adoption") > so_far }).await;
        let sticky = desk.stickies().get("db-0").await.unwrap();
        assert_eq!(attachment(&sticky), Some((node.name.clone(), pod.container.clone())));
    })
    .await;
    // Other duties look after the node.
    let of_nodes = |what: &String| ["Lease", "Node", "Event"].iter().any(|other| what.contains(other));
    let written: Vec<String> = written.lock().unwrap().clone();
    assert!(written.iter().all(of_nodes), "{written:?}");
    node.del(&pod).await;
    assert_in_step(&desk.case, &[&node]).await;
}

#[tokio::test]
async fn marking_with_an_address_of_a_sticky_pool_is_three_writes_and_an_event() {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    let set = desk.stateful_set("db", 9).await;
    let fleet = json!({"apiVersion": "test.example/v1", "kind": "Fleet", "name": "web", "uid": "f", "controller": true});
    let written: Written = Arc::default();
    // The times are those of every day: repair has patience with what has just begun.
    let context = desk.context_with(desk.case.client(), &HURRIED[3..], Box::new(Recorder(written.clone())));
    while_at_work(&context, async {
        for (number, (name, owner)) in
            (0u8..).zip([("db-0", &set), ("db-1", &set), ("web-x", &fleet), ("web-y", &fleet)])
        {
            desk.pod(name, "n1", Some(owner), json!({})).await;
            desk.runs(name, &desk.address(20 + number)).await;
        }
        until("the events", || async { desk.told("Adopted").await.len() == 4 }).await;
        let so_far = rounds(&context, "repair");
        until("some time", || async { rounds(&context, "repair") > so_far + 2 }).await;
    })
    .await;
    // How much of a pool is used is written now and then, for all of its claims.
    let mut written = written.lock().unwrap().clone();
    written.retain(|what| !what.contains("status of IPPool"));
    let of_it = |what: &str| written.iter().filter(|one| *one == what).count();
    for what in ["create StickyIP", "create claim", "attach", "create Event"] {
        assert_eq!(of_it(what), 4, "{what}: {written:?}");
    }
    assert_eq!(written.len(), 16, "nothing else is written: {written:?}");
    assert_in_step(&desk.case, &[]).await;
}

#[tokio::test]
async fn pods_of_a_deployment_get_a_slot_each() {
    let desk = Desk::take().await;
    sticky_pool(&desk.case, desk.case.range()).await;
    let owner = json!({"apiVersion": "test.example/v1", "kind": "Fleet", "name": "web", "uid": "f", "controller": true});
    let context = desk.context(HURRIED);
    while_at_work(&context, async {
        for n in 0..5u8 {
            desk.pod(&format!("web-{n}x"), "n1", Some(&owner), json!({})).await;
            desk.runs(&format!("web-{n}x"), &desk.address(10 + n)).await;
        }
        until("five slots", || async {
            let names = desk.names().await;
            let mut attached = 0;
            for name in &names {
                attached += usize::from(attachment(&desk.stickies().get(name).await.unwrap()).is_some());
            }
            attached == 5
        })
        .await;
        assert_eq!(desk.names().await, ["web-0", "web-1", "web-2", "web-3", "web-4"]);
    })
    .await;
    assert_in_step(&desk.case, &[]).await;
}

#[tokio::test]
async fn a_pods_second_family_is_bound_only_where_it_is_asked_for() {
    let ipv6 = ["--enable-ipv6=true", "--enable-static-pod-ipv6=true"];
    for (flags, families) in [(&ipv6[..], 2), (&[][..], 1)] {
        let desk = Desk::take().await;
        let pool = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "IPPool", "metadata": {"name": desk.case.unique("both")},
            "spec": {"cidrs": [desk.case.range().to_string(), "fd00:51::/112"], "use": "Sticky"}});
        let pools: Api<IPPool> = Api::all(desk.case.client());
        pools.create(&Default::default(), &serde_json::from_value(pool).unwrap()).await.unwrap();
        let context = desk.context(&[HURRIED, flags].concat());
        while_at_work(&context, async {
            desk.pod("db-0", "n1", None, json!({})).await;
            let (v4, v6) = (desk.address(7), "fd00:51::7");
            let pods: Api<Pod> = Api::namespaced(desk.case.client(), desk.case.namespace());
            let status =
                json!({"status": {"phase": "Running", "podIP": v4, "podIPs": [{"ip": v4}, {"ip": v6}]}});
            pods.patch_status("db-0", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
            until("the binding", || async {
                let found = desk.stickies().get_opt("db-0").await.unwrap();
                found.as_ref().and_then(attachment).is_some()
            })
            .await;
            let bound = desk.stickies().get("db-0").await.unwrap().spec.addresses;
            let bound: Vec<String> = bound.iter().map(ToString::to_string).collect();
            assert_eq!(bound, [v4.as_str(), v6][..families]);
            let claims = desk.claims().await;
            assert_eq!(claims.len(), families);
            assert!(claims.iter().all(|claim| claim.spec.phase == ClaimPhase::Bound));
        })
        .await;
        assert_in_step(&desk.case, &[]).await;
    }
}
