//! The node's store against host-local's.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::measure::{Call, Times, longest_hold};
use super::report::Row;

/// The plugins under test.
pub struct Plugins {
    pub ours: PathBuf,
    pub host_local: PathBuf,
}

/// What the table is about.
pub const ABOUT: &str = "\
    Wall-clock time of a whole run of the plugin, median (99th percentile) in milliseconds. sticky-ipam\n\
    has every change on stable storage before it answers, host-local does not. sticky-ipam's binary is\n\
    on the disk as the agent writes it, host-local's as cp does.";

/// How many addresses a large node has here.
const MANY: usize = 60_000;
/// Rounds of a fast verb, and of one that takes host-local half a second.
const ROUNDS: usize = 150;
const SLOW_ROUNDS: usize = 12;

/// The verbs of an attachment's life, in their order.
const VERBS: [&str; 3] = ["ADD", "CHECK", "DEL"];

/// One plugin with a directory of its own.
struct Side<'a> {
    plugin: &'a Path,
    data: PathBuf,
}

impl Side<'_> {
    fn config(&self, subnet: &str) -> String {
        let data = self.data.display();
        format!(
            r#"{{"cniVersion":"1.1.0","name":"bench","type":"bench","ipam":{{"type":"bench","dataDir":"{data}","subnet":"{subnet}"}}}}"#
        )
    }

    fn run(&self, verb: &str, container: &str, subnet: &str) -> Duration {
        Call { plugin: self.plugin, verb, container, config: &self.config(subnet), args: "" }.run()
    }

    fn network(&self) -> PathBuf {
        self.data.join("bench")
    }

    /// host-local's files for the first `count` addresses, which our plugin takes over at its first look.
    fn fill(&self, count: usize) {
        fs::create_dir_all(self.network()).unwrap();
        let mut last = String::new();
        for number in 0..count {
            let at = number + 2;
            last = format!("10.1.{}.{}", at / 256, at % 256);
            fs::write(self.network().join(&last), format!("{}\r\neth0", container(number))).unwrap();
        }
        fs::write(self.network().join("last_reserved_ip.0"), last).unwrap();
    }
}

fn container(number: usize) -> String {
    format!("{number:064x}")
}

/// All rows, in the order of the figures.
pub fn rows(plugins: &Plugins) -> Vec<Row> {
    let scratch = tempfile::Builder::new().prefix("sticky-ipam-bench").tempdir().unwrap();
    let side = |name: &str, plugin| Side { plugin, data: scratch.path().join(name) };
    let mut rows = Vec::new();

    progress("ADD into no store and into an empty one");
    let (host_local, ours) =
        (side("hl-new", plugins.host_local.as_path()), side("us-new", plugins.ours.as_path()));
    let [theirs, mine] = turns(ROUNDS, [&host_local, &ours], |side, _| {
        let _ = fs::remove_dir_all(&side.data);
        side.run("ADD", "new", "10.1.0.0/24")
    });
    rows.push(compared("ADD, no store yet (directories are made)", &theirs, &mine, None));
    let mut theirs: [Times; 3] = Default::default();
    let mut mine: [Times; 3] = Default::default();
    for side in [&host_local, &ours] {
        side.run("DEL", "new", "10.1.0.0/24");
    }
    for _ in 0..ROUNDS {
        for (side, times) in [(&host_local, &mut theirs), (&ours, &mut mine)] {
            for (verb, times) in VERBS.iter().zip(times) {
                times.push(side.run(verb, "one", "10.1.0.0/24"));
            }
        }
    }
    rows.push(compared("ADD, empty store", &theirs[0], &mine[0], Some(0.65)));
    let empty = mine.each_ref().map(Times::median);

    progress("ADD with 200 addresses in a /24");
    let (host_local, ours) =
        (side("hl-200", plugins.host_local.as_path()), side("us-200", plugins.ours.as_path()));
    for side in [&host_local, &ours] {
        side.fill(200);
        // Once around, so that the search starts before what is taken, as on a node that has run for a while.
        fs::write(side.network().join("last_reserved_ip.0"), "10.1.0.1").unwrap();
    }
    let [theirs, mine] = turns(ROUNDS, [&host_local, &ours], |side, _| {
        let took = side.run("ADD", "one", "10.1.0.0/24");
        side.run("DEL", "one", "10.1.0.0/24");
        if side.plugin == plugins.host_local {
            fs::write(side.network().join("last_reserved_ip.0"), "10.1.0.1").unwrap();
        }
        took
    });
    rows.push(compared("ADD, 200 addresses in a /24", &theirs, &mine, Some(0.4)));

    rows.extend(at_once(plugins, scratch.path()));
    rows.extend(with_many(plugins, scratch.path(), empty));
    rows.push(size(plugins));
    rows
}

fn at_once(plugins: &Plugins, scratch: &Path) -> Vec<Row> {
    const AT_ONCE: usize = 100;
    progress("100 ADDs at once");
    let host_local = Side { plugin: &plugins.host_local, data: scratch.join("hl-at-once") };
    let ours = Side { plugin: &plugins.ours, data: scratch.join("us-at-once") };
    let [theirs, mine] = turns(10, [&host_local, &ours], |side, _| {
        let _ = fs::remove_dir_all(&side.data);
        let started = Instant::now();
        std::thread::scope(|scope| {
            for number in 0..AT_ONCE {
                scope.spawn(move || side.run("ADD", &container(number), "10.1.0.0/16"));
            }
        });
        started.elapsed()
    });
    vec![compared("100 ADDs at once, to the last", &theirs, &mine, Some(0.6))]
}

fn with_many(plugins: &Plugins, scratch: &Path, empty: [f64; 3]) -> Vec<Row> {
    let mut rows = Vec::new();
    let subnet = "10.1.0.0/16";
    let host_local = Side { plugin: &plugins.host_local, data: scratch.join("hl-many") };
    let ours = Side { plugin: &plugins.ours, data: scratch.join("us-many") };
    progress("filling two stores with 60,000 addresses");
    host_local.fill(MANY);
    ours.fill(MANY);
    progress("taking over 60,000 records of host-local's");
    let took = ours.run("DEL", "nobody", subnet);
    rows.push(plain(
        "taking over 60,000 of host-local's records, once",
        format!("{:.1} s", took.as_secs_f64()),
    ));

    let mut theirs: [Times; 4] = Default::default();
    let mut mine: [Times; 4] = Default::default();
    progress("ADD, CHECK, DEL and DEL of an unknown container at 60,000");
    for round in 0..SLOW_ROUNDS * 10 {
        for (side, times) in [(&host_local, &mut theirs), (&ours, &mut mine)] {
            // Half a second a verb: fewer rounds for the slow one.
            if side.plugin == plugins.host_local && round >= SLOW_ROUNDS {
                continue;
            }
            for (verb, times) in VERBS.iter().zip(times.iter_mut()) {
                times.push(side.run(verb, "one", subnet));
            }
            times[3].push(side.run("DEL", "nobody", subnet));
        }
    }
    let names = ["ADD", "CHECK", "DEL", "DEL of an unknown container"];
    for (at, name) in names.into_iter().enumerate() {
        let bar = if at == 3 { 0.005 } else { 0.01 };
        rows.push(compared(&format!("{name}, 60,000 in a /16"), &theirs[at], &mine[at], Some(bar)));
    }
    for (at, name) in VERBS.into_iter().enumerate() {
        let ratio = mine[at].median() / empty[at];
        rows.push(Row {
            work: format!("our {name} at 60,000 against our {name} in an empty store"),
            peer: "–".into(),
            ours: format!("{:.2} to {:.2}", mine[at].median(), empty[at]),
            ratio: Some(ratio),
            bar: "≤ 1.3×".into(),
            met: Some(ratio <= 1.3),
        });
    }
    let config = ours.config(subnet);
    let memory =
        Call { plugin: &plugins.ours, verb: "ADD", container: "memory", config: &config, args: "" }.memory();
    rows.push(Row {
        work: "memory of one ADD at 60,000".into(),
        peer: "–".into(),
        ours: format!("{:.1} MB", memory as f64 / 1024.0),
        ratio: None,
        bar: "< 10 MB".into(),
        met: Some(memory < 10 * 1024),
    });
    rows.extend(collected(&ours, subnet));
    rows
}

fn collected(ours: &Side<'_>, subnet: &str) -> Vec<Row> {
    const STALE: usize = 1000;
    progress("GC of 1,000 stale among 60,000");
    let valid: Vec<String> = (STALE..MANY)
        .map(|number| format!(r#"{{"containerID":"{}","ifname":"eth0"}}"#, container(number)))
        .collect();
    let config = ours.config(subnet);
    let config = format!(
        r#"{},"cni.dev/valid-attachments":[{}]}}"#,
        config.strip_suffix('}').unwrap(),
        valid.join(",")
    );
    let mut took = Duration::ZERO;
    let held = longest_hold(&ours.network().join("lock"), || {
        took = Call { plugin: ours.plugin, verb: "GC", container: "", config: &config, args: "" }.run();
    });
    let milliseconds = held.as_secs_f64() * 1e3;
    vec![
        Row {
            work: "GC of 1,000 stale among 60,000".into(),
            peer: "does not do it".into(),
            ours: format!("{:.2} s", took.as_secs_f64()),
            ratio: None,
            bar: "< 1 s".into(),
            met: Some(took < Duration::from_secs(1)),
        },
        Row {
            work: "longest hold of the lock during that GC".into(),
            peer: "–".into(),
            ours: format!("{milliseconds:.1} ms"),
            ratio: None,
            bar: "≤ 50 ms".into(),
            met: Some(milliseconds <= 50.0),
        },
    ]
}

fn size(plugins: &Plugins) -> Row {
    let bytes = |path: &Path| fs::metadata(path).unwrap().len() as f64 / 1e6;
    let ours = bytes(&plugins.ours);
    Row {
        work: "size of the static binary".into(),
        peer: format!("{:.1} MB", bytes(&plugins.host_local)),
        ours: format!("{ours:.1} MB"),
        ratio: Some(ours / bytes(&plugins.host_local)),
        bar: "< 8 MB".into(),
        met: Some(ours < 8.0),
    }
}

/// Both sides in turn, so that whatever else the machine does falls on both.
fn turns(
    rounds: usize,
    sides: [&Side<'_>; 2],
    mut work: impl FnMut(&Side<'_>, usize) -> Duration,
) -> [Times; 2] {
    let mut times: [Times; 2] = Default::default();
    for round in 0..rounds {
        for (side, times) in sides.iter().zip(&mut times) {
            times.push(work(side, round));
        }
    }
    times
}

pub fn compared(work: &str, theirs: &Times, ours: &Times, bar: Option<f64>) -> Row {
    let ratio = ours.median() / theirs.median();
    let told = |times: &Times| format!("{:.2} ({:.2}), n={}", times.median(), times.p99(), times.count());
    Row {
        work: work.to_owned(),
        peer: told(theirs),
        ours: told(ours),
        ratio: Some(ratio),
        bar: bar.map_or_else(|| "–".to_owned(), |bar| format!("≤ {bar}×")),
        met: bar.map(|bar| ratio <= bar),
    }
}

pub fn plain(work: &str, ours: String) -> Row {
    Row { work: work.to_owned(), peer: "–".into(), ours, ratio: None, bar: "–".into(), met: None }
}

pub fn progress(what: &str) {
    println!("… {what}");
}
