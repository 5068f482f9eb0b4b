//! Pods that are made anew: deleted, scaled, rolled over, without grace. Each has its address again.

use std::collections::{BTreeMap, BTreeSet};
use std::thread;

use kube::api::{Api, ListParams};
use serde_json::json;
use sticky_ipam::cluster::objects::StickyIP;

use super::Stage;
use super::workloads::{deployment, new_template, pod, spec, stateful_set, sticky};
use crate::api::named;
use crate::cluster::eventually;
use crate::witness::Witness;

/// How often mysql-0 is deleted.
const DELETES: usize = 20;

/// All kinds of restarts side by side, each with its own workload, under the eyes of a witness.
pub fn keep_the_addresses(stage: &Stage) {
    let namespace = "restarts";
    stage.lab.namespace(namespace);
    let witness = Witness::start(&stage.api);
    let kinds: [fn(&Stage, &str); 5] = [deleted_often, scaled, rolled_over, slots, without_grace];
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

/// The addresses of a Deployment's slots.
fn slots_of(stage: &Stage, namespace: &str, deployment: &str) -> BTreeMap<String, String> {
    let api: Api<StickyIP> = Api::namespaced(stage.api.client(), namespace);
    let deployment = deployment.to_owned();
    stage.api.run(async move {
        let all = api.list(&ListParams::default()).await.expect("the administrator may look").items;
        let own = all.into_iter().filter(|sticky| sticky.spec.workload.name == deployment);
        own.map(|slot| (slot.metadata.name.expect("a name"), slot.spec.addresses[0].to_string())).collect()
    })
}

/// A new pod takes a slot that is free. While old pods end, each of them still has one: there are twice as many slots as pods at most.
fn slots(stage: &Stage, namespace: &str) {
    stage.api.create(deployment(namespace, "web", 3, sticky("web"), spec(None)));
    let addresses = |stage: &Stage| -> BTreeSet<String> {
        let pods = stage.api.all_ready(namespace, "web", 3);
        pods.into_iter().map(|(_, seen)| seen.address().to_owned()).collect()
    };
    let first = addresses(stage);
    assert_eq!(first.len(), 3, "each pod has its own: {first:?}");
    for version in 2..=3 {
        let before = slots_of(stage, namespace, "web");
        roll_over(stage, "Deployment", namespace, "web", version);
        let (now, after) = (addresses(stage), slots_of(stage, namespace, "web"));
        assert!(after.len() <= 6, "slots were added: {after:?}");
        for (slot, address) in before {
            assert_eq!(after.get(&slot), Some(&address), "slot {slot} is kept");
        }
        let known: BTreeSet<String> = after.into_values().collect();
        assert!(now.is_subset(&known), "{now:?} are not all of the slots {known:?}");
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
