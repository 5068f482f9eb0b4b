//! The power goes at any moment: what was answered for a sticky pod is there, what was dynamic is free, and
//! nothing torn is trusted. And no answer comes before what it says is on stable storage.

use std::collections::BTreeMap;
use std::net::IpAddr;

use sticky_ipam::store::RealDisk;

use crate::recorder::{Leaves, Recorder};
use crate::sight;
use crate::stage::{Call, Stage};

/// What runs until the power goes. Pods keep their addresses throughout, so whatever was answered must come
/// back.
fn story() -> Vec<Call> {
    vec![
        Call::add("a").sticky("db-0").dual(),
        Call::add("b").plain("x").dual(),
        Call::add("c").sticky("db-1").dual(),
        Call::del("a").dual(),
        Call::add("d").sticky("db-0").dual(),
        Call::add("e").sticky("db-0").dual(),
        Call::del("d").dual(),
        Call::del("b").dual(),
        Call::add("f").plain("y").dual(),
        Call::gc(&["e"]).dual(),
        Call::add("g").sticky("db-1").dual(),
    ]
}

/// How much is left, from nothing that was not synced to everything: names here, other names, bytes.
fn all_leaves() -> impl Iterator<Item = Leaves> {
    let shares = [(0, 0, 10), (0, 10, 0), (4, 0, 5), (4, 10, 10), (10, 0, 0), (10, 0, 10), (10, 10, 5)];
    shares.into_iter().map(|(names, other_names, bytes)| Leaves { names, other_names, bytes })
}

/// The machine after a loss of power in this state, booted again.
fn rebooted(stage: &Stage, recorder: &Recorder, state: usize, leaves: Leaves) -> Stage {
    let mut after = Stage::new();
    recorder.leave(state, leaves, after.base());
    after.now = stage.now.clone();
    after.reboot();
    after
}

#[test]
fn what_was_answered_for_a_sticky_pod_survives_a_loss_of_power_at_any_operation() {
    let mut stage = Stage::new();
    let recorder = Recorder::new(stage.base());
    // By pod: the states in which the answer had been given, and the answer.
    let mut answered: Vec<(usize, String, Vec<IpAddr>)> = Vec::new();
    for call in story() {
        stage.pass(5);
        let addresses = stage.call(&call, &recorder).unwrap();
        if let (Some(pod), "ADD") = (&call.pod, call.verb) {
            answered.push((recorder.states() - 1, pod.clone(), addresses));
        }
    }
    for state in 0..recorder.states() {
        for leaves in all_leaves() {
            let after = rebooted(&stage, &recorder, state, leaves);
            let what = format!("state {state}, {leaves:?}");
            after
                .call(&Call::add("probe").dual(), RealDisk)
                .unwrap_or_else(|error| panic!("{what}: {error}"));
            sight::must_agree(&after.root(), after.now.boot(), &what);
            let promised: BTreeMap<&String, &Vec<IpAddr>> = answered
                .iter()
                .filter(|(since, pod, _)| *since <= state && pod.contains("=db;"))
                .map(|(_, pod, addresses)| (pod, addresses))
                .collect();
            for (pod, addresses) in promised {
                let call =
                    Call { pod: Some(pod.clone()), ..Call::add(&format!("after-{}", addresses[0])).dual() };
                let again =
                    after.call(&call, RealDisk).unwrap_or_else(|error| panic!("{what}: {pod}: {error}"));
                assert_eq!(again, *addresses, "{what}: {pod}");
            }
            sight::must_agree(&after.root(), after.now.boot(), &what);
        }
    }
}

#[test]
fn a_pin_that_lost_power_half_way_leaves_the_old_or_the_new_address_never_both() {
    let mut stage = Stage::new();
    let recorder = Recorder::new(stage.base());
    let old = stage.call(&Call::add("a").sticky("db-0").dual(), &recorder).unwrap();
    let answered = recorder.states() - 1;
    stage.pass(5);
    let pinned = Call::add("b").sticky("db-0").dual().asking_for("10.1.0.6");
    let new = stage.call(&pinned, &recorder).unwrap();
    for state in answered..recorder.states() {
        for leaves in all_leaves() {
            let after = rebooted(&stage, &recorder, state, leaves);
            let what = format!("state {state}, {leaves:?}");
            after.call(&Call::del("nobody"), RealDisk).unwrap();
            sight::must_agree(&after.root(), after.now.boot(), &what);
            let held: Vec<IpAddr> = sight::records(&after.root()).into_keys().collect();
            assert!(held == old || held == new, "{what}: {held:?}");
        }
    }
}

#[test]
fn no_answer_comes_before_the_record_and_its_directories_are_synced() {
    let mut stage = Stage::new();
    let recorder = Recorder::new(stage.base());
    for call in story() {
        stage.pass(5);
        let addresses = stage.call(&call, &recorder).unwrap();
        // Once more, as a runtime does that did not hear the answer.
        let again = stage.call(&call, &recorder).unwrap();
        assert_eq!(addresses, again);
        for address in addresses {
            let file = stage.root().join(address.to_string());
            assert!(recorder.is_safe(&file), "{call:?}: {address} was answered and may be lost");
        }
    }
}
