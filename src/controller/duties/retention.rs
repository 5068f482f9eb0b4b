//! How long each address is kept: by the pod's annotation, else its namespace's, else the flags. Written to
//! the StickyIP. Must never change what a person wrote there: only what is as it was made, or as this duty
//! left it. Plugin and agent write what the pod asks for when they create a StickyIP, so that it counts also
//! while no controller runs.

use std::collections::BTreeMap;
use std::time::Duration;

use kube::ResourceExt;
use serde_json::json;

use crate::cluster::events;
use crate::cluster::objects::sticky_ip::{RETENTION_SET, StickyIP, retention_set};
use crate::controller::duties::{record_event, record_warning};
use crate::controller::duty::{Duty, RoundResult};
use crate::controller::index::objects::{IndexedPod, sticky_key_of};
use crate::controller::index::{ClusterIndex, Kind};
use crate::controller::{context::Context, queue::Key};
use crate::policy::PolicyError;
use crate::policy::lifetime::retention::{RETENTION, Retention, from_annotation};

const RETRY_AFTER_FAILURE: Duration = Duration::from_secs(5);
/// The source of a retention that no annotation sets.
const FLAGS: &str = "the controller's flags";

/// It remembers nothing.
#[derive(Debug, Default)]
pub struct RetentionSync {}

/// The retention that a StickyIP must have, and its source; none if it has it.
/// Errors: the annotation cannot be read.
fn wanted(
    sticky: &StickyIP,
    pod: Option<&IndexedPod>,
    index: &ClusterIndex,
    default: Retention,
) -> Result<Option<(Retention, &'static str)>, PolicyError> {
    // Without its pod there is no annotation to read: it stays as it is.
    let Some(pod) = pod else { return Ok(None) };
    let of_namespace = index.namespaces.get(&pod.facts.namespace).and_then(|all| all.get(RETENTION));
    let (wanted, by) = match (pod.facts.annotations.get(RETENTION), of_namespace) {
        (Some(text), _) => (from_annotation(RETENTION, text, default)?, "its pod's annotation"),
        (None, Some(text)) => (from_annotation(RETENTION, text, default)?, "its namespace's annotation"),
        (None, None) => (default, FLAGS),
    };
    let now = sticky.spec.retention;
    let set = sticky.annotations().get(RETENTION_SET);
    let ours = set.and_then(|text| serde_json::from_str::<Retention>(text).ok());
    let may_change = ours.map_or(now == Retention::default(), |ours| ours == now);
    Ok((may_change && now != wanted).then_some((wanted, by)))
}

/// The StickyIPs that what is due concerns, each once: a pod and its StickyIP are often due together.
fn concerned<'a>(index: &'a ClusterIndex, due: &[Key]) -> BTreeMap<String, &'a StickyIP> {
    let mut all = BTreeMap::new();
    for key in due {
        match key.kind {
            Kind::StickyIP => all.extend(index.stickies.get(&key.name).map(|one| (key.name.clone(), one))),
            // Also of a pod that says nothing: it may have said something before, or have come later than its
            // StickyIP.
            Kind::Pod => {
                let found = index.pods.get(&key.name).and_then(|pod| index.sticky_of(pod));
                all.extend(found.map(|sticky| (sticky_key_of(sticky).to_string(), sticky)));
            }
            _ => {
                let prefix = format!("{}/", key.name);
                let of_namespace = index.stickies.with_prefix(&prefix);
                all.extend(of_namespace.map(|(name, sticky)| (name.clone(), sticky)));
            }
        }
    }
    all
}

impl Duty for RetentionSync {
    const NAME: &'static str = "retention";
    const TRIGGERS: &'static [Kind] = &[Kind::StickyIP, Kind::Pod, Kind::Namespace];
    const BATCH_DELAY: Duration = Duration::from_millis(50);

    async fn round(&mut self, context: &Context, due: Vec<Key>) -> RoundResult {
        let default = context.settings.default_retention();
        let (mut todo, mut bad) = (Vec::new(), Vec::new());
        {
            let index = context.index();
            for sticky in concerned(&index, &due).into_values() {
                let pod = index.pod_of(sticky);
                match (wanted(sticky, pod, &index, default), pod) {
                    (Ok(Some(wanted)), _) => todo.push((sticky.clone(), wanted)),
                    (Err(why), Some(pod)) => bad.push((pod.facts.clone(), why)),
                    _ => {}
                }
            }
        }
        for (facts, why) in bad {
            let about = events::pod(&facts.namespace, &facts.name, &facts.uid);
            let message =
                format!("its retention annotation cannot be read, so the address keeps its retention: {why}");
            record_warning(context, about, "InvalidAnnotation", message).await;
        }
        let mut done = RoundResult::default();
        for (sticky, (wanted, by)) in todo {
            let key = sticky_key_of(&sticky);
            // A merge patch: times that are no more must be named to go. Taken apart, so that all are named.
            let Retention { keep, ttl_seconds, on_scale_down, scale_down_ttl_seconds } = wanted;
            let spec = json!({"keep": keep, "ttlSeconds": ttl_seconds,
                              "onScaleDown": on_scale_down, "scaleDownTtlSeconds": scale_down_ttl_seconds});
            let set = retention_set(wanted);
            let patch = json!({"metadata": {"annotations": set}, "spec": {"retention": spec}});
            match context.writer.patch_sticky("the retention", &sticky, patch).await {
                Ok(Some(_)) => {
                    tracing::info!(sticky = %key, %wanted, by, "retention written");
                    if by == FLAGS {
                        // Mostly the same for every StickyIP, in numbers; the flags can be read.
                        continue;
                    }
                    // With the old value: an event with the same message is sent once an hour.
                    let message = format!("{wanted}: by {by}, instead of: {}", sticky.spec.retention);
                    record_event(context, events::sticky_ip(&sticky), "RetentionSet", message).await;
                }
                // It changed: the watch shows that.
                Ok(None) => {}
                Err(error) => {
                    tracing::warn!(sticky = %key, %error, "cannot write the retention; trying again");
                    done.retry(Key::new(Kind::StickyIP, key.to_string()), RETRY_AFTER_FAILURE);
                }
            }
        }
        done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::lifetime::retention::Keep;
    use crate::runtime::cache::CacheEvent;

    fn sticky(retention: serde_json::Value, set: Option<Retention>) -> StickyIP {
        let annotations = set.map(retention_set);
        serde_json::from_value(json!({
            "metadata": {"name": "db-0", "namespace": "db", "annotations": annotations},
            "spec": {"addresses": ["10.0.0.1"], "claimant": {"kind": "Pod"}, "retention": retention,
                     "workload": {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": "db"}}}))
        .unwrap()
    }

    fn pod(annotation: Option<&str>) -> IndexedPod {
        let annotations = annotation.map_or(json!({}), |text| json!({RETENTION: text}));
        let pod =
            json!({"metadata": {"name": "db-0", "namespace": "db", "uid": "u", "annotations": annotations}});
        IndexedPod::from(serde_json::from_value::<k8s_openapi::api::core::v1::Pod>(pod).unwrap())
    }

    fn ttl(seconds: u32) -> Retention {
        Retention { keep: Keep::Ttl, ttl_seconds: Some(seconds), ..Retention::default() }
    }

    #[test]
    fn the_pods_annotation_counts_before_its_namespaces_and_that_before_the_flags() {
        let mut index = ClusterIndex::default();
        let plain = sticky(json!({}), None);
        let ask = |index: &ClusterIndex, annotation: Option<&str>| {
            wanted(&plain, Some(&pod(annotation)), index, ttl(60)).unwrap()
        };
        assert_eq!(ask(&index, None), Some((ttl(60), FLAGS)));
        let of_namespace = [(RETENTION.to_owned(), "Forever".to_owned())].into();
        index.namespaces.apply(CacheEvent::Applied(("db".into(), of_namespace)));
        let (of_namespace, by) = ask(&index, None).unwrap();
        assert_eq!((of_namespace.keep, by), (Keep::Forever, "its namespace's annotation"));
        assert_eq!(ask(&index, Some("2m")), Some((ttl(120), "its pod's annotation")));
        assert_eq!(ask(&index, Some("WithWorkload")), None, "it has it already");
        assert!(
            wanted(&plain, Some(&pod(Some("soon"))), &index, ttl(60))
                .unwrap_err()
                .to_string()
                .contains("soon")
        );
        assert_eq!(wanted(&plain, None, &index, ttl(60)).unwrap(), None, "there is no pod to ask");
    }

    #[test]
    fn a_pod_without_an_annotation_still_concerns_its_stickyip_which_is_checked_once() {
        let mut index = ClusterIndex::default();
        index.stickies.apply(CacheEvent::Applied(("db/db-0".into(), sticky(json!({}), None))));
        index.apply_pod(CacheEvent::Applied(("db/db-0".into(), pod(None))));
        let names = |due: &[Key]| concerned(&index, due).into_keys().collect::<Vec<_>>();
        assert_eq!(names(&[Key::new(Kind::Pod, "db/db-0")]), ["db/db-0"]);
        let all = [(Kind::Pod, "db/db-0"), (Kind::StickyIP, "db/db-0"), (Kind::Namespace, "db")];
        assert_eq!(names(&all.map(|(kind, name)| Key::new(kind, name))), ["db/db-0"]);
        let others = [(Kind::Pod, "db/gone"), (Kind::Namespace, "d")];
        assert!(names(&others.map(|(kind, name)| Key::new(kind, name))).is_empty());
    }

    #[test]
    fn what_was_written_by_hand_stays_and_what_was_written_here_may_change() {
        let index = ClusterIndex::default();
        let by_hand = sticky(json!({"keep": "Forever"}), None);
        assert_eq!(wanted(&by_hand, Some(&pod(None)), &index, ttl(60)).unwrap(), None);
        let ours = sticky(json!(ttl(30)), Some(ttl(30)));
        assert_eq!(wanted(&ours, Some(&pod(None)), &index, ttl(60)).unwrap().unwrap().0, ttl(60));
        for by_hand in [json!(ttl(31)), json!({})] {
            let changed_by_hand = sticky(by_hand, Some(ttl(30)));
            assert_eq!(wanted(&changed_by_hand, Some(&pod(None)), &index, ttl(60)).unwrap(), None);
        }
    }
}
