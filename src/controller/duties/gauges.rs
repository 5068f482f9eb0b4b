//! The gauges: counts of the index's objects. Writes nothing.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt::Debug;
use std::time::Duration;

use ipnet::IpNet;

use crate::cluster::objects::ClaimPhase::{self, Granted, Quarantined, Refused, Requested};
use crate::cluster::objects::{HandoverRecord, StickyPhase};
use crate::controller::duties::node_blocks::pools::fills;
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::{context::Context, metrics::ControllerMetrics, queue::Key};
use crate::policy::node_blocks::Fill;
use crate::runtime::metrics::{Gauge, Labelled};

/// Over how long the rate of use is measured.
const FORECAST_SPAN: Duration = Duration::from_secs(6 * 3600);
const MOST_SAMPLES: usize = 360;

#[derive(Default)]
pub(crate) struct Gauges {
    samples: BTreeMap<String, VecDeque<(Duration, f64)>>,
    /// The newest move that was counted, of each StickyIP.
    moves: BTreeMap<String, i64>,
    begun: bool,
    nodes: BTreeSet<String>,
}

impl Duty for Gauges {
    const NAME: &'static str = "gauges";
    const TRIGGERS: &'static [Kind] =
        &[Kind::StickyIP, Kind::AddressClaim, Kind::CiliumNode, Kind::IPPool, Kind::Node];
    const BATCH_DELAY: Duration = Duration::from_millis(500);
    const TICK: Option<Duration> = Some(Duration::from_secs(60));

    async fn round(&mut self, context: &Context, due: Vec<Key>) -> RoundResult {
        let metrics = &context.metrics;
        let index = context.index();
        let phases = index.stickies.values().map(|sticky| sticky.status.as_ref()?.phase);
        let phases = phases.map(|phase| phase.unwrap_or(StickyPhase::Bound));
        let all = [StickyPhase::Bound, StickyPhase::Attached, StickyPhase::Retained, StickyPhase::Conflict];
        let counted = count_phases(all, phases, &metrics.sticky_ips);
        metrics.conflicts.set(counted[&StickyPhase::Conflict]);
        let phases = index.claims.values().map(|claim| claim.spec.phase);
        let all = [Requested, Refused, Granted, ClaimPhase::Bound, Quarantined];
        let counted = count_phases(all, phases, &metrics.claims);
        metrics.quarantined.set(counted[&Quarantined]);
        self.count_moves(&index, metrics, &due);
        self.nodes(&index, metrics);
        self.pools(metrics, &fills(&index, context.settings.cluster_pool().as_ref()), context.elapsed());
        RoundResult::default()
    }
}

impl Gauges {
    /// Counts moves that are newer than the last look. Earlier moves were counted by the leader before.
    fn count_moves(&mut self, index: &ClusterIndex, metrics: &ControllerMetrics, due: &[Key]) {
        for key in due.iter().filter(|key| key.kind == Kind::StickyIP) {
            let Some(sticky) = index.stickies.get(&key.name) else {
                self.moves.remove(&key.name);
                continue;
            };
            let before = self.moves.get(&key.name).copied();
            let is_new = |step: &HandoverRecord| before.is_none_or(|before| step.at.0.as_second() > before);
            // One that has begun, off a dead node, is counted when it has arrived.
            let handovers = sticky.status.iter().flat_map(|status| &status.handovers);
            let mut arrived = handovers.filter(|step| !step.to.is_empty()).peekable();
            let newest = arrived.peek().copied();
            let moves = arrived.filter(|step| !step.from.is_empty() && step.from != step.to);
            for step in moves.filter(|step| self.begun && is_new(step)) {
                metrics.handovers.inc([&step.reason]);
            }
            if let Some(newest) = newest {
                self.moves.insert(key.name.clone(), newest.at.0.as_second());
            }
        }
        self.begun = true;
    }

    fn nodes(&mut self, index: &ClusterIndex, metrics: &ControllerMetrics) {
        let mut claimed: BTreeMap<&String, i64> = BTreeMap::new();
        for home in index.claims.values().filter_map(|claim| claim.spec.home_node.as_ref()) {
            *claimed.entry(home).or_default() += 1;
        }
        let now: BTreeSet<String> = index.cilium_nodes.iter().map(|(name, _)| name.clone()).collect();
        for gone in self.nodes.difference(&now) {
            for gauge in [&metrics.available, &metrics.node_addresses, &metrics.node_addresses_used] {
                gauge.remove([gone]);
            }
        }
        for (name, node) in index.cilium_nodes.iter() {
            let size: f64 = node.blocks().map(addresses).sum();
            metrics.available.with([name]).set(i64::try_from(node.available()).unwrap_or(i64::MAX));
            let used = claimed.get(name).copied().unwrap_or_default();
            metrics.node_addresses_used.with([name]).set(used);
            metrics.node_addresses.with([name]).set(whole(size));
        }
        self.nodes = now;
    }

    fn pools(&mut self, metrics: &ControllerMetrics, fills: &BTreeMap<String, Fill>, now: Duration) {
        for (pool, _) in self.samples.extract_if(.., |pool, _| !fills.contains_key(pool)) {
            metrics.pool_used.remove([&pool]);
            metrics.pool_size.remove([&pool]);
            metrics.pool_exhaustion.remove([&pool]);
        }
        for (name, fill) in fills {
            metrics.pool_used.with([name]).set(whole(fill.allocated as f64));
            metrics.pool_size.with([name]).set(whole(fill.total as f64));
            let samples = self.samples.entry(name.clone()).or_default();
            match hours_left(samples, now, fill.allocated as f64, fill.total as f64) {
                Some(hours) => {
                    metrics.pool_exhaustion.with([name]).set(hours * 3600.0);
                }
                None => metrics.pool_exhaustion.remove([name]),
            }
        }
    }
}

/// How many objects are in each phase; none is a number, too.
fn count_phases<P: Ord + Debug, const N: usize>(
    all: [P; N],
    found: impl Iterator<Item = P>,
    gauge: &Labelled<Gauge, 1>,
) -> BTreeMap<P, i64> {
    let mut counts = BTreeMap::from(all.map(|phase| (phase, 0)));
    found.for_each(|phase| *counts.entry(phase).or_default() += 1);
    for (phase, count) in &counts {
        gauge.with([&format!("{phase:?}")]).set(*count);
    }
    counts
}

/// Takes a sample; the hours that are left at the rate since the oldest one.
fn hours_left(samples: &mut VecDeque<(Duration, f64)>, now: Duration, used: f64, size: f64) -> Option<f64> {
    let apart = FORECAST_SPAN / u32::try_from(MOST_SAMPLES).unwrap_or(1);
    if samples.back().is_none_or(|(at, _)| now.saturating_sub(*at) >= apart) {
        samples.push_back((now, used));
    }
    while samples.front().is_some_and(|(at, _)| now.saturating_sub(*at) > FORECAST_SPAN) {
        samples.pop_front();
    }
    let (then, before) = samples.front()?;
    let hours = now.saturating_sub(*then).as_secs_f64() / 3600.0;
    let rate = (used - before) / hours;
    (rate.is_finite() && rate > 0.0).then(|| (size - used).max(0.0) / rate)
}

fn addresses(net: IpNet) -> f64 {
    f64::from(net.max_prefix_len() - net.prefix_len()).exp2()
}

/// Saturates: a /64 has more addresses than a gauge of whole numbers can show.
fn whole(number: f64) -> i64 {
    number as i64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_forecast_is_what_is_left_over_the_rate_of_use() {
        let mut samples = VecDeque::new();
        let at = |minutes: u64| Duration::from_secs(60 * minutes);
        assert_eq!(hours_left(&mut samples, at(0), 10.0, 100.0), None, "no rate yet");
        assert_eq!(hours_left(&mut samples, at(30), 20.0, 100.0), Some(4.0));
        assert_eq!(hours_left(&mut samples, at(60), 10.0, 100.0), None, "it does not fill");
        assert_eq!(hours_left(&mut samples, at(120), 110.0, 100.0), Some(0.0));
        // Six hours later only the last six hours count.
        assert_eq!(hours_left(&mut samples, at(600), 110.0, 200.0), None);
        assert!(samples.len() <= MOST_SAMPLES + 1);
    }
}
