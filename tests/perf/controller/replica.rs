//! A running controller: what it costs, what it says of itself, and the end of it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use crate::support::api_server::free_address;

/// Far more than anything takes here.
const DEADLINE: Duration = Duration::from_secs(120);

/// A running controller; ended with its owner.
pub struct Replica {
    child: Child,
    pages: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
}

impl Replica {
    pub fn start(program: &Path, kubeconfig: &Path, namespace: &str, flags: &[String]) -> Self {
        let pages = free_address();
        let mut command = Command::new(program);
        command.env_clear().arg("run").arg(format!("--metrics-address={pages}")).args(flags);
        command.arg(format!("--kubeconfig={}", kubeconfig.display()));
        command.env("POD_NAMESPACE", namespace).stderr(Stdio::piped());
        let mut child = command.spawn().expect("the controller starts");
        let log: Arc<Mutex<Vec<String>>> = Arc::default();
        let (lines, kept) = (BufReader::new(child.stderr.take().expect("it is piped")), log.clone());
        std::thread::spawn(move || {
            for line in lines.lines().map_while(Result::ok) {
                // Of thousands of good deeds the count is enough.
                if line.contains("WARN") || line.contains("ERROR") {
                    kept.lock().unwrap().push(line);
                }
            }
        });
        Self { child, pages, log }
    }

    /// A page.
    fn page(&self, path: &str) -> Option<String> {
        let mut stream = TcpStream::connect(self.pages).ok()?;
        write!(stream, "GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).ok()?;
        Some(text.split_once("\r\n\r\n")?.1.to_owned())
    }

    /// A number of its metrics, by name and labels as they stand on the page; none if it is not there.
    pub fn metric(&self, name: &str) -> Option<f64> {
        let page = self.page("/metrics")?;
        let start = format!("sticky_ipam_controller_{name} ");
        page.lines().find_map(|line| line.strip_prefix(&start)?.parse().ok())
    }

    /// Requests of this sort.
    pub fn requests(&self, what: &str) -> f64 {
        self.metric(&format!("api_requests_total{{method=\"{what}\"}}")).unwrap_or_default()
    }

    /// Requests that write: all but those about its lease.
    pub fn writes(&self) -> f64 {
        ["POST", "PUT", "PATCH", "DELETE"].iter().map(|method| self.requests(method)).sum()
    }

    /// Waits until a condition holds, and ends the bench if it does not come.
    pub fn until(&mut self, what: &str, mut condition: impl FnMut(&Self) -> bool) {
        let started = Instant::now();
        while !condition(self) {
            let told =
                || self.log.lock().unwrap().iter().rev().take(5).cloned().collect::<Vec<_>>().join("\n");
            let ended = self.child.try_wait().unwrap();
            assert!(ended.is_none(), "the controller ended before {what}: {ended:?}\n{}", told());
            assert!(started.elapsed() < DEADLINE, "{what} did not come within {DEADLINE:?}\n{}", told());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// How long it took from the arrival of the lists until every duty had looked at everything once, in
    /// seconds.
    pub fn in_step(&mut self) -> f64 {
        let mut took = None;
        self.until("being in step", |replica| {
            took = replica.metric("initial_sync_seconds").filter(|took| *took > 0.0);
            took.is_some()
        });
        took.expect("it was waited for")
    }

    /// A field of its status, in MB: VmRSS now, VmHWM at most.
    pub fn memory(&self, field: &str) -> f64 {
        let status = self.read("status");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("Linux tells it");
        let kilobytes: f64 = line.trim_matches([':', '\t', ' ', 'k', 'B']).parse().expect("a number");
        kilobytes / 1024.0
    }

    /// The processor time that it has used, in seconds.
    pub fn processor(&self) -> f64 {
        processor(self.child.id())
    }

    /// How many rounds each duty has done, and how long they took together.
    pub fn rounds(&self) -> String {
        let page = self.page("/metrics").unwrap_or_default();
        let of = |part: &str| {
            let start = format!("sticky_ipam_controller_reconcile_duration_seconds_{part}{{duty=\"");
            let lines = page
                .lines()
                .filter_map(|line| line.strip_prefix(&start)?.split_once("\"} "))
                .collect::<Vec<_>>();
            lines.into_iter().map(|(duty, number)| (duty.to_owned(), number.to_owned())).collect::<Vec<_>>()
        };
        let counts = of("count").into_iter().zip(of("sum"));
        let told = counts.map(|((duty, count), (_, sum))| format!("  {duty}: {count} rounds, {sum} s"));
        told.collect::<Vec<_>>().join("\n")
    }

    fn read(&self, file: &str) -> String {
        std::fs::read_to_string(format!("/proc/{}/{file}", self.child.id())).expect("it runs")
    }

    /// How often it warned.
    pub fn warnings(&self) -> usize {
        self.log.lock().unwrap().len()
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The processor time that a process has used, in seconds.
pub fn processor(pid: u32) -> f64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields: Vec<&str> = stat.rsplit_once(") ").expect("a stat").1.split(' ').collect();
    // USER_HZ is 100 on every architecture that Cilium runs on.
    [11, 12].iter().map(|at| fields[*at].parse::<f64>().expect("ticks")).sum::<f64>() / 100.0
}
