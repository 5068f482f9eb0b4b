//! A TCP proxy in front of the API server that can be slow, rude or silent.
//!
//! Each test makes its own, so that no test disturbs another. It carries bytes and knows nothing of TLS or
//! HTTP, and it must never change one.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What the network does to the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weather {
    /// Everything passes at once.
    Fine,
    /// Every piece, in both directions, arrives later by this much.
    Slow(Duration),
    /// Present connections are reset, and so is every new one.
    Reset,
    /// Nothing passes. As on a real link nothing is lost for good either: TCP's patience delivers it once
    /// healed.
    Blackhole,
    /// Requests pass, answers are held back until healed: a watch that lags while the world moves on.
    AnswersHeld,
    /// Requests pass, and the answer's first byte resets the connection: the write happened, the writer does
    /// not know. The handshake of a new connection is such an answer: set it once the client has one open.
    AnswersLost,
}

#[derive(Clone, Copy)]
struct State {
    weather: Weather,
    /// Counts single resets: a connection born under another number is to go.
    resets: u64,
    ended: bool,
}

/// A running proxy. Dropping it closes its connections and its port.
pub struct Proxy {
    address: SocketAddr,
    state: watch::Sender<State>,
    connections: Arc<AtomicUsize>,
    thread: Option<JoinHandle<()>>,
}

impl Proxy {
    /// A proxy on a free loopback port towards `server`, in fine weather.
    pub fn before(server: SocketAddr) -> Self {
        let (state, seen) = watch::channel(State { weather: Weather::Fine, resets: 0, ended: false });
        let (tell, told) = mpsc::channel();
        let connections = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&connections);
        // A thread and runtime of its own: it works also while the test's runtime is busy or blocked.
        let thread = std::thread::spawn(move || {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(async move {
                let listener =
                    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free loopback port");
                tell.send(listener.local_addr().expect("it is bound")).expect("the maker waits");
                serve(listener, server, seen, &counter).await;
            });
        });
        let address = told.recv().expect("the proxy's thread started");
        Self { address, state, connections, thread: Some(thread) }
    }

    /// How many connections clients have opened.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Changes the weather for present and new connections.
    pub fn set(&self, weather: Weather) {
        self.state.send_modify(|state| state.weather = weather);
    }

    /// Fine weather again; what was held back goes on its way.
    pub fn heal(&self) {
        self.set(Weather::Fine);
    }

    /// Resets the connections of this moment, once. New ones are served.
    pub fn reset_connections(&self) {
        self.state.send_modify(|state| state.resets += 1);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.send_modify(|state| state.ended = true);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

async fn serve(
    listener: TcpListener,
    server: SocketAddr,
    state: watch::Receiver<State>,
    counter: &AtomicUsize,
) {
    let mut connections = JoinSet::new();
    let mut ends = state.clone();
    loop {
        tokio::select! {
            _ = ends.wait_for(|state| state.ended) => return,
            accepted = listener.accept() => match accepted {
                Ok((client, _)) => {
                    counter.fetch_add(1, Ordering::SeqCst);
                    drop(connections.spawn(carry(client, server, state.clone())));
                }
                // Out of descriptors for a moment: others close some.
                Err(_) => tokio::task::yield_now().await,
            },
            Some(_) = connections.join_next() => {}
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Towards {
    Server,
    Client,
}

async fn carry(mut client: TcpStream, server: SocketAddr, mut state: watch::Receiver<State>) {
    let born = state.borrow().resets;
    let mut resets = state.clone();
    let reset = resets.wait_for(move |state| state.weather == Weather::Reset || state.resets != born);
    let mut upstream = None;
    let work = async {
        let _ = client.set_nodelay(true);
        let open = |state: &State| state.weather != Weather::Blackhole;
        state.wait_for(open).await.ok().ok_or(Rude)?;
        let upstream = upstream.insert(TcpStream::connect(server).await.map_err(|_| Rude)?);
        let _ = upstream.set_nodelay(true);
        let (mut from_client, mut to_client) = client.split();
        let (mut from_server, mut to_server) = upstream.split();
        tokio::try_join!(
            pump(&mut from_client, &mut to_server, Towards::Server, state.clone()),
            pump(&mut from_server, &mut to_client, Towards::Client, state.clone()),
        )
    };
    let ended = tokio::select! {
        biased;
        _ = reset => Err(Rude),
        ended = work => ended,
    };
    if ended.is_err() {
        // Closed without lingering, a socket says RST, not goodbye.
        for stream in [Some(&client), upstream.as_ref()].into_iter().flatten() {
            let _ = SockRef::from(stream).set_linger(Some(Duration::ZERO));
        }
    }
}

/// The connection is to end by a reset.
struct Rude;

async fn pump(
    from: &mut (impl AsyncReadExt + Unpin),
    to: &mut (impl AsyncWriteExt + Unpin),
    towards: Towards,
    mut state: watch::Receiver<State>,
) -> Result<(), Rude> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let length = from.read(&mut buffer).await.map_err(|_| Rude)?;
        passage(towards, &mut state).await?;
        if length == 0 {
            return to.shutdown().await.map_err(|_| Rude);
        }
        to.write_all(&buffer[..length]).await.map_err(|_| Rude)?;
    }
}

/// Returns when a piece may go on.
async fn passage(towards: Towards, state: &mut watch::Receiver<State>) -> Result<(), Rude> {
    loop {
        let weather = state.borrow_and_update().weather;
        match weather {
            Weather::Fine => return Ok(()),
            Weather::Slow(delay) => {
                tokio::time::sleep(delay).await;
                return Ok(());
            }
            Weather::AnswersHeld | Weather::AnswersLost if towards == Towards::Server => return Ok(()),
            Weather::AnswersLost | Weather::Reset => return Err(Rude),
            Weather::Blackhole | Weather::AnswersHeld => state.changed().await.map_err(|_| Rude)?,
        }
    }
}
