//! The next step that binds a pod to its address. Must never plan more than one write: after each the caller
//! reads again.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use thiserror::Error;

use crate::cluster::objects::{ClaimPhase, ClaimantRef, ClaimedPod, WorkloadRef};
use crate::cluster::view::{ClaimView, Origin, StickyView};
use crate::cluster::writer::write::{Precondition, Write};
use crate::names::{AttachmentId, StickyKey};
use crate::policy::handover::{
    self, Attached, Handover, NodeState, OldPod, OldSandbox, RefuseReason, Takeover, WaitReason,
};
use crate::policy::lifetime::retention::Retention;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Candidate {
    pub address: IpAddr,
    pub origin: Origin,
}

/// Who asks for what.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindInput {
    pub asker: Attached,
    pub key: StickyKey,
    pub claimant: ClaimantRef,
    pub workload: WorkloadRef,
    pub retention: Retention,
    /// One address per family, if there is no StickyIP yet. Addresses whose claims name this StickyIP come
    /// first: quarantined ones, and those of an attempt that crashed.
    pub(crate) candidates: Vec<Candidate>,
    /// The candidates are a pin: these addresses or none.
    pub pinned: bool,
    /// Where the addresses of an existing StickyIP come from, for a claim that is yet to be made or was lost.
    /// Absent means nowhere.
    pub origins: BTreeMap<IpAddr, Origin>,
    /// The asker itself, if it runs already with the addresses that it asks for.
    pub running: Option<ClaimedPod>,
}

impl BindInput {
    /// The claims to read: those of the candidates and of the StickyIP's addresses.
    pub(crate) fn claims_to_read(&self, sticky: Option<&StickyView>) -> BTreeSet<IpAddr> {
        let candidates = self.candidates.iter().map(|candidate| candidate.address);
        candidates.chain(sticky.into_iter().flat_map(|sticky| sticky.addresses.iter().copied())).collect()
    }
}

/// What was read, live, for this step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LiveState<'a> {
    pub sticky: Option<&'a StickyView>,
    /// The claims that exist, of [`BindInput::claims_to_read`].
    pub claims: &'a BTreeMap<IpAddr, ClaimView>,
    pub old_node: NodeState,
    pub(crate) old_pod: OldPod,
    /// What our node knows of the attachment, if it names our node.
    pub old_sandbox: OldSandbox,
    /// The home node of a claim that says who else has the address.
    pub home_node: NodeState,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextStep {
    /// Send this write, then read again, whether it succeeded or not.
    Do(Write),
    /// The pod has these addresses.
    Done(Vec<IpAddr>),
    /// Read again a little later, until the deadline.
    Wait(Waiting),
    /// Undo these, as far as they succeed, then propose other candidates than the ones to avoid.
    TryAnother { undo: Vec<Write>, avoid: BTreeSet<IpAddr> },
    /// Undo these, as far as they succeed, and fail.
    Refuse { undo: Vec<Write>, why: Refusal },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiting {
    /// The home node's answer.
    Grant { address: IpAddr, home: String },
    /// Of the StickyIP.
    Deletion,
    /// The end of a pod whose StickyIP is gone, and whose address another node still publishes.
    StillPublished { address: IpAddr, node: String },
    /// The end of a sandbox that has the address on its home node although it is claimed for another.
    InUse { address: IpAddr, home: String, by: String },
    /// The old pod.
    Handover(WaitReason),
}

/// Why a pod is refused; the text goes to the runtime and to an event.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Refusal {
    #[error("StickyIP {key} belongs to {kind} {name}; rename one of the two workloads")]
    NameTaken { key: StickyKey, kind: String, name: String },
    #[error("pinned to {asked:?}, but StickyIP {key} has {has:?}; release it first")]
    PinDiffers { key: StickyKey, asked: Vec<IpAddr>, has: Vec<IpAddr> },
    #[error("{address} lies in no IPPool and no node's block; add it to a pool of use Sticky")]
    OutsideEveryPool { address: IpAddr },
    #[error("{address} is held by StickyIP {sticky_ref}")]
    HeldByAnother { address: IpAddr, sticky_ref: StickyKey },
    #[error("{address} was refused by its home node {home}: {reason}")]
    HomeRefused { address: IpAddr, home: String, reason: String },
    #[error("{by} of node {home} has {address} although it is claimed for this pod; delete that pod")]
    InUse { address: IpAddr, home: String, by: String },
    /// The address of an attached StickyIP is claimed for another: it needs manual action.
    #[error(
        "StickyIP {key} is attached and its address {address} is claimed for {sticky_ref}; delete one of the \
         two"
    )]
    Conflict { key: StickyKey, address: IpAddr, sticky_ref: StickyKey },
    #[error("StickyIP {key} is with another pod: {why:?}")]
    Handover { key: StickyKey, why: RefuseReason },
}

pub fn next(ask: &BindInput, seen: &LiveState<'_>) -> NextStep {
    match seen.sticky {
        Some(sticky) => with_sticky(ask, seen, sticky),
        None => without_sticky(ask, seen),
    }
}

fn with_sticky(ask: &BindInput, seen: &LiveState<'_>, sticky: &StickyView) -> NextStep {
    if sticky.deleting {
        return NextStep::Wait(Waiting::Deletion);
    }
    if sticky.claimant != ask.claimant.kind
        || sticky.workload.kind != ask.workload.kind
        || sticky.workload.name != ask.workload.name
    {
        let WorkloadRef { kind, name, .. } = sticky.workload.clone();
        return refuse(Refusal::NameTaken { key: sticky.key.clone(), kind, name });
    }
    // Claims of an attempt that lost the race for the name: they can never be sealed to this StickyIP.
    let left_over = seen.claims.values().find(|claim| {
        claim.sticky_ref == ask.key && claim.unsealed() && !sticky.addresses.contains(&claim.address)
    });
    if let Some(claim) = left_over {
        return NextStep::Do(delete(claim));
    }
    let asked: Vec<IpAddr> = ask.candidates.iter().map(|candidate| candidate.address).collect();
    if ask.pinned && asked.iter().any(|address| !sticky.addresses.contains(address)) {
        return refuse(Refusal::PinDiffers { key: sticky.key.clone(), asked, has: sticky.addresses.clone() });
    }
    // What is lost comes first: nothing more is claimed for a StickyIP that cannot stay.
    let mut claims = sticky.addresses.iter().filter_map(|address| seen.claims.get(address));
    if let Some(claim) = claims.find(|claim| is_lost(claim, sticky)) {
        return give_way(sticky, claim);
    }
    for address in &sticky.addresses {
        if let Some(step) = seal(ask, seen, sticky, *address) {
            return step;
        }
    }
    let first = awaited(sticky, seen.claims).map(|(first, _)| first);
    let first = first.filter(|first| first.pod_uid != ask.asker.pod_uid);
    let situation = handover::Situation {
        attached: sticky.attached.as_ref().or(first.as_ref()),
        asker: &ask.asker,
        old_node: seen.old_node,
        old_pod: seen.old_pod,
        old_sandbox: seen.old_sandbox,
    };
    let attach = |takeover| NextStep::Do(attach(sticky, &ask.asker, takeover));
    let decision = handover::decide(&situation);
    if matches!(decision, Handover::Attach | Handover::TakeOver(_))
        && let Some(step) = while_in_use(seen, sticky)
    {
        return step;
    }
    match decision {
        Handover::AlreadyAttached => NextStep::Done(sticky.addresses.clone()),
        Handover::Attach => attach(None),
        Handover::TakeOver(reason) => attach(Some(reason)),
        Handover::Wait(why) => NextStep::Wait(Waiting::Handover(why)),
        Handover::Refuse(why) => refuse(Refusal::Handover { key: sticky.key.clone(), why }),
    }
}

fn refuse(why: Refusal) -> NextStep {
    NextStep::Refuse { undo: Vec::new(), why }
}

/// The attachment of a sandbox to a StickyIP to which nothing is attached and something was. Its claims were
/// sealed then and stay so as long as it exists. A caller that attaches by this state alone must still check
/// them in parallel: claims can be deleted by hand.
pub(crate) fn attach_again(sticky: &StickyView, asker: &Attached) -> Option<Write> {
    let is_free = sticky.attached.is_none() && sticky.was_attached && !sticky.deleting && !sticky.in_conflict;
    is_free.then(|| attach(sticky, asker, None))
}

fn attach(sticky: &StickyView, asker: &Attached, takeover: Option<Takeover>) -> Write {
    Write::Attach { key: sticky.key.clone(), at: at_sticky(sticky), attached: asker.clone(), takeover }
}

/// The running pod for which a StickyIP was made and to which it has yet to be attached, as the attachment
/// that it will be. Every other pod comes after it: it may be using the address.
pub fn awaited<'a>(
    sticky: &StickyView,
    claims: &'a BTreeMap<IpAddr, ClaimView>,
) -> Option<(Attached, &'a ClaimedPod)> {
    if sticky.attached.is_some() || sticky.was_attached {
        return None;
    }
    let own = sticky.addresses.iter().filter_map(|address| claims.get(address));
    let mut own = own.filter(|claim| claim.sticky_ref == sticky.key);
    own.find_map(|claim| {
        let (node, pod) = (claim.home_node.clone()?, claim.pod.as_ref()?);
        let (pod_uid, attachment_id) = (pod.uid.clone(), AttachmentId::Adopted(pod.uid.clone()));
        Some((Attached { node, pod_uid, attachment_id }, pod))
    })
}

/// What comes before an attachment while a sandbox of the home node has an address of the StickyIP, which is
/// none of its own: the home node ends that, or is dead.
fn while_in_use(seen: &LiveState<'_>, sticky: &StickyView) -> Option<NextStep> {
    let mut claims = sticky.addresses.iter().filter_map(|address| seen.claims.get(address));
    let (claim, by) = claims.find_map(|claim| Some((claim, claim.in_use_by.clone()?)))?;
    let address = claim.address;
    Some(match seen.home_node.proof_of_death() {
        Some(_) => NextStep::Do(Write::ReportUse { address, at: at_claim(claim), in_use_by: None }),
        None => NextStep::Wait(Waiting::InUse { address, home: home(claim), by }),
    })
}

/// Whether the address of a StickyIP is another's, or was refused.
fn is_lost(claim: &ClaimView, sticky: &StickyView) -> bool {
    claim.sticky_ref != sticky.key || claim.phase == ClaimPhase::Refused
}

fn give_way(sticky: &StickyView, claim: &ClaimView) -> NextStep {
    let (key, address, sticky_ref) = (sticky.key.clone(), claim.address, claim.sticky_ref.clone());
    match &sticky.attached {
        // Nothing is attached, so this StickyIP is an attempt that lost: undo it.
        None => NextStep::Do(Write::DeleteSticky { key, at: at_sticky(sticky) }),
        Some(_) => refuse(Refusal::Conflict { key, address, sticky_ref }),
    }
}

/// What is missing before an address of a StickyIP may be used; nothing if its claim is sealed to it.
fn seal(ask: &BindInput, seen: &LiveState<'_>, sticky: &StickyView, address: IpAddr) -> Option<NextStep> {
    let Some(claim) = seen.claims.get(&address) else {
        let origin = ask.origins.get(&address).unwrap_or(&Origin::Nowhere);
        let write = create(ask, address, origin, Some(&sticky.uid)).map(NextStep::Do);
        return Some(write.unwrap_or_else(|| refuse(Refusal::OutsideEveryPool { address })));
    };
    if claim.sealed_to(&sticky.uid) {
        return None;
    }
    Some(match claim.phase {
        ClaimPhase::Refused => give_way(sticky, claim),
        ClaimPhase::Requested => NextStep::Wait(Waiting::Grant { address, home: home(claim) }),
        // Sealed to another StickyIP of this name. One of the two reads is old, so the seal is not simply
        // replaced: the claim is quarantined first, which needs the live proof that the other uid is gone.
        ClaimPhase::Bound => NextStep::Do(quarantine(claim, false)),
        ClaimPhase::Granted | ClaimPhase::Quarantined => NextStep::Do(seal_to(claim, sticky)),
    })
}

fn without_sticky(ask: &BindInput, seen: &LiveState<'_>) -> NextStep {
    let mut avoid = BTreeSet::new();
    let (mut refusal, mut missing, mut waiting) = (None, None, None);
    for &Candidate { address, ref origin } in &ask.candidates {
        match seen.claims.get(&address) {
            // It is claimed once the StickyIP exists, and sealed to it by the same write.
            None if origin.needs_no_grant() => {}
            None => match create(ask, address, origin, None) {
                Some(write) => missing = missing.or(Some(write)),
                None => refusal = refusal.or(Some(Refusal::OutsideEveryPool { address })),
            },
            // The pod for which it was claimed may be using it, and no attachment says so. Or it was released
            // for good, and only a pin gets it.
            Some(claim)
                if claim.sticky_ref != ask.key
                    || claim.is_with_another(&ask.asker.pod_uid)
                    || (claim.released && !ask.pinned) =>
            {
                avoid.insert(address);
                let sticky_ref = claim.sticky_ref.clone();
                refusal = refusal.or(Some(Refusal::HeldByAnother { address, sticky_ref }));
            }
            Some(ClaimView { in_use_by: Some(by), home_node, .. }) => {
                avoid.insert(address);
                let home = home_node.clone().unwrap_or_default();
                refusal = refusal.or(Some(Refusal::InUse { address, home, by: by.clone() }));
            }
            Some(claim) => match claim.phase {
                ClaimPhase::Refused => {
                    avoid.insert(address);
                    let (home, reason) = (home(claim), claim.reason.clone().unwrap_or_default());
                    refusal = refusal.or(Some(Refusal::HomeRefused { address, home, reason }));
                }
                ClaimPhase::Requested => {
                    waiting = waiting.or(Some(Waiting::Grant { address, home: home(claim) }));
                }
                // Bound without a StickyIP, or quarantined: this claimant's own, from an earlier StickyIP.
                ClaimPhase::Granted | ClaimPhase::Bound | ClaimPhase::Quarantined => {}
            },
        }
    }
    if let Some(why) = refusal {
        let is_final = ask.pinned || avoid.is_empty();
        let ours = seen.claims.values().filter(|claim| claim.sticky_ref == ask.key && claim.unsealed());
        // For another try the claim on the other family's address is still good.
        let undo = ours.filter(|claim| is_final || avoid.contains(&claim.address)).map(delete).collect();
        return if is_final { NextStep::Refuse { undo, why } } else { NextStep::TryAnother { undo, avoid } };
    }
    if let Some(write) = missing {
        return NextStep::Do(write);
    }
    if let Some(waiting) = waiting {
        return NextStep::Wait(waiting);
    }
    NextStep::Do(Write::CreateSticky {
        key: ask.key.clone(),
        addresses: ask.candidates.iter().map(|candidate| candidate.address).collect(),
        claimant: ask.claimant,
        workload: ask.workload.clone(),
        retention: ask.retention,
    })
}

/// The home node's answer to a claim, once its store has said whether it could reserve the address for the
/// claimant. None if it is not this node's to answer.
pub fn answer(node: &str, claim: &ClaimView, reserved: Result<(), String>) -> Option<Write> {
    (claim.phase == ClaimPhase::Requested && claim.home_node.as_deref() == Some(node))
        .then(|| Write::AnswerClaim { address: claim.address, at: at_claim(claim), refused: reserved.err() })
}

/// What a DEL writes: nothing, unless exactly this sandbox is attached. A late or repeated DEL of an old one
/// releases nothing that a newer pod has.
pub fn detach(sticky: &StickyView, id: &AttachmentId) -> Option<Write> {
    let ours = sticky.attached.as_ref().is_some_and(|attached| attached.attachment_id == *id);
    ours.then(|| Write::Detach { key: sticky.key.clone(), at: at_sticky(sticky), proof: None })
}

fn create(ask: &BindInput, address: IpAddr, origin: &Origin, sticky_uid: Option<&str>) -> Option<Write> {
    Write::create_claim(address, &ask.key, origin, sticky_uid, ask.running.as_ref())
}

pub(crate) fn delete(claim: &ClaimView) -> Write {
    Write::DeleteClaim { address: claim.address, at: at_claim(claim) }
}

/// The claim's StickyIP must be gone by then.
pub(super) fn quarantine(claim: &ClaimView, released: bool) -> Write {
    Write::QuarantineClaim {
        address: claim.address,
        at: at_claim(claim),
        sticky_ref: claim.sticky_ref.clone(),
        gone_uid: claim.sticky_uid.clone().unwrap_or_default(),
        released,
    }
}

pub(super) fn seal_to(claim: &ClaimView, sticky: &StickyView) -> Write {
    Write::SealClaim { address: claim.address, at: at_claim(claim), sticky_uid: sticky.uid.clone() }
}

fn home(claim: &ClaimView) -> String {
    claim.home_node.clone().unwrap_or_default()
}

fn at_claim(claim: &ClaimView) -> Precondition {
    Precondition { uid: claim.uid.clone(), resource_version: claim.resource_version.clone() }
}

/// The state of a StickyIP that a write requires.
pub(crate) fn at_sticky(sticky: &StickyView) -> Precondition {
    Precondition { uid: sticky.uid.clone(), resource_version: sticky.resource_version.clone() }
}
