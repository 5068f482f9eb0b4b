//! The CustomResourceDefinitions as the YAML that is checked in. Must never differ from the types: a test
//! compares.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;

use crate::cluster::objects::{AddressClaim, IPPool, StickyIP};

/// The head of each generated file.
const HEAD: &str = "# Generated from src/cluster/objects by `cargo run --bin crdgen`; do not edit.\n";

pub fn definitions() -> Vec<CustomResourceDefinition> {
    vec![StickyIP::crd(), AddressClaim::crd(), IPPool::crd()]
}

/// File names and texts, as they lie in `packaging/crds`.
/// Errors: a definition that cannot be written as YAML.
pub fn files() -> Result<Vec<(String, String)>, serde_saphyr::ser::Error> {
    definitions()
        .iter()
        .map(|definition| {
            let name = format!("{}.yaml", definition.spec.names.plural);
            Ok((name, format!("{HEAD}{}", serde_saphyr::to_string(definition)?)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_checked_in_definitions_are_the_generated_ones() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/crds");
        for (name, generated) in files().unwrap() {
            let checked_in = std::fs::read_to_string(folder.join(&name)).unwrap_or_default();
            assert!(
                checked_in == generated,
                "packaging/crds/{name} is out of date: run `cargo run --bin crdgen`"
            );
            let read_back: CustomResourceDefinition = serde_saphyr::from_str(&generated).unwrap();
            assert!(definitions().contains(&read_back), "{name} does not read back as it was written");
        }
    }
}
