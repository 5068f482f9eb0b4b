//! What ADD answers, free of any version; read from and printed in the shape of each.
//!
//! Fields that are not known here are carried along, so that what an earlier plugin of a chain said is never
//! lost.

use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Map, Value, json};

use crate::alloc::range::{Family, parse_cidr};
use crate::cni::error::CniError;
use crate::cni::fields::Fields;
use crate::cni::version::CniVersion;

/// The answer to an ADD, and what `prevResult` holds. `extra` has the fields that are not known here.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct CniResult {
    /// Interfaces that were made. An IPAM plugin makes none; a chain's earlier plugins do.
    pub interfaces: Vec<Interface>,
    pub ips: Vec<IpConfig>,
    pub routes: Vec<Route>,
    pub dns: Dns,
    pub extra: Map<String, Value>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Interface {
    pub name: String,
    pub mac: Option<String>,
    pub mtu: Option<u64>,
    /// The network namespace it is in; none on the host.
    pub sandbox: Option<String>,
    pub socket_path: Option<String>,
    pub pci_id: Option<String>,
    pub extra: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct IpConfig {
    pub address: IpNet,
    pub gateway: Option<IpAddr>,
    /// Which of the result's interfaces has it.
    pub interface: Option<u64>,
    pub extra: Map<String, Value>,
}

impl IpConfig {
    /// An address that is not on an interface yet.
    pub(crate) fn new(address: IpNet, gateway: Option<IpAddr>) -> Self {
        Self { address, gateway, interface: None, extra: Map::new() }
    }
}

/// A route, in a result or in the configuration. Of its numbers all are since 1.1.0.
#[derive(Debug, Clone, PartialEq)]
pub struct Route {
    /// Where to; host bits are kept as written.
    pub dst: IpNet,
    pub gw: Option<IpAddr>,
    pub mtu: Option<u64>,
    pub advmss: Option<u64>,
    pub priority: Option<u64>,
    pub table: Option<u64>,
    pub scope: Option<u64>,
    pub extra: Map<String, Value>,
}

#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Dns {
    pub nameservers: Vec<String>,
    pub domain: Option<String>,
    pub search: Vec<String>,
    pub options: Vec<String>,
    pub extra: Map<String, Value>,
}

pub(crate) const ROUTE_KEYS: [&str; 7] = ["dst", "gw", "mtu", "advmss", "priority", "table", "scope"];

impl CniResult {
    /// Reads a result found at `path`. Its own `cniVersion` tells its shape, else the given version does.
    pub(crate) fn from_json(path: &str, value: &Value, version: CniVersion) -> Result<Self, CniError> {
        let fields = Fields::of(path.to_owned(), value)?;
        let version = match fields.string("cniVersion")? {
            None => version,
            Some(text) => CniVersion::parse(text).map_err(|_| {
                let path = fields.path_of("cniVersion");
                CniError::incompatible_version(format!("{path}: {text:?} is not a version that can be read"))
            })?,
        };
        if version < CniVersion::V0_3_0 { Self::read_by_family(&fields) } else { Self::read_lists(&fields) }
    }

    fn read_by_family(fields: &Fields<'_>) -> Result<Self, CniError> {
        let mut result = Self { dns: read_dns(fields)?, ..Self::default() };
        result.extra = fields.others(&["cniVersion", "ip4", "ip6", "dns"]);
        for key in ["ip4", "ip6"] {
            let Some(ip) = fields.object(key)? else { continue };
            result.ips.push(IpConfig {
                address: read_cidr(&ip, "ip")?,
                gateway: read_ip(&ip, "gateway")?,
                interface: None,
                extra: ip.others(&["ip", "gateway", "routes"]),
            });
            result.routes.extend(read_routes(&ip, "routes")?);
        }
        Ok(result)
    }

    fn read_lists(fields: &Fields<'_>) -> Result<Self, CniError> {
        Ok(Self {
            interfaces: read_each(fields, "interfaces", |f| {
                Ok(Interface {
                    name: f.string("name")?.unwrap_or_default().to_owned(),
                    mac: text(&f, "mac")?,
                    mtu: nonzero(&f, "mtu")?,
                    sandbox: text(&f, "sandbox")?,
                    socket_path: text(&f, "socketPath")?,
                    pci_id: text(&f, "pciID")?,
                    extra: f.others(&["name", "mac", "mtu", "sandbox", "socketPath", "pciID"]),
                })
            })?,
            ips: read_each(fields, "ips", |f| {
                Ok(IpConfig {
                    address: read_cidr(&f, "address")?,
                    gateway: read_ip(&f, "gateway")?,
                    interface: read_index(&f)?,
                    extra: f.others(&["version", "address", "gateway", "interface"]),
                })
            })?,
            routes: read_routes(fields, "routes")?,
            dns: read_dns(fields)?,
            extra: fields.others(&["cniVersion", "interfaces", "ips", "routes", "dns"]),
        })
    }

    /// The result in the shape of a version.
    ///
    /// Before 0.3.0 there is room for one address a family and for `dst` and `gw` of routes, and for nothing
    /// unknown. From 0.3.0 on, what 1.1.0 added to routes is kept too, as host-local does: a plugin that asks
    /// for an older version still wants the MTU that its operator wrote.
    pub(crate) fn print_as(&self, version: CniVersion) -> Value {
        let mut object =
            if version < CniVersion::V0_3_0 { self.print_by_family() } else { self.print_lists(version) };
        object.insert("cniVersion".into(), json!(version.as_str()));
        let dns = print_dns(&self.dns);
        // Up to 0.4.0 the key is always there, as it is in host-local's answers.
        if version < CniVersion::V1_0_0 || !dns.is_empty() {
            object.insert("dns".into(), Value::Object(dns));
        }
        Value::Object(object)
    }

    fn print_by_family(&self) -> Map<String, Value> {
        let mut object = Map::new();
        for (key, family) in [("ip4", Family::V4), ("ip6", Family::V6)] {
            let Some(ip) = self.ips.iter().find(|ip| Family::of(ip.address.addr()) == family) else {
                continue;
            };
            let mut printed = Map::new();
            put(&mut printed, "ip", Some(ip.address.to_string()));
            put(&mut printed, "gateway", ip.gateway.map(|gw| gw.to_string()));
            let of_family = self.routes.iter().filter(|r| Family::of(r.dst.addr()) == family);
            put_list(&mut printed, "routes", of_family.map(print_hop));
            object.insert(key.into(), Value::Object(printed));
        }
        object
    }

    fn print_lists(&self, version: CniVersion) -> Map<String, Value> {
        let mut object = self.extra.clone();
        put_list(&mut object, "interfaces", self.interfaces.iter().map(|i| print_interface(i, version)));
        put_list(&mut object, "ips", self.ips.iter().map(|ip| print_ip(ip, version)));
        put_list(&mut object, "routes", self.routes.iter().map(print_route));
        object
    }

    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        self.ips.iter().map(|ip| ip.address.addr()).collect()
    }

    /// What an earlier plugin answered, with ours added: nothing of it is lost, nothing is there twice.
    pub(crate) fn merged(prev: Self, ours: Self) -> Self {
        let mut all = prev;
        let shift = all.interfaces.len() as u64;
        all.interfaces.extend(ours.interfaces);
        for mut ip in ours.ips {
            ip.interface = ip.interface.map(|i| i.saturating_add(shift));
            if !all.ips.iter().any(|have| have.address == ip.address) {
                all.ips.push(ip);
            }
        }
        add_new(&mut all.routes, ours.routes);
        add_new(&mut all.dns.nameservers, ours.dns.nameservers);
        add_new(&mut all.dns.search, ours.dns.search);
        add_new(&mut all.dns.options, ours.dns.options);
        all.dns.domain = all.dns.domain.or(ours.dns.domain);
        for (mine, theirs) in [(&mut all.extra, ours.extra), (&mut all.dns.extra, ours.dns.extra)] {
            for (key, value) in theirs {
                mine.entry(key).or_insert(value);
            }
        }
        all
    }
}

fn add_new<T: PartialEq>(to: &mut Vec<T>, from: Vec<T>) {
    for item in from {
        if !to.contains(&item) {
            to.push(item);
        }
    }
}

/// Puts a value in, or takes the key out, so that no unread leftover can stand in for a known field.
fn put(object: &mut Map<String, Value>, key: &str, value: Option<impl Into<Value>>) {
    match value {
        Some(value) => object.insert(key.to_owned(), value.into()),
        None => object.remove(key),
    };
}

fn put_list(object: &mut Map<String, Value>, key: &str, items: impl Iterator<Item = impl Into<Value>>) {
    let items: Vec<Value> = items.map(Into::into).collect();
    put(object, key, (!items.is_empty()).then_some(items));
}

fn print_interface(interface: &Interface, version: CniVersion) -> Map<String, Value> {
    let mut object = interface.extra.clone();
    put(&mut object, "name", Some(interface.name.clone()));
    put(&mut object, "mac", interface.mac.clone());
    put(&mut object, "sandbox", interface.sandbox.clone());
    // 1.0.0 and 1.1.0 share a shape in libcni, older ones have no place for these.
    let modern = version >= CniVersion::V1_0_0;
    put(&mut object, "mtu", interface.mtu.filter(|_| modern));
    put(&mut object, "socketPath", interface.socket_path.clone().filter(|_| modern));
    put(&mut object, "pciID", interface.pci_id.clone().filter(|_| modern));
    object
}

fn print_ip(ip: &IpConfig, version: CniVersion) -> Map<String, Value> {
    let mut object = ip.extra.clone();
    let family = if Family::of(ip.address.addr()) == Family::V4 { "4" } else { "6" };
    put(&mut object, "version", (version < CniVersion::V1_0_0).then_some(family));
    put(&mut object, "address", Some(ip.address.to_string()));
    put(&mut object, "gateway", ip.gateway.map(|gw| gw.to_string()));
    put(&mut object, "interface", ip.interface);
    object
}

fn print_hop(route: &Route) -> Map<String, Value> {
    let mut object = Map::new();
    put(&mut object, "dst", Some(route.dst.to_string()));
    put(&mut object, "gw", route.gw.map(|gw| gw.to_string()));
    object
}

fn print_route(route: &Route) -> Map<String, Value> {
    let mut object = route.extra.clone();
    object.extend(print_hop(route));
    put(&mut object, "mtu", route.mtu);
    put(&mut object, "advmss", route.advmss);
    put(&mut object, "priority", route.priority);
    put(&mut object, "table", route.table);
    put(&mut object, "scope", route.scope);
    object
}

fn print_dns(dns: &Dns) -> Map<String, Value> {
    let mut object = dns.extra.clone();
    put_list(&mut object, "nameservers", dns.nameservers.iter().cloned());
    put_list(&mut object, "search", dns.search.iter().cloned());
    put_list(&mut object, "options", dns.options.iter().cloned());
    put(&mut object, "domain", dns.domain.clone());
    object
}

fn read_each<T>(
    fields: &Fields<'_>,
    key: &str,
    read: impl Fn(Fields<'_>) -> Result<T, CniError>,
) -> Result<Vec<T>, CniError> {
    let items = fields.list(key)?.unwrap_or_default();
    let path = fields.path_of(key);
    items.iter().enumerate().map(|(i, item)| read(Fields::of(format!("{path}[{i}]"), item)?)).collect()
}

/// Reads a list of routes, of a result or of the configuration.
pub(crate) fn read_routes(fields: &Fields<'_>, key: &str) -> Result<Vec<Route>, CniError> {
    read_each(fields, key, |f| {
        Ok(Route {
            dst: read_cidr(&f, "dst")?,
            gw: read_ip(&f, "gw")?,
            mtu: nonzero(&f, "mtu")?,
            advmss: nonzero(&f, "advmss")?,
            priority: nonzero(&f, "priority")?,
            table: f.number("table")?,
            scope: f.number("scope")?,
            extra: f.others(&ROUTE_KEYS),
        })
    })
}

fn read_dns(fields: &Fields<'_>) -> Result<Dns, CniError> {
    let Some(dns) = fields.object("dns")? else { return Ok(Dns::default()) };
    Ok(Dns {
        nameservers: dns.owned_strings("nameservers")?,
        domain: text(&dns, "domain")?,
        search: dns.owned_strings("search")?,
        options: dns.owned_strings("options")?,
        extra: dns.others(&["nameservers", "domain", "search", "options"]),
    })
}

fn text(fields: &Fields<'_>, key: &str) -> Result<Option<String>, CniError> {
    Ok(fields.string(key)?.filter(|text| !text.is_empty()).map(str::to_owned))
}

/// A number for which zero means that nothing was said.
fn nonzero(fields: &Fields<'_>, key: &str) -> Result<Option<u64>, CniError> {
    Ok(fields.number(key)?.filter(|number| *number != 0))
}

/// The interface an address is on; the reference plugins write -1 for none.
fn read_index(fields: &Fields<'_>) -> Result<Option<u64>, CniError> {
    match fields.get("interface").and_then(Value::as_i64) {
        Some(-1) => Ok(None),
        _ => fields.number("interface"),
    }
}

fn read_cidr(fields: &Fields<'_>, key: &str) -> Result<IpNet, CniError> {
    let right = "write an address and a prefix length, such as 10.1.0.0/24";
    let missing = || fields.invalid(key, format!("is missing; {right}"));
    let given = fields.string(key)?.ok_or_else(missing)?;
    parse_cidr(given).ok_or_else(|| fields.invalid(key, format!("{given:?} is not a CIDR; {right}")))
}

fn read_ip(fields: &Fields<'_>, key: &str) -> Result<Option<IpAddr>, CniError> {
    match fields.string(key)? {
        None | Some("") => Ok(None),
        Some(given) => given.parse::<IpAddr>().map(|ip| Some(ip.to_canonical())).map_err(|_| {
            let problem = format!("{given:?} is not an IP address; write one such as 10.1.0.1 or fd00::1");
            fields.invalid(key, problem)
        }),
    }
}

#[cfg(test)]
mod tests;
