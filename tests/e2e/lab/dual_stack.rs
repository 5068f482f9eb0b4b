//! Both families at once.

use crate::support::lab::{Flavour, Lab};

#[test]
fn dual_stack_pods_reach_each_other_in_both_families() {
    let lab = Lab::of(Flavour::DualStack);
    lab.namespace("families");
    lab.pod("families", "one", "node-1");
    let addresses = lab.addresses("families", "one");
    assert!(
        matches!(&addresses[..], [four, six] if !four.contains(':') && six.contains(':')),
        "one address of each family, not {addresses:?}"
    );
    lab.delete_namespace("families");
    lab.proves_reach("reach");
}
