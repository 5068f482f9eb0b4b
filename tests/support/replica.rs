//! The controller's program, as a process.

use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::api_server::free_address;
use super::controller::{Desk, until};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_sticky-ipam-controller");

/// A running controller; ended with the test.
pub struct Replica {
    pub child: Child,
    pub pages: SocketAddr,
}

impl Replica {
    pub fn start(kubeconfig: &Path, namespace: &str, more: &[&str]) -> Self {
        let pages = free_address();
        let mut command = Command::new(PROGRAM);
        command.env_clear().arg("run").arg(format!("--metrics-address={pages}")).args(more);
        command.arg(format!("--kubeconfig={}", kubeconfig.display()));
        command.env("POD_NAMESPACE", namespace).stderr(Stdio::null());
        Self { child: command.spawn().unwrap(), pages }
    }

    /// The status and body of a page; none while nobody listens.
    pub async fn page(&self, path: &str) -> Option<(u16, String)> {
        let mut stream = tokio::net::TcpStream::connect(self.pages).await.ok()?;
        stream.write_all(format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n").as_bytes()).await.ok()?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await.ok()?;
        let status = text.split(' ').nth(1)?.parse().ok()?;
        Some((status, text.split_once("\r\n\r\n")?.1.to_owned()))
    }

    pub async fn leads(&self) -> bool {
        self.page("/metrics").await.is_some_and(|(_, page)| page.contains("\nleader_election_status 1"))
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().try_into().unwrap()), signal).unwrap();
    }

    /// The exit status, once it has ended.
    pub async fn end(&mut self) -> Option<i32> {
        let mut status = None;
        until("the end of the program", || {
            status = self.child.try_wait().unwrap();
            let over = status.is_some();
            async move { over }
        })
        .await;
        status.unwrap().code()
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Where the roles let it keep the locks of blocks.
pub fn blocks(desk: &Desk) -> String {
    format!("--block-namespace={}", desk.case.block_namespace())
}
