//! What the controller counts, for Prometheus. Every metric has its help, and its name carries the unit. The names that older
//! alerts use stand beside ours.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry, Unit};

/// The bounds of a round's time, in seconds.
const ROUND_BOUNDS: [f64; 8] = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0];

/// One label: what a count is about.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct What {
    /// The word.
    pub what: String,
}

/// One label: which node.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct NodeLabel {
    /// Its name.
    pub node: String,
}

/// One label: which duty.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct DutyLabel {
    /// Its name.
    pub duty: String,
}

/// Everything that is counted.
#[derive(Debug)]
pub struct ControllerMetrics {
    registry: Mutex<Registry>,
    /// 1 while this process leads.
    pub leader: Gauge,
    /// Free addresses of each node's pool.
    pub available: Family<NodeLabel, Gauge>,
    /// StickyIPs by phase.
    pub bindings: Family<What, Gauge>,
    /// Claims by phase.
    pub claims: Family<What, Gauge>,
    /// Moves between nodes that the watch has shown, by reason.
    pub handovers: Family<What, Counter>,
    /// StickyIPs whose address another holds.
    pub conflicts: Gauge,
    /// StickyIPs let go, by reason.
    pub recycled: Family<What, Counter>,
    /// How many wait for the recycling's rate limit.
    pub releases_waiting: Gauge,
    /// Claims that rest.
    pub quarantined: Gauge,
    /// Repaired faults, by kind of write.
    pub repaired: Family<What, Counter>,
    /// Pods that got a binding from the address they show.
    pub adopted_pods: Counter,
    /// Rounds of the duties.
    pub rounds: Family<DutyLabel, Histogram, fn() -> Histogram>,
    /// Failed steps of the duties.
    pub errors: Family<DutyLabel, Counter>,
    /// How long it took from the arrival of the lists until every duty had looked at everything once; 0 before that.
    pub initial_sync: Gauge<f64, std::sync::atomic::AtomicU64>,
    /// What waits for a duty.
    pub queue: Family<DutyLabel, Gauge>,
    /// Requests to the API server, by method; watches and the leader's lease apart.
    pub requests: Family<What, Counter>,
    /// Objects that could not be read.
    pub skipped: Family<What, Counter>,
    /// Whether the settings file, as it stands now, is accepted.
    pub config_valid: Gauge,
}

fn rounds() -> Histogram {
    Histogram::new(ROUND_BOUNDS)
}

impl Default for ControllerMetrics {
    fn default() -> Self {
        let mut registry = Registry::default();
        let leader = Gauge::default();
        registry.register(
            "leader_election_status",
            "1 while this process leads, 0 while it waits",
            leader.clone(),
        );
        let available = Family::<NodeLabel, Gauge>::default();
        registry.register(
            "cilium_ipam_available_ips",
            "Addresses of a node's CiliumNode pool that any pod could get now",
            available.clone(),
        );
        let ours = registry.sub_registry_with_prefix("sticky_ipam_controller");
        macro_rules! counted {
            ($name:literal, $help:literal) => {{
                let metric = Default::default();
                ours.register($name, $help, Clone::clone(&metric));
                metric
            }};
        }
        let bindings: Family<What, Gauge> = counted!("bindings", "StickyIPs, by phase");
        let claims: Family<What, Gauge> = counted!("claims", "AddressClaims, by phase");
        let handovers: Family<What, Counter> =
            counted!("handovers", "Moves of an address to another node that were seen, by reason");
        let conflicts: Gauge =
            counted!("conflicts", "StickyIPs one of whose addresses is claimed for another");
        let recycled: Family<What, Counter> = counted!("recycled", "StickyIPs that were let go, by reason");
        let releases_waiting: Gauge =
            counted!("recycle_waiting", "StickyIPs proven to be let go that wait for the rate limit");
        let quarantined: Gauge =
            counted!("quarantined", "Addresses that rest before another owner may have them");
        let repaired: Family<What, Counter> =
            counted!("repaired", "Faults between StickyIPs and claims that were cured, by write");
        let adopted_pods: Counter =
            counted!("marked", "Running pods that got a binding from the addresses they show");
        let errors: Family<DutyLabel, Counter> =
            counted!("errors", "Steps that failed and are tried again, by duty");
        let queue: Family<DutyLabel, Gauge> =
            counted!("queue_depth", "Objects that a duty has yet to look at");
        let requests: Family<What, Counter> = counted!(
            "api_requests",
            "Requests to the API server, by method; watches and the leader's lease apart"
        );
        let skipped: Family<What, Counter> =
            counted!("objects_skipped", "Objects that could not be read and were passed over, by kind");
        let config_valid: Gauge = counted!(
            "config_valid",
            "1 if the settings file is accepted as it stands, 0 if it was refused since the start"
        );
        let rounds = Family::<DutyLabel, Histogram, fn() -> Histogram>::new_with_constructor(rounds);
        ours.register_with_unit("reconcile", "Time of a duty's rounds", Unit::Seconds, rounds.clone());
        let initial_sync = Gauge::<f64, std::sync::atomic::AtomicU64>::default();
        ours.register_with_unit(
            "in_step",
            "Time from the arrival of the lists until every duty had looked at everything once; 0 before that",
            Unit::Seconds,
            initial_sync.clone(),
        );
        config_valid.set(1);
        Self {
            registry: Mutex::new(registry),
            leader,
            available,
            bindings,
            claims,
            handovers,
            conflicts,
            recycled,
            releases_waiting,
            quarantined,
            repaired,
            adopted_pods,
            rounds,
            errors,
            initial_sync,
            queue,
            requests,
            skipped,
            config_valid,
        }
    }
}

impl ControllerMetrics {
    /// Adds a metric of a duty's own, as `sticky_ipam_controller_<name>`.
    pub fn register(&self, name: &str, help: &str, metric: impl Metric) {
        let mut registry = self.registry.lock().unwrap_or_else(PoisonError::into_inner);
        registry.sub_registry_with_prefix("sticky_ipam_controller").register(name, help, metric);
    }

    /// Counts one under a word.
    pub fn count(family: &Family<What, Counter>, what: &str) {
        family.get_or_create(&What { what: what.to_owned() }).inc();
    }

    /// Counts a duty's round.
    pub fn round(&self, duty: &str, took: Duration, failures: usize, left: usize) {
        let duty = DutyLabel { duty: duty.to_owned() };
        self.rounds.get_or_create(&duty).observe(took.as_secs_f64());
        self.errors.get_or_create(&duty).inc_by(u64::try_from(failures).unwrap_or(u64::MAX));
        self.queue.get_or_create(&duty).set(i64::try_from(left).unwrap_or(i64::MAX));
    }

    /// The page for Prometheus.
    #[must_use]
    pub fn page(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = encode(&mut text, &self.registry.lock().unwrap_or_else(PoisonError::into_inner));
        text
    }
}
