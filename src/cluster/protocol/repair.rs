//! The repair loop's hand: one pass over what stands, each fault cured by one write. Whoever runs it reads the objects
//! and hands in the time; a lost race is no error, the next pass looks again.
//!
//! Must never write without the precondition of [`crate::cluster::protocol::write::Write`], and never free an address that a pod shows.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use crate::cluster::api::client::ApiError;
use crate::cluster::objects::{AddressClaim, ClaimPhase, StickyIP, StickyKey, Validate};
use crate::cluster::protocol::apply::{ApiWriter, Applied};
use crate::cluster::protocol::faults::{FoundFault, Judge, StateAges, repair};
use crate::cluster::protocol::view::{ClaimView, Origin, StickyView};
use crate::policy::selection::facts::TimePoint;

/// How long is long enough, in seconds. Matters of comfort: no safety rests on them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RepairTimes {
    /// An unsealed claim without a StickyIP is an orphan after this: an ADD may be between the two writes.
    pub orphan: u64,
    /// A claim whose StickyIP is gone rests this long before another may have the address.
    pub quarantine: u64,
}

impl Default for RepairTimes {
    fn default() -> Self {
        Self { orphan: 120, quarantine: 600 }
    }
}

/// Seconds after which an unsealed claim beside its StickyIP is sealed for its claimant, and one that is yet to be made is made.
/// Sooner, whoever starts the pod would find its own next write done by another, and start it again.
const STALLED: u64 = 5;

/// What a pass needs to know beside the objects themselves.
pub trait Surroundings {
    /// Whether a pod shows this address as its own.
    fn shown(&self, address: IpAddr) -> bool;
    /// Where an address comes from, for a claim that was lost or never made.
    fn origin(&self, address: IpAddr) -> Origin;
    /// Whether the pod that a claim names runs on the claim's home node: then that node has yet to answer.
    fn runs(&self, claim: &ClaimView) -> bool {
        let _ = claim;
        false
    }
    /// Whether a StickyIP of this name is there that cannot be read.
    fn unreadable(&self, holder: &StickyKey) -> bool {
        let _ = holder;
        false
    }
}

/// What became of a finding.
#[derive(Debug)]
pub enum RepairOutcome {
    /// The cure was carried out.
    Repaired,
    /// Somebody was faster, or the world is not as it was read. The next pass looks again.
    Conflict,
    /// There is no cure that a machine may apply: a person must look, or has been told already.
    ManualActionRequired,
    /// The server was of no help.
    Failed(ApiError),
}

/// The memory of the repair loop. Lost with its process at no harm: everything then takes longer.
#[derive(Debug, Default)]
pub struct Repairer {
    times: RepairTimes,
    patience: StateAges,
    for_good: bool,
}

impl Repairer {
    /// A mender with these times.
    #[must_use]
    pub fn new(times: RepairTimes) -> Self {
        Self { times, ..Self::default() }
    }

    /// Has those whose StickyIP is gone not get their address back while its claim rests, unless a pod shows it still: then somebody took
    /// the StickyIP away by hand.
    #[must_use]
    pub fn for_good(self, for_good: bool) -> Self {
        Self { for_good, ..self }
    }

    /// One pass: finds every fault and cures one after the other.
    pub async fn pass(
        &mut self,
        api_writer: &mut ApiWriter<'_>,
        stickies: &[StickyIP],
        claims: &[AddressClaim],
        around: &impl Surroundings,
        now: TimePoint,
    ) -> Vec<(FoundFault, RepairOutcome)> {
        let mut told = Vec::new();
        for finding in self.find(stickies.iter(), claims.iter(), around, now) {
            let known = stickies.iter().find(|sticky| StickyView::from(*sticky).key == finding.sticky);
            let outcome = cure(api_writer, &finding, known).await;
            told.push((finding, outcome));
        }
        told
    }

    /// Finds every fault. Objects that break their own rules are left alone: they say nothing that could be relied on.
    pub fn find<'a>(
        &mut self,
        stickies: impl Iterator<Item = &'a StickyIP>,
        claims: impl Iterator<Item = &'a AddressClaim>,
        around: &impl Surroundings,
        now: TimePoint,
    ) -> Vec<FoundFault> {
        let (mut views, mut validation_error) = (Vec::new(), BTreeSet::new());
        for sticky in stickies {
            let view = StickyView::from(sticky);
            if sticky.validation_error().is_none() {
                views.push(view);
            } else {
                validation_error.insert(view.key);
            }
        }
        let claims: Vec<ClaimView> = claims
            .filter(|claim| claim.validation_error().is_none())
            // An unreadable StickyIP may well hold it.
            .filter(|claim| {
                !validation_error.contains(&claim.spec.holder) && !around.unreadable(&claim.spec.holder)
            })
            .map(ClaimView::from)
            .collect();
        let waited = self.waited(&views, &claims, now);
        let judge = RepairJudge { waited: &waited, times: self.times, for_good: self.for_good, around };
        repair(&views, &claims, &judge)
    }

    /// For how many seconds each object that is not at its end has stood exactly as it does.
    fn waited(&mut self, stickies: &[StickyView], claims: &[ClaimView], now: TimePoint) -> Waited {
        let of_claims = claims.iter().map(|claim| (claim.uid.as_str(), claim.resource_version.as_str()));
        let of_stickies =
            stickies.iter().map(|sticky| (sticky.uid.as_str(), sticky.resource_version.as_str()));
        self.patience.keep_only(of_claims.chain(of_stickies));
        let mut seconds =
            |uid: &str, version: &str| now.seconds_since(self.patience.first_seen(uid, version, now));
        let passing =
            claims.iter().filter(|claim| claim.unsealed() || claim.phase == ClaimPhase::Quarantined);
        let new = stickies.iter().filter(|sticky| sticky.never_attached());
        Waited {
            claims: passing
                .map(|claim| (claim.address, seconds(&claim.uid, &claim.resource_version)))
                .collect(),
            stickies: new
                .map(|sticky| (sticky.key.clone(), seconds(&sticky.uid, &sticky.resource_version)))
                .collect(),
        }
    }
}

/// Carries out a finding's cure. `known` is its StickyIP as it was read.
pub async fn cure(
    api_writer: &mut ApiWriter<'_>,
    finding: &FoundFault,
    known: Option<&StickyIP>,
) -> RepairOutcome {
    let outcome = match &finding.cure {
        None => RepairOutcome::ManualActionRequired,
        Some(cure) => match api_writer.carry(cure, known, "").await {
            Ok(Applied::Conflict) => RepairOutcome::Conflict,
            Ok(_) => RepairOutcome::Repaired,
            // It may have happened; whether it did is seen in the next pass.
            Err(error) => RepairOutcome::Failed(error),
        },
    };
    let (address, holder) = (finding.address, &finding.sticky);
    match &outcome {
        RepairOutcome::Repaired => tracing::info!(%address, %holder, fault = %finding, "repaired"),
        RepairOutcome::Conflict => {
            tracing::debug!(%address, %holder, fault = %finding, "somebody was faster")
        }
        RepairOutcome::ManualActionRequired => {
            tracing::debug!(%address, %holder, fault = %finding, "a person must look")
        }
        RepairOutcome::Failed(error) => {
            tracing::warn!(%address, %holder, fault = %finding, %error, "cannot repair; trying again later");
        }
    }
    outcome
}

/// Seconds for which objects have stood as they do.
#[derive(Debug, Default)]
struct Waited {
    claims: BTreeMap<IpAddr, u64>,
    stickies: BTreeMap<StickyKey, u64>,
}

struct RepairJudge<'a, S> {
    waited: &'a Waited,
    times: RepairTimes,
    for_good: bool,
    around: &'a S,
}

impl<S> RepairJudge<'_, S> {
    fn longer(&self, claim: &ClaimView, than: u64) -> bool {
        self.waited.claims.get(&claim.address).is_some_and(|waited| *waited >= than)
    }

    /// Longer than a pod's start takes between two writes.
    fn stalled(&self) -> u64 {
        self.times.orphan.min(STALLED)
    }
}

impl<S: Surroundings> Judge for RepairJudge<'_, S> {
    fn orphaned(&self, claim: &ClaimView) -> bool {
        let awaited = claim.phase == ClaimPhase::Requested && self.around.runs(claim);
        self.longer(claim, self.times.orphan) && !awaited
    }
    fn stalled(&self, claim: &ClaimView) -> bool {
        self.longer(claim, self.stalled())
    }
    fn abandoned(&self, sticky: &StickyView) -> bool {
        self.waited.stickies.get(&sticky.key).is_some_and(|waited| *waited >= self.stalled())
    }
    fn quarantine_over(&self, claim: &ClaimView) -> bool {
        self.longer(claim, self.times.quarantine) && !self.around.shown(claim.address)
    }
    fn origin(&self, address: IpAddr) -> Origin {
        self.around.origin(address)
    }
    fn released(&self, claim: &ClaimView) -> bool {
        self.for_good && !self.around.shown(claim.address)
    }
}

/// Surroundings as plain data: the addresses that pods show, and the ranges that addresses come from.
#[derive(Debug, Clone, Default)]
pub struct Map {
    /// The addresses that pods show.
    pub shown: BTreeSet<IpAddr>,
    /// The ranges of Sticky pools.
    pub pools: Vec<ipnet::IpNet>,
    /// The nodes' home blocks.
    pub blocks: Vec<(ipnet::IpNet, String)>,
}

impl Surroundings for Map {
    fn shown(&self, address: IpAddr) -> bool {
        self.shown.contains(&address)
    }

    /// A repairer is no node: whatever is of a block is asked of its home node, which knows what it has given out.
    fn origin(&self, address: IpAddr) -> Origin {
        if let Some((block, home)) = self.blocks.iter().find(|(block, _)| block.contains(&address)) {
            return Origin::ForeignBlock { home: home.clone(), block: *block };
        }
        let range = self.pools.iter().find(|range| range.contains(&address));
        range.map_or(Origin::Nowhere, |range| Origin::StickyPool { range: *range })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::protocol::write::Write;

    fn claim(phase: ClaimPhase, version: &str) -> ClaimView {
        ClaimView {
            address: "10.0.0.1".parse().unwrap(),
            uid: "c".into(),
            resource_version: version.into(),
            phase,
            holder: StickyKey { namespace: "db".into(), name: "db-0".into() },
            sticky_uid: None,
            home_node: None,
            reason: None,
            pod: None,
            released: false,
        }
    }

    #[test]
    fn only_a_claim_that_stood_unchanged_for_the_whole_time_is_old() {
        let mut mender = Repairer::new(RepairTimes { orphan: 10, quarantine: 20 });
        let mut seen = |version: &str, phase, at| {
            let claim = claim(phase, version);
            let waited = mender.waited(&[], std::slice::from_ref(&claim), TimePoint(at));
            let map = Map::default();
            let judge = RepairJudge { waited: &waited, times: mender.times, for_good: false, around: &map };
            (Judge::stalled(&judge, &claim), judge.orphaned(&claim), judge.quarantine_over(&claim))
        };
        let none = (false, false, false);
        assert_eq!(seen("1", ClaimPhase::Granted, 100), none);
        assert_eq!(seen("1", ClaimPhase::Granted, 104), none, "its ADD may be between two writes");
        assert_eq!(seen("1", ClaimPhase::Granted, 105), (true, false, false));
        assert_eq!(seen("1", ClaimPhase::Granted, 109), (true, false, false));
        assert_eq!(seen("1", ClaimPhase::Granted, 110), (true, true, false));
        assert_eq!(seen("2", ClaimPhase::Quarantined, 111), none, "it changed: the time starts anew");
        assert_eq!(seen("2", ClaimPhase::Quarantined, 130), (true, true, false));
        assert_eq!(seen("2", ClaimPhase::Quarantined, 131), (true, true, true));
        // A clock that was set back makes it slower, never faster.
        assert_eq!(seen("2", ClaimPhase::Quarantined, 50), none);
    }

    #[test]
    fn nothing_stalls_for_longer_than_an_orphan_is_left_alone() {
        for (orphan, waited, stalls) in [(120, 4, false), (120, 5, true), (2, 1, false), (2, 2, true)] {
            let claim = claim(ClaimPhase::Granted, "1");
            let waited = Waited { claims: [(claim.address, waited)].into(), ..Waited::default() };
            let (map, times) = (Map::default(), RepairTimes { orphan, quarantine: 600 });
            let judge = RepairJudge { waited: &waited, times, for_good: false, around: &map };
            assert_eq!(Judge::stalled(&judge, &claim), stalls, "{orphan}, {:?}", waited.claims);
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
            "stickyUid": "other", "holder": {"namespace": "db", "name": "other"}}});
        let taken: AddressClaim = serde_json::from_value(claim).unwrap();
        let new = [sticky("db-0", serde_json::json!({}))];
        let kept = [sticky("db-0", serde_json::json!({"lastSeen": "2026-01-01T00:00:00Z"}))];
        let map = Map { pools: vec!["10.0.0.0/24".parse().unwrap()], ..Map::default() };
        let found = |mender: &mut Repairer, stickies: &[StickyIP], claims: &[AddressClaim], at: i64| {
            let found = mender.find(stickies.iter(), claims.iter(), &map, TimePoint(at));
            let of_sticky = found.into_iter().filter(|finding| finding.sticky.name == "db-0");
            of_sticky.map(|finding| finding.cure.unwrap().word()).collect::<Vec<_>>()
        };
        let mut mender = Repairer::default();
        assert!(found(&mut mender, &new, &[], 100).is_empty(), "its claim may be on its way");
        assert!(
            found(&mut mender, &new, std::slice::from_ref(&taken), 104).is_empty(),
            "it may be about to be undone"
        );
        assert_eq!(found(&mut mender, &new, &[], 105), ["create claim"]);
        assert_eq!(found(&mut mender, &new, std::slice::from_ref(&taken), 105), ["delete StickyIP"]);
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
        let waited = Waited { claims: [(claim.address, 1_000_000)].into(), ..Waited::default() };
        for shown in [false, true] {
            let map = Map { shown: shown.then_some(claim.address).into_iter().collect(), ..Map::default() };
            for for_good in [false, true] {
                let judge =
                    RepairJudge { waited: &waited, times: RepairTimes::default(), for_good, around: &map };
                assert_eq!(
                    (judge.quarantine_over(&claim), judge.released(&claim)),
                    (!shown, for_good && !shown)
                );
            }
        }
    }

    #[test]
    fn a_lost_claim_on_a_block_is_asked_of_its_home_node() {
        let map = Map {
            pools: vec!["10.9.0.0/24".parse().unwrap()],
            blocks: vec![("10.1.0.0/24".parse().unwrap(), "n1".into())],
            ..Map::default()
        };
        let origin = |text: &str| map.origin(text.parse().unwrap());
        assert!(matches!(origin("10.9.0.5"), Origin::StickyPool { .. }));
        assert!(matches!(origin("10.1.0.5"), Origin::ForeignBlock { home, .. } if home == "n1"));
        assert_eq!(origin("10.2.0.5"), Origin::Nowhere);
    }
}
