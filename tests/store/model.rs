//! A model of the store, small enough to be seen to be right, against the real one: random sequences of
//! verbs, time, reboots and hands that remove files.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::time::{Duration, SystemTime};

use proptest::prelude::*;
use serde_json::Value;
use sticky_ipam::store::RealDisk;

use crate::sight;
use crate::stage::{Call, Stage};

/// How long addresses are kept.
const RETENTION: u64 = 3600;

#[derive(Clone, Debug)]
enum Step {
    /// A container of a pod; the first pods are sticky, the others are not.
    Add {
        pod: usize,
        container: usize,
        asks: Option<u8>,
    },
    Del {
        container: usize,
    },
    Gc {
        valid: Vec<usize>,
    },
    Pass {
        seconds: u64,
    },
    Reboot,
    RemoveByHand {
        last: u8,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let asks = proptest::option::weighted(0.25, 1u8..8);
    prop_oneof![
        6 => (0usize..6, 0usize..8, asks).prop_map(|(pod, container, asks)| Step::Add { pod, container, asks }),
        4 => (0usize..8).prop_map(|container| Step::Del { container }),
        1 => proptest::collection::vec(0usize..8, 0..8).prop_map(|valid| Step::Gc { valid }),
        2 => prop_oneof![Just(1u64), Just(1800), Just(RETENTION + 1)].prop_map(|seconds| Step::Pass { seconds }),
        1 => Just(Step::Reboot),
        1 => (2u8..7).prop_map(|last| Step::RemoveByHand { last }),
    ]
}

/// Who has an address, or for whom it is kept and since when.
#[derive(Clone, Debug, PartialEq)]
struct Held {
    container: String,
    attached: bool,
    sticky: Option<usize>,
    since: u64,
    /// Not by a DEL, but because a boot found it attached: each boot finds that anew, and its time begins
    /// again.
    by_boot: bool,
}

impl Held {
    fn has_expired(&self, now: u64) -> bool {
        self.sticky.is_some() && !self.attached && now - self.since > RETENTION
    }
}

#[derive(Default)]
struct Model(BTreeMap<IpAddr, Held>);

impl Model {
    fn of_container(&self, container: &str) -> Option<IpAddr> {
        let found = self.0.iter().find(|(_, held)| held.attached && held.container == container);
        found.map(|(address, _)| *address)
    }

    fn of_pod(&self, pod: usize) -> Option<IpAddr> {
        self.0.iter().find(|(_, held)| held.sticky == Some(pod)).map(|(address, _)| *address)
    }

    /// Ends an attachment: a sticky pod's address is kept, any other is free.
    fn end(&mut self, address: IpAddr, now: u64) {
        if let Some(held) = self.0.get_mut(&address) {
            *held = Held { attached: false, since: now, ..held.clone() };
            if held.sticky.is_none() {
                self.0.remove(&address);
            }
        }
    }

    /// Which addresses an ADD may answer with; none if it must fail.
    fn may_get(&self, pod: usize, container: &str, asks: Option<IpAddr>, now: u64) -> Vec<IpAddr> {
        let sticky = (pod < 3).then_some(pod);
        let all: Vec<IpAddr> = (2..7).map(address).collect();
        if let Some(has) = self.of_container(container) {
            return if asks.is_none_or(|asks| asks == has) { vec![has] } else { Vec::new() };
        }
        if let Some(asks) = asks {
            let free = self
                .0
                .get(&asks)
                .is_none_or(|held| held.has_expired(now) || (sticky.is_some() && held.sticky == sticky));
            return if free && all.contains(&asks) { vec![asks] } else { Vec::new() };
        }
        if let Some(own) = sticky.and_then(|pod| self.of_pod(pod)) {
            return vec![own];
        }
        let free: Vec<IpAddr> = all.iter().filter(|ip| !self.0.contains_key(ip)).copied().collect();
        if free.is_empty() {
            return all.into_iter().filter(|ip| self.0[ip].has_expired(now)).collect();
        }
        free
    }
}

fn address(last: u8) -> IpAddr {
    IpAddr::from([10, 1, 0, last])
}

/// The store in the model's words. A boot makes all attachments of earlier ones end.
fn seen(stage: &Stage) -> BTreeMap<IpAddr, (String, bool, bool)> {
    let told = |record: Value| {
        let attached = record["state"] == "attached" && record["since"]["boot"] == stage.now.boot();
        (record["container"].as_str().unwrap().to_owned(), attached, record.get("retention").is_some())
    };
    sight::records(&stage.root()).into_iter().map(|(address, record)| (address, told(record))).collect()
}

fn run(steps: Vec<Step>) -> Result<(), TestCaseError> {
    let mut stage = Stage::new();
    let mut model = Model::default();
    for step in steps {
        let now = stage.now.wall();
        match &step {
            Step::Add { pod, container, asks } => {
                let (name, id) = (format!("p-{pod}"), format!("c{container}"));
                let call = Call::add(&id);
                let call = if *pod < 3 { call.sticky(&name) } else { call.plain(&name) };
                let asks = asks.map(address);
                let call = match asks {
                    Some(asks) => call.asking_for(&asks.to_string()),
                    None => call,
                };
                let may = model.may_get(*pod, &id, asks, now);
                match stage.call(&call, RealDisk) {
                    Ok(got) => {
                        prop_assert!(may.contains(&got[0]), "{:?}: got {:?}, may get {:?}", step, got, may);
                        if model.of_container(&id).is_none() {
                            let sticky = (*pod < 3).then_some(*pod);
                            if let Some(own) = sticky.and_then(|pod| model.of_pod(pod)) {
                                model.0.remove(&own);
                            }
                            model.0.insert(
                                got[0],
                                Held { container: id, attached: true, sticky, since: now, by_boot: false },
                            );
                        }
                    }
                    Err(error) => prop_assert!(may.is_empty(), "{:?}: {}, may get {:?}", step, error, may),
                }
            }
            Step::Del { container } => {
                let id = format!("c{container}");
                stage.call(&Call::del(&id), RealDisk).unwrap();
                if let Some(address) = model.of_container(&id) {
                    model.end(address, now);
                }
            }
            Step::Gc { valid } => {
                let valid: Vec<String> = valid.iter().map(|number| format!("c{number}")).collect();
                let listed: Vec<&str> = valid.iter().map(String::as_str).collect();
                stage.call(&Call::gc(&listed), RealDisk).unwrap();
                let stale = |(address, held): (&IpAddr, &Held)| {
                    (held.attached && !valid.contains(&held.container)).then_some(*address)
                };
                for address in model.0.iter().filter_map(stale).collect::<Vec<_>>() {
                    model.end(address, now);
                }
                model.0.retain(|_, held| !held.has_expired(now));
            }
            Step::Pass { seconds } => stage.pass(*seconds),
            Step::Reboot => {
                stage.reboot();
                // The first look of the boot is when the retention of what was attached begins.
                stage.call(&Call::del("nobody"), RealDisk).unwrap();
                let now = stage.now.wall();
                let attached =
                    |(address, held): (&IpAddr, &Held)| (held.attached || held.by_boot).then_some(*address);
                for address in model.0.iter().filter_map(attached).collect::<Vec<_>>() {
                    model.end(address, now);
                    model.0.entry(address).and_modify(|held| held.by_boot = true);
                }
            }
            Step::RemoveByHand { last } => {
                if model.0.remove(&address(*last)).is_some() {
                    fs::remove_file(stage.root().join(address(*last).to_string())).unwrap();
                    // File systems tell time in steps; a hand is slower than a step.
                    let later = SystemTime::now() + Duration::from_secs(1);
                    fs::File::open(stage.root()).unwrap().set_modified(later).unwrap();
                }
            }
        }
        let expected = model.0.iter().map(|(address, held)| {
            (*address, (held.container.clone(), held.attached, held.sticky.is_some()))
        });
        prop_assert_eq!(seen(&stage), expected.collect::<BTreeMap<_, _>>(), "after {:?}", step);
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn the_store_does_what_its_model_does(steps in proptest::collection::vec(step(), 1..40)) {
        run(steps)?;
    }
}
