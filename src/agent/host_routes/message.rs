//! The few messages of rtnetlink that routes need, as bytes. Pure. Must never send anything.

use std::net::IpAddr;

use ipnet::IpNet;

const HEADER: usize = 16;
const ROUTE: usize = 12;
const ATTRIBUTE: usize = 4;

const NEW_ROUTE: u16 = 24;
const DELETE_ROUTE: u16 = 25;
const GET_ROUTES: u16 = 26;
const ERROR: u16 = 2;
const DONE: u16 = 3;

const REQUEST: u16 = 0x1;
const ACKNOWLEDGE: u16 = 0x4;
const REPLACE: u16 = 0x100;
const CREATE: u16 = 0x400;
const DUMP: u16 = 0x300;

const DESTINATION: u16 = 1;
const INTERFACE: u16 = 4;
const GATEWAY: u16 = 5;
const PRIORITY: u16 = 6;
const SOURCE: u16 = 7;
const METRICS: u16 = 8;
const TABLE: u16 = 15;

const MAIN_TABLE: u8 = 254;
const UNICAST: u8 = 1;
const INET: u8 = 2;
const INET6: u8 = 10;

/// A route of the main table to one or more addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Route {
    pub to: IpNet,
    /// Who made it: a number that every program chooses.
    pub protocol: u8,
    pub scope: u8,
    /// The index of the interface.
    pub interface: u32,
    pub gateway: Option<IpAddr>,
    pub source: Option<IpAddr>,
    pub priority: Option<u32>,
    /// It has metrics, such as an MTU.
    pub has_metrics: bool,
}

/// A piece of the kernel's answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    Route(Route),
    /// Everything was sent, or the request was carried out.
    Done,
    /// The number of the error.
    Refused(i32),
}

fn family(is_v4: bool) -> u8 {
    if is_v4 { INET } else { INET6 }
}

fn attribute(out: &mut Vec<u8>, kind: u16, value: &[u8]) {
    let length = u16::try_from(ATTRIBUTE + value.len()).unwrap_or(u16::MAX);
    out.extend_from_slice(&length.to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(value);
    out.resize(out.len().next_multiple_of(ATTRIBUTE), 0);
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    }
}

/// A whole message; `body` is the route's fields and attributes.
fn message(kind: u16, flags: u16, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(HEADER + body.len()).unwrap_or(u32::MAX);
    let mut out = Vec::new();
    out.extend_from_slice(&length.to_ne_bytes());
    out.extend_from_slice(&kind.to_ne_bytes());
    out.extend_from_slice(&flags.to_ne_bytes());
    // The kernel fills in our port, and one request at a time needs no number.
    out.extend_from_slice(&[0; 8]);
    out.extend_from_slice(body);
    out
}

/// Asks for every route of a family.
pub(super) fn list(is_v4: bool) -> Vec<u8> {
    let mut body = vec![0; ROUTE];
    body[0] = family(is_v4);
    message(GET_ROUTES, REQUEST | DUMP, &body)
}

fn body(route: &Route) -> Vec<u8> {
    let is_v4 = route.to.addr().is_ipv4();
    let mut out =
        vec![family(is_v4), route.to.prefix_len(), 0, 0, MAIN_TABLE, route.protocol, route.scope, UNICAST];
    out.extend_from_slice(&[0; 4]);
    attribute(&mut out, DESTINATION, &octets(route.to.network()));
    attribute(&mut out, INTERFACE, &route.interface.to_ne_bytes());
    for (kind, address) in [(GATEWAY, route.gateway), (SOURCE, route.source)] {
        if let Some(address) = address {
            attribute(&mut out, kind, &octets(address));
        }
    }
    if let Some(priority) = route.priority {
        attribute(&mut out, PRIORITY, &priority.to_ne_bytes());
    }
    out
}

/// Adds a route, or replaces the one to the same addresses.
pub(super) fn put(route: &Route) -> Vec<u8> {
    message(NEW_ROUTE, REQUEST | ACKNOWLEDGE | CREATE | REPLACE, &body(route))
}

/// Deletes exactly this route: the kernel compares its protocol too.
pub(super) fn delete(route: &Route) -> Vec<u8> {
    message(DELETE_ROUTE, REQUEST | ACKNOWLEDGE, &body(route))
}

fn number<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..at + N)?.try_into().ok()
}

fn address(bytes: &[u8]) -> Option<IpAddr> {
    let v4 = <[u8; 4]>::try_from(bytes).map(IpAddr::from);
    v4.or_else(|_| <[u8; 16]>::try_from(bytes).map(IpAddr::from)).ok()
}

/// What one datagram says. Other messages and routes of other tables are passed over.
pub(super) fn read(mut datagram: &[u8]) -> Vec<Answer> {
    let mut found = Vec::new();
    while let (Some(length), Some(kind)) = (number::<4>(datagram, 0), number::<2>(datagram, 4)) {
        let length = usize::try_from(u32::from_ne_bytes(length)).unwrap_or(usize::MAX);
        let Some(body) = datagram.get(HEADER..length) else { break };
        match u16::from_ne_bytes(kind) {
            NEW_ROUTE => found.extend(route(body).map(Answer::Route)),
            DONE => found.push(Answer::Done),
            ERROR => found.push(match number::<4>(body, 0).map(i32::from_ne_bytes) {
                Some(0) => Answer::Done,
                error => Answer::Refused(error.unwrap_or_default().saturating_neg()),
            }),
            _ => {}
        }
        datagram = datagram.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    found
}

fn route(body: &[u8]) -> Option<Route> {
    let fixed = body.get(..ROUTE)?;
    let (family, length, table, kind) = (fixed[0], fixed[1], fixed[4], fixed[7]);
    let nowhere = if family == INET { IpAddr::from([0; 4]) } else { IpAddr::from([0; 16]) };
    let mut to = nowhere;
    let mut in_main = table == MAIN_TABLE;
    let mut found = Route {
        to: IpNet::from(nowhere),
        protocol: fixed[5],
        scope: fixed[6],
        interface: 0,
        gateway: None,
        source: None,
        priority: None,
        has_metrics: false,
    };
    let mut rest = body.get(ROUTE..)?;
    while let (Some(size), Some(name)) = (number::<2>(rest, 0), number::<2>(rest, 2)) {
        let size = usize::from(u16::from_ne_bytes(size));
        let Some(value) = rest.get(ATTRIBUTE..size) else { break };
        let word = || number::<4>(value, 0).map(u32::from_ne_bytes);
        match u16::from_ne_bytes(name) {
            DESTINATION => to = address(value)?,
            INTERFACE => found.interface = word()?,
            GATEWAY => found.gateway = address(value),
            SOURCE => found.source = address(value),
            PRIORITY => found.priority = word(),
            METRICS => found.has_metrics = true,
            TABLE => in_main = word() == Some(u32::from(MAIN_TABLE)),
            _ => {}
        }
        rest = rest.get(size.next_multiple_of(ATTRIBUTE)..).unwrap_or_default();
    }
    found.to = IpNet::new(to, length).ok()?;
    (in_main && kind == UNICAST).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(to: &str) -> Route {
        Route {
            to: to.parse().unwrap(),
            protocol: 71,
            scope: 0,
            interface: 4,
            gateway: to.parse::<IpNet>().unwrap().addr().is_ipv4().then(|| "10.200.1.5".parse().unwrap()),
            source: Some(if to.contains(':') { "fd24:1::5" } else { "10.200.1.5" }.parse().unwrap()),
            priority: to.contains(':').then_some(1024),
            has_metrics: false,
        }
    }

    #[test]
    fn a_route_that_is_written_is_read_back_the_same() {
        for to in ["10.77.0.7/32", "10.200.7.0/24", "fd24:7::/96", "0.0.0.0/0"] {
            let route = wanted(to);
            assert_eq!(read(&put(&route)), [Answer::Route(route)], "{to}");
        }
    }

    #[test]
    fn several_messages_of_one_datagram_are_read_and_other_tables_passed_over() {
        let mut other = put(&wanted("10.9.0.0/24"));
        other[HEADER + 4] = 255;
        let done = message(DONE, 0, &[0; 4]);
        let refused = message(ERROR, 0, &(-17_i32).to_ne_bytes());
        let accepted = message(ERROR, 0, &[0; 4]);
        let all = [put(&wanted("10.77.0.7/32")), other, refused, accepted, done].concat();
        let route = Answer::Route(wanted("10.77.0.7/32"));
        assert_eq!(read(&all), [route, Answer::Refused(17), Answer::Done, Answer::Done]);
    }

    #[test]
    fn bytes_that_are_cut_off_anywhere_are_read_without_harm() {
        let whole = put(&wanted("fd24:7::/96"));
        for length in 0..whole.len() {
            assert_eq!(read(&whole[..length]), [], "{length}");
            let mut lying = whole.clone();
            lying[length] = 255;
            read(&lying);
        }
    }
}
