//! What the parts may do, as packaging ships it, so that what passes here passes with the shipped roles.

use std::path::Path;

use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule};
use kube::api::{Api, DynamicObject};
use kube::core::{ApiResource, GroupVersionKind};

const READ: &[&str] = &["get", "list", "watch"];

/// Every object of a manifest under packaging/.
pub fn manifest(name: &str) -> Vec<serde_json::Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging").join(name);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
    serde_saphyr::from_multiple(&text).unwrap_or_else(|why| panic!("{} is not YAML: {why}", path.display()))
}

/// Where an object of a manifest belongs.
pub fn api_of(client: kube::Client, object: &DynamicObject) -> Api<DynamicObject> {
    let types = object.types.as_ref().expect("every object of a manifest names its kind");
    let gvk = GroupVersionKind::try_from(types).expect("every object of a manifest names its version");
    let resource = ApiResource::from_gvk(&gvk);
    match &object.metadata.namespace {
        Some(namespace) => Api::namespaced_with(client, namespace, &resource),
        None => Api::all_with(client, &resource),
    }
}

/// A node's agent.
pub fn agent(node: &str) -> Vec<PolicyRule> {
    of_node(shipped("sticky-ipam-agent"), node)
}

/// A node's plugin.
pub fn plugin(node: &str) -> Vec<PolicyRule> {
    of_node(shipped("sticky-ipam-node"), node)
}

/// The rules of a ClusterRole as it is shipped.
fn shipped(name: &str) -> Vec<PolicyRule> {
    let all = manifest("rbac.yaml").into_iter();
    let role =
        all.filter(|object| object["kind"] == "ClusterRole").find(|role| role["metadata"]["name"] == name);
    let role = role.unwrap_or_else(|| panic!("packaging/rbac.yaml has no ClusterRole {name}"));
    let role: ClusterRole = serde_json::from_value(role).expect("a ClusterRole");
    role.rules.expect("it has rules")
}

/// The same for an account of one node alone: of Cilium's nodes it writes its own. Shipped accounts are
/// shared, and packaging/admission.yaml sees to that there.
fn of_node(mut rules: Vec<PolicyRule>, node: &str) -> Vec<PolicyRule> {
    let mut narrowed = Vec::new();
    for rule in &mut rules {
        let resources = rule.resources.clone().unwrap_or_default();
        if !resources.contains(&"ciliumnodes".to_owned()) {
            continue;
        }
        let (read, write): (Vec<String>, Vec<String>) =
            rule.verbs.drain(..).partition(|verb| READ.contains(&verb.as_str()));
        rule.verbs = read;
        let own = Some(vec![node.to_owned()]);
        narrowed.push(PolicyRule { verbs: write, resource_names: own, ..rule.clone() });
    }
    rules.extend(narrowed);
    rules.retain(|rule| !rule.verbs.is_empty());
    rules
}
