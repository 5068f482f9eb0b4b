//! Fifty pods, sticky and not, on both nodes, deleted and made anew at once.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, ListParams};

use crate::support::lab::reach::NODES;
use crate::support::lab::stage::Stage;
use crate::support::lab::witness::Witness;
use crate::support::lab::workloads::{deployment, plain, spec, stateful_set};

/// Pods of each sticky and of each plain workload: two of each, fifty in all.
const STICKY: usize = 13;
const PLAIN: usize = 12;

pub fn fifty_at_once(stage: &Stage) {
    let namespace = "storm";
    stage.lab.namespace(namespace);
    let witness = Witness::start(&stage.api);
    let stateful = ["red", "blue"];
    for name in stateful {
        // Free to move: some are made anew on the other node.
        stage.api.create(stateful_set(namespace, name, STICKY, spec(None)));
    }
    for node in NODES {
        stage.api.create(deployment(namespace, node, PLAIN, plain(node), spec(Some(node))));
    }
    let sticky = || -> BTreeMap<String, Vec<String>> {
        let all = stateful.into_iter().flat_map(|name| stage.api.all_ready(namespace, name, STICKY));
        all.map(|(name, seen)| (name, seen.addresses)).collect()
    };
    let everyone = || NODES.into_iter().flat_map(|node| stage.api.all_ready(namespace, node, PLAIN)).count();
    let before = sticky();
    assert_eq!((before.len(), everyone()), (2 * STICKY, 2 * PLAIN));

    let pods: Api<Pod> = Api::namespaced(stage.api.client(), namespace);
    let old: Vec<Option<String>> = stage.api.run(async move {
        let all = pods.list(&ListParams::default()).await.expect("the administrator may look").items;
        pods.delete_collection(&DeleteParams::default(), &ListParams::default()).await.expect("and delete");
        all.into_iter().map(|pod| pod.metadata.uid).collect()
    });
    let pods: Api<Pod> = Api::namespaced(stage.api.client(), namespace);
    stage.api.eventually("the end of the old pods", move |_| {
        let (pods, old) = (pods.clone(), old.clone());
        async move {
            let now = pods.list(&ListParams::default()).await.map_err(|why| why.to_string())?.items;
            let left = now.iter().filter(|pod| old.contains(&pod.metadata.uid)).count();
            if left == 0 { Ok(()) } else { Err(format!("{left} are left")) }
        }
    });
    assert_eq!(sticky(), before, "sticky pods have other addresses");
    assert_eq!(everyone(), 2 * PLAIN);
    let events = witness.finish();
    assert!(events > 4 * (STICKY + PLAIN), "the witness saw only {events} events");
    stage.lab.delete_namespace(namespace);
}
