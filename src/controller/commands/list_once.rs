//! Lists everything once, live, for the commands that report and end. Must never be taken for the state of a
//! moment later.

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

/// Objects per page of a list.
const PAGE: u32 = 500;

/// Every object as it is now, and those that cannot be read. A kind that the API server does not serve has no
/// objects.
/// Errors: the API server did not answer, or forbids a list.
pub async fn list_cluster(writer: &Writer) -> Result<(ClusterIndex, Vec<Skipped>), ApiError> {
    let mut index = ClusterIndex::default();
    let mut skipped = Vec::new();
    index.apply_pod(CacheEvent::ListStarted);
    for pod in list_all::<Pod>(writer, "list Pods").await? {
        index.apply_pod(CacheEvent::Listed((name_of(&pod), IndexedPod::from(pod))));
    }
    index.apply_pod(CacheEvent::ListComplete);
    let namespaces = list_all::<Namespace>(writer, "list Namespaces").await?;
    fill(&mut index.namespaces, namespaces, |object| namespace_annotations_of(object.metadata));
    fill(&mut index.nodes, list_all::<Node>(writer, "list Nodes").await?, IndexedNode::from);
    let objects = list_readable(writer, "list StickyIPs", without_managed_fields, &mut skipped).await?;
    objects.into_iter().for_each(|event| drop(index.stickies.apply(event)));
    let objects = list_readable(writer, "list AddressClaims", without_managed_fields, &mut skipped).await?;
    objects.into_iter().for_each(|event| drop(index.claims.apply(event)));
    let objects = list_readable(writer, "list IPPools", without_managed_fields, &mut skipped).await?;
    objects.into_iter().for_each(|event| drop(index.pools.apply(event)));
    let trim = |object: CiliumNode| IndexedCiliumNode::from(object);
    let objects = list_readable(writer, "list CiliumNodes", trim, &mut skipped).await?;
    objects.into_iter().for_each(|event| drop(index.cilium_nodes.apply(event)));
    let trim = |object: CiliumEndpoint| IndexedEndpoint::from(object);
    let objects = list_readable(writer, "list CiliumEndpoints", trim, &mut skipped).await?;
    objects.into_iter().for_each(|event| drop(index.endpoints.apply(event)));
    Ok((index, skipped))
}

/// Every object of a kind, live, page by page.
pub(crate) async fn list_all<K>(writer: &Writer, what: &str) -> Result<Vec<K>, ApiError>
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

fn fill<K: ResourceExt, T: PartialEq>(cache: &mut Cache<T>, objects: Vec<K>, trim: impl Fn(K) -> T) {
    cache.apply(CacheEvent::ListStarted);
    for object in objects {
        cache.apply(CacheEvent::Listed((name_of(&object), trim(object))));
    }
    cache.apply(CacheEvent::ListComplete);
}

/// The events of a whole list; what cannot be read is put into `skipped`, too.
async fn list_readable<K, T>(
    writer: &Writer,
    what: &str,
    trim: impl Fn(K) -> T,
    skipped: &mut Vec<Skipped>,
) -> Result<Vec<CacheEvent<(String, T)>>, ApiError>
where
    K: Resource<DynamicType = ()> + Validate + Clone + DeserializeOwned + Debug,
{
    let mut events = vec![CacheEvent::ListStarted];
    for object in list_all::<DeserializeGuard<K>>(writer, what).await? {
        let name = name_of(&object);
        events.push(match readable(object) {
            Ok(object) => CacheEvent::Listed((name, trim(object))),
            Err(unreadable) => {
                skipped.push(unreadable);
                CacheEvent::Unreadable(name)
            }
        });
    }
    events.push(CacheEvent::ListComplete);
    Ok(events)
}
