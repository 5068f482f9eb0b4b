//! The addresses of an API server that has a name: the agent looks them up, so that the plugin need not.
//!
//! Must never forget an address because the name service is away: after a cold start it may need pods, and
//! they the plugin.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};

/// How often the name is looked up. A control plane that moves is found within this.
const EVERY: Duration = Duration::from_secs(60);
/// How long one lookup may take; the files of the host wait for it.
const PATIENCE: Duration = Duration::from_secs(3);

/// Host and port of a server, and its addresses as far as they are known.
#[derive(Debug, Clone)]
pub(super) struct Resolver {
    host: String,
    port: u16,
    node: String,
    addresses: Vec<SocketAddr>,
    asked: Option<SystemTime>,
    failure: Option<String>,
}

impl Resolver {
    /// None if the host is an address.
    pub(super) fn of(host: &str, port: u16, node: &str) -> Option<Self> {
        let literal = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        let (host, node) = (host.to_owned(), node.to_owned());
        let fresh = || Self { host, port, node, addresses: Vec::new(), asked: None, failure: None };
        literal.is_err().then(fresh)
    }

    pub(super) fn host(&self) -> &str {
        &self.host
    }

    pub(super) fn addresses(&self) -> &[SocketAddr] {
        &self.addresses
    }

    /// Why nothing is known, or why what is known may be old.
    pub(super) fn failure(&self) -> Option<&str> {
        self.failure.as_deref()
    }

    /// Begins with what an agent before this one has written.
    pub(super) fn remember(&mut self, addresses: Vec<SocketAddr>) {
        if self.addresses.is_empty() {
            self.addresses = addresses;
        }
    }

    /// Looks the name up if that is due. Returns whether the addresses have changed.
    pub(super) async fn refresh(&mut self, now: SystemTime) -> bool {
        let is_fresh = |then: SystemTime| now.duration_since(then).is_ok_and(|age| age < EVERY);
        if self.asked.is_some_and(is_fresh) && self.failure.is_none() {
            return false;
        }
        self.asked = Some(now);
        let asking = tokio::net::lookup_host((self.host.clone(), self.port));
        let answer = match tokio::time::timeout(PATIENCE, asking).await {
            Ok(answer) => answer.map(Iterator::collect::<Vec<_>>),
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        };
        self.take(answer)
    }

    fn take(&mut self, answer: io::Result<Vec<SocketAddr>>) -> bool {
        let found = match answer {
            Ok(found) if !found.is_empty() => found,
            Ok(_) => return self.fail("the name has no address".to_owned()),
            Err(error) => return self.fail(error.to_string()),
        };
        self.failure = None;
        let found = in_order(found, &self.node);
        let before = std::mem::replace(&mut self.addresses, found);
        before != self.addresses
    }

    fn fail(&mut self, why: String) -> bool {
        if self.failure.as_ref() != Some(&why) {
            tracing::warn!(
                host = self.host,
                reason = why,
                "cannot resolve the API server's name; trying again"
            );
        }
        self.failure = Some(why);
        false
    }
}

/// Each address once, in an order that answers of a name service in turns do not change, and that begins at
/// another place on every node.
fn in_order(mut found: Vec<SocketAddr>, node: &str) -> Vec<SocketAddr> {
    found.sort();
    found.dedup();
    let first = usize::from(Sha256::digest(node.as_bytes())[0]) % found.len().max(1);
    found.rotate_left(first);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<SocketAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn only_a_name_is_looked_up() {
        assert!(Resolver::of("10.0.0.7", 6443, "n1").is_none());
        assert!(Resolver::of("[fd00::1]", 6443, "n1").is_none());
        assert!(Resolver::of("api.example.com", 6443, "n1").is_some());
    }

    #[test]
    fn answers_in_turns_change_nothing_and_nodes_begin_at_different_places() {
        let (one, two) =
            (["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"], ["10.0.0.3:1", "10.0.0.1:1", "10.0.0.2:1"]);
        let mut resolver = Resolver::of("api", 1, "n1").unwrap();
        assert!(resolver.take(Ok(addresses(&one))));
        assert!(!resolver.take(Ok(addresses(&two))));
        assert!(resolver.take(Ok(addresses(&two[..2]))), "one is gone");
        let first = |node: usize| in_order(addresses(&one), &format!("n{node}"))[0];
        assert!((0..50).any(|node| first(node) != first(0)));
    }

    #[test]
    fn a_name_service_that_is_away_takes_no_address_away() {
        let mut resolver = Resolver::of("api", 1, "n1").unwrap();
        let away = || Err(io::ErrorKind::TimedOut.into());
        assert!(!resolver.take(away()) && resolver.addresses().is_empty());
        resolver.remember(addresses(&["10.0.0.1:1"]));
        for answer in [away(), Ok(Vec::new())] {
            assert!(!resolver.take(answer) && resolver.failure().is_some());
            assert_eq!(resolver.addresses(), addresses(&["10.0.0.1:1"]));
        }
        assert!(resolver.take(Ok(addresses(&["10.0.0.2:1"]))) && resolver.failure().is_none());
        resolver.remember(addresses(&["10.0.0.1:1"]));
        assert_eq!(resolver.addresses(), addresses(&["10.0.0.2:1"]), "what was written before is older");
    }
}
