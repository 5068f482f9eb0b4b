//! Lists everything once, live, for the commands that report and end. Must never be taken for the state of a
//! moment later.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::Resource;
use kube::api::{Api, ListParams};
use serde::de::DeserializeOwned;

use crate::cluster::api::client::ApiError;
use crate::cluster::objects::cilium::{CiliumEndpoint, CiliumNode};
use crate::cluster::objects::lenient::{Skipped, readable};
use crate::controller::index::objects::{
    IndexedCiliumNode, IndexedEndpoint, namespace_annotations_of, read_ours,
};
use crate::controller::{index::ClusterIndex, writer::Writer};
use crate::runtime::{cache::CacheEvent, watch::name_of};

const PAGE: u32 = 500;

/// Every object as it is now, and those that cannot be read. A kind that the API server does not serve has no
/// objects.
/// Errors: the API server did not answer, or forbids a list.
pub async fn list_cluster(writer: &Writer) -> Result<(ClusterIndex, Vec<Skipped>), ApiError> {
    let (mut index, mut skipped) = (ClusterIndex::default(), Vec::new());
    let namespace = |object: Namespace| Ok(namespace_annotations_of(object.metadata));
    let cilium_node = |object| readable::<CiliumNode>(object).map(IndexedCiliumNode::from);
    let endpoint = |object| readable::<CiliumEndpoint>(object).map(IndexedEndpoint::from);
    list(writer, &mut skipped, |pod: Pod| Ok(pod.into()), |event| index.apply_pod(event)).await?;
    list(writer, &mut skipped, namespace, |event| index.namespaces.apply(event)).await?;
    list(writer, &mut skipped, |node: Node| Ok(node.into()), |event| index.nodes.apply(event)).await?;
    list(writer, &mut skipped, read_ours, |event| index.stickies.apply(event)).await?;
    list(writer, &mut skipped, read_ours, |event| index.claims.apply(event)).await?;
    list(writer, &mut skipped, read_ours, |event| index.pools.apply(event)).await?;
    list(writer, &mut skipped, cilium_node, |event| index.cilium_nodes.apply(event)).await?;
    list(writer, &mut skipped, endpoint, |event| index.endpoints.apply(event)).await?;
    Ok((index, skipped))
}

/// Hands every object of a kind to `apply`; what cannot be read is put into `skipped`, too.
async fn list<O, T>(
    writer: &Writer,
    skipped: &mut Vec<Skipped>,
    read: impl Fn(O) -> Result<T, Skipped>,
    mut apply: impl FnMut(CacheEvent<(String, T)>) -> Vec<String>,
) -> Result<(), ApiError>
where
    O: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let objects = list_all::<O>(writer).await?;
    apply(CacheEvent::ListStarted);
    for object in objects {
        let name = name_of(&object);
        apply(match read(object) {
            Ok(object) => CacheEvent::Listed((name, object)),
            Err(unreadable) => {
                skipped.push(unreadable);
                CacheEvent::Unreadable(name)
            }
        });
    }
    apply(CacheEvent::ListComplete);
    Ok(())
}

/// Every object of a kind, live, page by page.
async fn list_all<O>(writer: &Writer) -> Result<Vec<O>, ApiError>
where
    O: Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug,
{
    let api: Api<O> = Api::all(writer.client());
    let what = format!("list {}s", O::kind(&()));
    let mut params = ListParams::default().limit(PAGE);
    let mut found = Vec::new();
    loop {
        let page = match writer.connection().read(&what, || api.list(&params)).await {
            Ok(page) => page,
            Err(ApiError::Refused { code: 404, .. }) => return Ok(found),
            Err(error) => return Err(error),
        };
        found.extend(page.items);
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => params = params.continue_token(&token),
            None => return Ok(found),
        }
    }
}
