//! Binds a pod to its address: read, ask [`step::next`], send one write, and start again.
//!
//! Must never use what it did not read in this run, and never report success while a write is in doubt.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::Api;

use crate::cluster::objects::{ClaimantRef, ClaimedPod, StickyIP, Validate, WorkloadRef};
use crate::cluster::pod;
use crate::cluster::protocol::apply::{ApiWriter, Applied};
use crate::cluster::protocol::candidates::CandidateSources;
use crate::cluster::protocol::local_node::MAX_STEPS;
use crate::cluster::protocol::read::read_claims;
use crate::cluster::protocol::stale_nodes::StaleNodeCheck;
use crate::cluster::protocol::step::{self, BindInput, Candidate, LiveState, NextStep, Waiting};
use crate::cluster::protocol::view::{ClaimView, Origin, StickyView};
use crate::cluster::protocol::write::Write;
use crate::names::StickyKey;
use crate::policy::handover::{Attached, NodeState, OldPod, OldSandbox};
use crate::policy::lifetime::retention::Retention;

pub(crate) use crate::cluster::protocol::local_node::{BindError, LocalNode};
pub(crate) use crate::cluster::protocol::read::{is_any_claimed, read_sticky};
pub(crate) use crate::cluster::protocol::view::ClaimsByAddress;

/// Between two reads while waiting, at first: most old pods are gone soon.
const PAUSE: Duration = Duration::from_millis(50);
/// After this time the reads become rare: fifty pods of one dead node must not keep the API server busy.
const SOON: Duration = Duration::from_secs(4);
/// Between two reads then.
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
    /// There is none.
    Absent,
    /// It exists.
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
    pub(crate) fn with_claims(self, read: Option<ClaimsByAddress>) -> Self {
        match self {
            Self::Found { sticky, .. } => Self::Found { sticky, claims: read },
            other => other,
        }
    }
}

/// A pod that is to be attached to a StickyIP.
#[derive(Debug, Clone)]
pub(crate) struct Binder {
    /// The sandbox.
    pub asker: Attached,
    /// The pod's name.
    pub pod: String,
    /// The StickyIP's namespace and name.
    pub key: StickyKey,
    /// The claimant of that name.
    pub claimant: ClaimantRef,
    pub workload: WorkloadRef,
    /// How long the addresses are kept, if the StickyIP has to be created.
    pub retention: Retention,
    /// The addresses to which the pod is pinned; empty if it is not.
    pub pinned: Vec<IpAddr>,
    /// How long to wait for old pods, home nodes and deletions.
    pub patience: Duration,
}

/// What one run has read and tried so far.
#[derive(Default)]
struct Progress {
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

/// The sandbox that is attached, or that must be attached first, with the name of its pod.
struct OldAttachment {
    attached: Attached,
    pod: String,
}

/// The state of an old attachment, by a live read.
struct OldState {
    node: NodeState,
    pod: OldPod,
    sandbox: OldSandbox,
}

impl Binder {
    /// Binds until the pod is attached, and returns the StickyIP as it is then.
    /// Errors: why the pod was not bound. The next ADD, or repair, continues or undoes what was written.
    pub(crate) async fn bind(
        &self,
        api_writer: &mut ApiWriter<'_>,
        local_node: &mut dyn LocalNode,
        read: StickyRead,
    ) -> Result<StickyIP, BindError> {
        let (sticky, claims) = match read {
            StickyRead::NotRead => (read_sticky(api_writer, &self.key).await?, None),
            StickyRead::Absent => (None, None),
            // The claims of a pin are not among those that were read before.
            StickyRead::Found { sticky, claims } => {
                (Some(*sticky), claims.filter(|_| self.pinned.is_empty()))
            }
        };
        self.run(api_writer, local_node, Progress { sticky, claims, ..Progress::default() }, false).await
    }

    /// Binds a pod that is already running, and stops at any attachment of that pod: the one of its own
    /// sandbox is better than the adopted one. `unclaimed` are the candidate sources if the caller's watches
    /// know neither a StickyIP of this name nor a claim on these addresses. If the watches are stale, the
    /// first write is a conflict and everything is read live.
    pub(crate) async fn adopt(
        &self,
        api_writer: &mut ApiWriter<'_>,
        local_node: &mut dyn LocalNode,
        unclaimed: Option<CandidateSources>,
    ) -> Result<StickyIP, BindError> {
        let start = match unclaimed {
            Some(sources) => Progress {
                claims: Some(ClaimsByAddress::new()),
                sources: Some(sources),
                ..Progress::default()
            },
            None => Progress { sticky: read_sticky(api_writer, &self.key).await?, ..Progress::default() },
        };
        self.run(api_writer, local_node, start, true).await
    }

    /// Whether a run would start with this write, if it read this StickyIP and these claims and nothing else.
    pub(crate) fn would_start_with(
        &self,
        write: &Write,
        sticky: &StickyIP,
        claims: &ClaimsByAddress,
    ) -> bool {
        let Ok(Some(view)) = valid_view(Some(sticky)) else { return false };
        let mut input = self.input(false);
        input.candidates = self.plain_pin();
        let state = LiveState {
            sticky: Some(&view),
            claims,
            old_node: NodeState::Unknown,
            old_pod: OldPod::Unknown,
            old_sandbox: OldSandbox::MayLive,
        };
        step::next(&input, &state) == NextStep::Do(write.clone())
    }

    async fn run(
        &self,
        api_writer: &mut ApiWriter<'_>,
        local_node: &mut dyn LocalNode,
        mut progress: Progress,
        is_running: bool,
    ) -> Result<StickyIP, BindError> {
        let started = Instant::now();
        while api_writer.count() < MAX_STEPS {
            let view = valid_view(progress.sticky.as_ref())?;
            let attached = view.as_ref().and_then(|view| view.attached.as_ref());
            if is_running && attached.is_some_and(|attached| attached.pod_uid == self.asker.pod_uid) {
                return progress.sticky.ok_or_else(|| self.too_many_conflicts());
            }
            let mut input = self.input(is_running);
            if view.is_none() && progress.candidates.is_none() {
                progress.candidates = Some(self.candidates(api_writer, local_node, &mut progress).await?);
            }
            // Also if there is a StickyIP by now: what an attempt that lost has claimed must be undone.
            input.candidates = progress.candidates.clone().unwrap_or_else(|| self.plain_pin());
            let claims = match progress.claims.take() {
                Some(claims) => claims,
                None => read_claims(api_writer, &input.claims_to_read(view.as_ref())).await?,
            };
            if let Some(view) = &view {
                self.find_origins(api_writer, view, &claims, &mut progress, &mut input, local_node).await?;
            }
            let old = old_attachment(progress.sticky.as_ref(), view.as_ref(), &claims);
            let old_state = self.read_old_state(api_writer, old.as_ref(), local_node).await?;
            let state = LiveState {
                sticky: view.as_ref(),
                claims: &claims,
                old_node: old_state.node,
                old_pod: old_state.pod,
                old_sandbox: old_state.sandbox,
            };
            let step = step::next(&input, &state);
            let step = progress.stale_nodes.before(step, &state, api_writer.api(), local_node.node()).await?;
            match step {
                NextStep::Done(_) => return progress.sticky.ok_or_else(|| self.too_many_conflicts()),
                NextStep::Refuse { undo, why } => {
                    self.undo(api_writer, &undo).await;
                    return Err(why.into());
                }
                NextStep::TryAnother { undo, avoid } => {
                    self.undo(api_writer, &undo).await;
                    progress.avoid.extend(avoid);
                    progress.kept = progress.candidates.take().unwrap_or_default();
                    progress.sticky = read_sticky(api_writer, &self.key).await?;
                }
                NextStep::Wait(waiting) => {
                    self.wait(api_writer, &waiting, old.as_ref(), started).await?;
                    progress.sticky = read_sticky(api_writer, &self.key).await?;
                }
                NextStep::Do(write) => {
                    self.apply(api_writer, local_node, &write, claims, &mut progress).await?;
                }
            }
        }
        Err(self.too_many_conflicts())
    }

    fn too_many_conflicts(&self) -> BindError {
        BindError::TooManyConflicts { key: self.key.clone() }
    }

    fn input(&self, is_running: bool) -> BindInput {
        BindInput {
            asker: self.asker.clone(),
            key: self.key.clone(),
            claimant: self.claimant,
            workload: self.workload.clone(),
            retention: self.retention,
            candidates: Vec::new(),
            pinned: !self.pinned.is_empty(),
            origins: BTreeMap::new(),
            running: is_running
                .then(|| ClaimedPod { name: self.pod.clone(), uid: self.asker.pod_uid.clone() }),
        }
    }

    /// The pin without origins, only to be compared with the addresses of a StickyIP: nothing is claimed by
    /// it.
    fn plain_pin(&self) -> Vec<Candidate> {
        let plain = |address: &IpAddr| Candidate { address: *address, origin: Origin::Nowhere };
        self.pinned.iter().map(plain).collect()
    }

    async fn candidates(
        &self,
        api_writer: &ApiWriter<'_>,
        local_node: &mut dyn LocalNode,
        progress: &mut Progress,
    ) -> Result<Vec<Candidate>, BindError> {
        let Progress { sources, kept, avoid, .. } = progress;
        let sources = self.sources(api_writer, sources, local_node.node()).await?;
        if self.pinned.is_empty() {
            sources.candidates(api_writer.api(), &self.key, kept, avoid, local_node).await
        } else {
            sources.pinned(api_writer.api(), &self.pinned, local_node).await
        }
    }

    async fn sources<'s>(
        &self,
        api_writer: &ApiWriter<'_>,
        sources: &'s mut Option<CandidateSources>,
        node: &str,
    ) -> Result<&'s mut CandidateSources, BindError> {
        Ok(match sources {
            Some(sources) => sources,
            none => none.insert(CandidateSources::read(api_writer.api(), &self.key, node).await?),
        })
    }

    /// Finds the origins of the addresses of a StickyIP whose claim was lost or never created. This is rare,
    /// so they are looked up only then: the origins of this run's own candidates are known.
    async fn find_origins(
        &self,
        api_writer: &ApiWriter<'_>,
        view: &StickyView,
        claims: &ClaimsByAddress,
        progress: &mut Progress,
        input: &mut BindInput,
        local_node: &mut dyn LocalNode,
    ) -> Result<(), BindError> {
        let own = progress.candidates.iter().flatten();
        input.origins.extend(own.map(|candidate| (candidate.address, candidate.origin.clone())));
        let missing = view.addresses.iter().filter(|address| !claims.contains_key(address));
        let unknown: Vec<IpAddr> =
            missing.filter(|address| !input.origins.contains_key(address)).copied().collect();
        for address in unknown {
            let sources = self.sources(api_writer, &mut progress.sources, local_node.node()).await?;
            input.origins.insert(address, sources.origin(api_writer.api(), address, local_node).await?);
        }
        Ok(())
    }

    /// Reads the state of the old attachment live, if it belongs to another pod.
    async fn read_old_state(
        &self,
        api_writer: &ApiWriter<'_>,
        old: Option<&OldAttachment>,
        local_node: &mut dyn LocalNode,
    ) -> Result<OldState, BindError> {
        let Some(OldAttachment { attached, pod: pod_name }) =
            old.filter(|old| old.attached.pod_uid != self.asker.pod_uid)
        else {
            let (node, pod) = (NodeState::Unknown, OldPod::Unknown);
            return Ok(OldState { node, pod, sandbox: OldSandbox::MayLive });
        };
        let api = api_writer.api();
        let pods: Api<Pod> = Api::namespaced(api.client(), &self.key.namespace);
        let nodes: Api<Node> = Api::all(api.client());
        let (what_pod, what_node) =
            (format!("get Pod {}/{pod_name}", self.key.namespace), format!("get Node {}", attached.node));
        let (found, node) = tokio::try_join!(
            api.read(&what_pod, || pods.get_opt(pod_name)),
            api.read(&what_node, || nodes.get_opt(&attached.node)),
        )?;
        let old_pod = pod::old_pod(found.as_ref(), &attached.pod_uid);
        let sandbox = if attached.node == self.asker.node {
            local_node.old_sandbox(&attached.attachment_id, old_pod)?
        } else {
            OldSandbox::MayLive
        };
        Ok(OldState { node: pod::node_state(node.as_ref()), pod: old_pod, sandbox })
    }

    /// Waits a little, or fails if the time is over.
    async fn wait(
        &self,
        api_writer: &mut ApiWriter<'_>,
        waiting: &Waiting,
        old: Option<&OldAttachment>,
        started: Instant,
    ) -> Result<(), BindError> {
        if started.elapsed() >= self.patience {
            let what = describe(waiting, old.map(|old| &old.attached));
            return Err(BindError::Waited { what, timeout: self.patience });
        }
        api_writer.api_mut().restart_time();
        // A pod that is not being deleted is not gone soon.
        let is_soon = started.elapsed() < SOON && !matches!(waiting, Waiting::StillPublished { .. });
        tokio::time::sleep(if is_soon { PAUSE } else { LONG_PAUSE }).await;
        api_writer.api_mut().restart_time();
        Ok(())
    }

    /// Sends one write and updates what is known.
    async fn apply(
        &self,
        api_writer: &mut ApiWriter<'_>,
        local_node: &mut dyn LocalNode,
        write: &Write,
        mut claims: ClaimsByAddress,
        progress: &mut Progress,
    ) -> Result<(), BindError> {
        let addresses = progress.sticky.as_ref().map(|sticky| sticky.spec.addresses.clone());
        let sent = api_writer.apply(write, progress.sticky.as_ref(), &self.pod);
        let applied = match (write, addresses) {
            (Write::Attach { .. }, Some(addresses)) => {
                tokio::join!(sent, after_sending(|| local_node.attaching(&addresses))).0
            }
            _ => sent.await,
        };
        match applied {
            // The answer is as good as a read. Everything else is as it was read, or the precondition of the
            // next write fails: a name that is free, a claim that is unchanged; and a seal lasts as long as
            // its StickyIP.
            Ok(Applied::Sticky(object)) => {
                progress.claims = Some(claims);
                progress.sticky = Some(*object);
            }
            Ok(Applied::Claim(object)) => {
                progress.stale_nodes.has_written(write);
                claims.insert(object.spec.address, ClaimView::from(&*object));
                progress.claims = Some(claims);
            }
            Ok(Applied::Deleted | Applied::Conflict) => {
                progress.sticky = read_sticky(api_writer, &self.key).await?;
            }
            // It may have been applied: read again.
            Err(error) if error.leaves_doubt() => {
                tracing::warn!(
                    pod = self.pod, sticky_ip = %self.key, %error,
                    "write in doubt; reading again"
                );
                progress.sticky = read_sticky(api_writer, &self.key).await?;
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    async fn undo(&self, api_writer: &mut ApiWriter<'_>, writes: &[Write]) {
        for write in writes {
            // The next ADD, or repair, finds what is left.
            if let Err(error) = api_writer.apply(write, None, &self.pod).await {
                tracing::warn!(
                    pod = self.pod, sticky_ip = %self.key, %error,
                    "cannot undo a claim; repair does"
                );
            }
        }
    }
}

fn old_attachment(
    sticky: Option<&StickyIP>,
    view: Option<&StickyView>,
    claims: &ClaimsByAddress,
) -> Option<OldAttachment> {
    let attachment = sticky.and_then(|sticky| sticky.status.as_ref()?.attachment.as_ref());
    let attached = view.and_then(|view| view.attached.clone());
    match (attached, attachment) {
        (Some(attached), Some(attachment)) => {
            Some(OldAttachment { attached, pod: attachment.pod_name.clone() })
        }
        _ => {
            let (attached, pod) = step::awaited(view?, claims)?;
            Some(OldAttachment { attached, pod: pod.name.clone() })
        }
    }
}

fn describe(waiting: &Waiting, old: Option<&Attached>) -> String {
    match waiting {
        Waiting::Grant { address, home } => format!("node {home} to grant {address}"),
        Waiting::Deletion => "a StickyIP that is being deleted".to_owned(),
        Waiting::StillPublished { address, node } => {
            format!("node {node}, which still publishes {address} although its StickyIP was deleted")
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
