//! The status of IPPools: how full a pool is, and whether it is used. Must never be a reason to use a pool:
//! only a look at the blocks shows that it may be. A refusal here keeps plugin and agent from the pool.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, Patch};
use serde_json::json;

use crate::alloc::block::TakenRanges;
use crate::cluster::api::client::ApiError;
use crate::cluster::objects::ip_pool::READY;
use crate::cluster::objects::{Condition, IPPool, IPPoolStatus, PoolUse, condition};
use crate::cluster::writer::apply::patch_params;
use crate::controller::context::Context;
use crate::controller::duties::node_blocks::{pools::sticky_fill, view::BlockView};
use crate::policy::node_blocks::{BlockProblem, Fill, Plan};

/// Writes the status of every pool whose status is another one now.
pub(crate) async fn write(context: &Context, seen: &BlockView, plan: &Plan) -> Result<(), ApiError> {
    let kept: TakenRanges = seen.view.kept.iter().map(|address| (*address).into()).collect();
    let known = |(name, pool): (&String, &IPPool)| (name.clone(), pool.clone());
    let pools: Vec<(String, IPPool)> = context.index().pools.iter().map(known).collect();
    for (name, pool) in pools {
        let fill = match pool.spec.purpose {
            PoolUse::NodeBlocks => plan.fill.get(&name).copied(),
            PoolUse::Sticky => Some(sticky_fill(&pool, &kept)),
        };
        let lack_room = plan.problems.iter().filter_map(|problem| match problem {
            BlockProblem::NoRoom { pools, .. } => Some(pools),
            _ => None,
        });
        let full = lack_room.flatten().any(|pool| *pool == name)
            || fill.is_some_and(|fill| fill.total > 0 && fill.allocated >= fill.total);
        let verdict = match seen.refused.iter().find(|refused| refused.name == name) {
            Some(refused) => ("False", refused.reason, refused.why.clone()),
            None if full => {
                ("False", "Full", "everything is allocated; add a range, or another IPPool".to_owned())
            }
            None => ("True", "InUse", "the pool is used".to_owned()),
        };
        let Some(status) = changed(&pool, fill, verdict) else { continue };
        let api: Api<IPPool> = Api::all(context.writer.client());
        let params = patch_params();
        let version = pool.metadata.resource_version;
        let mut body = json!({"metadata": {"resourceVersion": version}, "status": status});
        // A merge patch that leaves a key out keeps its old value.
        body["status"]["allocated"] = json!(status.allocated);
        body["status"]["total"] = json!(status.total);
        let what = format!("patch status of IPPool {name}");
        context.writer.write(&what, api.patch_status(&name, &params, &Patch::Merge(body))).await?;
    }
    Ok(())
}

/// The status as it should be; none if it is.
fn changed(pool: &IPPool, fill: Option<Fill>, verdict: (&str, &str, String)) -> Option<IPPoolStatus> {
    let (status, reason, message) = verdict;
    let before = pool.status.clone().unwrap_or_default();
    let number = |number: u128| i64::try_from(number).unwrap_or(i64::MAX);
    let now = Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default();
    let ready = Condition {
        kind: READY.to_owned(),
        status: status.to_owned(),
        reason: reason.to_owned(),
        message,
        last_transition_time: Time(now),
        observed_generation: pool.metadata.generation,
    };
    let mut conditions = before.conditions.clone();
    condition::set(&mut conditions, ready);
    let after = IPPoolStatus {
        allocated: fill.map(|fill| number(fill.allocated)),
        total: fill.map(|fill| number(fill.total)),
        conditions,
    };
    (after != before).then_some(after)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool(spec: serde_json::Value) -> IPPool {
        IPPool::new("p", serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn a_status_is_written_when_it_changes_and_keeps_its_time_while_it_does_not() {
        let mut pool = pool(json!({"cidrs": ["10.1.0.0/16"], "use": "NodeBlocks"}));
        let fill = |allocated| Some(Fill { allocated, total: 256 });
        let used = |message: &str| ("True", "InUse", message.to_owned());
        let first = changed(&pool, fill(1), used("x")).unwrap();
        assert_eq!((first.allocated, first.total), (Some(1), Some(256)));
        pool.status = Some(first.clone());
        assert_eq!(changed(&pool, fill(1), used("x")), None);
        pool.status.as_mut().unwrap().conditions[0].last_transition_time = Time(Timestamp::UNIX_EPOCH);
        let second = changed(&pool, fill(2), used("x")).unwrap();
        assert_eq!(second.conditions[0].last_transition_time, Time(Timestamp::UNIX_EPOCH));
        let third = changed(&pool, fill(2), ("False", "Full", "y".into())).unwrap();
        assert_ne!(third.conditions[0].last_transition_time, Time(Timestamp::UNIX_EPOCH));
    }
}
