//! Every lever does what it says, seen from a client.

use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use k8s_openapi::api::core::v1::ConfigMap;
use kube::api::{Api, PostParams};

use crate::support::api_server::access::Access;
use crate::support::api_server::{ApiServer, Weather, comes_true};

/// Long enough for any answer of a healthy server on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long silence is watched. An answer that should not come would come within it.
const SILENCE: Duration = Duration::from_millis(400);

#[tokio::test]
async fn a_private_server_is_paused_stopped_and_restarted_with_its_data() {
    let server = ApiServer::start().await;
    let case = server.case().await;
    let maps = maps(&case.admin()).await;
    create(&maps, "before").await.unwrap();

    server.pause();
    let mut asked = Box::pin(maps.get("before"));
    assert!(tokio::time::timeout(SILENCE, &mut asked).await.is_err(), "a paused server answered");
    server.resume();
    tokio::time::timeout(PATIENCE, asked).await.unwrap().unwrap();

    let address = server.address();
    server.stop();
    assert_eq!(TcpStream::connect(address).unwrap_err().kind(), std::io::ErrorKind::ConnectionRefused);
    assert!(maps.get("before").await.is_err());
    // Held also while nobody listens: another server cannot get the port.
    assert!(std::net::TcpListener::bind(address).is_err(), "the port was up for grabs");

    server.restart().await;
    assert_eq!(server.address(), address);
    maps.get("before").await.unwrap();
}

#[tokio::test]
async fn a_slow_proxy_delays_every_answer() {
    let case = ApiServer::shared().await.case().await;
    let proxy = case.proxy();
    let maps = maps(&case.admin().through(&proxy)).await;
    create(&maps, "object").await.unwrap();
    let delay = Duration::from_millis(150);
    proxy.set(Weather::Slow(delay));
    let asked = std::time::Instant::now();
    maps.get("object").await.unwrap();
    // There and back. Only the lower bound is certain.
    assert!(asked.elapsed() >= 2 * delay, "{:?}", asked.elapsed());
}

#[tokio::test]
async fn a_resetting_proxy_fails_requests_until_it_is_healed() {
    let case = ApiServer::shared().await.case().await;
    let proxy = case.proxy();
    let maps = maps(&case.admin().through(&proxy)).await;
    create(&maps, "object").await.unwrap();
    proxy.set(Weather::Reset);
    assert!(tokio::time::timeout(PATIENCE, maps.get("object")).await.unwrap().is_err());
    proxy.heal();
    maps.get("object").await.unwrap();
}

#[tokio::test]
async fn a_reset_is_a_reset_and_not_a_polite_end() {
    let case = ApiServer::shared().await.case().await;
    let proxy = case.proxy();
    let mut stream = TcpStream::connect(proxy.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    proxy.set(Weather::Reset);
    let end = stream.read(&mut [0; 8]).unwrap_err();
    assert_eq!(end.kind(), std::io::ErrorKind::ConnectionReset);
}

#[tokio::test]
async fn connections_are_reset_once_and_new_ones_are_served() {
    let case = ApiServer::shared().await.case().await;
    let proxy = case.proxy();
    let mut carried = TcpStream::connect(proxy.address()).unwrap();
    carried.set_read_timeout(Some(PATIENCE)).unwrap();
    let maps = maps(&case.admin().through(&proxy)).await;
    // The proxy takes connections in order: after this answer it has the first one too.
    create(&maps, "object").await.unwrap();
    proxy.reset_connections();
    assert_eq!(carried.read(&mut [0; 8]).unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    let served = comes_true(PATIENCE, || async { maps.get("object").await.is_ok() });
    assert!(served.await, "new connections are not served");
}

#[tokio::test]
async fn a_blackhole_swallows_requests_and_delivers_them_once_healed() {
    let case = ApiServer::shared().await.case().await;
    let proxy = case.proxy();
    let maps = maps(&case.admin().through(&proxy)).await;
    create(&maps, "before").await.unwrap();
    proxy.set(Weather::Blackhole);
    let mut write = Box::pin(create(&maps, "during"));
    assert!(tokio::time::timeout(SILENCE, &mut write).await.is_err(), "a blackhole answered");
    let direct = self::maps(&case.admin()).await;
    assert!(direct.get_opt("during").await.unwrap().is_none(), "a blackhole let a request through");
    proxy.heal();
    tokio::time::timeout(PATIENCE, write).await.unwrap().unwrap();
    direct.get("during").await.unwrap();
}

#[tokio::test]
async fn a_new_connection_into_a_blackhole_gets_no_handshake() {
    let case = ApiServer::shared().await.case().await;
    let proxy = case.proxy();
    proxy.set(Weather::Blackhole);
    let maps = maps(&case.admin().through(&proxy)).await;
    let mut asked = Box::pin(maps.get_opt("any"));
    assert!(tokio::time::timeout(SILENCE, &mut asked).await.is_err(), "a blackhole answered");
    proxy.heal();
    assert!(tokio::time::timeout(PATIENCE, asked).await.unwrap().unwrap().is_none());
}

#[tokio::test]
async fn held_answers_leave_the_writer_waiting_for_a_write_that_happened() {
    let case = ApiServer::shared().await.case().await;
    let proxy = case.proxy();
    let maps = maps(&case.admin().through(&proxy)).await;
    create(&maps, "before").await.unwrap();
    proxy.set(Weather::AnswersHeld);
    let mut write = Box::pin(create(&maps, "during"));
    assert!(tokio::time::timeout(SILENCE, &mut write).await.is_err(), "an answer came through");
    let direct = self::maps(&case.admin()).await;
    let happened = comes_true(PATIENCE, || async { direct.get_opt("during").await.unwrap().is_some() });
    assert!(happened.await, "the request did not come through");
    proxy.heal();
    tokio::time::timeout(PATIENCE, write).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_lost_answer_is_an_error_after_a_write_that_happened() {
    let case = ApiServer::shared().await.case().await;
    let proxy = case.proxy();
    let maps = maps(&case.admin().through(&proxy)).await;
    create(&maps, "before").await.unwrap();
    proxy.set(Weather::AnswersLost);
    assert!(tokio::time::timeout(PATIENCE, create(&maps, "during")).await.unwrap().is_err());
    self::maps(&case.admin()).await.get("during").await.unwrap();
}

#[tokio::test]
async fn one_tests_weather_is_not_anothers() {
    let server = ApiServer::shared().await;
    let (one, two) = (server.case().await, server.case().await);
    let (cut, whole) = (one.proxy(), two.proxy());
    cut.set(Weather::Blackhole);
    create(&maps(&two.admin().through(&whole)).await, "object").await.unwrap();
}

async fn maps(access: &Access) -> Api<ConfigMap> {
    Api::default_namespaced(access.client().await)
}

async fn create(maps: &Api<ConfigMap>, name: &str) -> Result<ConfigMap, kube::Error> {
    let mut map = ConfigMap::default();
    map.metadata.name = Some(name.to_owned());
    maps.create(&PostParams::default(), &map).await
}
