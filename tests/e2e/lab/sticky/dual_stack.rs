//! Both families of a pod stay with it.

use super::moves::{in_step, other, probed_well};
use crate::support::lab::api::ApiServer;
use crate::support::lab::reach;
use crate::support::lab::stage::Stage;
use crate::support::lab::workloads::{probed_spec, stateful_set};
use crate::support::lab::{Flavour, Lab, Mode};

#[test]
fn a_pod_keeps_both_addresses_over_restarts_and_nodes_in_chained_mode() {
    keeps_both(Mode::Chained);
}

#[test]
fn a_pod_keeps_both_addresses_over_restarts_and_nodes_in_crd_mode() {
    keeps_both(Mode::Crd);
}

#[test]
fn a_pod_keeps_both_addresses_over_restarts_and_nodes_in_delegated_mode() {
    keeps_both(Mode::Delegated);
}

fn keeps_both(mode: Mode) {
    let lab = Lab::of(Flavour::OursDualStack(mode));
    let stage = Stage { lab, api: ApiServer::connect(), mode };
    let namespace = "families";
    stage.lab.namespace(namespace);
    reach::start_clients(&stage, namespace);
    stage.api.create(stateful_set(namespace, "mysql", 1, probed_spec()));
    let first = stage.api.ready(namespace, "mysql-0");
    assert!(
        matches!(&first.addresses[..], [four, six] if !four.contains(':') && six.contains(':')),
        "one address of each family, not {first:?}"
    );
    for time in 1..=2 {
        let next = stage.api.replace(namespace, "mysql-0", None);
        assert_eq!(next.addresses, first.addresses, "restart {time}");
    }
    let before = stage.api.ready(namespace, "mysql-0");
    stage.lab.kubectl(&["cordon", &before.node]);
    let moved = stage.api.replace(namespace, "mysql-0", None);
    stage.lab.kubectl(&["uncordon", &before.node]);
    assert_eq!((&*moved.node, &moved.addresses), (other(&before.node), &first.addresses));
    for address in &moved.addresses {
        reach::soon(&stage, namespace, &reach::everyone(), address);
    }
    in_step(&stage, namespace, "mysql-0", &moved);
    probed_well(&stage, namespace, &moved);
    stage.lab.delete_namespace(namespace);
}
