//! Reading objects that may be broken: made by hand before the schema was there, by a newer version, by a
//! bug.
//!
//! A watch of `DeserializeGuard<K>` never ends over one object; [`readable`] turns each into the object or a
//! [`Skipped`] to report as an event. Must never repair by guess.

use kube::core::DeserializeGuard;
use kube::{Resource, ResourceExt};

/// An object's own rules, checked again after the API server: its schema may not have been there yet.
pub trait Validate {
    /// What is wrong with it, if anything.
    fn validation_error(&self) -> Option<String> {
        None
    }
}

/// The API server vouches for its own kinds.
impl Validate for k8s_openapi::api::core::v1::Pod {}

/// An object that was passed over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{kind} {name} is skipped: {why}; correct or delete it")]
pub struct Skipped {
    pub kind: String,
    /// Its name, with its namespace in front if it has one.
    pub name: String,
    /// Its uid, as far as it can be read.
    pub uid: Option<String>,
    pub why: String,
}

/// The object, if it can be read and keeps its own rules.
/// Errors: otherwise who it is and what is wrong, for an event.
pub fn readable<K: Resource<DynamicType = ()> + Validate>(
    guarded: DeserializeGuard<K>,
) -> Result<K, Skipped> {
    let mut name = guarded.name_any();
    if let Some(namespace) = guarded.namespace() {
        name = format!("{namespace}/{name}");
    }
    let uid = guarded.uid();
    let skip = |why| Skipped { kind: K::kind(&()).into_owned(), name: name.clone(), uid: uid.clone(), why };
    let object = guarded.0.map_err(|error| skip(error.error))?;
    object.validation_error().map_or(Ok(object), |why| Err(skip(why)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::objects::{AddressClaim, IPPool, StickyIP};
    use serde_json::{Value, json};

    fn read<K>(object: Value) -> Result<K, Skipped>
    where
        K: Resource<DynamicType = ()> + Validate + serde::de::DeserializeOwned,
    {
        readable(serde_json::from_value::<DeserializeGuard<K>>(object).unwrap())
    }

    fn sticky(spec: Value) -> Value {
        json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP",
               "metadata": {"namespace": "db", "name": "mysql-0"}, "spec": spec})
    }

    fn good() -> Value {
        json!({"addresses": ["10.0.0.1"], "claimant": {"kind": "Pod"},
               "workload": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "mysql"}})
    }

    #[test]
    fn a_newer_versions_fields_are_passed_over() {
        let mut spec = good();
        spec["colour"] = json!("blue");
        assert_eq!(read::<StickyIP>(sticky(spec)).unwrap().spec.workload.name, "mysql");
    }

    #[test]
    fn a_broken_object_is_skipped_by_kind_and_name() {
        let mut two_of_one_family = good();
        two_of_one_family["addresses"] = json!(["10.0.0.1", "10.0.0.2"]);
        let mut no_address = good();
        no_address["addresses"] = json!(["ten"]);
        let mut foreign_kind = good();
        foreign_kind["claimant"]["kind"] = json!("Cat");
        for spec in [two_of_one_family, no_address, foreign_kind, json!({}), json!(null), json!([1])] {
            let skipped = read::<StickyIP>(sticky(spec.clone())).unwrap_err();
            assert_eq!((skipped.kind.as_str(), skipped.name.as_str()), ("StickyIP", "db/mysql-0"), "{spec}");
            assert!(!skipped.why.is_empty());
        }
    }

    #[test]
    fn a_claim_whose_name_is_another_address_is_skipped() {
        let claim = |name: &str, phase: &str| {
            json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "AddressClaim", "metadata": {"name": name},
                   "spec": {"address": "10.0.0.1", "phase": phase, "stickyRef": {"namespace": "db", "name": "mysql-0"}}})
        };
        assert!(read::<AddressClaim>(claim("10.0.0.1", "Granted")).is_ok());
        for (name, phase) in
            [("10.0.0.2", "Granted"), ("mine", "Granted"), ("10.0.0.1", "Bound"), ("10.0.0.1", "Lost")]
        {
            assert!(read::<AddressClaim>(claim(name, phase)).is_err(), "{name} {phase}");
        }
    }

    #[test]
    fn a_pool_with_a_ragged_range_is_skipped() {
        let pool = json!({"metadata": {"name": "p"}, "spec": {"use": "Sticky", "cidrs": ["10.0.0.1/8"]}});
        assert!(read::<IPPool>(pool).unwrap_err().to_string().contains("10.0.0.0/8"));
    }
}
