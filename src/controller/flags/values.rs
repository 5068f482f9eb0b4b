//! The values of flags, parsed once at the edge.

use std::fmt;
use std::ops::RangeInclusive;
use std::str::FromStr;
use std::time::Duration;

use clap::builder::RangedI64ValueParser;
use ipnet::IpNet;

use crate::policy::lifetime::duration::parse_duration;
use crate::runtime::flags::dns_name;

/// A time, written as `90s`, `15m`, `1h30m`, `168h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct DurationArg(pub Duration);

impl DurationArg {
    pub(crate) fn seconds(self) -> u64 {
        self.0.as_secs()
    }
}

impl FromStr for DurationArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let read = parse_duration(text).map(Self);
        read.ok_or_else(|| "write a duration such as 500ms, 90s, 15m, 1h30m or 168h".to_owned())
    }
}

impl fmt::Display for DurationArg {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

/// The range of a pool; none if it was left empty.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct PoolRange(pub Option<IpNet>);

fn range(text: &str, family: &str, fits: impl Fn(&IpNet) -> bool) -> Result<PoolRange, String> {
    if text.is_empty() {
        return Ok(PoolRange(None));
    }
    let net: IpNet = text.parse().map_err(|_| format!("write an {family} range such as 10.240.0.0/16"))?;
    if !fits(&net) {
        return Err(format!("it is not {family}"));
    }
    if net.trunc() != net {
        return Err(format!("it has host bits; write {}", net.trunc()));
    }
    Ok(PoolRange(Some(net)))
}

pub(crate) fn range_v4(text: &str) -> Result<PoolRange, String> {
    range(text, "IPv4", |net| net.addr().is_ipv4())
}

pub(crate) fn range_v6(text: &str) -> Result<PoolRange, String> {
    range(text, "IPv6", |net| net.addr().is_ipv6())
}

pub(crate) fn mask_size(bits: RangeInclusive<i64>) -> RangedI64ValueParser<u8> {
    clap::value_parser!(u8).range(bits)
}

pub(crate) fn at_least_one() -> RangedI64ValueParser<u32> {
    clap::value_parser!(u32).range(1..)
}

pub(crate) fn dns_label(text: &str) -> Result<String, String> {
    if text.len() > 63 || text.contains('.') {
        return Err("a namespace's name has at most 63 characters, and no dot".to_owned());
    }
    dns_name(text)
}
