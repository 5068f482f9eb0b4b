//! Which addresses are taken, as bitmaps, and where the next free one is.
//!
//! Addresses are grouped by all but their last sixteen bits. A group's bitmap is the same whatever ranges are
//! configured, so a change of ranges never makes a bitmap stale. Pure: who keeps the bitmaps hands them in.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::alloc::{Range, RangeSet};

/// How many of an address's last bits a group spans. 65,536 addresses make a bitmap of 8 KiB: two pages, read
/// in one call, and a /16 is one group.
pub(crate) const GROUP_BITS: u32 = 16;

/// How many bytes a group's bitmap has.
pub(crate) const BITMAP_BYTES: usize = (1 << GROUP_BITS) / 8;

/// A group of addresses, named by its first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group(IpAddr);

impl Group {
    /// The group that `address` belongs to.
    pub fn of(address: IpAddr) -> Self {
        Self(with_low_bits(address, 0))
    }

    /// The first address of the group.
    pub fn first(self) -> IpAddr {
        self.0
    }

    /// The address at this position of the group's bitmap.
    pub fn address(self, position: u16) -> IpAddr {
        with_low_bits(self.0, position)
    }
}

/// Where `address` stands in its group's bitmap.
pub fn position(address: IpAddr) -> u16 {
    (number(address) & 0xffff) as u16
}

/// The taken addresses of one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bitmap(Vec<u8>);

impl Default for Bitmap {
    fn default() -> Self {
        Self(vec![0; BITMAP_BYTES])
    }
}

impl Bitmap {
    /// A bitmap from its bytes; what is missing at the end is free.
    pub(crate) fn from_bytes(mut bytes: Vec<u8>) -> Self {
        bytes.resize(BITMAP_BYTES, 0);
        Self(bytes)
    }

    /// The bytes, as they are kept.
    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Whether `position` is taken.
    pub(crate) fn get(&self, position: u16) -> bool {
        self.0[usize::from(position / 8)] & (1 << (position % 8)) != 0
    }

    /// Marks `position` as taken or free.
    pub(crate) fn set(&mut self, position: u16, taken: bool) {
        let byte = &mut self.0[usize::from(position / 8)];
        if taken {
            *byte |= 1 << (position % 8);
        } else {
            *byte &= !(1 << (position % 8));
        }
    }

    /// The positions that are taken, in order.
    pub(crate) fn taken(&self) -> impl Iterator<Item = u16> + '_ {
        // Most bytes of most bitmaps are empty.
        let bytes = (0u16..).zip(&self.0).filter(|(_, byte)| **byte != 0);
        bytes.flat_map(|(at, byte)| {
            (0..8).filter(move |bit| byte & (1 << bit) != 0).map(move |bit| at * 8 + bit)
        })
    }

    fn first_free(&self, from: u16, to: u16) -> Option<u16> {
        let mut at = u32::from(from);
        while at <= u32::from(to) {
            let byte = self.0[(at / 8) as usize];
            if byte == 0xff {
                at = (at / 8 + 1) * 8;
            } else if byte & (1 << (at % 8)) == 0 {
                return u16::try_from(at).ok();
            } else {
                at += 1;
            }
        }
        None
    }

    fn count_taken(&self, from: u16, to: u16) -> u32 {
        let (first, last) = (usize::from(from / 8), usize::from(to / 8));
        let mut count: u32 = self.0[first..=last].iter().map(|byte| byte.count_ones()).sum();
        count -= (self.0[first] & !(0xffu8 << (from % 8))).count_ones();
        let above = if to % 8 == 7 { 0 } else { 0xffu8 << (to % 8 + 1) };
        count -= (self.0[last] & above).count_ones();
        count
    }
}

/// The first free address of `set` after `after`, going round once; from the start where `after` is none or
/// not of the set. `bitmap` gives a group's bitmap, or none where nothing of it is taken.
pub(crate) fn next_free<E>(
    set: &RangeSet,
    after: Option<IpAddr>,
    mut bitmap: impl FnMut(Group) -> Result<Option<Bitmap>, E>,
) -> Result<Option<IpAddr>, E> {
    let ranges = set.ranges();
    let start =
        after.and_then(|at| ranges.iter().position(|range| range.contains(at)).map(|index| (index, at)));
    let Some((index, at)) = start else {
        return first_free_in(ranges.iter().map(|range| (range, range.first(), range.last())), &mut bitmap);
    };
    let (before, from_here) = ranges.split_at(index);
    let here = &ranges[index];
    let rest = (at < here.last()).then(|| (here, next_address(at), here.last()));
    let spans = rest
        .into_iter()
        .chain(from_here.iter().skip(1).map(|range| (range, range.first(), range.last())))
        .chain(before.iter().map(|range| (range, range.first(), range.last())))
        .chain([(here, here.first(), at)]);
    first_free_in(spans, &mut bitmap)
}

/// How many addresses of `set` are still free, counted no further than `enough`.
pub(crate) fn count_free<E>(
    set: &RangeSet,
    enough: u128,
    mut bitmap: impl FnMut(Group) -> Result<Option<Bitmap>, E>,
) -> Result<u128, E> {
    let mut free = 0u128;
    for range in set.ranges() {
        let mut at = range.first();
        loop {
            let end = end_of_group(at).min(range.last());
            let span = number(end) - number(at) + 1;
            let mut usable = span;
            if let Some(gateway) = range.gateway()
                && gateway >= at
                && gateway <= end
            {
                usable -= 1;
            }
            let taken = match bitmap(Group::of(at))? {
                Some(bits) => {
                    let mut taken = bits.count_taken(position(at), position(end));
                    if let Some(gateway) = range.gateway()
                        && gateway >= at
                        && gateway <= end
                        && bits.get(position(gateway))
                    {
                        taken -= 1;
                    }
                    u128::from(taken)
                }
                None => 0,
            };
            free += usable - taken.min(usable);
            if free >= enough {
                return Ok(free);
            }
            if end >= range.last() {
                break;
            }
            at = next_address(end);
        }
    }
    Ok(free)
}

fn first_free_in<'a, E>(
    spans: impl Iterator<Item = (&'a Range, IpAddr, IpAddr)>,
    bitmap: &mut impl FnMut(Group) -> Result<Option<Bitmap>, E>,
) -> Result<Option<IpAddr>, E> {
    for (range, mut at, last) in spans {
        loop {
            let end = end_of_group(at).min(last);
            let bits = bitmap(Group::of(at))?;
            let mut from = at;
            loop {
                let found = match &bits {
                    Some(bits) => bits.first_free(position(from), position(end)),
                    None => Some(position(from)),
                };
                let Some(found) = found.map(|low| with_low_bits(from, low)) else { break };
                if range.usable(found) {
                    return Ok(Some(found));
                }
                if found >= end {
                    break;
                }
                from = next_address(found);
            }
            if end >= last {
                break;
            }
            at = next_address(end);
        }
    }
    Ok(None)
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

fn with_low_bits(address: IpAddr, low: u16) -> IpAddr {
    match address {
        IpAddr::V4(v4) => IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits() & !0xffff | u32::from(low))),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits() & !0xffff | u128::from(low))),
    }
}

fn end_of_group(address: IpAddr) -> IpAddr {
    with_low_bits(address, 0xffff)
}

/// The address behind this one. Callers have seen that it is not the last of its range, so nothing wraps.
fn next_address(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) => IpAddr::V4(Ipv4Addr::from_bits(v4.to_bits().saturating_add(1))),
        IpAddr::V6(v6) => IpAddr::V6(Ipv6Addr::from_bits(v6.to_bits().saturating_add(1))),
    }
}

#[cfg(test)]
mod tests;
