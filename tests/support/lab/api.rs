//! The lab's API server for tests that look often: a client on a thread of its own that has entered the
//! fabric's network.
//!
//! The API server listens in the fabric only, so a client of this process reaches it from there alone.
//! Everything else of the process stays where it is.

use std::fs::File;
use std::future::Future;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, DynamicObject, Patch, PatchParams, PostParams};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::{ApiResource, GroupVersionKind};
use nix::sched::{CloneFlags, setns};
use serde_json::{Value, json};
use sticky_ipam::cluster::objects::StickyIP;
use tokio::sync::oneshot;

use super::{PATIENCE, folder};

/// Between two looks at an object.
const GLANCE: Duration = Duration::from_millis(100);

/// The administrator's way to the lab's API server. Clones share the thread.
#[derive(Clone)]
pub struct ApiServer {
    shared: Arc<Thread>,
    client: kube::Client,
}

struct Thread {
    handle: tokio::runtime::Handle,
    end: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Thread {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            let _ = end.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// A pod as tests need it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub uid: String,
    pub node: String,
    pub addresses: Vec<String>,
    /// How often its containers were started anew.
    pub restarts: i32,
}

impl Seen {
    pub fn address(&self) -> &str {
        &self.addresses[0]
    }
}

impl ApiServer {
    /// Connects to the API server of the lab that is up.
    pub fn connect() -> Self {
        let (tell, told) = mpsc::channel();
        let (end, ended) = oneshot::channel::<()>();
        let thread = std::thread::spawn(move || {
            setns(fabric(), CloneFlags::CLONE_NEWNET).expect("root enters the fabric's network");
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let file =
                    Kubeconfig::read_from(folder().join("admin.kubeconfig")).expect("the lab's kubeconfig");
                let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await;
                let mut config = config.expect("the lab writes a sound kubeconfig");
                config.proxy_url = None;
                let client = kube::Client::try_from(config).expect("fresh certificates");
                tell.send((tokio::runtime::Handle::current(), client)).expect("the test waits");
                let _ = ended.await;
            });
        });
        let (handle, client) = told.recv().expect("the thread is in the fabric");
        Self { shared: Arc::new(Thread { handle, end: Some(end), thread: Some(thread) }), client }
    }

    /// The client, for use within `run` and `spawn` only: elsewhere it would look for the server in another
    /// network.
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }

    /// Starts work on the thread.
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.shared.handle.spawn(work)
    }

    /// Does work on the thread and waits for its end.
    pub fn run<T: Send + 'static>(&self, work: impl Future<Output = T> + Send + 'static) -> T {
        let (tell, told) = mpsc::channel();
        self.spawn(async move {
            let _ = tell.send(work.await);
        });
        told.recv().expect("the work did not panic")
    }

    /// Asks until `look` gives a value; fails the test with what was seen last when it does not in time.
    pub fn eventually<T, F>(&self, what: &str, look: impl Fn(kube::Client) -> F + Send + 'static) -> T
    where
        T: Send + 'static,
        F: Future<Output = Result<T, String>> + Send,
    {
        let client = self.client();
        let answer = self.run(async move {
            let deadline = tokio::time::Instant::now() + PATIENCE;
            loop {
                match look(client.clone()).await {
                    Ok(value) => return Ok(value),
                    Err(seen) if tokio::time::Instant::now() >= deadline => return Err(seen),
                    Err(_) => tokio::time::sleep(GLANCE).await,
                }
            }
        });
        answer.unwrap_or_else(|seen| panic!("waited {PATIENCE:?} for {what}; last seen: {seen}"))
    }

    fn object(&self, object: &Value) -> Api<DynamicObject> {
        let text = |value: &Value| value.as_str().expect("a text").to_owned();
        let (api_version, kind) = (text(&object["apiVersion"]), text(&object["kind"]));
        let (group, version) = api_version.split_once('/').unwrap_or(("", &api_version));
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk(group, version, &kind));
        match object["metadata"]["namespace"].as_str() {
            Some(namespace) => Api::namespaced_with(self.client(), namespace, &resource),
            None => Api::all_with(self.client(), &resource),
        }
    }

    /// Creates an object.
    pub fn create(&self, object: Value) {
        let api = self.object(&object);
        self.run(async move {
            let typed: DynamicObject = serde_json::from_value(object.clone()).expect("an object");
            let created = api.create(&PostParams::default(), &typed).await;
            created.unwrap_or_else(|why| panic!("cannot create {object}: {why}"));
        });
    }

    /// Changes an object by a merge patch. `object` names it.
    pub fn patch(&self, object: Value, patch: Value) {
        let api = self.object(&object);
        self.run(async move {
            let name = object["metadata"]["name"].as_str().expect("a name");
            let patched = api.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await;
            patched.unwrap_or_else(|why| panic!("cannot change {object}: {why}"));
        });
    }

    /// An object as it stands; none if it is not there.
    pub fn get(&self, object: Value) -> Option<Value> {
        let api = self.object(&object);
        self.run(async move {
            let found = api.get_opt(object["metadata"]["name"].as_str().expect("a name")).await;
            found.unwrap_or_else(|why| panic!("cannot get {object}: {why}"))
        })
        .map(|found| serde_json::to_value(found).expect("JSON"))
    }

    /// Deletes an object. `object` names it. Does not wait.
    pub fn delete(&self, object: Value) {
        let api = self.object(&object);
        self.run(async move {
            let name = object["metadata"]["name"].as_str().expect("a name");
            let deleted = api.delete(name, &DeleteParams::default()).await;
            deleted.unwrap_or_else(|why| panic!("cannot delete {object}: {why}"));
        });
    }

    /// Changes a workload's number of pods.
    pub fn scale(&self, kind: &str, namespace: &str, name: &str, replicas: usize) {
        let object = named("apps/v1", kind, namespace, name);
        self.patch(object, json!({"spec": {"replicas": replicas}}));
    }

    /// Deletes a pod, with another grace period if one is given. Does not wait.
    pub fn delete_pod(&self, namespace: &str, pod: &str, grace: Option<u32>) {
        let pods: Api<Pod> = Api::namespaced(self.client(), namespace);
        let (namespace, pod) = (namespace.to_owned(), pod.to_owned());
        self.run(async move {
            let params = DeleteParams { grace_period_seconds: grace, ..DeleteParams::default() };
            let deleted = pods.delete(&pod, &params).await;
            deleted.unwrap_or_else(|why| panic!("cannot delete {namespace}/{pod}: {why}"));
        });
    }

    /// Waits until a pod is Ready that is not the one with uid `other`.
    pub fn ready_after(&self, namespace: &str, pod: &str, other: &str) -> Seen {
        let (namespace, pod, other) = (namespace.to_owned(), pod.to_owned(), other.to_owned());
        self.eventually(&format!("pod {namespace}/{pod} to be ready"), move |client| {
            let (namespace, pod, other) = (namespace.clone(), pod.clone(), other.clone());
            async move {
                let pods: Api<Pod> = Api::namespaced(client, &namespace);
                let found = pods.get(&pod).await.map_err(|why| why.to_string())?;
                if found.metadata.uid.as_deref() == Some(&other) {
                    return Err("the old one is still there".to_owned());
                }
                ready(&found).ok_or_else(|| format!("{:?}", found.status))
            }
        })
    }

    /// Waits until a pod is Ready.
    pub fn ready(&self, namespace: &str, pod: &str) -> Seen {
        self.ready_after(namespace, pod, "")
    }

    /// Deletes a workload's pod and waits until its successor is Ready.
    pub fn replace(&self, namespace: &str, pod: &str, grace: Option<u32>) -> Seen {
        let old = self.ready(namespace, pod);
        self.delete_pod(namespace, pod, grace);
        self.ready_after(namespace, pod, &old.uid)
    }

    /// Waits until `count` pods with the label `app` are Ready and no other is left; their names and what
    /// they have.
    pub fn all_ready(&self, namespace: &str, app: &str, count: usize) -> Vec<(String, Seen)> {
        let (namespace, selector) = (namespace.to_owned(), format!("app={app}"));
        self.eventually(&format!("{count} pods {selector} in {namespace}"), move |client| {
            let (namespace, selector) = (namespace.clone(), selector.clone());
            async move {
                let pods: Api<Pod> = Api::namespaced(client, &namespace);
                let params = kube::api::ListParams::default().labels(&selector);
                let found = pods.list(&params).await.map_err(|why| why.to_string())?.items;
                let mut seen: Vec<(String, Seen)> =
                    found.iter().filter_map(|pod| Some((pod.metadata.name.clone()?, ready(pod)?))).collect();
                seen.sort_by(|one, two| one.0.cmp(&two.0));
                let names: Vec<_> = found.iter().map(|pod| &pod.metadata.name).collect();
                if seen.len() == count && found.len() == count { Ok(seen) } else { Err(format!("{names:?}")) }
            }
        })
    }

    /// Waits until a pod is gone.
    pub fn gone(&self, namespace: &str, pod: &str) {
        let (namespace, pod) = (namespace.to_owned(), pod.to_owned());
        self.eventually(&format!("the end of {namespace}/{pod}"), move |client| {
            let (namespace, pod) = (namespace.clone(), pod.clone());
            async move {
                let pods: Api<Pod> = Api::namespaced(client, &namespace);
                match pods.get_opt(&pod).await.map_err(|why| why.to_string())? {
                    Some(found) => Err(format!("{:?}", found.metadata)),
                    None => Ok(()),
                }
            }
        });
    }

    /// A StickyIP as it stands.
    pub fn sticky(&self, namespace: &str, name: &str) -> Option<StickyIP> {
        let api: Api<StickyIP> = Api::namespaced(self.client(), namespace);
        let name = name.to_owned();
        self.run(async move { api.get_opt(&name).await.expect("the administrator may look") })
    }
}

/// A name for an object, as `patch` and `get` take it.
pub fn named(api_version: &str, kind: &str, namespace: &str, name: &str) -> Value {
    let mut object = json!({"apiVersion": api_version, "kind": kind, "metadata": {"name": name}});
    if !namespace.is_empty() {
        object["metadata"]["namespace"] = namespace.into();
    }
    object
}

fn ready(pod: &Pod) -> Option<Seen> {
    let status = pod.status.as_ref()?;
    let ready = |condition: &k8s_openapi::api::core::v1::PodCondition| {
        condition.type_ == "Ready" && condition.status == "True"
    };
    if pod.metadata.deletion_timestamp.is_some() || !status.conditions.iter().flatten().any(ready) {
        return None;
    }
    Some(Seen {
        uid: pod.metadata.uid.clone()?,
        node: pod.spec.as_ref()?.node_name.clone()?,
        addresses: status.pod_ips.iter().flatten().map(|ip| ip.ip.clone()).collect(),
        restarts: status.container_statuses.iter().flatten().map(|container| container.restart_count).sum(),
    })
}

/// The network namespace that the fabric's process holds.
fn fabric() -> File {
    let record = std::fs::read_to_string(folder().join("run/fabric.pid")).expect("the lab is up");
    let pid = record.split(' ').next().expect("a pid");
    File::open(format!("/proc/{pid}/ns/net")).expect("the fabric runs")
}
