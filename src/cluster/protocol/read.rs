//! Live reads of StickyIPs and claims. Must never use a cache.

use std::collections::BTreeSet;
use std::net::IpAddr;

use futures_util::future::try_join_all;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Api, ListParams};

use crate::cluster::api::client::{ApiError, Connection};
use crate::cluster::objects::{AddressClaim, ClaimName, StickyIP, Validate};
use crate::cluster::pod;
use crate::cluster::protocol::local_node::BindError;
use crate::cluster::view::{ClaimView, ClaimsByAddress};
use crate::cluster::writer::apply::ApiWriter;
use crate::names::StickyKey;
use crate::policy::handover::NodeState;

pub(crate) async fn read_sticky(
    writer: &ApiWriter<'_>,
    key: &StickyKey,
) -> Result<Option<StickyIP>, ApiError> {
    let api: Api<StickyIP> = Api::namespaced(writer.api().client(), &key.namespace);
    writer.api().read(&format!("get StickyIP {key}"), || api.get_opt(&key.name)).await
}

/// The state of a node.
pub(crate) async fn read_node_state(api: &Connection, node: &str) -> Result<NodeState, ApiError> {
    let nodes: Api<Node> = Api::all(api.client());
    let found = api.read(&format!("get Node {node}"), || nodes.get_opt(node)).await?;
    Ok(pod::node_state(found.as_ref()))
}

/// The claims that these fields select.
pub(crate) async fn list_claims(api: &Connection, fields: &str) -> Result<Vec<AddressClaim>, ApiError> {
    let claims: Api<AddressClaim> = Api::all(api.client());
    let selected = ListParams::default().fields(fields);
    Ok(api.read("list AddressClaims", || claims.list(&selected)).await?.items)
}

/// Whether any of these addresses is claimed, for any StickyIP.
pub(crate) async fn is_any_claimed(writer: &ApiWriter<'_>, addresses: &[IpAddr]) -> Result<bool, ApiError> {
    let api: Api<AddressClaim> = Api::all(writer.api().client());
    for address in addresses {
        let (what, name) = (format!("get AddressClaim {address}"), ClaimName::of(*address).to_string());
        if writer.api().read(&what, || api.get_metadata_opt(&name)).await?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads the claims on these addresses; those that exist.
/// Errors: the request to the API server failed, or a claim is invalid.
pub(crate) async fn read_claims(
    writer: &ApiWriter<'_>,
    addresses: &BTreeSet<IpAddr>,
) -> Result<ClaimsByAddress, BindError> {
    let api: Api<AddressClaim> = Api::all(writer.api().client());
    let read = try_join_all(addresses.iter().map(async |address| {
        let (what, name) = (format!("get AddressClaim {address}"), ClaimName::of(*address).to_string());
        writer.api().read(&what, || api.get_opt(&name)).await
    }));
    let mut claims = ClaimsByAddress::new();
    for claim in read.await?.into_iter().flatten() {
        if let Some(why) = claim.validation_error() {
            let name = claim.metadata.name.unwrap_or_default();
            return Err(BindError::InvalidObject { what: "AddressClaim", name, why });
        }
        claims.insert(claim.spec.address, ClaimView::from(&claim));
    }
    Ok(claims)
}
