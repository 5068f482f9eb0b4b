//! The API tier: a real etcd and kube-apiserver for tests, without privileges.
//!
//! `ApiServer::shared().await.case().await` is how nearly every test begins. It must never touch anything but
//! the loopback, its own folder and the processes it started.

pub mod access;
pub mod case;
pub mod certificates;
pub mod front;
pub mod keeper;
pub mod objects;
pub mod proxy;
pub mod roles;
pub mod server;
pub mod tokens;
pub mod tools;
pub mod whereabouts;

pub use keeper::comes_true;
pub use proxy::Weather;
pub use server::ApiServer;
pub use whereabouts::Whereabouts;

/// An address of the loopback on which nobody listens.
pub fn free_address() -> std::net::SocketAddr {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a free loopback port");
    taken.local_addr().expect("it is bound")
}
