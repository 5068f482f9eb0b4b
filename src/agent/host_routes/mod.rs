//! Keeps the routes by which the host reaches pods that cilium-agent does not route on its own node
//! (docs/decisions). Must never end, and never do anything where cilium-agent needs no help.

mod kernel;
mod message;
mod plan;

use std::io;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::watch::Receiver;

use crate::alloc::join;
use plan::{Changes, changes};

/// How often the routes are compared although nothing has changed here: cilium-agent starts again, and what
/// it does with routes is not announced.
const LOOK: Duration = Duration::from_secs(5);

/// Follows what the own CiliumNode names, until dropped.
pub(super) async fn keep(mut nets: Receiver<Vec<IpNet>>) {
    let mut reported = None;
    loop {
        let named = nets.borrow_and_update().clone();
        match tokio::task::spawn_blocking(move || look(&named)).await {
            Ok(Ok(done)) => {
                report(&done);
                reported = None;
            }
            Ok(Err(error)) => {
                let text = error.to_string();
                if reported.as_ref() != Some(&text) {
                    tracing::warn!(
                        error = text,
                        "cannot write the host's routes to its pods; give the agent NET_ADMIN, or turn Cilium's \
                         endpoint routes on"
                    );
                }
                reported = Some(text);
            }
            Err(error) => tracing::warn!(%error, "cannot look at the host's routes; trying again"),
        }
        tokio::select! {
            changed = nets.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(LOOK) => {}
        }
    }
}

fn look(named: &[IpNet]) -> io::Result<Changes> {
    // Nothing is known of the own CiliumNode yet, or it has nothing.
    let Some(host) = kernel::host_interface().filter(|_| !named.is_empty()) else {
        return Ok(Changes::default());
    };
    let changes = changes(&kernel::routes()?, named, host);
    kernel::apply(&changes)?;
    Ok(changes)
}

fn report(done: &Changes) {
    let nets =
        |routes: &[message::Route]| join(routes.iter().map(|route| route.to).collect::<Vec<_>>().as_slice());
    if !done.put.is_empty() {
        tracing::info!(to = nets(&done.put), "added routes of the host to pods");
    }
    if !done.delete.is_empty() {
        tracing::info!(to = nets(&done.delete), "removed routes of the host to pods that left");
    }
}
