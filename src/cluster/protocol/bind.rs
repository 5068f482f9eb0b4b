//! Binds a pod to its address: read, ask [`step::next`], send one write, and start again.
//!
//! Must never use what it did not read in this run, and never report success while a write is in doubt.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::Pod;
use kube::api::Api;

use crate::cluster::api::client::ApiError;
use crate::cluster::objects::{ClaimantRef, ClaimedPod, StickyIP, Validate, WorkloadRef};
use crate::cluster::pod;
use crate::cluster::protocol::stale_nodes::StaleNodeCheck;
use crate::cluster::protocol::step::{self, BindInput, Candidate, LiveState, NextStep, Waiting};
use crate::cluster::protocol::{
    candidates::CandidateSources, local_node::MAX_STEPS, read::read_claims, read::read_node_state,
};
use crate::cluster::view::{ClaimView, Origin, StickyView};
use crate::cluster::writer::apply::{ApiWriter, Applied};
use crate::cluster::writer::write::Write;
use crate::names::StickyKey;
use crate::policy::handover::{Attached, NodeState, OldPod, OldSandbox, WaitReason};
use crate::policy::lifetime::retention::Retention;

pub(crate) use crate::cluster::protocol::local_node::{BindError, LocalNode};
pub(crate) use crate::cluster::protocol::read::{is_any_claimed, list_claims, read_sticky};
pub(crate) use crate::cluster::view::ClaimsByAddress;

/// Between two reads while waiting, at first: most old pods are gone soon.
const PAUSE: Duration = Duration::from_millis(50);
/// After this time the reads become rare: fifty pods of one dead node must not keep the API server busy.
const SOON: Duration = Duration::from_secs(4);
const LONG_PAUSE: Duration = Duration::from_millis(500);

/// How often the other tasks of this thread may run until a request that was just made has been sent: through
/// the queue of the client, then through that of the connection.
const YIELDS_UNTIL_SENT: usize = 4;

/// Does something that blocks this thread, once the request that is under way in parallel has been sent.
pub(crate) async fn after_sending(work: impl FnOnce()) {
    for _ in 0..YIELDS_UNTIL_SENT {
        tokio::task::yield_now().await;
    }
    work();
}

/// What the caller has just read of the StickyIP.
#[derive(Debug, Clone, Default)]
pub(crate) enum StickyRead {
    /// Nothing: it is read live.
    #[default]
    NotRead,
    Absent,
    Found {
        sticky: Box<StickyIP>,
        /// The claims of its addresses, if they were read after it, or in parallel and are sealed to it: a
        /// seal lasts as long as its StickyIP.
        claims: Option<ClaimsByAddress>,
    },
}

impl StickyRead {
    /// The result of a live read, without claims.
    pub(crate) fn of(read: Option<StickyIP>) -> Self {
        read.map_or(Self::Absent, Self::found)
    }

    /// A StickyIP that was read, without claims.
    pub(crate) fn found(sticky: StickyIP) -> Self {
        Self::Found { sticky: Box::new(sticky), claims: None }
    }

    /// The same with the claims of its addresses.
    pub(crate) fn with_claims(mut self, read: Option<ClaimsByAddress>) -> Self {
        if let Self::Found { claims, .. } = &mut self {
            *claims = read;
        }
        self
    }
}

/// A pod that is to be attached to a StickyIP.
#[derive(Debug, Clone)]
pub(crate) struct Binder {
    pub asker: Attached,
    pub pod: String,
    pub key: StickyKey,
    pub claimant: ClaimantRef,
    pub workload: WorkloadRef,
    /// How long the addresses are kept, if the StickyIP has to be created.
    pub retention: Retention,
    /// The addresses to which the pod is pinned; empty if it is not.
    pub pinned: Vec<IpAddr>,
    /// How long to wait for old pods, home nodes and deletions.
    pub patience: Duration,
}

/// One run of a bind, with what it has read and tried so far.
struct Run<'a, 'w> {
    binder: &'a Binder,
    writer: &'a mut ApiWriter<'w>,
    local_node: &'a mut dyn LocalNode,
    /// The pod runs already: see [`Binder::adopt`].
    is_running: bool,
    started: Instant,
    /// The StickyIP, as read or written last.
    sticky: Option<StickyIP>,
    /// Claims that were read since the last write that could have changed them.
    claims: Option<ClaimsByAddress>,
    sources: Option<CandidateSources>,
    candidates: Option<Vec<Candidate>>,
    /// Candidates of an earlier choice, of which one was lost.
    kept: Vec<Candidate>,
    avoid: BTreeSet<IpAddr>,
    stale_nodes: StaleNodeCheck,
}

/// The states of an old attachment's node, pod and sandbox.
type OldState = (NodeState, OldPod, OldSandbox);

/// Of an attachment that is not read.
const NOT_READ: OldState = (NodeState::Unknown, OldPod::Unknown, OldSandbox::MayLive);

impl Binder {
    /// Binds until the pod is attached, and returns the StickyIP as it is then.
    /// Errors: why the pod was not bound. The next ADD, or repair, continues or undoes what was written.
    pub(crate) async fn bind(
        &self,
        writer: &mut ApiWriter<'_>,
        local_node: &mut dyn LocalNode,
        read: StickyRead,
    ) -> Result<StickyIP, BindError> {
        let mut run = Run::new(self, writer, local_node);
        match read {
            StickyRead::NotRead => run.read_sticky().await?,
            StickyRead::Absent => {}
            // The claims of a pin are not among those that were read before.
            StickyRead::Found { sticky, claims } => {
                (run.sticky, run.claims) = (Some(*sticky), claims.filter(|_| self.pinned.is_empty()));
            }
        }
        run.until_attached().await
    }

    /// Binds a pod that is already running, and stops at any attachment of that pod: the one of its own
    /// sandbox is better than the adopted one. `unclaimed` are the candidate sources if the caller's watches
    /// know neither a StickyIP of this name nor a claim on these addresses. If the watches are stale, the
    /// first write is a conflict and everything is read live.
    pub(crate) async fn adopt(
        &self,
        writer: &mut ApiWriter<'_>,
        local_node: &mut dyn LocalNode,
        unclaimed: Option<CandidateSources>,
    ) -> Result<StickyIP, BindError> {
        let mut run = Run { is_running: true, ..Run::new(self, writer, local_node) };
        match unclaimed {
            Some(sources) => (run.sources, run.claims) = (Some(sources), Some(ClaimsByAddress::new())),
            None => run.read_sticky().await?,
        }
        run.until_attached().await
    }

    /// Whether a run would start with this write, if it read this StickyIP and these claims and nothing else.
    pub(crate) fn would_start_with(
        &self,
        write: &Write,
        sticky: &StickyIP,
        claims: &ClaimsByAddress,
    ) -> bool {
        let Ok(Some(view)) = valid_view(Some(sticky)) else { return false };
        let (old_node, old_pod, old_sandbox) = NOT_READ;
        let home_node = NodeState::Unknown;
        let seen = LiveState { sticky: Some(&view), claims, old_node, old_pod, old_sandbox, home_node };
        step::next(&self.input(false), &seen) == NextStep::Do(write.clone())
    }

    fn too_many_conflicts(&self) -> BindError {
        BindError::TooManyConflicts { key: self.key.clone() }
    }

    /// What is asked, with the pin as the candidates. They have no origins, so nothing is claimed by it: they
    /// are only compared with the addresses of a StickyIP.
    fn input(&self, is_running: bool) -> BindInput {
        let plain = |address: &IpAddr| Candidate { address: *address, origin: Origin::Nowhere };
        let pod = || ClaimedPod { name: self.pod.clone(), uid: self.asker.pod_uid.clone() };
        BindInput {
            asker: self.asker.clone(),
            key: self.key.clone(),
            claimant: self.claimant,
            workload: self.workload.clone(),
            retention: self.retention,
            candidates: self.pinned.iter().map(plain).collect(),
            pinned: !self.pinned.is_empty(),
            origins: BTreeMap::new(),
            running: is_running.then(pod),
        }
    }
}

impl<'a, 'w> Run<'a, 'w> {
    fn new(binder: &'a Binder, writer: &'a mut ApiWriter<'w>, local_node: &'a mut dyn LocalNode) -> Self {
        Self {
            binder,
            writer,
            local_node,
            is_running: false,
            started: Instant::now(),
            sticky: None,
            claims: None,
            sources: None,
            candidates: None,
            kept: Vec::new(),
            avoid: BTreeSet::new(),
            stale_nodes: StaleNodeCheck::default(),
        }
    }

    async fn until_attached(mut self) -> Result<StickyIP, BindError> {
        let binder = self.binder;
        while self.writer.count() < MAX_STEPS {
            let view = valid_view(self.sticky.as_ref())?;
            let attached = view.as_ref().and_then(|view| view.attached.as_ref());
            if self.is_running && attached.is_some_and(|attached| attached.pod_uid == binder.asker.pod_uid) {
                return self.sticky.ok_or_else(|| binder.too_many_conflicts());
            }
            let mut input = binder.input(self.is_running);
            if view.is_none() && self.candidates.is_none() {
                self.candidates = Some(self.choose().await?);
            }
            // Also if there is a StickyIP by now: what an attempt that lost has claimed must be undone.
            if let Some(candidates) = &self.candidates {
                input.candidates.clone_from(candidates);
            }
            let claims = match self.claims.take() {
                Some(claims) => claims,
                None => read_claims(self.writer, &input.claims_to_read(view.as_ref())).await?,
            };
            if let Some(view) = &view {
                input.origins = self.origins(view, &claims).await?;
            }
            let old = self.attachment(view.as_ref(), &claims);
            let (old_node, old_pod, old_sandbox) = self.read_old_state(old.as_ref()).await?;
            let home_node = self.read_home_node(&claims).await?;
            let (sticky, claims_read) = (view.as_ref(), &claims);
            let seen = LiveState { sticky, claims: claims_read, old_node, old_pod, old_sandbox, home_node };
            let (step, node) = (step::next(&input, &seen), self.local_node.node());
            let step = self.stale_nodes.before(step, &seen, self.writer.api(), node).await?;
            match step {
                NextStep::Done(_) => return self.sticky.ok_or_else(|| binder.too_many_conflicts()),
                NextStep::Refuse { undo, why } => {
                    self.undo(&undo).await;
                    return Err(why.into());
                }
                NextStep::TryAnother { undo, avoid } => {
                    self.undo(&undo).await;
                    self.avoid.extend(avoid);
                    self.kept = self.candidates.take().unwrap_or_default();
                    self.read_sticky().await?;
                }
                NextStep::Wait(waiting) => {
                    self.wait(&waiting, old.as_ref().map(|(old, _)| old)).await?;
                    self.read_sticky().await?;
                }
                NextStep::Do(write) => self.apply(&write, claims).await?,
            }
        }
        Err(binder.too_many_conflicts())
    }

    async fn read_sticky(&mut self) -> Result<(), ApiError> {
        self.sticky = read_sticky(self.writer, &self.binder.key).await?;
        Ok(())
    }

    /// The sources of candidates, which are read once. The caller puts them back.
    async fn take_sources(&mut self) -> Result<CandidateSources, BindError> {
        match self.sources.take() {
            Some(sources) => Ok(sources),
            None => {
                let (api, node) = (self.writer.api(), self.local_node.node());
                CandidateSources::read(api, &self.binder.key, node).await
            }
        }
    }

    async fn choose(&mut self) -> Result<Vec<Candidate>, BindError> {
        let mut sources = self.take_sources().await?;
        let (Binder { key, pinned, .. }, api) = (self.binder, self.writer.api());
        let chosen = if pinned.is_empty() {
            sources.candidates(api, key, &self.kept, &self.avoid, self.local_node).await?
        } else {
            sources.pinned(api, pinned, self.local_node).await?
        };
        self.sources = Some(sources);
        Ok(chosen)
    }

    /// The origins of this run's candidates, and of the addresses of a StickyIP whose claim was lost or never
    /// created. That is rare, so they are looked up only then.
    async fn origins(
        &mut self,
        view: &StickyView,
        claims: &ClaimsByAddress,
    ) -> Result<BTreeMap<IpAddr, Origin>, BindError> {
        let own = self.candidates.iter().flatten();
        let mut origins: BTreeMap<_, _> = own.map(|one| (one.address, one.origin.clone())).collect();
        let is_unknown =
            |address: &&IpAddr| !claims.contains_key(*address) && !origins.contains_key(*address);
        for address in view.addresses.iter().filter(is_unknown).copied().collect::<Vec<_>>() {
            let mut sources = self.take_sources().await?;
            origins.insert(address, sources.origin(self.writer.api(), address, self.local_node).await?);
            self.sources = Some(sources);
        }
        Ok(origins)
    }

    /// The sandbox that is attached, or that must be attached first, with the name of its pod.
    fn attachment(&self, view: Option<&StickyView>, claims: &ClaimsByAddress) -> Option<(Attached, String)> {
        let attachment = self.sticky.as_ref().and_then(|sticky| sticky.status.as_ref()?.attachment.as_ref());
        match view?.attached.clone().zip(attachment) {
            Some((attached, attachment)) => Some((attached, attachment.pod_name.clone())),
            None => step::awaited(view?, claims).map(|(attached, pod)| (attached, pod.name.clone())),
        }
    }

    /// Reads the state of the old attachment live, if it belongs to another pod.
    async fn read_old_state(&mut self, old: Option<&(Attached, String)>) -> Result<OldState, BindError> {
        let (asker, namespace) = (&self.binder.asker, &self.binder.key.namespace);
        let of_another = old.filter(|(old, _)| old.pod_uid != asker.pod_uid);
        let Some((Attached { node, pod_uid, attachment_id }, pod)) = of_another else { return Ok(NOT_READ) };
        let api = self.writer.api();
        let pods: Api<Pod> = Api::namespaced(api.client(), namespace);
        let what = format!("get Pod {namespace}/{pod}");
        let (found_pod, node_state) =
            tokio::try_join!(api.read(&what, || pods.get_opt(pod)), read_node_state(api, node))?;
        let old_pod = pod::old_pod(found_pod.as_ref(), pod_uid);
        let sandbox = if *node == asker.node {
            self.local_node.old_sandbox(attachment_id, old_pod)?
        } else {
            OldSandbox::MayLive
        };
        Ok((node_state, old_pod, sandbox))
    }

    /// Reads the state of the home node live, if one of these claims says that another has its address there.
    async fn read_home_node(&self, claims: &ClaimsByAddress) -> Result<NodeState, BindError> {
        let in_use = claims.values().find(|claim| claim.in_use_by.is_some());
        let Some(home) = in_use.and_then(|claim| claim.home_node.as_ref()) else {
            return Ok(NodeState::Unknown);
        };
        Ok(read_node_state(self.writer.api(), home).await?)
    }

    /// Waits a little, or fails if the time is over.
    async fn wait(&mut self, waiting: &Waiting, old: Option<&Attached>) -> Result<(), BindError> {
        let timeout = self.binder.patience;
        if self.started.elapsed() >= timeout {
            let what = describe(waiting, old);
            return Err(BindError::Waited { what, timeout, agent_of: preparing_node(waiting, old) });
        }
        self.writer.api_mut().restart_time();
        // A pod that is not being deleted is not gone soon.
        let is_soon = self.started.elapsed() < SOON && !is_long(waiting);
        tokio::time::sleep(if is_soon { PAUSE } else { LONG_PAUSE }).await;
        self.writer.api_mut().restart_time();
        Ok(())
    }

    /// Sends one write and updates what is known.
    async fn apply(&mut self, write: &Write, mut claims: ClaimsByAddress) -> Result<(), BindError> {
        let Binder { key, pod, .. } = self.binder;
        let sent = self.writer.apply(write, self.sticky.as_ref(), pod);
        let applied = match (write, &self.sticky) {
            (Write::Attach { .. }, Some(sticky)) => {
                let work = || self.local_node.attaching(&sticky.spec.addresses);
                tokio::join!(sent, after_sending(work)).0
            }
            _ => sent.await,
        };
        match applied {
            // The answer is as good as a read. Everything else is as it was read, or the precondition of the
            // next write fails: a name that is free, a claim that is unchanged; and a seal lasts as long as
            // its StickyIP.
            Ok(Applied::Sticky(object)) => (self.claims, self.sticky) = (Some(claims), Some(*object)),
            Ok(Applied::Claim(object)) => {
                self.stale_nodes.has_written(write);
                claims.insert(object.spec.address, ClaimView::from(&*object));
                self.claims = Some(claims);
            }
            Ok(Applied::Deleted | Applied::Conflict) => self.read_sticky().await?,
            // It may have been applied: read again.
            Err(error) if error.leaves_doubt() => {
                tracing::warn!(pod, sticky_ip = %key, %error, "write in doubt; reading again");
                self.read_sticky().await?;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    async fn undo(&mut self, writes: &[Write]) {
        let Binder { key, pod, .. } = self.binder;
        for write in writes {
            // The next ADD, or repair, finds what is left.
            if let Err(error) = self.writer.apply(write, None, pod).await {
                tracing::warn!(pod, sticky_ip = %key, %error, "cannot undo a claim; repair does");
            }
        }
    }
}

/// The node whose agent prepared the address for the old pod, if the wait is for that: no DEL comes for a pod
/// that never had a sandbox.
fn preparing_node(waiting: &Waiting, old: Option<&Attached>) -> Option<String> {
    let is_left_to_it = matches!(waiting, Waiting::Handover(WaitReason::OldNodeDetaches));
    let prepared = old.filter(|old| is_left_to_it && old.attachment_id.prepared_uid().is_some());
    prepared.map(|old| old.node.clone())
}

/// What a person has to end.
fn is_long(waiting: &Waiting) -> bool {
    matches!(waiting, Waiting::StillPublished { .. } | Waiting::InUse { .. })
}

fn describe(waiting: &Waiting, old: Option<&Attached>) -> String {
    if let (Some(node), Some(old)) = (preparing_node(waiting, old), old) {
        let uid = &old.pod_uid;
        return format!(
            "the agent of node {node}, which prepared the address for pod {uid} and alone detaches it; see that \
             sticky-ipam-agent runs there"
        );
    }
    match waiting {
        Waiting::Grant { address, home } => format!("node {home} to grant {address}"),
        Waiting::Deletion => "a StickyIP that is being deleted".to_owned(),
        Waiting::StillPublished { address, node } => {
            format!("node {node}, which still publishes {address} although its StickyIP was deleted")
        }
        Waiting::InUse { address, home, by } => {
            format!(
                "node {home}, where {by} has {address} although it is claimed for this pod; delete that pod"
            )
        }
        Waiting::Handover(why) => {
            let (node, uid) = old.map_or(("", ""), |old| (old.node.as_str(), old.pod_uid.as_str()));
            format!("pod {uid} on node {node} to release the address: {why}")
        }
    }
}

fn valid_view(sticky: Option<&StickyIP>) -> Result<Option<StickyView>, BindError> {
    let Some(sticky) = sticky else { return Ok(None) };
    match sticky.validation_error() {
        Some(why) => {
            let name = sticky.metadata.name.clone().unwrap_or_default();
            Err(BindError::InvalidObject { what: "StickyIP", name, why })
        }
        None => Ok(Some(sticky.into())),
    }
}
