//! The peer of the benches works against the bench.

use crate::support::api_server::{ApiServer, Whereabouts};

#[tokio::test]
async fn whereabouts_gives_two_addresses_and_del_frees() {
    let server = ApiServer::shared().await;
    server.install_whereabouts_kinds().await;
    let case = server.case().await;
    let range = case.range();
    let peer = Whereabouts::configured(&case.admin(), range);
    let first = peer.add("pod-a", "container-a").unwrap();
    let second = peer.add("pod-b", "container-b").unwrap();
    assert_ne!(first, second);
    for address in [first, second] {
        assert!(ipnet::IpNet::from(range).contains(&address), "{address} is not of {range}");
    }
    peer.del("pod-a", "container-a").unwrap();
    assert_eq!(peer.add("pod-c", "container-c"), Ok(first), "whereabouts takes the lowest free address");
}
