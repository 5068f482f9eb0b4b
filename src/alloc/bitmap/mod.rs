//! Which addresses are taken, as bitmaps, and where the next free one is.
//!
//! Addresses are grouped by all but their last sixteen bits. A group's bitmap is the same whatever ranges are
//! configured, so a change of ranges never makes a bitmap stale. Pure: who keeps the bitmaps hands them in.

use std::iter;
use std::net::IpAddr;

use crate::alloc::range::{Range, RangeSet, to_number, with_number};

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
    (to_number(address) & 0xffff) as u16
}

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

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn get(&self, position: u16) -> bool {
        self.0[usize::from(position / 8)] & (1 << (position % 8)) != 0
    }

    /// Marks `position` as taken or free.
    pub(crate) fn set(&mut self, position: u16, taken: bool) {
        let (byte, bit) = (&mut self.0[usize::from(position / 8)], 1 << (position % 8));
        *byte = if taken { *byte | bit } else { *byte & !bit };
    }

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
    fn whole(range: &Range) -> (&Range, IpAddr, IpAddr) {
        (range, range.first(), range.last())
    }
    let start =
        after.and_then(|at| ranges.iter().position(|range| range.contains(at)).map(|index| (index, at)));
    let Some((index, at)) = start else {
        return first_free_in(ranges.iter().map(whole), &mut bitmap);
    };
    let here = &ranges[index];
    let rest = (at < here.last()).then(|| (here, next_address(at), here.last()));
    let others = ranges[index + 1..].iter().chain(&ranges[..index]).map(whole);
    first_free_in(rest.into_iter().chain(others).chain([(here, here.first(), at)]), &mut bitmap)
}

/// How many addresses of `set` are still free, counted no further than `enough`.
pub(crate) fn count_free<E>(
    set: &RangeSet,
    enough: u128,
    mut bitmap: impl FnMut(Group) -> Result<Option<Bitmap>, E>,
) -> Result<u128, E> {
    let mut free = 0u128;
    for range in set.ranges() {
        for (first, last) in by_group(range.first(), range.last()) {
            let gateway = range.gateway().filter(|gateway| (first..=last).contains(gateway));
            let usable = to_number(last) - to_number(first) + 1 - u128::from(gateway.is_some());
            let taken = bitmap(Group::of(first))?.map_or(0, |bits| {
                let of_gateway = gateway.is_some_and(|gateway| bits.get(position(gateway)));
                bits.count_taken(position(first), position(last)) - u32::from(of_gateway)
            });
            free += usable - u128::from(taken).min(usable);
            if free >= enough {
                return Ok(free);
            }
        }
    }
    Ok(free)
}

fn first_free_in<'a, E>(
    spans: impl Iterator<Item = (&'a Range, IpAddr, IpAddr)>,
    bitmap: &mut impl FnMut(Group) -> Result<Option<Bitmap>, E>,
) -> Result<Option<IpAddr>, E> {
    for (range, first, last) in spans {
        for (mut from, last) in by_group(first, last) {
            let bits = bitmap(Group::of(from))?;
            loop {
                let found = match &bits {
                    Some(bits) => bits.first_free(position(from), position(last)),
                    None => Some(position(from)),
                };
                let Some(found) = found.map(|low| with_low_bits(from, low)) else { break };
                if range.usable(found) {
                    return Ok(Some(found));
                }
                if found >= last {
                    break;
                }
                from = next_address(found);
            }
        }
    }
    Ok(None)
}

/// A span of addresses, first to last, cut at the borders of groups.
fn by_group(first: IpAddr, last: IpAddr) -> impl Iterator<Item = (IpAddr, IpAddr)> {
    let piece = move |at: IpAddr| (at, with_low_bits(at, 0xffff).min(last));
    iter::successors(Some(piece(first)), move |(_, end)| (*end < last).then(|| piece(next_address(*end))))
}

fn with_low_bits(address: IpAddr, low: u16) -> IpAddr {
    with_number(address, to_number(address) & !0xffff | u128::from(low))
}

/// The address behind this one. Callers have seen that it is not the last of its range, so nothing wraps.
fn next_address(address: IpAddr) -> IpAddr {
    with_number(address, to_number(address).saturating_add(1))
}

#[cfg(test)]
mod tests;
