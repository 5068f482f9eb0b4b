//! One etcd and one kube-apiserver on the loopback: started in a folder of their own, stopped, paused,
//! restarted.
//!
//! etcd listens on sockets inside the folder. The API server's port is held by a bound socket of ours for as
//! long as the server lives, so that no other process can take it, not even between a stop and a restart.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::sync::OnceCell;

use super::access::{Access, Credentials, Files};
use super::case::Case;
use super::certificates::{Authority, Pair, service_account_pair, write_private};
use super::keeper::{Keeper, comes_true};
use super::{objects, tools};

/// About 3 s on an idle machine; far more when every core compiles.
const READY_DEADLINE: Duration = Duration::from_secs(90);
const API_SERVER: &str = "kube-apiserver";
const ETCD: &str = "etcd";

/// A running API server with its etcd. Dropping it ends both and removes every file.
pub struct ApiServer {
    keeper: Keeper,
    address: SocketAddr,
    _port: Socket,
    flags: Vec<String>,
    authority: Authority,
    admin: Pair,
    files: Arc<Files>,
    cases: AtomicUsize,
    pub(super) installed: [OnceCell<()>; objects::SETS],
}

static SHARED: OnceCell<ApiServer> = OnceCell::const_new();

impl ApiServer {
    /// The server that all tests of this binary share, started by the first that asks. Never stop or pause
    /// it.
    pub async fn shared() -> &'static Self {
        SHARED.get_or_init(Self::start).await
    }

    /// A server of one's own, for a test that stops it. Returns when it is ready.
    pub async fn start() -> Self {
        Self::start_on(Etcd::Hasty, &[]).await
    }

    /// A server of one's own that is started with these flags, too.
    pub async fn start_with(flags: &[&str]) -> Self {
        Self::start_on(Etcd::Hasty, flags).await
    }

    /// A server of one's own, for what is measured: its etcd writes as a cluster's does.
    #[allow(dead_code, reason = "only the benchmarks measure with a durable etcd")]
    pub async fn start_durable() -> Self {
        Self::start_on(Etcd::Durable, &[]).await
    }

    async fn start_on(etcd: Etcd, flags: &[&str]) -> Self {
        let flags: Vec<String> = flags.iter().map(|&flag| flag.to_owned()).collect();
        // Asked before anything is started: a missing program must leave nothing behind.
        let program = tools::group("kubernetes").join("bin").join(API_SERVER);
        let keeper = Keeper::start(&std::env::temp_dir());
        start_etcd(&keeper, etcd).await;

        let (port, address) = held_port();
        let authority = Authority::fresh();
        let admin = authority.client("admin", Some("system:masters"));
        let folder = keeper.folder();
        write_private(&folder.join("ca.crt"), &authority.certificate());
        for (name, pair) in [("server", authority.server()), ("accounts", service_account_pair())] {
            write_private(&folder.join(format!("{name}.crt")), &pair.certificate);
            write_private(&folder.join(format!("{name}.key")), &pair.key);
        }
        keeper.run(API_SERVER, &arguments(&program, folder, address, &flags));

        let files = Arc::new(Files { folder: folder.to_owned(), written: AtomicUsize::new(0) });
        let installed = [const { OnceCell::const_new() }; objects::SETS];
        let server = Self {
            keeper,
            address,
            _port: port,
            flags,
            authority,
            admin,
            files,
            cases: AtomicUsize::new(0),
            installed,
        };
        server.wait_until_ready().await;
        server
    }

    /// A namespace, names and addresses for one test.
    pub async fn case(&self) -> Case<'_> {
        Case::open(self, self.cases.fetch_add(1, Ordering::Relaxed)).await
    }

    /// Whether other tests of this binary use it too.
    pub(super) fn is_shared(&self) -> bool {
        SHARED.get().is_some_and(|shared| std::ptr::eq(shared, self))
    }

    /// Where it listens, without any proxy.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Its folder: logs, certificates, etcd's data.
    pub fn folder(&self) -> &Path {
        self.keeper.folder()
    }

    /// The pids of the keeper, of etcd and of the API server.
    pub fn pids(&self) -> Vec<u32> {
        let of = |name: &str| std::fs::read_to_string(self.folder().join(format!("{name}.pid")));
        let running = [ETCD, API_SERVER].iter().filter_map(|name| of(name).ok()?.trim().parse().ok());
        running.chain([self.keeper.pid()]).collect()
    }

    /// May do everything.
    pub fn admin(&self, namespace: &str) -> Access {
        self.access(Credentials::Certificate(self.admin.clone()), namespace)
    }

    /// A user by certificate, who may do what roles give to that name or group.
    pub fn user(&self, name: &str, group: Option<&str>, namespace: &str) -> Access {
        self.access(Credentials::Certificate(self.authority.client(name, group)), namespace)
    }

    pub(super) fn access(&self, credentials: Credentials, namespace: &str) -> Access {
        let url = format!("https://{}", self.address);
        Access { url, namespace: namespace.to_owned(), credentials, files: Arc::clone(&self.files) }
    }

    /// Kills the API server, as a crash would. etcd stays.
    pub fn stop(&self) {
        self.keeper.stop(API_SERVER);
    }

    /// Starts it after a stop (or instead of the running one), on the same port and the same data, and waits
    /// until ready.
    pub async fn restart(&self) {
        self.stop();
        let program = tools::group("kubernetes").join("bin").join(API_SERVER);
        self.keeper.run(API_SERVER, &arguments(&program, self.folder(), self.address, &self.flags));
        self.wait_until_ready().await;
    }

    /// Has etcd forget what was before this resourceVersion: nobody can watch from there any more.
    pub async fn compact(&self, version: &str) {
        let mut etcd = UnixStream::connect(self.folder().join("etcd:0")).await.expect("etcd listens");
        let body = format!(r#"{{"revision": "{version}", "physical": true}}"#);
        let head = "POST /v3/kv/compaction HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n";
        let request = format!("{head}Content-Length: {}\r\n\r\n{body}", body.len());
        etcd.write_all(request.as_bytes()).await.expect("etcd reads");
        let mut answer = String::new();
        etcd.read_to_string(&mut answer).await.expect("etcd answers");
        assert!(answer.starts_with("HTTP/1.1 200"), "etcd does not compact at {version}: {answer}");
    }

    /// Freezes it: connections stay open, nothing is answered.
    pub fn pause(&self) {
        self.keeper.signal(API_SERVER, "STOP");
    }

    /// Lets it go on after a pause.
    pub fn resume(&self) {
        self.keeper.signal(API_SERVER, "CONT");
    }

    async fn wait_until_ready(&self) {
        let client = self.admin("default").client().await;
        let ready = comes_true(READY_DEADLINE, || async {
            assert!(
                self.keeper.is_running(API_SERVER),
                "kube-apiserver ended: {}",
                self.keeper.log(API_SERVER)
            );
            let request = http::Request::get("/readyz").body(Vec::new()).expect("a plain request");
            let asked = tokio::time::timeout(Duration::from_secs(2), client.request_text(request)).await;
            matches!(asked, Ok(Ok(_)))
        });
        assert!(
            ready.await,
            "kube-apiserver is not ready after {READY_DEADLINE:?}: {}",
            self.keeper.log(API_SERVER)
        );
    }
}

/// How etcd writes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Etcd {
    /// It does not wait for the disk. The data ends with the test; a power cut is not among its cases.
    Hasty,
    /// What it has said is on the disk.
    #[allow(dead_code, reason = "only the benchmarks measure with a durable etcd")]
    Durable,
}

/// Starts etcd alone in a keeper's folder and waits until it answers.
pub async fn start_etcd(keeper: &Keeper, etcd: Etcd) {
    let program = tools::on_path(ETCD, "apt-get install etcd-server");
    // A name with a port is what etcd takes for a socket file of that name in its working folder.
    let (client, peer) = ("unix://etcd:0", "unix://peer:0");
    let mut argv = vec![program.display().to_string()];
    argv.extend([
        "--name=bench".to_owned(),
        "--data-dir=etcd.data".to_owned(),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--listen-peer-urls={peer}"),
        format!("--initial-advertise-peer-urls={peer}"),
        format!("--initial-cluster=bench={peer}"),
        format!("--unsafe-no-fsync={}", etcd == Etcd::Hasty),
    ]);
    keeper.run(ETCD, &argv);
    let socket = keeper.folder().join("etcd:0");
    let answers = comes_true(READY_DEADLINE, || async {
        assert!(keeper.is_running(ETCD), "etcd ended: {}", keeper.log(ETCD));
        UnixStream::connect(&socket).await.is_ok()
    });
    assert!(answers.await, "etcd does not listen after {READY_DEADLINE:?}: {}", keeper.log(ETCD));
}

/// A port that is ours from now on. The server may listen on it all the same, because both ask to share it.
fn held_port() -> (Socket, SocketAddr) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_reuse_port(true).expect("Linux shares ports");
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a free loopback port");
    let address = socket.local_addr().ok().and_then(|address| address.as_socket());
    (socket, address.expect("it is bound"))
}

fn arguments(program: &Path, folder: &Path, address: SocketAddr, flags: &[String]) -> Vec<String> {
    let file = |name: &str| folder.join(name).display().to_string();
    let mut all = vec![
        program.display().to_string(),
        format!("--etcd-servers=unix://{}", file("etcd:0")),
        format!("--bind-address={}", address.ip()),
        format!("--secure-port={}", address.port()),
        "--permit-port-sharing=true".to_owned(),
        // No endpoints of its own service: nobody comes by the service's address, and the loopback would be
        // refused.
        format!("--advertise-address={}", address.ip()),
        "--endpoint-reconciler-type=none".to_owned(),
        "--service-cluster-ip-range=10.96.0.0/16".to_owned(),
        "--allow-privileged=true".to_owned(),
        "--authorization-mode=Node,RBAC".to_owned(),
        format!("--cert-dir={}", file("made")),
        format!("--client-ca-file={}", file("ca.crt")),
        format!("--tls-cert-file={}", file("server.crt")),
        format!("--tls-private-key-file={}", file("server.key")),
        "--service-account-issuer=https://kubernetes.default.svc".to_owned(),
        format!("--service-account-key-file={}", file("accounts.crt")),
        format!("--service-account-signing-key-file={}", file("accounts.key")),
        // A token ends when it says so, not a year later.
        "--service-account-extend-token-expiration=false".to_owned(),
    ];
    all.extend_from_slice(flags);
    all
}
