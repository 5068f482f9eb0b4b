//! Who had which address when: watches pods, CiliumEndpoints and CiliumNode pools, and tells afterwards of
//! every address that two had at the same time.
//!
//! Time is the API server's own, the revision of its store, in which every change of every object has its
//! place. So an overlap is told exactly, however late events arrive here.
//!
//! A pod that is ending has its address until its status says that all of its containers have terminated:
//! kubelet writes that after it has stopped the sandbox, so after DEL. Or until its CiliumEndpoint is
//! deleted: Cilium's agent does that when DEL has taken the endpoint down, and then the address may be
//! another's before kubelet has written anything. (Seen with fifty pods at once: a plain pod's endpoint
//! removed at 27.05 s, another's made with its address at 27.30 s, shown at revision 4695, the old pod's
//! status at 29.5 s, revision
//! 4756.) Of a pod that was deleted by force the API server tells no more than that it is gone, whatever
//! still runs: that is for a test to look at on the node.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::{ContainerStatus, Node, Pod};
use kube::api::{Api, DynamicObject};
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::watcher::{self, Event};
use tokio::task::JoinHandle;

use super::api::ApiServer;

/// A revision of the API server's store.
type Revision = u64;

/// From when to when something was so; without an end, until now.
#[derive(Clone, Copy, Debug)]
struct Span {
    from: Revision,
    to: Option<Revision>,
}

impl Span {
    fn overlaps(&self, other: &Self) -> bool {
        let starts_before_end = |one: &Self, two: &Self| two.to.is_none_or(|end| one.from < end);
        starts_before_end(self, other) && starts_before_end(other, self)
    }
}

/// That an address was somebody's for a time.
#[derive(Clone, Debug)]
struct Had {
    address: String,
    /// Whose it was; the same owner may have it in several ways.
    owner: String,
    /// How this is known.
    by: String,
    span: Span,
}

/// An address that two owners had at once.
pub struct Twice {
    address: String,
    one: String,
    two: String,
}

impl fmt::Display for Twice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} was with {} and with {} at once", self.address, self.one, self.two)
    }
}

/// The addresses that one object stands for now, by owner and how it is known.
type Stands = BTreeSet<(String, String, String)>;

/// When a pod lived, as far as its own object tells, and where.
#[derive(Clone, Debug)]
struct Life {
    span: Span,
    /// Its node, and since when it was bound to it.
    bound: Option<(String, Revision)>,
    /// Since when it was ending.
    ending: Option<Revision>,
}

impl Life {
    fn from(revision: Revision) -> Self {
        Self { span: Span { from: revision, to: None }, bound: None, ending: None }
    }
}

#[derive(Default)]
struct History {
    past: Vec<Had>,
    /// What each object stands for now, since when.
    now: BTreeMap<String, BTreeMap<(String, String, String), Revision>>,
    /// The life of each pod, by its uid.
    pods: BTreeMap<String, Life>,
    /// When CiliumEndpoints of each pod were deleted, by its uid.
    unplugged: BTreeMap<String, BTreeSet<Revision>>,
    /// When each node was said to be dead: its Node tainted out-of-service, or deleted.
    deaths: BTreeMap<String, BTreeSet<Revision>>,
    /// The nodes that are tainted now.
    out_of_service: BTreeSet<String>,
    events: usize,
}

impl History {
    fn note(&mut self, object: &str, revision: Revision, stands: Stands) {
        self.events += 1;
        let before = self.now.entry(object.to_owned()).or_default();
        let ended: Vec<_> = before.keys().filter(|had| !stands.contains(*had)).cloned().collect();
        for had in ended {
            let from = before.remove(&had).expect("it was just seen");
            let (address, owner, by) = had;
            self.past.push(Had { address, owner, by, span: Span { from, to: Some(revision) } });
        }
        for had in stands {
            before.entry(had).or_insert(revision);
        }
    }

    fn all(&self) -> Vec<Had> {
        let open = self.now.values().flatten().map(|((address, owner, by), from)| Had {
            address: address.clone(),
            owner: owner.clone(),
            by: by.clone(),
            span: Span { from: *from, to: None },
        });
        self.past.iter().cloned().chain(open).collect()
    }

    /// When a pod had let go: by its own object, by its endpoint's while it was ending, or with its node.
    fn end_of(&self, uid: &str, pod: &Life) -> Option<Revision> {
        let first = |all: Option<&BTreeSet<Revision>>, since: Revision| all?.range(since..).next().copied();
        let with_node = pod.bound.as_ref().and_then(|(node, since)| first(self.deaths.get(node), *since));
        let unplugged = pod.ending.and_then(|since| first(self.unplugged.get(uid), since));
        pod.span.to.into_iter().chain(with_node).chain(unplugged).min()
    }

    /// The time that something was a pod's, as far as the pod was live. A pool's is as it is.
    fn while_live(&self, mut had: Had) -> Option<Had> {
        if had.by == "pool" {
            return Some(had);
        }
        let pod = self.pods.get(&had.owner)?;
        had.span.from = had.span.from.max(pod.span.from);
        had.span.to = had.span.to.into_iter().chain(self.end_of(&had.owner, pod)).min();
        had.span.to.is_none_or(|end| had.span.from < end).then_some(had)
    }

    fn doubled(&self) -> Vec<Twice> {
        let mut by_address: BTreeMap<(bool, String), Vec<Had>> = BTreeMap::new();
        for had in self.all().into_iter().filter_map(|had| self.while_live(had)) {
            // A node's pool offers an address, a pod has it: two things, never compared with each other.
            by_address.entry((had.by == "pool", had.address.clone())).or_default().push(had);
        }
        let mut doubled = Vec::new();
        for ((_, address), all) in by_address {
            for (index, one) in all.iter().enumerate() {
                for two in &all[index + 1..] {
                    if one.owner != two.owner && one.span.overlaps(&two.span) {
                        let told = |had: &Had| format!("{} ({}, {:?})", had.owner, had.by, had.span);
                        doubled.push(Twice { address: address.clone(), one: told(one), two: told(two) });
                    }
                }
            }
        }
        doubled
    }
}

/// Watches from `start` to `finish`.
pub struct Witness {
    history: Arc<Mutex<History>>,
    tasks: Vec<JoinHandle<()>>,
}

impl Witness {
    /// Begins to watch; returns when everything that stands now was seen.
    pub fn start(api: &ApiServer) -> Self {
        let history = Arc::new(Mutex::new(History::default()));
        let (seen, all) = std::sync::mpsc::channel();
        let dynamic = |kind: &str| {
            let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("cilium.io", "v2", kind));
            Api::<DynamicObject>::all_with(api.client(), &resource)
        };
        let pods: Api<Pod> = Api::all(api.client());
        let nodes: Api<Node> = Api::all(api.client());
        let tasks = vec![
            api.spawn(watch(pods, Arc::clone(&history), seen.clone(), pod)),
            api.spawn(watch(nodes, Arc::clone(&history), seen.clone(), node)),
            api.spawn(watch(dynamic("CiliumEndpoint"), Arc::clone(&history), seen.clone(), endpoint)),
            api.spawn(watch(dynamic("CiliumNode"), Arc::clone(&history), seen, pool)),
        ];
        for _ in &tasks {
            all.recv().expect("a watch has begun");
        }
        Self { history, tasks }
    }

    /// Fails the test if an address was doubled at any time. Tells how many events were seen.
    pub fn finish(self) -> usize {
        for task in &self.tasks {
            assert!(!task.is_finished(), "a watch has ended");
            task.abort();
        }
        let history = self.history.lock().expect("no watch panicked");
        let doubled: Vec<String> = history.doubled().iter().map(Twice::to_string).collect();
        assert!(doubled.is_empty(), "{}", doubled.join("\n"));
        history.events
    }
}

async fn watch<K>(
    api: Api<K>,
    history: Arc<Mutex<History>>,
    begun: std::sync::mpsc::Sender<()>,
    note: fn(&mut History, &K, bool),
) where
    K: kube::Resource + Clone + std::fmt::Debug + serde::de::DeserializeOwned + Send + 'static,
{
    let mut events = std::pin::pin!(watcher::watcher(api, watcher::Config::default()));
    let mut initial = 0;
    while let Some(event) = events.next().await {
        let mut history = history.lock().expect("no watch panicked");
        match event.expect("the API server is up as long as it is watched") {
            Event::Init => initial += 1,
            // What happened between two lists was not seen.
            Event::InitDone => {
                assert_eq!(initial, 1, "the watch was interrupted");
                let _ = begun.send(());
            }
            Event::InitApply(object) | Event::Apply(object) => note(&mut history, &object, true),
            Event::Delete(object) => note(&mut history, &object, false),
        }
    }
}

fn revision(object: &impl kube::ResourceExt) -> Revision {
    object.resource_version().and_then(|text| text.parse().ok()).expect("a revision")
}

/// Has kubelet said that nothing of the pod runs any more? Of a pod that nobody deleted it would run its
/// containers anew in the same sandbox.
fn has_ended(pod: &Pod) -> bool {
    let Some(status) = &pod.status else { return false };
    if matches!(status.phase.as_deref(), Some("Succeeded" | "Failed")) {
        return true;
    }
    let in_state = |container: &ContainerStatus,
                    is: fn(&k8s_openapi::api::core::v1::ContainerState) -> bool| {
        container.state.as_ref().is_some_and(is)
    };
    let containers: Vec<_> = status.container_statuses.iter().flatten().collect();
    let mut others =
        status.init_container_statuses.iter().chain(&status.ephemeral_container_statuses).flatten();
    pod.metadata.deletion_timestamp.is_some()
        && !containers.is_empty()
        && containers.iter().all(|container| in_state(container, |state| state.terminated.is_some()))
        && !others.any(|container| in_state(container, |state| state.running.is_some()))
}

fn pod(history: &mut History, pod: &Pod, there: bool) {
    let at = revision(pod);
    let uid = pod.metadata.uid.clone().expect("every object has one");
    let name = format!(
        "Pod {}/{}",
        pod.metadata.namespace.as_deref().unwrap_or(""),
        pod.metadata.name.as_deref().unwrap_or("")
    );
    let spec = pod.spec.as_ref();
    let own = spec.and_then(|spec| spec.host_network) != Some(true);
    let addresses = pod.status.as_ref().and_then(|status| status.pod_ips.as_ref()).into_iter().flatten();
    let stands =
        addresses.filter(|_| there && own).map(|ip| (ip.ip.clone(), uid.clone(), name.clone())).collect();
    let life = history.pods.entry(uid.clone()).or_insert_with(|| Life::from(at));
    if life.bound.is_none() {
        life.bound = spec.and_then(|spec| spec.node_name.clone()).map(|node| (node, at));
    }
    if life.ending.is_none() && pod.metadata.deletion_timestamp.is_some() {
        life.ending = Some(at);
    }
    if life.span.to.is_none() && (!there || has_ended(pod)) {
        life.span.to = Some(at);
    }
    history.note(&format!("pod {uid}"), at, stands);
}

fn node(history: &mut History, node: &Node, there: bool) {
    let (at, name) = (revision(node), node.metadata.name.clone().expect("every object has one"));
    history.events += 1;
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_ref()).into_iter().flatten();
    let tainted = there && taints.into_iter().any(|taint| taint.key == "node.kubernetes.io/out-of-service");
    // A tainted node changes in other ways too: it died once.
    let newly = if tainted {
        history.out_of_service.insert(name.clone())
    } else {
        history.out_of_service.remove(&name);
        !there
    };
    if newly {
        history.deaths.entry(name).or_default().insert(at);
    }
}

fn endpoint(history: &mut History, endpoint: &DynamicObject, there: bool) {
    let at = revision(endpoint);
    let meta = &endpoint.metadata;
    let by = format!(
        "CiliumEndpoint {}/{}",
        meta.namespace.as_deref().unwrap_or(""),
        meta.name.as_deref().unwrap_or("")
    );
    let owner = meta
        .owner_references
        .iter()
        .flatten()
        .find(|owner| owner.kind == "Pod")
        .map(|owner| owner.uid.clone());
    let addressing =
        endpoint.data["status"]["networking"]["addressing"].as_array().cloned().unwrap_or_default();
    let addresses =
        addressing.iter().flat_map(|pair| [&pair["ipv4"], &pair["ipv6"]]).filter_map(|text| text.as_str());
    if let Some(owner) = owner.clone().filter(|_| !there) {
        history.unplugged.entry(owner).or_default().insert(at);
    }
    let stands = match owner.filter(|_| there) {
        Some(owner) => addresses.map(|address| (address.to_owned(), owner.clone(), by.clone())).collect(),
        None => Stands::new(),
    };
    history.note(&format!("endpoint {}", meta.uid.as_deref().unwrap_or("")), at, stands);
}

fn pool(history: &mut History, node: &DynamicObject, there: bool) {
    let at = revision(node);
    let name = node.metadata.name.clone().expect("every object has one");
    let keys = node.data["spec"]["ipam"]["pool"].as_object().filter(|_| there);
    let stands = keys.into_iter().flat_map(|keys| keys.keys());
    let stands =
        stands.map(|address| (address.clone(), format!("the pool of {name}"), "pool".to_owned())).collect();
    history.note(&format!("node {name}"), at, stands);
}

// By its path: the benches take this file in by its own.
#[cfg(test)]
mod tests;
