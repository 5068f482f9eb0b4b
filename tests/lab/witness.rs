//! Who had which address when: watches pods, CiliumEndpoints and CiliumNode pools, and tells afterwards of every address
//! that two had at the same time.
//!
//! Time is the API server's own, the revision of its store, in which every change of every object has its place. So an overlap is
//! told exactly, however late events arrive here.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DynamicObject};
use kube::core::{ApiResource, GroupVersionKind};
use kube::runtime::watcher::{self, Event};
use tokio::task::JoinHandle;

use crate::api::ApiServer;

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

#[derive(Default)]
struct History {
    past: Vec<Had>,
    /// What each object stands for now, since when.
    now: BTreeMap<String, BTreeMap<(String, String, String), Revision>>,
    /// When each live pod began, and ended.
    pods: BTreeMap<String, Span>,
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

    /// An endpoint's time, as far as its pod was live.
    fn while_live(&self, mut had: Had) -> Option<Had> {
        if !had.by.starts_with("CiliumEndpoint") {
            return Some(had);
        }
        let pod = self.pods.get(&had.owner)?;
        had.span.from = had.span.from.max(pod.from);
        had.span.to = match (had.span.to, pod.to) {
            (Some(one), Some(two)) => Some(one.min(two)),
            (one, two) => one.or(two),
        };
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
        let tasks = vec![
            api.spawn(watch(pods, Arc::clone(&history), seen.clone(), pod)),
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

fn pod(history: &mut History, pod: &Pod, there: bool) {
    let at = revision(pod);
    let uid = pod.metadata.uid.clone().expect("every object has one");
    let status = pod.status.as_ref();
    let ended = matches!(status.and_then(|status| status.phase.as_deref()), Some("Succeeded" | "Failed"));
    // One that is ending lets go of its address before the API server forgets it.
    let live = there && !ended && pod.metadata.deletion_timestamp.is_none();
    let name = format!(
        "Pod {}/{}",
        pod.metadata.namespace.as_deref().unwrap_or(""),
        pod.metadata.name.as_deref().unwrap_or("")
    );
    let own = pod.spec.as_ref().and_then(|spec| spec.host_network) != Some(true);
    let addresses = status.and_then(|status| status.pod_ips.as_ref()).into_iter().flatten();
    let stands =
        addresses.filter(|_| live && own).map(|ip| (ip.ip.clone(), uid.clone(), name.clone())).collect();
    let span = history.pods.entry(uid.clone()).or_insert(Span { from: at, to: None });
    if !live && span.to.is_none() {
        span.to = Some(at);
    }
    history.note(&format!("pod {uid}"), at, stands);
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

#[cfg(test)]
mod tests {
    use super::*;

    fn stands(all: &[(&str, &str, &str)]) -> Stands {
        all.iter().map(|(address, owner, by)| ((*address).into(), (*owner).into(), (*by).into())).collect()
    }

    #[test]
    fn a_handover_is_no_double_and_an_overlap_of_one_revision_is() {
        let mut history = History::default();
        history.note("pod a", 5, stands(&[("10.0.0.1", "a", "Pod x/a")]));
        history.note("pod a", 7, stands(&[]));
        history.note("pod b", 7, stands(&[("10.0.0.1", "b", "Pod x/b")]));
        assert!(history.doubled().is_empty());
        history.note("pod c", 6, stands(&[("10.0.0.1", "c", "Pod x/c")]));
        let doubled: Vec<String> = history.doubled().iter().map(Twice::to_string).collect();
        assert_eq!(doubled.len(), 2, "{doubled:?}");
        assert!(doubled.iter().all(|text| text.contains("10.0.0.1 was with") && text.contains("Pod x/c")));
    }

    #[test]
    fn an_endpoint_counts_while_its_pod_lives() {
        let mut history = History::default();
        history.pods.insert("a".into(), Span { from: 1, to: Some(4) });
        history.pods.insert("b".into(), Span { from: 3, to: None });
        history.note("endpoint a", 2, stands(&[("10.0.0.1", "a", "CiliumEndpoint x/a")]));
        history.note("pod b", 4, stands(&[("10.0.0.1", "b", "Pod x/b")]));
        assert!(history.doubled().is_empty(), "the old pod's endpoint is only slow to go");
        history.note("endpoint b", 3, stands(&[("10.0.0.1", "b", "CiliumEndpoint x/b")]));
        assert_eq!(history.doubled().len(), 1);
    }

    #[test]
    fn two_pools_may_not_offer_one_address_but_a_pod_has_what_its_pool_offers() {
        let mut history = History::default();
        history.note("pod a", 2, stands(&[("10.0.0.1", "a", "Pod x/a")]));
        history.note("node 1", 1, stands(&[("10.0.0.1", "the pool of 1", "pool")]));
        assert!(history.doubled().is_empty());
        history.note("node 2", 5, stands(&[("10.0.0.1", "the pool of 2", "pool")]));
        assert_eq!(history.doubled().len(), 1);
    }
}
