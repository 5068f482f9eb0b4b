//! Events of the controller, each told once a process. Must never hold up or fail what it tells of.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::ObjectReference;
use kube::ResourceExt;

use super::act::Hands;
use crate::cluster::events::{Told, tell};
use crate::cluster::objects::IPPool;

/// Beyond so many remembered events all are forgotten: some are told again, which the server keeps apart by name.
const MOST_REMEMBERED: usize = 10_000;

/// What was told already.
#[derive(Debug, Default)]
pub struct Teller {
    told: BTreeSet<String>,
}

impl Teller {
    /// Tells it, unless it was told.
    pub async fn tell(
        &mut self,
        hands: &Hands,
        about: ObjectReference,
        reason: &'static str,
        message: String,
        warning: bool,
    ) {
        let told = Told { about, reason, message, warning };
        if self.told.len() >= MOST_REMEMBERED {
            self.told.clear();
        }
        if self.told.insert(told.name()) {
            tell(&mut hands.carrier(), &told).await;
        }
    }
}

/// A node, as an event names it.
#[must_use]
pub fn about_node(name: &str, uid: &str) -> ObjectReference {
    ObjectReference {
        api_version: Some("v1".into()),
        kind: Some("Node".into()),
        name: Some(name.into()),
        uid: Some(uid.into()),
        ..ObjectReference::default()
    }
}

/// A pool, as an event names it.
#[must_use]
pub fn about_pool(pool: &IPPool) -> ObjectReference {
    ObjectReference {
        api_version: Some("sticky-ipam.io/v1alpha1".into()),
        kind: Some("IPPool".into()),
        name: Some(pool.name_any()),
        uid: pool.uid(),
        ..ObjectReference::default()
    }
}
