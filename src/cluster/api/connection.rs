//! The plugin's one connection to the API server: a handshake, and everything that is asked at once goes over
//! it side by side. A client with a pool would open a connection for each of several parallel requests, and a
//! handshake costs more than most answers.
//!
//! Must never repeat a request that broke: whether it may be sent again is the asker's to know. What the
//! server answers with "not now" (429, 503, 504) is sent again after a while, as kube's own client does; of a
//! write that was done all the same the precondition tells.

use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::{HOST, HeaderValue};
use http::uri::{PathAndQuery, Scheme, Uri};
use http::{Request, Response};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use kube::client::retry::RetryPolicy;
use kube::client::{Body, ClientBuilder, ConfigExt};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tower::retry::RetryLayer;
use tower::util::option_layer;
use tower::{BoxError, Layer, Service};

const HTTP_2: &[u8] = b"h2";
/// After this time without an answer the next address of the server is tried: a verb has three seconds.
const NEXT_ADDRESS: Duration = Duration::from_millis(700);

/// A client that asks over one connection, which is opened at once, while the asker sees to other things.
/// Where there is no TLS, or a proxy between, it is kube's own. `addresses` are those of the server, of which
/// the first that answers is used: none is looked up here.
/// Errors: the credentials are of no use.
pub(crate) fn client(
    config: kube::Config,
    addresses: Vec<SocketAddr>,
) -> Result<(kube::Client, Option<Wire>), kube::Error> {
    let to = match (&config.proxy_url, config.cluster_url.scheme()) {
        (None, Some(scheme)) if *scheme == Scheme::HTTPS => Target::of(&config, addresses)?,
        _ => None,
    };
    let Some(to) = to else { return Ok((kube::Client::try_from(config)?, None)) };
    let wire = Wire { to: Arc::new(to), line: Arc::new(Mutex::new(None)) };
    tokio::spawn(wire.clone().call_ahead());
    let called = wire.clone();
    // The order that kube gives them: the outermost last.
    let wire = config.extra_headers_layer()?.layer(wire);
    let wire = option_layer(config.auth_layer()?).layer(wire);
    let wire =
        option_layer(config.default_retry.then(|| RetryLayer::new(RetryPolicy::server_retry()))).layer(wire);
    let wire = config.base_uri_layer().layer(wire);
    Ok((ClientBuilder::new(wire, config.default_namespace).build(), Some(called)))
}

/// Whom to call, and how to know him.
struct Target {
    addresses: Vec<SocketAddr>,
    name: ServerName<'static>,
    tls: TlsConnector,
}

/// The addresses to which the client of this configuration connects. `written` are those that the kubeconfig
/// lists, for a server that it names.
/// Errors: it is a name without addresses. The C library would look it up by modules of the host, which a
/// program that is linked statically must not load (docs/decisions/0006).
pub(crate) fn addresses(config: &kube::Config, written: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, String> {
    let url = config.proxy_url.as_ref().unwrap_or(&config.cluster_url);
    let host = url.host().unwrap_or_default();
    let default_port = if url.scheme() == Some(&Scheme::HTTPS) { 443 } else { 80 };
    let port = url.port_u16().unwrap_or(default_port);
    match host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>() {
        Ok(address) if written.is_empty() => Ok(vec![SocketAddr::new(address, port)]),
        Err(_) if written.is_empty() => Err(format!(
            "{host} is a name, and the plugin resolves none; write the address, and the name as tls-server-name"
        )),
        _ => Ok(written),
    }
}

impl Target {
    /// None if the server's name is none that TLS knows; kube has words for that.
    fn of(config: &kube::Config, addresses: Vec<SocketAddr>) -> Result<Option<Self>, kube::Error> {
        let mut tls = config.rustls_client_config()?;
        tls.alpn_protocols = vec![HTTP_2.to_vec(), b"http/1.1".to_vec()];
        let Some(host) = config.cluster_url.host() else { return Ok(None) };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = config.tls_server_name.clone().unwrap_or_else(|| host.clone());
        let Ok(name) = ServerName::try_from(name) else { return Ok(None) };
        Ok(Some(Self { addresses, name, tls: TlsConnector::from(Arc::new(tls)) }))
    }

    /// The first address that answers.
    async fn connect(&self) -> std::io::Result<TcpStream> {
        let mut tries = self.addresses.iter().peekable();
        let mut failed = std::io::Error::other("the kubeconfig lists no address");
        while let Some(address) = tries.next() {
            let connecting = TcpStream::connect(address);
            let connected = match tries.peek() {
                // The caller's own time limits the last.
                None => connecting.await,
                Some(_) => tokio::time::timeout(NEXT_ADDRESS, connecting)
                    .await
                    .unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into())),
            };
            match connected {
                Ok(stream) => return Ok(stream),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    async fn call(&self) -> Result<Line, BoxError> {
        let stream = self.connect().await?;
        stream.set_nodelay(true)?;
        let stream = self.tls.connect(self.name.clone(), stream).await?;
        let two = stream.get_ref().1.alpn_protocol() == Some(HTTP_2);
        let stream = TokioIo::new(stream);
        // Requests over the connection report its errors.
        if two {
            let (line, connection) = http2::handshake(TokioExecutor::new(), stream).await?;
            tokio::spawn(connection);
            Ok(Line::Two(line))
        } else {
            let (line, connection) = http1::handshake(stream).await?;
            tokio::spawn(connection);
            Ok(Line::One(line))
        }
    }
}

enum Line {
    /// Of those behind a balancer that knows no better: one request after the other.
    One(http1::SendRequest<Body>),
    /// As many requests at once as there are.
    Two(http2::SendRequest<Body>),
}

impl Line {
    fn is_open(&self) -> bool {
        match self {
            Self::One(line) => !line.is_closed(),
            Self::Two(line) => !line.is_closed(),
        }
    }
}

/// Calls before the first request comes, and again when the connection has broken.
#[derive(Clone)]
pub(crate) struct Wire {
    to: Arc<Target>,
    line: Arc<Mutex<Option<Line>>>,
}

impl Wire {
    /// If it fails, the first request tries again and gets the error.
    async fn call_ahead(self) {
        let mut kept = self.line.lock().await;
        if kept.is_none() {
            *kept = self.to.call().await.ok();
        }
    }

    /// Waits until the call that was made ahead has come through, or has failed: whether there is a
    /// connection. Requests after that go out together; requests that wait for a connection go one after the
    /// other.
    pub(crate) async fn settled(&self) -> bool {
        self.line.lock().await.as_ref().is_some_and(Line::is_open)
    }

    async fn ask(self, request: Request<Body>) -> Result<Response<Incoming>, BoxError> {
        // A second request waits while the connection is being opened.
        let mut kept = self.line.lock().await;
        let line = match kept.take().filter(Line::is_open) {
            Some(line) => kept.insert(line),
            None => kept.insert(self.to.call().await?),
        };
        match line {
            Line::Two(line) => {
                let mut line = line.clone();
                drop(kept);
                line.ready().await?;
                Ok(line.send_request(request).await?)
            }
            Line::One(line) => {
                line.ready().await?;
                Ok(line.send_request(of_one(request)?).await?)
            }
        }
    }
}

/// The first version of HTTP names the server in a header, and only the path in the first line.
fn of_one(mut request: Request<Body>) -> Result<Request<Body>, BoxError> {
    if let Some(server) = request.uri().authority() {
        let server = HeaderValue::from_str(server.as_str())?;
        request.headers_mut().insert(HOST, server);
    }
    let path = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    *request.uri_mut() = Uri::from(path);
    Ok(request)
}

impl Service<Request<Body>> for Wire {
    type Response = Response<Incoming>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.clone().ask(request))
    }
}

#[cfg(feature = "agent")]
#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use hyper::server::conn::http1 as server;
    use hyper::service::service_fn;
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;
    use tokio_rustls::rustls::ServerConfig;
    use tokio_rustls::rustls::pki_types::PrivateKeyDer;

    use super::*;

    /// A server that speaks the first version of HTTP, and tells each asker on which connection he is. Every
    /// connection ends after `answers` answers.
    async fn of_the_first_version(answers: usize) -> kube::Config {
        let made = rcgen::generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).unwrap();
        let (certificate, key) = (made.cert.der().clone(), made.signing_key.serialize_der());
        let tls = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![certificate.clone()], PrivateKeyDer::try_from(key).unwrap())
            .unwrap();
        let tls = TlsAcceptor::from(Arc::new(tls));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://{}", listener.local_addr().unwrap()).parse().unwrap();
        tokio::spawn(async move {
            let mut number = 0;
            while let Ok((stream, _)) = listener.accept().await {
                number += 1;
                let told = AtomicUsize::new(0);
                let stream = TokioIo::new(tls.accept(stream).await.unwrap());
                let answer = service_fn(move |request: Request<Incoming>| {
                    let last = told.fetch_add(1, Ordering::Relaxed) + 1 == answers;
                    async move {
                        assert_eq!(request.uri().authority(), None);
                        assert!(request.headers().contains_key(HOST));
                        let body = format!("{number} {}", request.uri().path());
                        let answer = Response::builder();
                        let answer = if last { answer.header("connection", "close") } else { answer };
                        Ok::<_, Infallible>(answer.body(body).unwrap())
                    }
                });
                tokio::spawn(async move { server::Builder::new().serve_connection(stream, answer).await });
            }
        });
        let mut config = kube::Config::new(url);
        config.root_cert = Some(vec![certificate.to_vec()]);
        config
    }

    fn of(config: kube::Config) -> kube::Client {
        let addresses = addresses(&config, Vec::new()).unwrap();
        client(config, addresses).unwrap().0
    }

    #[test]
    fn a_name_is_not_resolved_but_reached_by_its_listed_addresses() {
        let config = |url: &str| kube::Config::new(url.parse().unwrap());
        let given: SocketAddr = "10.0.0.7:6443".parse().unwrap();
        let of = |url: &str, written: &[SocketAddr]| addresses(&config(url), written.to_vec());
        assert_eq!(of("https://10.0.0.7:6443", &[]), Ok(vec![given]));
        assert_eq!(of("https://[fd00::1]", &[]), Ok(vec!["[fd00::1]:443".parse().unwrap()]));
        assert_eq!(of("https://api.example.com:6443", &[given]), Ok(vec![given]));
        let error = of("https://localhost:6443", &[]).unwrap_err();
        assert!(error.contains("localhost") && error.contains("tls-server-name"), "{error}");
        let mut proxied = config("https://10.0.0.7:6443");
        proxied.proxy_url = Some("http://proxy.example.com:3128".parse().unwrap());
        assert!(addresses(&proxied, Vec::new()).unwrap_err().contains("proxy.example.com"));
    }

    #[tokio::test]
    async fn the_next_address_is_tried_where_one_does_not_answer() {
        let config = of_the_first_version(usize::MAX).await;
        let good: SocketAddr = config.cluster_url.authority().unwrap().as_str().parse().unwrap();
        // A port that was free a moment ago refuses.
        let refuses = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
        let (client, _) = client(config, vec![refuses, good]).unwrap();
        assert_eq!(ask(&client, "/").await, "1 /");
    }

    async fn ask(client: &kube::Client, path: &str) -> String {
        client.request_text(Request::get(path).body(Vec::new()).unwrap()).await.unwrap()
    }

    #[tokio::test]
    async fn an_http1_server_gets_one_request_after_the_other_on_one_connection() {
        let client = of(of_the_first_version(usize::MAX).await);
        let answers = tokio::join!(ask(&client, "/a"), ask(&client, "/b"), ask(&client, "/c"));
        assert_eq!(answers, ("1 /a".into(), "1 /b".into(), "1 /c".into()));
    }

    #[tokio::test]
    async fn a_connection_that_has_ended_is_opened_again() {
        let client = of(of_the_first_version(2).await);
        let mut answers = Vec::new();
        for _ in 0..4 {
            answers.push(ask(&client, "/").await);
        }
        assert_eq!(answers, ["1 /", "1 /", "2 /", "2 /"]);
    }
}
