//! IPPools as the decision on blocks needs them, and how full they are.

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

use crate::alloc::block::TakenRanges;
use crate::cluster::objects::{IPPool, PoolUse};
use crate::controller::index::ClusterIndex;
use crate::policy::node_blocks::{Fill, Pool};
use crate::policy::selection::selector::Selector;

pub(crate) fn read(object: &IPPool) -> Result<Pool, String> {
    let spec = &object.spec;
    let selector = spec.node_selector.as_ref().map(Selector::check).transpose();
    let net = |text: &String| {
        let net = text.parse::<IpAddr>().map(IpNet::from).or_else(|_| text.parse::<IpNet>());
        net.map_err(|_| format!("excluded {text:?} is no address and no range"))
    };
    Ok(Pool {
        name: object.metadata.name.clone().unwrap_or_default(),
        ranges: spec.cidrs.clone(),
        ipv4: spec.block_size.ipv4,
        ipv6: spec.block_size.ipv6,
        selector: selector.map_err(|error| error.to_string())?,
        priority: spec.priority,
        excluded: spec.excluded.iter().map(net).collect::<Result<_, _>>()?,
    })
}

/// The flags' pool, without the ranges that IPPools name: those are the IPPool's, also while it is not used.
pub(crate) fn flags_pool(cluster_pool: &IPPool, named: &[IpNet]) -> Option<Pool> {
    let mut pool = read(cluster_pool).ok()?;
    pool.excluded.extend(named);
    Some(pool)
}

/// How full every pool is, by what any object names: pools of node blocks in blocks, the flags' pool among
/// them, and Sticky pools in addresses. One that cannot be read is left out.
pub(crate) fn fills(index: &ClusterIndex, cluster_pool: Option<&IPPool>) -> BTreeMap<String, Fill> {
    let listed = index.cilium_nodes.values().flat_map(|node| node.blocks());
    let said =
        index.nodes.values().flat_map(|node| node.pod_cidrs.iter().chain(node.annotated.values().flatten()));
    let given: TakenRanges = listed.chain(said.copied()).collect();
    let kept: TakenRanges = index.claims.values().map(|claim| claim.spec.address.into()).collect();
    let named: Vec<IpNet> = index.pools.values().flat_map(|pool| pool.spec.cidrs.iter().copied()).collect();
    let of_objects = index.pools.iter().filter_map(|(name, pool)| {
        let fill = match pool.spec.purpose {
            PoolUse::Sticky => sticky_fill(pool, &kept),
            PoolUse::NodeBlocks => read(pool).ok()?.fill(&given),
        };
        Some((name.clone(), fill))
    });
    let flags_pool = cluster_pool.and_then(|pool| flags_pool(pool, &named));
    let of_flags = flags_pool.map(|pool| (pool.name.clone(), pool.fill(&given)));
    // An IPPool of the same name is the one that people see.
    of_flags.into_iter().chain(of_objects).collect()
}

/// A Sticky pool counts addresses: those of claims, which are `kept`, of all that are not excluded.
pub(crate) fn sticky_fill(pool: &IPPool, kept: &TakenRanges) -> Fill {
    Fill::of(&pool.spec.cidrs, IpNet::max_prefix_len, kept, &pool.excluded().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn pool(spec: serde_json::Value) -> IPPool {
        IPPool::new("p", serde_json::from_value(spec).unwrap())
    }

    #[test]
    fn a_sticky_pool_counts_addresses() {
        let pool = pool(
            json!({"cidrs": ["10.1.0.0/24"], "use": "Sticky", "excluded": ["10.1.0.0", "10.1.0.128/25"]}),
        );
        let kept: TakenRanges =
            ["10.1.0.5/32".parse().unwrap(), "10.9.0.5/32".parse().unwrap()].into_iter().collect();
        assert_eq!(sticky_fill(&pool, &kept), Fill { allocated: 1, total: 127 });
        let excluded: TakenRanges = ["10.1.0.130/32".parse().unwrap()].into_iter().collect();
        assert_eq!(sticky_fill(&pool, &excluded), Fill { allocated: 0, total: 127 });
    }
}
