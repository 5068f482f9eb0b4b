//! A stand-in in front of the API server that ends TLS, passes requests on as they are, and answers chosen
//! ones with an error of the server's shape.
//!
//! It speaks the first version of HTTP alone, so that requests have an order, and passes on what is asked
//! with a token. Watches it cannot: an answer is passed on when it is whole.

use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::{Arc, Mutex};

use http::header::{CONNECTION, CONTENT_LENGTH, HOST, TRANSFER_ENCODING};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use serde_json::json;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// Which requests are answered with an error.
#[derive(Clone, Copy, Debug)]
pub struct Trouble {
    /// The answer.
    pub status: u16,
    /// The first one, counted from 1 since the trouble began.
    pub from: usize,
    /// The last one.
    pub to: usize,
    /// Whether what is asked for is done all the same.
    pub done: bool,
}

#[derive(Default)]
struct State {
    trouble: Option<Trouble>,
    seen: usize,
}

/// A running stand-in, on the runtime of whoever started it.
pub struct Front {
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Front {
    /// A stand-in for the server whose certificates lie in this folder.
    pub(super) async fn before(server: SocketAddr, folder: &Path) -> Self {
        let certificates = |name: &str| -> Vec<CertificateDer<'static>> {
            let read = CertificateDer::pem_file_iter(folder.join(name)).expect("the bench wrote it");
            read.map(|certificate| certificate.expect("a certificate")).collect()
        };
        let key = PrivateKeyDer::from_pem_file(folder.join("server.key")).expect("the bench wrote it");
        let tls = ServerConfig::builder().with_no_client_auth();
        let tls = tls.with_single_cert(certificates("server.crt"), key).expect("they belong together");
        let tls = TlsAcceptor::from(Arc::new(tls));
        let mut config = kube::Config::new(format!("https://{server}").parse().expect("an address"));
        config.root_cert = Some(certificates("ca.crt").into_iter().map(|one| one.to_vec()).collect());
        let client = kube::Client::try_from(config).expect("fresh certificates");
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free loopback port");
        let address = listener.local_addr().expect("it is bound");
        let state = Arc::new(Mutex::new(State::default()));
        let served = state.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (tls, client, state) = (tls.clone(), client.clone(), served.clone());
                tokio::spawn(async move {
                    let Ok(stream) = tls.accept(stream).await else { return };
                    let service = service_fn(|request| answer(request, client.clone(), &state));
                    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                });
            }
        });
        Self { address, state }
    }

    /// Where clients connect.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on requests are counted, and some answered with an error.
    pub fn begin(&self, trouble: Trouble) {
        *self.state.lock().expect("nobody panics with it") = State { trouble: Some(trouble), seen: 0 };
    }

    /// How many requests there were since it began.
    pub fn seen(&self) -> usize {
        self.state.lock().expect("nobody panics with it").seen
    }

    /// Everything passes again.
    pub fn end(&self) {
        *self.state.lock().expect("nobody panics with it") = State::default();
    }
}

async fn answer(
    request: Request<Incoming>,
    client: kube::Client,
    state: &Mutex<State>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let trouble = {
        let mut state = state.lock().expect("nobody panics with it");
        state.seen += 1;
        let seen = state.seen;
        state.trouble.filter(|trouble| (trouble.from..=trouble.to).contains(&seen))
    };
    let refused = trouble.map(|trouble| refusal(trouble.status));
    if let (Some(refused), Some(Trouble { done: false, .. })) = (&refused, trouble) {
        return Ok(refused.clone());
    }
    let (mut head, body) = request.into_parts();
    for name in [HOST, CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING] {
        head.headers.remove(name);
    }
    let body = body.collect().await.expect("the client says all that it has to").to_bytes();
    let passed_on = client.send(Request::from_parts(head, kube::client::Body::from(body.to_vec()))).await;
    let (mut head, body) = passed_on.expect("the server is there").into_parts();
    for name in [CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING] {
        head.headers.remove(name);
    }
    let body = body.collect().await.expect("the server says all that it has to").to_bytes();
    Ok(refused.unwrap_or_else(|| Response::from_parts(head, Full::new(body))))
}

fn refusal(status: u16) -> Response<Full<Bytes>> {
    let reason = match status {
        429 => "TooManyRequests",
        503 => "ServiceUnavailable",
        _ => "InternalError",
    };
    let body = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason,
                      "message": "the stand-in says no", "code": status});
    let mut answer = Response::new(Full::new(Bytes::from(body.to_string())));
    *answer.status_mut() = StatusCode::from_u16(status).expect("a status");
    answer.headers_mut().insert("content-type", http::HeaderValue::from_static("application/json"));
    answer
}
