//! A barrier entry in the pool of a CiliumNode: an address that no pod can have, added in one write with the
//! owner of another entry.
//!
//! cilium-agent does not report which version of its CiliumNode it has seen. But its socket reports whether
//! an entry is in the pool that it has seen, and it sees an object as a whole: once it has the barrier entry,
//! it has the owner too (docs/decisions/0026). Must never be used as an address, and never prove another
//! write than the one that added it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::cluster::objects::cilium::{CiliumNode, PoolEntry};

/// The owner of a barrier entry. No namespace can have a dot in its name, so no pod ever gets it.
const OWNER: &str = "sticky-ipam.io/barrier";
/// 240.0.0.0/4, which is unused: reserved, and routed nowhere.
const V4: u32 = 0xf000_0000;
/// 100::/64, which is unused: what is sent there is discarded.
const V6: u128 = 0x0100 << 112;

pub(crate) fn is_barrier(entry: &PoolEntry) -> bool {
    entry.owner == OWNER
}

/// A new barrier entry for the owner of this address, for a write with the resourceVersion that was read. It
/// differs for every version of the object, and only one write follows a version: no two writes have the same
/// barrier entry.
pub fn fresh(node: &CiliumNode, owned: IpAddr) -> (IpAddr, PoolEntry) {
    let version = node.metadata.resource_version.as_deref().unwrap_or_default();
    let number = version.bytes().fold(0u64, |number, digit| {
        number.wrapping_mul(10).wrapping_add(u64::from(digit.wrapping_sub(b'0')))
    });
    let sign = match owned {
        IpAddr::V4(_) => {
            let low = u32::try_from(number & u64::from(!V4)).unwrap_or_default();
            IpAddr::V4(Ipv4Addr::from(V4 | low))
        }
        IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::from(V6 | u128::from(number))),
    };
    (sign, PoolEntry { owner: OWNER.into(), resource: owned.to_string() })
}

/// The barrier entry for the owner of this address.
pub fn of(node: &CiliumNode, owned: IpAddr) -> Option<IpAddr> {
    let owned = owned.to_string();
    let standing = node.spec.ipam.pool.iter().find(|(_, entry)| is_barrier(entry) && entry.resource == owned);
    standing.and_then(|(key, _)| key.parse().ok())
}

pub fn keys(node: &CiliumNode) -> impl Iterator<Item = &String> {
    node.spec.ipam.pool.iter().filter(|(_, entry)| is_barrier(entry)).map(|(key, _)| key)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn node(version: &str, pool: serde_json::Value) -> CiliumNode {
        let metadata = json!({"name": "n", "resourceVersion": version});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"ipam": {"pool": pool}}})).unwrap()
    }

    #[test]
    fn every_version_has_a_barrier_entry_of_its_own_that_is_no_address() {
        let (four, six): (IpAddr, IpAddr) = ("10.0.0.1".parse().unwrap(), "fd00::1".parse().unwrap());
        let sign = |version: &str, owned| fresh(&node(version, json!({})), owned).0.to_string();
        assert_eq!((sign("258", four), sign("258", six)), ("240.0.1.2".into(), "100::102".into()));
        assert_ne!(sign("258", four), sign("259", four));
        assert_eq!(sign("18446744073709551615", four), "255.255.255.255");
        assert_eq!(sign("18446744073709551615", six), "100::ffff:ffff:ffff:ffff");
        assert!(!sign("no number", four).is_empty());
    }

    #[test]
    fn a_barrier_entry_stands_for_its_own_address_alone() {
        let owned: IpAddr = "10.0.0.1".parse().unwrap();
        let (sign, entry) = fresh(&node("7", json!({})), owned);
        let pool = json!({"10.0.0.1": {"owner": "db/db-0"}, sign.to_string(): entry});
        let node = node("8", pool);
        assert_eq!(of(&node, owned), Some(sign));
        assert_eq!(of(&node, "10.0.0.2".parse().unwrap()), None);
        assert_eq!(keys(&node).collect::<Vec<_>>(), [&sign.to_string()]);
    }
}
