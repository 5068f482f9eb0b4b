//! CHECK: the container still has what ADD gave it.

use crate::cni::{CniError, Request, code};
use crate::plugin::{VerbContext, VerbLog, attachment};
use crate::store::Disk;

pub(crate) fn run<D: Disk>(
    verb: &VerbContext<'_, D>,
    request: &Request,
    log: &mut VerbLog<'_>,
) -> Result<(), CniError> {
    let attachment = attachment(request)?;
    let stored = match verb.store.lock_existing()? {
        Some(mut locked) => locked.find_by_attachment(attachment)?,
        None => None,
    };
    let Some(stored) = stored else {
        let (container, interface) = (attachment.container.as_str(), attachment.interface.as_str());
        let message = format!("container {container} has no address on {interface}");
        return Err(CniError::unknown_container(message));
    };
    let has = &stored.record.addresses;
    log.report(has, "as ADD left it");
    if let (Some(conf), Some(binding)) = (&verb.sticky.cluster, &stored.record.binding) {
        crate::plugin::cluster::del::check(conf, binding, attachment)?;
    }
    let Some(prev) = &request.config.prev_result else { return Ok(()) };
    let previous: Vec<_> = prev.ips.iter().map(|ip| ip.address.addr()).collect();
    let failed = |why: String| Err(CniError::new(code::CHECK_FAILED, why));
    let ours = |ip: &std::net::IpAddr| verb.ipam.sets.iter().any(|set| set.contains(*ip).is_some());
    if let Some(ip) = previous.iter().find(|ip| ours(ip) && !has.contains(ip)) {
        return failed(format!("prevResult has {ip}, which is of this network but not of this container"));
    }
    // An address of ours that prevResult lacks is no failure: a later plugin of the chain may have changed
    // it.
    Ok(())
}
