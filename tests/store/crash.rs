//! A process that ends, or a disk that fills up, at every operation of every verb in every situation.

use std::fs;
use std::os::unix::fs::MetadataExt;

use sticky_ipam::store::RealDisk;

use crate::faulty::{Fault, Faulty};
use crate::sight::{self, Sight};
use crate::stage::{Call, Stage};

/// What stands before, and the verb that is disturbed.
struct Situation {
    name: &'static str,
    prepare: fn(&mut Stage),
    verb: fn() -> Call,
}

fn done(stage: &Stage, calls: &[Call]) {
    for call in calls {
        stage.call(call, RealDisk).unwrap_or_else(|error| panic!("{call:?}: {error}"));
    }
}

fn some_pods(stage: &mut Stage) {
    done(
        stage,
        &[Call::add("other"), Call::add("kept").sticky("away-0"), Call::del("kept").sticky("away-0")],
    );
    stage.pass(5);
}

fn dual(stage: &mut Stage) {
    done(stage, &[Call::add("other").dual(), Call::add("old").dual().sticky("web-0")]);
    stage.pass(5);
}

fn full_of_kept(stage: &mut Stage) {
    for number in 0..5 {
        let (container, pod) = (format!("c{number}"), format!("away-{number}"));
        done(stage, &[Call::add(&container).sticky(&pod), Call::del(&container)]);
        stage.pass(5);
    }
}

fn host_locals(stage: &mut Stage) {
    fs::create_dir_all(stage.root()).unwrap();
    for (name, text) in [
        ("10.1.0.2", "one\r\neth0"),
        ("fd00::2", "one\r\neth0"),
        ("10.1.0.3", "two\r\neth0"),
        ("last_reserved_ip.0", "10.1.0.3"),
        ("lock", ""),
    ] {
        fs::write(stage.root().join(name), text).unwrap();
    }
}

fn rebooted(stage: &mut Stage) {
    dual(stage);
    done(stage, &[Call::add("plain-1").plain("p"), Call::add("more").sticky("db-1")]);
    stage.reboot();
}

fn with_torn_files(stage: &mut Stage) {
    some_pods(stage);
    fs::write(stage.root().join("10.1.0.5"), "{\"addresses\": [").unwrap();
    fs::write(stage.root().join("10.1.0.6"), "").unwrap();
    fs::remove_dir_all(stage.root().join(".sticky")).unwrap();
}

const SITUATIONS: &[Situation] = &[
    Situation { name: "the first ADD of all", prepare: |_| {}, verb: || Call::add("new") },
    Situation { name: "a new pod", prepare: some_pods, verb: || Call::add("new") },
    Situation { name: "dual stack", prepare: dual, verb: || Call::add("new").dual() },
    Situation { name: "a sticky pod's first", prepare: some_pods, verb: || Call::add("new").sticky("web-0") },
    Situation {
        name: "a sticky pod is back",
        prepare: some_pods,
        verb: || Call::add("new").sticky("away-0"),
    },
    Situation { name: "a new container", prepare: dual, verb: || Call::add("new").dual().sticky("web-0") },
    Situation {
        name: "another address is asked for",
        prepare: dual,
        verb: || Call::add("new").dual().sticky("web-0").asking_for("10.1.0.6"),
    },
    Situation { name: "DEL", prepare: some_pods, verb: || Call::del("other") },
    Situation { name: "DEL of a sticky pod", prepare: dual, verb: || Call::del("old").dual() },
    Situation { name: "GC", prepare: dual, verb: || Call::gc(&[]).dual() },
    Situation {
        name: "a kept address is reclaimed",
        prepare: full_of_kept,
        verb: || Call::add("new").setting("onExhaustion", "reclaim"),
    },
    Situation { name: "host-local's directory", prepare: host_locals, verb: || Call::add("new").dual() },
    Situation { name: "after a reboot", prepare: rebooted, verb: || Call::add("new").dual().sticky("web-0") },
    Situation { name: "torn files", prepare: with_torn_files, verb: || Call::add("new") },
];

/// A situation, and what the store holds in it before and after the verb.
struct Case {
    situation: &'static Situation,
    before: Sight,
    after: Sight,
}

impl Situation {
    fn staged(&self) -> Stage {
        let mut stage = Stage::new();
        (self.prepare)(&mut stage);
        stage
    }

    /// What the store holds when it was opened once more, and when the verb was carried out.
    fn case(&'static self) -> Case {
        let stage = self.staged();
        open_once(&stage);
        let before = sight::records(&stage.root());
        let stage = self.staged();
        done(&stage, &[(self.verb)()]);
        Case { situation: self, before, after: sight::records(&stage.root()) }
    }
}

/// Brings the store in order, as whatever verb comes next does.
fn open_once(stage: &Stage) {
    done(stage, &[Call::del("nobody-of-this-name")]);
}

/// Every operation of the verb, until there is none left to disturb.
fn at_every_operation(fault: Fault, check: impl Fn(&Case, &Stage, bool, &str)) {
    for situation in SITUATIONS {
        let case = situation.case();
        for at in 0.. {
            let stage = situation.staged();
            let disk = Faulty::new(fault, at);
            let answer = stage.call(&(situation.verb)(), &disk);
            if !disk.struck() {
                assert!(at > 2, "{}: it was never disturbed", situation.name);
                assert!(answer.is_ok(), "{}: {answer:?}", situation.name);
                break;
            }
            let what = format!("{}, {fault:?} at operation {at}", situation.name);
            check(&case, &stage, answer.is_ok(), &what);
        }
    }
}

/// What must be true of a store whose verb was disturbed, once somebody opened it again.
fn must_be_old_or_new(case: &Case, stage: &Stage, answered: bool, what: &str) {
    let Case { before, after, .. } = case;
    open_once(stage);
    if stage.root().join(".sticky/state").exists() {
        sight::must_agree(&stage.root(), stage.now.boot(), what);
    }
    let seen = sight::records(&stage.root());
    if answered {
        assert_eq!(seen, *after, "{what}: it answered, so it was done");
    }
    let all: std::collections::BTreeSet<_> = before.keys().chain(after.keys()).chain(seen.keys()).collect();
    for address in all {
        let (old, new, now) = (before.get(address), after.get(address), seen.get(address));
        assert!(now == old || now == new, "{what}: {address} was {old:?}, is {now:?}");
    }
}

/// Once more, undisturbed: what a runtime does.
fn must_succeed_again(case: &Case, stage: &Stage, what: &str) {
    let call = (case.situation.verb)();
    let again = stage.call(&call, RealDisk).unwrap_or_else(|error| panic!("{what}: once more: {error}"));
    sight::must_agree(&stage.root(), stage.now.boot(), what);
    let seen = sight::records(&stage.root());
    for address in &again {
        assert_eq!(seen[address]["container"], call.container.as_str(), "{what}");
    }
    let count = |records: &Sight| records.values().filter(|record| record["container"] == "new").count();
    assert_eq!(count(&seen), count(&case.after), "{what}");
    let own = |record: &serde_json::Value| {
        let pod = record["pod"].as_str().map(|name| format!("K8S_POD_NAMESPACE=db;K8S_POD_NAME={name}"));
        pod.is_some() && pod == call.pod
    };
    if call.ip.is_none() {
        for (address, _) in case.before.iter().filter(|(_, record)| own(record)) {
            assert!(again.contains(address), "{what}: the pod has {again:?}, not its own {address}");
        }
    }
    // A record that never got a name may lie there until the next change; one with a name may not.
    let names = fs::metadata(stage.root().join(".sticky/new")).map_or(0, |meta| meta.nlink());
    assert!(names <= 1, "{what}: something is left over");
}

#[test]
fn a_process_that_ends_at_any_operation_leaves_the_old_or_the_new_state() {
    for fault in [Fault::End, Fault::EndHalfWay] {
        at_every_operation(fault, |case, stage, answered, what| {
            must_be_old_or_new(case, stage, answered, what);
            must_succeed_again(case, stage, what);
        });
    }
}

#[test]
fn a_full_disk_at_any_operation_is_reported_and_leaves_nothing_half_done() {
    at_every_operation(Fault::Full, |case, stage, answered, what| {
        must_be_old_or_new(case, stage, answered, what);
        must_succeed_again(case, stage, what);
    });
}

#[test]
fn a_process_that_ends_while_it_takes_a_change_back_loses_nothing() {
    // The disk is full at one operation, and the process ends at a later one.
    for situation in SITUATIONS {
        let case = situation.case();
        for full in 0.. {
            let mut struck = false;
            for end in [1, 2, 4, 7].map(|later| full + later) {
                let stage = situation.staged();
                let disk = Faulty::full_then_end(full, end);
                let answer = stage.call(&(situation.verb)(), &disk);
                struck |= disk.struck();
                if disk.has_ended() {
                    let what = format!("{}, full at {full}, ended at {end}", situation.name);
                    must_be_old_or_new(&case, &stage, answer.is_ok(), &what);
                    must_succeed_again(&case, &stage, &what);
                }
            }
            if !struck {
                break;
            }
        }
    }
}

#[test]
fn a_gc_that_fails_at_one_attachment_goes_on_with_the_others_and_reports_it() {
    for at in 0.. {
        let stage = Stage::new();
        done(&stage, &[Call::add("a"), Call::add("b").sticky("db-0"), Call::add("c")]);
        let disk = Faulty::new(Fault::Full, at);
        let answer = stage.call(&Call::gc(&[]), &disk);
        if !disk.struck() {
            assert!(at > 2, "it was never disturbed");
            break;
        }
        assert!(answer.is_err(), "full at operation {at}: nobody was told");
        let seen = sight::records(&stage.root());
        let attached = seen.values().filter(|record| record["state"] == "attached").count();
        assert!(attached <= 1, "full at operation {at}: {seen:?}");
    }
}
