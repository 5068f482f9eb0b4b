//! CHECK: the container still has what ADD gave it.

use std::net::IpAddr;

use crate::cni::{CniError, code};
use crate::plugin::cluster::del;
use crate::plugin::{VerbContext, VerbLog};
use crate::store::Disk;

pub(crate) fn run<D: Disk>(verb: &VerbContext<'_, D>, log: &mut VerbLog<'_>) -> Result<(), CniError> {
    let attachment = verb.attachment()?;
    let Some(record) = verb.record()? else {
        let (container, interface) = (attachment.container.as_str(), attachment.interface.as_str());
        let message = format!("container {container} has no address on {interface}");
        return Err(CniError::new(code::UNKNOWN_CONTAINER, message));
    };
    let has = &record.addresses;
    log.report(has, "as ADD left it");
    if let (Some(conf), Some(binding)) = (&verb.sticky.cluster, &record.binding) {
        del::check(conf, binding, attachment)?;
    }
    let Some(prev) = &verb.request.config.prev_result else { return Ok(()) };
    let is_foreign =
        |ip: &IpAddr| verb.ipam.sets.iter().any(|set| set.contains(*ip).is_some()) && !has.contains(ip);
    // An address of ours that prevResult lacks is no failure: a later plugin of the chain may change it.
    let Some(ip) = prev.addresses().into_iter().find(is_foreign) else { return Ok(()) };
    let message = format!("prevResult has {ip}, which is of this network but not of this container");
    Err(CniError::new(code::CHECK_FAILED, message))
}
