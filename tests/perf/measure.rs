//! Running a plugin and taking its time and memory.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};

/// A call of a plugin, as a runtime makes it.
pub struct Call<'a> {
    pub plugin: &'a Path,
    pub verb: &'a str,
    pub container: &'a str,
    pub config: &'a str,
    /// CNI_ARGS; empty where the runtime has none.
    pub args: &'a str,
}

impl Call<'_> {
    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .env("CNI_COMMAND", self.verb)
            .env("CNI_CONTAINERID", self.container)
            .env("CNI_NETNS", "/run/netns/bench")
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", "/opt/cni/bin")
            .env("CNI_ARGS", self.args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        command
    }

    /// Runs it to its end, and tells how long that took. A failing plugin ends the bench: its time means
    /// nothing.
    pub fn run(&self) -> Duration {
        self.finish(self.command(self.plugin))
    }

    fn finish(&self, mut command: Command) -> Duration {
        let started = Instant::now();
        let mut child = command.spawn().expect("the plugin starts");
        child.stdin.take().unwrap().write_all(self.config.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        let took = started.elapsed();
        assert!(
            output.status.success(),
            "{} {}: {}",
            self.verb,
            self.container,
            String::from_utf8_lossy(&output.stdout)
        );
        took
    }

    /// The largest resident memory of this call, in KiB.
    pub fn memory(&self) -> i64 {
        let mut command = self.command(&std::env::current_exe().unwrap());
        command.arg("--memory-of").arg(self.plugin);
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(self.config.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        String::from_utf8_lossy(&output.stdout).trim().parse().expect("a number of KiB")
    }
}

/// Runs a program with our own standard input, and prints the largest resident memory of it in KiB.
pub fn print_memory_of(program: &[String]) {
    let status = Command::new(&program[0]).stdout(Stdio::null()).status().unwrap();
    assert!(status.success(), "{program:?}: {status}");
    println!("{}", getrusage(UsageWho::RUSAGE_CHILDREN).unwrap().max_rss());
}

/// Times, to be told as a median and a 99th percentile.
#[derive(Clone, Default)]
pub struct Times(Vec<Duration>);

impl Times {
    pub fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    fn at(&self, share: f64) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort();
        let last = sorted.len() - 1;
        sorted[((last as f64) * share).round() as usize].as_secs_f64() * 1e3
    }

    pub fn median(&self) -> f64 {
        self.at(0.5)
    }

    pub fn p99(&self) -> f64 {
        self.at(0.99)
    }

    /// The longest, the longest first, in milliseconds: what a percentile is made of.
    pub fn longest(&self, most: usize) -> Vec<f64> {
        let mut sorted = self.0.clone();
        sorted.sort();
        sorted.iter().rev().take(most).map(|time| (time.as_secs_f64() * 1e4).round() / 10.0).collect()
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }
}

/// The longest time for which the lock could not be had while `work` ran: no hold was longer than that.
pub fn longest_hold(lock: &Path, work: impl FnOnce()) -> Duration {
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            let mut free = Instant::now();
            while !over.load(Ordering::Relaxed) {
                let file = File::open(lock).unwrap();
                if file.try_lock().is_ok() {
                    drop(file);
                    free = Instant::now();
                } else {
                    longest = longest.max(free.elapsed());
                }
                std::thread::sleep(Duration::from_micros(200));
            }
            longest
        });
        work();
        over.store(true, Ordering::Relaxed);
        watcher.join().unwrap()
    })
}
