//! The repair loop's eye: what in the whole breaks "a StickyIP has exactly one claim a family, and a claim exactly
//! one StickyIP", and the write that mends it. Must never free an address through which a pod could still speak.

use std::collections::BTreeMap;
use std::fmt;
use std::net::IpAddr;

use crate::cluster::objects::{ClaimPhase, StickyKey};
use crate::cluster::protocol::step::{at_claim, at_sticky, delete};
use crate::cluster::protocol::view::{ClaimView, Origin, StickyView};
use crate::cluster::protocol::write::Write;
use crate::policy::selection::facts::TimePoint;

/// What is wrong, with the names of both objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// A claim was granted and never sealed, and its StickyIP stands: an attempt stopped in between.
    NotSealed,
    /// A claim is for a StickyIP that has other addresses: an attempt that lost.
    AbandonedAttempt,
    /// An unsealed claim's StickyIP does not exist, and has not for a while.
    OrphanedClaim,
    /// A sealed claim's StickyIP is gone.
    StickyIPGone,
    /// A claim has rested.
    QuarantineOver,
    /// A StickyIP has no claim on an address.
    ClaimMissing,
    /// A StickyIP's address is claimed for another.
    ClaimedForAnother {
        /// The other.
        holder: StickyKey,
    },
}

/// One fault and its cure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundFault {
    /// What is wrong.
    pub fault: Fault,
    /// The address.
    pub address: IpAddr,
    /// The StickyIP that the claim names, or that misses its claim.
    pub sticky: StickyKey,
    /// The cure; none if a person must look, or has been told already.
    pub cure: Option<Write>,
}

impl fmt::Display for FoundFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { fault, address, sticky, .. } = self;
        match fault {
            Fault::NotSealed => write!(f, "claim {address} is not sealed to its StickyIP {sticky}"),
            Fault::AbandonedAttempt => {
                write!(f, "claim {address} is for StickyIP {sticky}, which has other addresses")
            }
            Fault::OrphanedClaim => {
                write!(f, "claim {address} is for StickyIP {sticky}, which does not exist")
            }
            Fault::StickyIPGone => write!(f, "claim {address} outlived its StickyIP {sticky}"),
            Fault::QuarantineOver => write!(f, "claim {address} of the former StickyIP {sticky} has rested"),
            Fault::ClaimMissing => write!(f, "StickyIP {sticky} has no claim on {address}"),
            Fault::ClaimedForAnother { holder } => {
                write!(f, "address {address} of StickyIP {sticky} is claimed for StickyIP {holder}")
            }
        }
    }
}

/// What was seen for how long; kept by the repairer, lost with it at no harm: everything then takes longer.
#[derive(Debug, Clone, Default)]
pub struct StateAges {
    first_seen: BTreeMap<(String, String), TimePoint>,
}

impl StateAges {
    /// When this object was first seen in exactly this state.
    pub fn first_seen(&mut self, uid: &str, resource_version: &str, now: TimePoint) -> TimePoint {
        *self.first_seen.entry((uid.into(), resource_version.into())).or_insert(now)
    }

    /// Forgets everything about objects that are not among these any more.
    pub fn keep_only<'a>(&mut self, alive: impl IntoIterator<Item = (&'a str, &'a str)>) {
        let alive: std::collections::BTreeSet<(&str, &str)> = alive.into_iter().collect();
        self.first_seen.retain(|(uid, version), _| alive.contains(&(uid.as_str(), version.as_str())));
    }
}

/// How long is long enough; both are matters of comfort, not of safety.
pub trait Judge {
    /// An unsealed claim without a StickyIP has stood unchanged long enough to be an orphan.
    fn orphaned(&self, claim: &ClaimView) -> bool;
    /// A claim has stood unsealed beside its StickyIP for longer than a pod's start takes between the two writes.
    fn stalled(&self, claim: &ClaimView) -> bool;
    /// A StickyIP to which nobody was ever attached has stood as it does for longer than a pod's start takes between two writes.
    fn abandoned(&self, sticky: &StickyView) -> bool;
    /// A resting claim has rested, and no pod shows its address.
    fn quarantine_over(&self, claim: &ClaimView) -> bool;
    /// Where an address comes from, for a claim that was lost or never made.
    fn origin(&self, address: IpAddr) -> Origin;
    /// A claim whose StickyIP is gone is not for its former holder any more.
    fn released(&self, claim: &ClaimView) -> bool {
        let _ = claim;
        false
    }
}

/// Finds every fault. Carry cures out one by one; each fails harmlessly if the world has moved on.
#[must_use]
pub fn repair(stickies: &[StickyView], claims: &[ClaimView], judge: &impl Judge) -> Vec<FoundFault> {
    let by_key: BTreeMap<&StickyKey, &StickyView> =
        stickies.iter().map(|sticky| (&sticky.key, sticky)).collect();
    let by_address: BTreeMap<IpAddr, &ClaimView> =
        claims.iter().map(|claim| (claim.address, claim)).collect();
    let of_claims =
        claims.iter().filter_map(|claim| claim_fault(claim, by_key.get(&claim.holder).copied(), judge));
    let of_stickies = stickies.iter().filter(|sticky| !sticky.deleting).flat_map(|sticky| {
        sticky
            .addresses
            .iter()
            .filter_map(|address| sticky_fault(sticky, *address, by_address.get(address).copied(), judge))
    });
    of_claims.chain(of_stickies).collect()
}

fn claim_fault(claim: &ClaimView, sticky: Option<&StickyView>, judge: &impl Judge) -> Option<FoundFault> {
    let finding = |fault, cure| {
        Some(FoundFault { fault, address: claim.address, sticky: claim.holder.clone(), cure: Some(cure) })
    };
    let quarantine = |gone_uid: &str| Write::QuarantineClaim {
        address: claim.address,
        at: at_claim(claim),
        holder: claim.holder.clone(),
        gone_uid: gone_uid.into(),
        released: judge.released(claim),
    };
    let seal = |sticky: &StickyView| Write::SealClaim {
        address: claim.address,
        at: at_claim(claim),
        sticky_uid: sticky.uid.clone(),
    };
    let sealed_uid = claim.sticky_uid.as_deref().unwrap_or_default();
    match (claim.phase, sticky) {
        (ClaimPhase::Bound, Some(sticky)) if claim.sealed_to(&sticky.uid) => None,
        (ClaimPhase::Granted | ClaimPhase::Quarantined, Some(sticky))
            if sticky.addresses.contains(&claim.address) && !sticky.deleting =>
        {
            judge.stalled(claim).then(|| finding(Fault::NotSealed, seal(sticky)))?
        }
        (ClaimPhase::Bound, _) => finding(Fault::StickyIPGone, quarantine(sealed_uid)),
        (ClaimPhase::Quarantined, _) => {
            judge.quarantine_over(claim).then(|| finding(Fault::QuarantineOver, delete(claim)))?
        }
        (ClaimPhase::Requested, Some(sticky)) if sticky.addresses.contains(&claim.address) => None,
        // A refused claim of a StickyIP: the StickyIP's own fault, found below.
        (ClaimPhase::Refused, Some(sticky)) if sticky.addresses.contains(&claim.address) => None,
        (_, Some(_)) => finding(Fault::AbandonedAttempt, delete(claim)),
        (_, None) => judge.orphaned(claim).then(|| finding(Fault::OrphanedClaim, delete(claim)))?,
    }
}

/// Whether the claim on an address of a StickyIP is the StickyIP's; how far it has come is the claim's own matter.
#[must_use]
pub fn is_in_order(sticky: &StickyView, claim: Option<&ClaimView>) -> bool {
    claim.is_some_and(|claim| claim.holder == sticky.key && claim.phase != ClaimPhase::Refused)
}

fn sticky_fault(
    sticky: &StickyView,
    address: IpAddr,
    claim: Option<&ClaimView>,
    judge: &impl Judge,
) -> Option<FoundFault> {
    let finding = |fault, cure| Some(FoundFault { fault, address, sticky: sticky.key.clone(), cure });
    if is_in_order(sticky, claim) {
        return None;
    }
    // Whoever made it is about to claim the address, or has just lost it and is about to undo the StickyIP.
    if sticky.never_attached() && !judge.abandoned(sticky) {
        return None;
    }
    let Some(claim) = claim else {
        let cure = Write::create_claim(address, &sticky.key, &judge.origin(address), Some(&sticky.uid), None);
        return finding(Fault::ClaimMissing, cure);
    };
    let cure = match &sticky.attached {
        None => Some(Write::DeleteSticky { key: sticky.key.clone(), at: at_sticky(sticky) }),
        Some(_) if sticky.in_conflict => None,
        Some(_) => Some(Write::MarkConflict {
            key: sticky.key.clone(),
            at: at_sticky(sticky),
            address,
            held_by: claim.holder.clone(),
        }),
    };
    finding(Fault::ClaimedForAnother { holder: claim.holder.clone() }, cure)
}
