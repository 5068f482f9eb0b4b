//! The plugin as it is shipped: static, stripped, small, and one thread. `make test` builds it and names it
//! in STICKY_IPAM_RELEASE; without that there is nothing to look at, and the tests fail and say so.

// All of it is test code: a helper fails the test that called it.
#![allow(clippy::panic, clippy::unwrap_used, missing_docs)]

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

const LARGEST: u64 = 8_000_000;

fn plugin() -> PathBuf {
    match std::env::var_os("STICKY_IPAM_RELEASE") {
        Some(path) => PathBuf::from(path),
        None => panic!(
            "STICKY_IPAM_RELEASE is not set; run `make test`, or `make plugin` and set it to what that prints"
        ),
    }
}

/// The little of an ELF file that is asked for here (64 bit, little endian).
struct Elf(Vec<u8>);

impl Elf {
    fn read(path: &Path) -> Self {
        let elf = Self(fs::read(path).unwrap());
        assert_eq!(&elf.0[..6], b"\x7fELF\x02\x01", "a 64-bit little-endian executable");
        elf
    }

    fn number(&self, at: usize, bytes: usize) -> usize {
        self.0[at..at + bytes].iter().rev().fold(0, |sum, byte| sum << 8 | usize::from(*byte))
    }

    fn table(&self, start: usize, entry: usize, count: usize) -> Vec<usize> {
        let (start, entry, count) = (self.number(start, 8), self.number(entry, 2), self.number(count, 2));
        (0..count).map(|index| start + index * entry).collect()
    }

    fn segment_types(&self) -> Vec<usize> {
        self.table(0x20, 0x36, 0x38).into_iter().map(|at| self.number(at, 4)).collect()
    }

    fn section_types(&self) -> Vec<usize> {
        self.table(0x28, 0x3a, 0x3c).into_iter().map(|at| self.number(at + 4, 4)).collect()
    }
}

#[test]
fn it_is_static_and_stripped_and_small() {
    const INTERPRETER: usize = 3;
    const SYMBOLS: usize = 2;
    let elf = Elf::read(&plugin());
    assert!(!elf.segment_types().contains(&INTERPRETER), "it asks for a dynamic linker");
    assert!(!elf.section_types().contains(&SYMBOLS), "it has a symbol table");
    let size = elf.0.len() as u64;
    assert!(size < LARGEST, "it has {size} bytes");
}

#[test]
fn it_asks_the_cluster_where_its_configuration_says_so() {
    let data = tempfile::tempdir().unwrap();
    let config = format!(
        r#"{{"cniVersion":"1.1.0","name":"net","type":"x","ipam":{{"type":"x","dataDir":"{}","subnet":"10.9.0.0/24",
           "sticky":{{"cluster":{{"kubeconfig":"{}","node":"n1"}}}}}}}}"#,
        data.path().display(),
        data.path().join("none").display()
    );
    let mut child = Command::new(plugin())
        .env_clear()
        .envs([("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c1"), ("CNI_IFNAME", "eth0")])
        .envs([("CNI_NETNS", "/run/netns/none"), ("CNI_PATH", "/opt/cni/bin")])
        .env("CNI_ARGS", "K8S_POD_NAMESPACE=db;K8S_POD_NAME=db-0;K8S_POD_UID=u-1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(config.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(!output.status.success() && said.contains("cannot use the kubeconfig"), "{said}");
}

#[test]
fn it_runs_in_one_thread() {
    let data = tempfile::tempdir().unwrap();
    fs::create_dir(data.path().join("net")).unwrap();
    // While the lock is held the plugin stands still and can be looked at.
    let lock = File::create(data.path().join("net/lock")).unwrap();
    lock.lock().unwrap();
    let config = format!(
        r#"{{"cniVersion":"1.1.0","name":"net","type":"x","ipam":{{"type":"x","dataDir":"{}","subnet":"10.9.0.0/24"}}}}"#,
        data.path().display()
    );
    let mut child = Command::new(plugin())
        .env_clear()
        .envs([("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", "c1"), ("CNI_IFNAME", "eth0")])
        .envs([("CNI_NETNS", "/run/netns/none"), ("CNI_PATH", "/opt/cni/bin")])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(config.as_bytes()).unwrap();
    let waiting = data.path().join("net/lock");
    let deadline = Instant::now() + Duration::from_secs(20);
    // It has opened the lock file: everything that it starts is started.
    let opened = || {
        fs::read_dir(format!("/proc/{}/fd", child.id())).is_ok_and(|fds| {
            fds.flatten().any(|fd| fs::read_link(fd.path()).is_ok_and(|path| path == waiting))
        })
    };
    while !opened() {
        assert!(Instant::now() < deadline, "the plugin never came to the lock");
        std::thread::yield_now();
    }
    let threads = fs::read_dir(format!("/proc/{}/task", child.id())).unwrap().count();
    drop(lock);
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    assert_eq!(threads, 1);
}
