//! The tracker of CiliumEndpoints, step by step.

use super::*;

fn set(texts: &[&str]) -> BTreeSet<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn running() -> EndpointView {
    EndpointView {
        pod: Some("p".into()),
        running: true,
        pod_addresses: set(&["10.0.0.1"]),
        ..EndpointView::default()
    }
}

fn endpoint(addresses: &[&str]) -> Option<EndpointFacts> {
    Some(EndpointFacts {
        uid: "e".into(),
        deleting: false,
        held: true,
        made_for: None,
        addresses: set(addresses),
    })
}

/// Looks, and carries everything out.
fn act(
    tracker: &mut EndpointTracker,
    name: &str,
    view: &EndpointView,
    now: TimePoint,
) -> Vec<EndpointAction> {
    let actions = tracker.look(name, view, now);
    for action in &actions {
        tracker.done(name, action, now);
    }
    actions
}

#[test]
fn what_came_to_nothing_does_not_count() {
    let mut tracker = EndpointTracker::new(EndpointTimeouts { nudges: 1, ..EndpointTimeouts::default() });
    let first = EndpointAction::Nudge { uid: "p".into(), number: 1 };
    assert_eq!(tracker.look("db/a", &running(), TimePoint(0)), []);
    for time in [30, 31, 90] {
        assert_eq!(tracker.look("db/a", &running(), TimePoint(time)), std::slice::from_ref(&first));
    }
    tracker.done("db/a", &first, TimePoint(90));
    assert_eq!(tracker.look("db/a", &running(), TimePoint(91)), []);
    assert_eq!(tracker.next_look("db/a", TimePoint(91)), None);
}

#[test]
fn a_running_pod_without_an_endpoint_is_nudged_a_few_times_with_pauses() {
    let mut tracker = EndpointTracker::new(EndpointTimeouts::default());
    let mut at = |time| act(&mut tracker, "db/a", &running(), TimePoint(time)).len();
    assert_eq!([at(0), at(29), at(30), at(31), at(59), at(60), at(90), at(500)], [0, 0, 1, 0, 0, 1, 1, 0]);
    assert_eq!(tracker.next_look("db/a", TimePoint(500)), None);
    let there = EndpointView { endpoint: endpoint(&["10.0.0.1"]), ..running() };
    assert_eq!(act(&mut tracker, "db/a", &there, TimePoint(501)), []);
    assert!(tracker.seen.is_empty(), "what is well is not remembered");
    // Another pod of the name starts again.
    let another = EndpointView { pod: Some("q".into()), ..running() };
    assert_eq!(act(&mut tracker, "db/a", &another, TimePoint(600)), []);
    assert_eq!(tracker.next_look("db/a", TimePoint(610)), Some(20));
}

#[test]
fn an_endpoint_whose_deletion_hangs_is_freed_by_its_uid_after_the_operators_time() {
    let mut tracker =
        EndpointTracker::new(EndpointTimeouts { terminating: 1800, ..EndpointTimeouts::default() });
    let hanging = |uid: &str| EndpointView {
        endpoint: Some(EndpointFacts { uid: uid.into(), deleting: true, ..endpoint(&[]).unwrap() }),
        ..EndpointView::default()
    };
    assert_eq!(act(&mut tracker, "db/a", &hanging("e"), TimePoint(0)), []);
    assert_eq!(act(&mut tracker, "db/a", &hanging("e"), TimePoint(1799)), []);
    assert_eq!(
        act(&mut tracker, "db/a", &hanging("e"), TimePoint(1800)),
        [EndpointAction::RemoveFinalizers { uid: "e".into() }]
    );
    // It may not have worked: again, but not at once.
    assert_eq!(tracker.next_look("db/a", TimePoint(1801)), Some(59));
    assert_eq!(act(&mut tracker, "db/a", &hanging("e"), TimePoint(1859)), []);
    assert_eq!(act(&mut tracker, "db/a", &hanging("e"), TimePoint(1860)).len(), 1);
    assert_eq!(act(&mut tracker, "db/a", &hanging("f"), TimePoint(1862)), [], "another one has its own time");
    // Nothing holds it: it goes by itself.
    let mut going = hanging("g");
    going.endpoint.as_mut().unwrap().held = false;
    assert_eq!(act(&mut tracker, "db/b", &going, TimePoint(0)), []);
    assert_eq!(act(&mut tracker, "db/b", &going, TimePoint(9999)), []);
}

#[test]
fn an_endpoint_of_an_earlier_pod_of_the_name_is_removed_and_not_reported() {
    let mut tracker = EndpointTracker::new(EndpointTimeouts::default());
    let made_for = |pod: &str| {
        let mut view = EndpointView { endpoint: endpoint(&["10.0.0.2"]), ..running() };
        view.endpoint.as_mut().unwrap().made_for = Some(pod.into());
        view
    };
    assert_eq!(act(&mut tracker, "db/a", &made_for("old"), TimePoint(0)), []);
    assert_eq!(
        act(&mut tracker, "db/a", &made_for("old"), TimePoint(30)),
        [EndpointAction::Remove { uid: "e".into() }]
    );
    assert_eq!(act(&mut tracker, "db/a", &made_for("old"), TimePoint(31)), []);
    assert_eq!(
        act(&mut tracker, "db/a", &made_for("p"), TimePoint(32)),
        [],
        "its own, which disagrees since now"
    );
    let gone = EndpointView { pod: None, running: false, ..made_for("old") };
    assert_eq!(
        act(&mut tracker, "db/b", &gone, TimePoint(99)),
        [],
        "Cilium's operator collects those without a pod"
    );
    assert_eq!(act(&mut tracker, "db/b", &gone, TimePoint(999)), []);
}

#[test]
fn each_disagreement_is_reported_once_after_a_while_and_again_when_it_changes() {
    let mut tracker = EndpointTracker::new(EndpointTimeouts::default());
    let wrong = |text: &str| EndpointView { endpoint: endpoint(&[text]), ..running() };
    assert_eq!(act(&mut tracker, "db/a", &wrong("10.0.0.2"), TimePoint(0)), []);
    let reported = act(&mut tracker, "db/a", &wrong("10.0.0.2"), TimePoint(30));
    assert!(
        matches!(&reported[..], [EndpointAction::Report(what)] if what.reason() == "EndpointDisagreesWithPod"),
        "{reported:?}"
    );
    assert_eq!(act(&mut tracker, "db/a", &wrong("10.0.0.2"), TimePoint(99)), []);
    assert_eq!(act(&mut tracker, "db/a", &wrong("10.0.0.3"), TimePoint(100)), []);
    assert_eq!(act(&mut tracker, "db/a", &wrong("10.0.0.3"), TimePoint(130)).len(), 1);
}

#[test]
fn a_sticky_pods_endpoint_with_none_of_its_addresses_is_replaced_late_and_rarely() {
    let mut tracker = EndpointTracker::new(EndpointTimeouts::default());
    let made_for = |pod: &str, addresses: &[&str]| {
        let mut view =
            EndpointView { bound: Some(set(&["10.0.0.1"])), endpoint: endpoint(addresses), ..running() };
        view.endpoint.as_mut().unwrap().made_for = Some(pod.into());
        view
    };
    let wrong = made_for("p", &["10.0.0.2"]);
    let replace = EndpointAction::Replace { uid: "e".into(), pod: "p".into(), addresses: set(&["10.0.0.1"]) };
    assert_eq!(act(&mut tracker, "db/a", &wrong, TimePoint(0)), []);
    assert_eq!(act(&mut tracker, "db/a", &wrong, TimePoint(30)).len(), 1, "first it is reported");
    assert_eq!(tracker.next_look("db/a", TimePoint(31)), Some(89));
    assert_eq!(act(&mut tracker, "db/a", &wrong, TimePoint(120)), std::slice::from_ref(&replace));
    // Gone, and then written wrong again by another program: no fight.
    let gone = EndpointView { endpoint: None, ..wrong.clone() };
    act(&mut tracker, "db/a", &gone, TimePoint(121));
    let mut again = wrong.clone();
    again.endpoint.as_mut().unwrap().uid = "f".into();
    let replaces = |actions: Vec<EndpointAction>| {
        actions.iter().any(|action| matches!(action, EndpointAction::Replace { .. }))
    };
    assert!(!replaces(act(&mut tracker, "db/a", &again, TimePoint(130))));
    assert!(!replaces(act(
        &mut tracker,
        "db/a",
        &again,
        TimePoint(120 + REPLACE_INTERVAL_SECONDS as i64 - 1)
    )));
    assert!(replaces(act(&mut tracker, "db/a", &again, TimePoint(120 + REPLACE_INTERVAL_SECONDS as i64))));
    // What cannot be judged from here is reported only.
    let mut shares = made_for("p", &["10.0.0.1", "fd00::9"]);
    shares.pod_addresses = set(&["10.0.0.1", "fd00::1"]);
    let not_sticky = EndpointView { bound: None, ..wrong.clone() };
    let elsewhere = EndpointView { bound: Some(set(&["10.0.0.7"])), ..wrong.clone() };
    let mut nobodys = wrong.clone();
    nobodys.endpoint.as_mut().unwrap().made_for = None;
    for view in [shares, not_sticky, elsewhere, nobodys] {
        let mut tracker = EndpointTracker::new(EndpointTimeouts::default());
        assert_eq!(act(&mut tracker, "db/b", &view, TimePoint(0)), []);
        let reported = act(&mut tracker, "db/b", &view, TimePoint(9999));
        assert!(!replaces(reported.clone()) && !reported.is_empty(), "{reported:?}");
    }
}

#[test]
fn a_sticky_pod_with_a_foreign_address_or_without_its_entry_is_reported() {
    let reasons = |view: &EndpointView| -> Vec<&'static str> {
        let mut tracker = EndpointTracker::new(EndpointTimeouts {
            disagreeing: 0,
            missing: 999,
            ..EndpointTimeouts::default()
        });
        let reported = act(&mut tracker, "db/a", view, TimePoint(0));
        reported
            .iter()
            .filter_map(
                |action| if let EndpointAction::Report(what) = action { Some(what.reason()) } else { None },
            )
            .collect()
    };
    let bound = |text: &str, pooled: &[&str]| EndpointView {
        bound: Some(set(&[text])),
        pooled: Some(set(pooled)),
        ..running()
    };
    assert_eq!(reasons(&bound("10.0.0.1", &["10.0.0.1"])), [""; 0]);
    assert_eq!(reasons(&bound("10.0.0.9", &["10.0.0.9"])), ["PodDisagreesWithStickyIP"]);
    assert_eq!(reasons(&bound("10.0.0.1", &[])), ["PoolLacksStickyIP"]);
    // A second family that no claimant keeps, and a pod that shows nothing yet.
    let mut dual = bound("10.0.0.1", &["10.0.0.1"]);
    dual.pod_addresses = set(&["10.0.0.1", "fd00::1"]);
    assert_eq!(reasons(&dual), [""; 0]);
    let mut young = bound("10.0.0.9", &[]);
    young.pod_addresses.clear();
    assert_eq!(reasons(&young), [""; 0]);
}
