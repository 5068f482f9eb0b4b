//! One replica leads. Killed or told to end, it is followed by the other, and what it had begun is ended
//! once.

use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::REPLICAS;
use super::ledger::{Ledger, Life};
use crate::support::lab::api::named;
use crate::support::lab::stage::Stage;
use crate::support::lab::workloads::{spec, stateful_set};
use crate::support::lab::{eventually, folder};

/// The pods whose workload is deleted at once.
const MASS: usize = 40;
/// Within which another must lead: the promises of docs/controller.md, which rest on the election's own
/// times.
const AFTER_A_CRASH: Duration = Duration::from_secs(20);
const AFTER_A_STOP: Duration = Duration::from_secs(3);
/// Between two looks at the lease.
const GLANCE: Duration = Duration::from_millis(20);

/// All replicas run again when the test ends, also one that fails.
struct Restarted<'a>(&'a Stage);

impl Drop for Restarted<'_> {
    fn drop(&mut self) {
        for name in REPLICAS {
            let _ = self.0.lab.attempt(&["start", name]);
        }
    }
}

/// Who holds the lease: the name that a process gave itself.
fn holder(stage: &Stage) -> String {
    let lease = stage.api.get(named("coordination.k8s.io/v1", "Lease", "kube-system", "cilium-ipam-leader"));
    lease.and_then(|lease| Some(lease["spec"]["holderIdentity"].as_str()?.to_owned())).unwrap_or_default()
}

/// The replica that leads, by its own page.
fn leader(stage: &Stage) -> &'static str {
    eventually("one replica to lead", || {
        let leads = |(number, _): &(usize, &&str)| {
            let url = format!("http://127.0.0.1:{}/metrics", 9978 + number);
            let page = stage.lab.attempt(&["on", "fabric", "curl", "-sf", "--max-time", "5", &url]);
            page.is_ok_and(|page| page.lines().any(|line| line == "leader_election_status 1"))
        };
        let leaders: Vec<&str> = REPLICAS.iter().enumerate().filter(leads).map(|(_, name)| *name).collect();
        match leaders[..] {
            [one] => Ok(REPLICAS.into_iter().find(|name| *name == one).expect("one of them")),
            _ => Err(format!("{leaders:?}")),
        }
    })
}

/// The replica that leads: looked up before it is time to signal it.
struct Leading {
    name: &'static str,
    identity: String,
    process: Pid,
}

impl Leading {
    fn now(stage: &Stage) -> Self {
        let name = leader(stage);
        let record =
            std::fs::read_to_string(folder().join(format!("run/{name}.pid"))).expect("the lab is up");
        let process = record.split(' ').next().and_then(|pid| pid.parse().ok()).expect("a pid");
        Self { name, identity: holder(stage), process: Pid::from_raw(process) }
    }

    /// Signals it, and how long it took until another held the lease.
    fn followed_after(self, stage: &Stage, signal: Signal, within: Duration) -> Duration {
        let since = Instant::now();
        kill(self.process, signal).expect("the leader runs");
        loop {
            let (now, took) = (holder(stage), since.elapsed());
            if !now.is_empty() && now != self.identity {
                return took;
            }
            assert!(took <= within, "nobody followed {} within {within:?}: {now:?}", self.name);
            thread::sleep(GLANCE);
        }
    }
}

pub fn stopped(stage: &Stage) {
    let _restarted = Restarted(stage);
    let took = Leading::now(stage).followed_after(stage, Signal::SIGTERM, AFTER_A_STOP);
    eprintln!("a clean stop was followed after {took:?}");
}

/// The lives of one namespace's claims: those that bear an address of it.
fn of(lives: Vec<Life>, addresses: &[String]) -> Vec<Life> {
    lives.into_iter().filter(|life| addresses.contains(&life.name)).collect()
}

pub fn killed(stage: &Stage) {
    let namespace = "mass";
    stage.lab.namespace(namespace);
    stage.api.create(stateful_set(namespace, "mass", MASS, spec(None)));
    let pods = stage.api.all_ready(namespace, "mass", MASS);
    let addresses: Vec<String> = pods.iter().map(|(_, seen)| seen.address().to_owned()).collect();
    let ledger = Ledger::open(&stage.api, namespace);
    eventually("the ledger to know what stands", || {
        let known = (Ledger::of(&ledger.stickies).len(), of(Ledger::of(&ledger.claims), &addresses).len());
        if known == (MASS, MASS) { Ok(()) } else { Err(format!("{known:?}")) }
    });
    let _restarted = Restarted(stage);
    let leading = Leading::now(stage);
    stage.api.delete(named("apps/v1", "StatefulSet", namespace, "mass"));
    let gone = |ledger: &Ledger| Ledger::of(&ledger.stickies).iter().filter(|life| life.ended).count();
    eventually("the first to be let go", || match gone(&ledger) {
        0 => Err("none".to_owned()),
        _ => Ok(()),
    });
    let took = leading.followed_after(stage, Signal::SIGKILL, AFTER_A_CRASH);
    let left = MASS - gone(&ledger);
    eprintln!(
        "a killed leader was followed after {took:?}, with {left} of {MASS} addresses still to be let go"
    );
    assert!(left > 0, "the leader was killed after its work was done; lower --recycle-rate");
    eventually("every address to be free", || {
        let held = of(Ledger::of(&ledger.claims), &addresses).iter().filter(|life| !life.ended).count();
        if held == 0 { Ok(()) } else { Err(format!("{held} are claimed")) }
    });
    let (stickies, claims) = ledger.close();
    assert_eq!(stickies.len(), MASS, "one life each, no StickyIP was made again: {stickies:?}");
    assert!(stickies.iter().all(|life| life.ended), "{stickies:?}");
    let claims = of(claims, &addresses);
    assert_eq!(claims.len(), MASS, "one life each: {claims:?}");
    for claim in claims {
        assert_eq!(
            (&claim.phases[..], claim.ended),
            (&["Bound".to_owned(), "Quarantined".to_owned()][..], true),
            "{claim:?}"
        );
    }
    stage.lab.delete_namespace(namespace);
}
