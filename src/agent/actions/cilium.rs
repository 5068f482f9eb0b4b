//! Asking cilium-agent on this node over its socket. Must never be asked for what the store knows.

use std::io;
use std::net::IpAddr;
use std::path::Path;

use super::context::ActionContext;
use super::outcome::{ActionError, Performed, postponed};
use crate::cluster::cilium::socket::{self, EndpointAnswer, EndpointInfo};
use crate::store::Disk;

impl<D: Disk + Clone> ActionContext<'_, D> {
    /// Postpones the action until cilium-agent has no endpoint with one of these addresses. Asked only where
    /// Cilium picks the addresses: elsewhere the store knows.
    pub(super) async fn require_no_endpoint(&self, addresses: &[IpAddr]) -> Performed<()> {
        for address in addresses.iter().filter(|_| self.settings.mode.cilium_picks_the_address()) {
            if self.endpoint_of(*address).await?.is_some() {
                return postponed(format!("cilium-agent still has an endpoint with {address}"));
            }
        }
        Ok(())
    }

    pub(super) async fn endpoint_of(&self, address: IpAddr) -> Performed<Option<EndpointInfo>> {
        let asked = move |socket: &Path| socket::endpoint(socket, address);
        match self.ask_cilium(&address.to_string(), asked).await? {
            EndpointAnswer::There(answer) => Ok(Some(EndpointInfo::parse(&answer))),
            EndpointAnswer::Absent => Ok(None),
        }
    }

    pub(super) async fn ask_cilium<T: Send + 'static>(
        &self,
        subject: &str,
        question: impl FnOnce(&Path) -> io::Result<T> + Send + 'static,
    ) -> Performed<T> {
        let path = self.settings.on_host(&self.settings.cilium_socket);
        let socket = path.clone();
        // cilium-agent may hang, and the agent's other tasks must not wait for it.
        let asked = tokio::task::spawn_blocking(move || question(&socket)).await;
        asked.unwrap_or_else(|error| Err(io::Error::other(error))).map_err(|error| ActionError::Cilium {
            subject: subject.to_owned(),
            reason: format!("{}: {error}", path.display()),
        })
    }
}
