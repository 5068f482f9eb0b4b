//! The repair loop: makes every StickyIP have its claims, and every claim its StickyIP. It also quarantines
//! released addresses, and frees them when that is over. Must never repair by anything but the protocol's own
//! writes, and never free an address that a pod shows.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use futures_util::StreamExt;
use kube::ResourceExt;

use crate::cluster::events::{self, NewEvent};
use crate::cluster::objects::{AddressClaim, ClaimName, ClaimPhase, StickyIP};
use crate::cluster::protocol::candidates;
use crate::cluster::protocol::faults::{Fault, FoundFault, RepairFacts, RepairTimes, is_in_order};
use crate::cluster::protocol::repair::{RepairOutcome, Repairer, repair};
use crate::cluster::view::{ClaimView, Origin, StickyView};
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::{context::Context, flags::ControllerSettings, queue::Key};
use crate::names::StickyKey;

/// Repairs at the same time; no two faults of one round write the same object's state. Few: most are claims
/// to quarantine, behind a thousand StickyIPs that are being released, and no pod waits for them.
const CONCURRENCY: usize = 4;
const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(2);

/// The duty's memory. Lost with the process at no harm: repairs then take longer.
pub struct Repair {
    repairer: Repairer,
    times: RepairTimes,
    release_for_good: bool,
    /// Claims and StickyIPs whose time has yet to come, and what needs manual action. Looked at in every
    /// round.
    open: BTreeSet<Key>,
}

impl Repair {
    pub fn new(settings: &ControllerSettings) -> Self {
        let (times, release_for_good) = (settings.times(), !settings.inherit);
        Self { repairer: Repairer::default(), times, release_for_good, open: BTreeSet::new() }
    }
}

/// The StickyIPs and claims that decide about these, and no others: thousands that are in order are not
/// looked at again.
fn concerned<'a>(
    index: &'a ClusterIndex,
    keys: &BTreeSet<Key>,
) -> (Vec<&'a StickyIP>, Vec<&'a AddressClaim>) {
    let of_kind = |kind| keys.iter().filter(move |key| key.kind == kind).map(|key| key.name.as_str());
    let mut claims: BTreeSet<String> = of_kind(Kind::AddressClaim).map(str::to_owned).collect();
    let mut stickies: BTreeSet<String> = of_kind(Kind::StickyIP).map(str::to_owned).collect();
    for (namespace, name) in stickies.iter().filter_map(|named| named.split_once('/')) {
        // A StickyIP that is gone, or another one of its name, does not say which claims name it.
        let holder = StickyKey { namespace: namespace.to_owned(), name: name.to_owned() };
        claims.extend(index.claims.with(&holder).cloned());
    }
    // Each claim with its StickyIP, and each StickyIP with the claims on its addresses, whatever StickyIP
    // they name.
    let (mut new_stickies, mut new_claims) = (stickies.clone(), claims.clone());
    while !new_stickies.is_empty() || !new_claims.is_empty() {
        let holders = new_claims.iter().filter_map(|name| index.claims.get(name));
        let holders: BTreeSet<String> = holders.map(|claim| claim.spec.sticky_ref.to_string()).collect();
        let held = new_stickies.iter().filter_map(|name| index.stickies.get(name));
        let held = held.flat_map(|sticky| &sticky.spec.addresses);
        let held: BTreeSet<String> = held.map(|address| ClaimName::of(*address).to_string()).collect();
        new_stickies = holders.difference(&stickies).cloned().collect();
        new_claims = held.difference(&claims).cloned().collect();
        stickies.extend(new_stickies.iter().cloned());
        claims.extend(new_claims.iter().cloned());
    }
    (
        stickies.iter().filter_map(|name| index.stickies.get(name)).collect(),
        claims.iter().filter_map(|name| index.claims.get(name)).collect(),
    )
}

/// What is in a passing state: it is looked at until it has changed, or its time has come.
fn not_over(stickies: &[&StickyIP], claims: &[&AddressClaim]) -> BTreeSet<Key> {
    let by_address: BTreeMap<IpAddr, ClaimView> =
        claims.iter().map(|claim| (claim.spec.address, ClaimView::from(*claim))).collect();
    let is_begun = |sticky: &StickyView| {
        let mut claims = sticky.addresses.iter().map(|address| by_address.get(address));
        sticky.never_attached() && claims.any(|claim| !is_in_order(sticky, claim))
    };
    let begun = stickies.iter().map(|sticky| StickyView::from(*sticky)).filter(is_begun);
    let begun = begun.map(|sticky| Key::new(Kind::StickyIP, sticky.key.to_string()));
    let passing = claims.iter().filter(|claim| claim.spec.phase != ClaimPhase::Bound);
    begun.chain(passing.map(|claim| Key::new(Kind::AddressClaim, claim.name_any()))).collect()
}

/// Whether one of the watches that would show a pod's use of an address is stale.
fn any_stale(index: &ClusterIndex, now: Duration) -> bool {
    let mut kinds = [Kind::Pod, Kind::CiliumEndpoint, Kind::CiliumNode].into_iter();
    kinds.any(|kind| index.freshness.is_stale(kind, now))
}

/// Whether a CiliumNode publishes the address for a pod, and its node is not proved to have lost its pods.
fn is_published(index: &ClusterIndex, address: IpAddr) -> bool {
    index.cilium_nodes.with(&address).any(|name| !index.is_dead_node(name))
}

/// Whether a pod may use the address. What no pod uses goes to the next claimant, so it counts as used while
/// one of the watches that would show it is stale.
fn is_in_use(index: &ClusterIndex, address: IpAddr, now: Duration) -> bool {
    any_stale(index, now)
        || index.is_shown_by_pod(address)
        || index.endpoints.with(&address).next().is_some()
        || is_published(index, address)
}

/// Whether the claim of a StickyIP that is gone may be quarantined. If a person deleted the StickyIP while it
/// was attached, its pod may still have the address. Without inheritance the address is released for good at
/// this moment if no pod shows it, so every watch that would show it must be synced.
fn may_be_quarantined(index: &ClusterIndex, address: IpAddr, inherited: bool, now: Duration) -> bool {
    !is_published(index, address) && (inherited || !any_stale(index, now))
}

/// Whether the pod that a claim names runs on the claim's home node: then that node has yet to answer.
fn awaits_node(index: &ClusterIndex, claim: &AddressClaim) -> bool {
    let Some(named) = &claim.spec.pod else { return false };
    let pod = index.pods.get(&format!("{}/{}", claim.spec.sticky_ref.namespace, named.name));
    pod.is_some_and(|pod| {
        let runs = pod.running && !pod.ended && !pod.deleting;
        pod.facts.uid == named.uid && runs && claim.spec.home_node.as_ref() == Some(&pod.node)
    })
}

/// Where these addresses come from. The controller is no node: an address of a block is asked of its home
/// node, which knows what it has given out.
fn origins(index: &ClusterIndex, addresses: BTreeSet<IpAddr>) -> BTreeMap<IpAddr, Origin> {
    if addresses.is_empty() {
        return BTreeMap::new();
    }
    let pools = candidates::usable(index.pools.values().cloned().collect());
    let origin = |address| match index.home_of(address) {
        Some((home, block)) => Origin::ForeignBlock { home: home.to_owned(), block },
        None => candidates::of_sticky_pool(&pools, address).unwrap_or(Origin::Nowhere),
    };
    addresses.into_iter().map(|address| (address, origin(address))).collect()
}

impl Repair {
    fn facts(
        &self,
        index: &ClusterIndex,
        stickies: &[&StickyIP],
        claims: &[&AddressClaim],
        now: Duration,
    ) -> RepairFacts {
        let holders = claims.iter().map(|claim| &claim.spec.sticky_ref);
        let is_unreadable = |key: &&StickyKey| {
            let name = key.to_string();
            index.stickies.contains(&name) && index.stickies.get(&name).is_none()
        };
        let unreadable: BTreeSet<StickyKey> = holders.filter(is_unreadable).cloned().collect();
        let counted = claims.iter().filter(|claim| !unreadable.contains(&claim.spec.sticky_ref));
        let claimed: BTreeSet<IpAddr> = counted.map(|claim| claim.spec.address).collect();
        let addresses = stickies.iter().flat_map(|sticky| sticky.spec.addresses.iter().copied());
        let unclaimed = addresses.filter(|address| !claimed.contains(address)).collect();
        let of_claims = |applies: &dyn Fn(&AddressClaim) -> bool| {
            claims.iter().filter(|claim| applies(claim)).map(|claim| claim.spec.address).collect()
        };
        RepairFacts {
            times: self.times,
            unchanged_for: BTreeMap::new(),
            in_use: of_claims(&|claim| is_in_use(index, claim.spec.address, now)),
            awaiting_node: of_claims(&|claim| awaits_node(index, claim)),
            unreadable,
            origins: origins(index, unclaimed),
            release_for_good: self.release_for_good,
        }
    }
}

impl Duty for Repair {
    const NAME: &'static str = "repair";
    const TRIGGERS: &'static [Kind] = &[Kind::StickyIP, Kind::AddressClaim];
    // Gather what changes together: a binding is three or four writes.
    const BATCH_DELAY: Duration = Duration::from_millis(100);
    const TICK: Option<Duration> = Some(Duration::from_secs(1));

    async fn round(&mut self, context: &Context, due: Vec<Key>) -> RoundResult {
        let mut keys = std::mem::take(&mut self.open);
        keys.extend(due);
        if keys.is_empty() {
            return RoundResult::default();
        }
        let found: Vec<(Option<StickyIP>, FoundFault)> = {
            let index = context.index();
            let (stickies, claims) = concerned(&index, &keys);
            let now = context.elapsed();
            let facts = self.facts(&index, &stickies, &claims, now);
            self.open = not_over(&stickies, &claims);
            let found = self.repairer.find(stickies.into_iter(), claims.into_iter(), facts, context.now());
            // A claim whose StickyIP was released can wait: first the other StickyIPs are released.
            let put_off = |finding: &FoundFault| {
                finding.fault == Fault::StickyIPGone
                    && (context.has_urgent_work()
                        || !may_be_quarantined(&index, finding.address, context.settings.inherit, now))
            };
            let (later, found): (Vec<_>, Vec<_>) = found.into_iter().partition(put_off);
            let names = later.into_iter().map(|finding| ClaimName::of(finding.address).to_string());
            self.open.extend(names.map(|name| Key::new(Kind::AddressClaim, name)));
            let known = |finding: &FoundFault| index.stickies.get(&finding.sticky.to_string()).cloned();
            found.into_iter().map(|finding| (known(&finding), finding)).collect()
        };
        let repairs = found.iter().map(|(known, finding)| async move {
            let outcome = repair(&mut context.writer.api_writer(), finding, known.as_ref()).await;
            report(context, finding, known.as_ref(), &outcome).await;
            (finding, outcome)
        });
        let outcomes: Vec<(&FoundFault, RepairOutcome)> =
            futures_util::stream::iter(repairs).buffer_unordered(CONCURRENCY).collect().await;
        let mut done = RoundResult::default();
        for (finding, outcome) in outcomes {
            let key = Key::new(Kind::StickyIP, finding.sticky.to_string());
            match outcome {
                // An object changes, or has changed, and the watch shows it.
                RepairOutcome::Repaired | RepairOutcome::Conflict => {}
                // Another pool, or the end of the other StickyIP, may change it.
                RepairOutcome::ManualActionRequired => drop(self.open.insert(key)),
                // Nothing changes.
                RepairOutcome::Failed(_) => done.retry(key, RETRY_AFTER_FAILURE),
            }
        }
        done
    }
}

async fn report(context: &Context, finding: &FoundFault, known: Option<&StickyIP>, outcome: &RepairOutcome) {
    if let (RepairOutcome::Repaired, Some(write)) = (outcome, &finding.fix) {
        context.metrics.repaired.inc([write.word()]);
    }
    // Quarantine and its end are the ordinary way of a released address.
    if matches!(finding.fault, Fault::StickyIPGone | Fault::QuarantineOver) {
        return;
    }
    let next = match outcome {
        RepairOutcome::Repaired => "repaired",
        RepairOutcome::ManualActionRequired if finding.fault == Fault::ClaimMissing => {
            "no Sticky pool and no node's block has the address; add it to a pool, or delete the StickyIP"
        }
        RepairOutcome::ManualActionRequired => "delete one of the two StickyIPs",
        RepairOutcome::Conflict | RepairOutcome::Failed(_) => return,
    };
    let Some(about) = known.map(events::sticky_ip) else { return };
    let is_repaired = matches!(outcome, RepairOutcome::Repaired);
    let reason = if is_repaired { "Repaired" } else { "ManualActionRequired" };
    let warning = !is_repaired || matches!(finding.fault, Fault::ClaimedForAnother { .. });
    context.record_event(NewEvent { about, reason, message: format!("{finding}; {next}"), warning }).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::index::fixture::sticky;
    use crate::runtime::cache::CacheEvent;
    use serde_json::json;

    fn claim(address: &str, holder: &str) -> (String, AddressClaim) {
        let object = json!({"metadata": {"name": address},
            "spec": {"address": address, "phase": "Granted", "stickyRef": {"namespace": "db", "name": holder}}});
        (address.to_owned(), serde_json::from_value(object).unwrap())
    }

    fn looked_at(index: &ClusterIndex, keys: &[Key]) -> (Vec<String>, Vec<String>) {
        let (stickies, claims) = concerned(index, &keys.iter().cloned().collect());
        (
            stickies.into_iter().map(ResourceExt::name_any).collect(),
            claims.into_iter().map(ResourceExt::name_any).collect(),
        )
    }

    #[test]
    fn a_lost_claim_comes_from_a_pool_only_where_a_new_one_would() {
        let mut index = ClusterIndex::default();
        let pool = |name: &str, born: &str, spec: serde_json::Value| {
            let object = json!({"apiVersion": "sticky-ipam.io/v1alpha1", "kind": "IPPool",
                "metadata": {"name": name, "creationTimestamp": born}, "spec": spec});
            CacheEvent::Applied((name.to_owned(), serde_json::from_value(object).unwrap()))
        };
        let old =
            json!({"cidrs": ["10.0.8.0/22"], "use": "Sticky", "excluded": ["10.0.8.64/26", "10.0.8.9"]});
        index.pools.apply(pool("old", "2026-01-01T00:00:00Z", old));
        let young = json!({"cidrs": ["10.0.0.0/16"], "use": "Sticky"});
        index.pools.apply(pool("young", "2026-02-01T00:00:00Z", young));
        let node = json!({"metadata": {"name": "n9"}, "spec": {"ipam": {"podCIDRs": ["10.0.9.0/24"]}}});
        let node: crate::cluster::objects::cilium::CiliumNode = serde_json::from_value(node).unwrap();
        index.cilium_nodes.apply(CacheEvent::Applied(("n9".into(), node.into())));
        let origin = |text: &str| origins(&index, [text.parse().unwrap()].into()).pop_first().unwrap().1;
        assert_eq!(origin("10.0.8.5"), Origin::StickyPool { range: "10.0.8.0/22".parse().unwrap() });
        assert_eq!(origin("10.0.8.9"), Origin::Nowhere, "it is excluded");
        assert_eq!(origin("10.0.8.70"), Origin::Nowhere, "it is excluded");
        assert_eq!(origin("10.0.77.1"), Origin::Nowhere, "the younger pool is refused");
        assert!(matches!(origin("10.0.9.5"), Origin::ForeignBlock { home, .. } if home == "n9"));
    }

    #[test]
    fn no_address_counts_as_unused_while_a_node_that_may_use_it_is_stale() {
        let mut index = ClusterIndex::default();
        let at = Duration::from_secs;
        let shown = |index: &ClusterIndex, now| is_in_use(index, "10.0.0.1".parse().unwrap(), now);
        assert!(!shown(&index, at(0)));
        for kind in [Kind::Pod, Kind::CiliumEndpoint, Kind::CiliumNode] {
            index.freshness.mark_stale(kind, at(100));
            assert!(shown(&index, at(100)), "{kind:?}");
            index.freshness.observe_event(kind, &CacheEvent::Applied(()));
            assert!(!shown(&index, at(100)), "{kind:?}");
            // A list that has begun may never come to its end.
            index.freshness.observe_event(kind, &CacheEvent::<()>::ListStarted);
            index.freshness.observe_event(kind, &CacheEvent::Listed(()));
            assert!(shown(&index, at(1_000)), "{kind:?}");
            index.freshness.observe_event(kind, &CacheEvent::<()>::ListComplete);
            assert!(!shown(&index, at(100)), "{kind:?}");
            // One that was taken up again and has nothing to say.
            index.freshness.mark_stale(kind, at(100));
            assert!(!shown(&index, at(120)), "{kind:?}");
            // One that fails again and again has longer pauses.
            (0..8).for_each(|times| index.freshness.mark_stale(kind, at(200 + 30 * times)));
            assert!(shown(&index, at(460)) && !shown(&index, at(500)), "{kind:?}");
            index.freshness.observe_event(kind, &CacheEvent::<()>::ListComplete);
        }
        index.freshness.mark_stale(Kind::Namespace, at(100));
        assert!(!shown(&index, at(100)));
    }

    #[test]
    fn an_address_may_be_in_use_while_a_living_node_shows_it() {
        let mut index = ClusterIndex::default();
        let living = |name: &str| {
            let node: k8s_openapi::api::core::v1::Node =
                serde_json::from_value(json!({"metadata": {"name": name}})).unwrap();
            CacheEvent::Applied((name.to_owned(), node.into()))
        };
        let shows = |name: &str, ipam: serde_json::Value| {
            let node = json!({"metadata": {"name": name}, "spec": {"ipam": ipam}});
            let node: crate::cluster::objects::cilium::CiliumNode = serde_json::from_value(node).unwrap();
            CacheEvent::Applied((name.to_owned(), node.into()))
        };
        let may = |index: &ClusterIndex, text: &str| is_published(index, text.parse().unwrap());
        index.nodes.apply(living("n1"));
        index.cilium_nodes.apply(shows(
            "n1",
            json!({"podCIDRs": ["10.0.0.0/24", "10.9.0.1/32"], "pool": {"10.0.0.1": {"owner": "db/a"}, "10.0.0.2": {}}}),
        ));
        index.cilium_nodes.apply(shows("dead", json!({"podCIDRs": ["10.9.0.3/32"]})));
        assert!(may(&index, "10.0.0.1") && may(&index, "10.9.0.1"));
        assert!(!may(&index, "10.0.0.2") && !may(&index, "10.0.0.3"), "an unowned entry, and no entry");
        assert!(!may(&index, "10.9.0.3"), "its node is gone");
        index.cilium_nodes.apply(shows("n1", json!({"podCIDRs": ["10.0.0.0/24"], "pool": {"10.0.0.1": {}}})));
        assert!(!may(&index, "10.0.0.1") && !may(&index, "10.9.0.1"), "it released both");
    }

    #[test]
    fn without_inheritance_no_claim_is_quarantined_while_a_cache_is_stale() {
        let mut index = ClusterIndex::default();
        let may = |index: &ClusterIndex| {
            let (address, now) = ("10.0.0.1".parse().unwrap(), Duration::from_secs(100));
            [true, false].map(|inherited| may_be_quarantined(index, address, inherited, now))
        };
        assert_eq!(may(&index), [true, true]);
        index.freshness.mark_stale(Kind::CiliumEndpoint, Duration::from_secs(100));
        assert_eq!(may(&index), [true, false]);
        index.freshness.observe_event(Kind::CiliumEndpoint, &CacheEvent::Applied(()));
        assert_eq!(may(&index), [true, true]);
    }

    #[test]
    fn a_stickyip_that_has_just_begun_is_looked_at_again_and_one_in_order_is_not() {
        let (_, object) = sticky("a", "10.0.0.1", None);
        let open = |sticky: &StickyIP, claims: &[&AddressClaim]| {
            let keys = not_over(&[sticky], claims);
            keys.into_iter().map(|key| key.name).collect::<Vec<_>>()
        };
        assert_eq!(open(&object, &[]), ["db/a"], "its claim is yet to come");
        let (_, mut sealed) = claim("10.0.0.1", "a");
        sealed.spec.phase = ClaimPhase::Bound;
        assert!(open(&object, &[&sealed]).is_empty());
        let (_, mut taken) = claim("10.0.0.1", "b");
        taken.spec.phase = ClaimPhase::Bound;
        assert_eq!(open(&object, &[&taken]), ["db/a"], "it lost its address");
        let (_, attached) = sticky("a", "10.0.0.1", Some("n1"));
        assert!(open(&attached, &[]).is_empty(), "this is a fault and no beginning");
    }

    #[test]
    fn whatever_decides_about_a_change_is_looked_at_and_nothing_else() {
        let mut index = ClusterIndex::default();
        for (name, address) in [("a", "10.0.0.1"), ("b", "10.0.0.2"), ("c", "10.0.0.3")] {
            index.stickies.apply(CacheEvent::Applied(sticky(name, address, None)));
            index.claims.apply(CacheEvent::Applied(claim(address, name)));
        }
        let names = |all: &[&str]| all.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        let of = |name: &str| Key::new(Kind::StickyIP, format!("db/{name}"));
        assert_eq!(looked_at(&index, &[of("a")]), (names(&["a"]), names(&["10.0.0.1"])));
        let by_claim = Key::new(Kind::AddressClaim, "10.0.0.2");
        assert_eq!(looked_at(&index, &[by_claim]), (names(&["b"]), names(&["10.0.0.2"])));
        index.stickies.apply(CacheEvent::Deleted("db/a".into()));
        assert_eq!(
            looked_at(&index, &[of("a")]),
            (vec![], names(&["10.0.0.1"])),
            "the claim of one that is gone"
        );
        // The address of one is claimed for another, whose own claim must not be taken for missing.
        index.claims.apply(CacheEvent::Applied(claim("10.0.0.2", "c")));
        assert_eq!(looked_at(&index, &[of("b")]), (names(&["b", "c"]), names(&["10.0.0.2", "10.0.0.3"])));
        assert_eq!(looked_at(&index, &[of("unknown")]), (vec![], vec![]));
    }
}
