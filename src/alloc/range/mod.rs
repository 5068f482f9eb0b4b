//! The ranges that addresses are taken from: what an operator may write, made canonical once.
//!
//! A [`Range`] that exists is valid: every later question (is this address ours, how many are there) is
//! answered without looking at the configuration again. It must never contain an address that no pod may
//! have: the network address, the IPv4 broadcast address, the IPv6 subnet-router anycast address.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use thiserror::Error;

/// The fewest host bits a subnet may have: with less there is no room for a gateway and one pod.
const MIN_HOST_BITS: u8 = 2;

/// Why a range, or a set of ranges, is refused. Every message names the field, the value and what would be
/// right.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum RangeError {
    #[error("subnet {0:?} is not a CIDR; write an address and a prefix length, such as 10.1.0.0/24")]
    NotACidr(String),
    #[error("{field} {value:?} is not an IP address; write one such as 10.1.0.10 or fd00::10")]
    NotAnAddress { field: &'static str, value: String },
    #[error("subnet {0} is an IPv4-mapped IPv6 network; write it as an IPv4 network")]
    MappedSubnet(String),
    #[error("subnet {subnet} is too small to allocate from; use a prefix length of at most /{longest}")]
    TooSmall { subnet: String, longest: u8 },
    #[error(
        "subnet {given} has host bits set; the network address is {network}, so write {network}/{prefix}"
    )]
    HostBits { given: String, network: IpAddr, prefix: u8 },
    #[error("{field} {value} is not in subnet {subnet}; choose an address of that subnet")]
    OutsideSubnet { field: &'static str, value: IpAddr, subnet: IpNet },
    #[error("rangeStart {start} is after rangeEnd {end}; swap them")]
    Inverted { start: IpAddr, end: IpAddr },
    #[error(
        "rangeStart {start} to rangeEnd {end} of subnet {subnet} holds only the network or broadcast \
         address; widen the range"
    )]
    NothingUsable { start: IpAddr, end: IpAddr, subnet: IpNet },
    #[error("empty range set; list at least one range with a subnet in it")]
    EmptySet,
    /// A set answers for one address, so it has one family.
    #[error("range set mixes IPv4 ({v4}) and IPv6 ({v6}); give each family a range set of its own")]
    MixedFamilies { v4: String, v6: String },
    #[error("ranges {0} and {1} of one range set overlap; make them disjoint")]
    Overlap(String, String),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Error)]
pub enum Family {
    #[error("IPv4")]
    V4,
    #[error("IPv6")]
    V6,
}

impl Family {
    /// The family of an address, an IPv4-mapped one being IPv4.
    pub(crate) fn of(ip: IpAddr) -> Self {
        if ip.to_canonical().is_ipv4() { Self::V4 } else { Self::V6 }
    }
}

/// Reads `address/prefix`, keeping host bits, or says nothing sensible was there.
///
/// An IPv4-mapped network of /96 and longer becomes the IPv4 network it stands for.
pub(crate) fn parse_cidr(text: &str) -> Option<IpNet> {
    let net = parse_cidr_verbatim(text)?;
    match (net.addr().to_canonical(), net.addr()) {
        (IpAddr::V4(v4), IpAddr::V6(_)) if net.prefix_len() >= 96 => {
            IpNet::new(IpAddr::V4(v4), net.prefix_len() - 96).ok()
        }
        _ => Some(net),
    }
}

fn parse_cidr_verbatim(text: &str) -> Option<IpNet> {
    let (ip, prefix) = text.split_once('/')?;
    // `u8::from_str` takes a plus sign, a CIDR does not; neither has leading zeros.
    if !prefix.bytes().all(|b| b.is_ascii_digit()) || (prefix.len() > 1 && prefix.starts_with('0')) {
        return None;
    }
    IpNet::new(ip.parse().ok()?, prefix.parse().ok()?).ok()
}

/// A validated stretch of one subnet, both ends included.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Range {
    subnet: IpNet,
    first: IpAddr,
    last: IpAddr,
    gateway: Option<IpAddr>,
}

/// A range as it is written down, before anything about it is known to be true.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RangeSpec<'a> {
    pub subnet: &'a str,
    pub range_start: Option<&'a str>,
    pub range_end: Option<&'a str>,
    pub gateway: Option<&'a str>,
}

/// How many bits two addresses of one family have in common, from the first on.
fn common_prefix(one: IpAddr, two: IpAddr) -> u8 {
    let unlike = (to_number(one) ^ to_number(two)).leading_zeros();
    let unused = 128 - if one.is_ipv4() { 32 } else { 128 };
    u8::try_from(unlike.saturating_sub(unused)).unwrap_or(u8::MAX)
}

impl Range {
    /// Validates what was written and fills in what was left out: from the first to the last address that a
    /// pod may have, with the subnet's first address as gateway.
    pub(crate) fn from_spec(spec: &RangeSpec<'_>) -> Result<Self, RangeError> {
        let subnet = parse_subnet(spec.subnet)?;
        let (lowest, highest) = assignable(subnet);
        let gateway = parse_address("gateway", spec.gateway)?.unwrap_or(lowest);
        let start = parse_inside("rangeStart", spec.range_start, subnet)?;
        let end = parse_inside("rangeEnd", spec.range_end, subnet)?;
        if let (Some(start), Some(end)) = (start, end)
            && start > end
        {
            return Err(RangeError::Inverted { start, end });
        }
        let first = start.map_or(lowest, |ip| ip.max(lowest));
        let last = end.map_or(highest, |ip| ip.min(highest));
        if first > last {
            let (start, end) = (start.unwrap_or(lowest), end.unwrap_or(highest));
            return Err(RangeError::NothingUsable { start, end, subnet });
        }
        Ok(Self { subnet, first, last, gateway: Some(gateway) })
    }

    /// The subnet, whose prefix length goes into results.
    pub fn subnet(&self) -> IpNet {
        self.subnet
    }

    pub fn first(&self) -> IpAddr {
        self.first
    }

    pub fn last(&self) -> IpAddr {
        self.last
    }

    /// The gateway, which may lie outside the range and even outside the subnet.
    pub fn gateway(&self) -> Option<IpAddr> {
        self.gateway
    }

    /// The family of every address in it.
    pub fn family(&self) -> Family {
        Family::of(self.first)
    }

    /// How many addresses there are, a gateway among them counted.
    pub fn size(&self) -> u128 {
        to_number(self.last) - to_number(self.first) + 1
    }

    /// Whether the address lies between first and last.
    pub fn contains(&self, ip: IpAddr) -> bool {
        let ip = ip.to_canonical();
        ip.is_ipv4() == self.first.is_ipv4() && self.first <= ip && ip <= self.last
    }

    /// Whether a pod may have the address: it is in the range and not the gateway.
    pub fn usable(&self, ip: IpAddr) -> bool {
        self.contains(ip) && self.gateway != Some(ip.to_canonical())
    }

    pub fn overlaps(&self, other: &Self) -> bool {
        self.family() == other.family() && self.first <= other.last && other.first <= self.last
    }

    /// The address with the subnet's prefix length, as results show it. An address from elsewhere has the
    /// longest one whose network holds the gateway too: plugins such as ptp route only by a gateway that is
    /// on the link.
    pub(crate) fn with_prefix(&self, ip: IpAddr) -> IpNet {
        let ip = ip.to_canonical();
        let own = self.subnet.prefix_len();
        let length = match self.gateway {
            Some(gateway) if !self.subnet.contains(&ip) => common_prefix(gateway, ip).clamp(1, own),
            _ => own,
        };
        // No longer than the subnet's own, so it fits every address of the family.
        IpNet::new(ip, length).unwrap_or_else(|_| IpNet::from(ip))
    }

    /// The address at a distance from the first one, or nothing past the end.
    pub fn nth(&self, offset: u128) -> Option<IpAddr> {
        (offset < self.size()).then(|| with_number(self.first, to_number(self.first) + offset))
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.first, self.last)
    }
}

/// The ranges that one address of a pod is taken from: at least one, of one family, disjoint.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RangeSet(Vec<Range>);

impl RangeSet {
    /// Puts ranges together, or says what keeps them from being a set.
    pub(crate) fn new(ranges: Vec<Range>) -> Result<Self, RangeError> {
        let head = ranges.first().ok_or(RangeError::EmptySet)?;
        if let Some(odd) = ranges.iter().find(|r| r.family() != head.family()) {
            let (v4, v6) = if head.family() == Family::V4 { (head, odd) } else { (odd, head) };
            return Err(RangeError::MixedFamilies { v4: v4.to_string(), v6: v6.to_string() });
        }
        for (i, one) in ranges.iter().enumerate() {
            if let Some(other) = ranges[i + 1..].iter().find(|other| one.overlaps(other)) {
                return Err(RangeError::Overlap(one.to_string(), other.to_string()));
            }
        }
        Ok(Self(ranges))
    }

    /// One set a family over these blocks, IPv4 first. A block that is too small for a pod is passed over.
    pub(crate) fn over(blocks: &[IpNet]) -> Vec<Self> {
        let range = |block: &IpNet| {
            let text = block.trunc().to_string();
            Range::from_spec(&RangeSpec { subnet: &text, ..RangeSpec::default() }).ok()
        };
        let of_family = |family: Family| {
            let blocks = blocks.iter().filter(|block| Family::of(block.addr()) == family);
            Self::new(blocks.filter_map(range).collect()).ok()
        };
        [Family::V4, Family::V6].into_iter().filter_map(of_family).collect()
    }

    /// The ranges, in the order written, which is the order they are used up in.
    pub(crate) fn ranges(&self) -> &[Range] {
        &self.0
    }

    /// The family of every address in it.
    pub(crate) fn family(&self) -> Family {
        // A set is never empty; the fallback only keeps this free of panics.
        self.0.first().map_or(Family::V4, Range::family)
    }

    /// The range that the address lies in.
    pub(crate) fn contains(&self, ip: IpAddr) -> Option<&Range> {
        self.0.iter().find(|range| range.contains(ip))
    }

    /// Whether the two sets share an address.
    pub(crate) fn overlaps(&self, other: &Self) -> bool {
        self.0.iter().any(|a| other.0.iter().any(|b| a.overlaps(b)))
    }
}

impl fmt::Display for RangeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(Range::to_string).collect::<Vec<_>>().join(","))
    }
}

fn parse_subnet(text: &str) -> Result<IpNet, RangeError> {
    let net = parse_cidr_verbatim(text).ok_or_else(|| RangeError::NotACidr(text.to_owned()))?;
    if net.addr() != net.addr().to_canonical() {
        return Err(RangeError::MappedSubnet(net.to_string()));
    }
    let longest = net.max_prefix_len() - MIN_HOST_BITS;
    if net.prefix_len() > longest {
        return Err(RangeError::TooSmall { subnet: net.to_string(), longest });
    }
    if net.addr() != net.network() {
        let (network, prefix) = (net.network(), net.prefix_len());
        return Err(RangeError::HostBits { given: net.to_string(), network, prefix });
    }
    Ok(net)
}

/// An address field; left out and empty are the same, as they are for host-local.
fn parse_address(field: &'static str, text: Option<&str>) -> Result<Option<IpAddr>, RangeError> {
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    let wrong = |_| RangeError::NotAnAddress { field, value: text.to_owned() };
    text.parse::<IpAddr>().map(|ip| Some(ip.to_canonical())).map_err(wrong)
}

fn parse_inside(
    field: &'static str,
    text: Option<&str>,
    subnet: IpNet,
) -> Result<Option<IpAddr>, RangeError> {
    let ip = parse_address(field, text)?;
    match ip {
        Some(value) if !subnet.contains(&value) => Err(RangeError::OutsideSubnet { field, value, subnet }),
        _ => Ok(ip),
    }
}

/// The first and last address of a subnet that anyone may have.
fn assignable(subnet: IpNet) -> (IpAddr, IpAddr) {
    let (first, last) = (subnet.network(), subnet.broadcast());
    let highest = to_number(last) - u128::from(last.is_ipv4());
    (with_number(first, to_number(first) + 1), with_number(first, highest))
}

pub(super) fn to_number(ip: IpAddr) -> u128 {
    match ip {
        IpAddr::V4(v4) => u128::from(v4.to_bits()),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

/// The address of this number, of the same family as `like`; one beyond the family's last is the last.
pub(super) fn with_number(like: IpAddr, number: u128) -> IpAddr {
    match like {
        IpAddr::V4(_) => Ipv4Addr::from_bits(u32::try_from(number).unwrap_or(u32::MAX)).into(),
        IpAddr::V6(_) => Ipv6Addr::from_bits(number).into(),
    }
}

#[cfg(test)]
mod tests;
