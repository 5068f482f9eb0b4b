//! Cilium's own operator, for the tests of adoption to start from.

use crate::cluster::{Flavour, Lab};

#[test]
fn the_operator_gives_each_node_a_block_and_pods_reach_each_other() {
    let lab = Lab::of(Flavour::ClusterPool);
    lab.proves_reach("reach");
    let blocks = lab.kubectl(&["get", "ciliumnodes", "-o", "jsonpath={.items[*].spec.ipam.podCIDRs[0]}"]);
    let mut blocks: Vec<&str> = blocks.split(' ').collect();
    blocks.dedup();
    assert_eq!(blocks.len(), 2, "two nodes with two blocks, not {blocks:?}");
    assert!(blocks.iter().all(|block| block.starts_with("10.200.")), "blocks of the pool, not {blocks:?}");
}
