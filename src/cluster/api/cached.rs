//! Reads from the API server's watch cache, without etcd: a fraction of the cost of a live read, but perhaps
//! slightly stale.
//!
//! It is used only where that does not matter: for a StickyIP to which nothing is attached, because attaching
//! uses its resourceVersion; for claims that are sealed to it, because a seal lasts as long as its StickyIP;
//! for a namespace's annotation that says yes. Must never decide a "no".

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::net::IpAddr;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Namespace;
use kube::api::{Api, GetParams};
use serde::de::DeserializeOwned;

use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::objects::{AddressClaim, ClaimName, StickyIP, Validate};
use crate::cluster::view::{ClaimView, ClaimsByAddress};

pub async fn object<K: Clone + DeserializeOwned + Debug>(
    api: &Connection,
    what: &str,
    objects: &Api<K>,
    name: &str,
) -> Result<Option<K>, ApiError> {
    api.read(what, || async {
        match objects.get_with(name, &GetParams::any()).await {
            Ok(object) => Ok(Some(object)),
            Err(kube::Error::Api(status)) if status.code == 404 => Ok(None),
            Err(error) => Err(error),
        }
    })
    .await
}

pub async fn annotations(api: &Connection, namespace: &str) -> Result<BTreeMap<String, String>, ApiError> {
    let namespaces: Api<Namespace> = Api::all(api.client());
    let read = object(api, &format!("get Namespace {namespace}"), &namespaces, namespace).await?;
    Ok(read.and_then(|found| found.metadata.annotations).unwrap_or_default())
}

/// The claims on these addresses; none if one is missing or unreadable: the live read reports the error.
pub async fn claims(api: &Connection, addresses: &BTreeSet<IpAddr>) -> Option<ClaimsByAddress> {
    let all: Api<AddressClaim> = Api::all(api.client());
    let reads = addresses.iter().map(async |address| {
        let what = format!("get AddressClaim {address}");
        object(api, &what, &all, &ClaimName::of(*address).to_string()).await
    });
    let mut claims = ClaimsByAddress::new();
    for read in join_all(reads).await {
        let claim = read.ok()?.filter(|claim| claim.validation_error().is_none())?;
        claims.insert(claim.spec.address, ClaimView::from(&claim));
    }
    Some(claims)
}

pub fn is_free(sticky: &StickyIP) -> bool {
    sticky.status.as_ref().is_none_or(|status| status.attachment.is_none())
}

/// Whether these are all the claims of this StickyIP, and sealed to it.
pub(crate) fn are_all(claims: &ClaimsByAddress, sticky: &StickyIP) -> bool {
    let Some(uid) = &sticky.metadata.uid else { return false };
    claims.len() == sticky.spec.addresses.len()
        && sticky.spec.addresses.iter().all(|of| claims.get(of).is_some_and(|claim| claim.sealed_to(uid)))
}
