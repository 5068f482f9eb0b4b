//! `/healthz`, `/readyz` and `/metrics`, over TLS if a certificate is configured. Must never say ready before
//! the process itself says so.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use thiserror::Error;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, server::TlsStream};

use crate::runtime::locked;
use crate::runtime::tls::{CertificateFiles, CertificateSource, TlsError};

/// How many connections are served at once: probes and scrapers need fewer.
const MOST_CONNECTIONS: usize = 32;
/// How long a handshake may take, and a request to arrive.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// For request and answer together: a client that does not read takes a connection from the others.
const WHOLE_TIMEOUT: Duration = Duration::from_secs(60);

/// The problems that keep the process from being ready, each with what to do. Clones share them.
#[derive(Debug, Clone)]
pub struct Readiness(Arc<Mutex<Vec<String>>>);

impl Default for Readiness {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(vec!["it has just started".to_owned()])))
    }
}

impl Readiness {
    pub fn yes(&self) {
        self.set(Vec::new());
    }

    pub fn no(&self, why: impl Into<String>) {
        self.set(vec![why.into()]);
    }

    /// Not ready because of these problems; without any, ready.
    pub fn set(&self, problems: Vec<String>) {
        *locked(&self.0) = problems;
    }

    pub fn problems(&self) -> Vec<String> {
        locked(&self.0).clone()
    }
}

/// Writes the page for Prometheus.
pub type Counts = Arc<dyn Fn() -> String + Send + Sync>;

#[derive(Debug, Error)]
pub enum HttpServerError {
    /// The address is taken, or not of this machine.
    #[error("--metrics-address {address}: {source}; name another address, or end the program that has it")]
    Address { address: SocketAddr, source: std::io::Error },
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// A bound listener, so that a taken address or a bad certificate is found at the start.
pub(crate) struct HttpServer {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    counts: Counts,
    ready: Readiness,
}

impl HttpServer {
    /// Binds the address, and reads the certificate if one is configured.
    pub(crate) async fn bind(
        address: SocketAddr,
        pair: Option<CertificateFiles>,
        counts: Counts,
        ready: Readiness,
    ) -> Result<Self, HttpServerError> {
        let cannot = |source| HttpServerError::Address { address, source };
        let keys = pair.map(CertificateSource::load).transpose()?;
        let tls = keys.map(CertificateSource::acceptor).transpose().map_err(cannot)?;
        let listener = TcpListener::bind(address).await.map_err(cannot)?;
        Ok(Self { listener, tls, counts, ready })
    }

    pub(crate) fn address(&self) -> std::io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    pub(crate) async fn serve(self) {
        let slots = Arc::new(tokio::sync::Semaphore::new(MOST_CONNECTIONS));
        loop {
            let Ok(slot) = slots.clone().acquire_owned().await else { return };
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection for the metrics");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let (tls, counts, ready) = (self.tls.clone(), self.counts.clone(), self.ready.clone());
            tokio::spawn(async move {
                match tls {
                    None => converse(stream, &counts, &ready).await,
                    Some(tls) => match shake_hands(&tls, stream).await {
                        Ok(stream) => converse(stream, &counts, &ready).await,
                        Err(error) => {
                            tracing::debug!(%error, "the TLS handshake of a client of the metrics failed")
                        }
                    },
                }
                drop(slot);
            });
        }
    }
}

async fn shake_hands(tls: &TlsAcceptor, stream: TcpStream) -> std::io::Result<TlsStream<TcpStream>> {
    tokio::time::timeout(HEADER_TIMEOUT, tls.accept(stream)).await?
}

async fn converse(stream: impl AsyncRead + AsyncWrite + Unpin, counts: &Counts, ready: &Readiness) {
    let service = service_fn(|request| {
        let answer = answer(&request, counts, ready);
        async move { Ok::<_, Infallible>(answer) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(WHOLE_TIMEOUT, served).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a connection for the metrics was interrupted"),
        Err(_) => tracing::debug!("a client of the metrics does not read the answer"),
    }
}

fn answer(request: &Request<Incoming>, counts: &Counts, ready: &Readiness) -> Response<Full<Bytes>> {
    let plain = "text/plain";
    let is_read = matches!(*request.method(), Method::GET | Method::HEAD);
    let problems = ready.problems();
    let (status, kind, text) = match request.uri().path() {
        "/readyz" if is_read && !problems.is_empty() => {
            let lines = problems.iter().map(|problem| format!("not ready: {problem}\n")).collect();
            (StatusCode::SERVICE_UNAVAILABLE, plain, lines)
        }
        "/healthz" | "/readyz" if is_read => (StatusCode::OK, plain, "ok\n".to_owned()),
        "/metrics" if is_read => {
            (StatusCode::OK, "application/openmetrics-text; version=1.0.0; charset=utf-8", counts())
        }
        _ => (StatusCode::NOT_FOUND, plain, "there is /metrics, /healthz and /readyz\n".to_owned()),
    };
    let built = Response::builder().status(status).header("content-type", kind).body(Full::from(text));
    built.unwrap_or_default()
}

#[cfg(test)]
mod tests;
