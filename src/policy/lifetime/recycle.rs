//! Decides when a retained address is released: the proof of absence. Must never act on a single lookup, on a
//! cache, or on doubt.
//!
//! A live lookup that finds a reason to release is kept as an [`Absence`]. A second one, long enough after
//! the first and with the StickyIP unchanged between them, is the proof. The caller keeps the absences: if a
//! restart loses them, the proof starts again, which is slower but never wrong.

use crate::policy::lifetime::retention::{Keep, OnScaleDown, Retention};
use crate::policy::selection::facts::TimePoint;

/// What a live lookup (never a cache) found of the workload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WorkloadLookup {
    /// It does not exist.
    Absent,
    /// The ordinals of its pods are (first, count); none if it does not number its pods.
    Present { uid: String, ordinals: Option<(u32, u32)> },
    /// It does not exist, but an owner above it does, and may create it again.
    Owned { by: String },
    /// It does not exist, and its owners could not be looked up.
    OwnerUnknown { why: String },
    /// The lookup failed: no permission, no such kind, no answer.
    Unknown { why: String },
}

/// The part of a StickyIP that this decision needs. Its uid and version are preconditions of the release.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    pub uid: String,
    pub resource_version: String,
    pub attached: bool,
    /// The uid of its workload; empty if that was never looked up.
    pub workload_uid: String,
    /// The ordinal or slot of its claimant.
    pub ordinal: Option<u32>,
    pub retention: Retention,
    /// When its pod was last seen, by the clock of the writer.
    pub last_seen: Option<TimePoint>,
}

/// What a live lookup found of the claimant's pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodLookup {
    Absent,
    /// One exists, in any state.
    Present,
    Unknown,
}

/// The first half of a proof.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Absence {
    pub uid: String,
    /// Its resourceVersion then: any write since means that it is in use.
    pub resource_version: String,
    /// When the first lookup was, by the clock of this process.
    pub first_look: TimePoint,
}

/// Why an address is kept. The workload wants it if it needs or retains it; an owner counts if the workload
/// itself is gone; in doubt, after a failed lookup, it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KeepReason {
    Attached,
    PodExists,
    Forever,
    WorkloadWantsIt,
    TtlRunning { seconds_left: u64 },
    OwnerExists { by: String, seconds_left: u64 },
    Doubt { why: String },
}

/// Why an address is released.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReleaseReason {
    WorkloadGone,
    /// The workload is gone, and another one of the same name exists.
    WorkloadReplaced,
    ScaledDown,
    TtlOver,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Recycle {
    /// Keep it, and drop any earlier absence.
    Keep(KeepReason),
    /// Keep this absence and look it up again after the gap.
    CheckAgain(Absence),
    /// Delete the StickyIP with these preconditions; its claims are then quarantined.
    Release { uid: String, resource_version: String, reason: ReleaseReason },
}

/// How the proof is made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Proof {
    /// Minimum seconds between the two lookups: longer than a delete-and-recreate by a deployment tool.
    pub gap_seconds: u64,
    /// A workload recreated under the same name inherits the addresses of the one it replaces.
    pub inherit: bool,
    /// Seconds since its pod was last seen in which the owner may create a deleted workload again.
    pub owner_grace_seconds: u64,
}

impl Default for Proof {
    fn default() -> Self {
        Self { gap_seconds: 10, inherit: true, owner_grace_seconds: 24 * 3600 }
    }
}

/// Decides about one StickyIP after one live lookup of its workload and its pod.
pub fn decide(
    kept: &Kept,
    workload: &WorkloadLookup,
    pod: PodLookup,
    before: Option<&Absence>,
    now: TimePoint,
    proof: Proof,
) -> Recycle {
    let reason = match reason_to_release(kept, workload, pod, now, proof) {
        Ok(reason) => reason,
        Err(keep) => return Recycle::Keep(keep),
    };
    let unchanged =
        before.filter(|absence| absence.uid == kept.uid && absence.resource_version == kept.resource_version);
    let (uid, resource_version) = (kept.uid.clone(), kept.resource_version.clone());
    match unchanged.map(|absence| absence.first_look) {
        Some(first_look) if now.seconds_since(first_look) >= proof.gap_seconds => {
            Recycle::Release { uid, resource_version, reason }
        }
        before => Recycle::CheckAgain(Absence { uid, resource_version, first_look: before.unwrap_or(now) }),
    }
}

fn reason_to_release(
    kept: &Kept,
    workload: &WorkloadLookup,
    pod: PodLookup,
    now: TimePoint,
    proof: Proof,
) -> Result<ReleaseReason, KeepReason> {
    if kept.attached {
        return Err(KeepReason::Attached);
    }
    match pod {
        PodLookup::Present => return Err(KeepReason::PodExists),
        PodLookup::Unknown => return Err(KeepReason::Doubt { why: "its pod could not be looked up".into() }),
        PodLookup::Absent => {}
    }
    match kept.retention.keep {
        Keep::Forever => return Err(KeepReason::Forever),
        Keep::WithWorkload | Keep::Ttl => {}
    }
    let after = |ttl: Option<u32>, reason| ttl_over(kept, ttl, now).map(|()| reason);
    let whole = |reason| match kept.retention.keep {
        Keep::Ttl => after(kept.retention.ttl_seconds, reason),
        Keep::WithWorkload | Keep::Forever => Ok(reason),
    };
    match workload {
        WorkloadLookup::Unknown { why } => Err(KeepReason::Doubt { why: why.clone() }),
        WorkloadLookup::Absent => whole(ReleaseReason::WorkloadGone),
        WorkloadLookup::Owned { by } => match seconds_left(kept, proof.owner_grace_seconds, now)? {
            0 => whole(ReleaseReason::WorkloadGone),
            seconds_left => Err(KeepReason::OwnerExists { by: by.clone(), seconds_left }),
        },
        // Once the owner's grace period is over, it does not matter whether the owner exists.
        WorkloadLookup::OwnerUnknown { why } => match seconds_left(kept, proof.owner_grace_seconds, now)? {
            0 => whole(ReleaseReason::WorkloadGone),
            _ => Err(KeepReason::Doubt { why: why.clone() }),
        },
        WorkloadLookup::Present { uid, .. }
            if !kept.workload_uid.is_empty() && *uid != kept.workload_uid && !proof.inherit =>
        {
            whole(ReleaseReason::WorkloadReplaced)
        }
        WorkloadLookup::Present { ordinals: Some((first, count)), .. }
            if kept.ordinal.is_some_and(|n| n < *first || n - first >= *count) =>
        {
            match (kept.retention.on_scale_down, kept.retention.keep) {
                (OnScaleDown::Retain, Keep::Ttl) => whole(ReleaseReason::TtlOver),
                (OnScaleDown::Retain, Keep::WithWorkload | Keep::Forever) => Err(KeepReason::WorkloadWantsIt),
                (OnScaleDown::Release, _) => Ok(ReleaseReason::ScaledDown),
                (OnScaleDown::Ttl, _) => {
                    after(kept.retention.scale_down_ttl_seconds, ReleaseReason::ScaledDown)
                }
            }
        }
        WorkloadLookup::Present { .. } => Err(KeepReason::WorkloadWantsIt),
    }
}

/// A TTL without a duration or without a last sight never ends: in doubt the address is kept.
fn ttl_over(kept: &Kept, ttl: Option<u32>, now: TimePoint) -> Result<(), KeepReason> {
    let Some(ttl) = ttl else { return Err(KeepReason::Doubt { why: "the TTL has no time".into() }) };
    match seconds_left(kept, ttl.into(), now)? {
        0 => Ok(()),
        seconds_left => Err(KeepReason::TtlRunning { seconds_left }),
    }
}

/// Seconds left of a time that starts when the pod was last seen.
fn seconds_left(kept: &Kept, time: u64, now: TimePoint) -> Result<u64, KeepReason> {
    match kept.last_seen {
        Some(last_seen) => Ok(time.saturating_sub(now.seconds_since(last_seen))),
        None => Err(KeepReason::Doubt { why: "when its pod was last seen is not recorded".into() }),
    }
}

/// Whether the quarantine of a claim is over: it lasted long enough, measured from when **this** process
/// first saw it, and no pod shows the address.
pub fn quarantine_over(
    first_seen_quarantined: TimePoint,
    now: TimePoint,
    quarantine_seconds: u64,
    in_use: bool,
) -> bool {
    !in_use && now.seconds_since(first_seen_quarantined) >= quarantine_seconds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept() -> Kept {
        Kept {
            uid: "u".into(),
            resource_version: "7".into(),
            attached: false,
            workload_uid: "w".into(),
            ordinal: Some(2),
            retention: Retention::default(),
            last_seen: Some(TimePoint(100)),
        }
    }

    fn present(ordinals: Option<(u32, u32)>) -> WorkloadLookup {
        WorkloadLookup::Present { uid: "w".into(), ordinals }
    }

    /// Two lookups, far enough apart.
    fn after_proof(kept: &Kept, look: &WorkloadLookup, at: i64) -> Recycle {
        let proof = Proof::default();
        match decide(kept, look, PodLookup::Absent, None, TimePoint(at), proof) {
            Recycle::CheckAgain(absence) => {
                decide(kept, look, PodLookup::Absent, Some(&absence), TimePoint(at + 10), proof)
            }
            kept => kept,
        }
    }

    fn released(recycle: &Recycle) -> Option<ReleaseReason> {
        match recycle {
            Recycle::Release { reason, .. } => Some(*reason),
            _ => None,
        }
    }

    #[test]
    fn one_check_is_no_proof_and_two_give_a_release_with_both_preconditions() {
        let first =
            decide(&kept(), &WorkloadLookup::Absent, PodLookup::Absent, None, TimePoint(0), Proof::default());
        let Recycle::CheckAgain(absence) = first else { panic!("{first:?}") };
        let soon = decide(
            &kept(),
            &WorkloadLookup::Absent,
            PodLookup::Absent,
            Some(&absence),
            TimePoint(9),
            Proof::default(),
        );
        assert_eq!(soon, Recycle::CheckAgain(absence.clone()), "the first look keeps its time");
        let second = decide(
            &kept(),
            &WorkloadLookup::Absent,
            PodLookup::Absent,
            Some(&absence),
            TimePoint(10),
            Proof::default(),
        );
        assert_eq!(
            second,
            Recycle::Release {
                uid: "u".into(),
                resource_version: "7".into(),
                reason: ReleaseReason::WorkloadGone
            }
        );
    }

    #[test]
    fn a_write_between_the_checks_starts_the_proof_again() {
        let stale = Absence { uid: "u".into(), resource_version: "6".into(), first_look: TimePoint(0) };
        let decision = decide(
            &kept(),
            &WorkloadLookup::Absent,
            PodLookup::Absent,
            Some(&stale),
            TimePoint(500),
            Proof::default(),
        );
        assert!(matches!(decision, Recycle::CheckAgain(absence) if absence.first_look == TimePoint(500)));
    }

    #[test]
    fn doubt_attachment_and_a_living_pod_keep() {
        let absence = Absence { uid: "u".into(), resource_version: "7".into(), first_look: TimePoint(0) };
        let keep = |kept: &Kept, look: &WorkloadLookup, pod| {
            matches!(
                decide(kept, look, pod, Some(&absence), TimePoint(999), Proof::default()),
                Recycle::Keep(_)
            )
        };
        assert!(keep(&kept(), &WorkloadLookup::Unknown { why: "forbidden".into() }, PodLookup::Absent));
        assert!(keep(&kept(), &WorkloadLookup::Absent, PodLookup::Present));
        assert!(keep(&kept(), &WorkloadLookup::Absent, PodLookup::Unknown));
        assert!(keep(&Kept { attached: true, ..kept() }, &WorkloadLookup::Absent, PodLookup::Absent));
        let forever = Retention { keep: Keep::Forever, ..Retention::default() };
        assert!(keep(&Kept { retention: forever, ..kept() }, &WorkloadLookup::Absent, PodLookup::Absent));
    }

    #[test]
    fn scale_down_follows_its_own_rule() {
        let with = |on_scale_down| Kept {
            retention: Retention { on_scale_down, scale_down_ttl_seconds: Some(50), ..Retention::default() },
            ..kept()
        };
        let scaled = present(Some((0, 2)));
        assert_eq!(released(&after_proof(&with(OnScaleDown::Retain), &scaled, 500)), None);
        assert_eq!(
            released(&after_proof(&with(OnScaleDown::Release), &scaled, 101)),
            Some(ReleaseReason::ScaledDown)
        );
        assert_eq!(released(&after_proof(&with(OnScaleDown::Ttl), &scaled, 110)), None);
        assert_eq!(
            released(&after_proof(&with(OnScaleDown::Ttl), &scaled, 150)),
            Some(ReleaseReason::ScaledDown)
        );
        assert_eq!(released(&after_proof(&with(OnScaleDown::Release), &present(Some((0, 3))), 500)), None);
        assert_eq!(
            released(&after_proof(&with(OnScaleDown::Release), &present(Some((3, 3))), 500)),
            Some(ReleaseReason::ScaledDown),
            "ordinals that start at 3 do not ask for 2"
        );
        assert_eq!(released(&after_proof(&with(OnScaleDown::Release), &present(None), 500)), None);
    }

    #[test]
    fn a_ttl_runs_from_the_last_sight_and_without_one_never_ends() {
        let ttl = Retention { keep: Keep::Ttl, ttl_seconds: Some(60), ..Retention::default() };
        let with = |last_seen| Kept { retention: ttl, last_seen, ..kept() };
        assert_eq!(released(&after_proof(&with(Some(TimePoint(100))), &WorkloadLookup::Absent, 120)), None);
        assert!(released(&after_proof(&with(Some(TimePoint(100))), &WorkloadLookup::Absent, 160)).is_some());
        assert_eq!(released(&after_proof(&with(None), &WorkloadLookup::Absent, 9_999)), None);
        assert_eq!(
            released(&after_proof(&with(Some(TimePoint(9_000))), &WorkloadLookup::Absent, 120)),
            None,
            "a clock ahead"
        );
    }

    #[test]
    fn a_recreated_workload_inherits_unless_configured_otherwise() {
        let other = WorkloadLookup::Present { uid: "new".into(), ordinals: Some((0, 3)) };
        assert_eq!(released(&after_proof(&kept(), &other, 500)), None);
        let strict = Proof { inherit: false, ..Proof::default() };
        let absence = Absence { uid: "u".into(), resource_version: "7".into(), first_look: TimePoint(0) };
        let decision = decide(&kept(), &other, PodLookup::Absent, Some(&absence), TimePoint(500), strict);
        assert_eq!(released(&decision), Some(ReleaseReason::WorkloadReplaced));
    }

    #[test]
    fn what_made_the_workload_keeps_for_its_time_and_no_longer() {
        let owned = WorkloadLookup::Owned { by: "Cluster c".into() };
        let doubt = WorkloadLookup::OwnerUnknown { why: "forbidden".into() };
        let day = 24 * 3600;
        let at = |look: &WorkloadLookup, seconds: i64| {
            decide(&kept(), look, PodLookup::Absent, None, TimePoint(100 + seconds), Proof::default())
        };
        let Recycle::Keep(KeepReason::OwnerExists { by, seconds_left }) = at(&owned, 60) else {
            panic!("let go")
        };
        assert_eq!((by.as_str(), seconds_left), ("Cluster c", day as u64 - 60));
        assert!(
            matches!(at(&doubt, day - 1), Recycle::Keep(KeepReason::Doubt { why }) if why == "forbidden")
        );
        for look in [&owned, &doubt] {
            assert!(matches!(at(look, day), Recycle::CheckAgain(_)), "its time is over");
            assert_eq!(released(&after_proof(&kept(), look, 100 + day)), Some(ReleaseReason::WorkloadGone));
        }
        let unseen = Kept { last_seen: None, ..kept() };
        assert_eq!(
            released(&after_proof(&unseen, &owned, 9 * day)),
            None,
            "a time without a beginning never ends"
        );
        let ttl = Retention { keep: Keep::Ttl, ttl_seconds: Some(7 * 24 * 3600), ..Retention::default() };
        assert_eq!(released(&after_proof(&Kept { retention: ttl, ..kept() }, &owned, 100 + day)), None);
    }

    #[test]
    fn a_claim_is_quarantined_its_full_time_and_longer_while_a_pod_shows_the_address() {
        assert!(!quarantine_over(TimePoint(0), TimePoint(59), 60, false));
        assert!(quarantine_over(TimePoint(0), TimePoint(60), 60, false));
        assert!(!quarantine_over(TimePoint(0), TimePoint(600), 60, true));
        assert!(!quarantine_over(TimePoint(100), TimePoint(60), 60, false));
    }
}
