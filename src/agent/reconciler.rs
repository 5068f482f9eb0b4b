//! One step of the loop: take a snapshot of the store, ask [`plan`](crate::agent::plan::plan), perform what
//! is due, one action at a time. And what is kept between steps: when to retry. A restart may lose that
//! without harm.

use std::collections::{BTreeMap, BTreeSet};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::agent::actions::{
    ActionContext, ActionError, ActionOutcome, NamespaceReads, Performed, open_store,
};
use crate::agent::plan::{Action, PlanInput, PlanOptions, debounce::Debounce};
use crate::agent::{
    actions, blocks, flags::AgentSettings, index::NodeIndex, metrics::AgentMetrics, plan, snapshot::Snapshot,
};
use crate::cluster::api::client::ApiError;
use crate::cluster::writer::apply::WriteObserver;
use crate::policy::pool_size::{PoolCount, PoolLimits};
use crate::runtime::metrics::whole;
use crate::store::Disk;

/// The first pause before an action that did not succeed is tried again.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// The longest: an operator may have to act.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// The longest while the API server is away. A watch that continues where it was does not show that the
/// server is back, and other nodes wait for the pending updates. One action per step is tried then, so this
/// is at most that many requests.
const LONGEST_AWAY: Duration = Duration::from_secs(15);

/// An action that nothing waits for and that took longer shows that cilium-agent hangs. The others like it
/// are left for the next step: each would take as long, and the next pod's decision would wait for them all.
const TOO_SLOW: Duration = Duration::from_secs(1);

/// The actions that are known to need attention: their gauges show zero from the start.
const NEED_ATTENTION: [&str; 5] = ["attach", "unpublish", "grant", "send_update", "record_mac"];

pub struct Reconciler<D: Disk + Clone> {
    settings: Arc<AgentSettings>,
    options: PlanOptions,
    metrics: Arc<AgentMetrics>,
    disk: D,
    observer: Arc<dyn WriteObserver>,
    pub index: NodeIndex,
    debounce: Debounce,
    pauses: BTreeMap<String, Pause>,
    /// The actions whose gauge is shown: what needed attention once shows zero afterwards.
    needed_attention: BTreeSet<String>,
    scope: Scope,
}

/// What a reconciler does of what is planned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scope {
    Everything,
    /// Only what ends: sticky-ipam is being removed from the node.
    Ending,
}

/// How often an action did not succeed, what was logged of it, and when it is due again.
#[derive(Debug, Clone, Default)]
struct Pause {
    tries: u32,
    due: Duration,
    logged: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StepReport {
    pub done: usize,
    pub failed: usize,
    pub unauthorized: bool,
}

impl<D: Disk + Clone> Reconciler<D> {
    pub fn new(
        settings: Arc<AgentSettings>,
        metrics: Arc<AgentMetrics>,
        disk: D,
        observer: Arc<dyn WriteObserver>,
    ) -> Self {
        let options = PlanOptions {
            node: settings.node.clone(),
            shape: settings.shape(Vec::new()),
            ranges: Vec::new(),
            pool_limits: PoolLimits {
                min_free: settings.ip_rate_num,
                max_entries: settings.max_allocated_ip,
            },
            rules: settings.selection.rules(),
        };
        Self {
            settings,
            options,
            metrics,
            disk,
            observer,
            index: NodeIndex::default(),
            debounce: Debounce::default(),
            pauses: BTreeMap::new(),
            needed_attention: NEED_ATTENTION.map(str::to_owned).into(),
            scope: Scope::Everything,
        }
    }

    /// The same for a node from which everything is removed: it only ends what sandboxes have left.
    pub fn only_ending(self) -> Self {
        Self { scope: Scope::Ending, ..self }
    }

    /// Reads, plans, and performs what is due. `now` is of a clock that only goes forward.
    /// Errors: the store cannot be read. An action that fails is logged, counted and tried again.
    pub async fn step(&mut self, client: &kube::Client, now: Duration) -> Result<StepReport, ActionError> {
        self.metrics.steps.inc();
        self.read_ranges();
        self.report_pool();
        let store = open_store(&self.settings, self.disk.clone())?;
        let snapshot = Snapshot::take(&store, |path| self.settings.on_host(path))?;
        self.options.shape.known_blocks.clone_from(&snapshot.blocks);
        let input = PlanInput { options: &self.options, index: &self.index, store: &snapshot, now };
        let mut planned = plan::plan(&input, &mut self.debounce);
        planned.retain(|action| self.scope == Scope::Everything || action.is_ending());
        self.forget_pauses(&planned);
        let (mut step, namespaces) = (StepReport::default(), NamespaceReads::default());
        let mut is_slow = false;
        for action in &planned {
            if is_slow && action.can_wait() {
                continue;
            }
            if self.pauses.get(&id(action)).is_some_and(|pause| pause.due > now) {
                continue;
            }
            let context = ActionContext {
                settings: &self.settings,
                options: &self.options,
                index: &self.index,
                client: client.clone(),
                disk: self.disk.clone(),
                observer: &*self.observer,
                metrics: &self.metrics,
                namespaces: &namespaces,
            };
            let began = Instant::now();
            let outcome = actions::perform(&context, action).await;
            is_slow |= action.can_wait() && began.elapsed() > TOO_SLOW;
            match &outcome {
                Ok(ActionOutcome::Done(_)) => step.done += 1,
                Ok(_) => {}
                Err(error) => {
                    step.failed += 1;
                    self.metrics.errors.inc([action.name()]);
                    step.unauthorized |= matches!(error.api(), Some(ApiError::Unauthorized { .. }));
                }
            }
            if self.record_outcome(action, outcome, now) {
                // The other actions would only wait for the same server.
                break;
            }
        }
        self.report_needs_attention();
        if step.failed == 0 {
            #[expect(clippy::disallowed_methods, reason = "the metric is a wall-clock time")]
            let wall = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
            self.metrics.last_success.set(i64::try_from(wall).unwrap_or(i64::MAX));
        }
        Ok(step)
    }

    /// Logs what came of an action, once, and sets its pause. Returns whether the API server is away.
    fn record_outcome(&mut self, action: &Action, outcome: Performed, now: Duration) -> bool {
        let (id, name, subject) = (id(action), action.name(), action.subject());
        let away = outcome.as_ref().err().and_then(ActionError::api).is_some_and(ApiError::leaves_doubt);
        let (needs_attention, reason) = match outcome {
            Ok(ActionOutcome::Done(reason)) => {
                tracing::info!(action = name, subject, reason, "action completed");
                self.pauses.remove(&id);
                return away;
            }
            Ok(ActionOutcome::NotNeeded(reason)) => {
                tracing::debug!(action = name, subject, reason, "action not needed");
                (false, String::new())
            }
            Ok(ActionOutcome::Postponed(reason)) => {
                tracing::debug!(action = name, subject, reason, "action postponed");
                (false, String::new())
            }
            Ok(ActionOutcome::NeedsAttention(reason)) => (true, reason),
            Err(error) => (true, error.to_string()),
        };
        let pause = self.pauses.entry(id.clone()).or_default();
        if needs_attention && pause.logged != reason {
            tracing::warn!(action = name, subject, reason, "action failed; the agent retries it");
        }
        pause.logged = reason;
        pause.tries += 1;
        let longest = if away { LONGEST_AWAY } else { LONGEST_PAUSE };
        pause.due = now + pause_after(&id, pause.tries).min(longest);
        away
    }

    fn forget_pauses(&mut self, actions: &[Action]) {
        let planned: BTreeSet<String> = actions.iter().map(id).collect();
        self.pauses.retain(|id, _| planned.contains(id));
    }

    /// Has everything that waits tried again at the next step: the API server is back.
    pub fn forget_all_pauses(&mut self) {
        self.pauses.clear();
    }

    /// The ranges of the conflist that the plugin reads; they change with the file.
    fn read_ranges(&mut self) {
        if !self.settings.mode.needs_ranges() {
            return;
        }
        let path = self.settings.install().conflist_path();
        let Ok(text) = std::fs::read_to_string(&path) else { return };
        match blocks::sets_of_conflist(&text) {
            Ok(sets) => {
                let nets = sets.iter().flat_map(|set| set.ranges()).map(|range| range.subnet()).collect();
                self.options.shape = self.settings.shape(nets);
                self.options.ranges = sets;
            }
            Err(reason) => {
                tracing::debug!(file = %path.display(), reason, "cannot read the ranges of the conflist")
            }
        }
    }

    fn report_pool(&self) {
        let Some(node) = self.index.cilium_node() else { return };
        for (family, PoolCount { total, free }) in plan::count_pool(node, &self.index.addresses_in_use()) {
            for (state, count) in [("Total", total), ("Free", free)] {
                self.metrics.pool.with([&family.to_string(), state]).set(whole(count));
            }
        }
    }

    fn report_needs_attention(&mut self) {
        let mut counts: BTreeMap<&str, i64> = BTreeMap::new();
        for (id, pause) in &self.pauses {
            let name = id.split(' ').next().unwrap_or_default();
            *counts.entry(name).or_default() += i64::from(!pause.logged.is_empty());
        }
        let needed = counts.iter().filter(|(_, count)| **count > 0).map(|(name, _)| (*name).to_owned());
        self.needed_attention.extend(needed);
        for name in &self.needed_attention {
            let gauge = self.metrics.needs_attention.with([name.as_str()]);
            gauge.set(counts.get(name.as_str()).copied().unwrap_or_default());
        }
    }
}

fn id(action: &Action) -> String {
    format!("{} {}", action.name(), action.subject())
}

/// Twice as long after every try, and a little apart for different actions: a thousand nodes that lost one
/// server must not come back at one moment.
fn pause_after(id: &str, tries: u32) -> Duration {
    let whole = FIRST_PAUSE.saturating_mul(1 << tries.saturating_sub(1).min(9)).min(LONGEST_PAUSE);
    let part = u32::try_from(RandomState::new().hash_one(id) % 1000).unwrap_or_default();
    whole / 2 + whole / 2 * part / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_bound_and_differ() {
        for tries in 1..40 {
            let pause = pause_after("x", tries);
            assert!(pause >= FIRST_PAUSE / 2 && pause <= LONGEST_PAUSE, "{pause:?}");
        }
        assert!(pause_after("x", 30) >= LONGEST_PAUSE / 2);
    }
}
