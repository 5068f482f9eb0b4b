//! The store of a node is lost while a sticky address of its block lives on the other node: no ordinary pod
//! of the node gets that address, with the agent down and with the agent started again.

use super::moves::{Cordoned, in_step, other};
use super::outages::Stopped;
use crate::support::lab::stage::Stage;
use crate::support::lab::workloads::{spec, stateful_set};

/// Ordinary pods that start at once: the address that is away is among the first ones that a new store has.
const PODS: usize = 6;

pub fn gives_nothing_away(stage: &Stage) {
    let namespace = "lost-store";
    stage.lab.namespace(namespace);
    stage.api.create(stateful_set(namespace, "mysql", 1, spec(None)));
    let first = stage.api.ready(namespace, "mysql-0");
    let moved = {
        stage.lab.kubectl(&["cordon", &first.node]);
        let _cordoned = Cordoned(stage, first.node.clone());
        stage.api.replace(namespace, "mysql-0", None)
    };
    assert_eq!((&*moved.node, &moved.addresses), (other(&first.node), &first.addresses));
    let agent = format!("sticky-agent@{}", first.node);
    {
        let _killed = Stopped::all(stage, "kill", &[&agent]);
        lose_store(stage, &first.node);
        start_others(stage, namespace, "without", &first.node, &moved.addresses);
    }
    lose_store(stage, &first.node);
    start_others(stage, namespace, "with", &first.node, &moved.addresses);
    let now = stage.api.ready(namespace, "mysql-0");
    assert_eq!((&now.uid, &now.addresses), (&moved.uid, &moved.addresses));
    in_step(stage, namespace, "mysql-0", &now);
    stage.lab.delete_namespace(namespace);
}

/// Away in one step, for an agent that runs may make files in it at any moment.
fn lose_store(stage: &Stage, node: &str) {
    let lose = "cd /var/lib/cni/networks && mv lab lost && rm -rf lost";
    stage.lab.must(&["on", node, "sh", "-c", lose]);
}

fn start_others(stage: &Stage, namespace: &str, names: &str, node: &str, away: &[String]) {
    let names: Vec<String> = (0..PODS).map(|number| format!("{names}-{number}")).collect();
    for name in &names {
        stage.lab.pod(namespace, name, node);
    }
    for name in &names {
        let seen = stage.api.ready(namespace, name);
        let given = seen.addresses.iter().find(|address| away.contains(address));
        assert_eq!(given, None, "{name} on {node} has an address of mysql-0, which runs elsewhere");
    }
}
