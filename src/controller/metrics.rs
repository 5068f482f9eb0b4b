//! What the controller counts, for Prometheus. Two names are those that older alerts know.

use crate::runtime::metrics::{Counter, FloatGauge, Gauge, Histogram, metrics};

metrics! {
    /// The controller's metrics.
    pub struct ControllerMetrics {
        leader: Gauge = "leader_election_status",
            "1 while this process leads, 0 while it waits";
        available: Gauge[node] = "cilium_ipam_available_ips",
            "Addresses of a node's CiliumNode pool that any pod could get now";
        sticky_ips: Gauge[phase] = "sticky_ipam_controller_sticky_ips",
            "StickyIPs, by phase";
        claims: Gauge[phase] = "sticky_ipam_controller_claims",
            "AddressClaims, by phase";
        conflicts: Gauge = "sticky_ipam_controller_conflicts",
            "StickyIPs one of whose addresses is claimed for another";
        quarantined: Gauge = "sticky_ipam_controller_quarantined_addresses",
            "Released addresses that no other claimant may have yet";
        duplicate_addresses: Gauge = "sticky_ipam_controller_duplicate_addresses",
            "Addresses that more than one live pod has now";
        handovers: Counter[reason] = "sticky_ipam_controller_handovers_total",
            "Moves of an address to another node that were seen, by reason";
        released: Counter[reason] = "sticky_ipam_controller_sticky_ips_released_total",
            "StickyIPs that were released, by reason";
        releases_waiting: Gauge = "sticky_ipam_controller_releases_waiting",
            "StickyIPs whose release is due and waits for the rate limit";
        repaired: Counter[action] = "sticky_ipam_controller_repairs_total",
            "Repairs of StickyIPs and AddressClaims that did not match, by write";
        adopted_pods: Counter = "sticky_ipam_controller_pods_adopted_total",
            "Running pods whose addresses were bound to a StickyIP";
        rounds: Histogram[duty] = "sticky_ipam_controller_reconcile_duration_seconds",
            "Duration of the rounds, by duty";
        errors: Counter[duty] = "sticky_ipam_controller_errors_total",
            "Steps that failed and are tried again, by duty";
        queue: Gauge[duty] = "sticky_ipam_controller_queue_depth",
            "Objects that wait for a duty, by duty";
        initial_sync: FloatGauge = "sticky_ipam_controller_initial_sync_seconds",
            "Time from the first complete lists until every duty had looked at every object; 0 before that";
        node_addresses: Gauge[node] = "sticky_ipam_controller_block_addresses",
            "Addresses of a node's blocks, by node";
        node_addresses_used: Gauge[node] = "sticky_ipam_controller_block_used_addresses",
            "Claimed addresses of a node's blocks, by node";
        pool_size: Gauge[pool] = "sticky_ipam_controller_pool_size",
            "Addresses of a Sticky pool, or blocks of a pool of node blocks, by pool";
        pool_used: Gauge[pool] = "sticky_ipam_controller_pool_used",
            "Claimed addresses of a Sticky pool, or allocated blocks of a pool of node blocks, by pool";
        pool_exhaustion: FloatGauge[pool] = "sticky_ipam_controller_pool_exhaustion_seconds",
            "Time until a pool is full at the rate of the last six hours; absent while it does not fill";
        blocks: Gauge[pool] = "sticky_ipam_controller_blocks",
            "Node blocks in all, by pool";
        blocks_allocated: Gauge[pool] = "sticky_ipam_controller_blocks_allocated",
            "Node blocks that nodes have, by pool";
        block_actions: Counter[action] = "sticky_ipam_controller_block_actions_total",
            "Node blocks that were assigned, locked or released, by action";
        block_problems: Gauge[reason] = "sticky_ipam_controller_block_problems",
            "Nodes without a block that they need, and block Leases that cannot be read, by reason";
        endpoint_actions: Counter[action] = "sticky_ipam_controller_endpoint_actions_total",
            "What was done about CiliumEndpoints, by action: nudged, finalizers_removed, removed or replaced";
        endpoint_disagreements: Counter[reason] = "sticky_ipam_controller_endpoint_disagreements_total",
            "Times that a pod, its CiliumEndpoint, its StickyIP and its node's pool disagreed, by reason";
        drift: Gauge[reason, breaks] = "sticky_ipam_controller_drift_findings",
            "Findings of the drift audit, by reason and by what breaks";
        requests: Counter[method] = "sticky_ipam_controller_api_requests_total",
            "Requests to the API server, by method; watches as WATCH, the leader's Lease as LEASE";
        skipped: Counter[kind] = "sticky_ipam_controller_objects_skipped_total",
            "Objects that could not be read and were skipped, by kind";
        config_valid: Gauge = "sticky_ipam_controller_config_valid",
            "1 if the settings file is accepted as it is now, 0 if a change of it was rejected";
    }
}
