//! How many unowned entries the pool of a node needs, so that Cilium has an address for every pod that waits
//! there. One IP family at a time.
//!
//! The pool follows the pods: a pod that waits counts until its address is seen. Every write of the pool goes
//! to every cilium-agent of the cluster, so a few entries are added beyond what is needed, and what is not
//! urgent waits for more. Must never ask for more entries than the operator allows, nor for the same pods
//! twice: pods that cannot start are as many after a refill as before.

/// The entries of a pool.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PoolCount {
    /// All entries, without barriers.
    pub total: usize,
    /// Those that Cilium can give to a pod: unowned, and of no pod as far as is known.
    pub free: usize,
}

/// What the operator has set, per IP family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PoolLimits {
    /// Free entries beyond those for the pods that wait.
    pub min_free: usize,
    /// All entries, at most.
    pub max_entries: usize,
}

/// How soon a pool must be refilled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RefillUrgency {
    /// Fewer entries are free than the operator wants, and enough for every pod that waits.
    Later,
    /// A pod that waits, or one of the next, may find none.
    Now,
}

/// With less than this part of what is to be spare, the next pods may come before the next refill.
const SCARCE_PART: usize = 3;
/// How many more are on their way, as a part of those that wait.
const COMING_PART: usize = 4;

impl PoolLimits {
    /// Whether entries are to be added for this many pods that wait, and how soon.
    pub fn urgency(self, count: PoolCount, waiting: usize) -> Option<RefillUrgency> {
        if count.total >= self.max_entries || count.free >= waiting.saturating_add(self.min_free) {
            return None;
        }
        let scarce = count.free < waiting.saturating_add(self.min_free.div_ceil(SCARCE_PART));
        Some(if scarce { RefillUrgency::Now } else { RefillUrgency::Later })
    }

    /// How many entries to add for this many pods that wait. While many wait, more are on their way: a share
    /// of their number is added, so that a burst of any size needs few writes.
    pub fn to_add(self, count: PoolCount, waiting: usize) -> usize {
        let spare = self.min_free.max(waiting / COMING_PART);
        let wanted = waiting.saturating_add(spare).saturating_sub(count.free);
        wanted.min(self.max_entries.saturating_sub(count.total))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const SHIPPED: PoolLimits = PoolLimits { min_free: 8, max_entries: 256 };

    /// The pool after `used` of it were given to pods.
    fn pool(total: usize, used: usize) -> PoolCount {
        PoolCount { total, free: total - used }
    }

    fn refilled(limits: PoolLimits, count: PoolCount, waiting: usize) -> PoolCount {
        let added = limits.to_add(count, waiting);
        PoolCount { total: count.total + added, free: count.free + added }
    }

    /// Pods that come one by one, each of which gets its address some pods later. Returns how often the pool
    /// was written, and the fewest entries that were free beyond those for the pods that waited.
    fn burst(limits: PoolLimits, pods: usize, start_after: usize) -> (usize, isize) {
        let (mut count, mut writes, mut spare) = (pool(limits.min_free, 0), 0, isize::MAX);
        let mut running: usize = 0;
        for come in 1..=pods {
            if come - running > start_after {
                (running, count.free) = (running + 1, count.free - 1);
            }
            let waiting = come - running;
            if limits.urgency(count, waiting) == Some(RefillUrgency::Now) {
                (count, writes) = (refilled(limits, count, waiting), writes + 1);
            }
            spare = spare.min(count.free.cast_signed() - waiting.cast_signed());
        }
        (writes, spare)
    }

    #[test]
    fn a_burst_of_any_order_has_an_address_for_each_pod_by_few_writes() {
        for start_after in [0, 1, 10, 60, 110] {
            let (writes, spare) = burst(SHIPPED, 110, start_after);
            assert!(spare >= 0, "{start_after}: a pod would find no address");
            assert!(writes <= 18, "{start_after}: {writes} writes");
        }
        assert!(burst(SHIPPED, 110, 110).0 <= 12);
    }

    #[test]
    fn a_single_pod_costs_no_write_at_once() {
        assert_eq!(SHIPPED.urgency(pool(8, 0), 0), None);
        assert_eq!(SHIPPED.urgency(pool(8, 0), 1), Some(RefillUrgency::Later));
        assert_eq!(SHIPPED.urgency(pool(8, 1), 0), Some(RefillUrgency::Later));
        assert_eq!(SHIPPED.urgency(pool(8, 0), 7), Some(RefillUrgency::Now));
        assert_eq!(SHIPPED.urgency(pool(8, 8), 0), Some(RefillUrgency::Now));
        assert_eq!(SHIPPED.urgency(pool(2, 0), 0), Some(RefillUrgency::Now), "a node that begins");
    }

    proptest! {
        #[test]
        fn a_refill_serves_every_waiting_pod_within_the_limit_and_is_not_repeated(
            total in 0usize..600, used in 0usize..600, waiting in 0usize..600, min_free in 0usize..64,
            max_entries in 0usize..600,
        ) {
            let (count, limits) = (pool(total, used.min(total)), PoolLimits { min_free, max_entries });
            let after = refilled(limits, count, waiting);
            prop_assert!(after.total <= max_entries.max(total), "never more than is allowed");
            prop_assert!(after.total >= total, "no entry is taken back: a pod may have it");
            let served = after.free >= waiting + min_free || after.total >= max_entries;
            prop_assert!(served, "{after:?}");
            prop_assert_eq!(limits.urgency(after, waiting), None, "pods that are stuck make it grow once");
            if limits.urgency(count, waiting).is_some() {
                prop_assert!(after.total > total, "what is planned changes something");
            }
        }

        #[test]
        fn pods_that_start_after_a_refill_leave_enough_for_those_that_wait(
            used in 0usize..100, waiting in 1usize..200, started in 0usize..200,
        ) {
            let limits = PoolLimits { max_entries: usize::MAX, ..SHIPPED };
            let count = refilled(limits, pool(used + 8, used), waiting);
            let started = started.min(waiting);
            let later = PoolCount { free: count.free - started, ..count };
            prop_assert!(later.free >= waiting - started);
        }
    }
}
