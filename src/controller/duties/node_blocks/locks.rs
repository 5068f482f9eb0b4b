//! The lock on a block: a Lease named after it in a namespace that all replicas share, so that two replicas
//! cannot both create it. Its holder is the node's name. It is not renewed: it exists until the block is
//! released. Must never be removed without its uid and resourceVersion.

use std::net::IpAddr;

use ipnet::IpNet;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::api::core::v1::Namespace;
use kube::ResourceExt;
use kube::api::{Api, ListParams, ObjectMeta, PostParams};
use serde_json::json;

use crate::cluster::api::client::ApiError;
use crate::cluster::objects::labels;
use crate::cluster::writer::{apply::FIELD_MANAGER, write::Precondition};
use crate::controller::writer::Writer;
use crate::policy::node_blocks::{BlockLock, UnreadableLock};

const PREFIX: &str = "sticky-ipam-block-";
/// The block, as text: a label cannot hold a slash.
const BLOCK: &str = "sticky-ipam.io/block";
/// The state of the node's object that was read before the lock was taken: what makes taking it again a
/// write.
const TAKEN_ON: &str = "sticky-ipam.io/taken-on";

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct LockList {
    pub locks: Vec<BlockLock>,
    pub broken: Vec<UnreadableLock>,
}

impl LockList {
    fn of(leases: &[Lease]) -> Self {
        let mut listed = Self::default();
        for (lease, block) in leases.iter().filter_map(|lease| Some((lease, block_of(&lease.name_any())?))) {
            match read(lease) {
                Ok(lock) => listed.locks.push(lock),
                Err(why) => listed.broken.push(UnreadableLock {
                    block,
                    object: format!("Lease {}", lease.name_any()),
                    uid: lease.uid().unwrap_or_default(),
                    why,
                }),
            }
        }
        listed
    }

    /// Every block that is locked, with the uid of its lock.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (IpNet, &str)> {
        let locks = self.locks.iter().map(|lock| (lock.block, lock.uid.as_str()));
        locks.chain(self.broken.iter().map(|broken| (broken.block, broken.uid.as_str())))
    }
}

pub(crate) struct Locks<'a> {
    writer: &'a Writer,
    api: Api<Lease>,
    namespace: &'a str,
}

impl<'a> Locks<'a> {
    /// The locks in this namespace. Every replica must be given the same.
    pub(crate) fn new(writer: &'a Writer, namespace: &'a str) -> Self {
        Self { writer, api: Api::namespaced(writer.client(), namespace), namespace }
    }

    /// Reads all of them, live. By their names and not by their label: one that has lost its label still
    /// locks its block. The server reads every Lease of the namespace in either case.
    pub(crate) async fn list(&self) -> Result<LockList, ApiError> {
        let params = ListParams::default();
        let listed =
            self.writer.connection().read("list Leases of blocks", || self.api.list(&params)).await?;
        Ok(LockList::of(&listed.items))
    }

    /// Creates the lock; none if it exists.
    /// Errors: the API server did not answer, or refused; if in doubt, the lock may exist.
    pub(crate) async fn create(
        &self,
        block: IpNet,
        node: &str,
        taken_on: &str,
    ) -> Result<Option<BlockLock>, ApiError> {
        let name = name(block);
        let annotations = [(BLOCK, block.to_string()), (TAKEN_ON, taken_on.to_owned())];
        let lease = Lease {
            metadata: ObjectMeta {
                name: Some(name.clone()),
                labels: Some([(labels::BLOCK.to_owned(), labels::block_value(block))].into()),
                annotations: Some(annotations.map(|(key, value)| (key.to_owned(), value)).into()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec { holder_identity: Some(node.to_owned()), ..LeaseSpec::default() }),
        };
        let params = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
        let what = format!("create Lease {name}");
        if let Some(made) = self.writer.write(&what, self.api.create(&params, &lease)).await? {
            return Ok(read(&made).ok());
        }
        // It exists. Or its namespace does not: then no try will ever create it.
        let (namespace, namespaces) = (self.namespace, Api::<Namespace>::all(self.writer.client()));
        let found = self.writer.connection().read(&what, || namespaces.get_metadata_opt(namespace)).await?;
        if found.is_some() {
            return Ok(None);
        }
        let why = format!("namespace {namespace} does not exist; create it, or set --block-namespace");
        Err(ApiError::Refused { what, code: 404, why })
    }

    /// Takes a lock again, after the node's object was read again; none if the lock changed or is gone.
    pub(crate) async fn retake(
        &self,
        lock: &BlockLock,
        taken_on: &str,
    ) -> Result<Option<BlockLock>, ApiError> {
        let name = name(lock.block);
        let patch = json!({"metadata": {"annotations": {TAKEN_ON: taken_on}}});
        let what = format!("patch Lease {name}");
        let taken = self.writer.patch(&what, &self.api, &name, &state(lock), patch).await?;
        Ok(taken.as_ref().and_then(|lease| read(lease).ok()))
    }

    /// Whether it did; exactly this state is removed.
    pub(crate) async fn remove(&self, lock: &BlockLock) -> Result<bool, ApiError> {
        let name = name(lock.block);
        self.writer.delete(&format!("delete Lease {name}"), &self.api, &name, &state(lock)).await
    }
}

fn state(lock: &BlockLock) -> Precondition {
    Precondition { uid: lock.uid.clone(), resource_version: lock.version.clone() }
}

pub fn name(block: IpNet) -> String {
    format!("{PREFIX}{}", labels::block_value(block))
}

/// The block whose lock has this name. Only the canonical form is a name, so that no other Lease can block a
/// lock.
fn block_of(name_of_lease: &str) -> Option<IpNet> {
    let (address, length) = name_of_lease.strip_prefix(PREFIX)?.rsplit_once('-')?;
    let address: IpAddr = address.replace('-', ":").parse().ok()?;
    let block = IpNet::new(address, length.parse().ok()?).ok()?;
    (name(block) == name_of_lease).then_some(block)
}

/// The lock that a Lease is, or what is wrong with it. Its name says the block; the annotation is for people,
/// but must not say another.
fn read(lease: &Lease) -> Result<BlockLock, String> {
    let block = block_of(&lease.name_any()).ok_or("its name is not that of a block")?;
    if let Some(said) = lease.annotations().get(BLOCK)
        && said.parse() != Ok(block)
    {
        return Err(format!("its annotation {BLOCK} says {said:?}, where its name says {block}"));
    }
    let holder = lease.spec.as_ref().and_then(|spec| spec.holder_identity.clone());
    let node = holder.filter(|node| !node.is_empty());
    Ok(BlockLock {
        block,
        node: node.ok_or("spec.holderIdentity does not name the node that has the block")?,
        uid: lease.uid().ok_or("it has no uid")?,
        version: lease.resource_version().ok_or("it has no resourceVersion")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(name: &str, annotations: serde_json::Value, spec: serde_json::Value) -> Lease {
        let metadata = json!({"name": name, "uid": "u", "resourceVersion": "1", "annotations": annotations});
        serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap()
    }

    #[test]
    fn a_lease_is_the_lock_on_the_block_that_its_name_says() {
        let held = json!({"holderIdentity": "n1"});
        for said in [json!({BLOCK: "10.1.2.0/24"}), json!({})] {
            let lock = read(&lease("sticky-ipam-block-10.1.2.0-24", said, held.clone())).unwrap();
            assert_eq!((lock.node.as_str(), lock.block.to_string().as_str()), ("n1", "10.1.2.0/24"));
        }
        let v6 = name("fd00:1::/112".parse().unwrap());
        assert!(v6.len() <= 253 && v6.ends_with("-112"), "{v6}");
        assert_eq!(read(&lease(&v6, json!({}), held)).unwrap().block.to_string(), "fd00:1::/112");
    }

    #[test]
    fn a_lock_that_cannot_be_read_is_distinguished_from_a_lease_that_is_none() {
        let held = json!({"holderIdentity": "n1"});
        let named = "sticky-ipam-block-10.1.2.0-24";
        let broken = [
            lease(named, json!({BLOCK: "10.1.3.0/24"}), held.clone()),
            lease(named, json!({BLOCK: "ten"}), held.clone()),
            lease(named, json!({BLOCK: "10.1.2.0/24"}), json!({})),
            lease(named, json!({BLOCK: "10.1.2.0/24"}), json!({"holderIdentity": ""})),
        ];
        let listed = LockList::of(&broken);
        assert_eq!(listed.locks, []);
        assert_eq!(listed.broken.len(), broken.len());
        for lock in &listed.broken {
            assert_eq!((lock.block.to_string().as_str(), lock.uid.as_str()), ("10.1.2.0/24", "u"));
            assert!(lock.object.ends_with(named) && !lock.why.is_empty(), "{lock:?}");
        }
        // No controller makes a Lease of such a name.
        let others = ["cilium-ipam-leader", "sticky-ipam-block-ten", "sticky-ipam-block-10.1.2.7-24"];
        let others: Vec<Lease> = others.map(|name| lease(name, json!({}), held.clone())).into();
        assert_eq!(LockList::of(&others), LockList::default());
    }
}
