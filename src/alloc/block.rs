//! Blocks of a range: the lowest one that overlaps nothing that is taken. Must never hand out a block of
//! which one address is taken, whatever the sizes of what is taken.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use crate::alloc::range::{Family, to_number};

/// Everything that must not be handed out, of both families.
#[derive(Debug, Clone, Default)]
pub struct TakenRanges {
    v4: Spans,
    v6: Spans,
}

/// Whether two ranges share an address.
pub fn overlap(a: IpNet, b: IpNet) -> bool {
    a.contains(&b) || b.contains(&a)
}

/// Spans of addresses as numbers, first to last, apart from each other.
#[derive(Debug, Clone, Default)]
struct Spans(BTreeMap<u128, u128>);

impl Spans {
    fn add(&mut self, mut first: u128, mut last: u128) {
        // Whatever touches it becomes one with it, so that a search steps over all of it at once.
        while let Some((&start, &end)) = self.0.range(..=last.saturating_add(1)).next_back() {
            if end.saturating_add(1) < first {
                break;
            }
            self.0.remove(&start);
            first = first.min(start);
            last = last.max(end);
        }
        self.0.insert(first, last);
    }

    fn extend(&mut self, other: &Self) {
        other.0.iter().for_each(|(first, last)| self.add(*first, *last));
    }

    /// The last address of the span that overlaps `first..=last` and reaches furthest.
    fn overlap(&self, first: u128, last: u128) -> Option<u128> {
        self.0.range(..=last).next_back().map(|(_, end)| *end).filter(|end| *end >= first)
    }
}

impl TakenRanges {
    pub(crate) fn add(&mut self, range: IpNet) {
        let (first, last) = bounds(range);
        self.of_mut(range).add(first, last);
    }

    /// Whether any address of the range is taken.
    pub(crate) fn overlaps(&self, range: IpNet) -> bool {
        let (first, last) = bounds(range);
        self.of(range).overlap(first, last).is_some()
    }

    fn of(&self, range: IpNet) -> &Spans {
        match range {
            IpNet::V4(_) => &self.v4,
            IpNet::V6(_) => &self.v6,
        }
    }

    fn of_mut(&mut self, range: IpNet) -> &mut Spans {
        match range {
            IpNet::V4(_) => &mut self.v4,
            IpNet::V6(_) => &mut self.v6,
        }
    }
}

impl FromIterator<IpNet> for TakenRanges {
    fn from_iter<T: IntoIterator<Item = IpNet>>(ranges: T) -> Self {
        let mut taken = Self::default();
        ranges.into_iter().for_each(|range| taken.add(range));
        taken
    }
}

/// The lowest block of this prefix length in the range that overlaps nothing that is taken in any of these;
/// none if the range is full, or shorter than a block.
pub(crate) fn next_block(range: IpNet, prefix: u8, taken: &[&TakenRanges]) -> Option<IpNet> {
    if prefix < range.prefix_len() || prefix > range.max_prefix_len() {
        return None;
    }
    let size = 1u128.checked_shl(u32::from(range.max_prefix_len() - prefix))?;
    let (mut first, end) = bounds(range);
    loop {
        let last = first.checked_add(size - 1).filter(|last| *last <= end)?;
        match taken.iter().filter_map(|taken| taken.of(range).overlap(first, last)).max() {
            None => return IpNet::new(address(Family::of(range.addr()), first)?, prefix).ok(),
            // The next border of a block behind what is in the way.
            Some(in_the_way) => first = (in_the_way / size).checked_add(1)?.checked_mul(size)?,
        }
    }
}

/// How many blocks of this prefix length a range has.
pub(crate) fn count_blocks(range: IpNet, prefix: u8) -> u128 {
    if prefix < range.prefix_len() || prefix > range.max_prefix_len() {
        return 0;
    }
    1u128.checked_shl(u32::from(prefix - range.prefix_len())).unwrap_or(u128::MAX)
}

/// How many blocks of this prefix length a range has of which something is taken.
pub(crate) fn count_taken(range: IpNet, prefix: u8, taken: &TakenRanges) -> u128 {
    if count_blocks(range, prefix) == 0 {
        return 0;
    }
    let Some(size) = 1u128.checked_shl(u32::from(range.max_prefix_len() - prefix)) else { return 0 };
    let (first, end) = bounds(range);
    // The number of the first block that is not counted yet: two spans may lie in one block.
    let (mut next, mut count) = (0, 0);
    for (start, last) in taken.of(range).0.iter().filter(|(start, last)| **last >= first && **start <= end) {
        let from = (((*start).max(first) - first) / size).max(next);
        let to = ((*last).min(end) - first) / size;
        if from <= to {
            count += to - from + 1;
            next = to + 1;
        }
    }
    count
}

/// The same, but for blocks of which something is in `beside`, too.
pub(crate) fn count_taken_besides(
    range: IpNet,
    prefix: u8,
    taken: &TakenRanges,
    beside: &TakenRanges,
) -> u128 {
    let mut both = beside.clone();
    both.of_mut(range).extend(taken.of(range));
    count_taken(range, prefix, &both) - count_taken(range, prefix, beside)
}

fn bounds(range: IpNet) -> (u128, u128) {
    (to_number(range.network()), to_number(range.broadcast()))
}

fn address(family: Family, bits: u128) -> Option<IpAddr> {
    Some(match family {
        Family::V4 => Ipv4Addr::from_bits(u32::try_from(bits).ok()?).into(),
        Family::V6 => Ipv6Addr::from_bits(bits).into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn next(range: &str, prefix: u8, taken: &[&str]) -> Option<String> {
        next_block(net(range), prefix, &[&taken.iter().map(|text| net(text)).collect()])
            .map(|b| b.to_string())
    }

    #[test]
    fn the_lowest_block_that_overlaps_nothing_is_next() {
        assert_eq!(next("10.0.0.0/8", 24, &[]).unwrap(), "10.0.0.0/24");
        assert_eq!(next("10.0.0.0/8", 24, &["10.0.0.0/24", "10.0.2.0/24"]).unwrap(), "10.0.1.0/24");
        // One address, a larger block, a block of another size, and something that lies across.
        assert_eq!(next("10.0.0.0/8", 24, &["10.0.0.77/32"]).unwrap(), "10.0.1.0/24");
        assert_eq!(next("10.0.0.0/8", 24, &["10.0.0.0/20"]).unwrap(), "10.0.16.0/24");
        assert_eq!(next("10.0.0.0/8", 24, &["0.0.0.0/0"]), None);
        assert_eq!(next("fd00:240::/120", 124, &["fd00:240::/124"]).unwrap(), "fd00:240::10/124");
        assert_eq!(next("fd00::/16", 64, &["fd00::1/128"]).unwrap(), "fd00:0:0:1::/64");
    }

    #[test]
    fn a_full_range_and_one_shorter_than_a_block_have_none() {
        assert_eq!(next("10.0.0.0/23", 24, &["10.0.0.0/24", "10.0.1.9/32"]), None);
        assert_eq!(next("10.0.0.0/24", 23, &[]), None);
        assert_eq!(next("255.255.255.0/24", 24, &["255.255.255.255/32"]), None);
        assert_eq!(next("ffff::/16", 16, &["ffff::/17"]), None);
        assert_eq!(next("::/0", 0, &[]), None, "a block as large as everything cannot be counted");
        assert_eq!(count_blocks(net("10.0.0.0/8"), 24), 65536);
        assert_eq!(count_blocks(net("10.0.0.0/24"), 16), 0);
    }

    proptest! {
        #[test]
        fn blocks_taken_one_after_the_other_fill_the_range_exactly(
            prefix in 22u8..=28,
            taken in proptest::collection::vec((0u32..1024, 24u8..=32), 0..12),
        ) {
            let range = net("10.9.0.0/22");
            let at = |(offset, bits): (u32, u8)| {
                IpNet::new(Ipv4Addr::from_bits(0x0a09_0000 + offset).into(), bits).unwrap().trunc()
            };
            let before: Vec<IpNet> = taken.into_iter().map(at).collect();
            let mut all: TakenRanges = before.iter().copied().collect();
            let mut given: Vec<IpNet> = Vec::new();
            while let Some(block) = next_block(range, prefix, &[&all]) {
                prop_assert!(range.contains(&block) && block == block.trunc());
                let clash = |other: &IpNet| other.contains(&block) || block.contains(other);
                prop_assert!(!before.iter().chain(&given).any(clash), "{block}");
                all.add(block);
                given.push(block);
            }
            let free = range.subnets(prefix).unwrap().filter(|block| {
                !before.iter().any(|other| other.contains(block) || block.contains(other))
            });
            prop_assert_eq!(free.count(), given.len());
            let counted = count_taken(range, prefix, &before.iter().copied().collect());
            prop_assert_eq!(count_blocks(range, prefix) - counted, given.len() as u128);
        }
    }
}
