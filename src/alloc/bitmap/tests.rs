use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::net::{Ipv4Addr, Ipv6Addr};

use proptest::prelude::*;

use super::*;
use crate::alloc::range::RangeSpec;

/// Bitmaps in memory, as the store has them on the disk.
#[derive(Default)]
struct InMemoryBitmaps(BTreeMap<Group, Bitmap>);

impl InMemoryBitmaps {
    fn of(taken: &BTreeSet<IpAddr>) -> Self {
        let mut memory = Self::default();
        for address in taken {
            memory.0.entry(Group::of(*address)).or_default().set(position(*address), true);
        }
        memory
    }

    fn next(&self, set: &RangeSet, after: Option<IpAddr>) -> Option<IpAddr> {
        next_free(set, after, |group| Ok::<_, Infallible>(self.0.get(&group).cloned())).unwrap()
    }

    fn count(&self, set: &RangeSet, enough: u128) -> u128 {
        count_free(set, enough, |group| Ok::<_, Infallible>(self.0.get(&group).cloned())).unwrap()
    }
}

fn range(subnet: &str, start: IpAddr, end: IpAddr, gateway: IpAddr) -> Range {
    let [start, end, gateway] = [start, end, gateway].map(|ip| ip.to_string());
    Range::from_spec(&RangeSpec {
        subnet,
        range_start: Some(&start),
        range_end: Some(&end),
        gateway: Some(&gateway),
    })
    .unwrap()
}

/// An address near the border between two groups, of either family.
fn near_border(v6: bool, offset: u32) -> IpAddr {
    if v6 {
        IpAddr::V6(Ipv6Addr::from_bits(0xfd00_0000_0000_0000_0000_0000_0000_ff00 + u128::from(offset)))
    } else {
        IpAddr::V4(Ipv4Addr::from_bits(0x0a00_ff00 + offset))
    }
}

fn every(range: &Range) -> impl Iterator<Item = IpAddr> + '_ {
    (0..range.size()).filter_map(|at| range.nth(at))
}

proptest! {
    #[test]
    fn the_next_free_address_is_the_one_that_counting_finds(
        v6: bool,
        bounds in (230u32..270, 1u32..40, 1u32..30, 1u32..40),
        gateway in 225u32..400,
        taken in proptest::collection::btree_set(225u32..400, 0..140),
        after in proptest::option::of(225u32..400),
        second_first: bool,
    ) {
        let subnet = if v6 { "fd00::/64" } else { "10.0.0.0/8" };
        let (start, length, gap, more) = bounds;
        let at = |offset| near_border(v6, offset);
        let one = range(subnet, at(start), at(start + length), at(gateway));
        let second = start + length + gap;
        let two = range(subnet, at(second), at(second + more), at(gateway));
        let ranges = if second_first { vec![two, one] } else { vec![one, two] };
        let set = RangeSet::new(ranges.clone()).unwrap();
        let taken: BTreeSet<IpAddr> = taken.into_iter().map(at).collect();
        let memory = InMemoryBitmaps::of(&taken);

        let all: Vec<IpAddr> = ranges.iter().flat_map(every).collect();
        let free = |ip: &IpAddr| *ip != at(gateway) && !taken.contains(ip);
        let after = after.map(at);
        let behind = after.and_then(|after| all.iter().position(|ip| *ip == after)).map_or(0, |at| at + 1);
        let expected = all[behind..].iter().chain(&all[..behind]).find(|ip| free(ip)).copied();
        prop_assert_eq!(memory.next(&set, after), expected);

        let count = all.iter().filter(|ip| free(ip)).count() as u128;
        prop_assert_eq!(memory.count(&set, u128::MAX), count);
        prop_assert_eq!(memory.count(&set, 1) == 0, count == 0);
    }

    #[test]
    fn a_bitmap_reads_back_what_was_set(set in proptest::collection::btree_set(any::<u16>(), 0..50)) {
        let mut bitmap = Bitmap::default();
        for at in &set {
            bitmap.set(*at, true);
            bitmap.set(at.wrapping_add(1), true);
        }
        for at in &set {
            bitmap.set(at.wrapping_add(1), set.contains(&at.wrapping_add(1)));
        }
        prop_assert_eq!(bitmap.taken().collect::<BTreeSet<_>>(), set.clone());
        let cut = bitmap.as_bytes().iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
        prop_assert_eq!(Bitmap::from_bytes(bitmap.as_bytes()[..cut].to_vec()), bitmap);
    }
}

#[test]
fn the_last_address_of_all_does_not_wrap() {
    for (subnet, last) in [
        ("255.255.255.248/29", "255.255.255.254"),
        ("ffff:ffff:ffff:ffff:ffff:ffff:ffff:fff8/125", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"),
    ] {
        let last: IpAddr = last.parse().unwrap();
        let range = Range::from_spec(&RangeSpec { subnet, ..RangeSpec::default() }).unwrap();
        let set = RangeSet::new(vec![range.clone()]).unwrap();
        let all: BTreeSet<IpAddr> = every(&range).collect();
        let mut memory = InMemoryBitmaps::of(&all);
        assert_eq!((memory.next(&set, Some(last)), memory.count(&set, 9)), (None, 0));
        memory.0.entry(Group::of(last)).or_default().set(position(last), false);
        assert_eq!(memory.next(&set, None), Some(last));
        assert_eq!(memory.next(&set, Some(last)), Some(last));
    }
}

#[test]
fn an_error_of_who_keeps_the_bitmaps_is_passed_on() {
    let range = Range::from_spec(&RangeSpec { subnet: "10.0.0.0/24", ..RangeSpec::default() }).unwrap();
    let set = RangeSet::new(vec![range]).unwrap();
    assert_eq!(next_free(&set, None, |_| Err("gone")), Err("gone"));
    assert_eq!(count_free(&set, 1, |_| Err("gone")), Err("gone"));
}
