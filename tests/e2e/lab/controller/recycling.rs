//! What ends the keeping of an address, each way with a workload of its own, side by side: the times run at
//! once.

use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::{claim_of, is_free, let_go, phase, told};
use crate::support::lab::api::named;
use crate::support::lab::stage::Stage;
use crate::support::lab::workloads::{plain, pod, spec, stateful_set, sticky};
use crate::support::lab::{QUARANTINE, eventually};

const NAMESPACE: &str = "recycling";
/// The pods of a way stand on one node, so that a pin of another on that node can ask for their addresses.
const NODE: &str = "node-1";
/// The time of a TTL, well above the gap of the proof.
const TTL: u64 = 12;

pub fn every_way(stage: &Stage) {
    stage.lab.namespace(NAMESPACE);
    // kube-controller-manager's collector learns of a new kind only after a while.
    custom_kind(stage);
    // Where no pod at all has a CiliumEndpoint the keeper takes it that Cilium makes none, and nudges nobody.
    // The ways end one after the other, and the one that waits for a nudge must not be left alone.
    stage.api.create(pod(NAMESPACE, "bystander", plain("bystander"), json!({}), spec(Some(NODE))));
    let ways: [fn(&Stage); 7] =
        [deleted, recreated, outlived, scaled_down, custom, stuck_endpoint, lost_endpoint];
    thread::scope(|scope| {
        for way in ways {
            scope.spawn(move || way(stage));
        }
    });
    stage.lab.delete_namespace(NAMESPACE);
}

fn set_of(stage: &Stage, name: &str, replicas: usize, annotations: Value) {
    let mut set = stateful_set(NAMESPACE, name, replicas, spec(Some(NODE)));
    set["spec"]["template"]["metadata"]["annotations"] = annotations;
    stage.api.create(set);
}

fn delete_set(stage: &Stage, name: &str) {
    stage.api.delete(named("apps/v1", "StatefulSet", NAMESPACE, name));
}

/// The name and address of each pod.
fn addresses(stage: &Stage, app: &str, count: usize) -> Vec<(String, String)> {
    let pods = stage.api.all_ready(NAMESPACE, app, count);
    pods.into_iter().map(|(name, seen)| (name, seen.address().to_owned())).collect()
}

/// A StatefulSet is deleted. Its addresses rest, are refused to another, then are free, and the other has
/// one.
fn deleted(stage: &Stage) {
    set_of(stage, "deleted", 2, json!({}));
    let had = addresses(stage, "deleted", 2);
    let since = Instant::now();
    delete_set(stage, "deleted");
    for (name, address) in &had {
        let_go(stage, NAMESPACE, name);
        // The claim rests a moment after its StickyIP is gone, never before.
        eventually(&format!("{address} to rest"), || match phase(stage, address) {
            Some(phase) if phase == "Quarantined" => Ok(()),
            other => Err(format!("{other:?}")),
        });
        told(stage, NAMESPACE, "StickyIP", name, "Released");
    }
    let (_, wanted) = &had[0];
    let pin = json!({"sticky-ipam.io/ips": wanted});
    stage.api.create(pod(NAMESPACE, "next", sticky("next"), pin, spec(Some(NODE))));
    eventually("the word that the address rests", || {
        let events = stage.lab.attempt(&["kubectl", "events", "-n", NAMESPACE, "--for", "pod/next"])?;
        if events.contains(&had[0].0) { Ok(()) } else { Err(events) }
    });
    for (_, address) in &had {
        eventually(&format!("{address} to leave its former holder"), || match claim_of(stage, address) {
            Some(claim) if claim["spec"]["stickyRef"]["name"] != json!("next") => {
                Err(claim["spec"].to_string())
            }
            _ => Ok(()),
        });
    }
    let quarantine_over = since.elapsed();
    eprintln!("deleted: free after {quarantine_over:?}");
    assert!(quarantine_over >= QUARANTINE, "they rested for less than {QUARANTINE:?}");
    assert_eq!(stage.api.ready(NAMESPACE, "next").address(), wanted, "another pod has it now");
    stage.api.delete_pod(NAMESPACE, "next", Some(0));
}

/// One that is made anew while its addresses rest has them again, although the StickyIPs were let go.
fn recreated(stage: &Stage) {
    set_of(stage, "recreated", 2, json!({}));
    let had = addresses(stage, "recreated", 2);
    let uid = stage.api.sticky(NAMESPACE, "recreated-0").and_then(|sticky| sticky.metadata.uid);
    delete_set(stage, "recreated");
    for (name, _) in &had {
        let_go(stage, NAMESPACE, name);
    }
    set_of(stage, "recreated", 2, json!({}));
    assert_eq!(addresses(stage, "recreated", 2), had, "made anew within {QUARANTINE:?}");
    let now = stage.api.sticky(NAMESPACE, "recreated-0").and_then(|sticky| sticky.metadata.uid);
    assert!(now.is_some() && now != uid, "the StickyIP is another one: {now:?}, {uid:?}");
    // Nothing that was begun against the former one ends what the new one has.
    for (_, address) in &had {
        assert_eq!(phase(stage, address).as_deref(), Some("Bound"));
    }
    delete_set(stage, "recreated");
}

/// Seconds since a pod of this StickyIP was last seen, once the StickyIP is gone.
fn kept_for(stage: &Stage, name: &str) -> Duration {
    let last_seen = eventually(&format!("{name} to be detached"), || {
        let status = stage.api.sticky(NAMESPACE, name).and_then(|sticky| sticky.status);
        let status = status.ok_or_else(|| format!("StickyIP {name} is gone before it was seen detached"))?;
        match (&status.attachment, &status.last_seen) {
            (None, Some(seen)) => Ok(seen.0.as_second()),
            _ => Err(format!("{status:?}")),
        }
    });
    let_go(stage, NAMESPACE, name);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("after 1970");
    now.saturating_sub(Duration::from_secs(u64::try_from(last_seen).expect("after 1970")))
}

/// With a TTL the address outlives its workload by that time.
fn outlived(stage: &Stage) {
    set_of(stage, "outlived", 1, json!({"sticky-ipam.io/retention": format!("{TTL}s")}));
    addresses(stage, "outlived", 1);
    eventually("the annotation to reach the StickyIP", || {
        let retention =
            stage.api.sticky(NAMESPACE, "outlived-0").map(|sticky| sticky.spec.retention.ttl_seconds);
        if retention == Some(u32::try_from(TTL).ok()) { Ok(()) } else { Err(format!("{retention:?}")) }
    });
    delete_set(stage, "outlived");
    let kept = kept_for(stage, "outlived-0");
    eprintln!("outlived: kept for {kept:?}");
    assert!(kept.as_secs() >= TTL, "let go after {kept:?}");
}

/// Each of four pods with another policy; the workload is scaled to the first.
fn scaled_down(stage: &Stage) {
    set_of(stage, "scaled", 4, json!({}));
    let had = addresses(stage, "scaled", 4);
    let retention = |name: &str, retention: Value| {
        let sticky = named("sticky-ipam.io/v1alpha1", "StickyIP", NAMESPACE, name);
        stage.api.patch(sticky, json!({"spec": {"retention": retention}}));
    };
    retention("scaled-1", json!({"onScaleDown": "Retain"}));
    retention("scaled-2", json!({"onScaleDown": "TTL", "scaleDownTtlSeconds": TTL}));
    retention("scaled-3", json!({"onScaleDown": "Release"}));
    stage.api.scale("StatefulSet", NAMESPACE, "scaled", 1);
    thread::scope(|scope| {
        let timed = scope.spawn(|| kept_for(stage, "scaled-2"));
        let_go(stage, NAMESPACE, "scaled-3");
        assert!(stage.api.sticky(NAMESPACE, "scaled-2").is_some(), "its time is not over");
        let kept = timed.join().expect("the one with a time");
        eprintln!("scaled down: kept for {kept:?}");
        assert!(kept.as_secs() >= TTL, "let go after {kept:?}");
    });
    is_free(stage, &had[3].1);
    let retained = stage.api.sticky(NAMESPACE, "scaled-1").expect("Retain keeps it");
    assert_eq!(retained.spec.addresses[0].to_string(), had[1].1);
    stage.api.scale("StatefulSet", NAMESPACE, "scaled", 2);
    assert_eq!(addresses(stage, "scaled", 2), had[..2], "scaled up again");
    delete_set(stage, "scaled");
}

const GROUP: &str = "lab.sticky-ipam.io";

/// A kind that nobody knows, and the role by which the controller may read it.
fn custom_kind(stage: &Stage) {
    if stage
        .api
        .get(named("apiextensions.k8s.io/v1", "CustomResourceDefinition", "", "shards.lab.sticky-ipam.io"))
        .is_some()
    {
        return;
    }
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    stage.api.create(json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": format!("shards.{GROUP}")},
        "spec": {
            "group": GROUP, "scope": "Namespaced",
            "names": {"kind": "Shard", "plural": "shards", "singular": "shard", "listKind": "ShardList"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}}],
        },
    }));
    stage.api.create(json!({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole",
        "metadata": {"name": "lab-shards", "labels": {"sticky-ipam.io/aggregate-to-controller": "true"}},
        "rules": [{"apiGroups": [GROUP], "resources": ["shards"], "verbs": ["get", "list", "watch"]}],
    }));
    stage.lab.kubectl(&[
        "wait",
        "--for=condition=Established",
        "crd/shards.lab.sticky-ipam.io",
        "--timeout=60s",
    ]);
}

/// A pod of a custom object: while that is there the address stays with it, when it is deleted the collector
/// takes the pod and the controller lets the address go.
fn custom(stage: &Stage) {
    let shard = named("lab.sticky-ipam.io/v1", "Shard", NAMESPACE, "shard");
    stage.api.create(shard.clone());
    let uid = stage.api.get(shard.clone()).expect("just made")["metadata"]["uid"].clone();
    let make = || {
        let mut pod = pod(NAMESPACE, "shard-pod", sticky("shard"), json!({}), spec(Some(NODE)));
        pod["metadata"]["ownerReferences"] = json!([{
            "apiVersion": "lab.sticky-ipam.io/v1", "kind": "Shard", "name": "shard", "uid": uid, "controller": true,
        }]);
        stage.api.create(pod);
        let seen = stage.api.ready(NAMESPACE, "shard-pod");
        let list = stage.lab.kubectl(&["get", "sip", "-n", NAMESPACE, "-o", "json"]);
        let list: Value = serde_json::from_str(&list).expect("JSON");
        let of_it = |sticky: &&Value| sticky["spec"]["workload"]["kind"] == json!("Shard");
        let found =
            list["items"].as_array().expect("a list").iter().find(of_it).expect("a StickyIP of the kind");
        (found["metadata"]["name"].as_str().expect("a name").to_owned(), seen.address().to_owned())
    };
    let first = make();
    stage.api.delete_pod(NAMESPACE, "shard-pod", None);
    stage.api.gone(NAMESPACE, "shard-pod");
    assert_eq!(make(), first, "another pod of the same object");
    stage.api.delete(shard);
    stage.api.gone(NAMESPACE, "shard-pod");
    let_go(stage, NAMESPACE, &first.0);
    is_free(stage, &first.1);
}

/// Somebody's finalizer holds the endpoint of a pod that is gone.
fn stuck_endpoint(stage: &Stage) {
    set_of(stage, "stuck", 1, json!({}));
    let (name, address) = addresses(stage, "stuck", 1).remove(0);
    let endpoint = named("cilium.io/v2", "CiliumEndpoint", NAMESPACE, &name);
    eventually("the pod's CiliumEndpoint", || stage.api.get(endpoint.clone()).ok_or("none".to_owned()));
    stage.api.patch(endpoint.clone(), json!({"metadata": {"finalizers": ["lab.sticky-ipam.io/hold"]}}));
    let uid = stage.api.get(endpoint.clone()).expect("it is held")["metadata"]["uid"].clone();
    delete_set(stage, "stuck");
    stage.api.gone(NAMESPACE, &name);
    eventually("the endpoint to be freed", || match stage.api.get(endpoint.clone()) {
        Some(held) if held["metadata"]["uid"] == uid => Err(held["metadata"].to_string()),
        _ => Ok(()),
    });
    let word = told(stage, NAMESPACE, "CiliumEndpoint", &name, "EndpointFinalizersRemoved");
    eprintln!("stuck endpoint: {word}");
    is_free(stage, &address);
}

/// Somebody deletes the endpoint of a pod that runs, while Cilium's agent hangs: the pod is nudged, and
/// Cilium writes it anew once it can. On a node of its own, where nobody else waits for Cilium.
fn lost_endpoint(stage: &Stage) {
    stage.api.create(stateful_set(NAMESPACE, "lost", 1, spec(Some("node-2"))));
    let (name, address) = addresses(stage, "lost", 1).remove(0);
    let endpoint = named("cilium.io/v2", "CiliumEndpoint", NAMESPACE, &name);
    let of_pod = || stage.api.get(endpoint.clone()).ok_or("none".to_owned());
    let first = eventually("the pod's CiliumEndpoint", of_pod);
    stage.lab.must(&["pause", "cilium@node-2"]);
    stage.api.delete(endpoint.clone());
    let word = told(stage, NAMESPACE, "Pod", &name, "EndpointMissing");
    eprintln!("lost endpoint: {word}");
    stage.lab.must(&["resume", "cilium@node-2"]);
    eventually("another CiliumEndpoint of the pod", || {
        let found = of_pod()?;
        let addressing = &found["status"]["networking"]["addressing"];
        match found["metadata"]["uid"] != first["metadata"]["uid"] && addressing[0]["ipv4"] == json!(address)
        {
            true => Ok(()),
            false => Err(found.to_string()),
        }
    });
    delete_set(stage, "lost");
    let_go(stage, NAMESPACE, &name);
}
