//! Reads and writes the kernel's routes, over a netlink socket. Must never wait long: the kernel answers at
//! once or not at all.

use std::fs;
use std::io::{self, Read, Write};
use std::time::Duration;

use nix::errno::Errno;
use socket2::{Domain, Protocol, Socket, Type};

use super::message::{Answer, Route, delete, list, put, read};
use super::plan::Changes;

/// The index of Cilium's interface for the host, in the network namespace of this process.
const HOST_INTERFACE: &str = "/sys/class/net/cilium_host/ifindex";
/// `AF_NETLINK`, and its protocol for routes.
const NETLINK: i32 = 16;
const NETLINK_ROUTE: i32 = 0;
const PATIENCE: Duration = Duration::from_secs(2);
/// The kernel's datagrams are not longer.
const DATAGRAM: usize = 64 << 10;

/// The index of Cilium's interface for the host; none before cilium-agent has started once.
pub(super) fn host_interface() -> Option<u32> {
    fs::read_to_string(HOST_INTERFACE).ok()?.trim().parse().ok()
}

/// Every route of the main table.
pub(super) fn routes() -> io::Result<Vec<Route>> {
    let mut found = Vec::new();
    for is_v4 in [true, false] {
        ask(&list(is_v4), |route| found.push(route))?;
    }
    Ok(found)
}

/// Errors: the first route that the kernel refused. The ones before are changed.
pub(super) fn apply(changes: &Changes) -> io::Result<()> {
    for route in &changes.delete {
        match ask(&delete(route), |_| {}) {
            // It is gone already.
            Err(error) if error.raw_os_error() == Some(Errno::ESRCH as i32) => {}
            other => other?,
        }
    }
    changes.put.iter().try_for_each(|route| ask(&put(route), |_| {}))
}

/// Sends one request and hands on every route of the answer, to its end.
fn ask(request: &[u8], mut take: impl FnMut(Route)) -> io::Result<()> {
    let mut socket = Socket::new(Domain::from(NETLINK), Type::RAW, Some(Protocol::from(NETLINK_ROUTE)))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    socket.write_all(request)?;
    let mut datagram = vec![0; DATAGRAM];
    loop {
        let length = socket.read(&mut datagram)?;
        for answer in read(datagram.get(..length).unwrap_or_default()) {
            match answer {
                Answer::Done => return Ok(()),
                Answer::Refused(number) => return Err(io::Error::from_raw_os_error(number)),
                Answer::Route(route) => take(route),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_lists_its_routes_to_anybody() {
        let found = routes().unwrap();
        assert!(found.iter().all(|route| route.to.prefix_len() <= route.to.max_prefix_len()), "{found:?}");
    }
}
