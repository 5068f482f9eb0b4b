use super::*;

const LEAST: usize = 16;

fn nets(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn settings(pairs: &[(&str, &str)]) -> CiliumOptions {
    let all = pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
    CiliumOptions::read(&all.collect())
}

/// What Cilium's chart writes for `crd` mode, with what that mode needs.
const WELL: &[(&str, &str)] = &[
    ("ipam", "crd"),
    ("routing-mode", "tunnel"),
    ("enable-ipv6", "false"),
    ("enable-ipv4-masquerade", "true"),
    ("egress-masquerade-interfaces", "eth0"),
    ("cni-exclusive", "false"),
];

fn well_with(pairs: &[(&str, &str)]) -> CiliumOptions {
    settings(&[WELL, pairs].concat())
}

fn node(name: &str, node: &[&str], blocks: &[&str]) -> PreflightNode {
    let (node, blocks) = (nets(node), nets(blocks));
    PreflightNode { name: name.into(), node, blocks, configured: Vec::new(), free: Some(LEAST) }
}

/// A cluster in which nothing stands in the way.
fn well() -> PreflightFacts {
    let version = "1.19.5".parse().ok();
    PreflightFacts {
        settings: Some(well_with(&[])),
        nodes: vec![node("n1", &["10.1.1.0/24"], &["10.1.1.0/24"])],
        agents: [("n1".to_owned(), CiliumAgent { ready: true, version })].into(),
        least_free: LEAST,
        ..PreflightFacts::default()
    }
}

fn with(pairs: &[(&str, &str)]) -> PreflightFacts {
    PreflightFacts { settings: Some(well_with(pairs)), ..well() }
}

fn of_settings(facts: &PreflightFacts) -> Vec<&'static str> {
    check_settings(facts).iter().map(PreflightFinding::name).collect()
}

fn of_switch(facts: &PreflightFacts) -> Vec<&'static str> {
    check_switch(facts).iter().map(PreflightFinding::name).collect()
}

#[test]
fn a_cluster_with_what_crd_mode_needs_has_no_findings() {
    assert_eq!(check_settings(&well()), []);
    assert_eq!(check_switch(&well()), []);
}

#[test]
fn masquerading_by_iptables_without_interfaces_is_fatal() {
    const NAME: &str = "MasqueradeNeedsInterfaces";
    let empty = ("egress-masquerade-interfaces", "");
    let found = check_settings(&with(&[empty]));
    assert_eq!((found.len(), found[0].name(), found[0].severity()), (1, NAME, Severity::Fatal));
    assert!(found[0].stops(&[NAME.to_owned()]), "cilium-agent would panic: it cannot be accepted");
    assert_eq!(of_settings(&with(&[empty, ("enable-bpf-masquerade", "true")])), [""; 0]);
    assert_eq!(of_settings(&with(&[empty, ("enable-ipv4-masquerade", "false")])), [""; 0]);
    // IPv6 is masqueraded unless the settings say otherwise.
    let other = [empty, ("enable-ipv4-masquerade", "false"), ("enable-ipv6", "true")];
    assert_eq!(of_settings(&with(&other)), [NAME]);
}

#[test]
fn endpoint_routes_on_a_tunnel_beside_kube_proxys_iptables_cut_tcp() {
    let routes = ("enable-endpoint-routes", "true");
    let beside = |proxy, pairs: &[(&str, &str)]| {
        of_settings(&PreflightFacts { kube_proxy: proxy, ..with(&[&[routes], pairs].concat()) })
    };
    assert_eq!(beside(KubeProxy::DropsInvalid, &[]), ["EndpointRoutesCutTcp"]);
    assert_eq!(beside(KubeProxy::NotSeen, &[]), ["KubeProxyNotSeen"]);
    assert_eq!(beside(KubeProxy::Harmless, &[]), [""; 0]);
    assert_eq!(beside(KubeProxy::DropsInvalid, &[("kube-proxy-replacement", "true")]), [""; 0]);
    assert_eq!(beside(KubeProxy::DropsInvalid, &[("routing-mode", "native")]), [""; 0]);
    let without = PreflightFacts { kube_proxy: KubeProxy::DropsInvalid, ..well() };
    assert_eq!(of_settings(&without), [""; 0]);
}

#[test]
fn kube_proxys_mode_is_read_from_its_own_settings() {
    let iptables = "kind: KubeProxyConfiguration\nconntrack:\n  tcpBeLiberal: false\nmode: \"\"\n";
    assert_eq!(KubeProxy::of(true, Some(iptables)), KubeProxy::DropsInvalid);
    assert_eq!(KubeProxy::of(true, Some("mode: nftables\n")), KubeProxy::Harmless);
    let liberal = "conntrack:\n  tcpBeLiberal: true\nmode: iptables\n";
    assert_eq!(KubeProxy::of(true, Some(liberal)), KubeProxy::Harmless);
    assert_eq!(KubeProxy::of(true, None), KubeProxy::DropsInvalid, "iptables is its default");
    assert_eq!(KubeProxy::of(false, None), KubeProxy::NotSeen);
}

#[test]
fn native_routing_must_cover_the_pools_and_needs_endpoint_routes() {
    let native = [("routing-mode", "native"), ("enable-endpoint-routes", "true")];
    let cidr = ("ipv4-native-routing-cidr", "10.0.0.0/8");
    let pools = |range: &str| vec![PreflightPool { name: "db".into(), ranges: nets(&[range]) }];
    let routed = |range: &str, pairs: &[(&str, &str)]| {
        check_settings(&PreflightFacts { pools: pools(range), ..with(&[&native, pairs].concat()) })
    };
    assert_eq!(routed("10.9.0.0/24", &[cidr]), []);
    let found = routed("192.168.9.0/24", &[cidr]);
    assert_eq!((found.len(), found[0].name()), (1, "PoolOutsideNativeRouting"));
    assert_eq!(found[0].object(), "IPPool db");
    assert!(found[0].to_string().contains("10.0.0.0/8"), "{}", found[0]);
    assert_eq!(routed("10.9.0.0/24", &[]).len(), 1, "without a range everything is masqueraded");
    assert_eq!(routed("192.168.9.0/24", &[("enable-ipv4-masquerade", "false")]), []);
    assert_eq!(of_settings(&with(&[("routing-mode", "native")])), ["NativeNeedsEndpointRoutes"]);
}

#[test]
fn what_stands_before_our_conflist_is_named() {
    assert_eq!(of_settings(&with(&[("cni-exclusive", "true")])), ["ExclusiveCni"]);
    let multus = PreflightFacts { in_front: Some("kube-system/kube-multus-ds-abc".into()), ..well() };
    let found = check_settings(&multus);
    assert_eq!((found.len(), found[0].name()), (1, "MultusInFront"));
    assert_eq!(found[0].object(), "pod kube-system/kube-multus-ds-abc");
}

#[test]
fn settings_that_cannot_be_read_are_a_finding_and_not_a_guess() {
    let unknown = PreflightFacts { settings: None, ..well() };
    let found = check_settings(&unknown);
    assert_eq!(found.iter().map(PreflightFinding::name).collect::<Vec<_>>(), ["SettingsUnknown"]);
    assert!(found[0].stops(&[]) && !found[0].stops(&["SettingsUnknown".to_owned()]));
}

#[test]
fn the_range_that_cilium_uses_must_hold_the_nodes_block() {
    let facts = |node: PreflightNode| PreflightFacts { nodes: vec![node], ..well() };
    let other = node("n1", &["10.241.0.0/24"], &["10.200.1.0/24"]);
    let found = check_switch(&facts(other.clone()));
    assert_eq!(found.len(), 1);
    assert_eq!(
        found[0].fault,
        Fault::RangesDisagree {
            range: Some("10.241.0.0/24".parse().unwrap()),
            block: "10.200.1.0/24".parse().unwrap()
        }
    );
    assert_eq!(found[0].object(), "node n1");
    let configured = PreflightNode { configured: nets(&["10.200.1.0/24"]), ..other.clone() };
    assert_eq!(of_switch(&facts(configured)), [""; 0]);
    let wrong = PreflightNode { configured: nets(&["10.200.9.0/24"]), ..other.clone() };
    assert_eq!(of_switch(&facts(wrong)), ["RangesDisagree"]);
    let routes = with(&[("enable-endpoint-routes", "true")]);
    assert_eq!(of_switch(&PreflightFacts { nodes: vec![other], ..routes }), [""; 0]);
    // Each family is looked at by itself.
    let both = node("n1", &["10.200.1.0/24"], &["10.200.1.0/24", "fd00:1::/112"]);
    let found = check_switch(&facts(both));
    assert!(matches!(found[0].fault, Fault::RangesDisagree { range: None, .. }), "{found:?}");
}

#[test]
fn a_node_without_a_range_is_named_unless_cilium_is_given_one() {
    let bare = node("n1", &[], &["10.200.1.0/24"]);
    assert_eq!(of_switch(&PreflightFacts { nodes: vec![bare.clone()], ..well() }), ["NoNodeRange"]);
    let given = PreflightNode { configured: nets(&["10.200.1.0/24"]), ..bare };
    assert_eq!(of_switch(&PreflightFacts { nodes: vec![given], ..well() }), [""; 0]);
}

#[test]
fn a_node_needs_free_addresses_until_the_agent_fills_its_pool() {
    let with_free = |free| {
        let node = PreflightNode { free, ..well().nodes[0].clone() };
        of_switch(&PreflightFacts { nodes: vec![node], ..well() })
    };
    assert_eq!(with_free(Some(LEAST - 1)), ["TooFewFreeAddresses"]);
    assert_eq!(with_free(Some(LEAST)), [""; 0]);
    assert_eq!(with_free(None), [""; 0], "cilium-agent goes by the pool already");
}

#[test]
fn every_node_needs_a_ready_cilium_agent_of_a_proved_release() {
    let agent = |ready, version: &str| {
        let agent = CiliumAgent { ready, version: version.parse().ok() };
        of_switch(&PreflightFacts { agents: [("n1".to_owned(), agent)].into(), ..well() })
    };
    assert_eq!(agent(true, "1.18.3"), [""; 0]);
    assert_eq!(agent(true, "1.12.0"), ["CiliumReleaseNotProved"]);
    assert_eq!(agent(true, "latest"), ["CiliumReleaseNotProved"]);
    assert_eq!(agent(false, "1.19.5"), ["CiliumAgentMissing"]);
    let elsewhere = [("n2".to_owned(), CiliumAgent::default())].into();
    assert_eq!(of_switch(&PreflightFacts { agents: elsewhere, ..well() }), ["CiliumAgentMissing"]);
    let none = PreflightFacts { agents: BTreeMap::new(), ..well() };
    assert_eq!(of_switch(&none), ["CiliumAgentsNotSeen"]);
}

#[test]
fn the_version_is_read_from_an_image_with_and_without_a_digest() {
    let of = |image: &str| CiliumRelease::of_image(image).map(|version| version.to_string());
    assert_eq!(of("quay.io/cilium/cilium:v1.19.5@sha256:abc"), Some("1.19.5".into()));
    assert_eq!(of("registry:5000/cilium/cilium-ci:v1.20.0-rc.1"), Some("1.20.0".into()));
    for other in ["registry:5000/cilium/cilium", "quay.io/cilium/cilium:latest", "cilium@sha256:abc"] {
        assert_eq!(of(other), None, "{other}");
    }
}

#[test]
fn every_finding_says_object_cause_and_cure() {
    let native =
        with(&[("routing-mode", "native"), ("cni-exclusive", "1"), ("egress-masquerade-interfaces", "")]);
    let pool = PreflightPool { name: "db".into(), ranges: nets(&["10.9.0.0/24"]) };
    let facts = PreflightFacts {
        nodes: vec![node("n1", &[], &["10.1.1.0/24", "10.1.2.0/24"])],
        pools: vec![pool],
        in_front: Some("kube-system/multus".into()),
        agents: BTreeMap::new(),
        ..native
    };
    let found = [check_settings(&facts), check_switch(&facts)].concat();
    assert!(found.len() >= 7, "{found:?}");
    for one in &found {
        let text = one.to_string();
        assert!(text.starts_with(&one.object()) && text.len() > 20 && one.cure().len() > 10, "{text}");
        assert_eq!(HARMFUL.contains(&one.name()), one.severity() == Severity::Harmful, "{text}");
    }
}
