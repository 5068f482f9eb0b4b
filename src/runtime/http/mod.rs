//! `/healthz`, `/readyz` and `/metrics`, over TLS where the operator gave a certificate. Must never say ready before the part
//! itself says so.

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
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use crate::runtime::tls::{CertificateFiles, CertificateSource, TlsError};

/// How many connections are served at once: whoever holds more open is not a probe.
const MOST_CONNECTIONS: usize = 32;
/// How long a handshake may take, and a request to arrive.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);
/// For question and answer together: whoever does not read takes a place from those who do.
const WHOLE_TIMEOUT: Duration = Duration::from_secs(60);

/// What keeps the part from being ready, each with its cure; shared with whoever knows it.
#[derive(Debug, Clone)]
pub struct Readiness(Arc<Mutex<Vec<String>>>);

impl Default for Readiness {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(vec!["it has just started".to_owned()])))
    }
}

impl Readiness {
    /// It is.
    pub fn yes(&self) {
        self.set(Vec::new());
    }

    /// It is not.
    pub fn no(&self, why: impl Into<String>) {
        self.set(vec![why.into()]);
    }

    /// It is not, for each of these reasons; it is if there is none.
    pub fn set(&self, problems: Vec<String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = problems;
    }

    /// What is wrong; nothing if it is ready.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Writes the page for Prometheus.
pub type Counts = Arc<dyn Fn() -> String + Send + Sync>;

/// Why the pages cannot be served.
#[derive(Debug, Error)]
pub enum HttpServerError {
    /// The address is taken, or not of this machine.
    #[error("--metrics-address {address}: {source}; name another address, or end the program that has it")]
    Address {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The certificate or its key cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// A bound listener, so that a taken address or a bad certificate is found at the start.
pub struct HttpServer {
    listener: TcpListener,
    tls: Option<TlsAcceptor>,
    counts: Counts,
    ready: Readiness,
}

impl HttpServer {
    /// Binds the address, and reads the certificate if there shall be one.
    ///
    /// # Errors
    /// [`HttpServerError`].
    pub async fn bind(
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
            let (tls, counts, ready) = (self.tls.clone(), self.counts.clone(), self.ready.clone());
            tokio::spawn(async move {
                match tls {
                    None => converse(stream, &counts, &ready).await,
                    Some(tls) => match shake_hands(&tls, stream).await {
                        Ok(stream) => converse(stream, &counts, &ready).await,
                        Err(error) => tracing::debug!(%error, "no TLS with whoever asked for the metrics"),
                    },
                }
                drop(slot);
            });
        }
    }
}

async fn shake_hands(
    tls: &TlsAcceptor,
    stream: TcpStream,
) -> std::io::Result<tokio_rustls::server::TlsStream<TcpStream>> {
    match tokio::time::timeout(HEADER_TIMEOUT, tls.accept(stream)).await {
        Ok(shaken) => shaken,
        Err(_) => Err(std::io::ErrorKind::TimedOut.into()),
    }
}

async fn converse<S>(stream: S, counts: &Counts, ready: &Readiness)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
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
        Ok(Err(error)) => tracing::debug!(%error, "a connection to the metrics broke off"),
        Err(_) => tracing::debug!("whoever asked for the metrics does not read them"),
    }
}

fn answer(request: &Request<Incoming>, counts: &Counts, ready: &Readiness) -> Response<Full<Bytes>> {
    let plain = "text/plain";
    let (status, kind, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/healthz") => (StatusCode::OK, plain, "ok\n".to_owned()),
        (&Method::GET | &Method::HEAD, "/readyz") => match ready.problems() {
            problems if problems.is_empty() => (StatusCode::OK, plain, "ok\n".to_owned()),
            problems => {
                let lines = problems.iter().map(|problem| format!("not ready: {problem}\n")).collect();
                (StatusCode::SERVICE_UNAVAILABLE, plain, lines)
            }
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

#[cfg(test)]
mod tests;
