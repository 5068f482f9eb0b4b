//! A controller for tests: a world of its own over one test's objects, and hands that can be made to end at
//! any write.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::cluster::objects::{AddressClaim, IPPool};
use sticky_ipam::cluster::writer::apply::{NoObserver, SentWrite, WriteObserver};
use sticky_ipam::controller::commands::list_once::list_cluster;
use sticky_ipam::controller::context::Context;
use sticky_ipam::controller::flags::{ControllerSettings, load};
use sticky_ipam::controller::index::ClusterIndex;
use sticky_ipam::controller::metrics::ControllerMetrics;
use sticky_ipam::controller::writer::Writer;
use sticky_ipam::runtime::cache::{Cache, CacheEvent};
use sticky_ipam::runtime::http::Readiness;

use super::api_server::ApiServer;
use super::api_server::case::Case;
use super::crash::ENDED;

/// A test's share of the shared server, with our kinds and Cilium's.
pub async fn case() -> Case<'static> {
    let server = ApiServer::shared().await;
    server.install_our_kinds().await;
    server.install_cilium_kinds().await;
    server.case().await
}

/// Ends the controller before or after its n-th write.
pub struct EndControllerAt {
    number: usize,
    after: bool,
    /// How many were sent, and how many of them are over: several are under way at once.
    seen: AtomicUsize,
    over: AtomicUsize,
}

impl EndControllerAt {
    pub fn boxed(number: usize, after: bool) -> Box<Self> {
        Box::new(Self { number, after, seen: AtomicUsize::new(0), over: AtomicUsize::new(0) })
    }
}

impl WriteObserver for EndControllerAt {
    fn before(&self, _: usize, _: SentWrite<'_>) {
        let now = self.seen.fetch_add(1, Ordering::SeqCst) + 1;
        if !self.after && now == self.number {
            std::panic::panic_any(ENDED);
        }
    }
    fn after(&self, _: usize, _: SentWrite<'_>) {
        let now = self.over.fetch_add(1, Ordering::SeqCst) + 1;
        if self.after && now == self.number {
            std::panic::panic_any(ENDED);
        }
    }
}

/// A controller's desk.
pub struct Desk<'a> {
    case: &'a Case<'a>,
    pub context: Context,
}

impl<'a> Desk<'a> {
    /// With these flags, as the administrator.
    pub async fn new(case: &'a Case<'a>, flags: &[&str]) -> Self {
        Self::watched(case, flags, Box::new(NoObserver)).await
    }

    /// With the roles that are shipped.
    pub async fn as_shipped(case: &'a Case<'a>, flags: &[&str]) -> Self {
        let client = case.controller().await.client().await;
        Self::with(case, client, flags, Box::new(NoObserver))
    }

    pub async fn watched(case: &'a Case<'a>, flags: &[&str], observer: Box<dyn WriteObserver>) -> Self {
        let client = case.admin().client().await;
        Self::with(case, client, flags, observer)
    }

    pub fn with(
        case: &'a Case<'a>,
        client: kube::Client,
        flags: &[&str],
        observer: Box<dyn WriteObserver>,
    ) -> Self {
        let writer = Writer::new(client, PathBuf::from("the test's"), observer);
        Self {
            case,
            context: Context::new(
                writer,
                settings(case, flags),
                Arc::new(ControllerMetrics::default()),
                Readiness::default(),
            ),
        }
    }

    /// Looks at the test's own objects, live.
    pub async fn look(&self) {
        let (index, skipped) = list_cluster(&self.context.writer).await.unwrap();
        assert!(skipped.is_empty(), "{skipped:?}");
        let own = |name: &str| name.ends_with(&self.case.unique(""));
        let namespace = format!("{}/", self.case.namespace());
        let inside = |name: &str| name.starts_with(&namespace);
        let range = self.case.range();
        let of_range =
            |name: &str| name.parse().is_ok_and(|address: std::net::Ipv4Addr| range.contains(&address));
        let mut mine = ClusterIndex::default();
        mine.apply_pod(CacheEvent::ListStarted);
        for (name, pod) in index.pods.iter().filter(|(name, _)| inside(name)) {
            mine.apply_pod(CacheEvent::Listed((name.clone(), pod.clone())));
        }
        mine.apply_pod(CacheEvent::ListComplete);
        apply_all(only(&index.namespaces, |name| name == self.case.namespace()), |event| {
            mine.namespaces.apply(event)
        });
        apply_all(only(&index.nodes, own), |event| mine.nodes.apply(event));
        apply_all(only(&index.stickies, inside), |event| mine.stickies.apply(event));
        apply_all(only(&index.claims, of_range), |event| mine.claims.apply(event));
        apply_all(only(&index.pools, own), |event| mine.pools.apply(event));
        apply_all(only(&index.cilium_nodes, own), |event| mine.cilium_nodes.apply(event));
        apply_all(only(&index.endpoints, inside), |event| mine.endpoints.apply(event));
        *self.context.index() = mine;
    }
}

/// The list of the objects whose names apply.
fn only<T: Clone>(cache: &Cache<T>, keep: impl Fn(&str) -> bool) -> Vec<CacheEvent<(String, T)>> {
    let kept = cache.iter().filter(|(name, _)| keep(name));
    let listed = kept.map(|(name, object)| CacheEvent::Listed((name.clone(), object.clone())));
    std::iter::once(CacheEvent::ListStarted).chain(listed).chain([CacheEvent::ListComplete]).collect()
}

fn apply_all<T>(
    events: Vec<CacheEvent<(String, T)>>,
    apply: impl FnMut(CacheEvent<(String, T)>) -> Vec<String>,
) {
    events.into_iter().map(apply).for_each(drop);
}

/// The settings of these flags, with the locks in the test's namespace and without the default pool.
pub fn settings(case: &Case<'_>, flags: &[&str]) -> ControllerSettings {
    let namespace = format!("--leader-election-namespace={}", case.namespace());
    let mut line = vec!["sticky-ipam-controller", &namespace];
    if !flags.iter().any(|flag| flag.starts_with("--cluster-pool-ipv4-cidr")) {
        line.push("--cluster-pool-ipv4-cidr=");
    }
    line.extend(flags);
    let line: Vec<OsString> = line.into_iter().map(OsString::from).collect();
    load(&line).unwrap_or_else(|why| panic!("{why:?}")).line.settings
}

/// Applies an object as a person would.
pub async fn apply<K>(api: Api<K>, object: Value) -> K
where
    K: kube::Resource + Clone + serde::de::DeserializeOwned + std::fmt::Debug,
{
    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
    api.patch(&name, &PatchParams::apply("test").force(), &Patch::Apply(object)).await.unwrap()
}

/// A Node with these labels, and its CiliumNode with these ranges.
pub async fn node(case: &Case<'_>, name: &str, labels: Value, pod_cidrs: &[&str]) -> String {
    let name = case.unique(name);
    bare_node(case, &name, labels, json!({})).await;
    cilium_node(case, &name, pod_cidrs).await;
    name
}

pub async fn bare_node(case: &Case<'_>, name: &str, labels: Value, spec: Value) -> Node {
    let metadata = json!({"name": name, "labels": labels});
    apply(
        Api::all(case.client()),
        json!({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": spec}),
    )
    .await
}

pub async fn cilium_node(case: &Case<'_>, name: &str, pod_cidrs: &[&str]) {
    let ipam = json!({"podCIDRs": pod_cidrs});
    let object = json!({"apiVersion": "cilium.io/v2", "kind": "CiliumNode", "metadata": {"name": name}, "spec": {"ipam": ipam}});
    apply::<CiliumNode>(Api::all(case.client()), object).await;
}

/// A pool of this test.
pub async fn pool(case: &Case<'_>, name: &str, spec: Value) -> IPPool {
    let object = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "IPPool",
                        "metadata": {"name": case.unique(name)}, "spec": spec});
    apply(Api::all(case.client()), object).await
}

/// A Bound claim on an address of this node's block.
pub async fn claim(case: &Case<'_>, address: &str, home: &str, block: &str) {
    let object = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "AddressClaim",
        "metadata": {"name": address, "labels": {"sticky-ipam.io/block": block.replace('/', "-")}},
        "spec": {"address": address, "phase": "Bound", "stickyRef": {"namespace": case.namespace(), "name": "db-0"},
                 "stickyUid": "u", "homeNode": home, "block": block}});
    let api: Api<AddressClaim> = Api::all(case.client());
    api.create(&Default::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
}

/// The ranges of the test's CiliumNodes, by node.
pub async fn ranges(case: &Case<'_>) -> Vec<(String, Vec<String>)> {
    let api: Api<CiliumNode> = Api::all(case.client());
    let all = api.list(&ListParams::default()).await.unwrap();
    let own = all.items.into_iter().filter(|node| node.name_any().ends_with(&case.unique("")));
    own.map(|node| (node.name_any(), node.spec.ipam.pod_cidrs)).collect()
}

/// The locks of the test, as block's label and node.
pub async fn locks(case: &Case<'_>) -> Vec<(String, String)> {
    let api: Api<Lease> = Api::namespaced(case.client(), case.namespace());
    let all = api.list(&ListParams::default().labels("sticky-ipam.io/block")).await.unwrap();
    let read = |lease: Lease| {
        let block = lease.labels()["sticky-ipam.io/block"].clone();
        (block, lease.spec.unwrap().holder_identity.unwrap())
    };
    all.items.into_iter().map(read).collect()
}

/// Deletes a node and its CiliumNode.
pub async fn remove_node(case: &Case<'_>, name: &str) {
    let (nodes, cilium): (Api<Node>, Api<CiliumNode>) = (Api::all(case.client()), Api::all(case.client()));
    delete(&nodes, name).await;
    delete(&cilium, name).await;
}

/// Deletes an object. On a busy machine the server closes connections that it has not read from; then the
/// deletion is sent again, and an object that is gone by then is deleted.
async fn delete<K>(api: &Api<K>, name: &str)
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let mut is_repeated = false;
    loop {
        match api.delete(name, &DeleteParams::default()).await {
            Ok(_) => return,
            Err(kube::Error::Api(status)) if is_repeated && status.code == 404 => return,
            Err(kube::Error::Service(_) | kube::Error::HyperError(_)) => is_repeated = true,
            Err(error) => panic!("cannot delete {name}: {error}"),
        }
    }
}
