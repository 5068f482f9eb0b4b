//! The `ipam` section: everything host-local takes, and ours under `sticky`.

use std::path::PathBuf;

use serde_json::Value;

use crate::alloc::range::{Family, Range, RangeSet, RangeSpec};
use crate::cni::args::{CniArgs, RequestedAddress};
use crate::cni::config::DEFAULT_DATA_DIR;
use crate::cni::config::sticky::StickyConf;
use crate::cni::error::{CniError, code};
use crate::cni::fields::{Fields, nearest};
use crate::cni::result::{Route, read_routes};
use crate::cni::verb::Verb;
use crate::cni::version::CniVersion;

/// The most range sets. The store writes a pod's change of addresses down in one page, which has room for
/// these however long the names are: what ADD could take, DEL must be able to give back.
pub(crate) const MAX_RANGE_SETS: usize = 12;

pub(crate) const RANGE_FIELDS: &[&str] = &["subnet", "rangeStart", "rangeEnd", "gateway"];

#[derive(Debug, Clone, Default, PartialEq)]
pub struct IpamConf {
    pub data_dir: PathBuf,
    /// One address is taken from each. Empty only for DEL and GC, which do not need them, and for STATUS of a
    /// network whose ranges the runtime gives with each ADD.
    pub sets: Vec<RangeSet>,
    pub routes: Vec<Route>,
    pub resolv_conf: Option<PathBuf>,
    /// Addresses that were asked for, each once.
    pub requested: Vec<RequestedAddress>,
    pub sticky: Option<StickyConf>,
}

impl IpamConf {
    /// Reads what is needed to find the store, and tells what else is wrong without refusing it: an address
    /// must not leak because a later edit of the configuration has a mistake.
    pub(crate) fn read_leniently(ipam: &Fields<'_>, warnings: &mut Vec<String>) -> Result<Self, CniError> {
        let data_dir = read_data_dir(ipam)?;
        let sets = read_sets(ipam, None).unwrap_or_else(|error| {
            warnings.push(error.to_string());
            Vec::new()
        });
        let sticky = ipam.object("sticky")?;
        let sticky = sticky.map(|fields| StickyConf::read_leniently(&fields, warnings)).transpose()?;
        Ok(Self { data_dir, sets, sticky, ..Self::default() })
    }

    pub(crate) fn read(
        root: &Fields<'_>,
        ipam: &Fields<'_>,
        version: CniVersion,
        verb: Verb,
        args: &CniArgs,
        warnings: &mut Vec<String>,
    ) -> Result<Self, CniError> {
        let data_dir = read_data_dir(ipam)?;
        let runtime = root.object("runtimeConfig")?;
        let sets = read_sets(ipam, runtime.as_ref())?;
        if !(sets.is_empty() && verb == Verb::Status && gets_ranges_from_runtime(root)) {
            check_sets(ipam, &sets, version)?;
        }
        warn_about_range_keys(ipam, warnings);
        Ok(Self {
            data_dir,
            sets,
            routes: read_routes(ipam, "routes")?,
            resolv_conf: ipam.absolute_path("resolvConf")?,
            requested: read_requested(root, runtime.as_ref(), args)?,
            sticky: read_sticky(ipam)?,
        })
    }

    /// Refuses more range sets of a family than the version can express, as every ADD does. DEL reads
    /// leniently and asks for itself.
    pub(crate) fn check_version(&self, version: CniVersion) -> Result<(), CniError> {
        check_families(&self.sets, version)
    }
}

/// Whether the runtime gives ranges with ADD. It does not with STATUS, which must not fail for that.
fn gets_ranges_from_runtime(root: &Fields<'_>) -> bool {
    root.get("capabilities").and_then(|all| all.get("ipRanges")).and_then(Value::as_bool).unwrap_or(false)
}

fn read_data_dir(ipam: &Fields<'_>) -> Result<PathBuf, CniError> {
    Ok(ipam.absolute_path("dataDir")?.unwrap_or_else(|| PathBuf::from(DEFAULT_DATA_DIR)))
}

fn read_sticky(ipam: &Fields<'_>) -> Result<Option<StickyConf>, CniError> {
    let Some(fields) = ipam.object("sticky")? else { return Ok(None) };
    if fields.get("dataDir").is_some() {
        let problem = "only counts beside \"delegate\"; here it is ipam.dataDir that says where the store is";
        return Err(fields.invalid("dataDir", problem));
    }
    StickyConf::read(&fields).map(Some)
}

/// The sets in the order that addresses appear in results: the runtime's, the old single range, the list.
fn read_sets(ipam: &Fields<'_>, runtime: Option<&Fields<'_>>) -> Result<Vec<RangeSet>, CniError> {
    let of_runtime = runtime.map(|runtime| read_set_list(runtime, "ipRanges")).transpose()?;
    let mut sets = of_runtime.unwrap_or_default();
    if ipam.get("subnet").is_some() {
        sets.push(new_set(ipam.path(), vec![read_range(ipam)?])?);
    }
    sets.extend(read_set_list(ipam, "ranges")?);
    Ok(sets)
}

fn read_set_list(fields: &Fields<'_>, key: &str) -> Result<Vec<RangeSet>, CniError> {
    let mut sets = Vec::new();
    for (i, set) in fields.list(key)?.unwrap_or_default().iter().enumerate() {
        let path = format!("{}[{i}]", fields.path_of(key));
        let Value::Array(items) = set else {
            return Err(CniError::wrong_type(&path, set, "a list of ranges; write [[{\"subnet\": …}]]"));
        };
        let read = |(j, item)| read_range(&Fields::of(format!("{path}[{j}]"), item)?);
        sets.push(new_set(&path, items.iter().enumerate().map(read).collect::<Result<_, _>>()?)?);
    }
    Ok(sets)
}

fn new_set(path: &str, ranges: Vec<Range>) -> Result<RangeSet, CniError> {
    RangeSet::new(ranges).map_err(|error| CniError::invalid_config(path, error))
}

fn read_range(fields: &Fields<'_>) -> Result<Range, CniError> {
    let missing = || fields.invalid("subnet", "is missing; write one such as \"10.1.0.0/24\"");
    let spec = RangeSpec {
        subnet: fields.string("subnet")?.ok_or_else(missing)?,
        range_start: fields.string("rangeStart")?,
        range_end: fields.string("rangeEnd")?,
        gateway: fields.string("gateway")?,
    };
    Range::from_spec(&spec).map_err(|error| CniError::invalid_config(fields.path(), error))
}

fn check_sets(ipam: &Fields<'_>, sets: &[RangeSet], version: CniVersion) -> Result<(), CniError> {
    let refused = |problem: String| Err(ipam.invalid("ranges", problem));
    if sets.is_empty() {
        let of_range = unused_range_keys(ipam).next();
        let hint = of_range.map_or_else(String::new, |key| {
            format!("{} is there, but without a subnet it says nothing; ", ipam.path_of(key))
        });
        return refused(format!(
            "no IP ranges given; {hint}write \"ranges\": [[{{\"subnet\": \"10.1.0.0/24\"}}]]"
        ));
    }
    if sets.len() > MAX_RANGE_SETS {
        return refused(format!(
            "{} range sets, each of which gives a pod one more address; {MAX_RANGE_SETS} are the most, so \
             put ranges of one family into one set",
            sets.len()
        ));
    }
    check_families(sets, version)?;
    for (i, one) in sets.iter().enumerate() {
        if let Some((j, other)) = sets.iter().enumerate().skip(i + 1).find(|(_, other)| one.overlaps(other)) {
            return refused(format!(
                "range set {i} ({one}) overlaps with range set {j} ({other}); make them disjoint"
            ));
        }
    }
    Ok(())
}

/// The keys of a range that stand in `ipam`, where they count only beside a subnet.
fn unused_range_keys(ipam: &Fields<'_>) -> impl Iterator<Item = &'static str> {
    RANGE_FIELDS.iter().copied().filter(|key| *key != "subnet" && ipam.get(key).is_some())
}

/// Results before 0.3.0 have room for one address per family.
fn check_families(sets: &[RangeSet], version: CniVersion) -> Result<(), CniError> {
    let has_two = |family| sets.iter().filter(|set| set.family() == family).count() > 1;
    if version < CniVersion::V0_3_0 && (has_two(Family::V4) || has_two(Family::V6)) {
        // host-local's sentence, whole: clients compare it. Details would become a part of it.
        let message = format!("CNI version {version} does not support more than 1 address per family");
        return Err(CniError::new(code::INVALID_CONFIG, message));
    }
    Ok(())
}

/// Host-local ignores keys that it does not know, so they cannot be refused; but silence would hide a typo.
fn warn_about_range_keys(ipam: &Fields<'_>, warnings: &mut Vec<String>) {
    if ipam.get("subnet").is_none() {
        for key in unused_range_keys(ipam) {
            let path = ipam.path_of(key);
            warnings.push(format!("{path} is not used, because there is no {}", ipam.path_of("subnet")));
        }
    }
    let sets = ipam.get("ranges").and_then(Value::as_array).into_iter().flatten();
    let ranges = sets.filter_map(Value::as_array).flatten().filter_map(Value::as_object);
    for key in ranges.flat_map(|range| range.keys()) {
        if !RANGE_FIELDS.iter().any(|known| known.eq_ignore_ascii_case(key)) {
            let meant = nearest(key, RANGE_FIELDS).unwrap_or_default();
            warnings.push(format!(
                "ipam.ranges: field {key:?} is not known and not used; did you mean {meant:?}?"
            ));
        }
    }
}

/// `args.cni.ips` takes the place of `IP` in `CNI_ARGS`; what the runtime asks for comes on top.
fn read_requested(
    root: &Fields<'_>,
    runtime: Option<&Fields<'_>>,
    args: &CniArgs,
) -> Result<Vec<RequestedAddress>, CniError> {
    let cni = root.object("args")?.map(|args| args.object("cni")).transpose()?.flatten();
    let by_args = read_addresses(cni.as_ref())?;
    let mut all = if by_args.is_empty() { args.ip.into_iter().collect() } else { by_args };
    all.extend(read_addresses(runtime)?);
    let mut once: Vec<RequestedAddress> = Vec::new();
    for address in all {
        if !once.iter().any(|have| have.ip == address.ip) {
            once.push(address);
        }
    }
    Ok(once)
}

fn read_addresses(fields: Option<&Fields<'_>>) -> Result<Vec<RequestedAddress>, CniError> {
    let parse = |text: &str| {
        RequestedAddress::parse(text).ok_or_else(|| {
            format!("{text:?} is not an IP address; write one such as 10.1.0.9 or 10.1.0.9/24")
        })
    };
    Ok(fields.map(|fields| fields.strings("ips", parse)).transpose()?.flatten().unwrap_or_default())
}
