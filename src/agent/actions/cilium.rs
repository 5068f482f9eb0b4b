//! Asking cilium-agent on this node over its socket. Must never be asked for what the store knows.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use super::context::ActionContext;
use super::outcome::{ActionError, ActionOutcome};
use crate::cluster::cilium::socket::{self, EndpointAnswer, EndpointInfo};
use crate::store::Disk;

/// That cilium-agent has to remove its endpoint with one of these addresses first. Asked only where Cilium
/// picks the addresses: elsewhere the store knows.
pub(super) async fn postponed_by_cilium<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    addresses: &[IpAddr],
) -> Result<Option<ActionOutcome>, ActionError> {
    for address in addresses.iter().filter(|_| context.settings.mode.cilium_picks_the_address()) {
        if endpoint_of(context, *address).await?.is_some() {
            return Ok(Some(ActionOutcome::Postponed(format!(
                "cilium-agent still has an endpoint with {address}"
            ))));
        }
    }
    Ok(None)
}

/// What cilium-agent says of the endpoint with this address.
pub(super) async fn endpoint_of<D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    address: IpAddr,
) -> Result<Option<EndpointInfo>, ActionError> {
    let asked = move |socket: &Path| socket::endpoint(socket, address);
    match ask_cilium(context, &address.to_string(), asked).await? {
        EndpointAnswer::There(answer) => Ok(Some(EndpointInfo::parse(&answer))),
        EndpointAnswer::Absent => Ok(None),
    }
}

/// Asks cilium-agent over its socket.
pub(super) async fn ask_cilium<T: Send + 'static, D: Disk + Clone>(
    context: &ActionContext<'_, D>,
    subject: &str,
    question: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
) -> Result<T, ActionError> {
    let path = context.settings.on_host(&context.settings.cilium_socket);
    let socket = path.clone();
    // cilium-agent may hang, and the agent's other tasks must not wait for it.
    let asked = tokio::task::spawn_blocking(move || question(&socket)).await;
    asked.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(|error| ActionError::Cilium {
        subject: subject.to_owned(),
        reason: format!("{}: {error}", path.display()),
    })
}
