//! A pod's way to its address: read, ask [`step::next`], carry out one write, and again. And the way back: [`detach`].
//!
//! Must never use what it did not read in this walk, and never end a walk in doubt as if it had succeeded.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::Api;
use thiserror::Error;

use crate::alloc::range::Family;
use crate::cluster::api::client::ApiError;
use crate::cluster::objects::{
    AddressClaim, ClaimName, ClaimantRef, ClaimedPod, StickyIP, StickyKey, Validate, WorkloadRef,
};
use crate::cluster::pod;
use crate::cluster::protocol::apply::{ApiWriter, Applied};
use crate::cluster::protocol::candidates::CandidateSources;
use crate::cluster::protocol::stale_nodes::StaleNodeCheck;
use crate::cluster::protocol::step;
use crate::cluster::protocol::step::{BindInput, Candidate, LiveState, NextStep, Refusal, Waiting};
use crate::cluster::protocol::view::{ClaimView, Origin, StickyView};
use crate::cluster::protocol::write::Write;
use crate::policy::handover::{Attached, NodeState, OldPod, OldSandbox};
use crate::policy::lifetime::retention::Retention;

/// Between two looks while waiting for somebody else, at first: most are gone soon.
const PAUSE: Duration = Duration::from_millis(50);
/// After this long the looks become rare: fifty pods of one dead node must not keep the API server busy.
const SOON: Duration = Duration::from_secs(4);
/// Between two looks then.
const LONG_PAUSE: Duration = Duration::from_millis(500);
/// The most writes of one walk. Every one is either progress or a lost race; whoever loses more often than this gives the
/// others a rest.
const MAX_STEPS: usize = 64;

/// What the node itself knows and does: its store.
pub trait LocalNode {
    /// The node's name.
    fn node(&self) -> &str;
    /// The families of which the node's pods have an address.
    fn families(&self) -> Vec<Family>;
    /// Whether an address is of the node's own ranges.
    fn is_own(&self, address: IpAddr) -> bool;
    /// What is known of an old sandbox of this node, whose pod is in this state.
    ///
    /// # Errors
    /// The store fails.
    fn old_sandbox(&mut self, container_id: &str, pod: OldPod) -> Result<OldSandbox, BindError>;
    /// Told while the write that attaches these addresses is under way: what takes the node time, and holds nothing, may be done
    /// now. Most likely the write succeeds.
    fn attaching(&mut self, _addresses: &[IpAddr]) {}
    /// Reserves an address of the node's own ranges for the claimant, durably; none if nothing is free.
    ///
    /// # Errors
    /// The store fails.
    fn reserve_any(
        &mut self,
        family: Family,
        avoid: &BTreeSet<IpAddr>,
    ) -> Result<Option<Candidate>, BindError>;
    /// Reserves this very address if it is of the node's own ranges, and says where it comes from.
    ///
    /// # Errors
    /// The store fails, or somebody on this node has it.
    fn reserve_this(&mut self, address: IpAddr) -> Result<Origin, BindError>;
}

/// Why a walk did not arrive.
#[derive(Debug, Error)]
pub enum BindError {
    /// The server was of no help.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The protocol says no.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The old holder, a home node or a deletion took too long.
    #[error("waited {patience:?} for {what}")]
    Waited {
        /// What was waited for.
        what: String,
        /// For how long.
        patience: Duration,
    },
    /// Others were faster every time.
    #[error("others changed StickyIP {key} or its claims {MAX_STEPS} times in a row")]
    TooManyConflicts {
        /// The StickyIP.
        key: StickyKey,
    },
    /// Nothing is free.
    #[error("no {family} address is free, neither in a Sticky pool nor on this node; add a range to a pool")]
    Exhausted {
        /// The family.
        family: Family,
    },
    /// An object of ours breaks its own rules.
    #[error("{what} {name} breaks its own rules: {why}; correct or delete it")]
    InvalidObject {
        /// Its kind.
        what: &'static str,
        /// Its name.
        name: String,
        /// What is wrong.
        why: String,
    },
    /// The node's store.
    #[error("{0}")]
    LocalNode(String),
    /// Somebody on this node has the address.
    #[error("{address} is held or kept on this node for {holder}")]
    HeldOnNode {
        /// The address.
        address: IpAddr,
        /// Who has it.
        holder: String,
    },
}

/// How often the others of this thread are let go on until a request that was just made has left it: through the client's queue, then
/// through the connection's.
const YIELDS_UNTIL_SENT: usize = 4;

/// Does something that keeps this thread busy once the request that is under way beside it has left.
pub async fn after_sending(work: impl FnOnce()) {
    for _ in 0..YIELDS_UNTIL_SENT {
        tokio::task::yield_now().await;
    }
    work();
}

/// What is known when a walk begins.
#[derive(Default)]
struct Start {
    /// The StickyIP, or that there is none.
    sticky: Option<Option<StickyIP>>,
    claims: Option<ClaimsByAddress>,
    sources: Option<CandidateSources>,
}

/// Who walks, and what for.
#[derive(Debug, Clone)]
pub struct Binder {
    /// The sandbox.
    pub asker: Attached,
    /// The pod's name.
    pub pod: String,
    /// The StickyIP's namespace and name.
    pub key: StickyKey,
    /// What the name stands for.
    pub claimant: ClaimantRef,
    /// The workload.
    pub workload: WorkloadRef,
    /// How long the addresses are kept, for the case that there is no StickyIP yet.
    pub retention: Retention,
    /// The addresses that it is pinned to; empty if it is not.
    pub pinned: Vec<IpAddr>,
    /// How long to wait for others.
    pub patience: Duration,
}

impl Binder {
    /// Walks until the pod is attached, and tells its addresses. `sticky` is the StickyIP if it was just read.
    ///
    /// # Errors
    /// Why it did not arrive. Whatever stands then is gone on with or undone by whoever comes next.
    pub async fn walk(
        &self,
        api_writer: &mut ApiWriter<'_>,
        local_node: &mut dyn LocalNode,
        sticky: Option<Option<StickyIP>>,
    ) -> Result<Vec<IpAddr>, BindError> {
        Ok(self.bind(api_writer, local_node, sticky, None).await?.spec.addresses)
    }

    /// Walks until the pod is attached, and tells the StickyIP as it stands then. `claims` are those of the StickyIP's addresses if
    /// they were read after it, or beside it and are sealed to it: a seal stands as long as its StickyIP does.
    ///
    /// # Errors
    /// As [`Binder::walk`].
    pub async fn bind(
        &self,
        api_writer: &mut ApiWriter<'_>,
        local_node: &mut dyn LocalNode,
        sticky: Option<Option<StickyIP>>,
        claims: Option<ClaimsByAddress>,
    ) -> Result<StickyIP, BindError> {
        // Those of a pin are not among what was read beforehand.
        let claims = claims.filter(|_| matches!(sticky, Some(Some(_))) && self.pinned.is_empty());
        self.go(api_writer, local_node, Start { sticky, claims, sources: None }, false).await
    }

    /// Walks for a pod that runs already, and stops at any attachment of that pod: its own sandbox's is better than ours.
    /// `unknown` is what there is to offer if a watch has told of no StickyIP of this name and of no claim on these addresses. Where
    /// that is old the first write finds its name taken, and everything is read live.
    ///
    /// # Errors
    /// As [`Binder::walk`].
    pub async fn adopt(
        &self,
        api_writer: &mut ApiWriter<'_>,
        local_node: &mut dyn LocalNode,
        unknown: Option<CandidateSources>,
    ) -> Result<StickyIP, BindError> {
        let start = match unknown {
            Some(sources) => {
                Start { sticky: Some(None), claims: Some(ClaimsByAddress::new()), sources: Some(sources) }
            }
            None => Start::default(),
        };
        self.go(api_writer, local_node, start, true).await
    }

    /// Whether this walk would begin with this write, if it found the StickyIP and these claims, which are all that there is to read.
    #[must_use]
    pub fn would(&self, write: &Write, sticky: &StickyIP, claims: &ClaimsByAddress) -> bool {
        let Ok(Some(view)) = sound_view(Some(sticky)) else { return false };
        let mut ask = self.ask();
        ask.candidates = self.plain_pin();
        let seen = LiveState {
            sticky: Some(&view),
            claims,
            old_node: NodeState::Unknown,
            old_pod: OldPod::Unknown,
            old_sandbox: OldSandbox::MayLive,
        };
        step::next(&ask, &seen) == NextStep::Do(write.clone())
    }

    async fn go(
        &self,
        api_writer: &mut ApiWriter<'_>,
        local_node: &mut dyn LocalNode,
        start: Start,
        yields: bool,
    ) -> Result<StickyIP, BindError> {
        let started = Instant::now();
        // Claims that were read since the last write that could have changed them.
        let Start { sticky, mut claims, mut sources } = start;
        let mut known = match sticky {
            Some(known) => known,
            None => self.read_sticky(api_writer).await?,
        };
        let mut candidates: Option<Vec<Candidate>> = None;
        // What is still good of candidates of which one was lost.
        let mut kept = Vec::new();
        let mut avoid = BTreeSet::new();
        let mut stale_nodes = StaleNodeCheck::default();
        while api_writer.count() < MAX_STEPS {
            let view = sound_view(known.as_ref())?;
            let attached = view.as_ref().and_then(|view| view.attached.as_ref());
            if yields && attached.is_some_and(|attached| attached.pod_uid == self.asker.pod_uid) {
                return known.ok_or_else(|| BindError::TooManyConflicts { key: self.key.clone() });
            }
            let mut ask = self.ask();
            ask.running =
                yields.then(|| ClaimedPod { name: self.pod.clone(), uid: self.asker.pod_uid.clone() });
            if view.is_none() && candidates.is_none() {
                let sources = match &mut sources {
                    Some(sources) => sources,
                    none => none.insert(
                        CandidateSources::read(api_writer.api(), &self.key, local_node.node()).await?,
                    ),
                };
                candidates = Some(if self.pinned.is_empty() {
                    sources.candidates(api_writer.api(), &self.key, &kept, &avoid, local_node).await?
                } else {
                    sources.pinned(api_writer.api(), &self.pinned, local_node).await?
                });
            }
            // Also when a StickyIP is there by now: what an attempt that lost has claimed is to be undone.
            ask.candidates = candidates.clone().unwrap_or_else(|| self.plain_pin());
            let mut read = match claims.take() {
                Some(claims) => claims,
                None => read_claims(api_writer, &ask.claims_to_read(view.as_ref())).await?,
            };
            if let Some(view) = &view {
                let known = candidates.iter().flatten().map(|one| (one.address, one.origin.clone()));
                ask.origins.extend(known);
                self.find_origins(api_writer, view, &read, &mut sources, &mut ask, local_node).await?;
            }
            let old = old_holder(known.as_ref(), view.as_ref(), &read);
            let (old_node, old_pod, old_sandbox) = self.look_at(api_writer, old.as_ref(), local_node).await?;
            let seen = LiveState { sticky: view.as_ref(), claims: &read, old_node, old_pod, old_sandbox };
            let step = step::next(&ask, &seen);
            let step = stale_nodes.before(step, &seen, api_writer.api(), local_node.node()).await?;
            match step {
                NextStep::Done(_) => {
                    return known.ok_or_else(|| BindError::TooManyConflicts { key: self.key.clone() });
                }
                NextStep::Refuse { undo, why } => {
                    self.undo(api_writer, &undo).await;
                    return Err(why.into());
                }
                NextStep::TryAnother { undo, avoid: taken } => {
                    self.undo(api_writer, &undo).await;
                    avoid.extend(taken);
                    kept = candidates.take().unwrap_or_default();
                    known = self.read_sticky(api_writer).await?;
                }
                NextStep::Wait(waiting) => {
                    if started.elapsed() >= self.patience {
                        let what = tell(&waiting, old.as_ref().map(|(old, _)| old));
                        return Err(BindError::Waited { what, patience: self.patience });
                    }
                    api_writer.api_mut().restart_time();
                    // A pod that nobody ended is not gone soon.
                    let is_soon =
                        started.elapsed() < SOON && !matches!(waiting, Waiting::StillPublished { .. });
                    let pause = if is_soon { PAUSE } else { LONG_PAUSE };
                    tokio::time::sleep(pause).await;
                    api_writer.api_mut().restart_time();
                    known = self.read_sticky(api_writer).await?;
                }
                NextStep::Do(write) => {
                    let carried = api_writer.carry(&write, known.as_ref(), &self.pod);
                    let carried = match (&write, &view) {
                        (Write::Attach { .. }, Some(view)) => {
                            tokio::join!(carried, after_sending(|| local_node.attaching(&view.addresses))).0
                        }
                        _ => carried.await,
                    };
                    match carried {
                        // What was just written was just read. All else is as it was read, or the next write's precondition fails:
                        // a name that is free, a claim that is unchanged; and a seal stands as long as its StickyIP does.
                        Ok(Applied::Sticky(object)) => {
                            claims = Some(read);
                            known = Some(*object);
                        }
                        Ok(Applied::Claim(object)) => {
                            stale_nodes.has_written(&write);
                            read.insert(object.spec.address, ClaimView::from(&*object));
                            claims = Some(read);
                        }
                        Ok(_) => known = self.read_sticky(api_writer).await?,
                        // It may have happened: look.
                        Err(error) if error.leaves_doubt() => {
                            tracing::warn!(pod = self.pod, sticky_ip = %self.key, %error, "in doubt about a write; looking again");
                            known = self.read_sticky(api_writer).await?;
                        }
                        Err(error) => return Err(error.into()),
                    }
                }
            }
        }
        Err(BindError::TooManyConflicts { key: self.key.clone() })
    }

    fn ask(&self) -> BindInput {
        BindInput {
            asker: self.asker.clone(),
            key: self.key.clone(),
            claimant: self.claimant,
            workload: self.workload.clone(),
            retention: self.retention,
            candidates: Vec::new(),
            pinned: !self.pinned.is_empty(),
            origins: BTreeMap::new(),
            running: None,
        }
    }

    /// The pin without origins, only to be compared with what a StickyIP has: nothing is claimed by it.
    fn plain_pin(&self) -> Vec<Candidate> {
        let plain = |address: &IpAddr| Candidate { address: *address, origin: Origin::Nowhere };
        self.pinned.iter().map(plain).collect()
    }

    async fn read_sticky(&self, api_writer: &ApiWriter<'_>) -> Result<Option<StickyIP>, BindError> {
        Ok(read_sticky(api_writer, &self.key).await?)
    }

    /// Where the addresses of a StickyIP come from whose claim was lost, or never made by whoever made it. Rare, so it is looked up only
    /// then: what this walk itself has chosen is known.
    async fn find_origins(
        &self,
        api_writer: &ApiWriter<'_>,
        view: &StickyView,
        claims: &BTreeMap<IpAddr, ClaimView>,
        sources: &mut Option<CandidateSources>,
        ask: &mut BindInput,
        local_node: &mut dyn LocalNode,
    ) -> Result<(), BindError> {
        let missing = view.addresses.iter().filter(|address| !claims.contains_key(address));
        let unknown: Vec<IpAddr> =
            missing.filter(|address| !ask.origins.contains_key(address)).copied().collect();
        for address in unknown {
            let sources = match sources {
                Some(sources) => sources,
                None => sources
                    .insert(CandidateSources::read(api_writer.api(), &self.key, local_node.node()).await?),
            };
            ask.origins.insert(address, sources.origin(api_writer.api(), address, local_node).await?);
        }
        Ok(())
    }

    /// A live look at whoever is attached, if it is somebody else.
    async fn look_at(
        &self,
        api_writer: &ApiWriter<'_>,
        old: Option<&(Attached, String)>,
        local_node: &mut dyn LocalNode,
    ) -> Result<(NodeState, OldPod, OldSandbox), BindError> {
        let Some((old, pod_name)) = old.filter(|(old, _)| old.pod_uid != self.asker.pod_uid) else {
            return Ok((NodeState::Unknown, OldPod::Unknown, OldSandbox::MayLive));
        };
        let api = api_writer.api();
        let pods: Api<Pod> = Api::namespaced(api.client(), &self.key.namespace);
        let nodes: Api<Node> = Api::all(api.client());
        let (what_pod, what_node) =
            (format!("get Pod {}/{pod_name}", self.key.namespace), format!("get Node {}", old.node));
        let (found, node) = tokio::try_join!(
            api.read(&what_pod, || pods.get_opt(pod_name)),
            api.read(&what_node, || nodes.get_opt(&old.node)),
        )?;
        let old_pod = pod::old_pod(found.as_ref(), &old.pod_uid);
        let sandbox = if old.node == self.asker.node {
            local_node.old_sandbox(&old.container_id, old_pod)?
        } else {
            OldSandbox::MayLive
        };
        Ok((pod::node_state(node.as_ref()), old_pod, sandbox))
    }

    async fn undo(&self, api_writer: &mut ApiWriter<'_>, writes: &[Write]) {
        for write in writes {
            // Whoever comes next, or repair, finds what is left.
            if let Err(error) = api_writer.carry(write, None, &self.pod).await {
                tracing::warn!(pod = self.pod, sticky_ip = %self.key, %error, "cannot undo a claim");
            }
        }
    }
}

/// Whoever is attached, or is to be attached first; and its pod's name.
fn old_holder(
    known: Option<&StickyIP>,
    view: Option<&StickyView>,
    claims: &BTreeMap<IpAddr, ClaimView>,
) -> Option<(Attached, String)> {
    let attachment = known.and_then(|known| known.status.as_ref()?.attachment.as_ref());
    let attached = view.and_then(|view| view.attached.clone());
    match (attached, attachment) {
        (Some(attached), Some(attachment)) => Some((attached, attachment.pod_name.clone())),
        _ => step::awaited(view?, claims).map(|(first, pod)| (first, pod.name.clone())),
    }
}

fn tell(waiting: &Waiting, old: Option<&Attached>) -> String {
    match waiting {
        Waiting::Grant { address, home } => format!("node {home} to grant {address}"),
        Waiting::Deletion => "a StickyIP that is being deleted".to_owned(),
        Waiting::StillPublished { address, node } => {
            format!("node {node}, which still shows {address} though its StickyIP was deleted")
        }
        Waiting::Handover(why) => {
            let (node, uid) = old.map_or(("", ""), |old| (old.node.as_str(), old.pod_uid.as_str()));
            format!("the pod {uid} on node {node} to let go of the address: {why}")
        }
    }
}

fn sound_view(known: Option<&StickyIP>) -> Result<Option<StickyView>, BindError> {
    let Some(known) = known else { return Ok(None) };
    match known.validation_error() {
        Some(why) => {
            let name = known.metadata.name.clone().unwrap_or_default();
            Err(BindError::InvalidObject { what: "StickyIP", name, why })
        }
        None => Ok(Some(known.into())),
    }
}

/// Reads a StickyIP, live.
///
/// # Errors
/// The server is of no help.
pub async fn read_sticky(api_writer: &ApiWriter<'_>, key: &StickyKey) -> Result<Option<StickyIP>, ApiError> {
    let api: Api<StickyIP> = Api::namespaced(api_writer.api().client(), &key.namespace);
    api_writer.api().read(&format!("get StickyIP {key}"), || api.get_opt(&key.name)).await
}

/// Whether any of these addresses is claimed, for whomever, by a live read.
///
/// # Errors
/// The server is of no help.
pub async fn is_any_claimed(api_writer: &ApiWriter<'_>, addresses: &[IpAddr]) -> Result<bool, ApiError> {
    let api: Api<AddressClaim> = Api::all(api_writer.api().client());
    for address in addresses {
        let name = ClaimName::of(*address).to_string();
        let what = format!("get AddressClaim {address}");
        if api_writer.api().read(&what, || api.get_metadata_opt(&name)).await?.is_some() {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Claims as they were read, by address.
pub type ClaimsByAddress = BTreeMap<IpAddr, ClaimView>;

/// Reads the claims on these addresses, live; those that are there.
///
/// # Errors
/// The server is of no help, or a claim breaks its own rules.
pub async fn read_claims(
    api_writer: &ApiWriter<'_>,
    addresses: &BTreeSet<IpAddr>,
) -> Result<ClaimsByAddress, BindError> {
    let api: Api<AddressClaim> = Api::all(api_writer.api().client());
    let read = try_join_all(addresses.iter().map(async |address| {
        let name = ClaimName::of(*address).to_string();
        let what = format!("get AddressClaim {address}");
        api_writer.api().read(&what, || api.get_opt(&name)).await
    }));
    let mut claims = BTreeMap::new();
    for claim in read.await?.into_iter().flatten() {
        if let Some(why) = claim.validation_error() {
            let name = claim.metadata.name.unwrap_or_default();
            return Err(BindError::InvalidObject { what: "AddressClaim", name, why });
        }
        claims.insert(claim.spec.address, ClaimView::from(&claim));
    }
    Ok(claims)
}

/// Detaches a sandbox by its container id, if it is attached. The StickyIP as it stands then; none if it does not exist.
///
/// # Errors
/// The server is of no help.
pub async fn detach(
    api_writer: &mut ApiWriter<'_>,
    key: &StickyKey,
    container_id: &str,
) -> Result<Option<StickyIP>, ApiError> {
    for _ in 0..MAX_STEPS {
        let Some(object) = read_sticky(api_writer, key).await? else { return Ok(None) };
        let Some(write) = step::detach(&StickyView::from(&object), container_id) else {
            return Ok(Some(object));
        };
        match api_writer.carry(&write, Some(&object), "").await {
            Ok(Applied::Sticky(object)) => return Ok(Some(*object)),
            Ok(_) => {}
            Err(error) if error.leaves_doubt() => {}
            Err(error) => return Err(error),
        }
    }
    let what = format!("detach container {container_id}");
    Err(ApiError::Away { what, why: "others changed the StickyIP every time".to_owned() })
}
