//! The `ipam` section: everything host-local takes, and ours under `sticky`.

use std::path::PathBuf;

use serde_json::Value;

use crate::alloc::range::{Family, Range, RangeError, RangeSet, RangeSpec};
use crate::cni::args::{CniArgs, RequestedAddress};
use crate::cni::config::DEFAULT_DATA_DIR;
use crate::cni::config::sticky::StickyConf;
use crate::cni::error::{CniError, code};
use crate::cni::fields::{Fields, nearest};
use crate::cni::result::{Route, read_routes};
use crate::cni::verb::Verb;
use crate::cni::version::CniVersion;

/// Every key of the `ipam` section that is read. Others may stand there for other plugins.
#[cfg(test)]
pub(crate) const FIELDS: &[&str] = &[
    "type",
    "dataDir",
    "ranges",
    "subnet",
    "rangeStart",
    "rangeEnd",
    "gateway",
    "routes",
    "resolvConf",
    "sticky",
];

/// The most range sets. The store writes a pod's change of addresses down in one page, which has room for
/// these however long the names are: what ADD could take, DEL must be able to give back.
pub(crate) const MAX_RANGE_SETS: usize = 12;

/// Every key of a range.
pub(crate) const RANGE_FIELDS: &[&str] = &["subnet", "rangeStart", "rangeEnd", "gateway"];

/// The `ipam` section, validated.
#[derive(Debug, Clone, PartialEq)]
pub struct IpamConf {
    /// The directory that holds a directory for every network.
    pub data_dir: PathBuf,
    /// One address is taken from each. Empty only for DEL and GC, which do not need them, and for STATUS of a
    /// network whose ranges the runtime gives with each ADD.
    pub sets: Vec<RangeSet>,
    /// Routes that go into results as they are.
    pub routes: Vec<Route>,
    /// The file that name service settings are taken from.
    pub resolv_conf: Option<PathBuf>,
    /// Addresses that were asked for, each once.
    pub requested: Vec<RequestedAddress>,
    /// Our own settings; absent when the key is.
    pub sticky: Option<StickyConf>,
}

impl IpamConf {
    /// Reads what is needed to find the store, and tells what else is wrong without refusing it: an address
    /// must not leak because a later edit of the configuration has a mistake.
    pub(crate) fn read_leniently(ipam: &Fields<'_>, warnings: &mut Vec<String>) -> Result<Self, CniError> {
        let data_dir = read_data_dir(ipam)?;
        let mut forgive = |error: CniError| warnings.push(error.to_string());
        let sets = read_sets(ipam, None).unwrap_or_else(|error| {
            forgive(error);
            Vec::new()
        });
        let sticky = match ipam.object("sticky")? {
            Some(fields) => Some(StickyConf::read_leniently(&fields, warnings)?),
            None => None,
        };
        Ok(Self { data_dir, sets, routes: Vec::new(), resolv_conf: None, requested: Vec::new(), sticky })
    }

    /// Reads everything, and refuses any mistake.
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
        return Err(CniError::invalid_config(
            &fields.path_of("dataDir"),
            "only counts beside \"delegate\"; here it is ipam.dataDir that says where the store is",
        ));
    }
    StickyConf::read(&fields).map(Some)
}

/// The sets in the order that addresses appear in results: the runtime's, the old single range, the list.
fn read_sets(ipam: &Fields<'_>, runtime: Option<&Fields<'_>>) -> Result<Vec<RangeSet>, CniError> {
    let mut sets = match runtime {
        Some(runtime) => read_set_list(runtime, "ipRanges")?,
        None => Vec::new(),
    };
    if ipam.get("subnet").is_some() {
        let range = read_range(ipam)?;
        sets.push(RangeSet::new(vec![range]).map_err(|e| range_error(ipam.path(), &e))?);
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
        let ranges = items.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
        sets.push(RangeSet::new(ranges).map_err(|e| range_error(&path, &e))?);
    }
    Ok(sets)
}

fn read_range(fields: &Fields<'_>) -> Result<Range, CniError> {
    let subnet = fields.string("subnet")?.ok_or_else(|| {
        CniError::invalid_config(&fields.path_of("subnet"), "is missing; write one such as \"10.1.0.0/24\"")
    })?;
    let spec = RangeSpec {
        subnet,
        range_start: fields.string("rangeStart")?,
        range_end: fields.string("rangeEnd")?,
        gateway: fields.string("gateway")?,
    };
    Range::from_spec(&spec).map_err(|error| range_error(fields.path(), &error))
}

fn range_error(path: &str, error: &RangeError) -> CniError {
    CniError::invalid_config(path, error)
}

fn check_sets(ipam: &Fields<'_>, sets: &[RangeSet], version: CniVersion) -> Result<(), CniError> {
    let path = ipam.path_of("ranges");
    if sets.is_empty() {
        let hint = match ["rangeStart", "rangeEnd", "gateway"].into_iter().find(|key| ipam.get(key).is_some())
        {
            Some(key) => format!("{} is there, but without a subnet it says nothing; ", ipam.path_of(key)),
            None => String::new(),
        };
        return Err(CniError::invalid_config(
            &path,
            format!("no IP ranges given; {hint}write \"ranges\": [[{{\"subnet\": \"10.1.0.0/24\"}}]]"),
        ));
    }
    if sets.len() > MAX_RANGE_SETS {
        return Err(CniError::invalid_config(
            &path,
            format!(
                "{} range sets, each of which gives a pod one more address; {MAX_RANGE_SETS} are the most, \
                 so put \
                 ranges of one family into one set",
                sets.len()
            ),
        ));
    }
    check_families(sets, version)?;
    for (i, one) in sets.iter().enumerate() {
        if let Some(j) = (i + 1..sets.len()).find(|j| one.overlaps(&sets[*j])) {
            return Err(CniError::invalid_config(
                &path,
                format!(
                    "range set {i} ({one}) overlaps with range set {j} ({}); make them disjoint",
                    sets[j]
                ),
            ));
        }
    }
    Ok(())
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
        for key in ["rangeStart", "rangeEnd", "gateway"].into_iter().filter(|key| ipam.get(key).is_some()) {
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
    let by_args = match root.object("args")?.map(|args| args.object("cni")).transpose()?.flatten() {
        Some(cni) => read_addresses(&cni)?,
        None => Vec::new(),
    };
    let mut all = if by_args.is_empty() { args.ip.into_iter().collect() } else { by_args };
    if let Some(runtime) = runtime {
        all.extend(read_addresses(runtime)?);
    }
    let mut once: Vec<RequestedAddress> = Vec::new();
    for address in all {
        if !once.iter().any(|have| have.ip == address.ip) {
            once.push(address);
        }
    }
    Ok(once)
}

fn read_addresses(fields: &Fields<'_>) -> Result<Vec<RequestedAddress>, CniError> {
    let texts = fields.strings("ips")?.unwrap_or_default();
    let read = |(i, text): (usize, &str)| {
        RequestedAddress::parse(text).ok_or_else(|| {
            CniError::invalid_config(
                &format!("{}[{i}]", fields.path_of("ips")),
                format!("{text:?} is not an IP address; write one such as 10.1.0.9 or 10.1.0.9/24"),
            )
        })
    };
    texts.into_iter().enumerate().map(read).collect()
}
