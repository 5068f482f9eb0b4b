//! Live reads that several actions rest on. Must never be answered by a watch.

use std::net::IpAddr;

use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

use super::context::ActionContext;
use super::outcome::ActionError;
use crate::cluster::objects::{AddressClaim, ClaimName};
use crate::cluster::pod;
use crate::store::Disk;

/// The claim on an address.
pub(super) async fn claim_on<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    address: IpAddr,
) -> Result<Option<AddressClaim>, ActionError> {
    let api = context.connection();
    let claims: Api<AddressClaim> = Api::all(api.client());
    let name = ClaimName::of(address).to_string();
    Ok(api.read(&format!("get AddressClaim {address}"), || claims.get_opt(&name)).await?)
}

/// Whether the pod that the runtime knows by this uid exists.
pub(super) async fn pod_exists<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    namespace: &str,
    name: &str,
    uid: &str,
) -> Result<bool, ActionError> {
    let api = context.connection();
    let pods: Api<Pod> = Api::namespaced(api.client(), namespace);
    let found = api.read(&format!("get Pod {namespace}/{name}"), || pods.get_opt(name)).await?;
    Ok(found.is_some_and(|found| pod::is_meant(&found, uid)))
}
