//! The controller on a real API server. It acts on every object of a kind, so these tests have servers of
//! their own, and one test has a server at a time.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Event, Namespace, Node, Pod};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, Patch, PatchParams,
};
use kube::core::NamespaceResourceScope;
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::cilium::CiliumNode;
use sticky_ipam::cluster::objects::{AddressClaim, IPPool, StickyIP};
use sticky_ipam::cluster::writer::apply::{NoObserver, WriteObserver};
use sticky_ipam::controller::context::Context;
use sticky_ipam::controller::flags::{ControllerSettings, load};
use sticky_ipam::controller::metrics::ControllerMetrics;
use sticky_ipam::controller::run;
use sticky_ipam::controller::writer::Writer;
use sticky_ipam::runtime::http::Readiness;
use tokio::sync::{Mutex, MutexGuard, OnceCell};

use super::api_server::ApiServer;
use super::api_server::case::Case;
use super::api_server::comes_true;

/// Far more than anything here takes on an idle machine.
pub const DEADLINE: Duration = Duration::from_secs(60);
/// Everything at once, but for what a test is about.
pub const HURRIED: &[&str] = &[
    "--proof-gap=0s",
    "--quarantine=0s",
    "--orphan-after=0s",
    r#"--label-selector={"matchLabels":{"sticky":"yes"}}"#,
];

/// A server for whoever is in the room. It is started for the first who is.
struct Room {
    server: OnceCell<ApiServer>,
    turn: Mutex<()>,
}

/// The controllers' servers. Two, because what these tests do most is wait: for ticks, leases and watches.
static ROOMS: [Room; 2] = [const { Room { server: OnceCell::const_new(), turn: Mutex::const_new(()) } }; 2];

impl Room {
    /// The first that is free.
    async fn take() -> (&'static Self, MutexGuard<'static, ()>) {
        let [one, two] = &ROOMS;
        tokio::select! {
            biased;
            turn = one.turn.lock() => (one, turn),
            turn = two.turn.lock() => (two, turn),
        }
    }
}

/// A test's place at one of the controllers' servers, which is empty when it comes.
pub struct Desk {
    pub case: Case<'static>,
    server: &'static ApiServer,
    _turn: Option<MutexGuard<'static, ()>>,
}

impl Desk {
    pub async fn take() -> Self {
        let (room, turn) = Room::take().await;
        Self::cleared(room.server.get_or_init(ApiServer::start).await, Some(turn)).await
    }

    /// At a server that no other test has.
    pub async fn at(server: &'static ApiServer) -> Self {
        Self::cleared(server, None).await
    }

    async fn cleared(server: &'static ApiServer, turn: Option<MutexGuard<'static, ()>>) -> Self {
        server.install_our_kinds().await;
        server.install_cilium_kinds().await;
        let case = server.case().await;
        let client = case.client();
        let all = DeleteParams::default;
        let now = || DeleteParams { grace_period_seconds: Some(0), ..DeleteParams::default() };
        for namespace in Api::<Namespace>::all(client.clone()).list(&ListParams::default()).await.unwrap() {
            let name = namespace.metadata.name.unwrap();
            clear::<Pod>(&client, &name, now()).await;
            clear::<StickyIP>(&client, &name, all()).await;
            clear::<StatefulSet>(&client, &name, all()).await;
            clear::<Lease>(&client, &name, all()).await;
        }
        let every = ListParams::default();
        Api::<AddressClaim>::all(client.clone()).delete_collection(&all(), &every).await.unwrap();
        Api::<IPPool>::all(client.clone()).delete_collection(&all(), &every).await.unwrap();
        Api::<CiliumNode>::all(client.clone()).delete_collection(&all(), &every).await.unwrap();
        Api::<Node>::all(client).delete_collection(&all(), &every).await.unwrap();
        Self { case, server, _turn: turn }
    }

    /// The server, which nobody else has now.
    pub fn server(&self) -> &'static ApiServer {
        self.server
    }

    /// A controller's world, with the administrator's rights.
    pub fn context(&self, given: &[&str]) -> Context {
        self.context_with(self.case.client(), given, Box::new(NoObserver))
    }

    pub fn context_with(
        &self,
        client: kube::Client,
        given: &[&str],
        observer: Box<dyn WriteObserver>,
    ) -> Context {
        let settings = settings(given);
        let writer = Writer::new(client, settings.client.origin().to_owned(), observer);
        Context::new(writer, settings, Arc::new(ControllerMetrics::default()), Readiness::default())
    }

    pub fn stickies(&self) -> Api<StickyIP> {
        Api::namespaced(self.case.client(), self.case.namespace())
    }

    /// Every claim: nobody else is here.
    pub async fn claims(&self) -> Vec<AddressClaim> {
        Api::<AddressClaim>::all(self.case.client()).list(&ListParams::default()).await.unwrap().items
    }

    pub async fn names(&self) -> Vec<String> {
        let listed = self.stickies().list(&ListParams::default()).await.unwrap();
        listed.into_iter().map(|sticky| sticky.metadata.name.unwrap()).collect()
    }

    /// The messages of events with this reason.
    pub async fn told(&self, reason: &str) -> Vec<String> {
        let api: Api<Event> = Api::namespaced(self.case.client(), self.case.namespace());
        let listed = api.list(&ListParams::default()).await.unwrap();
        let of_it = listed.into_iter().filter(|event| event.reason.as_deref() == Some(reason));
        of_it.map(|event| event.message.unwrap_or_default()).collect()
    }

    pub async fn stateful_set(&self, name: &str, replicas: u32) -> Value {
        self.owned_set(name, replicas, &[]).await
    }

    /// Made with its owners, as operators do.
    pub async fn owned_set(&self, name: &str, replicas: u32, owners: &[&Value]) -> Value {
        let api: Api<StatefulSet> = Api::namespaced(self.case.client(), self.case.namespace());
        let set = json!({"metadata": {"name": name, "ownerReferences": owners}, "spec": {"replicas": replicas, "serviceName": name,
            "selector": {"matchLabels": {"set": name}}, "template": {"metadata": {"labels": {"set": name}},
            "spec": {"containers": [{"name": "main", "image": "none"}]}}}});
        let made = api.create(&Default::default(), &serde_json::from_value(set).unwrap()).await.unwrap();
        json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name, "uid": made.metadata.uid, "controller": true})
    }

    /// A kind of somebody else's, served in this version alone, and one object of it.
    pub async fn of_foreign_kind(
        &self,
        group: &str,
        version: &str,
        kind: &str,
        name: &str,
    ) -> Api<DynamicObject> {
        let singular = kind.to_lowercase();
        let plural = format!("{singular}s");
        let full = format!("{plural}.{group}");
        let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
            "metadata": {"name": full}, "spec": {"group": group, "scope": "Namespaced",
            "names": {"plural": plural, "singular": singular, "kind": kind},
            "versions": [{"name": version, "served": true, "storage": true, "schema": {"openAPIV3Schema": {"type": "object",
                "x-kubernetes-preserve-unknown-fields": true}}}]}});
        let crds: Api<CustomResourceDefinition> = Api::all(self.case.client());
        let force = PatchParams::apply("test").force();
        crds.patch(&full, &force, &Patch::Apply(&definition)).await.unwrap();
        let kind = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, kind));
        let api: Api<DynamicObject> = Api::namespaced_with(self.case.client(), self.case.namespace(), &kind);
        until("the kind", || async {
            api.create(&Default::default(), &DynamicObject::new(name, &kind)).await.is_ok()
        })
        .await;
        api
    }

    pub async fn delete_set(&self, name: &str) {
        let api: Api<StatefulSet> = Api::namespaced(self.case.client(), self.case.namespace());
        api.delete(name, &DeleteParams::default()).await.unwrap();
    }

    pub async fn scale(&self, name: &str, replicas: u32) {
        let api: Api<StatefulSet> = Api::namespaced(self.case.client(), self.case.namespace());
        let patch = Patch::Merge(json!({"spec": {"replicas": replicas}}));
        api.patch(name, &PatchParams::default(), &patch).await.unwrap();
    }

    /// A sticky pod with these owners.
    pub async fn pod(&self, name: &str, node: &str, owner: Option<&Value>, annotations: Value) -> Pod {
        let pods: Api<Pod> = Api::namespaced(self.case.client(), self.case.namespace());
        let owners: Vec<&Value> = owner.into_iter().collect();
        let pod = json!({
            "metadata": {"name": name, "labels": {"sticky": "yes"}, "annotations": annotations, "ownerReferences": owners},
            "spec": {"nodeName": node, "containers": [{"name": "main", "image": "none"}]},
        });
        pods.create(&Default::default(), &serde_json::from_value(pod).unwrap()).await.unwrap()
    }

    /// A StickyIP with its sealed claim, attached to nobody, as its plugin's ADD and DEL would have left it.
    pub async fn retained(&self, name: &str, address: &str, workload: Value, more: Value) {
        let mut spec = json!({"addresses": [address], "claimant": {"kind": "Pod"}, "workload": workload});
        for (key, value) in more.as_object().into_iter().flatten() {
            spec[key] = value.clone();
        }
        let object = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP", "metadata": {"name": name}, "spec": spec});
        let api = self.stickies();
        let made = api.create(&Default::default(), &serde_json::from_value(object).unwrap()).await.unwrap();
        let claim = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "AddressClaim", "metadata": {"name": address},
            "spec": {"address": address, "phase": "Bound", "stickyUid": made.metadata.uid,
                     "stickyRef": {"namespace": self.case.namespace(), "name": name}}});
        let claims: Api<AddressClaim> = Api::all(self.case.client());
        // A controller that is at work may have made it anew, or have let go of the StickyIP by now.
        let overtaken = |error: kube::Error| matches!(&error, kube::Error::Api(status) if [404, 409].contains(&status.code));
        let made = claims.create(&Default::default(), &serde_json::from_value(claim).unwrap()).await;
        assert!(made.map_or_else(overtaken, |_| true), "no claim on {address}");
        let status = json!({"status": {"phase": "Retained", "lastSeen": "2026-01-01T00:00:00Z"}});
        let told = api.patch_status(name, &PatchParams::default(), &Patch::Merge(status)).await;
        assert!(told.map_or_else(overtaken, |_| true), "no status of {name}");
    }

    /// An address of this test.
    pub fn address(&self, last: u8) -> String {
        let [a, b, c, _] = self.case.range().network().octets();
        format!("{a}.{b}.{c}.{last}")
    }
}

async fn clear<K>(client: &kube::Client, namespace: &str, how: DeleteParams)
where
    K: kube::Resource<Scope = NamespaceResourceScope, DynamicType = ()>
        + Clone
        + serde::de::DeserializeOwned
        + std::fmt::Debug,
{
    Api::<K>::namespaced(client.clone(), namespace)
        .delete_collection(&how, &ListParams::default())
        .await
        .unwrap();
}

pub fn settings(given: &[&str]) -> ControllerSettings {
    let all = std::iter::once("sticky-ipam-controller").chain(given.iter().copied());
    match load(&all.map(Into::into).collect::<Vec<_>>()) {
        Ok(loaded) => loaded.line.settings,
        Err(why) => panic!("{given:?}: {why:?}"),
    }
}

/// Does something while a controller works.
pub async fn while_at_work<T>(context: &Context, body: impl Future<Output = T>) -> T {
    tokio::select! {
        () = run::work(context) => panic!("the controller ended by itself"),
        done = body => done,
    }
}

/// Waits for a condition; the text tells what did not come.
pub async fn until<F: Future<Output = bool>>(what: &str, condition: impl FnMut() -> F) {
    assert!(comes_true(DEADLINE, condition).await, "{what} did not come within {DEADLINE:?}");
}

/// How many rounds a duty has done.
pub fn rounds(context: &Context, duty: &str) -> usize {
    let start = format!("sticky_ipam_controller_reconcile_duration_seconds_count{{duty=\"{duty}\"}} ");
    let page = context.metrics.page();
    page.lines().find_map(|line| line.strip_prefix(&start)?.parse().ok()).unwrap_or(0)
}

/// An operator's kind, and one object of it.
pub async fn fleet(desk: &Desk, name: &str) -> (Api<DynamicObject>, Value) {
    let api = desk.of_foreign_kind("owner.example", "v1", "Operator", name).await;
    let uid = api.get(name).await.unwrap().metadata.uid;
    (
        api,
        json!({"apiVersion": "owner.example/v1", "kind": "Operator", "name": name, "uid": uid, "controller": true}),
    )
}

/// A StickyIP with the address of another, attached as if it were its own: neither can be cured, so it is
/// told.
pub async fn steal(desk: &Desk) {
    desk.stateful_set("db", 9).await;
    desk.retained(
        "rightful",
        &desk.address(1),
        json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db"}),
        json!({}),
    )
    .await;
    let api = desk.stickies();
    let thief = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "StickyIP", "metadata": {"name": "thief"},
        "spec": {"addresses": [desk.address(1)], "claimant": {"kind": "Pod"}, "workload": json!({"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db"})}});
    api.create(&Default::default(), &serde_json::from_value(thief).unwrap()).await.unwrap();
    let status = json!({"status": {"phase": "Attached", "attachment": {"node": "n", "podName": "thief", "podUid": "u",
        "attachmentId": "c", "since": "2026-01-01T00:00:00Z"}}});
    api.patch_status("thief", &PatchParams::default(), &Patch::Merge(status)).await.unwrap();
    // A node that is there: of one that is gone, the attachment would end.
    desk.node("n").await;
}
