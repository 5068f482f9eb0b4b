//! What the agent counts, for Prometheus. Every name carries its unit.

use std::sync::atomic::{AtomicI64, AtomicU64};

use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

/// One label: what a count is about.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct What {
    /// The word.
    pub what: String,
}

/// A family of addresses and whether they are free.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PoolLabels {
    /// IPv4 or IPv6.
    pub family: String,
    /// Which of them.
    pub state: PoolState,
}

/// Which addresses of the pool are counted.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelValue)]
pub enum PoolState {
    /// All keys.
    Total,
    /// Unowned and not used.
    Free,
}

/// Everything that is counted.
#[derive(Debug)]
pub struct AgentMetrics {
    registry: Registry,
    /// Prepared decisions, by `sticky` and `plain`.
    pub prepared: Family<What, Counter>,
    /// Prepared decisions that were taken back.
    pub withdrawn: Counter,
    /// Notes that were told to the API server.
    pub notes: Counter,
    /// What was freed, by kind.
    pub leaks: Family<What, Counter>,
    /// Claims that were answered, by `granted` and `refused`.
    pub claims: Family<What, Counter>,
    /// Pool keys and routes that were written, by `put`, `removed` and `offered`.
    pub pool_writes: Family<What, Counter>,
    /// What stands in this node's pool.
    pub pool: Family<PoolLabels, Gauge>,
    /// Requests to the API server, by verb.
    pub requests: Family<What, Counter>,
    /// Steps that failed, by what was tried.
    pub errors: Family<What, Counter>,
    /// Objects that could not be read.
    pub skipped: Counter,
    /// What a person must look at, by kind, as it stands now.
    pub needs_attention: Family<What, Gauge>,
    /// When a step last succeeded.
    pub last_success: Gauge<i64, AtomicI64>,
    /// Steps that were taken.
    pub steps: Counter<u64, AtomicU64>,
}

impl Default for AgentMetrics {
    fn default() -> Self {
        let mut registry = Registry::with_prefix("sticky_ipam_agent");
        macro_rules! counted {
            ($name:literal, $help:literal) => {{
                let metric = Default::default();
                registry.register($name, $help, Clone::clone(&metric));
                metric
            }};
        }
        let prepared: Family<What, Counter> =
            counted!("decisions_prepared", "Decisions put in place before a pod's ADD, sticky or plain");
        let withdrawn: Counter =
            counted!("decisions_withdrawn", "Decisions taken back because their pod will not come");
        let notes: Counter =
            counted!("notes_drained", "Notes of the plugin that were told to the API server");
        let leaks: Family<What, Counter> =
            counted!("leaks_freed", "Attachments, reservations and records that nobody ended, by kind");
        let claims: Family<What, Counter> =
            counted!("claims_answered", "Requested claims on this node's addresses, granted or refused");
        let pool_writes: Family<What, Counter> =
            counted!("pool_writes", "Changes of this node's CiliumNode: put, removed, offered");
        let pool: Family<PoolLabels, Gauge> =
            counted!("pool_addresses", "Keys of this node's CiliumNode pool, by family, all and free");
        let requests: Family<What, Counter> =
            counted!("api_requests", "Requests to the API server, by method");
        let errors: Family<What, Counter> = counted!("errors", "What failed, by what was tried");
        let skipped: Counter =
            counted!("objects_skipped", "Objects that could not be read and were passed over");
        let needs_attention: Family<What, Gauge> =
            counted!("odd", "What a person must look at, by kind, as it stands now");
        let steps: Counter<u64, AtomicU64> = counted!("steps", "Looks at the node's files and objects");
        let last_success = Gauge::default();
        registry.register_with_unit(
            "last_success_timestamp",
            "When a step last succeeded, by the node's clock",
            Unit::Seconds,
            last_success.clone(),
        );
        Self {
            registry,
            prepared,
            withdrawn,
            notes,
            leaks,
            claims,
            pool_writes,
            pool,
            requests,
            errors,
            skipped,
            needs_attention,
            last_success,
            steps,
        }
    }
}

impl AgentMetrics {
    /// Counts one under a word.
    pub fn count(family: &Family<What, Counter>, what: &str) {
        family.get_or_create(&What { what: what.to_owned() }).inc();
    }

    /// The page for Prometheus.
    #[must_use]
    pub fn page(&self) -> String {
        let mut text = String::new();
        // Writing into a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_has_its_help_and_its_prefix() {
        let metrics = AgentMetrics::default();
        AgentMetrics::count(&metrics.leaks, "netns");
        metrics.last_success.set(7);
        let page = metrics.page();
        assert!(page.contains("# HELP sticky_ipam_agent_leaks_freed "), "{page}");
        assert!(page.contains("sticky_ipam_agent_leaks_freed_total{what=\"netns\"} 1"), "{page}");
        assert!(page.contains("sticky_ipam_agent_last_success_timestamp_seconds 7"), "{page}");
        assert!(
            page.lines()
                .filter(|line| !line.starts_with('#'))
                .all(|line| line.starts_with("sticky_ipam_agent_"))
        );
    }
}
