//! What the parts may do, as long as packaging has no roles of its own to read.

use k8s_openapi::api::rbac::v1::PolicyRule;

const OURS: &str = "sticky-ipam.io";
const CILIUM: &str = "cilium.io";
const READ: &[&str] = &["get", "list", "watch"];
const WRITE: &[&str] = &["create", "update", "patch", "delete"];
const CHANGE: &[&str] = &["update", "patch"];

/// A node's agent: reads what concerns pods, writes bindings, and of Cilium's nodes its own alone.
pub fn agent(node: &str) -> Vec<PolicyRule> {
    let mut own_node = rule(CILIUM, &["ciliumnodes"], CHANGE);
    own_node.resource_names = Some(vec![node.to_owned()]);
    let bindings = &["stickyips", "stickyips/status", "addressclaims", "addressclaims/status"];
    vec![
        rule("", &["pods", "nodes", "namespaces"], READ),
        rule("", &["events"], &["create", "patch"]),
        rule(OURS, bindings, READ),
        rule(OURS, bindings, WRITE),
        rule(OURS, &["ippools"], READ),
        rule(CILIUM, &["ciliumnodes", "ciliumendpoints"], READ),
        own_node,
    ]
}

/// The controller: reads every kind of workload, writes our objects, every CiliumNode and its lease.
pub fn controller() -> Vec<PolicyRule> {
    vec![
        rule("*", &["*"], READ),
        rule("", &["events"], &["create", "patch"]),
        rule("", &["pods", "nodes"], &["patch"]),
        rule(OURS, &["*"], WRITE),
        rule(CILIUM, &["ciliumnodes", "ciliumendpoints"], CHANGE),
        rule("coordination.k8s.io", &["leases"], WRITE),
    ]
}

fn rule(group: &str, resources: &[&str], verbs: &[&str]) -> PolicyRule {
    let owned = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
    PolicyRule {
        api_groups: Some(vec![group.to_owned()]),
        resources: Some(owned(resources)),
        verbs: owned(verbs),
        ..PolicyRule::default()
    }
}
