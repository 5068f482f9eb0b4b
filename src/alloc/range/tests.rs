use super::*;
use proptest::prelude::*;

/// How many addresses pods can have.
fn capacity(range: &Range) -> u128 {
    (0..range.size()).filter(|at| range.nth(*at).is_some_and(|address| range.usable(address))).count() as u128
}

fn range(subnet: &str, start: &str, end: &str, gateway: &str) -> Result<Range, RangeError> {
    let spec = RangeSpec { subnet, range_start: Some(start), range_end: Some(end), gateway: Some(gateway) };
    Range::from_spec(&spec)
}

fn whole(subnet: &str) -> Range {
    range(subnet, "", "", "").unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

#[test]
fn a_bare_subnet_gives_every_address_that_a_pod_may_have_and_its_first_as_gateway() {
    let v4 = whole("10.1.0.0/29");
    assert_eq!(v4.to_string(), "10.1.0.1-10.1.0.6");
    assert_eq!(v4.gateway(), Some(ip("10.1.0.1")));
    assert_eq!((v4.size(), capacity(&v4)), (6, 5));
    let v6 = whole("fd00::/126");
    assert_eq!(v6.to_string(), "fd00::1-fd00::3");
    assert_eq!(capacity(&v6), 2);
    assert_eq!(whole("::/0").size(), u128::MAX);
}

#[test]
fn blocks_become_one_set_per_family_without_their_edges() {
    let blocks: Vec<IpNet> =
        ["10.0.0.0/29", "fd00::/120", "10.0.1.0/29"].iter().map(|text| text.parse().unwrap()).collect();
    let sets = RangeSet::over(&blocks);
    assert_eq!(sets.len(), 2);
    let range = sets[0].contains(ip("10.0.0.2")).unwrap();
    for edge in ["10.0.0.0", "10.0.0.1", "10.0.0.7"] {
        assert!(!range.usable(ip(edge)), "{edge}");
    }
    assert!(sets[0].contains(ip("10.0.1.2")).is_some());
}

#[test]
fn network_and_broadcast_addresses_are_cut_off_even_when_asked_for() {
    assert_eq!(
        range("10.1.0.0/24", "10.1.0.0", "10.1.0.255", "").unwrap().to_string(),
        "10.1.0.1-10.1.0.254"
    );
    let error = range("10.1.0.0/30", "10.1.0.3", "10.1.0.3", "").unwrap_err();
    assert!(matches!(error, RangeError::NothingUsable { .. }), "{error}");
    assert!(matches!(range("fd00::/64", "fd00::", "fd00::", ""), Err(RangeError::NothingUsable { .. })));
}

#[test]
fn the_gateway_is_skipped_inside_and_taken_as_it_is_outside() {
    let inside = range("10.1.0.0/24", "10.1.0.10", "10.1.0.12", "10.1.0.11").unwrap();
    assert!(inside.contains(ip("10.1.0.11")) && !inside.usable(ip("10.1.0.11")));
    assert!(inside.usable(ip("10.1.0.12")) && !inside.usable(ip("10.1.0.13")));
    let outside = range("10.1.0.0/24", "", "", "192.168.5.5").unwrap();
    assert_eq!(outside.gateway(), Some(ip("192.168.5.5")));
    assert!(outside.usable(ip("10.1.0.1")));
}

#[test]
fn an_address_from_elsewhere_is_printed_in_a_network_that_holds_the_gateway() {
    let home = whole("10.241.0.0/24");
    for (address, printed) in [
        ("10.241.0.9", "10.241.0.9/24"),
        ("10.242.0.3", "10.242.0.3/14"),
        ("10.240.255.255", "10.240.255.255/15"),
        ("192.168.0.1", "192.168.0.1/1"),
    ] {
        let shown = home.with_prefix(ip(address));
        assert_eq!(shown.to_string(), printed);
        assert!(shown.contains(&home.gateway().unwrap()) || shown.prefix_len() == 1);
    }
    assert_eq!(whole("fd24:1::/96").with_prefix(ip("fd24:2::5")).to_string(), "fd24:2::5/30");
}

#[test]
fn an_ipv6_range_below_two_to_the_32_keeps_its_family_in_print() {
    let range = whole("::1234:0/112");
    assert_eq!(range.with_prefix(ip("::1234:2")).to_string(), "::1234:2/112");
    assert_eq!(range.nth(1), Some(ip("::1234:2")));
    assert!(!range.contains(ip("18.52.0.2")));
}

#[test]
fn every_mistake_is_reported_with_its_field_and_value_and_what_would_be_right() {
    for (subnet, start, end, gateway, parts) in [
        ("10.1.0.0", "", "", "", ["subnet", "10.1.0.0", "CIDR"]),
        ("10.1.0.0/33", "", "", "", ["subnet", "10.1.0.0/33", "CIDR"]),
        ("10.1.0.0/+8", "", "", "", ["subnet", "/+8", "CIDR"]),
        ("", "", "", "", ["subnet", "\"\"", "CIDR"]),
        ("10.1.0.7/24", "", "", "", ["subnet", "10.1.0.7/24", "write 10.1.0.0/24"]),
        ("fd00::1/64", "", "", "", ["subnet", "fd00::1/64", "write fd00::/64"]),
        ("10.1.0.0/31", "", "", "", ["subnet", "10.1.0.0/31", "/30"]),
        ("fd00::/127", "", "", "", ["subnet", "fd00::/127", "/126"]),
        ("::ffff:10.1.0.0/120", "", "", "", ["subnet", "::ffff:10.1.0.0/120", "IPv4"]),
        ("10.1.0.0/24", "10.1.1.5", "", "", ["rangeStart", "10.1.1.5", "10.1.0.0/24"]),
        ("10.1.0.0/24", "fd00::1", "", "", ["rangeStart", "fd00::1", "10.1.0.0/24"]),
        ("10.1.0.0/24", "", "10.1.1.5", "", ["rangeEnd", "10.1.1.5", "10.1.0.0/24"]),
        ("10.1.0.0/24", "10.1.0.9", "10.1.0.8", "", ["10.1.0.9", "10.1.0.8", "swap"]),
        ("10.1.0.0/24", "", "", "foo", ["gateway", "foo", "IP address"]),
        ("10.1.0.0/24", "x", "", "", ["rangeStart", "\"x\"", "IP address"]),
    ] {
        let text = range(subnet, start, end, gateway).unwrap_err().to_string();
        for part in parts {
            assert!(text.contains(part), "{subnet} {start} {end} {gateway}: {text:?} lacks {part:?}");
        }
    }
}

#[test]
fn a_set_is_not_empty_of_one_family_and_without_overlap() {
    assert_eq!(RangeSet::new(vec![]), Err(RangeError::EmptySet));
    let mixed = RangeSet::new(vec![whole("10.1.0.0/24"), whole("fd00::/64")]).unwrap_err();
    assert!(matches!(mixed, RangeError::MixedFamilies { .. }), "{mixed}");
    let overlap = RangeSet::new(vec![whole("10.1.0.0/20"), whole("10.1.1.0/24")]).unwrap_err();
    assert!(matches!(overlap, RangeError::Overlap(..)), "{overlap}");
    let set = RangeSet::new(vec![whole("10.1.0.0/29"), whole("10.2.0.0/30")]).unwrap();
    assert_eq!(set.to_string(), "10.1.0.1-10.1.0.6,10.2.0.1-10.2.0.2");
    assert_eq!(set.contains(ip("::ffff:10.2.0.2")).unwrap().subnet().to_string(), "10.2.0.0/30");
    assert_eq!(set.contains(ip("10.2.0.3")), None);
    assert_eq!(set.ranges().iter().map(capacity).sum::<u128>(), 6);
}

#[test]
fn halves_of_one_subnet_do_not_overlap() {
    let low = range("10.1.0.0/24", "", "10.1.0.99", "").unwrap();
    let high = range("10.1.0.0/24", "10.1.0.100", "", "").unwrap();
    assert!(!low.overlaps(&high) && low.overlaps(&low));
    assert!(RangeSet::new(vec![low, high]).is_ok());
}

proptest! {
    #[test]
    fn positions_and_addresses_are_two_names_for_the_same(base in any::<u128>(), prefix in 8u8..=126, at in any::<u128>()) {
        let net = IpNet::new(IpAddr::V6(Ipv6Addr::from_bits(base)), prefix).unwrap().trunc();
        prop_assume!(net.addr() == net.addr().to_canonical());
        let range = whole(&net.to_string());
        let at = at % range.size();
        let address = range.nth(at).unwrap();
        prop_assert!(range.contains(address));
        prop_assert_eq!(to_number(address) - to_number(range.first()), at);
        prop_assert_eq!(range.nth(range.size()), None);
    }

    #[test]
    fn overlap_is_mutual_and_means_a_shared_address(a in 0u8..=30, b in 0u8..=30, c in 0u8..=30, d in 0u8..=30) {
        let build = |x: u8, y: u8| range("10.1.0.0/27", &format!("10.1.0.{}", x.min(y)), &format!("10.1.0.{}", x.max(y)), "");
        if let (Ok(one), Ok(two)) = (build(a, b), build(c, d)) {
            let shared = (0..one.size()).any(|i| two.contains(one.nth(i).unwrap()));
            prop_assert_eq!(one.overlaps(&two), shared);
            prop_assert_eq!(two.overlaps(&one), shared);
        }
    }

    #[test]
    fn no_text_makes_it_panic(subnet in "\\PC{0,24}", start in "[0-9a-f:./]{0,20}") {
        let _ = range(&subnet, &start, &start, &start);
        let _ = parse_cidr(&start);
    }
}
