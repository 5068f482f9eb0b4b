//! What the agent counts, for Prometheus.

use crate::runtime::metrics::{Counter, Gauge, metrics};

metrics! {
    /// The agent's metrics.
    pub struct AgentMetrics {
        prepared: Counter[kind] = "sticky_ipam_agent_decisions_prepared_total",
            "Decisions that were put in place before a pod's ADD, by kind: sticky or plain";
        withdrawn: Counter = "sticky_ipam_agent_decisions_withdrawn_total",
            "Prepared decisions that were withdrawn because their pod will not start";
        pending_updates: Counter = "sticky_ipam_agent_pending_updates_sent_total",
            "Pending updates of the plugin that were sent to the API server";
        leaks: Counter[kind] = "sticky_ipam_agent_leaks_released_total",
            "What was released because no DEL did, by kind: sandbox, attachment, record or pool_entry";
        claims: Counter[answer] = "sticky_ipam_agent_claims_answered_total",
            "Requested claims on this node's addresses, by answer: granted or refused";
        pool_writes: Counter[action] = "sticky_ipam_agent_pool_writes_total",
            "Writes of this node's CiliumNode, by action: publish, unpublish or refill";
        pool: Gauge[family, state] = "sticky_ipam_agent_pool_addresses",
            "Entries of this node's CiliumNode pool, by IP family and state: Total or Free";
        cilium: Gauge[version, ipam, tested] = "sticky_ipam_agent_cilium_info",
            "Cilium on this node, always 1: version, IPAM mode, and whether sticky-ipam was tested with it";
        requests: Counter[method] = "sticky_ipam_agent_api_requests_total",
            "Requests to the API server, by method; watches as WATCH";
        errors: Counter[action] = "sticky_ipam_agent_errors_total",
            "Failures, by the action that is tried again";
        bypass: Gauge = "sticky_ipam_agent_bypass",
            "1 while the bypass is on: pods that are not known as sticky are passed without a lookup; else 0";
        skipped: Counter = "sticky_ipam_agent_objects_skipped_total",
            "Objects that could not be read and were skipped";
        needs_attention: Gauge[action] = "sticky_ipam_agent_needs_attention",
            "Actions that fail until a person helps, by action; the log says more";
        last_success: Gauge = "sticky_ipam_agent_last_success_timestamp_seconds",
            "Time of the last round in which nothing failed, by the node's clock";
        steps: Counter = "sticky_ipam_agent_reconciliations_total",
            "Rounds over the node's files and objects";
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_has_its_help_and_its_prefix() {
        let metrics = AgentMetrics::default();
        metrics.leaks.inc(["netns"]);
        metrics.last_success.set(7);
        let page = metrics.page();
        assert!(page.contains("# HELP sticky_ipam_agent_leaks_released "), "{page}");
        assert!(page.contains("sticky_ipam_agent_leaks_released_total{kind=\"netns\"} 1"), "{page}");
        assert!(page.contains("sticky_ipam_agent_last_success_timestamp_seconds 7"), "{page}");
        assert!(
            page.lines()
                .filter(|line| !line.starts_with('#'))
                .all(|line| line.starts_with("sticky_ipam_agent_"))
        );
    }
}
