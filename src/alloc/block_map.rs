//! Who has which range: a map of blocks to owners that answers quickly who else is there. Must never miss an
//! overlap, whichever of the two ranges is the larger.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

/// Ranges in the order of their first addresses, each with everyone who has it, so that thousands of nodes
/// are compared with a few steps each.
#[derive(Debug, Clone, Default)]
pub(crate) struct BlockMap(BTreeMap<(bool, IpAddr, u8), BTreeSet<String>>);

impl BlockMap {
    pub(crate) fn add(&mut self, range: IpNet, owner: &str) {
        self.0.entry(key(range)).or_default().insert(owner.to_owned());
    }

    /// Everyone who has something of this range, with what they have of it.
    pub(crate) fn overlapping(&self, range: IpNet) -> impl Iterator<Item = (&str, IpNet)> {
        let family = range.addr().is_ipv4();
        // CIDRs overlap only by one containing the other: it starts inside, or is one of the few that contain
        // the start.
        let inside = self
            .0
            .range((family, range.network(), range.prefix_len())..=(family, range.broadcast(), u8::MAX));
        let around = (0..range.prefix_len()).filter_map(move |bits| {
            let wider = IpNet::new(range.network(), bits).ok()?.trunc();
            self.0.get_key_value(&key(wider))
        });
        inside.chain(around).flat_map(|(at, owners)| {
            let range = IpNet::new(at.1, at.2).ok();
            owners.iter().filter_map(move |owner| Some((owner.as_str(), range?)))
        })
    }

    /// The first other owner, by name, of something of this range.
    pub(crate) fn other_owner(&self, owner: &str, range: IpNet) -> Option<(&str, IpNet)> {
        self.overlapping(range).filter(|(other, _)| *other != owner).min_by_key(|(other, _)| *other)
    }
}

impl<'a> FromIterator<(IpNet, &'a str)> for BlockMap {
    fn from_iter<T: IntoIterator<Item = (IpNet, &'a str)>>(all: T) -> Self {
        let mut owned = Self::default();
        all.into_iter().for_each(|(range, owner)| owned.add(range, owner));
        owned
    }
}

fn key(range: IpNet) -> (bool, IpAddr, u8) {
    (range.addr().is_ipv4(), range.network(), range.prefix_len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn nets() -> impl Strategy<Value = Vec<(u16, u8)>> {
        proptest::collection::vec((any::<u16>(), 16u8..=32), 0..30)
    }

    fn at((low, bits): (u16, u8)) -> IpNet {
        IpNet::new(std::net::Ipv4Addr::from_bits(0x0a00_0000 + u32::from(low)).into(), bits).unwrap().trunc()
    }

    proptest! {
        #[test]
        fn exactly_those_that_overlap_are_named(all in nets(), asked in (any::<u16>(), 16u8..=32)) {
            let all: Vec<(IpNet, String)> =
                all.into_iter().enumerate().map(|(n, net)| (at(net), format!("n{n:02}"))).collect();
            let owned: BlockMap = all.iter().map(|(net, name)| (*net, name.as_str())).collect();
            let asked = at(asked);
            let expected: BTreeSet<(&str, IpNet)> = all
                .iter()
                .filter(|(net, _)| net.contains(&asked) || asked.contains(net))
                .map(|(net, name)| (name.as_str(), *net))
                .collect();
            let found: Vec<_> = owned.overlapping(asked).collect();
            prop_assert_eq!(found.len(), expected.len());
            prop_assert_eq!(found.into_iter().collect::<BTreeSet<_>>(), expected);
        }
    }

    #[test]
    fn families_are_apart_and_the_owner_itself_is_no_other() {
        let v6: IpNet = "::/0".parse().unwrap();
        let v4: IpNet = "0.0.0.0/0".parse().unwrap();
        let owned: BlockMap = [(v6, "a"), (v4, "b"), (v4, "c")].into_iter().collect();
        assert_eq!(owned.other_owner("b", "10.0.0.0/8".parse().unwrap()), Some(("c", v4)));
        assert_eq!(owned.other_owner("a", v6), None);
    }
}
