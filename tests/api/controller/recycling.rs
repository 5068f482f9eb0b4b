//! Addresses are let go when their workload is gone, by proof, and come back if it does.

use std::net::IpAddr;
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::{ClaimPhase, StickyIP};
use sticky_ipam::cluster::writer::apply::{SentWrite, WriteObserver};
use sticky_ipam::controller::commands::list_once::list_cluster;
use sticky_ipam::controller::duties::retention::RetentionSync;
use sticky_ipam::controller::duty::Duty;
use sticky_ipam::controller::index::Kind;
use sticky_ipam::controller::queue::Key;
use sticky_ipam::policy::lifetime::retention::{Keep, Retention};
use sticky_ipam::runtime::cache::CacheEvent;

use crate::support::controller::{Desk, HURRIED, rounds, until, while_at_work};
use crate::support::node::{TestNode, delete_pod, sandbox};

fn set(name: &str) -> Value {
    json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name})
}

#[tokio::test]
async fn a_deleted_workloads_addresses_are_released_and_those_of_an_existing_one_are_not() {
    let desk = Desk::take().await;
    desk.stateful_set("stays", 2).await;
    desk.stateful_set("goes", 2).await;
    desk.retained("stays-0", &desk.address(1), set("stays"), json!({})).await;
    desk.retained("goes-0", &desk.address(2), set("goes"), json!({})).await;
    desk.retained("goes-1", &desk.address(3), set("goes"), json!({"retention": {"keep": "Forever"}})).await;
    let context = desk.context(HURRIED);
    while_at_work(&context, async {
        until("a first look", || async { rounds(&context, "recycling") > 0 }).await;
        desk.delete_set("goes").await;
        until("the release", || async { desk.claims().await.len() == 2 }).await;
        assert_eq!(desk.names().await, ["goes-1", "stays-0"]);
        until("the event", || async { !desk.told("Released").await.is_empty() }).await;
        let told = desk.told("Released").await;
        assert!(told[0].contains(&desk.address(2)) && told[0].contains("StatefulSet goes"), "{told:?}");
    })
    .await;
    assert!(
        context
            .metrics
            .page()
            .contains("sticky_ipam_controller_sticky_ips_released_total{reason=\"WorkloadGone\"} 1")
    );
}

#[tokio::test]
async fn one_check_releases_nothing() {
    let desk = Desk::take().await;
    desk.retained("db-0", &desk.address(1), set("db"), json!({})).await;
    let context = desk.context(&[&HURRIED[1..], &["--proof-gap=1h"]].concat());
    while_at_work(&context, async {
        until("a first look", || async { rounds(&context, "recycling") > 0 }).await;
        let so_far = rounds(&context, "repair");
        until("some time", || async { rounds(&context, "repair") > so_far + 2 }).await;
        assert_eq!(desk.names().await, ["db-0"]);
        assert_eq!(context.writer.count(), 0, "nothing was written");
    })
    .await;
}

/// The address of a pod that was there and is gone.
async fn came_and_went(desk: &Desk, node: &TestNode, owner: &Value, pod: &str) -> IpAddr {
    let first = sandbox(&desk.pod(pod, &node.name, Some(owner), json!({})).await);
    let address = node.add(&first).await.unwrap();
    node.del(&first).await;
    delete_pod(&desk.case, pod).await;
    address
}

async fn all_rest(desk: &Desk) {
    until("the rest", || async {
        desk.claims().await.iter().all(|claim| claim.spec.phase == ClaimPhase::Quarantined)
    })
    .await;
}

#[tokio::test]
async fn a_workload_recreated_within_the_quarantine_gets_its_addresses_back() {
    let desk = Desk::take().await;
    let node = TestNode::ready(&desk.case, "n1", desk.case.range()).await;
    let owner = desk.stateful_set("db", 1).await;
    let address = came_and_went(&desk, &node, &owner, "db-0").await;
    desk.delete_set("db").await;
    let resting = [&HURRIED[..1], &HURRIED[2..], &["--quarantine=1h"]].concat();
    let context = desk.context(&resting);
    while_at_work(&context, async {
        all_rest(&desk).await;
        assert!(desk.names().await.is_empty());
        // Another claimant on the same node does not get it.
        let other = sandbox(&desk.pod("other", &node.name, None, json!({})).await);
        assert_ne!(node.add(&other).await.unwrap(), address);
        let owner = desk.stateful_set("db", 1).await;
        let again = sandbox(&desk.pod("db-0", &node.name, Some(&owner), json!({})).await);
        assert_eq!(node.add(&again).await.unwrap(), address);
    })
    .await;
}

#[tokio::test]
async fn without_inheritance_a_recreated_workload_gets_another_address_unless_pinned() {
    let desk = Desk::take().await;
    let node = TestNode::ready(&desk.case, "n1", desk.case.range()).await;
    let owner = desk.stateful_set("db", 2).await;
    let mut had = Vec::new();
    for pod in ["db-0", "db-1"] {
        had.push(came_and_went(&desk, &node, &owner, pod).await);
    }
    // This one's StickyIP somebody deletes while its pod lives: that is no letting go.
    let lives = sandbox(&desk.pod("lone", &node.name, None, json!({})).await);
    let kept = node.add(&lives).await.unwrap();
    let pods: Api<Pod> = Api::namespaced(desk.case.client(), desk.case.namespace());
    let status = json!({"status": {"phase": "Running", "podIP": kept.to_string(), "podIPs": [{"ip": kept.to_string()}]}});
    pods.patch_status("lone", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    desk.stickies().delete("lone", &Default::default()).await.unwrap();
    desk.delete_set("db").await;
    let strict =
        [&HURRIED[..1], &HURRIED[2..], &["--quarantine=1h", "--inherit=false", "--adopt-running=false"]]
            .concat();
    let context = desk.context(&strict);
    while_at_work(&context, async {
        all_rest(&desk).await;
        let released = async |address: IpAddr| {
            let claim = desk.claims().await.into_iter().find(|claim| claim.spec.address == address);
            claim.unwrap().spec.released
        };
        assert_eq!(released(had[0]).await, Some(true));
        assert_eq!(released(kept).await, None, "a pod shows it");
        let owner = desk.stateful_set("db", 2).await;
        let again = sandbox(&desk.pod("db-0", &node.name, Some(&owner), json!({})).await);
        let got = node.add(&again).await.unwrap();
        assert!(!had.contains(&got), "{got} was let go for good");
        let pin = json!({"sticky-ipam.io/ips": format!("{},{}", had[0], had[1])});
        let pinned = sandbox(&desk.pod("db-1", &node.name, Some(&owner), pin).await);
        assert_eq!(node.add(&pinned).await.unwrap(), had[1]);
        assert_eq!(released(had[1]).await, None);
    })
    .await;
}

#[tokio::test]
async fn a_recreated_workload_faster_than_the_controller_keeps_the_address_with_an_event() {
    let desk = Desk::take().await;
    let node = TestNode::ready(&desk.case, "n1", desk.case.range()).await;
    let owner = desk.stateful_set("db", 1).await;
    let address = came_and_went(&desk, &node, &owner, "db-0").await;
    desk.delete_set("db").await;
    let owner = desk.stateful_set("db", 1).await;
    let again = sandbox(&desk.pod("db-0", &node.name, Some(&owner), json!({})).await);
    assert_eq!(node.add(&again).await.unwrap(), address);
    let context = desk.context(HURRIED);
    while_at_work(&context, async {
        let uid = owner["uid"].as_str().unwrap();
        until("the new workload's uid", || async {
            desk.stickies().get("db-0").await.unwrap().spec.workload.uid == uid
        })
        .await;
        until("the event", || async { desk.told("Inherited").await.iter().any(|told| told.contains("db")) })
            .await;
    })
    .await;
}

#[tokio::test]
async fn scale_down_follows_each_bindings_own_rule() {
    let desk = Desk::take().await;
    desk.stateful_set("db", 9).await;
    let binding = |ordinal: u32, retention: Value| json!({"claimant": {"kind": "Pod", "ordinal": ordinal}, "retention": retention});
    desk.retained("db-1", &desk.address(1), set("db"), binding(1, json!({"onScaleDown": "Release"}))).await;
    desk.retained("db-6", &desk.address(6), set("db"), binding(6, json!({"onScaleDown": "Release"}))).await;
    desk.retained("db-7", &desk.address(7), set("db"), binding(7, json!({"onScaleDown": "Retain"}))).await;
    let soon = json!({"onScaleDown": "TTL", "scaleDownTtlSeconds": 1});
    desk.retained("db-8", &desk.address(8), set("db"), binding(8, soon)).await;
    let context = desk.context(HURRIED);
    while_at_work(&context, async {
        until("a first round", || async { rounds(&context, "recycling") > 0 }).await;
        assert_eq!(desk.names().await.len(), 4);
        desk.scale("db", 2).await;
        until("the release of two", || async { desk.names().await == ["db-1", "db-7"] }).await;
        until("their claims' end", || async { desk.claims().await.len() == 2 }).await;
    })
    .await;
}

#[tokio::test]
async fn a_time_to_live_runs_from_the_last_sight_of_the_pod() {
    let desk = Desk::take().await;
    let ttl = |seconds: u32| json!({"retention": {"keep": "TTL", "ttlSeconds": seconds}});
    // Last seen long ago.
    desk.retained("over", &desk.address(1), set("gone"), ttl(60)).await;
    desk.retained("runs", &desk.address(2), set("gone"), ttl(315_360_000)).await;
    let context = desk.context(HURRIED);
    let conditions = async || desk.stickies().get("runs").await.unwrap().status.unwrap().conditions;
    while_at_work(&context, async {
        until("the release of one", || async { desk.names().await == ["runs"] }).await;
        until("the word until when", || async { !conditions().await.is_empty() }).await;
        let waits = conditions().await.remove(0);
        assert_eq!((waits.kind.as_str(), waits.reason.as_str()), ("Releasing", "TTLRunning"));
        // Ten years of seconds after the last sight.
        assert!(waits.message.contains("2035-12-30T00:00:00Z"), "{}", waits.message);
        desk.stateful_set("gone", 1).await;
        until("its end", || async { conditions().await.is_empty() }).await;
    })
    .await;
}

/// Writes down what is written.
#[derive(Clone, Default)]
struct Scribe(Arc<Mutex<Vec<String>>>);

impl WriteObserver for Scribe {
    fn before(&self, _: usize, write: SentWrite<'_>) {
        self.0.lock().unwrap().push(write.description().to_owned());
    }
}

#[tokio::test]
async fn a_mass_deletion_costs_one_write_for_each_stickyip() {
    const ALL: u8 = 30;
    let desk = Desk::take().await;
    for n in 0..ALL {
        desk.retained(&format!("db-{n}"), &desk.address(n), set("db"), json!({})).await;
    }
    let scribe = Scribe::default();
    let given = [&HURRIED[1..], &["--proof-gap=1s"]].concat();
    let context = desk.context_with(desk.case.client(), &given, Box::new(scribe.clone()));
    while_at_work(&context, until("their end", || async { desk.names().await.is_empty() })).await;
    let written = scribe.0.lock().unwrap().clone();
    let of_stickies: Vec<_> = written.iter().filter(|what| what.contains("StickyIP")).collect();
    assert_eq!(of_stickies.len(), usize::from(ALL), "{of_stickies:?}");
}

#[tokio::test]
async fn kubernetes_own_kinds_keep_their_addresses_until_they_are_deleted() {
    let desk = Desk::take().await;
    let template = json!({"metadata": {"labels": {"app": "x"}},
        "spec": {"restartPolicy": "Always", "containers": [{"name": "main", "image": "none"}]}});
    let pods = json!({"selector": {"matchLabels": {"app": "x"}}, "template": template});
    let mut once = json!({"template": template});
    once["template"]["spec"]["restartPolicy"] = json!("Never");
    let kinds = [
        ("apps/v1", "Deployment", "deployments", &pods),
        ("apps/v1", "DaemonSet", "daemonsets", &pods),
        ("apps/v1", "ReplicaSet", "replicasets", &pods),
        ("batch/v1", "Job", "jobs", &once),
    ];
    let path = |version: &str, plural: &str| {
        format!("/apis/{version}/namespaces/{}/{plural}", desk.case.namespace())
    };
    for (n, (version, kind, plural, spec)) in (1u8..).zip(kinds) {
        let object = json!({"apiVersion": version, "kind": kind, "metadata": {"name": plural}, "spec": spec});
        let request = http::Request::post(path(version, plural)).header("content-type", "application/json");
        let request = request.body(object.to_string().into_bytes()).unwrap();
        let made: Value = desk.case.client().request(request).await.unwrap();
        let uid = made["metadata"]["uid"].clone();
        let workload = json!({"apiVersion": version, "kind": kind, "name": plural, "uid": uid});
        desk.retained(plural, &desk.address(n), workload, json!({})).await;
    }
    let context = desk.context(HURRIED);
    while_at_work(&context, async {
        until("a first look", || async { rounds(&context, "recycling") > 0 }).await;
        let mut left = kinds.map(|(.., plural, _)| plural).to_vec();
        left.sort_unstable();
        for (version, kind, plural, _) in kinds {
            assert_eq!(desk.names().await, left, "before {kind} is deleted");
            let gone = "?propagationPolicy=Background";
            let request = http::Request::delete(format!("{}/{plural}{gone}", path(version, plural)));
            desk.case.client().request::<Value>(request.body(Vec::new()).unwrap()).await.unwrap();
            left.retain(|name| *name != plural);
            until(kind, || async { desk.names().await == left }).await;
        }
    })
    .await;
}

#[tokio::test]
async fn pods_of_any_kind_are_looked_up_by_discovery_and_an_unknown_kind_keeps() {
    let desk = Desk::take().await;
    let fleets = desk.of_foreign_kind("test.example", "v2", "Fleet", "red").await;
    // By a version that is no longer served: the kind counts.
    let fleet = json!({"apiVersion": "test.example/v1", "kind": "Fleet", "name": "red"});
    let slot = json!({"claimant": {"kind": "Slot", "ordinal": 0}});
    desk.retained("red-0", &desk.address(1), fleet, slot.clone()).await;
    let unknown = json!({"apiVersion": "nobody.example/v1", "kind": "Ghost", "name": "g"});
    desk.retained("g-0", &desk.address(2), unknown, slot.clone()).await;
    let odd = json!({"apiVersion": "test.example/v1", "kind": "Flotilla", "name": "g"});
    desk.retained("g-1", &desk.address(3), odd, slot).await;
    let context = desk.context(HURRIED);
    while_at_work(&context, async {
        until("the doubt", || async { desk.told("ReleaseBlocked").await.len() == 2 }).await;
        let told = desk.told("ReleaseBlocked").await.join("\n");
        assert!(
            told.contains("no kind Ghost of nobody.example") && told.contains("no kind Flotilla"),
            "{told}"
        );
        assert_eq!(desk.names().await.len(), 3);
        fleets.delete("red", &Default::default()).await.unwrap();
        until("the release", || async { desk.names().await == ["g-0", "g-1"] }).await;
    })
    .await;
}

#[tokio::test]
async fn a_living_pod_and_an_attachment_keep_an_address_whose_workload_is_gone() {
    let desk = Desk::take().await;
    let node = TestNode::ready(&desk.case, "n1", desk.case.range()).await;
    let owner = json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "gone", "uid": "x", "controller": true});
    let pod = sandbox(&desk.pod("gone-0", &node.name, Some(&owner), json!({})).await);
    node.add(&pod).await.unwrap();
    desk.retained("bait", &desk.address(200), set("gone"), json!({})).await;
    let context = desk.context(&[HURRIED, &["--adopt-running=false"]].concat());
    while_at_work(&context, async {
        until("a look", || async { rounds(&context, "recycling") > 0 }).await;
        node.del(&pod).await;
        // Detached, but its pod is there; and so the other binding of the workload stays too.
        until("the detach", || async { is_free(&desk.stickies().get("gone-0").await.unwrap()) }).await;
        assert_eq!(desk.names().await, ["bait", "gone-0"]);
        delete_pod(&desk.case, "gone-0").await;
        until("the release", || async { desk.names().await.is_empty() }).await;
    })
    .await;
}

fn is_free(sticky: &StickyIP) -> bool {
    sticky.status.as_ref().is_some_and(|status| status.attachment.is_none())
}

#[tokio::test]
async fn what_pod_and_namespace_say_about_retention_is_written_to_the_binding() {
    let desk = Desk::take().await;
    let node = TestNode::ready(&desk.case, "n1", desk.case.range()).await;
    let says = json!({"sticky-ipam.io/retention": "90m"});
    let plain = sandbox(&desk.pod("plain", &node.name, None, json!({})).await);
    let special = sandbox(&desk.pod("special", &node.name, None, says).await);
    let odd = sandbox(&desk.pod("odd", &node.name, None, json!({"sticky-ipam.io/retention": "soon"})).await);
    for pod in [&plain, &special, &odd] {
        node.add(pod).await.unwrap();
    }
    let given = [HURRIED, &["--retention=TTL", "--retention-ttl=5h", "--on-scale-down=Release"]].concat();
    let context = desk.context(&given);
    let retention = async |name: &str| {
        serde_json::to_value(desk.stickies().get(name).await.unwrap().spec.retention).unwrap()
    };
    while_at_work(&context, async {
        let five = json!({"keep": "TTL", "ttlSeconds": 18000, "onScaleDown": "Release"});
        until("the flags' word", || async { retention("plain").await == five }).await;
        let pods = json!({"keep": "TTL", "ttlSeconds": 5400, "onScaleDown": "Release"});
        until("the pod's word", || async { retention("special").await == pods }).await;
        until("the complaint", || async {
            desk.told("InvalidAnnotation").await.iter().any(|t| t.contains("soon"))
        })
        .await;
        assert_eq!(retention("odd").await, json!({"keep": "WithWorkload", "onScaleDown": "Retain"}));
        let word = "released 5400 s after its pod was last seen; after a scale-down released at once: by its \
            pod's annotation, instead of: released 5400 s after its pod was last seen";
        until("the event", || async { !desk.told("RetentionSet").await.is_empty() }).await;
        assert_eq!(desk.told("RetentionSet").await, [word], "what the flags say of all is not told of each");
    })
    .await;
}

#[tokio::test]
async fn a_pods_retention_counts_if_no_controller_ran_in_its_life_and_is_not_manual() {
    let desk = Desk::take().await;
    let node = TestNode::ready(&desk.case, "n1", desk.case.range()).await;
    let owner = desk.stateful_set("db", 1).await;
    let says = |text: &str| json!({"sticky-ipam.io/retention": text});
    let first = sandbox(&desk.pod("db-0", &node.name, Some(&owner), says("Forever")).await);
    node.add(&first).await.unwrap();
    node.del(&first).await;
    delete_pod(&desk.case, "db-0").await;
    desk.delete_set("db").await;
    desk.retained("bait", &desk.address(200), set("gone"), json!({})).await;
    let context = desk.context(&[HURRIED, &["--on-scale-down=Release"]].concat());
    while_at_work(&context, async {
        until("the release of another", || async { !desk.names().await.contains(&"bait".to_owned()) }).await;
        let kept = desk.stickies().get("db-0").await.unwrap();
        assert_eq!(kept.spec.retention.keep, Keep::Forever);
        // It was a pod's word: another pod may say something else.
        let second = sandbox(&desk.pod("db-0", &node.name, Some(&owner), says("90m")).await);
        node.add(&second).await.unwrap();
        let wanted = json!({"keep": "TTL", "ttlSeconds": 5400, "onScaleDown": "Release"});
        until("the other word", || async {
            json!(desk.stickies().get("db-0").await.unwrap().spec.retention) == wanted
        })
        .await;
    })
    .await;
}

#[tokio::test]
async fn a_living_pod_that_removes_its_retention_is_no_longer_kept_by_it() {
    let desk = Desk::take().await;
    let node = TestNode::ready(&desk.case, "n1", desk.case.range()).await;
    let owner = desk.stateful_set("db", 1).await;
    let says = json!({"sticky-ipam.io/retention": "Forever"});
    let pod = sandbox(&desk.pod("db-0", &node.name, Some(&owner), says).await);
    node.add(&pod).await.unwrap();
    let context = desk.context(HURRIED);
    while_at_work(&context, async {
        until("everyone's first look", || async { context.metrics.initial_sync.get() > 0.0 }).await;
        assert_eq!(desk.stickies().get("db-0").await.unwrap().spec.retention.keep, Keep::Forever);
        let taken_back =
            Patch::Merge(json!({"metadata": {"annotations": {"sticky-ipam.io/retention": null}}}));
        let pods: Api<Pod> = Api::namespaced(desk.case.client(), desk.case.namespace());
        pods.patch("db-0", &PatchParams::default(), &taken_back).await.unwrap();
        until("the flags' word", || async {
            desk.stickies().get("db-0").await.unwrap().spec.retention == Retention::default()
        })
        .await;
        node.del(&pod).await;
        delete_pod(&desk.case, "db-0").await;
        desk.delete_set("db").await;
        until("the release", || async { desk.names().await.is_empty() }).await;
    })
    .await;
}

#[tokio::test]
async fn a_pod_seen_after_its_stickyip_gets_the_flags_retention_written() {
    let desk = Desk::take().await;
    let node = TestNode::ready(&desk.case, "n1", desk.case.range()).await;
    node.add(&sandbox(&desk.pod("db-0", &node.name, None, json!({})).await)).await.unwrap();
    let context = desk.context(&["--retention=Forever"]);
    let (index, _) = list_cluster(&context.writer).await.unwrap();
    *context.index() = index;
    let name = format!("{}/db-0", desk.case.namespace());
    let [pod, sticky] = [Kind::Pod, Kind::StickyIP].map(|kind| vec![Key::new(kind, name.clone())]);
    let seen = context.index().pods.get(&name).cloned().unwrap();
    context.index().apply_pod(CacheEvent::Deleted(name.clone()));
    let mut duty = RetentionSync::default();
    duty.round(&context, sticky).await;
    assert_eq!(context.writer.count(), 0, "nobody is known to ask");
    context.index().apply_pod(CacheEvent::Applied((name, seen)));
    duty.round(&context, pod).await;
    assert_eq!(desk.stickies().get("db-0").await.unwrap().spec.retention.keep, Keep::Forever);
}
