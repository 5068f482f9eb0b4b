//! The conditions of a StickyIP that no pod is attached to: `Releasing` with the time of the release,
//! `ReleaseBlocked` with the cause. Must never be written for an address that is released at once: mass
//! deletion would pay twice for each.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch};
use serde_json::json;

use crate::cluster::objects::condition::{self, Condition};
use crate::cluster::objects::sticky_ip::{RELEASE_BLOCKED, RELEASING};
use crate::cluster::objects::{StickyIP, WorkloadRef};
use crate::cluster::writer::{apply::patch_params, write::Precondition};
use crate::controller::index::objects::sticky_key_of;
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::{context::Context, queue::Key};
use crate::policy::lifetime::recycle::KeepReason;
use crate::policy::selection::facts::TimePoint;

/// A wait that is shorter is over before a person has read of it.
const MIN_SECONDS_TO_REPORT: u64 = 60;
const LONGEST_MESSAGE: usize = 1024;

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PendingRelease {
    /// It is released at this time, by the controller's clock.
    Time { until: TimePoint, reason: &'static str, why: String },
    /// It is not known whether it may be released.
    Doubt { why: String },
}

impl PendingRelease {
    /// What a reason to keep has to say to a person; none if there is nothing that is not seen elsewhere.
    pub(crate) fn of(reason: &KeepReason, workload: &WorkloadRef, now: TimePoint) -> Option<Self> {
        let WorkloadRef { kind, name, .. } = workload;
        let (seconds_left, reason, why) = match reason {
            KeepReason::TtlRunning { seconds_left } => {
                (*seconds_left, "TTLRunning", format!("{kind} {name} does not ask for it"))
            }
            KeepReason::OwnerExists { by, seconds_left } => {
                let why = format!("{kind} {name} is gone, and its owner {by} may create it again");
                (*seconds_left, "OwnerExists", why)
            }
            KeepReason::Attached
            | KeepReason::PodExists
            | KeepReason::Forever
            | KeepReason::WorkloadWantsIt
            | KeepReason::Doubt { .. } => return None,
        };
        let until = TimePoint(now.0.saturating_add_unsigned(seconds_left));
        (seconds_left > MIN_SECONDS_TO_REPORT).then_some(Self::Time { until, reason, why })
    }

    fn condition(&self, generation: Option<i64>, now: Timestamp) -> Condition {
        let (kind, reason, message) = match self {
            Self::Time { until, reason, why } => {
                let until = Timestamp::from_second(until.0).map(|at| at.to_string()).unwrap_or_default();
                let text =
                    format!("{why}; the address is released at {until} unless a pod asks for it before");
                (RELEASING, *reason, text)
            }
            Self::Doubt { why } => {
                let text = format!("the address is kept, because its workload cannot be looked up: {why}");
                (RELEASE_BLOCKED, "WorkloadLookupFailed", text)
            }
        };
        Condition {
            kind: kind.to_owned(),
            status: "True".to_owned(),
            reason: reason.to_owned(),
            message: message[..message.floor_char_boundary(LONGEST_MESSAGE)].to_owned(),
            last_transition_time: Time(now),
            observed_generation: generation,
        }
    }
}

fn is_ours(condition: &Condition) -> bool {
    [RELEASING, RELEASE_BLOCKED].contains(&condition.kind.as_str())
}

/// The conditions as they must be; none if they are so already. Those of others stay.
fn changed(sticky: &StickyIP, waits: Option<&PendingRelease>, now: Timestamp) -> Option<Vec<Condition>> {
    let before = sticky.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default();
    let wanted = waits.map(|waits| waits.condition(sticky.metadata.generation, now));
    let mut after = before.clone();
    after.retain(|one| !is_ours(one) || wanted.as_ref().is_some_and(|wanted| wanted.kind == one.kind));
    if let Some(wanted) = wanted
        && !after.iter().any(|one| one.says_the_same(&wanted))
    {
        condition::set(&mut after, wanted);
    }
    (after != before).then_some(after)
}

/// The StickyIPs among what is due whose conditions are of a release that is no longer looked at.
pub(crate) fn outdated(
    index: &ClusterIndex,
    due: &[Key],
    is_looked_at: impl Fn(&ClusterIndex, &str, &StickyIP) -> bool,
) -> Vec<StickyIP> {
    let named = due.iter().filter(|key| key.kind == Kind::StickyIP).map(|key| &key.name);
    let found = named.filter_map(|name| Some((name, index.stickies.get(name)?)));
    let says = |sticky: &StickyIP| sticky.status.iter().flat_map(|status| &status.conditions).any(is_ours);
    let outdated = found.filter(|(name, sticky)| says(sticky) && !is_looked_at(index, name, sticky));
    outdated.map(|(_, sticky)| sticky.clone()).collect()
}

/// Writes what the release of a StickyIP waits for as its only condition of ours, unless it is so already.
/// What fails is written at the next look.
pub(crate) async fn write_conditions(context: &Context, sticky: &StickyIP, waits: Option<&PendingRelease>) {
    let now = Timestamp::from_second(context.now().0).unwrap_or_default();
    let Some(conditions) = changed(sticky, waits, now) else { return };
    let key = sticky_key_of(sticky);
    let api: Api<StickyIP> = Api::namespaced(context.writer.client(), &key.namespace);
    let at = Precondition::of(sticky).metadata();
    let patch = Patch::Merge(json!({"metadata": at, "status": {"conditions": conditions}}));
    let what = format!("patch the conditions of StickyIP {key}");
    let params = patch_params();
    if let Err(error) = context.writer.write(&what, api.patch_status(&key.name, &params, &patch)).await {
        tracing::warn!(sticky = %key, %error, "cannot write the conditions");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::controller::index::fixture::sticky;
    use crate::runtime::cache::CacheEvent;

    fn set() -> WorkloadRef {
        WorkloadRef { kind: "StatefulSet".into(), name: "db".into(), ..WorkloadRef::default() }
    }

    fn waits(seconds_left: u64, now: i64) -> Option<PendingRelease> {
        PendingRelease::of(&KeepReason::TtlRunning { seconds_left }, &set(), TimePoint(now))
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    #[test]
    fn only_a_wait_that_lasts_is_written_and_its_end_is_the_same_at_every_check() {
        assert_eq!(waits(60, 0), None);
        assert_eq!(waits(100, 0), waits(61, 39));
        assert_eq!(PendingRelease::of(&KeepReason::WorkloadWantsIt, &set(), TimePoint(0)), None);
        let owner = KeepReason::OwnerExists { by: "Cluster c".into(), seconds_left: 100 };
        let Some(PendingRelease::Time { why, .. }) = PendingRelease::of(&owner, &set(), TimePoint(0)) else {
            panic!("nothing")
        };
        assert!(why.contains("StatefulSet db is gone") && why.contains("Cluster c"), "{why}");
    }

    #[test]
    fn conditions_are_written_when_they_change_and_others_stay() {
        let (_, mut object) = sticky("db-0", "10.0.0.1", None);
        let conflict = Condition { kind: "Conflict".into(), ..waits(100, 0).unwrap().condition(None, at(0)) };
        object.status.get_or_insert_default().conditions = vec![conflict.clone()];
        assert_eq!(changed(&object, None, at(5)), None);
        let first = changed(&object, waits(100, 0).as_ref(), at(5)).unwrap();
        assert_eq!((first[0].clone(), first[1].kind.as_str()), (conflict.clone(), RELEASING));
        object.status.as_mut().unwrap().conditions = first;
        assert_eq!(changed(&object, waits(70, 30).as_ref(), at(30)), None, "it says so already");
        let doubt = PendingRelease::Doubt { why: "forbidden".into() };
        let second = changed(&object, Some(&doubt), at(40)).unwrap();
        assert_eq!(
            second.iter().map(|one| one.kind.as_str()).collect::<Vec<_>>(),
            ["Conflict", RELEASE_BLOCKED]
        );
        assert!(second[1].message.contains("forbidden") && second[1].last_transition_time == Time(at(40)));
        object.status.as_mut().unwrap().conditions = second;
        assert_eq!(changed(&object, None, at(50)), Some(vec![conflict]));
    }

    #[test]
    fn what_is_no_longer_looked_at_is_found_by_what_it_still_says() {
        let mut index = ClusterIndex::default();
        let (name, mut object) = sticky("db-0", "10.0.0.1", None);
        object.status.get_or_insert_default().conditions =
            vec![waits(100, 0).unwrap().condition(None, at(0))];
        index.stickies.apply(CacheEvent::Applied((name.clone(), object)));
        let due = [Key::new(Kind::StickyIP, name)];
        assert_eq!(outdated(&index, &due, |_, _, _| false).len(), 1);
        assert!(outdated(&index, &due, |_, _, _| true).is_empty());
    }
}
