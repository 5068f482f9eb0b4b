//! Pods that are made anew: deleted, scaled, rolled over, without grace. Each has its address again.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;

use kube::api::{Api, ListParams};
use serde_json::json;
use sticky_ipam::cluster::objects::StickyIP;

use crate::support::lab::api::named;
use crate::support::lab::eventually;
use crate::support::lab::stage::Stage;
use crate::support::lab::witness::Witness;
use crate::support::lab::workloads::{deployment, new_template, pod, spec, stateful_set, sticky};

/// How often mysql-0 is deleted.
const DELETES: usize = 20;

/// All kinds of restarts side by side, each with its own workload, under the eyes of a witness.
pub fn keep_the_addresses(stage: &Stage) {
    let namespace = "restarts";
    stage.lab.namespace(namespace);
    let witness = Witness::start(&stage.api);
    let kinds: [fn(&Stage, &str); 6] =
        [deleted_often, scaled, rolled_over, slots_rolled_over, slots_recreated, without_grace];
    thread::scope(|scope| {
        for kind in kinds {
            scope.spawn(move || kind(stage, namespace));
        }
    });
    witness.finish();
    stage.lab.delete_namespace(namespace);
}

fn deleted_often(stage: &Stage, namespace: &str) {
    stage.api.create(stateful_set(namespace, "mysql", 1, spec(None)));
    let first = stage.api.ready(namespace, "mysql-0");
    for time in 1..=DELETES {
        let next = stage.api.replace(namespace, "mysql-0", None);
        assert_eq!(next.addresses, first.addresses, "restart {time} of {namespace}/mysql-0");
    }
}

fn without_grace(stage: &Stage, namespace: &str) {
    stage.api.create(stateful_set(namespace, "hasty", 1, spec(None)));
    let first = stage.api.ready(namespace, "hasty-0");
    for time in 1..=3 {
        let next = stage.api.replace(namespace, "hasty-0", Some(0));
        assert_eq!(next.addresses, first.addresses, "restart {time} of {namespace}/hasty-0 without grace");
    }
}

/// The addresses of the pods of a StatefulSet, by name.
fn by_name(stage: &Stage, namespace: &str, app: &str, count: usize) -> BTreeMap<String, Vec<String>> {
    let pods = stage.api.all_ready(namespace, app, count);
    pods.into_iter().map(|(name, seen)| (name, seen.addresses)).collect()
}

fn scaled(stage: &Stage, namespace: &str) {
    stage.api.create(stateful_set(namespace, "scaled", 2, spec(None)));
    let before = by_name(stage, namespace, "scaled", 2);
    stage.api.scale("StatefulSet", namespace, "scaled", 0);
    stage.api.all_ready(namespace, "scaled", 0);
    stage.api.scale("StatefulSet", namespace, "scaled", 2);
    assert_eq!(by_name(stage, namespace, "scaled", 2), before, "after a scale to 0 and back");
}

/// Makes every pod of a workload anew and waits until it is done.
fn roll_over(stage: &Stage, kind: &str, namespace: &str, name: &str, version: usize) {
    let workload = named("apps/v1", kind, namespace, name);
    stage.api.patch(workload.clone(), new_template(version));
    eventually(&format!("the rollout of {namespace}/{name}"), || {
        let found = stage.api.get(workload.clone()).expect("it is there");
        let (status, meta, replicas) = (&found["status"], &found["metadata"], &found["spec"]["replicas"]);
        let done = status["observedGeneration"] == meta["generation"]
            && status["updatedReplicas"] == *replicas
            && status["readyReplicas"] == *replicas;
        if done { Ok(()) } else { Err(status.to_string()) }
    });
}

fn rolled_over(stage: &Stage, namespace: &str) {
    stage.api.create(stateful_set(namespace, "rolled", 3, spec(None)));
    let before = by_name(stage, namespace, "rolled", 3);
    roll_over(stage, "StatefulSet", namespace, "rolled", 2);
    assert_eq!(by_name(stage, namespace, "rolled", 3), before, "after a rolling update");
}

/// The slots of a Deployment: the address of each, and the uid of the pod that has it.
fn slots_of(stage: &Stage, namespace: &str, deployment: &str) -> BTreeMap<String, (String, Option<String>)> {
    let api: Api<StickyIP> = Api::namespaced(stage.api.client(), namespace);
    let deployment = deployment.to_owned();
    stage.api.run(async move {
        let all = api.list(&ListParams::default()).await.expect("the administrator may look").items;
        let own = all.into_iter().filter(|sticky| sticky.spec.workload.name == deployment);
        own.map(|slot| {
            let holder = slot.status.and_then(|status| status.attachment).map(|held| held.pod_uid);
            (slot.metadata.name.expect("a name"), (slot.spec.addresses[0].to_string(), holder))
        })
        .collect()
    })
}

/// The slots by themselves.
fn addresses_of(slots: &BTreeMap<String, (String, Option<String>)>) -> BTreeMap<&str, &str> {
    slots.iter().map(|(slot, (address, _))| (&**slot, &**address)).collect()
}

/// The addresses of the Deployment's three pods when no other is left, each the one of the slot that the pod
/// holds.
fn by_slot(stage: &Stage, namespace: &str, name: &str) -> BTreeSet<String> {
    let pods = stage.api.all_ready(namespace, name, 3);
    let slots = slots_of(stage, namespace, name);
    for (pod, seen) in &pods {
        let held: Vec<_> = slots.values().filter(|(_, holder)| *holder == Some(seen.uid.clone())).collect();
        assert!(
            matches!(&held[..], [(address, _)] if address == seen.address()),
            "{pod} has {} and holds {held:?}",
            seen.address()
        );
    }
    pods.into_iter().map(|(_, seen)| seen.address().to_owned()).collect()
}

/// Three pods that are replaced one after the other, with six slots. A new pod is made while an old one ends
/// and still has its slot: so six are enough for whatever overlaps, and none may be added; and each has its
/// address again.
fn slots_rolled_over(stage: &Stage, namespace: &str) {
    stage.api.create(deployment(namespace, "web", 6, sticky("web"), spec(None)));
    stage.api.all_ready(namespace, "web", 6);
    stage.api.scale("Deployment", namespace, "web", 3);
    by_slot(stage, namespace, "web");
    let before = slots_of(stage, namespace, "web");
    assert_eq!(before.len(), 6, "one a pod, kept when it was scaled down: {before:?}");
    for version in 2..=3 {
        roll_over(stage, "Deployment", namespace, "web", version);
        by_slot(stage, namespace, "web");
        let after = slots_of(stage, namespace, "web");
        assert_eq!(addresses_of(&after), addresses_of(&before), "the slots after rollout {version}");
    }
}

/// All old pods end before the first new one is made: the very same addresses are given out again.
fn slots_recreated(stage: &Stage, namespace: &str) {
    let mut anew = deployment(namespace, "anew", 3, sticky("anew"), spec(None));
    anew["spec"]["strategy"] = json!({"type": "Recreate"});
    stage.api.create(anew);
    let first = by_slot(stage, namespace, "anew");
    assert_eq!(first.len(), 3, "each pod has its own: {first:?}");
    let before = slots_of(stage, namespace, "anew");
    for version in 2..=3 {
        roll_over(stage, "Deployment", namespace, "anew", version);
        assert_eq!(by_slot(stage, namespace, "anew"), first, "the addresses after rollout {version}");
        let after = slots_of(stage, namespace, "anew");
        assert_eq!(addresses_of(&after), addresses_of(&before), "the slots after rollout {version}");
    }
}

/// A pin of the node's own block.
pub fn pins(stage: &Stage) {
    let (namespace, pinned) = ("pins", "10.241.0.200");
    stage.lab.namespace(namespace);
    let annotations = json!({"sticky-ipam.io/ips": pinned});
    let make = |name: &str| {
        stage.api.create(pod(namespace, name, sticky(name), annotations.clone(), spec(Some("node-1"))));
    };
    make("owner");
    assert_eq!(stage.api.ready(namespace, "owner").address(), pinned);
    make("thief");
    let told = eventually("the word that the pin is taken", || {
        let events = stage.lab.attempt(&["kubectl", "events", "-n", namespace, "--for", "pod/thief"])?;
        if events.contains(&format!("{namespace}/owner")) { Ok(events) } else { Err(events) }
    });
    assert!(told.contains(pinned), "{told}");
    stage.api.delete_pod(namespace, "thief", Some(0));
    // The owner may go and come back.
    stage.api.delete_pod(namespace, "owner", None);
    stage.api.gone(namespace, "owner");
    make("owner");
    assert_eq!(stage.api.ready(namespace, "owner").address(), pinned);
    stage.lab.delete_namespace(namespace);
}
