//! Whatever ends a test process, its servers and folders go too.
//!
//! Each test here starts this very test binary again, with one of the cases at the bottom, and ends that.

use std::io::{BufRead, BufReader, Lines, Read};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::support::api_server::keeper::{Keeper, sweep};
use crate::support::api_server::{ApiServer, comes_true, server};

/// Set for a case that is started by a test of this file; without it the cases do nothing.
const STARTED_BY_A_TEST: &str = "STICKY_IPAM_BENCH_CASE";
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::test]
async fn a_killed_test_process_leaves_no_server_and_no_folder() {
    let mut victim = Victim::start("a_server_until_killed");
    assert_eq!(victim.pids.len(), 3, "etcd, kube-apiserver and their keeper");
    victim.end_by(Signal::SIGKILL).await;
    victim.leaves_nothing().await;
}

#[tokio::test]
async fn an_interrupted_test_process_leaves_nothing() {
    let mut victim = Victim::start("an_etcd_until_killed");
    victim.end_by(Signal::SIGINT).await;
    victim.leaves_nothing().await;
}

#[tokio::test]
async fn a_terminated_test_process_leaves_nothing() {
    let mut victim = Victim::start("an_etcd_until_killed");
    victim.end_by(Signal::SIGTERM).await;
    victim.leaves_nothing().await;
}

#[tokio::test]
async fn a_paused_server_goes_too() {
    let mut victim = Victim::start("an_etcd_until_killed");
    kill(pid(victim.pids[0]), Signal::SIGSTOP).unwrap();
    victim.end_by(Signal::SIGKILL).await;
    victim.leaves_nothing().await;
}

#[tokio::test]
async fn a_panicking_test_leaves_nothing() {
    let mut victim = Victim::start("an_etcd_and_a_panic");
    assert!(!victim.process.wait().unwrap().success());
    victim.leaves_nothing().await;
}

#[tokio::test]
async fn a_finished_test_binary_leaves_nothing_though_a_static_is_never_dropped() {
    let mut victim = Victim::start("an_etcd_that_is_never_dropped");
    assert!(victim.process.wait().unwrap().success());
    victim.leaves_nothing().await;
}

#[tokio::test]
async fn a_killed_keeper_takes_its_processes_along_and_the_next_start_sweeps_its_folder() {
    let mut victim = Victim::start("an_etcd_until_killed");
    let keeper = *victim.pids.last().unwrap();
    // It lives, so its folder is nobody's to sweep.
    sweep(victim.temporary.path());
    assert!(victim.folder.exists(), "the folder of a living server was swept");
    kill(pid(keeper), Signal::SIGKILL).unwrap();
    let etcd = victim.pids[0];
    assert!(comes_true(PATIENCE, || async { is_gone(etcd) }).await, "etcd outlived its keeper");
    victim.end_by(Signal::SIGKILL).await;
    assert!(victim.folder.exists(), "somebody else swept, the test shows nothing");
    let next = Keeper::start(victim.temporary.path());
    assert!(!victim.folder.exists(), "the next start did not sweep");
    drop(next);
    victim.leaves_nothing().await;
}

#[tokio::test]
async fn a_dropped_keeper_has_ended_its_processes_and_removed_its_folder() {
    let temporary = tempfile::tempdir().unwrap();
    let keeper = Keeper::start(temporary.path());
    server::start_etcd(&keeper, server::Etcd::Hasty).await;
    let etcd = pid_file(keeper.folder(), "etcd");
    assert!(!is_gone(etcd));
    drop(keeper);
    assert!(is_gone(etcd));
    assert_eq!(std::fs::read_dir(temporary.path()).unwrap().count(), 0);
}

#[test]
fn missing_tools_are_a_failure_that_names_the_cure() {
    let nowhere = tempfile::tempdir().unwrap();
    let output = case("a_server_until_killed", nowhere.path())
        .env("XDG_CACHE_HOME", nowhere.path())
        .output()
        .expect("this binary runs again");
    assert!(!output.status.success(), "a missing server was passed over");
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(said.contains("make tools"), "{said}");
    assert_eq!(std::fs::read_dir(nowhere.path()).unwrap().count(), 0, "something was left behind");
}

/// A run of this binary that holds one server, and what it must not leave.
struct Victim {
    process: Child,
    /// Kept open: a test harness that cannot write its report fails.
    _stdout: Lines<BufReader<ChildStdout>>,
    temporary: TempDir,
    folder: PathBuf,
    pids: Vec<u32>,
}

impl Victim {
    fn start(name: &str) -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let mut process = case(name, temporary.path()).spawn().expect("this binary runs again");
        let mut stdout = BufReader::new(process.stdout.take().unwrap()).lines();
        let told = stdout.by_ref().map_while(Result::ok).find_map(|line| {
            // The test harness may have begun the line.
            let (_, told) = line.split_once("holds: ")?;
            Some(told.split(' ').map(str::to_owned).collect::<Vec<_>>())
        });
        let Some(told) = told else {
            let mut said = String::new();
            let _ = process.stderr.take().unwrap().read_to_string(&mut said);
            panic!("the case {name} did not start: {said}")
        };
        let pids: Vec<u32> = told[1..].iter().map(|word| word.parse().unwrap()).collect();
        Self { process, _stdout: stdout, temporary, folder: PathBuf::from(&told[0]), pids }
    }

    async fn end_by(&mut self, signal: Signal) {
        kill(pid(self.process.id()), signal).unwrap();
        let mut ended = None;
        comes_true(PATIENCE, || {
            ended = self.process.try_wait().unwrap();
            std::future::ready(ended.is_some())
        })
        .await;
        let ended = ended.expect("it goes on after the signal");
        assert_eq!(ended.signal(), Some(signal as i32));
    }

    async fn leaves_nothing(&self) {
        for &pid in &self.pids {
            assert!(comes_true(PATIENCE, || async { is_gone(pid) }).await, "process {pid} is still there");
        }
        let left = || std::fs::read_dir(self.temporary.path()).unwrap().count();
        assert!(
            comes_true(PATIENCE, || async { left() == 0 }).await,
            "{} is still there",
            self.folder.display()
        );
    }
}

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn case(name: &str, temporary: &Path) -> Command {
    let mut command = Command::new("env");
    command
        // A background job of a script has them ignored, and so has all that it starts.
        .arg("--default-signal=INT,TERM")
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "--nocapture", &format!("harness::cleanup::{name}")])
        .env(STARTED_BY_A_TEST, "yes")
        .env("TMPDIR", temporary)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

fn pid(number: u32) -> Pid {
    Pid::from_raw(i32::try_from(number).unwrap())
}

/// Gone, or dead and only waiting for a parent to notice.
fn is_gone(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(['Z', 'X'])),
        Err(_) => true,
    }
}

fn pid_file(folder: &Path, name: &str) -> u32 {
    std::fs::read_to_string(folder.join(format!("{name}.pid"))).unwrap().trim().parse().unwrap()
}

/// Tells the test that started this case what it holds.
fn tell(folder: &Path, pids: &[u32]) {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    println!("holds: {} {}", folder.display(), pids.join(" "));
}

async fn an_etcd() -> Option<Keeper> {
    std::env::var_os(STARTED_BY_A_TEST)?;
    let keeper = Keeper::start(&std::env::temp_dir());
    server::start_etcd(&keeper, server::Etcd::Hasty).await;
    tell(keeper.folder(), &[pid_file(keeper.folder(), "etcd"), keeper.pid()]);
    Some(keeper)
}

#[tokio::test]
#[ignore = "a case for the tests above"]
async fn a_server_until_killed() {
    if std::env::var_os(STARTED_BY_A_TEST).is_some() {
        let server = ApiServer::shared().await;
        tell(server.folder(), &server.pids());
        std::future::pending().await
    }
}

#[tokio::test]
#[ignore = "a case for the tests above"]
async fn an_etcd_until_killed() {
    if let Some(_keeper) = an_etcd().await {
        std::future::pending().await
    }
}

#[tokio::test]
#[ignore = "a case for the tests above"]
async fn an_etcd_and_a_panic() {
    if let Some(_keeper) = an_etcd().await {
        panic!("as asked");
    }
}

#[tokio::test]
#[ignore = "a case for the tests above"]
async fn an_etcd_that_is_never_dropped() {
    std::mem::forget(an_etcd().await);
}
