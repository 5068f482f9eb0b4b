//! The pure half of the repair loop: finds what breaks "a StickyIP has exactly one claim per family, and a
//! claim exactly one StickyIP", and the write that repairs it. Must never release an address that a pod could
//! still use.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;

use crate::cluster::objects::ClaimPhase;
use crate::cluster::protocol::step::{at_sticky, delete, quarantine, seal_to};
use crate::cluster::view::{ClaimView, Origin, StickyView};
use crate::cluster::writer::write::Write;
use crate::names::StickyKey;

/// What is wrong, with the names of both objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// A claim was granted and never sealed, and its StickyIP exists: an attempt stopped in between.
    NotSealed,
    /// A claim is for a StickyIP that has other addresses: an attempt that lost.
    AbandonedAttempt,
    /// An unsealed claim's StickyIP does not exist, and has not for a while.
    OrphanedClaim,
    StickyIPGone,
    QuarantineOver,
    ClaimMissing,
    ClaimedForAnother {
        holder: StickyKey,
    },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundFault {
    pub fault: Fault,
    pub address: IpAddr,
    /// The StickyIP that the claim names, or that misses its claim.
    pub sticky: StickyKey,
    /// The write; none if a program cannot repair it, or the conflict is reported already.
    pub fix: Option<Write>,
}

impl fmt::Display for FoundFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, sticky) = (self.address, format!("StickyIP {}", self.sticky));
        let claim = format!("AddressClaim {address}");
        match &self.fault {
            Fault::NotSealed => write!(f, "{claim} is not sealed to its {sticky}"),
            Fault::AbandonedAttempt => write!(f, "{claim} names {sticky}, which has other addresses"),
            Fault::OrphanedClaim => write!(f, "{claim} names {sticky}, which does not exist"),
            Fault::StickyIPGone => write!(f, "{claim} is sealed to {sticky}, which is gone"),
            Fault::QuarantineOver => {
                write!(f, "the quarantine of address {address}, last of {sticky}, is over")
            }
            Fault::ClaimMissing => write!(f, "{sticky} has no AddressClaim for {address}"),
            Fault::ClaimedForAnother { holder } => {
                write!(f, "address {address} of {sticky} is claimed by StickyIP {holder}")
            }
        }
    }
}

/// How long is long enough, in seconds. No safety rests on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RepairTimes {
    /// An unsealed claim without a StickyIP is an orphan after this: an ADD may be between the two writes.
    pub orphan: u64,
    /// For this long a claim whose StickyIP is gone is quarantined, before others may have the address.
    pub quarantine: u64,
}

impl Default for RepairTimes {
    fn default() -> Self {
        Self { orphan: 120, quarantine: 600 }
    }
}

/// Seconds after which an unsealed claim beside its StickyIP is sealed for its claimant, and a missing claim
/// is made. Sooner, the plugin or agent that starts the pod would find its own next write done by another,
/// and would retry.
const STALLED: u64 = 5;

/// What the repair loop knows beside the objects themselves, as plain values.
#[derive(Debug, Clone, Default)]
pub struct RepairFacts {
    pub times: RepairTimes,
    /// By uid: for how many seconds an object has been exactly as it is. One that is missing just changed.
    pub unchanged_for: BTreeMap<String, u64>,
    /// The addresses that a pod may still use.
    pub in_use: BTreeSet<IpAddr>,
    /// The addresses whose claim names a pod that runs on the claim's home node: that node has yet to answer.
    pub awaiting_node: BTreeSet<IpAddr>,
    /// The StickyIPs that exist and cannot be read: one of them may hold a claim.
    pub unreadable: BTreeSet<StickyKey>,
    /// Where addresses come from that have no claim. One that is not named comes from nowhere.
    pub origins: BTreeMap<IpAddr, Origin>,
    /// A claimant whose StickyIP is gone does not get the address back, unless a pod still uses it: then a
    /// person deleted the StickyIP.
    pub release_for_good: bool,
}

impl RepairFacts {
    fn unchanged_for(&self, uid: &str, seconds: u64) -> bool {
        self.unchanged_for.get(uid).copied().unwrap_or_default() >= seconds
    }

    /// The claim has been unsealed beside its StickyIP for longer than a start takes between two writes.
    pub(super) fn is_stalled(&self, claim: &ClaimView) -> bool {
        self.unchanged_for(&claim.uid, self.times.orphan.min(STALLED))
    }

    /// No pod was ever attached, and the StickyIP is older than a pod's start takes between two writes.
    pub(super) fn is_abandoned(&self, sticky: &StickyView) -> bool {
        self.unchanged_for(&sticky.uid, self.times.orphan.min(STALLED))
    }

    /// The claim has been without a StickyIP for long enough, and no home node has yet to answer it.
    pub(super) fn is_orphaned(&self, claim: &ClaimView) -> bool {
        let is_awaited = claim.phase == ClaimPhase::Requested && self.awaiting_node.contains(&claim.address);
        self.unchanged_for(&claim.uid, self.times.orphan) && !is_awaited
    }

    /// The claim was quarantined for long enough, and no pod can still use its address.
    pub(super) fn is_quarantine_over(&self, claim: &ClaimView) -> bool {
        self.unchanged_for(&claim.uid, self.times.quarantine) && !self.in_use.contains(&claim.address)
    }

    /// The former claimant does not get the address back.
    pub(super) fn is_released(&self, claim: &ClaimView) -> bool {
        self.release_for_good && !self.in_use.contains(&claim.address)
    }
}

/// Finds every fault. Apply the writes one by one; each fails harmlessly if its object has changed.
pub(crate) fn find_faults(
    stickies: &[StickyView],
    claims: &[ClaimView],
    facts: &RepairFacts,
) -> Vec<FoundFault> {
    let by_key: BTreeMap<_, _> = stickies.iter().map(|sticky| (&sticky.key, sticky)).collect();
    let by_address: BTreeMap<_, _> = claims.iter().map(|claim| (claim.address, claim)).collect();
    let of_claims =
        claims.iter().filter_map(|claim| claim_fault(claim, by_key.get(&claim.sticky_ref).copied(), facts));
    let of_stickies = stickies.iter().filter(|sticky| !sticky.deleting).flat_map(|sticky| {
        let claim = |address| by_address.get(address).copied();
        sticky.addresses.iter().filter_map(move |at| sticky_fault(sticky, *at, claim(at), facts))
    });
    of_claims.chain(of_stickies).collect()
}

fn claim_fault(claim: &ClaimView, sticky: Option<&StickyView>, facts: &RepairFacts) -> Option<FoundFault> {
    let finding = |fault, fix| {
        Some(FoundFault { fault, address: claim.address, sticky: claim.sticky_ref.clone(), fix: Some(fix) })
    };
    match (claim.phase, sticky) {
        (ClaimPhase::Bound, Some(sticky)) if claim.sealed_to(&sticky.uid) => None,
        (ClaimPhase::Granted | ClaimPhase::Quarantined, Some(sticky))
            if sticky.addresses.contains(&claim.address) && !sticky.deleting =>
        {
            facts.is_stalled(claim).then(|| finding(Fault::NotSealed, seal_to(claim, sticky)))?
        }
        (ClaimPhase::Bound, _) => finding(Fault::StickyIPGone, quarantine(claim, facts.is_released(claim))),
        (ClaimPhase::Quarantined, _) => {
            facts.is_quarantine_over(claim).then(|| finding(Fault::QuarantineOver, delete(claim)))?
        }
        (ClaimPhase::Requested, Some(sticky)) if sticky.addresses.contains(&claim.address) => None,
        // A refused claim of a StickyIP: the StickyIP's own fault, found below.
        (ClaimPhase::Refused, Some(sticky)) if sticky.addresses.contains(&claim.address) => None,
        (_, Some(_)) => finding(Fault::AbandonedAttempt, delete(claim)),
        (_, None) => facts.is_orphaned(claim).then(|| finding(Fault::OrphanedClaim, delete(claim)))?,
    }
}

/// Whether the claim on an address of a StickyIP is the StickyIP's, in whatever phase but Refused.
pub(crate) fn is_in_order(sticky: &StickyView, claim: Option<&ClaimView>) -> bool {
    claim.is_some_and(|claim| claim.sticky_ref == sticky.key && claim.phase != ClaimPhase::Refused)
}

fn sticky_fault(
    sticky: &StickyView,
    address: IpAddr,
    claim: Option<&ClaimView>,
    facts: &RepairFacts,
) -> Option<FoundFault> {
    let finding = |fault, fix| Some(FoundFault { fault, address, sticky: sticky.key.clone(), fix });
    if is_in_order(sticky, claim) {
        return None;
    }
    // Its maker is about to claim the address, or has just lost it and is about to undo the StickyIP.
    if sticky.never_attached() && !facts.is_abandoned(sticky) {
        return None;
    }
    let Some(claim) = claim else {
        let origin = facts.origins.get(&address).unwrap_or(&Origin::Nowhere);
        let fix = Write::create_claim(address, &sticky.key, origin, Some(&sticky.uid), None);
        return finding(Fault::ClaimMissing, fix);
    };
    let (key, at, holder) = (sticky.key.clone(), at_sticky(sticky), claim.sticky_ref.clone());
    let fix = match &sticky.attached {
        None => Some(Write::DeleteSticky { key, at }),
        Some(_) if sticky.in_conflict => None,
        Some(_) => Some(Write::MarkConflict { key, at, address, held_by: holder.clone() }),
    };
    finding(Fault::ClaimedForAnother { holder }, fix)
}
