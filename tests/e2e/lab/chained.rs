//! Our plugin behind `ptp`, chained with unmodified cilium-cni.

use crate::delegated::{frees_the_addresses_of_plain_pods, keeps_the_address_of_a_sticky_pod};
use crate::support::lab::{Flavour, Lab};

#[test]
fn pods_with_our_addresses_reach_each_other_across_nodes() {
    Lab::of(Flavour::Chained).proves_reach("reach");
}

#[test]
fn a_sticky_pod_keeps_its_address_over_restarts_on_its_node() {
    keeps_the_address_of_a_sticky_pod(&Lab::of(Flavour::Chained));
}

#[test]
fn del_frees_the_addresses_of_plain_pods() {
    frees_the_addresses_of_plain_pods(&Lab::of(Flavour::Chained), "frees");
}
