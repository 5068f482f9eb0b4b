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
        self.ask_cilium(&address.to_string(), asked).await.map(known)
    }

    /// The endpoint of a pod of this name.
    pub(super) async fn endpoint_of_pod(
        &self,
        namespace: &str,
        name: &str,
    ) -> Performed<Option<EndpointInfo>> {
        let (namespace, name) = (namespace.to_owned(), name.to_owned());
        let subject = format!("pod {namespace}/{name}");
        let asked = move |socket: &Path| socket::endpoint_of_pod(socket, &namespace, &name);
        self.ask_cilium(&subject, asked).await.map(known)
    }

    /// The endpoint with this address, if it is that of a pod of this name. Else what Cilium says instead.
    ///
    /// Asked twice, by address and by name: since 1.20 an endpoint does not name its pod. Both answers must
    /// be of one attachment, and that of the name must have the address.
    pub(super) async fn endpoint_of_pod_with(
        &self,
        namespace: &str,
        name: &str,
        address: IpAddr,
    ) -> Performed<Result<EndpointInfo, String>> {
        let Some(endpoint) = self.endpoint_of(address).await? else {
            return Ok(Err("cilium-agent has no endpoint with it".into()));
        };
        let of_pod = self.endpoint_of_pod(namespace, name).await?;
        let its_own =
            of_pod.is_some_and(|own| own.is_same_attachment(&endpoint) && own.addresses.contains(&address));
        Ok(match its_own {
            true => Ok(endpoint),
            false => Err(format!("cilium-agent has it for {}", endpoint.holder())),
        })
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

fn known(answer: EndpointAnswer) -> Option<EndpointInfo> {
    match answer {
        EndpointAnswer::There(answer) => Some(EndpointInfo::parse(&answer)),
        EndpointAnswer::Absent => None,
    }
}
