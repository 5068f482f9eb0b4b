//! `/healthz`, `/readyz` and `/metrics`. Must never say ready before the watches have listed and a step has succeeded.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpListener;

use super::metrics::Metrics;

/// How many connections are served at once: whoever holds more open is not a probe.
const MOST_CONNECTIONS: usize = 32;

/// What keeps the agent from being ready, shared with the loop that knows it.
#[derive(Debug, Clone)]
pub struct Ready(Arc<Mutex<Vec<String>>>);

impl Default for Ready {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(vec!["the agent has just started".to_owned()])))
    }
}

impl Ready {
    /// Says what is wrong, each with its cure; nothing if it is ready.
    pub fn set(&self, problems: Vec<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = problems;
    }

    /// What is wrong.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// A bound listener, so that a taken address is found at the start.
#[derive(Debug)]
pub struct Pages {
    listener: TcpListener,
    metrics: Arc<Metrics>,
    ready: Ready,
}

impl Pages {
    /// Binds the address.
    ///
    /// # Errors
    /// It is taken, or not of this machine.
    pub async fn bind(address: SocketAddr, metrics: Arc<Metrics>, ready: Ready) -> std::io::Result<Self> {
        Ok(Self { listener: TcpListener::bind(address).await?, metrics, ready })
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
                    tokio::time::sleep(std::time::Duration::from_millis(100)).await;
                    continue;
                }
            };
            let (metrics, ready) = (self.metrics.clone(), self.ready.clone());
            tokio::spawn(async move {
                let service = service_fn(move |request| {
                    let answer = answer(&request, &metrics, &ready);
                    async move { Ok::<_, Infallible>(answer) }
                });
                let served = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(std::time::Duration::from_secs(10))
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

fn answer(request: &Request<Incoming>, metrics: &Metrics, ready: &Ready) -> Response<Full<Bytes>> {
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/healthz") => (StatusCode::OK, "text/plain", "ok\n".to_owned()),
        (&Method::GET | &Method::HEAD, "/readyz") => match ready.problems() {
            problems if problems.is_empty() => (StatusCode::OK, "text/plain", "ok\n".to_owned()),
            problems => {
                let text = problems.iter().map(|problem| format!("{problem}\n")).collect();
                (StatusCode::SERVICE_UNAVAILABLE, "text/plain", text)
            }
        },
        (&Method::GET | &Method::HEAD, "/metrics") => {
            (StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", metrics.page())
        }
        _ => (StatusCode::NOT_FOUND, "text/plain", "there is /metrics, /healthz and /readyz\n".to_owned()),
    };
    let built =
        Response::builder().status(status).header("content-type", kind).body(Full::new(Bytes::from(text)));
    built.unwrap_or_default()
}
