//! Lists everything once, live, for the commands that report and end. Must never be taken for the state of a moment later.

use std::fmt::Debug;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::api::{Api, ListParams};
use kube::core::DeserializeGuard;
use kube::{Resource, ResourceExt};
use serde::de::DeserializeOwned;

use crate::cluster::api::client::ApiError;
use crate::cluster::cilium::objects::{CiliumEndpoint, CiliumNode};
use crate::cluster::objects::lenient::{Skipped, Validate, readable};
use crate::controller::index::ClusterIndex;
use crate::controller::index::objects::{
    IndexedCiliumNode, IndexedEndpoint, IndexedNode, IndexedPod, namespace_annotations_of,
    without_managed_fields,
};
use crate::controller::writer::Writer;
use crate::runtime::cache::{Cache, CacheEvent};
use crate::runtime::watch::name_of;

/// Objects a page of a list.
const PAGE: u32 = 500;

/// Every object as it is now, and those that cannot be read. A kind that the API server does not serve has no objects.
///
/// # Errors
/// The API server did not answer, or forbids a list.
pub async fn survey(writer: &Writer) -> Result<(ClusterIndex, Vec<Skipped>), ApiError> {
    let mut index = ClusterIndex::default();
    let mut skipped = Vec::new();
    index.apply_pod(CacheEvent::ListStarted);
    for pod in all::<Pod>(writer, "list Pods").await? {
        index.apply_pod(CacheEvent::Listed((name_of(&pod), IndexedPod::from(pod))));
    }
    index.apply_pod(CacheEvent::ListComplete);
    let namespaces = all::<Namespace>(writer, "list Namespaces").await?;
    fill(&mut index.namespaces, namespaces, |object| namespace_annotations_of(object.metadata));
    fill(&mut index.nodes, all::<Node>(writer, "list Nodes").await?, IndexedNode::from);
    guarded(
        writer,
        |event| index.stickies.apply(event),
        "list StickyIPs",
        without_managed_fields,
        &mut skipped,
    )
    .await?;
    guarded(
        writer,
        |event| index.claims.apply(event),
        "list AddressClaims",
        without_managed_fields,
        &mut skipped,
    )
    .await?;
    guarded(writer, |event| index.pools.apply(event), "list IPPools", without_managed_fields, &mut skipped)
        .await?;
    guarded::<CiliumNode, _>(
        writer,
        |event| index.cilium_nodes.apply(event),
        "list CiliumNodes",
        IndexedCiliumNode::from,
        &mut skipped,
    )
    .await?;
    guarded::<CiliumEndpoint, _>(
        writer,
        |event| index.endpoints.apply(event),
        "list CiliumEndpoints",
        IndexedEndpoint::from,
        &mut skipped,
    )
    .await?;
    Ok((index, skipped))
}

/// Every object of a kind, live, page by page.
///
/// # Errors
/// The API server did not answer, or refused.
pub async fn all<K>(writer: &Writer, what: &str) -> Result<Vec<K>, ApiError>
where
    K: Resource + Clone + DeserializeOwned + Debug,
    K::DynamicType: Default,
{
    let api: Api<K> = Api::all(writer.client());
    let mut params = ListParams::default().limit(PAGE);
    let mut found = Vec::new();
    loop {
        let page = match writer.connection().read(what, || api.list(&params)).await {
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

fn fill<K: ResourceExt, T: PartialEq>(known: &mut Cache<T>, objects: Vec<K>, trim: impl Fn(K) -> T) {
    known.apply(CacheEvent::ListStarted);
    for object in objects {
        known.apply(CacheEvent::Listed((name_of(&object), trim(object))));
    }
    known.apply(CacheEvent::ListComplete);
}

async fn guarded<K, T>(
    writer: &Writer,
    mut take: impl FnMut(CacheEvent<(String, T)>) -> Vec<String>,
    what: &str,
    trim: impl Fn(K) -> T,
    skipped: &mut Vec<Skipped>,
) -> Result<(), ApiError>
where
    K: Resource<DynamicType = ()> + Validate + Clone + DeserializeOwned + Debug,
{
    take(CacheEvent::ListStarted);
    for object in all::<DeserializeGuard<K>>(writer, what).await? {
        let name = name_of(&object);
        match readable(object) {
            Ok(object) => drop(take(CacheEvent::Listed((name, trim(object))))),
            Err(unreadable) => {
                skipped.push(unreadable);
                take(CacheEvent::Unreadable(name));
            }
        }
    }
    take(CacheEvent::ListComplete);
    Ok(())
}
