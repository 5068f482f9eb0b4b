//! The repair loop: finds the faults among the objects that its caller read, and applies one write per fault.
//! A write conflict is no error: the next pass looks again.
//!
//! Must never write without the precondition of [`crate::cluster::writer::write::Write`], and never release
//! an address that a pod uses.

use std::collections::BTreeMap;

use crate::cluster::api::client::ApiError;
use crate::cluster::objects::{AddressClaim, ClaimPhase, StickyIP, Validate};
use crate::cluster::protocol::faults::{FoundFault, RepairFacts, find_faults};
use crate::cluster::view::{ClaimView, StickyView};
use crate::cluster::writer::apply::{ApiWriter, Applied};
use crate::policy::selection::facts::TimePoint;

#[derive(Debug)]
pub enum RepairOutcome {
    Repaired,
    /// The object has changed since it was read. The next pass looks again.
    Conflict,
    /// A program cannot repair it, or the conflict is reported already.
    ManualActionRequired,
    Failed(ApiError),
}

/// Remembers since when objects have been exactly as they are. Lost with its process at no harm: repairs then
/// take longer.
#[derive(Debug, Default)]
pub struct Repairer {
    first_seen: BTreeMap<(String, String), TimePoint>,
}

impl Repairer {
    /// Finds every fault; `facts` without the ages, which are filled in here. Objects that break their own
    /// rules are left alone: they say nothing that could be relied on.
    pub fn find<'a>(
        &mut self,
        stickies: impl Iterator<Item = &'a StickyIP>,
        claims: impl Iterator<Item = &'a AddressClaim>,
        mut facts: RepairFacts,
        now: TimePoint,
    ) -> Vec<FoundFault> {
        let (valid, invalid): (Vec<_>, Vec<_>) =
            stickies.partition(|sticky| sticky.validation_error().is_none());
        // An unreadable StickyIP may well hold a claim.
        facts.unreadable.extend(invalid.into_iter().map(|sticky| StickyView::from(sticky).key));
        let is_known = |claim: &&AddressClaim| {
            claim.validation_error().is_none() && !facts.unreadable.contains(&claim.spec.sticky_ref)
        };
        let stickies: Vec<StickyView> = valid.into_iter().map(StickyView::from).collect();
        let claims: Vec<ClaimView> = claims.filter(is_known).map(ClaimView::from).collect();
        facts.unchanged_for = self.unchanged_for(&stickies, &claims, now);
        find_faults(&stickies, &claims, &facts)
    }

    /// By uid, the seconds for which each object that is not in its final state has been as it is. Forgets
    /// all others.
    fn unchanged_for(
        &mut self,
        stickies: &[StickyView],
        claims: &[ClaimView],
        now: TimePoint,
    ) -> BTreeMap<String, u64> {
        let passing =
            claims.iter().filter(|claim| claim.unsealed() || claim.phase == ClaimPhase::Quarantined);
        let passing = passing.map(|claim| (&claim.uid, &claim.resource_version));
        let new = stickies.iter().filter(|sticky| sticky.never_attached());
        let states = passing.chain(new.map(|sticky| (&sticky.uid, &sticky.resource_version)));
        let before = std::mem::take(&mut self.first_seen);
        for (uid, version) in states {
            let state = (uid.clone(), version.clone());
            let since = before.get(&state).copied().unwrap_or(now);
            self.first_seen.insert(state, since);
        }
        self.first_seen.iter().map(|((uid, _), since)| (uid.clone(), now.seconds_since(*since))).collect()
    }
}

/// Applies the write of a fault. `known` is its StickyIP as it was read.
pub async fn repair(
    writer: &mut ApiWriter<'_>,
    fault: &FoundFault,
    known: Option<&StickyIP>,
) -> RepairOutcome {
    let FoundFault { address, sticky, fix, .. } = fault;
    let Some(fix) = fix else {
        tracing::debug!(%address, %sticky, %fault, "found a fault that needs manual action; see its event");
        return RepairOutcome::ManualActionRequired;
    };
    match writer.apply(fix, known, "").await {
        Ok(Applied::Conflict) => {
            tracing::debug!(%address, %sticky, %fault, "write conflict; looking again");
            RepairOutcome::Conflict
        }
        Ok(_) => {
            tracing::info!(%address, %sticky, %fault, "repaired a fault");
            RepairOutcome::Repaired
        }
        // It may have happened; the next pass sees whether it did.
        Err(error) => {
            tracing::warn!(%address, %sticky, %fault, %error, "cannot repair a fault; trying again");
            RepairOutcome::Failed(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::protocol::faults::RepairTimes;
    use crate::cluster::view::Origin;
    use crate::cluster::writer::write::Write;
    use crate::names::StickyKey;

    fn claim(phase: ClaimPhase, version: &str) -> ClaimView {
        ClaimView {
            address: "10.0.0.1".parse().unwrap(),
            uid: "c".into(),
            resource_version: version.into(),
            phase,
            sticky_ref: StickyKey { namespace: "db".into(), name: "db-0".into() },
            sticky_uid: None,
            home_node: None,
            reason: None,
            pod: None,
            released: false,
            in_use_by: None,
        }
    }

    #[test]
    fn only_a_claim_that_stood_unchanged_for_the_whole_time_is_old() {
        let mut repairer = Repairer::default();
        let mut seen = |version: &str, phase, at| {
            let claim = claim(phase, version);
            let unchanged_for = repairer.unchanged_for(&[], std::slice::from_ref(&claim), TimePoint(at));
            let times = RepairTimes { orphan: 10, quarantine: 20 };
            let facts = RepairFacts { times, unchanged_for, ..RepairFacts::default() };
            (facts.is_stalled(&claim), facts.is_orphaned(&claim), facts.is_quarantine_over(&claim))
        };
        let none = (false, false, false);
        assert_eq!(seen("1", ClaimPhase::Granted, 100), none);
        assert_eq!(seen("1", ClaimPhase::Granted, 104), none, "its ADD may be between two writes");
        assert_eq!(seen("1", ClaimPhase::Granted, 105), (true, false, false));
        assert_eq!(seen("1", ClaimPhase::Granted, 109), (true, false, false));
        assert_eq!(seen("1", ClaimPhase::Granted, 110), (true, true, false));
        assert_eq!(seen("2", ClaimPhase::Quarantined, 111), none, "it changed: the time starts again");
        assert_eq!(seen("2", ClaimPhase::Quarantined, 130), (true, true, false));
        assert_eq!(seen("2", ClaimPhase::Quarantined, 131), (true, true, true));
        // A clock that was set back makes it slower, never faster.
        assert_eq!(seen("2", ClaimPhase::Quarantined, 50), none);
    }

    #[test]
    fn nothing_stalls_for_longer_than_an_orphan_is_left_alone() {
        for (orphan, waited, stalls) in [(120, 4, false), (120, 5, true), (2, 1, false), (2, 2, true)] {
            let claim = claim(ClaimPhase::Granted, "1");
            let facts = RepairFacts {
                times: RepairTimes { orphan, quarantine: 600 },
                unchanged_for: [(claim.uid.clone(), waited)].into(),
                ..RepairFacts::default()
            };
            assert_eq!(facts.is_stalled(&claim), stalls, "{orphan}, {waited}");
        }
    }

    #[test]
    fn a_stickyip_that_was_just_created_is_left_to_its_creator() {
        let sticky = |name: &str, status: serde_json::Value| -> StickyIP {
            let object = serde_json::json!({"metadata": {"name": name, "namespace": "db", "uid": name, "resourceVersion": "1"},
                "spec": {"addresses": ["10.0.0.1"], "claimant": {"kind": "Pod"},
                         "workload": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db"}}, "status": status});
            serde_json::from_value(object).unwrap()
        };
        let claim = serde_json::json!({"metadata": {"name": "10.0.0.1"}, "spec": {"address": "10.0.0.1", "phase": "Bound",
            "stickyUid": "other", "stickyRef": {"namespace": "db", "name": "other"}}});
        let taken: AddressClaim = serde_json::from_value(claim).unwrap();
        let new = [sticky("db-0", serde_json::json!({}))];
        let kept = [sticky("db-0", serde_json::json!({"lastSeen": "2026-01-01T00:00:00Z"}))];
        let range = "10.0.0.0/24".parse().unwrap();
        let origins = [("10.0.0.1".parse().unwrap(), Origin::StickyPool { range })];
        let facts = RepairFacts { origins: origins.into(), ..RepairFacts::default() };
        let found = |repairer: &mut Repairer, stickies: &[StickyIP], claims: &[AddressClaim], at: i64| {
            let found = repairer.find(stickies.iter(), claims.iter(), facts.clone(), TimePoint(at));
            let of_sticky = found.into_iter().filter(|finding| finding.sticky.name == "db-0");
            of_sticky.map(|finding| finding.fix.unwrap().word()).collect::<Vec<_>>()
        };
        let mut repairer = Repairer::default();
        assert!(found(&mut repairer, &new, &[], 100).is_empty(), "its claim may be on its way");
        assert!(
            found(&mut repairer, &new, std::slice::from_ref(&taken), 104).is_empty(),
            "it may be about to be undone"
        );
        assert_eq!(found(&mut repairer, &new, &[], 105), ["create claim"]);
        assert_eq!(found(&mut repairer, &new, std::slice::from_ref(&taken), 105), ["delete StickyIP"]);
        assert_eq!(found(&mut Repairer::default(), &kept, &[], 100), ["create claim"], "its claim was lost");
    }

    #[test]
    fn a_claim_that_is_made_for_a_stickyip_is_sealed_unless_its_home_node_is_asked() {
        let holder = StickyKey { namespace: "db".into(), name: "db-0".into() };
        let range: ipnet::IpNet = "10.0.0.0/24".parse().unwrap();
        for (origin, sealed) in [
            (Origin::StickyPool { range }, true),
            (Origin::OwnBlock { node: "n1".into(), block: range }, true),
            (Origin::ForeignBlock { home: "n1".into(), block: range }, false),
        ] {
            let write = Write::create_claim(range.addr(), &holder, &origin, Some("u"), None);
            let Some(Write::CreateClaim { phase, sticky_uid, .. }) = write else { panic!("{write:?}") };
            let expected =
                if sealed { (ClaimPhase::Bound, Some("u")) } else { (ClaimPhase::Requested, None) };
            assert_eq!((phase, sticky_uid.as_deref()), expected, "{origin:?}");
        }
    }

    #[test]
    fn an_address_that_a_pod_shows_never_has_rested_and_is_not_released() {
        let claim = claim(ClaimPhase::Quarantined, "1");
        for shown in [false, true] {
            for release_for_good in [false, true] {
                let facts = RepairFacts {
                    unchanged_for: [(claim.uid.clone(), 1_000_000)].into(),
                    in_use: shown.then_some(claim.address).into_iter().collect(),
                    release_for_good,
                    ..RepairFacts::default()
                };
                let expected = (!shown, release_for_good && !shown);
                assert_eq!((facts.is_quarantine_over(&claim), facts.is_released(&claim)), expected);
            }
        }
    }
}
