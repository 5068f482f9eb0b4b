//! Which routes of its own the host needs, beside those of cilium-agent. Pure.
//!
//! In `crd` mode without endpoint routes cilium-agent routes one range per family to its pods: the one that
//! it takes for the node's. The host does not reach what else its pods have: further blocks, addresses of
//! Sticky pools, the block itself if the Node names another range. Must never touch a route that sticky-ipam
//! did not make.

use ipnet::IpNet;

use super::message::Route;

/// Marks our routes. A number that no routing program of iproute2's list has.
pub(super) const OURS: u8 = 71;
/// Marks those of cilium-agent, and the kernel's own.
const KERNEL: u8 = 2;

/// What must be done with the host's routes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct Changes {
    pub put: Vec<Route>,
    pub delete: Vec<Route>,
}

/// `nets` is what other nodes route here: `podCIDRs` of the own CiliumNode. `host` is the index of Cilium's
/// interface for the host.
pub(super) fn changes(routes: &[Route], nets: &[IpNet], host: u32) -> Changes {
    let mut changes = Changes::default();
    for is_v4 in [true, false] {
        let of_family = |route: &&Route| route.to.addr().is_ipv4() == is_v4;
        // Without one, cilium-agent routes each endpoint by itself, or has not started yet.
        let Some(model) = routes.iter().filter(of_family).find(|route| is_ciliums_own(route, host)) else {
            continue;
        };
        let ours = || routes.iter().filter(of_family).filter(|route| route.protocol == OURS);
        let wanted: Vec<Route> = nets
            .iter()
            .map(IpNet::trunc)
            .filter(|net| net.addr().is_ipv4() == is_v4)
            .filter(|net| !routes.iter().any(|route| route.protocol != OURS && route.to == *net))
            .map(|to| Route { to, protocol: OURS, ..model.clone() })
            .collect();
        changes
            .delete
            .extend(ours().filter(|route| !wanted.iter().any(|other| other.to == route.to)).cloned());
        changes.put.extend(wanted.iter().filter(|route| !ours().any(|other| other == *route)).cloned());
    }
    changes
}

/// The route by which cilium-agent reaches the pods of the node's range: from its router, and unlike those to
/// other nodes without an MTU.
fn is_ciliums_own(route: &Route, host: u32) -> bool {
    let through_router =
        route.source.is_some() && (route.gateway == route.source || !route.to.addr().is_ipv4());
    route.interface == host && route.protocol == KERNEL && through_router && !route.has_metrics
}

#[cfg(test)]
mod tests {
    use super::*;

    const HOST: u32 = 4;

    fn ciliums(to: &str, has_metrics: bool) -> Route {
        let router = Some("10.241.0.5".parse().unwrap());
        let (gateway, source) = (router, router);
        Route {
            to: to.parse().unwrap(),
            protocol: KERNEL,
            scope: 0,
            interface: HOST,
            gateway,
            source,
            priority: None,
            has_metrics,
        }
    }

    fn ours(to: &str) -> Route {
        Route { protocol: OURS, ..ciliums(to, false) }
    }

    /// What the kernel has on a node of a tunnel: the default route, the router, own range, another node's.
    fn table() -> Vec<Route> {
        let plain = Route { gateway: None, source: None, ..ciliums("10.241.0.5/32", false) };
        let default = Route { interface: 2, protocol: 3, source: None, ..ciliums("0.0.0.0/0", false) };
        vec![default, plain, ciliums("10.241.0.0/24", false), ciliums("10.242.0.0/24", true)]
    }

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn what_cilium_does_not_route_on_the_own_node_gets_a_route_like_its_own() {
        let named = nets(&["10.241.0.0/24", "10.200.1.0/24", "10.77.0.7/32"]);
        let expected = Changes { put: vec![ours("10.200.1.0/24"), ours("10.77.0.7/32")], delete: vec![] };
        assert_eq!(changes(&table(), &named, HOST), expected);
        let settled = [table(), expected.put].concat();
        assert_eq!(changes(&settled, &named, HOST), Changes::default(), "once is enough");
    }

    #[test]
    fn an_address_that_left_loses_our_route_and_nobody_elses() {
        let theirs = Route { interface: 9, ..ciliums("10.77.0.8/32", false) };
        let table = [table(), vec![ours("10.77.0.7/32"), theirs]].concat();
        let expected = Changes { put: vec![], delete: vec![ours("10.77.0.7/32")] };
        assert_eq!(changes(&table, &nets(&["10.241.0.0/24"]), HOST), expected);
    }

    #[test]
    fn a_route_of_another_program_to_the_same_addresses_is_left_alone() {
        let endpoint = Route { interface: 9, gateway: None, source: None, ..ciliums("10.77.0.7/32", false) };
        let both = [table(), vec![endpoint]].concat();
        assert_eq!(changes(&both, &nets(&["10.77.0.7/32"]), HOST), Changes::default());
    }

    #[test]
    fn our_routes_follow_the_router_when_it_has_another_address() {
        let old = Route { source: Some("10.9.9.9".parse().unwrap()), ..ours("10.77.0.7/32") };
        let named = nets(&["10.77.0.7/32"]);
        let expected = Changes { put: vec![ours("10.77.0.7/32")], delete: vec![] };
        assert_eq!(changes(&[table(), vec![old]].concat(), &named, HOST), expected);
    }

    #[test]
    fn without_a_route_of_ciliums_own_nothing_is_done() {
        // Endpoint routes: no range is routed on its own node.
        let endpoint_routes: Vec<Route> = table()
            .into_iter()
            .filter(|route| route.to != "10.241.0.0/24".parse::<IpNet>().unwrap())
            .collect();
        let named = nets(&["10.77.0.7/32", "fd00::/96"]);
        assert_eq!(changes(&endpoint_routes, &named, HOST), Changes::default());
        let with_v4 = changes(&table(), &named, HOST);
        assert_eq!(with_v4.put, [ours("10.77.0.7/32")], "each family by itself");
    }

    #[test]
    fn ipv6_routes_have_no_gateway() {
        let own = Route {
            gateway: None,
            source: Some("fd24:1::5".parse().unwrap()),
            priority: Some(1024),
            ..ciliums("fd24:1::/96", false)
        };
        let put = changes(std::slice::from_ref(&own), &nets(&["fd77::7/128"]), HOST).put;
        assert_eq!(put, [Route { to: "fd77::7/128".parse().unwrap(), protocol: OURS, ..own }]);
    }
}
