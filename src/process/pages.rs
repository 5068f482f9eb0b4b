//! `/healthz`, `/readyz` and `/metrics`. Must never say ready before the part itself says so.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

/// How many connections are served at once: whoever holds more open is not a probe.
const MOST_CONNECTIONS: usize = 32;
/// How long a request may take to arrive.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether the part is ready, and if not why; shared with whoever knows it.
#[derive(Debug, Clone)]
pub struct Ready(Arc<Mutex<Result<(), String>>>);

impl Default for Ready {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(Err("it has just started".to_owned()))))
    }
}

impl Ready {
    /// It is.
    pub fn yes(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Ok(());
    }

    /// It is not.
    pub fn no(&self, why: impl Into<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Err(why.into());
    }

    /// Whether it is.
    ///
    /// # Errors
    /// Why it is not.
    pub fn get(&self) -> Result<(), String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Writes the page for Prometheus.
pub type Counts = Arc<dyn Fn() -> String + Send + Sync>;

/// A bound listener, so that a taken address is found at the start.
pub struct Pages {
    listener: TcpListener,
    counts: Counts,
    ready: Ready,
}

impl Pages {
    /// Binds the address.
    ///
    /// # Errors
    /// It is taken, or not of this machine.
    pub async fn bind(address: SocketAddr, counts: Counts, ready: Ready) -> std::io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await?, counts, ready })
    }

    /// Where it listens.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves until it is dropped.
    pub async fn serve(self) {
        let slots = Arc::new(tokio::sync::Semaphore::new(MOST_CONNECTIONS));
        loop {
            let Ok(slot) = slots.clone().acquire_owned().await else { return };
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot take a connection to the metrics");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let (counts, ready) = (self.counts.clone(), self.ready.clone());
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let answer = answer(&request, &counts, &ready);
                    async move { Ok::<_, Infallible>(answer) }
                });
                let served = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(HEADER_TIMEOUT)
                    .keep_alive(false)
                    .serve_connection(TokioIo::new(stream), service);
                if let Err(error) = served.await {
                    tracing::debug!(%error, "a connection to the metrics broke off");
                }
                drop(slot);
            });
        }
    }
}

fn answer(request: &Request<Incoming>, counts: &Counts, ready: &Ready) -> Response<Full<Bytes>> {
    let plain = "text/plain";
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/healthz") => (StatusCode::OK, plain, "ok\n".to_owned()),
        (&Method::GET | &Method::HEAD, "/readyz") => match ready.get() {
            Ok(()) => (StatusCode::OK, plain, "ok\n".to_owned()),
            Err(why) => (StatusCode::SERVICE_UNAVAILABLE, plain, format!("not ready: {why}\n")),
        },
        (&Method::GET | &Method::HEAD, "/metrics") => {
            (StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", counts())
        }
        _ => (StatusCode::NOT_FOUND, plain, "there is /metrics, /healthz and /readyz\n".to_owned()),
    };
    let built =
        Response::builder().status(status).header("content-type", kind).body(Full::new(Bytes::from(text)));
    built.unwrap_or_default()
}
