//! The controller on a real cluster: two replicas with the roles that packaging ships, short times, and one
//! lab for all proofs.

mod blocks;
mod election;
mod ledger;
mod recycling;
mod running_pods;

use std::thread;

use serde_json::Value;

use crate::support::lab::api::{ApiServer, named};
use crate::support::lab::stage::Stage;
use crate::support::lab::{Flavour, Lab, Mode, eventually};

/// The replicas, as components of the lab.
const REPLICAS: [&str; 2] = ["sticky-controller-1", "sticky-controller-2"];
/// How much of a log a failed test shows.
const LOG_LINES: usize = 40;

/// The lab with controllers, and a last look at their logs when a test fails.
struct Controlled {
    stage: Stage,
}

impl Controlled {
    fn lab() -> Self {
        let lab = Lab::of(Flavour::Controllers);
        let api = ApiServer::connect();
        Self { stage: Stage { lab, api, mode: Mode::Crd } }
    }
}

impl Drop for Controlled {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        for name in REPLICAS {
            let log = self.stage.lab.attempt(&["logs", name]).unwrap_or_else(|why| why);
            let lines: Vec<&str> = log.lines().collect();
            let end = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n");
            eprintln!("the last lines of {name}:\n{end}\n");
        }
    }
}

fn claim_of(stage: &Stage, address: &str) -> Option<Value> {
    stage.api.get(named("sticky-ipam.io/v1alpha1", "AddressClaim", "", address))
}

/// The phase of an address's claim; none if the address is free.
fn phase(stage: &Stage, address: &str) -> Option<String> {
    Some(claim_of(stage, address)?["spec"]["phase"].as_str()?.to_owned())
}

/// Waits until the StickyIP is gone.
fn let_go(stage: &Stage, namespace: &str, name: &str) {
    eventually(&format!("StickyIP {namespace}/{name} to be let go"), || {
        match stage.api.sticky(namespace, name) {
            None => Ok(()),
            Some(sticky) => Err(format!("{:?} {:?}", sticky.spec.retention, sticky.status)),
        }
    });
}

/// Waits until an address is nobody's.
fn is_free(stage: &Stage, address: &str) {
    eventually(&format!("{address} to be free"), || match phase(stage, address) {
        None => Ok(()),
        Some(phase) => Err(phase),
    });
}

/// Waits for an event of this reason about an object.
fn told(stage: &Stage, namespace: &str, kind: &str, name: &str, reason: &str) -> String {
    let fields = format!("involvedObject.kind={kind},involvedObject.name={name},reason={reason}");
    eventually(&format!("the event {reason} of {kind} {namespace}/{name}"), || {
        let path = "jsonpath={.items[*].message}";
        let list = ["kubectl", "get", "events", "-n", namespace, "--field-selector", &fields, "-o", path];
        match stage.lab.attempt(&list)? {
            none if none.is_empty() => Err("no event".to_owned()),
            some => Ok(some),
        }
    })
}

#[test]
fn addresses_are_released_kept_and_inherited_as_workload_and_retention_say() {
    let controlled = Controlled::lab();
    recycling::every_way(&controlled.stage);
}

#[test]
fn a_node_that_joins_gets_a_block_which_is_free_again_after_it_left() {
    let controlled = Controlled::lab();
    blocks::come_and_go(&controlled.stage);
}

#[test]
fn a_node_that_joins_gets_its_first_block_from_the_pool_that_selects_it() {
    let controlled = Controlled::lab();
    blocks::first_of_pool(&controlled.stage);
}

#[test]
fn each_node_gets_its_further_block_from_the_pool_that_selects_it() {
    let controlled = Controlled::lab();
    blocks::two_pools(&controlled.stage);
}

#[test]
fn a_leader_killed_in_a_mass_delete_is_followed_and_every_address_released_once() {
    let controlled = Controlled::lab();
    election::killed(&controlled.stage);
}

#[test]
fn a_leader_that_gets_a_signal_to_end_is_followed_at_once() {
    let controlled = Controlled::lab();
    election::stopped(&controlled.stage);
}
