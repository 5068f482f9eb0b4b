//! The lock on a block: a Lease named after it in a namespace that all replicas share, so that two replicas cannot both make it.
//! Its holder is the node's name. Nobody renews it: it stands until the block is free again. Must never be removed without
//! its uid and resourceVersion.

use std::collections::BTreeMap;

use ipnet::IpNet;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use kube::api::{Api, ListParams, ObjectMeta, PostParams};
use serde_json::json;

use crate::cluster::claims::carry::FIELD_MANAGER;
use crate::cluster::claims::write::Unchanged;
use crate::cluster::client::ApiError;
use crate::cluster::objects::labels;
use crate::controller::act::Hands;
use crate::policy::blocks::Lock;

/// The start of every lock's name.
const PREFIX: &str = "sticky-ipam-block-";
/// The block, as text: a label cannot hold a slash.
const BLOCK: &str = "sticky-ipam.io/block";
/// The state of the node's object that was read before the lock was taken: what makes taking it again a write.
const TAKEN_ON: &str = "sticky-ipam.io/taken-on";

/// The locks of one namespace.
#[derive(Clone)]
pub struct Locks {
    api: Api<Lease>,
    namespaces: Api<Namespace>,
    namespace: String,
}

impl Locks {
    /// The locks in this namespace. Every replica must be given the same.
    #[must_use]
    pub fn new(client: kube::Client, namespace: &str) -> Self {
        let (api, namespaces) = (Api::namespaced(client.clone(), namespace), Api::all(client));
        Self { api, namespaces, namespace: namespace.to_owned() }
    }

    /// Reads all of them, live. Leases of ours that cannot be understood are left out: they still stand in the way by name.
    ///
    /// # Errors
    /// The server is of no help.
    pub async fn list(&self, hands: &Hands) -> Result<Vec<Lock>, ApiError> {
        let params = ListParams::default().labels(labels::BLOCK);
        let listed = hands.connection().read("list Leases of blocks", || self.api.list(&params)).await?;
        Ok(listed.items.iter().filter_map(read).collect())
    }

    /// Makes the lock; none if somebody has.
    ///
    /// # Errors
    /// The server is of no help; if in doubt, the lock may stand.
    pub async fn make(
        &self,
        hands: &Hands,
        block: IpNet,
        node: &str,
        taken_on: &str,
    ) -> Result<Option<Lock>, ApiError> {
        let name = name(block);
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                labels: Some([(labels::BLOCK.to_owned(), labels::block_value(block))].into()),
                annotations: Some(BTreeMap::from([
                    (BLOCK.to_owned(), block.to_string()),
                    (TAKEN_ON.to_owned(), taken_on.to_owned()),
                ])),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec { holder_identity: Some(node.to_owned()), ..LeaseSpec::default() }),
        };
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let what = format!("create Lease {name}");
        if let Some(made) = hands.write(&what, self.api.create(&params, &lease)).await? {
            return Ok(read(&made));
        }
        // Somebody has made it. Or there is no namespace to make it in: then nobody ever will.
        match hands.connection().read(&what, || self.namespaces.get_metadata_opt(&self.namespace)).await? {
            Some(_) => Ok(None),
            None => {
                let why = format!("there is no namespace {}; make it, or name another", self.namespace);
                Err(ApiError::Refused { what, code: 404, why })
            }
        }
    }

    /// Takes a lock again, after the node's object was read anew; none if it changed or is gone.
    ///
    /// # Errors
    /// The server is of no help.
    pub async fn take_again(
        &self,
        hands: &Hands,
        lock: &Lock,
        taken_on: &str,
    ) -> Result<Option<Lock>, ApiError> {
        let name = name(lock.block);
        let patch = json!({"metadata": {"annotations": {TAKEN_ON: taken_on}}});
        let what = format!("patch Lease {name}");
        let taken = hands.patch(&what, &self.api, &name, &state(lock), patch).await?;
        Ok(taken.as_ref().and_then(read))
    }

    /// Removes exactly this state of a lock; whether it did.
    ///
    /// # Errors
    /// The server is of no help.
    pub async fn remove(&self, hands: &Hands, lock: &Lock) -> Result<bool, ApiError> {
        let name = name(lock.block);
        hands.delete(&format!("delete Lease {name}"), &self.api, &name, &state(lock)).await
    }
}

fn state(lock: &Lock) -> Unchanged {
    Unchanged { uid: lock.uid.clone(), resource_version: lock.version.clone() }
}

/// The name of the lock on a block.
#[must_use]
pub fn name(block: IpNet) -> String {
    format!("{PREFIX}{}", labels::block_value(block))
}

fn read(lease: &Lease) -> Option<Lock> {
    let block: IpNet = lease.annotations().get(BLOCK)?.parse().ok()?;
    // One whose name is of another block locks nothing.
    (lease.name_any() == name(block)).then_some(())?;
    Some(Lock {
        block,
        node: lease.spec.as_ref()?.holder_identity.clone()?,
        uid: lease.uid()?,
        version: lease.resource_version()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_a_lock_only_under_the_name_of_its_block() {
        let lease = |block: &str, name: &str| -> Lease {
            serde_json::from_value(json!({
                "metadata": {"name": name, "uid": "u", "resourceVersion": "1", "annotations": {BLOCK: block}},
                "spec": {"holderIdentity": "n1"}}))
            .unwrap()
        };
        let lock = read(&lease("10.1.2.0/24", "sticky-ipam-block-10.1.2.0-24")).unwrap();
        assert_eq!((lock.node.as_str(), lock.block.to_string().as_str()), ("n1", "10.1.2.0/24"));
        assert_eq!(read(&lease("10.1.3.0/24", "sticky-ipam-block-10.1.2.0-24")), None);
        assert_eq!(read(&lease("ten", "sticky-ipam-block-ten")), None);
        let v6 = name("fd00:1::/112".parse().unwrap());
        assert!(v6.len() <= 253 && v6.ends_with("-112"), "{v6}");
    }
}
